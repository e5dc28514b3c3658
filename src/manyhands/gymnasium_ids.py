"""The environments of this package under their Gymnasium ids.

    manyhands/PendulumSwingUp-v0     `sparse=False` or `True`; see envs/pendulum_swing_up.py
    manyhands/Go9x9-v0               `opponent="random"` or an engine; see envs/go.py
    manyhands/CartPole-v1            Gymnasium's own, and with the backend "torch" the same as
    manyhands/Pendulum-v1            tensors; see envs/tensors.py

Gymnasium has had no plug-ins since 1.0: an id is known once somebody has registered it. Importing
`manyhands.envs` does, and so does `import manyhands` next to `import gymnasium`, whichever comes
first. Nothing heavy is loaded for it: an environment's module is imported when one is made.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import importlib.util
import sys
from types import ModuleType
from typing import Any

_CLASSIC = "gymnasium.envs.classic_control"
IDS: dict[str, dict[str, Any]] = {
    "manyhands/PendulumSwingUp-v0": {
        "entry_point": "manyhands.envs.pendulum_swing_up:PendulumSwingUp"
    },
    "manyhands/Go9x9-v0": {"entry_point": "manyhands.envs.go:Go9x9"},
    "manyhands/CartPole-v1": {
        "entry_point": f"{_CLASSIC}.cartpole:CartPoleEnv",
        "max_episode_steps": 500,
        "reward_threshold": 475.0,
    },
    "manyhands/Pendulum-v1": {
        "entry_point": f"{_CLASSIC}.pendulum:PendulumEnv",
        "max_episode_steps": 200,
    },
}


def register() -> None:
    """Make the ids known to Gymnasium; doing it again changes nothing."""
    import gymnasium

    for name, how in IDS.items():
        if name not in gymnasium.registry:
            gymnasium.register(name, **how)


def register_with_gymnasium() -> None:
    """Register now if Gymnasium is loaded, otherwise as soon as it is: never import it for this."""
    if hasattr(sys.modules.get("gymnasium"), "register"):
        register()
    elif "gymnasium" not in sys.modules:
        sys.meta_path.insert(0, _AfterGymnasium())


class _AfterGymnasium(importlib.abc.MetaPathFinder):
    """Waits for the import of Gymnasium, leaves it to whoever finds it, and registers after it."""

    def find_spec(
        self, fullname: str, path: Any = None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname != "gymnasium":
            return None
        sys.meta_path.remove(self)  # once is enough, and the search below must not meet us again
        spec = importlib.util.find_spec(fullname)
        if spec is not None and spec.loader is not None:
            load = spec.loader.exec_module

            def load_and_register(module: ModuleType) -> None:
                load(module)
                register()

            spec.loader.exec_module = load_and_register  # type: ignore[method-assign]
        return spec

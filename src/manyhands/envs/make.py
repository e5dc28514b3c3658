"""Making environments: `make_vec` for training, `seeded_vector` for a loop of your own."""

from __future__ import annotations

from collections.abc import Sequence
from numbers import Integral
from typing import Any, Literal, get_args

import gymnasium
import numpy as np
from gymnasium.vector import SyncVectorEnv, VectorEnv, VectorWrapper

from manyhands import seeding
from manyhands.envs.adapter import BoxActions, VecAdapter
from manyhands.envs.loop import EnvLoop
from manyhands.envs.registry import EnvSource, env_factory, friendly_errors, is_atari, resolve
from manyhands.envs.vector import VectorAdapter
from manyhands.errors import ConfigError

Backend = Literal["auto", "gymnasium", "vector", "envpool", "atari"]


def make_vec(
    env: EnvSource | VectorEnv,
    num_envs: int,
    *,
    backend: Backend = "auto",
    seed: int | None = None,
    worker: int = 0,
    box_actions: BoxActions = "clip",
    check_finite: bool = True,
    **env_kwargs: Any,
) -> VecAdapter:
    """`num_envs` environments that give clean transitions; see `adapter.py`.

    Args:
        env: a Gymnasium id, "package.module:function", a callable returning a `gymnasium.Env`
            (or a `VectorEnv`), or a `VectorEnv`.
        num_envs: sub-environments of this worker.
        backend: "gymnasium" steps Python environments in a loop; "vector" uses the environment's
            own vector implementation; "envpool" and "atari" are C++ engines. "auto" takes "atari"
            for ALE's games, "vector" for a `VectorEnv`, and "gymnasium" for all others.
        seed, worker: root of the seed tree and this worker's branch of it.
        box_actions: "clip", "scale" or "raw"; see `ActionMap`.
        check_finite: refuse NaN and infinity, naming env, episode, step and seed.
        env_kwargs: handed to the environment.
    """
    if backend not in get_args(Backend):
        raise ConfigError(f"backend={backend!r} is not known; choose from {get_args(Backend)}")
    if num_envs < 1:
        raise ConfigError(f"num_envs={num_envs}; at least 1 is needed")
    common: dict[str, Any] = {
        "seed": seed,
        "worker": worker,
        "box_actions": box_actions,
        "check_finite": check_finite,
    }
    if backend == "envpool":
        from manyhands.envs.envpool_vector import make_envpool

        return make_envpool(env, num_envs, **common, **env_kwargs)
    if isinstance(env, VectorEnv):
        return _adapt(env, num_envs, backend, common)
    source = resolve(env)
    if backend == "atari" or (backend == "auto" and is_atari(source)):
        from manyhands.envs.atari import make_atari

        return make_atari(source, num_envs, **common, **env_kwargs)
    if backend == "vector" and isinstance(source, str):
        return _adapt(_own_vector(source, num_envs, env_kwargs), num_envs, backend, common)
    factory = env_factory(source, env_kwargs)
    if isinstance(source, str):
        # WHY not for ALE: seeding one reloads the game, 0.2 s an episode.
        return EnvLoop([factory] * num_envs, episode_seeds=not is_atari(source), **common)
    first = factory()  # a callable may give either kind: only making one tells
    if isinstance(first, VectorEnv):
        return _adapt(first, num_envs, backend, common)
    if backend == "vector":
        raise ConfigError("backend='vector' needs a VectorEnv; the callable made a single env")
    return EnvLoop([lambda: first, *[factory] * (num_envs - 1)], **common)


def _adapt(env: VectorEnv, num_envs: int, backend: str, common: dict[str, Any]) -> VectorAdapter:
    if backend not in ("auto", "vector"):
        raise ConfigError(f"backend={backend!r} cannot take a VectorEnv; use 'auto' or 'vector'")
    if env.num_envs != num_envs:
        raise ConfigError(
            f"num_envs={num_envs}, but the VectorEnv has {env.num_envs} sub-environments"
        )
    return VectorAdapter(env, **common)


def _own_vector(env_id: str, num_envs: int, env_kwargs: dict[str, Any]) -> VectorEnv:
    if gymnasium.spec(env_id).vector_entry_point is None:
        raise ConfigError(
            f"{env_id} has no vector implementation of its own; use backend='gymnasium'"
        )
    with friendly_errors(env_id):
        return gymnasium.make_vec(
            env_id, num_envs, vectorization_mode="vector_entry_point", **env_kwargs
        )


class SeededVector(VectorWrapper):  # type: ignore[misc]
    """An ordinary vector env whose `reset(seed=...)` takes its seeds from the tree.

    Gymnasium gives sub-env i the seed `seed + i`, so neighbouring seeds and workers play the same
    episodes. Here sub-env i of worker w gets the seed at ("env", w, i, 0). Everything else, the
    NEXT_STEP autoreset included, is Gymnasium's own.
    """

    def __init__(self, env: VectorEnv, *, worker: int = 0) -> None:
        super().__init__(env)
        self.worker = worker
        self._pending: int | None = None

    def seeds_from(self, seed: int) -> None:
        """Let the next `reset()` that is given no seed use this one; later ones run on."""
        self._pending = seed
        self._seed_action_spaces(seed)

    def reset(
        self,
        *,
        seed: int | Sequence[int | None] | None = None,
        options: dict[str, Any] | None = None,
    ) -> tuple[Any, dict[str, Any]]:
        if seed is None:
            seed, self._pending = self._pending, None
        if seed is None or not isinstance(seed, Integral):
            return self.env.reset(seed=seed, options=options)  # type: ignore[no-any-return]
        self._pending = None
        seed = int(seed)  # a numpy number, as argument parsers may give, is a seed too
        self._seed_action_spaces(seed)
        seeds = [seeding.integer(seed, "env", self.worker, i, 0) for i in range(self.num_envs)]
        return self.env.reset(seed=seeds, options=options)  # type: ignore[no-any-return]

    def _seed_action_spaces(self, seed: int) -> None:
        self.action_space.seed(seeding.integer(seed, "action", self.worker))
        self.single_action_space.seed(seeding.integer(seed, "action", self.worker, 1))


def seeded_vector(
    env: EnvSource,
    num_envs: int,
    *,
    worker: int = 0,
    root_seed: int | None = None,
    **env_kwargs: Any,
) -> SeededVector:
    """An ordinary Gymnasium vector env for a loop of your own, seeded from the tree.

    Args:
        env: as for `make_vec`.
        num_envs: sub-environments of this worker.
        worker: this worker's number.
        root_seed: what the first `reset()` without a seed uses; None leaves it to `reset(seed=)`.
        env_kwargs: handed to the environment.
    """
    if num_envs < 1:
        raise ConfigError(f"num_envs={num_envs}; at least 1 is needed")
    source = resolve(env)
    if isinstance(source, str):
        with friendly_errors(source):
            # WHY explicit: left to itself Gymnasium takes another implementation where one exists.
            vector = gymnasium.make_vec(source, num_envs, vectorization_mode="sync", **env_kwargs)
    else:
        vector = SyncVectorEnv([env_factory(source, env_kwargs)] * num_envs)
    seeded = SeededVector(vector, worker=worker)
    if root_seed is not None:
        seeded.seeds_from(root_seed)
    return seeded


def frame_stack(env: str, backend: str, env_kwargs: dict[str, Any], space: Any) -> int:
    """How many frames each observation is a stack of, the newest last; 0 where it is none.

    Those of ALE and of EnvPool's Atari games are; of other environments' images it is not known.
    """
    shape: Any = getattr(space, "shape", None) or ()
    ale = env.startswith("ALE/") and backend in ("auto", "atari")
    if len(shape) != 3 or space.dtype != np.uint8 or not (ale or backend == "envpool"):
        return 0
    stack = int(env_kwargs.get("frame_stack" if ale else "stack_num", 4))
    return stack if shape[0] == stack and stack >= 2 else 0

"""What workers on several hosts do, in one launch an engine: `python cluster_programs.py PLAN`.

Each writes what it has seen into the plan's folder, as NUMBER.json.
"""

from __future__ import annotations

import json
import os
import socket
import sys
from pathlib import Path
from typing import Any
from unittest import mock


def wide_observations() -> Any:
    """An environment whose rows are long, so that what is sent is rows."""
    import gymnasium as gym
    import numpy as np

    class Wide(gym.Env[Any, Any]):
        observation_space = gym.spaces.Box(-1, 1, (256,), np.float32)
        action_space = gym.spaces.Discrete(2)

        def reset(self, **options: Any) -> Any:
            super().reset(**options)
            self._steps = 0
            return self.observation_space.sample(), {}

        def step(self, action: Any) -> Any:
            self._steps += 1
            return self.observation_space.sample(), 1.0, False, self._steps == 100, {}

    return Wide()


def main(path: str) -> None:
    from manyhands import run
    from manyhands.agent import _Named
    from manyhands.engines.attach import attach

    plan = json.loads(Path(path).read_text())
    worker = attach(plan.get("timeout", 60.0))
    told: dict[str, Any] = {"host": socket.gethostname(), "listens": listening()}
    for case in plan["runs"]:
        # Each has its own channels and weights.
        with mock.patch.object(run, "attach", return_value=_Named(worker)):
            run.train_worker(case)
    if "measured" in plan:
        told |= measured(plan["measured"])
    place = worker.place
    told |= {"place": [place.rank, place.size, place.local_rank, place.local_size, place.host]}
    Path(path).with_name(f"{place.rank}.json").write_text(json.dumps(told))


def measured(case: dict[str, Any]) -> dict[str, Any]:
    """A run, and the bytes that passed this host's interface between its first and last update."""
    from manyhands import run, trees
    from manyhands.engines.group import Group
    from manyhands.strategies.context import Context
    from manyhands.strategies.progress import RunProgress

    seen: list[list[int]] = []
    close_update = RunProgress.close_update

    def counted(self: Any, *args: Any, **options: Any) -> None:
        close_update(self, *args, **options)
        seen.append(traffic())

    least: dict[str, int] = {}
    gather, share = Group.gather, Context.share_weights

    def gathered(self: Any, tree: Any, root: int = 0) -> Any:
        size = sum(leaf.array.nbytes for leaf in trees.flatten(tree)[0])
        least["rows"] = max(size, least.get("rows", 0))
        return gather(self, tree, root)

    def shared(self: Any) -> None:
        least["weights"] = self.algorithm.flat.data.nbytes
        share(self)

    with (
        mock.patch.object(RunProgress, "close_update", counted),
        mock.patch.object(Group, "gather", gathered),
        mock.patch.object(Context, "share_weights", shared),
    ):
        run.train_worker(case)
    return {"traffic": seen, **least}


def traffic() -> list[int]:
    """Bytes received and sent on eth0, ever since."""
    for line in Path("/proc/net/dev").read_text().splitlines():
        name, _, numbers = line.partition(":")
        if name.strip() == "eth0":
            fields = numbers.split()
            return [int(fields[0]), int(fields[8])]
    return [0, 0]


def listening() -> list[str]:
    """Addresses on which something on this host listens, but for the loopback."""
    found = []
    for table in ("/proc/net/tcp", "/proc/net/tcp6"):
        for line in Path(table).read_text().splitlines()[1:] if os.path.exists(table) else ():
            fields = line.split()
            address = fields[1].partition(":")[0]
            if fields[3] == "0A" and address not in ("0100007F", "0" * 24 + "01000000"):
                found.append(fields[1])
    return sorted(found)


if __name__ == "__main__":
    main(sys.argv[1])

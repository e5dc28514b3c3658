"""Runs that are stopped and resumed, and what must be equal afterwards."""

from __future__ import annotations

import csv
import json
import random
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any, ClassVar

import gymnasium
import numpy as np

from manyhands import seeding
from manyhands.config import build, to_plain
from manyhands.experiment import checkpoint

WALL = ("wall_seconds", "steps_per_second", "phases")  # what a clock decides

SMALL: dict[str, dict[str, Any]] = {
    "a2c": {},
    "ppo": {"minibatch": 48, "epochs": 2, "learning_rate": "linear:3e-3"},
    "trpo": {"value_minibatch": 48, "value_epochs": 2},
}
ENVS: dict[str, dict[str, Any]] = {
    "CartPole-v1": {},
    "Pendulum-v1": {"normalize_observations": True, "normalize_rewards": True},
}


def configuration(algorithm: str, strategy: str, env: str, folder: Path, **more: Any) -> Any:
    """Eight updates of 96 steps, as plain data; episodes run across many of them."""
    values: dict[str, Any] = {
        "env": env,
        "strategy": strategy,
        "workers": 1 if strategy == "single" else 2,
        "num_envs": 6,
        "rollout_length": 16,
        "steps": 8 * 96,
        "run_dir": str(folder),
        "hidden": (16, 16),
        "quiet": True,
        "tensorboard": False,
    }
    return to_plain(build(algorithm, **values | SMALL[algorithm] | ENVS.get(env, {}) | more))


UPDATES_LEFT = [0]  # of the main worker, until it is asked to stop


def stop_word() -> int:
    """In place of `stopping.asked`: SIGTERM comes while a certain update runs."""
    from manyhands.engines.attach import attach

    if attach().place.rank == 0:
        UPDATES_LEFT[0] -= 1
    return int(signal.SIGTERM) if UPDATES_LEFT[0] == 0 else 0


def stop_and_resume(cases: list[list[Any]]) -> dict[str, list[float]]:
    """One worker's life in (run, the same run stopped after some updates and resumed), by case.

    What its environments drew in the run that was not stopped, if they are gamblers.
    """
    import torch  # noqa: F401 (there, so that its generator is seeded too)

    from manyhands.engines import stopping
    from manyhands.engines.attach import attach
    from manyhands.run import train_worker

    place = attach().place
    if place.engine != "inline":  # there it is the whole test's module
        stopping.asked = stop_word
    drawn: dict[str, list[float]] = {}
    for whole, halved, after in cases:
        for plain, stop in ((whole, 0), (halved, after)) if halved else ((whole, 0),):
            seeding.seed_everything(7 + stop, place.rank)  # in new processes: anywhere
            if place.rank == 0:
                UPDATES_LEFT[0] = stop
            mine = Gambler.drawn[place.rank] = []
            summary = train_worker(plain)
            if plain is whole:
                drawn[str(Path(whole["run"]["run_dir"]).name)] = mine
        if halved is None:
            continue
        assert summary["exit"] == "stopped: SIGTERM", summary
        seeding.seed_everything(6, place.rank)
        attach().group.barrier()
        found, _ = checkpoint.newest(halved["run"]["run_dir"])
        assert found.facts["update"] == after - bool(halved["run"]["overlap"])
        again = train_worker(halved, {"checkpoint": str(found.path), "notes": []})
        assert again["exit"] == "finished", again
    return drawn


# -- what is compared ------------------------------------------------------------------------------


def left_in(folder: Path) -> dict[str, Any]:
    """All that a run leaves, but for what a clock decides."""
    found, damaged = checkpoint.newest(folder)
    assert not damaged
    with open(folder / "episodes.csv", newline="") as file:
        episodes = [without_clock(row) for row in csv.DictReader(file)]
    with open(folder / "metrics.csv", newline="") as file:
        table = [without_clock(row) for row in csv.DictReader(file)]
    lines = (folder / "metrics.jsonl").read_text().splitlines()
    return {
        "state": without_clock(found.state),
        "policy": (folder / "policy.safetensors").read_bytes(),
        "metrics": [without_clock(json.loads(line)) for line in lines],
        "table": table,
        "episodes": episodes,
        "config": (folder / "config.toml").read_text(),
    }


def without_clock(x: Any) -> Any:
    if isinstance(x, dict):
        return {
            k: without_clock(v)
            for k, v in x.items()
            if k not in WALL and not k.startswith("seconds/")
        }
    return [without_clock(v) for v in x] if isinstance(x, list) else x


def check_same(one: Any, other: Any, path: str = "") -> None:
    """Equal to the bit, everywhere; AssertionError names the place."""
    if isinstance(one, dict):
        assert list(one) == list(other), path
        for key in one:
            check_same(one[key], other[key], f"{path}/{key}")
    elif isinstance(one, list):
        assert len(one) == len(other), path
        for i, (a, b) in enumerate(zip(one, other, strict=True)):
            check_same(a, b, f"{path}/{i}")
    elif hasattr(one, "shape"):
        a, b = np.asarray(one), np.asarray(other)
        assert (a.dtype, a.shape) == (b.dtype, b.shape), path
        assert a.tobytes() == b.tobytes(), path
    else:
        assert type(one) is type(other), path
        assert one == other or one != one, f"{path}: {one!r} and {other!r}"


# -- runs that faults happen to -------------------------------------------------------------------

TINY: dict[str, Any] = {
    "env": "CartPole-v1", "num_envs": 4, "rollout_length": 16, "hidden": (16,), "quiet": True,
    "tensorboard": False, "engine": "inline", "checkpoint_seconds": 0.0,
}  # fmt: skip


def events(folder: Path, kind: str) -> list[dict[str, Any]]:
    lines = (folder / "events.jsonl").read_text().splitlines()
    return [event for event in map(json.loads, lines) if event["event"] == kind]


def summary(folder: Path) -> dict[str, Any]:
    return dict(json.loads((folder / "summary.json").read_text()))


def at_update(monkeypatch: Any, acts: dict[int, Any]) -> None:
    """Let something happen on the main worker while an update is written down."""
    from manyhands.experiment import records

    real = records.Records.update

    def update(self: Any, steps: int, updates: int, *more: Any) -> None:
        real(self, steps, updates, *more)
        if self.folder.path is not None and updates in acts:
            acts[updates]()

    monkeypatch.setattr(records.Records, "update", update)


def start(*words: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "manyhands.cli.main", *words],
        stderr=subprocess.PIPE, text=True, start_new_session=True,
    )  # fmt: skip


def until(true: Any, process: subprocess.Popen[str]) -> None:
    deadline = time.monotonic() + 150
    while not true():
        assert process.poll() is None, process.communicate()[1]
        assert time.monotonic() < deadline
        time.sleep(0.02)


# -- environments ----------------------------------------------------------------------------------


class Forgetful(gymnasium.Env):  # type: ignore[misc]
    """Where it goes depends on nothing that a seed decides: it cannot be played again."""

    born = 0

    def __init__(self) -> None:
        self.observation_space = gymnasium.spaces.Box(-1e9, 1e9, (1,), np.float64)
        self.action_space = gymnasium.spaces.Discrete(2)

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        super().reset(seed=seed)
        return self._next(), {}

    def step(self, action: Any) -> Any:
        return self._next(), 1.0, False, False, {}

    def _next(self) -> Any:
        Forgetful.born += 1
        return np.array([float(Forgetful.born)])


class Remembers(gymnasium.Env):  # type: ignore[misc]
    """Counts steps over all its episodes, draws from its generator, and can say its state."""

    def __init__(self) -> None:
        self.observation_space = gymnasium.spaces.Box(-1e9, 1e9, (3,), np.float64)
        self.action_space = gymnasium.spaces.Discrete(2)
        self.ever, self.here, self.draw = 0, 0, 0.0

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        super().reset(seed=seed)
        self.here = 0
        return self._seen(), {}

    def step(self, action: Any) -> Any:
        self.ever, self.here = self.ever + 1, self.here + 1
        return self._seen(), float(action), self.here == 100, False, {}

    def get_state(self) -> Any:
        return {"ever": self.ever, "here": self.here, "tuple": (1, 2)}

    def set_state(self, state: Any) -> None:
        self.ever, self.here = state["ever"], state["here"]

    def _seen(self) -> Any:
        return np.array([self.ever, self.here, self.np_random.random()])


class Gambler(gymnasium.Env):  # type: ignore[misc]
    """Draws from every generator that a process shares, and from none of its own."""

    drawn: ClassVar[dict[int, list[float]]] = {}  # by worker

    def __init__(self, keeps_itself: bool = False) -> None:
        self.observation_space = gymnasium.spaces.Box(-1e9, 1e9, (4,), np.float64)
        self.action_space = gymnasium.spaces.Discrete(2)
        self.born = self.luck = random.random() + np.random.random()
        self.remembers = keeps_itself
        if keeps_itself:
            self.get_state = lambda: {"luck": self.luck, "born": self.born}
            self.set_state = lambda state: self.__dict__.update(state)

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        self.luck = self.luck if self.remembers else self.born
        return self._seen(), {}

    def step(self, action: Any) -> Any:
        seen = self._seen()
        return seen, float(seen[1] * action), bool(seen[0] < 0.05), False, {}

    def _seen(self) -> Any:
        import torch

        from manyhands.engines.attach import attach

        fresh = [random.random(), float(np.random.normal()), float(torch.rand(()))]
        Gambler.drawn.setdefault(attach().place.rank, []).extend(fresh)
        self.luck = (self.luck + fresh[0]) % 1.0
        return np.array([*fresh, self.luck])


def gambler(**kwargs: Any) -> Any:
    return Gambler(**kwargs)


def forgetful(**_: Any) -> Any:
    return Forgetful()


def remembers(**_: Any) -> Any:
    return gymnasium.wrappers.TimeLimit(Remembers(), 17)

"""Whole training runs in tests: what the workers do, and one launch that many tests look at."""

from __future__ import annotations

import contextlib
import csv
import functools
import json
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import gymnasium
import numpy as np
from once import once, shared_folder
from suite import suite

from manyhands import launch, support
from manyhands.algorithms.registry import SPECS
from manyhands.config import build, to_plain
from manyhands.engines.attach import attach

ENVS, LENGTH, UPDATES = 6, 16, 3  # six go into one, two and three workers
SMALL: dict[str, dict[str, Any]] = {
    "a2c": {},
    "ppo": {"minibatch": 32, "epochs": 4},
    "trpo": {"value_minibatch": 32, "value_epochs": 4},
}
for _name, _spec in SPECS.items():
    if _spec.learns_from == "replay":
        SMALL[_name] = {"learning_starts": 32, "batch_size": 16, "hidden": (64, 64)}
    if _spec.actions == "bounded":
        SMALL[_name] |= {"env": "manyhands/Identity-v0", "env_kwargs": {"kind": "box"}}
WAYS = (20, 32)  # steps and rows
NORMALISED = {"normalize_observations": True, "normalize_rewards": True}
MASKED = {
    "env": "manyhands/Masked-v0",
    "env_kwargs": {"actions": 12, "where": "info", "length": 7},
    "lstm": 8,
}


@dataclass(frozen=True)
class Trained:
    """What a run has left in its folder."""

    summary: dict[str, Any]
    metrics: list[dict[str, Any]]
    episodes: list[dict[str, str]]
    episode_header: list[str]
    config: str
    policy: dict[str, Any]
    files: list[str]


def configuration(
    algorithm: str, strategy: str, engine: str, workers: int, run_dir: str, **more: Any
) -> dict[str, Any]:
    """A run of three updates as plain data."""
    values: dict[str, Any] = {
        "env": "CartPole-v1",
        "num_envs": ENVS,
        "rollout_length": LENGTH,
        "steps": UPDATES * ENVS * LENGTH,
        "quiet": True,
        "timeout": 60.0,
    }
    values |= SMALL.get(algorithm, {}) | more
    experiment = build(
        algorithm, strategy=strategy, engine=engine, workers=workers, run_dir=run_dir, **values
    )
    return to_plain(experiment)


def cells(workers: int) -> list[tuple[str, str]]:
    """(algorithm, strategy) of every cell that the support table says is there, for strategies in
    which all workers do the same; tests/contracts/test_async.py has the others."""
    return [
        (algorithm, strategy)
        for algorithm in support.ALGORITHMS
        for strategy in support.strategies_of(algorithm)
        if strategy in ("single", "gather", "allreduce")
        if (strategy == "single") == (workers == 1)
    ]


@functools.cache
def trained(engine: str, workers: int, launched: int = 0) -> dict[str, Trained]:
    """Every cell on one engine, twice, in one launch; `launched` tells two launches apart.

    Names: "ppo-gather", "ppo-gather-again", and for PPO "ppo-gather-normalised" with normalisers,
    "ppo-gather-masked" with masks of actions and an LSTM.
    """
    folders = map(Path, one_launch(engine, workers, launched)["folders"])
    return {folder.name: read_run(folder) for folder in folders}


def told(engine: str, name: str) -> list[Any]:
    """What each of two workers answers to another program in the launch of `trained`, by rank."""
    return [answer[name] for answer in one_launch(engine, 2, 0)["told"]]


def folder_of(engine: str, workers: int) -> Path:
    """Where the runs of a launch lie."""
    one_launch(engine, workers, 0)
    return _folder(engine, workers, 0)


def _folder(engine: str, workers: int, launched: int) -> Path:
    return shared_folder() / f"{engine}-{workers}-{launched}"


@once
def one_launch(engine: str, workers: int, launched: int) -> dict[str, Any]:
    """The folders of the runs, and what workers tell: several files of tests look at them."""
    folder = _folder(engine, workers, launched)
    cases = []
    for algorithm, strategy in cells(workers):
        name = f"{algorithm}-{strategy}"
        todo = [(name, {}), (f"{name}-again", {})]
        if algorithm == "ppo":
            todo += [(f"{name}-normalised", NORMALISED), (f"{name}-masked", MASKED)]
        cases += [
            configuration(algorithm, strategy, engine, workers, str(folder / name), **more)
            for name, more in todo
        ]
    plan = [
        ["trained", "training_programs:train_all", cases],
        ["ways", "programs:train_all_ways", *WAYS],
    ]
    if workers == 2 and launched == 0:
        own = own_networks(engine, folder / "own networks")
        plan.append(["own networks", "training_programs:train_all", own])
        on_gpus = [
            configuration("a2c", s, engine, 2, str(folder / f"{s} on GPUs"), device="cuda")
            for s in ("gather", "allreduce")
        ]
        plan.append(["devices", "device_programs:devices_of", on_gpus])
    with as_in_a_worker():
        answers = launch(suite, plan, workers=workers, engine=engine, timeout=60)
    return {"folders": [case["run"]["run_dir"] for case in cases], "told": answers}


# Networks of the user's own, with strategies whose workers act and learn together.
OWN_NETWORKS = {
    "gather, features": ("ppo", "gather", "Features", {"minibatch": 16}),
    "gather, policy and value": ("a2c", "gather", "PolicyValue", {}),
    "allreduce, features": ("trpo", "allreduce", "Features", {"value_minibatch": 16}),
    "allreduce, policy and value": ("trpo", "allreduce", "PolicyValue", {"value_minibatch": 16}),
}


def own_networks(engine: str, folder: Path) -> list[dict[str, Any]]:
    kwargs = {"kind": "vector", "continuous": False}
    return [
        configuration(
            algorithm, strategy, engine, 2, str(folder / name), env="own_networks:Seen",
            env_kwargs=kwargs, network=f"own_networks:{network}", network_kwargs={"width": 5},
            num_envs=4, rollout_length=16, steps=192, **more,
        )
        for name, (algorithm, strategy, network, more) in OWN_NETWORKS.items()
    ]  # fmt: skip


def train_all(cases: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """One worker's life in several runs, one after the other."""
    from manyhands.run import train_worker
    from manyhands.strategies import allreduce

    if attach().place.engine != "inline":  # there it is the whole test's module
        allreduce.CHECK_EVERY = 1
    return [train_worker(case) for case in cases]


def read_run(folder: Path) -> Trained:
    from safetensors.numpy import load_file

    with open(folder / "episodes.csv", newline="") as file:
        reader = csv.DictReader(file)
        episodes = list(reader)
    return Trained(
        summary=json.loads((folder / "summary.json").read_text()),
        metrics=[json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()],
        episodes=episodes,
        episode_header=list(reader.fieldnames or []),
        config=(folder / "config.toml").read_text(),
        policy=load_file(folder / "policy.safetensors"),
        files=sorted(path.name for path in folder.iterdir()),
    )


def initial_weights(run: Trained) -> dict[str, Any]:
    """The weights that a run began with, by the names of its policy file."""
    import tomllib

    from manyhands.config import from_plain
    from manyhands.envs import make_vec
    from manyhands.policy import build_model

    experiment = from_plain(tomllib.loads(run.config))
    envs = make_vec(experiment.run.env, 1)
    model = build_model(experiment, envs.observation_space, envs.action_space)
    envs.close()
    return {f"model/{name}": value.numpy() for name, value in model.state_dict().items()}


def act_with(run: Trained, observation: Any) -> Any:
    """The action of a run's policy, loaded from a folder as a user loads it."""
    from safetensors.numpy import save_file

    import manyhands

    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "config.toml").write_text(run.config)
        save_file(run.policy, Path(folder, "policy.safetensors"))
        return manyhands.load(folder).act(observation)


@contextlib.contextmanager
def as_in_a_worker() -> Iterator[None]:
    """For the inline engine, which has no process of its own: what `train_all` sets in others.

    One torch thread: networks this small only wait for a second. Replicas compared to the bit
    after every update, not after every 100th.
    """
    import torch

    from manyhands.strategies import allreduce

    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        with mock.patch.object(allreduce, "CHECK_EVERY", 1):
            yield
    finally:
        torch.set_num_threads(threads)


# -- unequal parts ---------------------------------------------------------------------------------


def learn_from_parts(name: str, parts: list[int], updates: int) -> Any:
    """Updates on one random batch, of which this worker holds `parts[rank]` rows; weights."""
    from manyhands.algorithms.base import Alone
    from manyhands.engines.group import OverGroup
    from manyhands.experiment.bottleneck import Phases
    from manyhands.trees import take
    from manyhands.types import Batch

    group = attach().group
    algorithm = learner(name)
    rng = np.random.default_rng(5)
    first = sum(parts[: group.rank])
    mine = np.arange(first, first + parts[group.rank])
    across = OverGroup(group, Phases()) if group.size > 1 else Alone()
    for _ in range(updates):
        batch: Batch = random_batch(algorithm, sum(parts), rng)
        algorithm.update(take(batch, mine), across, progress=0.0)
    return algorithm.flat.data.numpy().copy()


def learner(name: str) -> Any:
    from gymnasium.spaces import Box, Discrete

    from manyhands.networks.build import build_actor_critic

    model = build_actor_critic(Box(-1, 1, (4,)), Discrete(3), hidden=(16, 16), seed=3)
    return SPECS[name].load()(model, SPECS[name].options(**SMALL[name]), seed=1)


def random_batch(algorithm: Any, rows: int, rng: np.random.Generator) -> Any:
    obs = rng.standard_normal((rows, 4)).astype(np.float32)
    acted = algorithm.actor.act(obs, rng)
    # WHY copied: what an actor gives may be memory that its next call overwrites
    return {
        "obs": obs,
        "action": acted.actions.copy(),
        "logp": acted.logp.copy(),
        "value": acted.values.copy(),
        "parameters": acted.parameters.copy(),
        "advantage": (obs[:, 0] * (acted.actions == 1) + obs[:, 1]).astype(np.float32),
        "target": (obs.sum(1) + rng.standard_normal(rows)).astype(np.float32),
    }


# -- environments that go wrong --------------------------------------------------------------------


class Breaks(gymnasium.Env):  # type: ignore[misc]
    """Raises in the step numbered `at` of its first episode."""

    def __init__(self, at: int = 20) -> None:
        self.observation_space = gymnasium.spaces.Box(-1.0, 1.0, (2,), np.float32)
        self.action_space = gymnasium.spaces.Discrete(2)
        self.at, self._steps = at, 0

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        super().reset(seed=seed)
        return np.zeros(2, np.float32), {}

    def step(self, action: Any) -> Any:
        self._steps += 1
        if self._steps == self.at:
            raise ZeroDivisionError("the simulator has exploded")
        return np.zeros(2, np.float32), 1.0, False, False, {}


def breaks(**kwargs: Any) -> Breaks:
    return Breaks(**kwargs)

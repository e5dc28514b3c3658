"""The launch of five workers an engine: strategies in which some act and others learn.

Every file of tests that needs such workers looks at what one launch has left.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import agent_programs
from answers import OVER_THE_NETWORK
from once import once, shared_folder
from suite import suite

from manyhands import launch
from manyhands.config import build, to_plain

ROLES, WORKERS = "learner=2,actor=3", 5  # of agents; runs have their own
Case = tuple[str, dict[str, Any]]  # algorithm and options

# -- runs ------------------------------------------------------------------------------------------

COMMON: dict[str, Any] = {
    "env": "CartPole-v1", "quiet": True, "tensorboard": False, "timeout": 60.0,
}  # fmt: skip
SMALL = COMMON | {"num_envs": 6, "rollout_length": 16, "steps": 3000}
SMALL_REPLAY = COMMON | {
    "num_envs": 4, "steps": 1200, "hidden": (16, 16), "learning_starts": 200, "batch_size": 32,
    "updates_per_step": 0.25, "rollout_length": 16,
}  # fmt: skip
OWN = COMMON | {
    "env": "own_networks:Seen", "num_envs": 4, "rollout_length": 16, "network_kwargs": {"width": 5},
    # Workers do not take turns: enough that all have acted before the first is done.
    "steps": 1500,
}  # fmt: skip

ASYNC: dict[str, Case] = {
    # Two that act are enough for two reducers.
    "a3c, two levels": (
        "a2c", SMALL | {"strategy": "gradient_server", "pushes": 4, "reducers": 2},
    ),
    "impala, two learners": ("impala", SMALL | {"learners": 2, "normalize_observations": True}),
    "a target": ("impala", SMALL | {"num_envs": 4, "target_return": 10.0, "steps": 50_000}),
}  # fmt: skip
# The last actor is slowed down a hundred times.
LAG = SMALL | {
    "env": "async_programs:slow_cartpole", "num_envs": 4, "rollout_length": 4, "hidden": (8,),
    "max_lag": 8, "queue": 1, "log_every": 1, "steps": 5_000,
}  # fmt: skip
LAGGING: dict[str, Case] = {
    "actor_learner, one is slow": ("impala", LAG | {"unrolls": 1}),
    "gradient_server, one is slow": ("a2c", LAG | {"strategy": "gradient_server"}),
}
APEX: dict[str, Case] = {
    "dqn": ("dqn", SMALL_REPLAY),
    "dqn, two learners": ("dqn", SMALL_REPLAY | {"num_envs": 6, "learners": 2, "dueling": True}),
    "ddpg": ("ddpg", SMALL_REPLAY | {"env": "Pendulum-v1", "noise_kind": "ou"}),
}


def with_own_network(algorithm: str, strategy: str, network: str) -> dict[str, Any]:
    """Options of a run with one of the networks of `own_networks`."""
    kwargs = {"kind": "vector", "continuous": algorithm == "ddpg"}
    options = {"strategy": strategy, "network": f"own_networks:{network}", "env_kwargs": kwargs}
    replay = {"learning_starts": 32, "batch_size": 8, "replay_size": 500}
    return OWN | options | (replay if strategy == "apex" else {})


APART = {
    "gradient_server, policy and value": ("a2c", "gradient_server", "PolicyValue"),
    "actor_learner, policy and value": ("impala", "actor_learner", "PolicyValue"),
    "apex, Q values": ("dqn", "apex", "QValues"),
    "gradient_server, features": ("a2c", "gradient_server", "Features"),
    "actor_learner, features": ("impala", "actor_learner", "Features"),
    "apex, features": ("ddpg", "apex", "Features"),
}
RUNS: dict[str, Case] = ASYNC | LAGGING | APEX
RUNS |= {name: (case[0], with_own_network(*case)) for name, case in APART.items()}

# What differs little from what runs there anyway is for the slow tests.
SLOW: dict[str, list[str]] = {
    "local": [name for name, case in APART.items() if case[2] == "Features"],
    "ray": ["impala, two learners", "dqn, two learners", *APART],
    "mpi": [],
    "torch": [],
}
ONE_OF_EACH = ["a3c, two levels", "impala, two learners", "dqn, two learners"]
NEVER = {"local": ["dqn"], "ray": ["a target", "ddpg", *LAGGING]}
NEVER |= {e: [name for name in RUNS if name not in ONE_OF_EACH] for e in ("mpi", "torch")}


def names(engine: str, slow: bool) -> list[str]:
    """The runs of a launch."""
    if slow:
        return SLOW[engine]
    return [name for name in RUNS if name not in SLOW[engine] + NEVER[engine]]


def folder_of(engine: str, name: str) -> Path:
    """What a run has left."""
    slow = name in SLOW[engine]
    five_workers(engine, slow)
    return _folder(engine, slow) / name


def _folder(engine: str, slow: bool) -> Path:
    return shared_folder() / f"five-{engine}-{slow}"


# -- pushes to a gradient server -------------------------------------------------------------------

MAX_LAG = 4


@dataclass(frozen=True)
class Pushes:
    """How often the workers push in all, and how it is added up."""

    count: int
    levels: int  # with two, two of those that push add up for the others
    reduce: str
    lag: bool = False  # workers pull only now and then: what is too old is refused

    @property
    def together(self) -> int:
        """Pushes that make an update."""
        return 1 if self.lag and self.levels == 1 else 4

    @property
    def slow(self) -> bool:
        return self.count == 10_000

    @property
    def name(self) -> str:
        return f"{self.count} {'old ' * self.lag}{self.reduce}, levels {self.levels}"

    def program(self, acting: int) -> list[Any]:
        """What workers run, of whom all but the owner push."""
        relays, lag = [1, 2] if self.levels == 2 else [], MAX_LAG if self.lag else -1
        what = [self.name, self.count // acting, self.together, self.reduce, relays, lag]
        return [self.name, "async_programs:push_many", *what]


APPLIED = [
    Pushes(count, levels, reduce)
    for count in (1_000, 10_000)
    for levels in (1, 2)
    for reduce in ("mean", "sum")
]
OLD = [Pushes(count, levels, "sum", lag=True) for count in (1_600, 10_000) for levels in (1, 2)]


# -- the launch ------------------------------------------------------------------------------------


@once
def five_workers(engine: str, slow: bool) -> list[dict[str, Any]]:
    """What each worker answers to each program; runs are left in folders (`folder_of`)."""
    cases = []
    for name in names(engine, slow):
        algorithm, options = RUNS[name]
        folder = str(_folder(engine, slow) / name)
        experiment = build(algorithm, engine=engine, workers=WORKERS, run_dir=folder, **options)
        cases.append(to_plain(experiment))
    plan: list[list[Any]] = [["trained", "five_workers:train_all", cases]]
    if engine == "local" and not slow:
        plan += [case.program(WORKERS - 1) for case in APPLIED + OLD if not case.slow]
        plan.append(["learners", "agent_programs:in_roles", agent_programs.SEVERAL_LEARNERS])
    with mock.patch.dict(os.environ, OVER_THE_NETWORK if engine == "torch" else {}):
        return launch(suite, plan, roles=ROLES, engine=engine, timeout=60)


def train_all(cases: list[dict[str, Any]]) -> None:
    """One worker in several runs, one after the other: each has its own channels and weights."""
    from manyhands import run
    from manyhands.agent import _Named
    from manyhands.engines.attach import attach

    for case in cases:
        with mock.patch.object(run, "attach", return_value=_Named(attach())):
            run.train_worker(case)

"""The second launch of two workers an engine: what several files of tests look at, started once.

The first is `training_programs.one_launch`; that a second one repeats it is itself a test.
"""

from __future__ import annotations

import functools
import itertools
import random
from pathlib import Path
from typing import Any
from unittest import mock

import agent_programs
import resume_programs
from once import once, shared_folder
from resume_programs import ENVS, left_in
from suite import suite
from training_programs import WAYS, as_in_a_worker

from manyhands import launch
from manyhands.config import build, to_plain
from manyhands.engines import stopping

LEARNER_UPDATES = (40, 1000)

Left = dict[str, dict[str, Any]]


@once
def second_launch(engine: str) -> list[dict[str, Any]]:
    """What each worker answers to each program. Runs are left in folders (`left_by`)."""
    folder = shared_folder() / f"second-{engine}"
    plan: list[list[Any]] = [["ways", "programs:train_all_ways", *WAYS]]
    if engine != "inline":
        options = agent_programs.PPO | {"steps": 600}
        plan.append(["agents", "agent_programs:together", "ppo", 2, options])
    if engine == "local":
        plan += [[f"learners, {n}", "async_programs:learn_from_the_same", n, 2]
                 for n in LEARNER_UPDATES]  # fmt: skip
        plan.append(["overlap", "training_programs:train_all", list(overlaps(folder).values())])
    # From here on workers are asked to stop by `stop_word`.
    if engine in ("inline", "local"):
        cases = CELLS + (MORE if engine == "inline" else [])
        plan.append(["resumed", "resume_programs:stop_and_resume", resumed(engine, cases, folder)])
    plan.append(["gamblers", "resume_programs:stop_and_resume", gamblers(engine, folder)])
    if engine == "local":  # last: the main worker leaves, the other one sees it
        plan.append(["one that left", "async_programs:served_by_one_that_left"])
    return launched(plan, engine)


def launched(plan: list[list[Any]], engine: str) -> list[dict[str, Any]]:
    with as_in_a_worker(), mock.patch.object(stopping, "asked", resume_programs.stop_word):
        return launch(suite, plan, workers=2, engine=engine, timeout=60)


def answers_of(engine: str, name: str) -> list[Any]:
    """What each worker answers to one of the programs, by rank."""
    return [answer[name] for answer in second_launch(engine)]


@functools.cache
def left_by(engine: str) -> Left:
    """What the runs of one engine have left, by their names."""
    second_launch(engine)
    folder = shared_folder() / f"second-{engine}"
    return {path.name: left_in(path) for path in sorted(folder.iterdir())}


# -- stopped and resumed ---------------------------------------------------------------------------

Case = tuple[str, str, str, str, dict[str, Any]]  # name, algorithm, strategy, environment, options

CELLS: list[Case] = [
    (f"{algorithm}-{strategy}-{env}", algorithm, strategy, env, {})
    for algorithm, strategy, env in itertools.product(
        ("a2c", "ppo", "trpo"), ("gather", "allreduce"), ENVS
    )
]
MORE: list[Case] = [
    (name, "ppo", "gather", env, options)
    for name, env, options in (
        ("overlap", "CartPole-v1", {"overlap": True}),
        ("episodes", "CartPole-v1", {"collect": "episodes", "batch_steps": 96, "steps": 2500}),
        (
            "pendulum episodes",
            "Pendulum-v1",
            {
                "collect": "episodes",
                "batch_steps": 300,
                "steps": 3000,
                "env_kwargs": {"max_episode_steps": 50},
            },
        ),
        # PPO's adaptive weight is state, too
        ("penalty", "CartPole-v1", {"kl_penalty": True, "target_kl": 0.01}),
        ("dict", "manyhands/Counter-v0", {"env_kwargs": {"as_dict": True, "longest": 60}}),
        ("scaled", "Pendulum-v1", {"box_actions": "scale", "log_every": 3}),
    )
]


def resumed(engine: str, cases: list[Case], folder: Path) -> list[list[Any]]:
    """Every case whole, and stopped after some updates and resumed."""
    rng, runs = random.Random(11), []
    for name, algorithm, strategy, env, more in cases:
        plain = [
            resume_programs.configuration(algorithm, strategy, env, path, engine=engine, **more)
            for path in (folder / name, folder / f"{name}-stopped")
        ]
        runs.append([*plain, rng.randint(1, 7)])
    return runs


@once
def resumed_elsewhere(engine: str) -> str:
    """The cells of an engine on which the default tests do not stop and resume; their folder."""
    folder = shared_folder() / f"resumed-{engine}"
    runs = resumed(engine, CELLS, folder)
    launched([["resumed", "resume_programs:stop_and_resume", runs]], engine)
    return str(folder)


@functools.cache
def left_resumed(engine: str) -> Left:
    """What they have left, by their names."""
    return {path.name: left_in(path) for path in sorted(Path(resumed_elsewhere(engine)).iterdir())}


# -- environments that draw from global generators -------------------------------------------------

GAMBLERS: dict[str, dict[str, Any]] = {
    "ppo-gather": {},
    "a2c-allreduce": {"rollout_length": 40, "steps": 8 * 240},  # past the trial of 64 steps
    "a2c-gather": {"env_kwargs": {"keeps_itself": True}},
}


def gamblers(engine: str, folder: Path) -> list[list[Any]]:
    """Of every case: a run, the same again, one with another seed and one that was stopped and
    resumed."""

    runs = []
    for name, options in GAMBLERS.items():
        case = functools.partial(
            resume_programs.configuration, *name.split("-"), "resume_programs:gambler",
            engine=engine, **options,
        )  # fmt: skip
        first, again, stopped, other = (
            folder / f"gambler-{name}-{which}" for which in ("first", "again", "stopped", "other")
        )
        runs.append([case(first), case(stopped), 5])
        runs.append([case(again), None, 0])
        runs.append([case(other, seed=2), None, 0])
    return runs


# -- learning while others collect -----------------------------------------------------------------

OVERLAP_UPDATES = 5
OVERLAP: dict[str, dict[str, Any]] = {
    "a2c": {},
    "ppo": {"minibatch": 32, "epochs": 3, "learning_rate": "linear:3e-3"},
    "trpo": {"value_minibatch": 32, "value_epochs": 3},
}


def overlap_options(name: str) -> dict[str, Any]:
    """A run of five updates."""
    return {
        "env": "CartPole-v1", "seed": 2, "quiet": True, "tensorboard": False, "num_envs": 4,
        "rollout_length": 32, "steps": 4 * 32 * OVERLAP_UPDATES, **OVERLAP[name],
    }  # fmt: skip


def overlaps(folder: Path) -> dict[str, Any]:
    """Its configuration on two workers of the local engine, by algorithm."""
    more = {"strategy": "gather", "overlap": True, "workers": 2, "engine": "local"}
    return {
        name: to_plain(
            build(name, run_dir=str(folder / f"overlap of {name}"), **more, **overlap_options(name))
        )
        for name in OVERLAP
    }

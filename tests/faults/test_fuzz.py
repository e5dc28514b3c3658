"""Whatever is typed, whatever an environment gives, whatever comes through a socket or lies on the
disk: it works, or an error says in words what is wrong and where. See fuzz.py for the bytes."""

from __future__ import annotations

import dataclasses
import json
import os
import random
import re
import subprocess
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

import fuzz_env
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import manyhands as mh
from manyhands.algorithms.registry import SPECS
from manyhands.config import RunConfig, build, validate
from manyhands.errors import ConfigError, ManyhandsError

sys.path.insert(0, str(Path(__file__).parent))
import fuzz

pytestmark = [pytest.mark.usefixtures("nothing_left")]
COUNT = int(os.environ.get("MANYHANDS_FRAMES", "1000000"))

# -- bytes -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("what", ["socket", "checkpoint"])
def test_a_thousand_hostile_inputs(what: str) -> None:
    act = fuzz.fuzz_socket if what == "socket" else fuzz.fuzz_checkpoint
    told = act(1_000, random.Random(7))
    assert told["refused"] > 0  # not all of it was nonsense, and not all was sound
    assert told["well formed" if what == "socket" else "read"] > 0


@pytest.mark.slow
@pytest.mark.timeout(7200)
@pytest.mark.parametrize("what", ["socket", "checkpoint"])
def test_a_million_hostile_inputs(what: str) -> None:
    """In a process of its own, whose memory has a limit."""
    words = [sys.executable, fuzz.__file__, what, "--count", str(COUNT)]
    done = subprocess.run(words, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    print(f"{what}: {done.stdout.strip()}")
    told = json.loads(done.stdout)
    assert sum(v for k, v in told.items() if isinstance(v, int)) >= COUNT


# -- configurations --------------------------------------------------------------------------------

FIELDS = [
    (algorithm, f.name)
    for algorithm, spec in SPECS.items()
    for config in ((RunConfig, spec.options) if algorithm == "ppo" else (spec.options,))
    for f in dataclasses.fields(config)
]
# Where results go and who is asked over the network are not for trying out at random.
NOT_TRIED = ("run_dir", "wandb", "address", "hooks", "start_from")
numbers = st.one_of(
    st.integers(-3, 40),
    st.sampled_from([2**31, 2**63, 2**64, 10**30, -(2**63)]),
    st.floats(allow_nan=True, allow_infinity=True),
    st.sampled_from([np.float32(0.5), np.int64(4), True, False]),
)
texts = st.one_of(
    st.text(max_size=6),
    st.sampled_from(["linear:1", "linear:1:0", "linear:nan", "linear:1e400", "single", "tanh"]),
    st.sampled_from(["steps", "episodes", "gather", "CartPole-v1", "a:b", "\0", "../x", "auto"]),
)
values = st.one_of(
    st.none(),
    numbers,
    texts,
    st.lists(numbers | texts, max_size=3),
    st.dictionaries(texts, numbers | texts, max_size=2),
    st.just(object()),
)


def outcome(algorithm: str, name: str, value: Any) -> tuple[str, Any]:
    """("works", the experiment) or ("refused", words)."""
    env = "Pendulum-v1" if SPECS[algorithm].actions == "bounded" else "CartPole-v1"
    given = {"env": env, "engine": "inline", name: value}
    try:
        experiment = build(algorithm, **given)
        found = validate.faults(experiment)
    except ConfigError as error:
        return "refused", str(error)
    return ("refused", "\n".join(found)) if found else ("works", experiment)


@pytest.mark.filterwarnings("ignore")
@settings(deadline=None, max_examples=250, suppress_health_check=list(HealthCheck))
@given(st.sampled_from(FIELDS), values)
def test_any_value_of_any_option(field: tuple[str, str], value: Any) -> None:
    """An error that names the option, in its own words or as it is typed; or it is accepted."""
    algorithm, name = field
    if name in NOT_TRIED:
        return
    what, said = outcome(algorithm, name, value)
    if what == "refused":
        assert named(name, said), f"{name}={value!r}: {said}"


def named(option: str, said: str) -> bool:
    """Whether an error speaks of the option: by its name, or by what it counts."""
    others = {
        "workers": ("worker",), "num_envs": ("environments", "--num-envs"), "strategy": ("single",),
        "rollout_length": ("--rollout-length", "steps of"), "minibatch": ("minibatch",),
        "lstm": ("lstm",), "env_kwargs": ("CartPole", "Pendulum", "make_vec", "argument"),
        "network_kwargs": ("network",), "collect": ("batch-steps", "episodes"),
        "normalize_observations": ("observations",), "batch_steps": ("batch_steps",),
        "learning_starts": ("earning starts", "learning-starts"), "env_backend": ("backend",),
        "replay_size": ("replay",), "batch_size": ("batch",), "device": ("GPU", "cuda"),
    }  # fmt: skip
    words = (option, option.replace("_", "-"), *others.get(option, ()))
    return any(word in said for word in words)


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.filterwarnings("ignore")
@settings(deadline=None, max_examples=300, suppress_health_check=list(HealthCheck))
@given(st.sampled_from(FIELDS), values)
def test_what_is_accepted_works(field: tuple[str, str], value: Any) -> None:
    """Two updates with it. A network or a batch larger than any memory is for another test."""
    algorithm, name = field
    large = isinstance(value, (int, float)) and not isinstance(value, bool) and abs(value) > 1e4
    if name in (*NOT_TRIED, "steps", "timeout", "device", "log_info") or large:
        return
    if isinstance(value, list) and any(isinstance(v, (int, float)) and v > 256 for v in value):
        return
    what, experiment = outcome(algorithm, name, value)
    if what == "refused":
        return
    given = {"num_envs": 2, "rollout_length": 4, "hidden": (8,), "batch_steps": 0}
    given |= {"minibatch": 8, "learning_starts": 4, "batch_size": 4, "replay_size": 64}
    options = {f.name for f in dataclasses.fields(experiment.options)}
    known = {k: v for k, v in given.items() if k in options or hasattr(experiment.run, k)}
    env = "Pendulum-v1" if SPECS[algorithm].actions == "bounded" else "CartPole-v1"
    run = {"env": env, "engine": "inline", "quiet": True, "tensorboard": False, "steps": 16}
    # An error in words will do: batches as small as these do not fit everything.
    with fuzz_env.folder() as place, suppress(ManyhandsError):
        mh.train(algorithm, **run | known | {name: value}, run_dir=place)


# -- environments ----------------------------------------------------------------------------------


@pytest.mark.filterwarnings("ignore")
@settings(deadline=None, max_examples=120, suppress_health_check=list(HealthCheck))
@given(st.sampled_from(sorted(fuzz_env.WRONG)), st.integers(0, 5), st.sampled_from(["a2c", "dqn"]))
def test_whatever_an_environment_gives(wrong: str, at: int, algorithm: str) -> None:
    """It is learned from, or an error says which environment it was, and what it gave."""
    check_env_output(wrong, at)


@pytest.mark.parametrize("wrong", sorted(fuzz_env.WRONG))
def test_each_wrong_output(wrong: str) -> None:
    check_env_output(wrong, 2)


def check_env_output(wrong: str, at: int) -> None:
    from manyhands.envs import make_vec

    envs = make_vec("fuzz_env:Wrong", 2, seed=1, wrong=wrong, at=at)
    said = ""
    try:
        obs = envs.reset()
        for _ in range(8):
            row = envs.step(np.zeros(2, np.int64))
            for got in (obs, row.obs, row.reward):
                assert got.dtype == np.float32
                assert np.isfinite(got).all()
            obs = row.obs
    except AssertionError:
        raise
    except Exception as error:
        said = " ".join([type(error).__name__, str(error), *getattr(error, "__notes__", [])])
    finally:
        envs.close()
    print(f"{wrong}: {said}")
    assert bool(said) is (wrong not in fuzz_env.HARMLESS), f"{wrong}: {said or 'not noticed'}"
    assert not said or re.search(r"env [01]\b", said), f"{wrong}: {said}"

"""A run that goes on with another number of workers: synchronous strategies end with the weights,
normalisers and episodes of one that was not stopped, but for rounding; others go on."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from resume_programs import SMALL, at_update, left_in
from safetensors.numpy import load_file

import manyhands as mh
from manyhands import trees
from manyhands.engines import stopping
from manyhands.errors import ConfigError
from manyhands.run import Paused

pytestmark = [pytest.mark.usefixtures("nothing_left")]

ENVS = 12
QUIET: dict[str, Any] = {
    "num_envs": ENVS, "rollout_length": 16, "hidden": (16, 16), "quiet": True, "tensorboard": False,
    "engine": "inline", "steps": 8 * ENVS * 16,
}  # fmt: skip
PENDULUM = {"env": "Pendulum-v1", "normalize_observations": True, "normalize_rewards": True}
GAMBLERS = {  # which know where their worker's generators were when they were made
    "env": "resume_programs:gambler", "env_kwargs": {"keeps_itself": True}, "rollout_length": 40,
    "steps": 8 * ENVS * 40,
}  # fmt: skip
EPISODES = {"collect": "episodes", "batch_steps": 96, "steps": 1500}


def stopped(folder: Path, monkeypatch: pytest.MonkeyPatch, algorithm: str, **options: Any) -> None:
    """The first half of a run, ended by a signal."""
    with monkeypatch.context() as patch:
        at_update(patch, {4: lambda: signal.raise_signal(signal.SIGTERM)})
        with pytest.raises(Paused):
            mh.train(algorithm, run_dir=str(folder), **options)


def check_close(whole: Path, other: Path) -> None:
    one, two = (load_file(folder / "policy.safetensors") for folder in (whole, other))
    assert set(one) == set(two)
    for name, values in one.items():
        np.testing.assert_allclose(two[name], values, rtol=1e-4, atol=1e-5, err_msg=name)
    assert played(whole) == played(other)


def played(folder: Path) -> list[tuple[str, ...]]:
    """When each episode ended, in which environment, and its length."""
    rows = left_in(folder)["episodes"]
    return sorted((row["global_step"], row["env"], row["length"]) for row in rows)


CASES: dict[str, tuple[str, str, tuple[int, ...], dict[str, Any]]] = {
    **{
        f"{algorithm}-{strategy}": (algorithm, strategy, numbers, PENDULUM)
        for algorithm, strategy, numbers in (
            ("ppo", "gather", (2, 1)), ("ppo", "allreduce", (2, 4)), ("trpo", "gather", (1, 2)),
            ("trpo", "allreduce", (3, 2)), ("a2c", "gather", (2, 3)), ("a2c", "allreduce", (4, 1)),
        )
    },
    "the default, from one": ("ppo", "", (1, 3), PENDULUM),
    "the default, to one": ("ppo", "", (3, 1), PENDULUM),
    "single": ("ppo", "single", (1, 2), {"env": "CartPole-v1"}),
    "overlap": ("ppo", "gather", (3, 4), {"env": "CartPole-v1", "overlap": True}),
    "whole episodes": ("ppo", "gather", (2, 3), {"env": "CartPole-v1", "minibatch": 0} | EPISODES),
    "whole episodes, overlap": (
        "a2c", "gather", (4, 3), {"env": "CartPole-v1", "overlap": True} | EPISODES
    ),
    "masks and a memory": (
        "ppo", "allreduce", (2, 4), {"env": "manyhands/Masked-v0", "lstm": 8}
    ),
    "parts of an observation": (
        "a2c", "gather", (3, 4),
        {"env": "manyhands/Counter-v0", "env_kwargs": {"as_dict": True, "longest": 60}},
    ),
    "environments that keep themselves": (
        "a2c", "gather", (2, 3), {"env": "resume_programs:remembers"}
    ),
    "environments that gamble": (
        "a2c", "allreduce", (3, 4), GAMBLERS
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_synchronous_runs_end_as_if_never_stopped(
    case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    algorithm, strategy, (before, after), more = CASES[case]
    options = QUIET | SMALL[algorithm] | {"strategy": strategy} | more
    mh.train(algorithm, run_dir=str(tmp_path / "whole"), workers=before, **options)
    stopped(tmp_path / "run", monkeypatch, algorithm, workers=before, **options)
    capsys.readouterr()
    result = mh.resume(tmp_path / "run", workers=after)
    assert result.summary["workers"] == after
    assert "the 12 environments are divided anew" in capsys.readouterr().err
    check_close(tmp_path / "whole", tmp_path / "run")


def test_numbers_may_change_again_and_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = QUIET | PENDULUM | SMALL["ppo"] | {"strategy": "gather", "learning_rate": 1e-3}
    mh.train("ppo", run_dir=str(tmp_path / "whole"), workers=1, **options)
    stopped(tmp_path / "run", monkeypatch, "ppo", workers=3, **options)
    for updates, workers in ((5, 2), (6, 4), (8, 1)):
        mh.resume(tmp_path / "run", workers=workers, steps=updates * ENVS * 16)
    check_close(tmp_path / "whole", tmp_path / "run")


def test_processes_of_the_local_engine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """From two of them to three, and from those to this process."""
    options = QUIET | PENDULUM | SMALL["a2c"] | {"strategy": "allreduce", "learning_rate": 1e-3}
    mh.train("a2c", run_dir=str(tmp_path / "whole"), workers=1, **options)
    half = options | {"steps": 4 * ENVS * 16}
    mh.train("a2c", run_dir=str(tmp_path / "run"), workers=2, **half | {"engine": "local"})
    mh.resume(tmp_path / "run", workers=3, steps=6 * ENVS * 16)
    mh.resume(tmp_path / "run", workers=1, engine="inline", steps=8 * ENVS * 16)
    check_close(tmp_path / "whole", tmp_path / "run")


@pytest.mark.parametrize("engine", [pytest.param("mpi", marks=pytest.mark.mpi), "torch"])
def test_under_a_launcher(engine: str, tmp_path: Path) -> None:
    """The number of workers is that of the launcher."""
    options = QUIET | PENDULUM | SMALL["a2c"] | {"strategy": "gather", "learning_rate": 1e-3}
    mh.train("a2c", run_dir=str(tmp_path / "whole"), workers=1, **options)
    half = options | {"steps": 4 * ENVS * 16}
    mh.train("a2c", run_dir=str(tmp_path / "run"), workers=3, **half)
    words = {
        "mpi": [str(Path(sys.executable).parent / "mpiexec"), "-n", "2", sys.executable],
        "torch": [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2"],
    }[engine]
    asked = ["-m", "manyhands", "resume", str(tmp_path / "run"), "--steps", str(8 * ENVS * 16)]
    done = subprocess.run([*words, *asked], capture_output=True, text=True, timeout=150)
    assert done.returncode == 0, done.stderr
    assert "2 workers in place of 3: the 12 environments are divided anew" in done.stderr
    check_close(tmp_path / "whole", tmp_path / "run")


@pytest.mark.parametrize("env", ["race", "duel"])
def test_games_are_divided_whole(env: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """All at once, or in turns, with whoever sits in the other seats."""
    pytest.importorskip("pettingzoo")
    own = {"race": "test_multi_agent:Race", "duel": "test_multi_agent:Duel"}[env]
    options = QUIET | SMALL["a2c"] | {"env": own, "env_backend": "pettingzoo"}
    options |= {"opponents": 2, "opponent_every": 1} if env == "duel" else {}
    monkeypatch.syspath_prepend(str(Path(__file__).parents[1] / "contracts"))
    mh.train("a2c", run_dir=str(tmp_path / "whole"), workers=2, **options)
    stopped(tmp_path / "run", monkeypatch, "a2c", workers=2, **options)
    mh.resume(tmp_path / "run", workers=4)
    check_close(tmp_path / "whole", tmp_path / "run")


# -- strategies in which nobody waits for all ------------------------------------------------------

ASYNCHRONOUS: dict[str, tuple[str, dict[str, Any]]] = {
    "impala": ("impala", {}),
    "a3c": ("a2c", {"strategy": "gradient_server"}),
    "apex": ("dqn", {"learning_starts": 200, "batch_size": 32, "replay_size": 2000,
                     "updates_per_step": 0.1, "checkpoint_replay": True}),
}  # fmt: skip


@pytest.mark.parametrize("case", ASYNCHRONOUS)
def test_asynchronous_runs_go_on_with_what_has_been_learned(
    case: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    algorithm, more = ASYNCHRONOUS[case]
    options = QUIET | {"env": "CartPole-v1", "steps": 1200, "workers": 3} | more
    before = mh.train(algorithm, run_dir=str(tmp_path / "run"), **options).summary
    kept = left_in(tmp_path / "run")["state"]
    for workers in (4, 2):
        capsys.readouterr()
        after = mh.resume(tmp_path / "run", workers=workers, steps=before["env_steps"] + 600)
        said = capsys.readouterr().err
        assert f"{workers} workers in place of" in said
        assert "actors begin new episodes" in said
        assert ("a new one is filled" in said) == (case == "apex")
        assert after.summary["updates"] > before["updates"]
        assert after.summary["env_steps"] >= before["env_steps"] + 600
        assert {row["env"] for row in left_in(tmp_path / "run")["episodes"]} <= set(
            map(str, range(ENVS))
        )
        before = after.summary
    now = left_in(tmp_path / "run")["state"]
    assert now["crew"]["session"] == kept["crew"]["session"] + 2  # no seed is used again
    assert now["algorithm"]["adam"]["step"] > kept["algorithm"]["adam"]["step"]


def test_weights_and_counters_are_exact_when_it_begins(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first checkpoint of the resumed run is the last of the one before."""
    options = QUIET | {"env": "CartPole-v1", "steps": 1200, "workers": 3}
    mh.train("impala", run_dir=str(tmp_path / "run"), **options)
    kept = left_in(tmp_path / "run")["state"]
    monkeypatch.setattr(stopping, "asked", lambda: signal.SIGTERM)
    with pytest.raises(Paused):
        mh.resume(tmp_path / "run", workers=2, steps=2400)
    now = left_in(tmp_path / "run")["state"]
    assert now["algorithm"]["version"] == kept["algorithm"]["version"] + 1  # the one it was in
    assert now["records"]["returns"]["episodes"] >= kept["records"]["returns"]["episodes"]


# -- what cannot be --------------------------------------------------------------------------------


def test_what_cannot_be_divided_is_said_before_anything_starts(tmp_path: Path) -> None:
    run = tmp_path / "run"
    mh.train("a2c", run_dir=str(run), **QUIET | {"env": "CartPole-v1", "steps": 192, "workers": 2})
    with pytest.raises(ConfigError) as refused:
        mh.resume(run, workers=5, steps=400)
    assert "do not go evenly into 5 workers (12 = 5 × 2 + 2)" in str(refused.value)
    assert "type: --workers 4 or --workers 6 " in str(refused.value)
    with pytest.raises(ConfigError, match="num_envs cannot change in a resumed run"):
        mh.resume(run, num_envs=10)

    on = tmp_path / "tensors"
    tensors = {"env": "CartPole-v1", "env_backend": "torch", "steps": 192}
    mh.train("a2c", run_dir=str(on), **QUIET | tensors)
    with pytest.raises(ConfigError, match=r"are tensors .* type: --workers 1"):
        mh.resume(on, workers=2, steps=400)

    dqn = tmp_path / "dqn"
    small = {"env": "CartPole-v1", "steps": 192, "learning_starts": 50}
    mh.train("dqn", run_dir=str(dqn), **QUIET | small)
    with pytest.raises(ConfigError, match="--start-from DIR --strategy apex --workers 3"):
        mh.resume(dqn, workers=3, steps=400)


# -- rows of several states ------------------------------------------------------------------------


@pytest.mark.parametrize(("before", "after"), [(1, 4), (4, 1), (2, 3), (3, 2), (4, 6), (6, 4)])
def test_parts_are_each_row_once_and_in_order(before: int, after: int) -> None:
    each, here = ENVS // before, ENVS // after
    rows = np.arange(ENVS).reshape(before, each)
    states = [{"list": r.tolist(), "tree": {"a": r, "b": -r[:, None]}} for r in rows]
    found = [
        trees.joined(trees.parts_of(states, each, first, here), "list", "tree")
        for first in range(0, ENVS, here)
    ]
    for i, one in enumerate(found):
        assert one["list"] == list(range(i * here, (i + 1) * here))
        np.testing.assert_array_equal(one["tree"]["a"], one["list"])
        np.testing.assert_array_equal(one["tree"]["b"][:, 0], -one["tree"]["a"])

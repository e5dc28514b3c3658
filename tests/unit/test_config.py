"""Configurations: from keyword arguments, plain data, TOML and the command line, and back."""

from __future__ import annotations

import dataclasses
import os
import subprocess
import sys
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from manyhands import config, support
from manyhands.algorithms.registry import SPECS
from manyhands.cli import train
from manyhands.config import (
    GROUPS,
    Experiment,
    RunConfig,
    build,
    from_plain,
    help_of,
    hints_of,
    load_toml,
    names_of,
    save_toml,
    to_plain,
)
from manyhands.errors import ConfigError, SupportError


@dataclass(frozen=True)
class Dummy:
    learning_rate: float | str = 3e-4
    """Step size."""
    epochs: int = 4
    """Passes."""
    clipped: bool = True
    betas: tuple[float, float] = (0.9, 0.999)
    """Adam's
    two."""
    limit: float | None = None
    name: str = "x"


@pytest.fixture
def dummy(monkeypatch: pytest.MonkeyPatch) -> None:
    """An algorithm whose options have every kind of field."""
    monkeypatch.setattr(config, "spec_of", lambda algorithm: replace(SPECS["ppo"], options=Dummy))


plain_text = st.text(max_size=20)
numbers = st.floats(allow_nan=False)
plain_values = st.recursive(
    st.booleans() | st.integers(-(2**63), 2**63 - 1) | numbers | plain_text,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(plain_text, inner, max_size=3),
    max_leaves=6,
)
run_values = st.fixed_dictionaries(
    {"env": plain_text},
    optional={
        "strategy": st.sampled_from(["", *support.STRATEGIES]),
        "workers": st.integers(1, 64),
        "steps": st.integers(0, 10**12),
        "run_dir": plain_text,
        "target_return": st.none() | numbers,
        "collect": st.sampled_from(["steps", "episodes"]),
        "env_kwargs": st.dictionaries(plain_text, plain_values, max_size=4),
        "normalize_rewards": st.booleans(),
        "hidden": st.lists(st.integers(1, 512), max_size=4).map(tuple),
        "timeout": numbers,
    },
)
option_values = st.fixed_dictionaries(
    {},
    optional={
        "learning_rate": numbers | plain_text,
        "clipped": st.booleans(),
        "betas": st.tuples(numbers, numbers),
        "limit": st.none() | numbers,
        "name": plain_text,
    },
)


@settings(max_examples=80, deadline=None)
@given(run=run_values, options=option_values)
def test_round_trips(run: dict[str, Any], options: dict[str, Any], tmp_path_factory: Any) -> None:
    # What is left open would be replaced by what suits the algorithm.
    open_ones = {"rollout_length": 7, "normalize_rewards": True, "hidden": (3,)}
    run = open_ones | {"activation": "relu"} | run
    experiment = Experiment("ppo", RunConfig(**run), Dummy(**options))
    path = tmp_path_factory.getbasetemp() / "round.toml"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(config, "spec_of", lambda algorithm: replace(SPECS["ppo"], options=Dummy))
        assert from_plain(to_plain(experiment)) == experiment
        assert build("ppo", **run, **options) == experiment
        save_toml(path, experiment)
        assert load_toml(path) == experiment


def test_what_is_left_open_depends_on_the_algorithm() -> None:
    assert build("ppo", env="X").run.normalize_rewards is True
    assert build("ppo", env="X", normalize_rewards=False).run.normalize_rewards is False
    assert build("a2c", env="X").run.rollout_length == 8
    assert build("trpo", env="X").run.rollout_length == 256
    assert build("ppo", env="X").run.hidden == (64, 64)
    assert build("ppo", env="X").run.activation == "tanh"
    assert build("sac", env="X").run.activation == "relu"


@pytest.mark.usefixtures("dummy")
def test_what_people_write_is_understood() -> None:
    experiment = build(
        "ppo", env="X", steps=1e6, seed=np.int64(3), timeout=5, hidden=[32], learning_rate=1,
        betas=[0, 1], env_kwargs={"size": np.float32(0.5), "shape": (1, 2)},
        start_from=Path("runs") / "earlier",
    )  # fmt: skip
    assert experiment.run.start_from == os.path.join("runs", "earlier")
    run, options = experiment.run, experiment.options
    assert (run.steps, run.seed, run.timeout, run.hidden) == (1_000_000, 3, 5.0, (32,))
    assert type(run.steps) is type(run.seed) is int
    assert type(run.timeout) is float
    assert (options.learning_rate, options.betas) == (1.0, (0.0, 1.0))
    assert run.env_kwargs == {"size": 0.5, "shape": [1, 2]}


@pytest.mark.usefixtures("dummy")
@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        ({"learning_rat": 1}, "no option 'learning_rat'; did you mean learning_rate"),
        ({"numenvs": 1}, "did you mean num_envs"),
        ({"dueling": True}, " has no dueling: it is an option of dqn"),
        ({"steps": "many"}, "steps='many': a whole number is expected"),
        ({"steps": 1.5}, "steps=1.5: a whole number is expected"),
        ({"workers": True}, "workers=True: a whole number is expected"),
        ({"steps": 10**400}, "steps is a number of more than 300 digits"),
        ({"timeout": 10**400}, "timeout is a number of more than 300 digits"),
        ({"workers": 10**400}, "workers is a number of more than 300 digits"),
        ({"target_return": 10**400}, "target_return=1000"),
        ({"quiet": 1}, "quiet=1: true or false is expected"),
        ({"hidden": [64, "x"]}, "hidden[1]='x': a whole number is expected"),
        ({"hidden": 64}, "hidden=64: a list (a whole number each) is expected"),
        ({"collect": "step"}, "collect='step': 'steps' or 'episodes' is expected"),
        ({"betas": [1.0]}, "betas=[1.0]: 2 values are expected"),
        ({"learning_rate": None}, "learning_rate=None: a number or text is expected"),
        ({"target_return": "x"}, "target_return='x': a number or nothing is expected"),
        ({"env_kwargs": {"a": None}}, "env_kwargs.a=None: text, numbers"),
        ({"env_kwargs": {"a": [len]}}, "env_kwargs.a[0]=<built-in function len>: text"),
        ({"env_kwargs": {1: 2}}, "env_kwargs has the key 1: keys are text"),
        ({"env_kwargs": 3}, "env_kwargs=3: a table is expected"),
    ],
)
def test_wrong_names_and_types(overrides: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError) as caught:
        build("ppo", **{"env": "X"} | overrides)
    assert said in str(caught.value)


@pytest.mark.usefixtures("dummy")
def test_all_faults_together() -> None:
    with pytest.raises(ConfigError) as caught:
        build("ppo", steps="x", sed=1)
    text = str(caught.value)
    assert text.startswith("3 things are wrong:")
    assert all(word in text for word in ("'sed'", "steps='x'", "env is missing"))


@pytest.mark.usefixtures("dummy")
@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("algorithm = 3", "algorithm=3: a name is needed"),
        ("", "algorithm=None: a name is needed"),
        ("algorithm = 'ppo'\nrun = 3", "run=3: a table [run] is expected"),
        ("algorithm = 'ppo'\n[rum]\n[run]\nenv='x'", "'rum'; did you mean run?"),
        ("algorithm = 'ppo'\n[run]\nenv='x'\nsteeps=1", "[run] has no option 'steeps'; did you"),
        ("algorithm = 'ppo'\n[run]\nenv='x'\n[ppo]\ndueling=true", "it is an option of dqn"),
        ("algorithm = 'ppo'\n[a2c]\n[run]\nenv='x'", "a table [a2c], but the algorithm is ppo"),
        ("algorithm = ", "is not TOML"),
    ],
)
def test_wrong_files(text: str, said: str, tmp_path: Path) -> None:
    path = tmp_path / "wrong.toml"
    path.write_text(text)
    with pytest.raises(ConfigError) as caught:
        load_toml(path)
    assert said in str(caught.value)
    assert str(path) in str(caught.value)
    with pytest.raises(ConfigError, match="cannot be read: No such file"):
        load_toml(tmp_path / "none.toml")


def test_unknown_algorithms() -> None:
    with pytest.raises(ConfigError, match=r"no algorithm 'pppo'; did you mean ppo\?"):
        build("pppo", env="X")


def test_strategy_is_resolved() -> None:
    assert Experiment("ppo", RunConfig(env="X"), Dummy()).strategy == "single"
    assert Experiment("ppo", RunConfig(env="X", workers=2), Dummy()).strategy == "allreduce"
    given = RunConfig(env="X", workers=2, strategy="gather")
    assert Experiment("ppo", given, Dummy()).strategy == "gather"


@pytest.mark.parametrize("algorithm", support.built())
def test_every_option_has_help_and_no_name_stands_twice(algorithm: str) -> None:
    options = SPECS[algorithm].options
    assert not set(names_of(options)) & set(names_of(RunConfig))
    for cls in (options, RunConfig):
        assert dataclasses.fields(cls)
        assert set(help_of(cls)) == set(names_of(cls)) == set(hints_of(cls))
    grouped = [name for names in GROUPS.values() for name in names]
    assert sorted(grouped) == sorted(names_of(RunConfig))


def test_help_of_many_lines() -> None:
    assert help_of(Dummy) == {
        "learning_rate": "Step size.", "epochs": "Passes.", "betas": "Adam's two.",
    }  # fmt: skip


# -- command line ----------------------------------------------------------------------------------


def test_flags_are_the_fields() -> None:
    words = (
        "ppo --env X -n 3 --steps 1e6 --num-envs 9 --hidden 32 16 --learning-rate linear:1e-3 "
        "--gamma 0.9 --minibatch 64 --target-return 475 --env-kwargs size=5 hard=true name=maze "
        "--normalize-rewards --quiet --seed 4 --collect episodes"
    )
    assert train.parse(words.split()) == build(
        "ppo", env="X", workers=3, steps=1_000_000, num_envs=9, hidden=(32, 16), gamma=0.9,
        learning_rate="linear:1e-3", minibatch=64, target_return=475.0, normalize_rewards=True,
        env_kwargs={"size": 5, "hard": True, "name": "maze"}, quiet=True, seed=4,
        collect="episodes",
    )  # fmt: skip


def test_workers_are_all_cores_unless_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.cpu_count", lambda: 6)
    assert train.parse(["a2c", "--env", "X"]).run.workers == 4  # 8 envs go into 4 workers, not 6
    assert train.parse(["a2c", "--env", "X", "--num-envs", "12"]).run.workers == 6
    assert train.parse(["a2c", "--env", "X", "--strategy", "single"]).run.workers == 1
    assert train.parse(["a2c", "--env", "X", "-n", "0"]).run.workers == 0  # validation refuses it


def test_a_file_gives_the_defaults(tmp_path: Path) -> None:
    saved = build("ppo", env="X", workers=2, epochs=3, env_kwargs={"a": 1}, strategy="gather")
    save_toml(tmp_path / "c.toml", saved)
    file = str(tmp_path / "c.toml")
    assert train.parse(["--config", file]) == saved
    expected = build("ppo", **_given(saved) | {"seed": 7, "epochs": 5})
    assert train.parse([f"--config={file}", "--seed", "7", "--epochs", "5"]) == expected
    assert train.parse(["ppo", "--epochs", "5", "--config", file, "--seed", "7"]) == expected
    with pytest.raises(ConfigError, match="configures ppo, but a2c was asked for"):
        train.parse(["a2c", "--config", file])


def _given(experiment: Experiment) -> dict[str, Any]:
    return dict(vars(experiment.run)) | dict(vars(experiment.options))


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("pop --env X", "no algorithm 'pop'; did you mean ppo?"),
        ("--env X", "the algorithm comes first: manyhands train ppo --env X; there are a2c"),
        ("--config", "--config needs a file"),
        ("--config nowhere.toml", "nowhere.toml cannot be read"),
    ],
)
def test_wrong_words(words: str, said: str) -> None:
    with pytest.raises((ConfigError, SupportError)) as caught:
        train.parse(words.split())
    assert said in str(caught.value)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("ppo --env X -n two", "two is not a whole number"),
        ("ppo --env X --steps 1.5", "1.5 is not a whole number"),
        ("ppo --env X --env-kwargs size", "size is not of the form NAME=VALUE"),
        ("ppo --env X --learning-rat 3", "--learning-rate X|SCHEDULE"),
        ("ppo", "--env ID"),
    ],
)
def test_what_the_parser_refuses(words: str, said: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as leave:
        train.parse(words.split())
    assert leave.value.code == 2
    assert said in capsys.readouterr().err


def test_help_of_an_algorithm(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as leave:
        train.parse(["trpo", "--help"])
    assert leave.value.code == 0
    text = capsys.readouterr().out
    for group in (*GROUPS, "trpo"):
        assert f"{group} options" in text
    for name in (*names_of(RunConfig), *names_of(SPECS["trpo"].options)):
        assert f"--{name.replace('_', '-')}" in text
    assert "-n N, --workers N" in text


def test_help_teaches_fast_and_without_torch() -> None:
    code = (
        "import sys, time\n"
        "from manyhands.cli.main import main\n"
        "try: main(['train', '--help'])\n"
        "except SystemExit: pass\n"
        "assert not {'torch', 'gymnasium'} & set(sys.modules)\n"
        "assert time.process_time() < 1.5, time.process_time()"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    for word in (*support.built(), "--config FILE.toml", "examples:", "--strategy gather"):
        assert word in done.stdout

"""Every recipe loads, passes all checks, says what was measured, and learns for two updates."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path
from typing import Any

import pytest

import manyhands as mh
from manyhands.cli.main import main
from manyhands.cli.train import parse
from manyhands.config import RECIPES as FOLDER
from manyhands.config import Experiment, from_plain, load_recipe, to_plain, validate
from manyhands.run import train_experiment

RECIPES = sorted(FOLDER.glob("*.toml"), key=lambda path: path.name)
UPDATES = 2
HEADER = ("reached", "took", "machine", "command", "date")


def names() -> list[str]:
    return [path.stem for path in RECIPES]


def missing_package(experiment: Experiment) -> str:
    """The optional package that the recipe's environment needs and that is not here."""
    run = experiment.run
    if run.env_backend == "envpool":
        package = "envpool"
    elif run.env_backend == "pettingzoo":
        package = "pettingzoo"
    elif run.env.startswith("ALE/"):
        package = "ale_py"
    elif run.env.startswith(("HalfCheetah", "Walker2d")):
        package = "mujoco"
    elif run.env.startswith("LunarLander"):
        package = "Box2D"
    else:
        return ""
    return "" if importlib.util.find_spec(package) else package


def recipe(name: str) -> Experiment:
    experiment = load_recipe(name)
    if package := missing_package(experiment):
        pytest.skip(f"{package} is not installed")
    return experiment


def tiny(experiment: Experiment, folder: Path) -> Experiment:
    """The same recipe with batches of 32 steps, or of one short episode, in this process."""
    plain = to_plain(experiment)
    run: dict[str, Any] = plain["run"]
    run |= {"workers": 1, "strategy": "single", "engine": "inline", "num_envs": 2}
    run |= {"rollout_length": 16, "quiet": True, "run_dir": str(folder / "run")}
    run |= {"target_return": None, "steps": UPDATES * 32, "unrolls": 0}
    if run["collect"] == "episodes":
        run["env_kwargs"] = {**run["env_kwargs"], "max_episode_steps": 40}
        run |= {"batch_steps": 80, "steps": UPDATES * 80}
    own = plain[experiment.algorithm]
    if "minibatch" in own:
        own["minibatch"] = 16
    if "learning_starts" in own:
        own |= {"learning_starts": 16, "batch_size": 16}
    return from_plain(plain)


def test_there_are_recipes() -> None:
    assert {"ppo-cartpole", "ppo-acrobot", "ppo-pendulum"} <= set(names())


@pytest.mark.parametrize("name", names())
def test_passes_all_checks(name: str) -> None:
    validate.check(recipe(name))


@pytest.mark.parametrize("name", names())
def test_begins_with_what_was_measured(name: str) -> None:
    text = (FOLDER / f"{name}.toml").read_text()
    header = text[: text.index("algorithm =")]
    for word in HEADER:
        assert re.search(rf"^# {word} +\S", header, re.MULTILINE), f"no line for {word!r}"
    assert f"--recipe {name}" in header
    assert re.search(r"\d{4}-\d{2}-\d{2}", header)
    assert all(line.startswith("#") or not line for line in header.splitlines())


@pytest.mark.parametrize("name", names())
def test_two_updates(name: str, tmp_path: Path) -> None:
    experiment = tiny(recipe(name), tmp_path)
    validate.check(experiment)
    result = train_experiment(experiment)
    assert result.summary["updates"] >= UPDATES
    assert (result.run_dir / "policy.safetensors").is_file()


# -- by name ---------------------------------------------------------------------------------------


def test_all_are_listed_and_each_can_be_read(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["recipes"]) == 0
    listed = capsys.readouterr().out
    assert re.search(r"(?m)^ppo-cartpole +PPO on CartPole-v1$", listed)
    assert [name for name in names() if not re.search(rf"(?m)^{name} ", listed)] == []
    assert main(["recipes", "ppo-pong"]) == 0
    assert capsys.readouterr().out == (FOLDER / "ppo-pong.toml").read_text()
    assert main(["recipes", "ppo-pogn"]) == 2
    assert "no recipe 'ppo-pogn'; did you mean ppo-pong" in capsys.readouterr().err


def test_command_line_takes_a_recipe_and_changes_to_it() -> None:
    assert parse(["--recipe", "ppo-acrobot"]) == load_recipe("ppo-acrobot")
    changed = parse(["ppo", "--recipe=ppo-acrobot", "--seed", "7", "--epochs", "5"])
    assert (changed.run.env, changed.run.seed, changed.options.epochs) == ("Acrobot-v1", 7, 5)
    for words, said in {
        "a2c --recipe ppo-acrobot": "ppo-acrobot configures ppo, but a2c was asked for",
        "--recipe": "--recipe needs a name",
        "--recipe nothing-like-it": "type: manyhands recipes",
        "--recipe ppo-acrobot --config x.toml": "--recipe ppo-acrobot and --config",
    }.items():
        with pytest.raises(mh.ConfigError, match=said):
            parse(words.split())


def test_python_takes_a_recipe_and_changes_to_it(tmp_path: Path) -> None:
    few = {"workers": 1, "strategy": "single", "steps": 64, "num_envs": 2, "rollout_length": 16}
    small: dict[str, Any] = few | {"engine": "inline", "minibatch": 16, "quiet": True}
    result = mh.train(recipe="ppo-cartpole", run_dir=str(tmp_path / "run"), **small)
    assert result.summary["env_steps"] == 64
    for algorithm, recipe in (("ppo", "ppo-cartpole"), ("", "")):
        with pytest.raises(mh.ConfigError, match="give an algorithm"):
            mh.train(algorithm, recipe=recipe)

"""What the commands do, from Python; environments given as classes and functions."""

from __future__ import annotations

import functools
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import pytest

import manyhands as mh
from manyhands.cli.main import main

TINY: dict[str, Any] = {
    "num_envs": 2, "rollout_length": 32, "minibatch": 32, "steps": 128, "engine": "inline",
    "quiet": True, "tensorboard": False, "hidden": (8,),
}  # fmt: skip
ENV = """
import gymnasium, numpy

class Walk(gymnasium.Env):
    observation_space = gymnasium.spaces.Box(-1.0, 1.0, (2,), numpy.float32)
    action_space = gymnasium.spaces.Discrete(2)

    def __init__(self, length=4):
        self.length = length

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.steps = 0
        return numpy.zeros(2, numpy.float32), {}

    def step(self, action):
        self.steps += 1
        return numpy.zeros(2, numpy.float32), 1.0, self.steps == self.length, False, {}
"""


@pytest.fixture(scope="module")
def result(tmp_path_factory: pytest.TempPathFactory) -> Any:
    folder = tmp_path_factory.mktemp("python") / "run"
    return mh.train("ppo", env="CartPole-v1", run_dir=str(folder), **TINY)


def own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str = "walking") -> Any:
    (tmp_path / f"{name}.py").write_text(ENV)
    monkeypatch.syspath_prepend(str(tmp_path))
    return __import__(name).Walk


# -- the commands ----------------------------------------------------------------------------------


def test_evaluate_is_the_command(result: Any, capsys: pytest.CaptureFixture[str]) -> None:
    found = mh.evaluate(result, episodes=3)
    assert main(["evaluate", str(result.run_dir), "--episodes", "3", "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == found.record()
    assert main(["evaluate", str(result.run_dir), "--episodes", "3"]) == 0
    assert capsys.readouterr().out == f"{found}\n"


def test_plot_gives_the_numbers_in_the_picture(result: Any, tmp_path: Path) -> None:
    made = mh.plot(result)
    assert made.path == result.run_dir / "curves.png"
    (label,) = made.curves
    assert label == "PPO single"
    assert made.curves[label].mean[-1] == pytest.approx(result.mean_return)
    assert made._repr_html_().startswith("<img ")
    other = mh.plot([result, result.run_dir], tmp_path / "two.svg", x="time", metric="entropy")
    assert "svg+xml" in other._repr_html_()
    assert list(other.curves) == [label]
    with pytest.raises(mh.ConfigError, match="no folder"):
        mh.plot([])


def test_report_gives_its_summary(result: Any, tmp_path: Path) -> None:
    made = mh.report(result, tmp_path / "page.html", video=False)
    assert made.path.stat().st_size > 10_000
    assert made.summary == result.summary
    assert str(made.path) in made._repr_html_()
    with pytest.raises(mh.ConfigError, match="give a name that ends"):
        mh.report(result, tmp_path / "page.pdf")


def test_a_result_shows_itself(result: Any) -> None:
    text = repr(result)
    assert text.startswith(f"Result({str(result.run_dir)!r}, exit='finished', mean_return=")
    assert len(text) < 300
    shown = result._repr_html_()
    for words in ("PPO on CartPole-v1", "Finished", "128", str(result.run_dir), "data:image/png"):
        assert words in shown, words


# -- environments of one's own ---------------------------------------------------------------------


def test_any_class_or_function_inline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    walk = own(tmp_path, monkeypatch)

    class Local(walk):  # type: ignore[misc]
        """No other process could find it."""

    lengths = {}
    for name, env, more in (
        ("class", walk, {}),
        ("kwargs", walk, {"env_kwargs": {"length": 3}}),
        ("partial", functools.partial(walk, length=5), {}),
        ("local", Local, {}),
        ("lambda", lambda: gymnasium.wrappers.TimeLimit(Local(9), 6), {}),
    ):
        folder = tmp_path / name
        made = mh.train("ppo", env=env, run_dir=str(folder), **TINY, **more)
        lengths[name] = set(mh.evaluate(made, episodes=2).lengths)
    assert lengths == {"class": {4}, "kwargs": {3}, "partial": {5}, "local": {4}, "lambda": {6}}
    text = (tmp_path / "partial" / "config.toml").read_text()
    assert 'env = "walking:Walk"' in text
    assert "length = 5" in text  # `train --config` repeats the run
    with pytest.raises(mh.ConfigError, match="arguments by name"):
        mh.train("ppo", env=functools.partial(walk, 5), **TINY)


def test_what_no_worker_could_find_is_refused_with_what_to_do() -> None:
    for env in (lambda: None, functools.partial(lambda size: None, size=1)):
        with pytest.raises(mh.ConfigError, match="engine='inline'"):
            mh.train("ppo", env=env, **TINY | {"engine": "local"})


def test_a_cell_that_is_gone(result: Any, tmp_path: Path) -> None:
    """The folder of a run whose environment stood in a notebook, opened by another process."""
    with pytest.raises(mh.ConfigError, match="run the cell that defines it first"):
        mh.train("ppo", env="__main__:Gone", **TINY)


@pytest.mark.usefixtures("nothing_left")
def test_a_class_of_the_main_script_on_another_engine(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    script = tmp_path / "study.py"
    run = f"""
import manyhands as mh

if __name__ == "__main__":
    print(mh.train("ppo", env=Walk, **{TINY | {"engine": "local"}!r}, workers=1))
"""
    script.write_text(ENV + run)
    done = subprocess.run(
        [sys.executable, str(script)], cwd=tmp_path, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("Result(")
    (folder,) = (tmp_path / "runs").glob("study.py-Walk/*/*")
    assert f'env = "{script}:Walk"' in (folder / "config.toml").read_text()
    assert main(["evaluate", str(folder), "--episodes", "1"]) == 0  # the script is found again
    assert "length    4.0" in capsys.readouterr().out
    assert np.isfinite(mh.load(folder).value(np.zeros(2, np.float32)))

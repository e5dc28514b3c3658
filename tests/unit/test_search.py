"""Settings that Optuna draws: what is refused, what is drawn, what is given up, and going on."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from manyhands import sweeps
from manyhands.cli.train import _ends
from manyhands.config import build
from manyhands.errors import ConfigError
from manyhands.run import train_experiment
from manyhands.sweeps import Job, Plan

STEPS = 64


def plan(optuna: int, **more: Any) -> Plan:
    base = build("ppo", env="CartPole-v1", steps=STEPS, num_envs=2, rollout_length=16, minibatch=16,
                 engine="inline", quiet=True, tensorboard=False)  # fmt: skip
    between = {"learning_rate": (1e-4, 1e-2, "log"), "epochs": (1, 3)}
    given: dict[str, Any] = {"grid": {"gamma": [0.9, 0.99]}, "ranges": between}
    return sweeps.make_plan(base, optuna=optuna, **given | more)


def trained(job: Job) -> Job:
    from dataclasses import replace

    experiment = job.trial.experiment
    train_experiment(replace(experiment, run=replace(experiment.run, run_dir=str(job.folder))))
    assert job.is_done()
    return job


@pytest.mark.parametrize(
    ("optuna", "more", "said"),
    [
        (0, {}, "--range is for Optuna to draw from"),
        (2, {"settings": [{"epochs": 2}]}, "but no --setting"),
        (2, {"grid": {}, "ranges": {}}, "nothing to draw from"),
        (2, {"ranges": {"gamma": (0.9, 0.99)}}, "gamma is in --grid and in --range"),
        (2, {"ranges": {"epochs": (3, 1)}}, "from a number to a larger one"),
        (2, {"ranges": {"learning_rate": (0.0, 1.0, "log")}}, "both above 0"),
        (2, {"ranges": {"epochz": (1, 3)}}, "no option 'epochz'"),
        (2, {"ranges": {"activation": ("relu", "tanh")}}, "two numbers are needed"),
    ],
)
def test_what_cannot_be_is_refused(optuna: int, more: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        plan(optuna, **more)


def test_words_of_a_range() -> None:
    assert _ends("gamma", "1e-4..1e-2:log") == ["1e-4", "1e-2", "log"]
    assert _ends("gamma", "1..3") == ["1", "3"]
    for wrong in ("1", "1..", "1..2:exp", "1..2..3"):
        with pytest.raises(ConfigError, match=f"--range gamma={re.escape(wrong)}: .* is expected"):
            _ends("gamma", wrong)


def test_a_plan_is_what_its_file_says(tmp_path: Path) -> None:
    assert sweeps.claim(tmp_path, plan(3))
    again = sweeps.load_plan(tmp_path)
    assert (again.optuna, again.ranges) == (3, plan(3).ranges)
    assert not sweeps.claim(tmp_path, plan(3))
    with pytest.raises(ConfigError, match="another sweep"):
        sweeps.claim(tmp_path, plan(4))


def test_draws_and_goes_on(tmp_path: Path) -> None:
    optuna = pytest.importorskip("optuna", reason="optuna is not installed")
    from manyhands.sweeps.search import STUDY, Search

    search = Search(tmp_path, plan(3))
    done = []
    for _ in range(2):
        (job,) = search.more()
        setting = job.trial.setting
        assert setting["gamma"] in (0.9, 0.99)
        assert 1e-4 <= setting["learning_rate"] <= 1e-2
        assert setting["epochs"] in (1, 2, 3)
        search.ended(trained(job))
        done.append(job)
    (third,) = search.more()  # drawn, and then the sweep is killed
    assert search.more() == []
    again = Search(tmp_path, plan(3))
    earlier = again.earlier()
    assert [job.folder for job in earlier] == [job.folder for job in [*done, third]]
    assert [job.is_done() for job in earlier] == [True, True, False]
    again.ended(trained(earlier[2]))
    assert again.more() == []
    backend = optuna.storages.journal.JournalFileBackend(str(tmp_path / STUDY))
    study = optuna.load_study(study_name="sweep", storage=optuna.storages.JournalStorage(backend))
    values = [trial.value for trial in study.trials]
    assert values == pytest.approx([job.mean_return for job in earlier])


def test_optuna_is_not_asked_again_when_it_finds_nothing_new(tmp_path: Path) -> None:
    """The pool looks every second, and each look would leave a hundred trials in the study."""
    pytest.importorskip("optuna", reason="optuna is not installed")
    from manyhands.sweeps.search import Search

    many = Plan(plan(2).base, {"gamma": [0.9]}, [], [1], "final", optuna=3)
    search = Search(tmp_path, many)
    assert len(search.more()) == 1
    assert search.more() == []
    trials = len(search._study.trials)
    assert search.more() == []
    assert len(search._study.trials) == trials


def test_a_setting_that_does_worse_is_given_up(tmp_path: Path) -> None:
    pytest.importorskip("optuna", reason="optuna is not installed")
    from manyhands.sweeps.search import _FIRST, Search

    search = Search(tmp_path, plan(_FIRST + 1, seeds=[1, 2]))
    for _ in range(_FIRST):
        one, other = search.more()
        one.mean_return, one.env_steps = 100.0, STEPS
        assert not search.gives_up(one)
        for job in (one, other):
            search.ended(trained(job))
    one, other = search.more()
    one.state, one.mean_return, one.env_steps = "running", 1.0, 8
    assert not search.gives_up(one)  # too early
    one.env_steps = STEPS
    assert search.gives_up(one)
    assert one.pruned
    assert other.state == "pruned"
    one.state = "pruned"
    search.ended(one)
    states = [job.state for job in Search(tmp_path, plan(_FIRST + 1, seeds=[1, 2])).earlier()]
    assert states[-2:] == ["pruned"] * 2

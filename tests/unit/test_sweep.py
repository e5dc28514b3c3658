"""Sweeps: what is tried, what is refused before anything starts, and the measures by which settings
are compared, each against a slow version written from its definition."""

from __future__ import annotations

import itertools
import json
import os
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import manyhands as mh
from manyhands import sweeps
from manyhands.cli.main import main
from manyhands.cli.train import split_values
from manyhands.config import build, load_toml, to_plain
from manyhands.engines import inline
from manyhands.errors import ConfigError
from manyhands.viewing import scores

RNG = np.random.default_rng(7)
BASE = ("sweep", "ppo", "--env", "CartPole-v1")


def base(**options: Any) -> Any:
    return build("ppo", **{"env": "CartPole-v1"} | options)


# -- measures --------------------------------------------------------------------------------------


def slow_interquartile_mean(values: list[float]) -> float:
    """Sort, leave out int(n / 4) at each end, add up the rest (scipy's trim_mean at 25 %)."""
    left = sorted(values)
    for _ in range(len(values) // 4):
        left = left[1:-1]
    return float(sum(map(Fraction, left)) / len(left))


@pytest.mark.parametrize("n", [1, 2, 3, 4, 5, 7, 8, 11, 12, 40])
def test_interquartile_mean(n: int) -> None:
    values = RNG.normal(100, 30, n)
    expected = slow_interquartile_mean(values.tolist())
    assert scores.interquartile_mean(values) == pytest.approx(expected, rel=1e-12)
    table = RNG.normal(size=(5, n))
    rows = [slow_interquartile_mean(row.tolist()) for row in table]
    assert scores.interquartile_mean(table) == pytest.approx(rows, rel=1e-9)


def test_one_lucky_seed_does_not_move_it() -> None:
    assert scores.interquartile_mean(np.array([10.0, 10, 10, 1e6])) == 10


def slow_bootstrap(parts: list[list[float]], repeats: int, seed: int) -> list[float]:
    """Sample by sample; the same generator draws for one part after the other."""
    rng = np.random.default_rng(seed)
    chosen = [rng.integers(len(part), size=(repeats, len(part))).tolist() for part in parts]
    return [
        slow_interquartile_mean(
            [part[i] for part, rows in zip(parts, chosen, strict=True) for i in rows[repeat]]
        )
        for repeat in range(repeats)
    ]


@pytest.mark.parametrize("sizes", [(5,), (3, 3), (4, 2, 7)])
def test_bootstrap(sizes: tuple[int, ...]) -> None:
    parts = [RNG.normal(10 * i, 1, n) for i, n in enumerate(sizes)]
    found = scores.bootstrap(parts, repeats=50, seed=3)
    expected = slow_bootstrap([part.tolist() for part in parts], 50, 3)
    assert found == pytest.approx(expected, rel=1e-9)


def test_every_sample_has_as_many_runs_of_each_environment_as_there_are() -> None:
    parts = [np.zeros(3), np.ones(5)]
    assert (scores.bootstrap(parts, measure=lambda x: x.sum(axis=-1)) == 5).all()


def test_intervals_are_those_of_all_samples_there_are() -> None:
    """Three runs have 27 samples with replacement: the exact interval is known."""
    values = [1.0, 2.0, 10.0]
    exact = [slow_interquartile_mean(list(row)) for row in itertools.product(values, repeat=3)]
    low, high = np.percentile(np.repeat(exact, 1000), (2.5, 97.5))  # of ever more of them
    assert scores.interval([np.array(values)]) == (low, high) == (1.0, 10.0)
    assert scores.interval([np.array(values)], level=0.5) == pytest.approx(
        np.percentile(np.repeat(exact, 1000), (25, 75))
    )
    assert scores.interval([np.array([4.0])]) == (4.0, 4.0)
    wide, narrow = (np.diff(scores.interval([RNG.normal(size=n)]))[0] for n in (5, 500))
    assert narrow < wide / 3


def test_chance_of_improvement() -> None:
    for sizes in ((3,), (2, 5)):
        ours = [RNG.integers(0, 4, n).astype(float) for n in sizes]
        theirs = [RNG.integers(0, 4, n + 1).astype(float) for n in sizes]
        chances = []
        for x, y in zip(ours, theirs, strict=True):
            points = [1.0 if a > b else 0.5 if a == b else 0.0 for a in x for b in y]
            chances.append(sum(points) / len(points))
        expected = sum(chances) / len(chances)
        assert scores.chance_of_improvement(ours, theirs) == pytest.approx(expected)
    assert scores.chance_of_improvement([np.ones(3)], [np.zeros(2)]) == 1.0


def test_mean_height() -> None:
    x = np.unique(RNG.integers(1, 900, 20)).astype(float)
    y = RNG.normal(50, 20, len(x))
    fine = np.linspace(0, 1000, 1_000_001)
    heights = np.interp(fine, x, y)  # level before the first point and after the last
    slow = float(((heights[1:] + heights[:-1]) / 2).mean())
    assert scores.mean_height(x, y, 1000) == pytest.approx(slow, rel=1e-6)
    assert scores.mean_height(np.array([200.0]), np.array([7.0]), 1000) == 7.0
    early, late = np.array([1.0, 10, 100]), np.array([1.0, 900, 1000])
    rising = np.array([0.0, 1, 1])
    assert scores.mean_height(early, rising, 1000) > scores.mean_height(late, rising, 1000)


# -- ranking ---------------------------------------------------------------------------------------


def rows_of(found: dict[str, list[float | None]], env: str = "A-v1") -> list[dict[str, Any]]:
    """Runs as `rank` has them once their numbers are read."""
    return [
        {"run": f"{name}/seed-{i}", "setting": {"gamma": name}, "seed": i, "env": env,
         "state": "failed" if score is None else "finished", "error": "", "score": score,
         "mean_return": score, "env_steps": 1, "solved": False}
        for name, values in found.items() for i, score in enumerate(values)
    ]  # fmt: skip


@pytest.fixture
def with_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    """The runs bring their numbers along."""
    monkeypatch.setattr(scores, "_numbers", lambda folder, row, metric: {})


@pytest.mark.usefixtures("with_numbers")
def test_the_best_comes_first_and_failures_are_counted() -> None:
    rows = rows_of({"low": [1, 2, 3], "high": [9, 11, None], "none": [None, None, None]})
    found = scores.rank(Path(), rows, "final")
    settings = found["settings"]
    assert [row["setting"]["gamma"] for row in settings] == ["high", "low", "none"]
    assert [row["scored"] for row in settings] == [2, 3, 0]
    assert [row["first_is_better"] for row in settings] == [None, 1.0, None]
    assert (settings[0]["iqm"], settings[0]["lowest"]) == (10, 9)
    assert settings[2]["iqm"] is None
    text = scores.table(found)
    assert all(words in text for words in ("2 of 3", "gamma=high", "100%"))
    lines = scores.markdown(found).splitlines()
    assert lines[2].count("|") == lines[3].count("|") == lines[4].count("|")
    json.dumps(found)


@pytest.mark.usefixtures("with_numbers")
def test_the_order_in_which_runs_ended_does_not_matter() -> None:
    rows = rows_of({"a": [1, 5, 3, 2, 9], "b": [2, 4, 4, 4, 1]})
    other = scores.rank(Path(), rows[::-1], "final")
    assert scores.rank(Path(), rows, "final")["settings"] == other["settings"]


@pytest.mark.usefixtures("with_numbers")
def test_environments_are_compared_from_their_worst_run_to_their_best() -> None:
    rows = []
    for env, scale in (("A-v1", 1.0), ("B-v1", 1000.0)):
        for name, values in {"x": [0.0, 1.0], "y": [0.5, 0.5]}.items():
            rows += [
                row | {"setting": {"env": env, "gamma": name}}
                for row in rows_of({name: [scale * v for v in values]}, env)
            ]
    found = scores.rank(Path(), rows, "final")
    assert [row["env"] for row in found["settings"]] == ["A-v1", "A-v1", "B-v1", "B-v1"]
    for row in found["overall"]:
        assert row["iqm"] == pytest.approx(0.5)  # of 0, 0, 1, 1 and of four halves
    assert {tuple(row["setting"]) for row in found["overall"]} == {("gamma",)}
    assert all(words in scores.table(found) for words in ("over all environments", "on B-v1"))


# -- what is tried ---------------------------------------------------------------------------------


def test_all_combinations_with_all_seeds() -> None:
    grid = {"learning_rate": [1e-3, "linear:3e-4"], "num_envs": [4, 8]}
    plan = sweeps.make_plan(base(), grid, [{"gamma": 0.9}, {"gamma": 0.99, "epochs": 3}], 3)
    trials = plan.trials()
    assert len(trials) == len({trial.name for trial in trials}) == 2 * 2 * 2 * 3
    first, last = trials[0], trials[-1]
    assert first.name == "gamma=0.9,learning_rate=0.001,num_envs=4/seed-1"
    assert last.setting == {"gamma": 0.99, "epochs": 3, "learning_rate": "linear:3e-4",
                            "num_envs": 8}  # fmt: skip
    run, own = last.experiment.run, last.experiment.options
    assert (run.seed, run.num_envs, own.epochs, own.gamma) == (3, 8, 3, 0.99)
    assert own.learning_rate == "linear:3e-4"
    assert "learning_rate=linear-3e-4," in last.name


def test_entries_of_tables_and_lists_are_options() -> None:
    grid = {"env_kwargs.sutton_barto_reward": ["true", "false"], "hidden": ["[32,32]", "[64]"]}
    plan = sweeps.make_plan(base(env_kwargs={"a": 1}), grid, typed=True)
    found = [trial.experiment.run for trial in plan.trials()]
    assert found[0].env_kwargs == {"a": 1, "sutton_barto_reward": True}
    assert [run.hidden for run in found] == [(32, 32), (64,), (32, 32), (64,)]
    assert plan.trials()[0].name.startswith("env_kwargs.sutton_barto_reward=true,hidden=32x32/")


def test_names_of_folders_are_short_and_different() -> None:
    long = ["a" * 300, "a" * 299 + "b", "../x", "..:x"]
    names = [t.name for t in sweeps.make_plan(base(), {"wandb": long}).trials()]
    assert len(set(names)) == 4
    assert all(len(name) < 130 and ".." not in name.split("/") for name in names)


def test_seeds_alone_need_no_setting() -> None:
    plan = sweeps.make_plan(base(seed=5), {}, seeds=2)
    assert [trial.name for trial in plan.trials()] == ["seed-5", "seed-6"]


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        ("1e-3,3e-4", ["1e-3", "3e-4"]),
        ("[64,64], [32]", ["[64,64]", "[32]"]),
        ("'a,b',c", ["'a,b'", "c"]),
        ("{a=1,b=[2,3]},{}", ["{a=1,b=[2,3]}", "{}"]),
        ("", []),
    ],
)
def test_commas(text: str, parts: list[str]) -> None:
    assert split_values(text) == parts


def test_the_file_holds_all_that_is_tried(tmp_path: Path) -> None:
    grid = {"hidden": [[32], [64, 64]], "learning_rate": [1e-3, "linear:1e-3"]}
    plan = sweeps.make_plan(base(target_return=400), grid, [{"gamma": 0.9}], [3, 1])
    assert plan.metric == "area"  # all that are solved end alike
    assert sweeps.claim(tmp_path, plan)
    again = sweeps.load_plan(tmp_path)
    assert [to_plain(t.experiment) for t in again.trials()] == [
        to_plain(t.experiment) for t in plan.trials()
    ]
    assert [t.name for t in again.trials()] == [t.name for t in plan.trials()]
    assert not sweeps.claim(tmp_path, plan)  # the same: it goes on
    with pytest.raises(ConfigError, match=r"sweep\.toml: there is no table or key 'sweep'"):
        load_toml(tmp_path / "sweep.toml")  # no configuration of a run


def test_how_many_cores_a_run_takes() -> None:
    plan = sweeps.make_plan(base(workers=4), {"engine": ["inline", "local"]})
    assert [sweeps.Job(t, Path()).cores for t in plan.trials()] == [1, 4]


def test_one_worker_is_one_process_unless_asked() -> None:
    assert sweeps.without_needless_processes(base(), []).run.engine == "inline"
    assert sweeps.without_needless_processes(base(), ["workers"]).run.engine == "local"
    assert sweeps.without_needless_processes(base(workers=2), []).run.engine == "local"


def test_the_view_fits_the_screen(monkeypatch: pytest.MonkeyPatch) -> None:
    plan = sweeps.make_plan(base(steps=1000), {"gamma": [0.9, 0.99]}, seeds=20)
    jobs = [sweeps.Job(trial, Path()) for trial in plan.trials()]
    jobs[0].state, jobs[0].mean_return, jobs[0].env_steps = "finished", 12.5, 1000
    jobs[1].state, jobs[1].env_steps = "running", 500
    jobs[2].state, jobs[2].error = "failed", "ValueError: " + "long " * 50
    for rows, shown in ((60, 40), (24, 2)):
        size = os.terminal_size((80, rows))
        monkeypatch.setattr(sweeps.view.shutil, "get_terminal_size", lambda size=size: size)
        lines = [line.plain for line in sweeps.View(quiet=True)._lines(jobs, 79)]
        assert lines[0].startswith("40 runs: 1 finished, 1 running, 1 failed, 37 waiting")
        assert len(lines) == 1 + shown
        assert max(map(len, lines)) <= 79
    assert "running   return - after 500 steps" in lines[1]
    assert "failed    ValueError: long" in lines[2]


# -- what is refused -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("--grid learning_rat=1,2", "no option 'learning_rat'; did you mean learning_rate"),
        ("--grid epochs=3,many", "epochs='many': a whole number is expected"),
        ("--grid epochs=3,2.5", "epochs=2.5: a whole number is expected"),
        (
            "--grid activation=tanh,sine",
            "activation='sine': 'tanh' or 'relu' or nothing is expected",
        ),
        ("--grid gamma=0.9,0.90", "--grid gamma: 0.9 is given twice"),
        ("--grid gamma=", "--grid gamma= has no values; type: --grid gamma=VALUE,VALUE"),
        ("--grid gamma", "gamma is not of the form OPTION=VALUE"),
        ("--grid gamma=0.9 --grid gamma=0.8", "gamma is given twice; type all its values once"),
        ("--grid seed=1,2", "seed is no setting: type: --seeds 1..5"),
        ("--grid gamma=0.9,1.5", "gamma=1.5: gamma=1.5 must lie from 0 to 1"),
        ("--grid minibatch=256,100", "minibatch=100: the batch (8 envs"),
        ("--setting gamma=0.9 --setting gamma=0.90", "gamma=0.9 and gamma=0.9 are the same run"),
        ("--setting gamma=0.9 --setting epochs=10 gamma=0.9", "are the same run (seed 1)"),
        ("--setting gamma=0.9 --grid gamma=0.8,0.7", "gamma is in --grid and in --setting"),
        ("--seeds 1,2,1", "seed 1 is given twice"),
        ("--seeds 0", "--seeds 0: at least 1 is needed"),
        ("--seeds 5..1", "--seeds 5..1: a number of seeds (5), or which: 1..5 or 1,2,7"),
        ("--seeds some", "--seeds some: a number of seeds"),
        ("--gamma 0.9", "this is one run, not several; add --grid"),
        ("--seeds 2 --at-once -1", "--at-once -1: at least 1 is needed"),
        ("--seeds 2 --env CartPol-v1", "did you mean CartPole-v1"),
        ("--seeds 1..1000000000", "this makes 1,000,000,000 runs, and a sweep has at most 10,000"),
        ("--seeds 7,1..1000000000", "this makes 100,001 runs"),
        (
            "--seeds 200 --grid gamma=0.9,0.8 --grid epochs=" + ",".join(map(str, range(1, 31))),
            "this makes 12,000 runs",
        ),
        ("--grid learning_rate=linear:1e-3,linear:0.001:0", "are the same run (seed 1)"),
        ("--grid learning_rate=1e-3,constant:0.001", "are the same run (seed 1)"),
        ("--grid replay_size=10,20", "ppo has no replay_size: it is an option of"),
        ("--setting gamma", "gamma is not of the form OPTION=VALUE; type: --setting OPTION=VALUE"),
        ("--seeds 2 --run-dir mine", "--run-dir is for one run; the folder of a sweep is --dir"),
        ("--gird gamma=0.9,0.8", "there is no option --gird; did you mean --grid?"),
        ("--seeds 2 --metric finall", "--metric finall: did you mean final?"),
        ("--seeds 2 --metric eval_return", "nothing is evaluated; add --eval-every N"),
        ("--optuna 3 --grid gamma=0.9", "there is one setting in all; leave --optuna out"),
        ("--optuna 9 --grid gamma=0.9,0.8 --range epochs=1..4", "--optuna 9: there are 8 in all"),
        ("--optuna 3 --range epochs=1..2.5", "epochs=2.5: a whole number is expected"),
        ("--optuna 3 --range epochs=1", "--range epochs=1: LOW..HIGH or LOW..HIGH:log is expected"),
        ("--seeds 2 --engine ray --ray auto", "each run is on one node, and --engine ray would"),
    ],
)
def test_refused_before_anything_starts(
    words: str, said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "sweep"
    assert main([*BASE, *words.split(), "--dir", str(folder)]) == 2
    assert said in capsys.readouterr().err
    assert not folder.exists()


def test_all_faults_at_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--grid", "gama=0.9,0.8", "--grid", "epochs=x,y", "--seeds", "1,1"]
    assert main([*BASE, *words, "--dir", str(tmp_path / "a")]) == 2
    assert "4 things are wrong" in capsys.readouterr().err


def test_a_folder_that_cannot_be(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*BASE, "--seeds", "2", "--dir", "/dev/null/sweep"]) == 2
    said = capsys.readouterr().err
    assert "dir /dev/null/sweep cannot be made" in said
    assert "type: --dir with another" in said


def test_one_fault_is_said_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--optuna", "3", "--range", "epochs=1..2.5", "--dir", str(tmp_path / "a")]
    assert main([*BASE, *words]) == 2
    assert capsys.readouterr().err == "manyhands: epochs=2.5: a whole number is expected\n"


def test_without_an_algorithm(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["sweep", "--env", "CartPole-v1", "--seeds", "2"]) == 2
    assert "the algorithm comes first: manyhands sweep ppo --env" in capsys.readouterr().err
    assert main(["sweep", "--seeds", "2"]) == 2
    assert "the algorithm comes first: manyhands sweep ppo" in capsys.readouterr().err


def test_a_recipe_that_does_not_exist(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["sweep", "--recipe", "ppo-cartpol", "--seeds", "2"]) == 2
    assert "no recipe 'ppo-cartpol'; did you mean ppo-cartpole" in capsys.readouterr().err
    with pytest.raises(ConfigError, match="did you mean ppo-cartpole"):
        mh.sweep(recipe="ppo-cartpol", seeds=2)


def test_a_folder_of_something_else(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    sweeps.claim(tmp_path, sweeps.make_plan(base(), {"gamma": [0.9, 0.8]}))
    assert main([*BASE, "--seeds", "2", "--dir", str(tmp_path)]) == 2
    said = capsys.readouterr().err
    assert "belongs to another sweep; to continue that one, type: manyhands resume" in said
    other = tmp_path / "other"
    (other / "seed-2").mkdir(parents=True)
    assert main([*BASE, "--seeds", "2", "--dir", str(other)]) == 2
    assert "seed-2 is there already; give the sweep another --dir" in capsys.readouterr().err
    assert not (other / "sweep.toml").exists()
    (tmp_path / "config.toml").write_text("")
    assert main([*BASE, "--seeds", "2", "--dir", str(tmp_path)]) == 2
    assert "holds a run; give the sweep a folder of its own" in capsys.readouterr().err


def test_what_cannot_change_in_a_sweep_that_goes_on(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    sweeps.claim(tmp_path, sweeps.make_plan(base(), {"gamma": [0.9, 0.8]}))
    assert main(["resume", str(tmp_path), "--steps", "5"]) == 2
    assert "--steps cannot change in a sweep that goes on" in capsys.readouterr().err
    assert main(["resume", str(tmp_path.parent), "--at-once", "2"]) == 2
    assert "--at-once is for sweeps" in capsys.readouterr().err
    with pytest.raises(ConfigError, match=r"is the folder of a sweep.*sweep\(dir="):
        mh.resume(tmp_path)


def test_files_that_are_wrong(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "mine.toml"
    for text, said in (
        ("[sweep]\ngrd = {}\n", "[sweep] has no 'grd'; did you mean grid"),
        ("[sweep]\nseeds = 'all'\n", "[sweep] seeds='all' is of the wrong kind"),
        ("[sweep.grid]\ngamma = 0.9\n", "grid gamma=0.9: a list of values is needed"),
    ):
        file.write_text(f"algorithm = 'ppo'\n[run]\nenv = 'CartPole-v1'\n{text}")
        assert main(["sweep", "--config", str(file)]) == 2
        assert said in capsys.readouterr().err


def test_from_python(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="give an algorithm"):
        mh.sweep(seeds=2)
    with pytest.raises(ConfigError, match=r"holds no sweep\.toml"):
        mh.sweep(dir=tmp_path)
    with pytest.raises(ConfigError, match="a list of values is needed"):
        mh.sweep("ppo", env="CartPole-v1", grid={"activation": "tanh"})
    for seeds in ([1, 2.5], "1..5", "5", [], True, None, 2.0, ["1"]):
        with pytest.raises(ConfigError, match=r"a number of seeds \(5\), or a list of whole"):
            mh.sweep("ppo", env="CartPole-v1", seeds=seeds)
    assert sweeps.make_plan(base(), {}, seeds=np.arange(2, 4)).seeds == [2, 3]
    plan = sweeps.make_plan(base(), {"gamma": np.array([0.5, 0.75]), "epochs": np.arange(1, 3)})
    assert plan.grid == {"gamma": [0.5, 0.75], "epochs": [1, 2]}


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"grid": "gamma=0.9,0.8"}, r"grid='gamma=0.9,0.8': a table of options is needed"),
        ({"grid": [("gamma", [0.9])]}, "a table of options is needed"),
        ({"ranges": [("gamma", 0.1, 0.9)], "optuna": 2}, "a table of options is needed"),
        ({"grid": {3: [1, 2]}}, "3 is no option: text is expected"),
        ({"grid": {"target_return": [None, 100]}}, r"target_return=None: sweep\.toml cannot hold"),
        ({"settings": {"gamma": 0.9}}, "a list is needed, of a table for each setting"),
        ({"settings": "gamma"}, "a list is needed, of a table for each setting"),
        ({"ranges": {"gamma": 0.9}, "optuna": 2}, r"ranges gamma=0.9: \(LOW, HIGH\) or"),
        ({"ranges": {"gamma": "0.1..0.9"}, "optuna": 2}, r"\(LOW, HIGH\) or"),
        ({"ranges": {"gamma": (0.1, 0.9, "lin")}, "optuna": 2}, "'lin' is no scale"),
        ({"optuna": "3", "ranges": {"gamma": (0.1, 0.9)}}, "optuna='3': a whole number"),
        ({"optuna": 2.5, "ranges": {"gamma": (0.1, 0.9)}}, "optuna=2.5: a whole number"),
        ({"seeds": 2, "at_once": "2"}, "at_once='2': a whole number"),
        ({"seeds": 2, "metric": 3}, "metric=3: text is expected"),
        ({"seeds": 2, "run_dir": "mine"}, "run_dir is for one run"),
    ],
)
def test_from_python_nothing_but_configuration_errors(
    given: dict[str, Any], said: str, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match=said):
        mh.sweep("ppo", env="CartPole-v1", dir=tmp_path / "sweep", **given)
    assert not (tmp_path / "sweep").exists()


def test_more_to_draw_from_than_anybody_could_look_at_is_checked_one_by_one(tmp_path: Path) -> None:
    many = {f"env_kwargs.a{i}": list(range(10)) for i in range(8)}
    plan = sweeps.make_plan(base(), many, optuna=5)
    assert len(plan.settings_to_check()) == 80
    assert sweeps.claim(tmp_path, plan)  # which does not list them either


def test_lambdas_have_no_name() -> None:
    with pytest.raises(ConfigError, match="a lambda cannot be sent"):
        mh.sweep("ppo", env=lambda: None, seeds=2, engine="inline")


def test_not_under_a_launcher(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "localhost",
                        "MASTER_PORT": "1", "LOCAL_RANK": "0"}.items():  # fmt: skip
        monkeypatch.setenv(name, value)
    # Another test may have made this process a worker of its own.
    monkeypatch.setattr(inline, "current", lambda: None)
    plan = sweeps.make_plan(base(), {}, seeds=2)
    with pytest.raises(ConfigError, match="torchrun has started 2 processes"):
        sweeps.begin(plan)

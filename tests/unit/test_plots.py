"""Learning curves: the arithmetic behind them, how runs are grouped, and the files."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import manyhands as mh
from manyhands.cli.main import main
from manyhands.cli.train import parse
from manyhands.config import build, to_plain
from manyhands.errors import ConfigError
from manyhands.experiment.folder import RunFolder
from manyhands.experiment.hooks import FinishedEpisode
from manyhands.viewing.curves import (
    Curve,
    curve_of,
    over_seeds,
    plot,
    rolling,
    short,
    spans_decades,
)
from manyhands.viewing.runs import command_of, group_runs, read_run

TINY = {"steps": 512, "num_envs": 4, "rollout_length": 32, "engine": "inline", "quiet": True}


@pytest.fixture(scope="module")
def run_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("plots") / "run"
    mh.train("ppo", env="CartPole-v1", run_dir=str(folder), minibatch=64, target_return=475, **TINY)
    return folder


def made(path: Path, returns: list[float], length: int = 10, **options: Any) -> Path:
    """A run's folder with one episode every `length` steps and 2 seconds."""
    with RunFolder(path) as folder:
        folder.open(build("ppo", env=options.pop("env", "CartPole-v1"), **options))
        for i, total in enumerate(returns, 1):
            folder.episodes(length * i, 2.0 * i, [FinishedEpisode(total, length, 0, 0, {})])
            folder.metrics({"env_steps": length * i, "wall_seconds": 2.0 * i, "entropy": 1.0 / i})
    return path


# -- arithmetic ------------------------------------------------------------------------------------


def test_rolling_is_what_it_says() -> None:
    values = np.random.default_rng(0).normal(1e6, 1.0, 250)  # large: squares would eat the digits
    mean = rolling(values, 100)
    for i in (0, 1, 50, 99, 100, 249):
        last = values[max(0, i - 99) : i + 1]
        assert mean[i] == pytest.approx(last.mean(), rel=1e-12)


def test_curve_of_one_run(tmp_path: Path) -> None:
    run = read_run(made(tmp_path / "a", [1.0, 2.0, 6.0]))
    curve = curve_of(run, "steps", window=2)
    assert curve is not None
    assert curve.x.tolist() == [10, 20, 30]
    assert curve.mean.tolist() == [1.0, 1.5, 4.0]
    assert curve.low.tolist() == pytest.approx([1.0, 1.1, 2.4])  # 10th percentiles
    assert curve.high.tolist() == pytest.approx([1.0, 1.9, 5.6])  # 90th
    in_time = curve_of(run, "time", "entropy")
    assert in_time is not None
    assert in_time.x.tolist() == [2, 4, 6]
    assert in_time.mean.tolist() == [1.0, 0.5, 1 / 3]


def test_episodes_of_one_update_are_one_point(tmp_path: Path) -> None:
    with RunFolder(tmp_path / "a") as folder:
        folder.open(build("ppo", env="CartPole-v1"))
        for step, total in ((8, 1.0), (8, 3.0), (16, 5.0)):
            folder.episodes(step, step / 8, [FinishedEpisode(total, 4, 0, 0, {})])
    curve = curve_of(read_run(tmp_path / "a"), "steps")
    assert curve is not None
    assert (curve.x.tolist(), curve.mean.tolist()) == ([8, 16], [2.0, 3.0])


def test_mean_over_seeds_is_on_a_common_grid() -> None:
    """Two straight lines, recorded at other steps and to other ends."""
    both = over_seeds([line([0, 10, 100], [0, 10, 100]), line([4, 60], [12, 180])])
    assert (both.x[0], both.x[-1]) == (4, 60)  # as far as both of them got
    assert np.allclose(both.mean, 2 * both.x)
    assert np.allclose(both.low, both.x)
    assert np.allclose(both.high, 3 * both.x)


def line(x: list[float], y: list[float], *, solved: bool = False) -> Curve:
    values = np.array(y, float)
    return Curve(np.array(x, float), values, values, values, solved)


def test_a_solved_seed_goes_on_with_its_last_value() -> None:
    early, late = line([0, 50], [0, 500], solved=True), line([0, 100], [0, 400], solved=True)
    both = over_seeds([early, late])
    assert both.x[-1] == 100
    assert both.mean[-1] == 450
    running = line([0, 80], [0, 300])
    assert over_seeds([early, late, running]).x[-1] == 80  # nobody knows how that one goes on


def test_bands_hold_only_what_is_possible(tmp_path: Path) -> None:
    """Mean plus standard deviation would be above CartPole's 500 here."""
    returns = [500.0, 20.0] * 100
    one = curve_of(read_run(made(tmp_path / "a", returns)), "steps")
    assert one is not None
    assert (one.low.min(), one.high.max()) == (20.0, 500.0)


@pytest.mark.parametrize(
    ("values", "log"),
    [([1e4, 1.0, 0.1, 0.01], True), ([100.0] + [1.0] * 50, True), ([1.0, 2.0, 3.0], False),
     ([1000.0, 1.0, -1.0], False), ([], False), (list(np.linspace(1e-3, 1e-5, 100)), False)],
)  # fmt: skip
def test_a_log_axis_where_numbers_span_decades(values: list[float], log: bool) -> None:
    assert spans_decades(np.array(values)) is log


@pytest.mark.parametrize(
    ("value", "largest", "text"),
    [(0, 2e5, "0"), (150_000, 2e5, "150k"), (-1500, 2000, "−1,500"), (2.5e6, 3e6, "2.5M"),
     (0.002, 0.01, "0.002"), (5000, 8000, "5,000")],
)  # fmt: skip
def test_numbers_on_axes(value: float, largest: float, text: str) -> None:
    assert short(value, largest) == text


# -- which runs are one curve ----------------------------------------------------------------------


def test_seeds_are_one_curve_and_settings_are_not(tmp_path: Path) -> None:
    folders = [made(tmp_path / f"s{s}", [1.0], seed=s) for s in (1, 2, 3)]
    folders.append(made(tmp_path / "w2", [1.0], workers=2, strategy="gather"))
    folders.append(made(tmp_path / "lr", [1.0], learning_rate=0.01))
    folders.append(made(tmp_path / "pendulum", [1.0], env="Pendulum-v1", gamma=0.9))
    groups = group_runs([read_run(f) for f in folders])
    assert [len(g.runs) for g in groups] == [3, 1, 1, 1]
    labels = [g.label for g in groups]
    assert len(set(labels[:3])) == 3
    assert "2 workers" in labels[1]
    assert "learning rate 0.01" in labels[2]
    assert labels[3] == "PPO single"  # nothing of its kind to be told apart from


# -- files -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("suffix", "magic"), [("png", b"\x89PNG"), ("svg", b"<?xml"), ("pdf", b"%PDF")]
)
def test_every_kind_of_file(run_dir: Path, tmp_path: Path, suffix: str, magic: bytes) -> None:
    out = tmp_path / f"a.{suffix}"
    assert main(["plot", str(run_dir), "--out", str(out)]) == 0
    assert out.read_bytes().startswith(magic)


def test_text_of_the_picture(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """SVG with text as text says what is in it."""
    import matplotlib

    monkeypatch.setitem(matplotlib.rcParams, "svg.fonttype", "none")
    rising = list(np.linspace(0, 500, 400))

    def run(name: str, returns: list[float] = rising, **options: Any) -> str:
        return str(made(tmp_path / name, returns, 50, steps=20_000, **options))

    folders = [run(f"s{s}", seed=s, target_return=475.0) for s in (1, 2, 3)]
    out = tmp_path / "a.svg"
    assert main(["plot", *folders, "--out", str(out)]) == 0
    text = out.read_text()
    for words in (
        "PPO single on CartPole-v1, 3 seeds",
        "environment steps",
        "time (s)",
        "return (100-episode mean)",
        "target 475",
        "20k",
        "mean of 3 seeds",
    ):
        assert words in text, words
    again = run("again", seed=3, target_return=475.0)
    assert main(["plot", *folders, again, "--out", str(out)]) == 0
    assert "CartPole-v1, 4 runs" in out.read_text()  # three seeds, one of them twice
    other = run("w2", workers=2, strategy="gather")
    assert main(["plot", *folders, other, "--x", "steps", "--out", str(out)]) == 0
    text = out.read_text()
    assert "PPO gather, 2 workers" in text
    folders.append(run("early", list(np.linspace(0, 400, 200)), seed=4))
    for path in folders:
        (Path(path) / "summary.json").write_text(json.dumps({"solved": True, "exit": "solved"}))
    assert main(["plot", *folders, "--x", "steps", "--out", str(out)]) == 0
    seeds = out.read_text()
    assert "lowest to highest seed" in seeds
    assert "solved: keeps its last value" in seeds
    assert main(["plot", folders[0], "--x", "steps", "--out", str(out)]) == 0
    assert "10th to 90th percentile of them" in out.read_text()
    assert "time (s)" not in text


def test_metric_and_where_it_goes(run_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plot", str(run_dir), "--metric", "entropy", "--x", "steps"]) == 0
    assert f"written to {run_dir / 'entropy.png'}" in capsys.readouterr().out
    assert (run_dir / "entropy.png").stat().st_size > 1000


def test_a_run_without_an_episode_is_drawn(tmp_path: Path) -> None:
    assert main(["plot", str(made(tmp_path / "a", []))]) == 0
    assert (tmp_path / "a" / "curves.png").exists()


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["RUN", "--metric", "entrop"], "did you mean entropy?"),
        (["RUN", "--out", "a.jpeg"], "ends in .png, .svg, .pdf"),
        (["RUN", "--window", "0"], "at least 1 episode"),
        (["PARENT"], "there is one in"),
        (["/no/such/folder"], "there is no folder"),
    ],
)
def test_wrong_use_is_one_line(
    run_dir: Path, words: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    places = {"RUN": str(run_dir), "PARENT": str(run_dir.parent)}
    assert main(["plot", *(places.get(word, word) for word in words)]) == 2
    err = capsys.readouterr().err
    assert said in err
    assert err.count("\n") == 1


# -- reading folders -------------------------------------------------------------------------------


def test_pandas_opens_the_tables(run_dir: Path) -> None:
    pandas = pytest.importorskip("pandas")
    metrics = pandas.read_csv(run_dir / "metrics.csv")
    lines = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    assert metrics["env_steps"].tolist() == [line["env_steps"] for line in lines]
    assert metrics["policy_loss"].tolist() == [line["policy_loss"] for line in lines]
    episodes = pandas.read_csv(run_dir / "episodes.csv")
    summary = json.loads((run_dir / "summary.json").read_text())
    assert len(episodes) == summary["episodes"]
    assert episodes["return"].tail(100).mean() == pytest.approx(summary["mean_return"])
    assert episodes["return"].equals(episodes["length"].astype(float))  # CartPole


def test_a_killed_run_is_read_as_far_as_it_got(run_dir: Path, tmp_path: Path) -> None:
    whole = read_run(run_dir)
    folder = tmp_path / "run"
    shutil.copytree(run_dir, folder)
    (folder / "summary.json").unlink()
    with open(folder / "metrics.jsonl", "a") as file:
        file.write('{"env_steps": 99999, "upd')
    with open(folder / "episodes.csv", "a") as file:
        file.write("512,0,")
    run = read_run(folder)
    assert not run.finished
    assert run.summary["exit"] == "not finished"
    for key in ("env_steps", "episodes", "updates", "mean_return", "best_return", "workers"):
        assert run.summary[key] == whole.summary[key], key
    assert run.phases["rollout"] > 0


def test_a_broken_line_in_the_middle_is_no_guess(run_dir: Path, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    shutil.copytree(run_dir, folder)
    text = (folder / "metrics.jsonl").read_text()
    (folder / "metrics.jsonl").write_text("{broken\n" + text)
    with pytest.raises(ConfigError, match="line 1 is not a record"):
        read_run(folder)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"hidden": (32, 16), "normalize_observations": True, "tensorboard": False, "workers": 3,
         "num_envs": 6, "learning_rate": "linear:1e-3", "target_return": -200.0, "seed": 7},
        {"env_kwargs": {"size": 5, "hard": True, "name": "maze 1"}, "collect": "episodes",
         "batch_steps": 2000, "strategy": "gather", "rollout_length": 64},
    ],
)  # fmt: skip
def test_the_command_says_the_same_as_the_configuration(options: dict[str, Any]) -> None:
    import shlex

    experiment = build("ppo", env="CartPole-v1", **options)
    words = shlex.split(command_of(experiment))
    assert words[:2] == ["manyhands", "train"]
    assert to_plain(parse(words[2:])) == to_plain(experiment)


# -- what can be seen ------------------------------------------------------------------------------


def test_a_curve_of_one_point_is_a_dot_and_long_legends_stay_inside(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from matplotlib.figure import Figure

    one = made(tmp_path / "one", [5.0], hooks="a.long.name.of.a.package.of.hooks:Hooks",
               start_from="/some/where/runs/CartPole-v1/best", eval_every=100)  # fmt: skip
    more = made(tmp_path / "more", [1.0, 2.0, 3.0], network="mine:a_network_with_a_long_name")
    figures: list[Any] = []
    save = Figure.savefig
    monkeypatch.setattr(
        Figure, "savefig", lambda self, *a, **k: (save(self, *a, **k), figures.append(self))
    )
    for x in ("both", "steps"):
        plot([one, more], tmp_path / "curves.png", x=x)  # type: ignore[arg-type]
        (legend,) = figures[-1].legends
        box, page = legend.get_window_extent(), figures[-1].bbox
        assert page.x0 <= box.x0 < box.x1 <= page.x1
        assert page.y0 <= box.y0 < box.y1 <= page.y1
        assert figures[-1].axes[0].get_window_extent().height > 0.4 * page.height
        words = " ".join(text.get_text() for text in legend.get_texts()).replace("\n", " ")
        assert "from CartPole-v1/best" in words
        assert "no hooks" in words
        assert "from scratch" in words
        assert "eval every" not in words  # it changes nothing of what is learned
    dots = [line for line in figures[-1].axes[0].lines if line.get_marker() == "o"]
    assert [line.get_xdata().tolist() for line in dots] == [[10.0]]

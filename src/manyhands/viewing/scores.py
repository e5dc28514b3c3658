"""What came of a sweep: a number for each run, settings in their order, and how sure that is.

    final     mean return of the last 100 finished episodes
    area      mean height of the learning curve, from the first step to the last that was allowed
    NAME      the last value of a column of metrics.jsonl, such as eval_mean_return

Settings are compared by the interquartile mean over seeds (the mean of the middle half: one lucky
seed changes it little), with intervals from a bootstrap in which every environment keeps its number
of runs (Agarwal et al., 2021, arXiv:2108.13264). Nothing here depends on the order in which
runs ended: the same runs give the same table.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np

from manyhands.config import nearest
from manyhands.errors import ConfigError, SupportError
from manyhands.experiment.folder import short_env
from manyhands.viewing import curves
from manyhands.viewing.runs import Run, read_run

Array = np.ndarray[Any, np.dtype[Any]]

RESULTS = "results.json"
REPEATS = 2000  # of the bootstrap
LEVEL = 0.95
_SEED = 0  # the same scores have the same interval
_MANY = 5  # seeds below which an interval is no more than a hint


# -- measures --------------------------------------------------------------------------------------


def interquartile_mean(scores: Array) -> Array:
    """Mean of the middle half of the last axis: a quarter, rounded down, is cut off at each end."""
    cut = scores.shape[-1] // 4
    ordered = np.sort(scores, axis=-1)
    mean: Array = ordered[..., cut : scores.shape[-1] - cut].mean(axis=-1)
    return mean


def bootstrap(
    parts: Sequence[Array],
    measure: Callable[[Array], Array] = interquartile_mean,
    repeats: int = REPEATS,
    seed: int = _SEED,
) -> Array:
    """The measure of so many samples [repeats]; each is drawn with replacement from every part (the
    runs of one environment) apart, as many as it has."""
    rng = np.random.default_rng(seed)
    drawn = [part[rng.integers(len(part), size=(repeats, len(part)))] for part in parts]
    return measure(np.concatenate(drawn, axis=1))


def interval(parts: Sequence[Array], level: float = LEVEL) -> tuple[float, float]:
    """Between which values the interquartile mean of other seeds like these would lie."""
    rest = 50 * (1 - level)
    ordered = [np.sort(part) for part in parts]  # the same in whatever order they come
    low, high = np.percentile(bootstrap(ordered), (rest, 100 - rest))
    return float(low), float(high)


def chance_of_improvement(ours: Sequence[Array], theirs: Sequence[Array]) -> float:
    """How likely a run of ours is better than one of theirs, on average over environments; a draw
    counts half."""
    chances = [
        np.mean((x[:, None] > y[None, :]) + 0.5 * (x[:, None] == y[None, :]))
        for x, y in zip(ours, theirs, strict=True)
    ]
    return float(np.mean(chances))


def mean_height(x: Array, y: Array, end: float) -> float:
    """Area under a line from 0 to `end`, divided by `end`. Before its first point the line is as
    high as there, and after its last."""
    end = max(float(end), float(x[-1]))
    area = y[0] * x[0] + np.sum(np.diff(x) * (y[1:] + y[:-1]) / 2) + y[-1] * (end - x[-1])
    return float(area / end) if end else float(y[-1])


# -- runs ------------------------------------------------------------------------------------------


def score_of(run: Run, metric: str) -> float | None:
    """A run in one number; None when it has none."""
    if metric == "final":
        mean: float | None = run.summary["mean_return"]
        return mean
    if metric == "area":
        returns, steps = run.episodes["return"], run.episodes["global_step"]
        if not len(returns):
            return None
        last = np.flatnonzero(np.diff(steps, append=math.inf) > 0)  # one point an update
        line = curves.rolling(returns, curves.WINDOW)[last]
        return mean_height(steps[last], line, run.experiment.run.steps)
    if metric not in run.metrics:
        raise ConfigError(
            f"--metric {metric}: {run.path} has no such numbers; "
            f"{nearest(metric, ['final', 'area', *run.metrics])}"
        )
    there = run.metrics[metric][np.isfinite(run.metrics[metric])]
    return float(there[-1]) if len(there) else None


def rank(folder: Path, rows: Sequence[Mapping[str, Any]], metric: str) -> dict[str, Any]:
    """What results.json holds: all runs, and the settings of each environment, the best first.

    Args:
        folder: of the sweep.
        rows: "run" (its folder below), "setting", "seed", "env", "state" and "error" of each.
        metric: see above.
    """
    runs = [dict(row) | _numbers(folder, row, metric) for row in rows]
    envs = list(dict.fromkeys(run["env"] for run in runs))
    settings = [one for env in envs for one in _ranked([r for r in runs if r["env"] == env])]
    found = {"metric": metric, "level": LEVEL, "runs": runs, "settings": settings}
    return found | ({"overall": _overall(runs, envs)} if len(envs) > 1 else {})


def _numbers(folder: Path, row: Mapping[str, Any], metric: str) -> dict[str, Any]:
    if row["state"] not in ("finished", "solved"):
        return {"score": None, "mean_return": None, "env_steps": None, "solved": False}
    run = read_run(folder / row["run"])
    names = ("mean_return", "env_steps", "solved")
    return {"score": score_of(run, metric)} | {name: run.summary[name] for name in names}


def _ranked(runs: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """The settings of one environment."""
    groups: dict[str, list[Mapping[str, Any]]] = {}
    for run in runs:
        groups.setdefault(repr(run["setting"]), []).append(run)
    rows = []
    for group in groups.values():
        scores = _scores(group)
        row = {
            "setting": group[0]["setting"],
            "env": group[0]["env"],
            "runs": len(group),
            "scored": len(scores),
            "solved": sum(bool(run["solved"]) for run in group),
            **_measures([scores] if len(scores) else []),
            "lowest": float(scores.min()) if len(scores) else None,
            "highest": float(scores.max()) if len(scores) else None,
        }
        rows.append((row, [scores]))
    return _in_order(rows)


def _overall(runs: Sequence[Mapping[str, Any]], envs: Sequence[str]) -> list[dict[str, Any]]:
    """Settings over all environments, each of which counts from its worst run (0) to its best (1):
    returns of different environments cannot be averaged."""
    scaled: dict[str, dict[str, Array]] = {}
    settings: dict[str, dict[str, Any]] = {}
    for env in envs:
        own = [run for run in runs if run["env"] == env]
        scores = _scores(own)
        if not len(scores):
            continue
        low, width = scores.min(), float(np.ptp(scores)) or 1.0
        for run in own:
            rest = {k: v for k, v in run["setting"].items() if k != "env"}
            settings[repr(rest)] = rest
            parts = scaled.setdefault(repr(rest), {})
            more = (_scores([run]) - low) / width
            parts[env] = np.concatenate([parts.get(env, np.zeros(0)), more])
    rows = []
    for key, rest in settings.items():
        own_parts = [scaled[key].get(env, np.zeros(0)) for env in envs]
        whole = all(map(len, own_parts))  # a setting that failed somewhere cannot be compared
        measures = _measures(own_parts if whole else [])
        rows.append(({"setting": rest, **measures}, own_parts if whole else [np.zeros(0)]))
    return _in_order(rows)


def _scores(runs: Sequence[Mapping[str, Any]]) -> Array:
    return np.array([run["score"] for run in runs if run["score"] is not None], float)


def _measures(parts: Sequence[Array]) -> dict[str, Any]:
    if not parts:
        return {"iqm": None, "low": None, "high": None, "mean": None}
    joined = np.concatenate(parts)
    low, high = interval(parts)
    return {
        "iqm": float(interquartile_mean(joined)),
        "low": low,
        "high": high,
        "mean": float(joined.mean()),
    }


def _in_order(rows: Sequence[tuple[dict[str, Any], list[Array]]]) -> list[dict[str, Any]]:
    """The best first, those without a number last; and how likely the first one is better."""

    def place(row: tuple[dict[str, Any], list[Array]]) -> tuple[float, float]:
        iqm, mean = row[0]["iqm"], row[0]["mean"]
        none = iqm is None or math.isnan(iqm)
        return (math.inf, math.inf) if none else (-iqm, -mean)

    ordered = sorted(rows, key=place)
    best = ordered[0][1]
    found = []
    for i, (row, parts) in enumerate(ordered):
        there = i and all(map(len, best)) and all(map(len, parts))
        chance = chance_of_improvement(best, parts) if there else None
        found.append({"rank": i + 1, **row, "first_is_better": chance})
    return found


def read(folder: Path) -> dict[str, Any]:
    """What a sweep has found; ConfigError when it has not come to its end."""
    try:
        found: dict[str, Any] = json.loads((folder / RESULTS).read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(
            f"{folder} has no {RESULTS}: the sweep has not ended; type: manyhands resume {folder}"
        ) from error
    return found


# -- for people ------------------------------------------------------------------------------------


def title(metric: str) -> str:
    known = {
        "final": "mean return of the last 100 episodes",
        "area": "mean height of the learning curve",
    }
    return known.get(metric, f"{curves.words_of(metric)}, last value")


def cells_of(results: Mapping[str, Any]) -> list[tuple[str, list[list[str]]]]:
    """(title, rows with their head) of each table, for people."""
    envs = list(dict.fromkeys(row["env"] for row in results["settings"]))
    tables = []
    for env in envs:
        rows = [row for row in results["settings"] if row["env"] == env]
        solved = any(row["solved"] for row in rows)
        head = ["", "setting", "runs", "IQM", "95 % interval", "mean", "lowest", "highest"]
        cells = [[*head, *(["solved"] if solved else []), "1st is better"]]
        for row in rows:
            cells.append([
                str(row["rank"]), label(row["setting"], env if len(envs) > 1 else ""),
                _runs(row), _number(row["iqm"]), _interval(row),
                *(_number(row[name]) for name in ("mean", "lowest", "highest")),
                *([f"{row['solved']} of {row['runs']}"] if solved else []),
                _share(row["first_is_better"]),
            ])  # fmt: skip
        of = f" on {short_env(env)}" if len(envs) > 1 else ""
        tables.append((f"{title(results['metric'])}{of}", cells))
    if "overall" in results:
        cells = [["", "setting", "IQM", "95 % interval", "1st is better"]]
        for row in results["overall"]:
            cells.append([str(row["rank"]), label(row["setting"]), _number(row["iqm"], 3),
                          _interval(row, 3), _share(row["first_is_better"])])  # fmt: skip
        tables.append(("over all environments, each from its worst run (0) to its best (1)", cells))
    return tables


def label(setting: Mapping[str, Any], env: str = "") -> str:
    """learning_rate=0.001, minibatch=64"""
    shown = {k: v for k, v in setting.items() if not (env and k == "env")}
    return ", ".join(f"{name}={value_in_words(value)}" for name, value in shown.items()) or "all"


def value_in_words(value: Any) -> str:
    if isinstance(value, list):
        return "x".join(map(str, value))
    return str(value).lower() if isinstance(value, bool) else str(value)


def table(results: Mapping[str, Any]) -> str:
    """For a terminal."""
    parts = []
    for name, rows in cells_of(results):
        widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
        lines = [name]
        for row in rows:
            cells = [
                f"{cell:<{wide}}" if i < 2 else f"{cell:>{wide}}"
                for i, (cell, wide) in enumerate(zip(row, widths, strict=True))
            ]
            lines.append("  ".join(cells).rstrip())
        parts.append("\n".join(lines))
    return "\n\n".join([*parts, *_notes(results)])


def markdown(results: Mapping[str, Any]) -> str:
    """The same for results.md."""
    parts = []
    for name, rows in cells_of(results):
        lines = [f"**{name[0].upper()}{name[1:]}**", ""]
        for i, row in enumerate(rows):
            lines.append(f"| {' | '.join(row)} |")
            if i == 0:
                lines.append(f"|{'---|' * len(row)}")
        parts.append("\n".join(lines))
    return "\n\n".join([*parts, *_notes(results)]) + "\n"


def _notes(results: Mapping[str, Any]) -> list[str]:
    most = max(row["scored"] for row in results["settings"])
    if most == 1:
        return ["One run of each says nothing about chance: add --seeds 5."]
    if most < _MANY:
        return [f"Intervals from {most} seeds are a hint, no more: --seeds {_MANY} or more."]
    return []


def _runs(row: Mapping[str, Any]) -> str:
    return str(row["runs"]) if row["scored"] == row["runs"] else f"{row['scored']} of {row['runs']}"


def _number(value: float | None, digits: int = 2) -> str:
    return "-" if value is None else f"{value:,.{digits}f}"


def _interval(row: Mapping[str, Any], digits: int = 2) -> str:
    if row["low"] is None or row.get("scored") == 1:
        return "-"
    return f"{_number(row['low'], digits)} to {_number(row['high'], digits)}"


def _share(value: float | None) -> str:
    return "" if value is None else f"{value:.0%}"


def draw(folder: Path, results: Mapping[str, Any]) -> Path | None:
    """curves.png: a curve for each setting, with its band; None when there is none to draw."""
    dirs = [folder / run["run"] for run in results["runs"] if run["score"] is not None]
    if not dirs:
        return None
    with suppress(SupportError):  # no matplotlib: the numbers are there
        return curves.plot(dirs, folder / "curves.png", x="steps").path
    return None

"""`manyhands report`: all that a run or a sweep has left, on one page that can be sent to somebody.

The first folder is what the page is about; others are compared with it in the curves and in the
table of times. What cannot be made is left out with a sentence that says why.
"""

from __future__ import annotations

import io
import json
import os
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import Any

import numpy as np

from manyhands import __version__
from manyhands.errors import ConfigError, SupportError
from manyhands.experiment.bottleneck import bottleneck, shares
from manyhands.experiment.folder import short_env
from manyhands.experiment.progress import duration, number
from manyhands.strategies import registry as strategies
from manyhands.viewing import curves, scores
from manyhands.viewing import report_page as html
from manyhands.viewing.report_page import behaviour, picture
from manyhands.viewing.runs import SWEEP, Run, command_of, group_runs, read_run, runs_in
from manyhands.viewing.video import go_headless

# Phases that have a column and a colour of their own, whatever a run calls the rest
PHASES = ("rollout", "optimisation", "synchronisation", "logging", "starting", "checkpoint")
_TABLE = PHASES[:4]
_NOT_DRAWN = ("env_steps", "update", "wall_seconds", "episodes", "mean_return", "eval_env_steps")
_CURVE, _SMALL = (5.2, 3.1), (3.6, 2.2)  # inches
_EVENTS, _MANY_EVENTS = 200, 30  # shown at all, and without being asked


@dataclass(frozen=True)
class Report:
    """A page about a run, and the numbers at its top."""

    path: Path
    summary: dict[str, Any]

    def _repr_html_(self) -> str:
        """What a notebook shows."""
        where = escape(str(self.path))
        return f'<a href="{where}" target="_blank">{where}</a>'


def report(
    dirs: curves.StrPath | Sequence[curves.StrPath],
    out: curves.StrPath | None = None,
    *,
    video: bool = True,
) -> Report:
    """Write one HTML page about a run or a sweep, as `manyhands report` does.

    Args:
        dirs: folder of the run, or what `train` gave back; further ones are compared with the
            first. Or the folder of one sweep, or what `sweep` gave back.
        out: a name that ends in .html; by default report.html in the first folder.
        video: with a film of an episode.
    """
    given = [dirs] if isinstance(dirs, (str, os.PathLike)) else dirs
    runs = [read_run(path) for path in runs_in(given)]
    if not runs:
        raise ConfigError("no folder of a run was given: there is nothing to report")
    swept = Path(given[0]) if len(given) == 1 and Path(given[0], SWEEP).is_file() else None
    path = Path(out) if out else (swept or runs[0].path) / "report.html"
    if path.suffix not in (".html", ".htm"):
        raise ConfigError(f"--out {path}: give a name that ends in .html")
    if not path.absolute().parent.is_dir():
        raise ConfigError(f"{path}: there is no folder {path.absolute().parent}")
    beside = path.with_name(f".{path.name}.tmp")
    go_headless()  # before the environment is made for the first time
    results = None if swept is None else scores.read(swept)
    page = make_page(runs, video=video) if results is None else sweep_page(runs, results)
    beside.write_text(page, encoding="utf-8")
    os.replace(beside, path)
    return Report(path, runs[0].summary if results is None else results)


def make_page(runs: Sequence[Run], *, video: bool = True) -> str:
    run = runs[0]
    subtitle = (
        f"{run.summary['strategy']} strategy on the {run.summary['engine']} engine, "
        f"{_many(int(run.summary['workers']), 'worker')}, seed {run.summary['seed']}"
    )
    body = [
        headline(run),
        learning(runs),
        measures(run),
        behaviour(run, video=video),
        times(runs),
        workers(run),
        events(run),
        repeat(run),
        machine(run),
    ]
    made = time.strftime("%Y-%m-%d %H:%M")
    env = short_env(run.experiment.run.env)
    footer = f"Made by manyhands {__version__} on {made} from {run.path.absolute().name}, {env}."
    return html.page(run.name, subtitle, body, footer)


def sweep_page(runs: Sequence[Run], results: dict[str, Any]) -> str:
    """The settings of a sweep, their curves, and its runs."""
    envs = dict.fromkeys(run.experiment.run.env for run in runs)
    tables = [
        html.heading(f"{title[0].upper()}{title[1:]}") + html.table(rows[0], rows[1:])
        for title, rows in scores.cells_of(results)
    ]
    columns = ["run", "state", "score", "return, last 100", "steps", "error"]
    rows = [
        [run["run"], run["state"],
         *("–" if run[name] is None else f"{run[name]:,.2f}" for name in ("score", "mean_return")),
         "–" if run["env_steps"] is None else number(run["env_steps"]), run["error"]]
        for run in results["runs"]
    ]  # fmt: skip
    about = (
        "IQM is the mean of the middle half of the seeds; the interval is from a bootstrap; the "
        "last column says how likely a run of the first setting is better than one of this."
    )
    body = [
        html.section("Settings", *tables, html.paragraph(about, soft=True)),
        *(learning([run for run in runs if run.experiment.run.env == env]) for env in envs),
        html.section("Runs", html.table(columns, rows, "text wrap")),
    ]
    first = runs[0].experiment
    where = ", ".join(map(short_env, envs))
    subtitle = f"{_many(len(results['settings']), 'setting')}, {_many(len(rows), 'run')}"
    footer = f"Made by manyhands {__version__} on {time.strftime('%Y-%m-%d %H:%M')}."
    return html.page(f"{first.spec.name.upper()} on {where}", subtitle, body, footer)


def card(run_dir: curves.StrPath) -> str:
    """A run in a notebook: a few numbers, and its learning curve."""
    run = read_run(run_dir)
    s = run.summary
    mean = "–" if s["mean_return"] is None else f"{s['mean_return']:,.2f}"
    rows = {
        run.name: _state(run),
        "return, last 100": mean,
        "steps": f"{number(s['env_steps'])} in {_clock(s['wall_seconds'])}, "
        f"{number(round(s['steps_per_second']))} a second",
        "workers": f"{s['workers']}, {s['strategy']} on the {s['engine']} engine, seed {s['seed']}",
        "folder": str(run.path),
    }
    found = html.table(["", ""], [[name, words] for name, words in rows.items()], "text")
    if not len(run.episodes["return"]):
        return found
    with suppress(SupportError):  # no matplotlib: the numbers alone
        data = io.BytesIO()
        with curves.style():
            figure = curves.pyplot().figure(figsize=(4.2, 2.4), layout="constrained")
            curves.draw(figure.subplots(), group_runs([run]), "steps")
            figure.savefig(data, format="png", dpi=130)
            curves.pyplot().close(figure)
        found += html.Picture(data.getvalue(), None, "png", f"Learning curve of {run.name}").html()
    return f'<div style="max-width:34rem">{found}</div>'


def _state(run: Run) -> str:
    words = str(run.summary["exit"])
    return words[:1].upper() + words[1:]


# -- the parts of the page -------------------------------------------------------------------------


def headline(run: Run) -> str:
    s = run.summary
    words = str(s["exit"])
    failed = words.startswith("failed")
    state = "Failed" if failed else _state(run)
    kind = "good" if s["solved"] else "bad" if failed else ""
    target = run.experiment.run.target_return
    goal = "no target was set" if target is None else f"target {target:,g}"
    mean, best = s["mean_return"], s["best_return"]
    none = mean is None or best is None
    parts = [
        html.tile("State", state, goal, kind),
        html.tile(
            "Return",
            "–" if none else f"{mean:,.1f}",
            "no episode has finished" if none else f"mean of the last 100; best {best:,.1f}",
        ),
        html.tile(
            "Steps", number(s["env_steps"]), f"of {number(run.experiment.run.steps)} allowed"
        ),
        html.tile(
            "Speed", f"{number(round(s['steps_per_second']))}", "steps a second, all workers"
        ),
        html.tile("Time", _clock(s["wall_seconds"]), f"{number(s['updates'])} updates"),
        html.tile("Episodes", number(s["episodes"]), f"{number(s['restarts'])} restarts"),
    ]
    fault = html.code(words, fault=True) if failed else ""
    if not run.finished:
        fault = html.paragraph("There is no summary: the run is still running, or it was killed.")
    return html.tiles(parts) + fault


def learning(runs: Sequence[Run]) -> str:
    env = runs[0].experiment.run.env
    groups = [g for g in group_runs(runs) if g.env == env]
    several = len(groups) > 1
    if not any(len(run.episodes["return"]) for g in groups for run in g.runs):
        return html.section("Learning", html.paragraph("No episode has finished: no curve."))
    made = []
    for x in ("steps", "time"):

        def draw(figure: Any, theme: curves.Theme, x: Any = x) -> None:
            curves.draw(figure.subplots(), groups, x, theme=theme)
            curves.legend(figure, figure.axes, 1 if several else 2)

        what = "environment steps" if x == "steps" else "time"
        size = (_CURVE[0], _CURVE[1] + 0.22 * (len(groups) + 2 if several else 1))
        made.append(picture(draw, size, f"Learning curve against {what}"))
    band = (
        "Lines are means over seeds, bands go from the lowest to the highest seed; thin lines are "
        "seeds. A solved seed keeps its last value. A curve of one run "
        "has no band."
        if several or len(groups[0].runs) > 1
        else "The line is the mean return of the last 100 finished episodes; the band goes from "
        "the 10th to the 90th percentile of those episodes."
    )
    left = len(runs) - sum(len(g.runs) for g in groups)
    other = f" {_many(left, 'run')} on other environments are not drawn." if left else ""
    return html.section("Learning", html.gallery(made), html.paragraph(band + other, soft=True))


def measures(run: Run) -> str:
    """Small multiples of everything that the algorithm has reported."""
    made, constant = [], []
    for name, values in run.metrics.items():
        if name in _NOT_DRAWN or name.startswith("seconds/"):
            continue
        there = values[np.isfinite(values)]
        if not len(there) or np.ptp(there) == 0:
            constant.append(f"{curves.words_of(name)} {there[0]:g}" if len(there) else name)
            continue

        def draw(figure: Any, theme: curves.Theme, name: str = name) -> None:
            axes = figure.subplots()
            curve = curves.curve_of(run, "steps", name)
            if curve is not None:
                axes.plot(curve.x, curve.mean, color=theme.colours[0], linewidth=1.4)
                if curves.spans_decades(curve.mean):
                    axes.set_yscale("log")
            axes.set_ylabel(curves.words_of(name))
            axes.set_xlabel("environment steps")
            axes.set_xlim(left=0)
            curves.short_numbers(axes, y=axes.get_yscale() == "linear")

        made.append(picture(draw, _SMALL, curves.words_of(name), size=9.0))
    if not made and not constant:
        return html.section("Measures", html.paragraph("No update has been recorded."))
    same = f"Constant throughout: {', '.join(constant)}." if constant else ""
    return html.section(
        "Measures",
        html.paragraph("One point for each record of an update.", soft=True),
        html.gallery(made, small=True),
        html.paragraph(same, soft=True),
    )


def times(runs: Sequence[Run]) -> str:
    columns = ["run", "steps/s", "wall", "updates", *_TABLE, "the rest"]
    if len(runs) > 1:
        columns.insert(2, "speed-up")
    rows, bars = [], []
    first = float(runs[0].summary["steps_per_second"]) or 1.0
    for run in runs:
        s, wall = run.summary, float(run.summary["wall_seconds"])
        rows.append(_time_row(run, first if len(runs) > 1 else 0.0))
        parts = [
            (_colour(name), share, f"{name}: {seconds:.2f} s, {share:.1%}")
            for name, seconds, share in sorted(
                shares(run.phases, wall), key=lambda row: _place(row[0])
            )
        ]
        label = f"{_many(int(s['workers']), 'worker')}, {s['strategy']} on {s['engine']}"
        bars.append(html.paragraph(f"{label}: {_clock(wall)}") + html.bar(parts))
    run = runs[0]
    sentence = "No time was measured."
    if run.phases:
        wall = float(run.summary["wall_seconds"])
        found = bottleneck(run.phases, run.experiment, wall_seconds=wall)
        sentence = f"{found[0].upper()}{found[1:]}."
    several = [r.summary["strategy"] for r in runs if r.summary["workers"] > 1]
    notes = dict.fromkeys(strategies.spec_of(name).on_times for name in several)
    alone = "".join(f" {text}" for text in notes if text)
    names = {name for run in runs for name in run.phases} | {"everything else"}
    legend = [(_colour(name), name) for name in sorted(names, key=_place)]
    return html.section(
        "Where the time went",
        html.paragraph(sentence),
        html.legend(legend),
        *bars,
        html.heading("By number of workers"),
        html.table(columns, rows),
        html.paragraph(
            "Time of one update, mean over updates and workers (they run side by side), and share "
            "of the wall time." + alone,
            soft=True,
        ),
    )


def _time_row(run: Run, first: float) -> list[str | tuple[str, str]]:
    s = run.summary
    wall, updates = float(s["wall_seconds"]), max(1, int(s["updates"]))
    phases = run.phases
    rest = max(0.0, wall - sum(phases.get(name, 0.0) for name in _TABLE))
    seconds = [*(phases.get(name, 0.0) for name in _TABLE), rest]
    cells: list[str | tuple[str, str]] = [
        (_many(int(s["workers"]), "worker"), f"{s['strategy']}, {s['engine']}, seed {s['seed']}"),
        number(round(s["steps_per_second"])),
        _clock(wall),
        number(s["updates"]),
        *((_milliseconds(t / updates), f"{t / (wall or 1.0):.0%}") for t in seconds),
    ]
    if first:
        cells.insert(2, f"{s['steps_per_second'] / first:.2f}×")
    return cells


def workers(run: Run) -> str:
    by, returns, lengths = (run.episodes[name] for name in ("worker", "return", "length"))
    rows = []
    for worker in range(int(run.summary["workers"])):
        own = by == worker
        mean = f"{returns[own][-100:].mean():,.1f}" if own.any() else "–"
        about = [e for e in run.events if e.get("worker", e.get("rank")) == worker]
        restarts = sum(str(e.get("event")).startswith("restart") for e in about)
        faults = sum(e.get("event") == "fault" for e in about)
        rows.append(
            [str(worker), number(int(own.sum())), number(int(lengths[own].sum())), mean,
             str(restarts), str(faults)]
        )  # fmt: skip
    columns = ["worker", "episodes", "their steps", "return, last 100", "restarts", "faults"]
    return html.section("Workers", html.table(columns, rows))


def events(run: Run) -> str:
    if not run.events:
        return html.section("Events", html.paragraph("None was recorded."))
    rows = []
    for event in run.events[-_EVENTS:]:
        facts = {k: v for k, v in event.items() if k not in ("event", "time", "wall_seconds")}
        said = ", ".join(
            f"{k} {v if isinstance(v, str) else json.dumps(v)}" for k, v in facts.items()
        )
        seconds = event.get("wall_seconds", 0.0)
        rows.append([f"{float(seconds):.2f} s", str(event.get("event", "")), said])
    more = len(run.events) - len(rows)
    note = html.paragraph(f"{number(more)} earlier ones are not shown.", soft=True) if more else ""
    shown = html.table(["time", "event", "facts"], rows, "text wrap") + note
    if len(rows) > _MANY_EVENTS:
        shown = html.details(f"{len(rows)} events", shown)
    return html.section("Events", shown)


def repeat(run: Run) -> str:
    config = run.path / "config.toml"
    return html.section(
        "How to repeat it",
        html.paragraph("In a new folder, with the same seed and workers:"),
        html.code(f"manyhands train --config {config}"),
        html.paragraph("The same without the file:"),
        html.code(command_of(run.experiment)),
        html.details("The whole configuration", html.code(config.read_text(encoding="utf-8"))),
    )


def machine(run: Run) -> str:
    """Versions, machine and commit; runs of earlier versions of manyhands did not write them."""
    s = run.summary
    if not s["versions"]:
        return ""
    rows = [[name, str(version)] for name, version in s["versions"].items()]
    rows += [[name, str(s[name])] for name in ("cpu", "gpu", "commit") if s[name]]
    return html.section("What it ran on", html.table(["", ""], rows, "text"))


# -- small things ----------------------------------------------------------------------------------


def _colour(phase: str) -> str:
    if phase == "everything else":
        return "rest"
    return f"p{PHASES.index(phase)}" if phase in PHASES else "p6"


def _place(phase: str) -> int:
    return PHASES.index(phase) if phase in PHASES else len(PHASES) + (phase == "everything else")


def _clock(seconds: float) -> str:
    return f"{seconds:.1f} s" if seconds < 60 else duration(seconds)


def _milliseconds(seconds: float) -> str:
    return f"{seconds:.2f} s" if seconds >= 1 else f"{1000 * seconds:.3g} ms"


def _many(count: int, noun: str) -> str:
    return f"{number(count)} {noun}{'' if count == 1 else 's'}"

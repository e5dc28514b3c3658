"""Learning curves for a paper: readable in print, safe for the colour-blind, honest about seeds.

One run: the rolling mean of its episodes' returns, with a band from the 10th to the 90th percentile
of those episodes. Several runs that differ in their seed alone: the mean of their rolling means,
with a band from the lowest to the highest seed; each seed is a thin line. Bands are of numbers that
were seen: a mean plus a standard deviation may lie above the highest return that there is.

A seed that was solved early goes on with its last value, or else the mean would be of the slow ones
alone. The mean ends where a seed ends that was not solved: nobody knows how it would have gone on.
Beside other curves a single run is a line alone: its band would not mean what the others' mean.
"""

from __future__ import annotations

import base64
import math
import os
import textwrap
from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import Any, Literal

import numpy as np

from manyhands.config import nearest
from manyhands.errors import ConfigError, SupportError
from manyhands.experiment.folder import short_env
from manyhands.viewing.runs import Group, Run, group_runs, read_run, runs_in

Array = np.ndarray[Any, np.dtype[Any]]
X = Literal["steps", "time"]
StrPath = str | os.PathLike[str]

RETURN = "return"  # the metric that is no column of metrics.jsonl
WINDOW = 100  # episodes in a rolling mean, as for --target-return
BAND = (10, 90)  # percentiles of a single run's episodes
POINTS = 300  # of a common grid: finer than a printer or a screen shows
# Okabe and Ito's palette, the darkest and most different first; yellow is left out on white paper
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
_SUFFIXES = (".png", ".svg", ".pdf")
_LETTER, _LINE = 0.055, 0.17  # inches, in a legend


@dataclass(frozen=True)
class Curve:
    """One line and its band."""

    x: Array
    mean: Array
    low: Array
    high: Array
    solved: bool = False  # it ended because it was good enough: its last value goes on


@dataclass(frozen=True)
class Theme:
    """Colours of a picture; paper is white, a page may be dark."""

    ink: str = "#222222"
    faint: str = "#8a8a8a"
    grid: str = "#e3e3e3"
    paper: str = "white"
    colours: tuple[str, ...] = COLOURS


LIGHT = Theme()
DARK = Theme(
    ink="#e8e8e8",
    faint="#9a9a9a",
    grid="#3a3d42",
    paper="none",
    colours=("#56B4E9", "#E69F00", "#2CC79B", "#E69AC6", "#F0E442", "#FF7F3F", "#FFFFFF"),
)


# -- from runs to lines ----------------------------------------------------------------------------


def rolling(values: Array, window: int) -> Array:
    """Mean of the last `window` values, at each; fewer at the start."""
    ends = np.arange(1, len(values) + 1)
    starts = np.maximum(0, ends - window)
    # Sums of differences from the overall mean: large returns would eat the digits.
    middle = values.mean() if len(values) else 0.0
    sums = np.concatenate([[0.0], np.cumsum(values - middle)])
    mean: Array = (sums[ends] - sums[starts]) / (ends - starts) + middle
    return mean


def curve_of(run: Run, x: X, metric: str = RETURN, window: int = WINDOW) -> Curve | None:
    """A run's own line; None when it has nothing to show yet."""
    if metric != RETURN:
        return _metric_curve(run, x, metric)
    returns = run.episodes["return"]
    if not len(returns):
        return None
    where = run.episodes["global_step" if x == "steps" else "wall_seconds"]
    # Episodes of one update share their place: the last one's mean is over them all.
    last = _thinned(np.flatnonzero(np.diff(where, append=math.inf) > 0))
    bands = [np.percentile(returns[max(0, i + 1 - window) : i + 1], BAND) for i in last]
    low, high = np.array(bands).T
    return Curve(
        where[last], rolling(returns, window)[last], low, high, bool(run.summary["solved"])
    )


def _metric_curve(run: Run, x: X, metric: str) -> Curve | None:
    if metric not in run.metrics:
        raise ConfigError(
            f"--metric {metric}: {run.path} has no such numbers; "
            f"{nearest(metric, [RETURN, *run.metrics])}"
        )
    values = run.metrics[metric]
    where = run.metrics["env_steps" if x == "steps" else "wall_seconds"]
    if x == "steps" and metric.startswith("eval_"):  # it came some updates later
        where = run.metrics.get("eval_env_steps", where)
    there = _thinned(np.flatnonzero(np.isfinite(values) & np.isfinite(where)))
    if not len(there):
        return None
    line = values[there]
    return Curve(where[there], line, line, line, bool(run.summary["solved"]))


def _thinned(places: Array) -> Array:
    """As many of them as a picture can show, the first and the last among them."""
    if len(places) <= POINTS:
        return places
    pick: Array = np.unique(np.linspace(0, len(places) - 1, POINTS).round().astype(int))
    return places[pick]


def over_seeds(curves: Sequence[Curve]) -> Curve:
    """Mean, lowest and highest of several runs, on a common grid."""
    if len(curves) == 1:
        return curves[0]
    first = max(c.x[0] for c in curves)
    unsolved = [c.x[-1] for c in curves if not c.solved]
    last = min(unsolved) if unsolved else max(c.x[-1] for c in curves)
    grid = np.linspace(first, max(first, last), POINTS)
    # Beyond a line's end np.interp goes on with its last value.
    table = np.stack([np.interp(grid, c.x, c.mean) for c in curves])  # [seeds, points]
    return Curve(grid, table.mean(axis=0), table.min(axis=0), table.max(axis=0), not unsolved)


# -- from lines to pictures ------------------------------------------------------------------------


@dataclass(frozen=True)
class Plot:
    """A picture of learning curves, and the numbers in it."""

    path: Path
    curves: dict[str, Curve]  # by label; against steps, unless only time was asked for

    def _repr_html_(self) -> str:
        """What a notebook shows."""
        kinds = {".png": "png", ".svg": "svg+xml"}
        if self.path.suffix not in kinds:
            return f"<code>{escape(str(self.path))}</code>"
        data = base64.b64encode(self.path.read_bytes()).decode()
        style = "max-width:48rem;width:100%;background:white"
        uri = f"data:image/{kinds[self.path.suffix]};base64,{data}"
        return f'<img style="{style}" alt="Learning curves" src="{uri}">'


def plot(
    dirs: StrPath | Sequence[StrPath],
    out: StrPath | None = None,
    *,
    x: Literal["steps", "time", "both"] = "both",
    metric: str = RETURN,
    window: int = WINDOW,
) -> Plot:
    """Draw learning curves of one or many runs, as `manyhands plot` does.

        plot(["runs/a", "runs/b"], "curves.pdf").curves["PPO single"].mean

    Args:
        dirs: folders of runs or sweeps, or what `train` and `sweep` gave back.
        out: a name that ends in .png, .svg or .pdf; by default curves.png, in the folder of the
            run if there is one run.
        x: against environment steps, time, or both side by side.
        metric: the return, or a name of metrics.jsonl.
        window: episodes in the rolling mean of returns.
    """
    given = [dirs] if isinstance(dirs, (str, os.PathLike)) else dirs
    runs = [read_run(path) for path in runs_in(given)]
    if not runs:
        raise ConfigError("no folder of a run was given: there is nothing to draw")
    name = "curves.png" if metric == RETURN else f"{metric.replace('/', '-')}.png"
    path = Path(out or (Path(given[0]) / name if len(given) == 1 else name))
    if path.suffix not in _SUFFIXES:
        raise ConfigError(f"{path}: give a name that ends in {', '.join(_SUFFIXES)}")
    if not path.absolute().parent.is_dir():
        raise ConfigError(f"{path}: there is no folder {path.absolute().parent}")
    if window < 1:
        raise ConfigError(f"--window {window}: at least 1 episode is needed")
    rows: dict[str, list[Group]] = {}
    for group in group_runs(runs):
        rows.setdefault(group.env, []).append(group)
    axes_of: list[X] = ["steps", "time"] if x == "both" else [x]
    plt = pyplot()
    compared = {g.label for groups in rows.values() for g in groups}
    with style():
        size = (
            3.5 * len(axes_of),
            2.55 * len(rows) + 0.42 + 0.17 * math.ceil((len(compared) + 2) / 2),
        )
        figure, grid = plt.subplots(
            len(rows), len(axes_of), figsize=size, squeeze=False, sharey="row", layout="constrained"
        )
        try:
            for panels, (env, groups) in zip(grid, rows.items(), strict=True):
                for axes, kind in zip(panels, axes_of, strict=True):
                    draw(axes, groups, kind, metric=metric, window=window)
                one = f"{groups[0].label} on {short_env(env)}{_seeds(groups[0])}"
                panels[0].set_title(one if len(groups) == 1 else short_env(env), loc="left")
                for axes in panels[1:]:
                    axes.set_ylabel("")
            legend(figure, [panels[0] for panels in grid], columns=len(axes_of))
            figure.savefig(path, dpi=220)
        finally:
            plt.close(figure)
    return Plot(path, _numbers(rows, axes_of[0], metric, window))


def _numbers(rows: dict[str, list[Group]], x: X, metric: str, window: int) -> dict[str, Curve]:
    """The lines and bands that were drawn."""
    found = {}
    for env, groups in rows.items():
        for group in groups:
            curves = [curve_of(run, x, metric, window) for run in group.runs]
            there = [curve for curve in curves if curve is not None]
            if there:
                label = group.label if len(rows) == 1 else f"{group.label} on {short_env(env)}"
                found[label] = over_seeds(there)
    return found


def legend(figure: Any, panels: list[Any], columns: int) -> None:
    """Below all panels, where it hides nothing."""
    found = [axes.get_legend_handles_labels() for axes in panels]
    by_label = {
        text: line for lines, texts in found for line, text in zip(lines, texts, strict=True)
    }
    if not by_label:
        return
    letters = int(figure.get_size_inches()[0] / _LETTER) - 6  # what fits beside a mark
    lines = math.ceil(len(by_label) / columns)  # there is room for so many
    if max(map(len, by_label)) > letters // columns - 6:
        columns = 1
    texts = [textwrap.fill(text, letters) for text in by_label]
    more = math.ceil(sum(text.count("\n") + 1 for text in texts) / columns) - lines
    width, height = figure.get_size_inches()
    figure.set_size_inches(width, height + _LINE * more)
    figure.legend(by_label.values(), texts, loc="outside lower center", ncols=columns)


def _seeds(group: Group) -> str:
    seeds = {run.experiment.run.seed for run in group.runs}
    if len(group.runs) > 1:
        return f", {len(group.runs)} {'seeds' if len(seeds) == len(group.runs) else 'runs'}"
    return f", seed {seeds.pop()}"


def draw(
    axes: Any,
    groups: Sequence[Group],
    x: X,
    *,
    metric: str = RETURN,
    window: int = WINDOW,
    theme: Theme = LIGHT,
) -> None:
    """All groups of one environment into one panel."""
    bands, ends = False, False
    several = len(groups) > 1
    seen: list[Array] = []
    for i, group in enumerate(groups):
        found = [curve_of(run, x, metric, window) for run in group.runs]
        curves = [curve for curve in found if curve is not None]
        if not curves:
            continue
        colour = theme.colours[i % len(theme.colours)]
        whole = over_seeds(curves)
        label = _label(group, len(curves), metric, window, several=several)
        dot = "o" if len(whole.x) == 1 else None  # a line needs two
        axes.plot(whole.x, whole.mean, color=colour, lw=1.6, marker=dot, ms=3, label=label)
        if len(curves) > 1:
            ends |= _draw_seeds(axes, curves, whole, colour)
        if (len(curves) > 1 or not several) and (whole.high > whole.low).any():
            bands = True
            axes.fill_between(whole.x, whole.low, whole.high, color=colour, alpha=0.2, linewidth=0)
        seen += [curve.mean for curve in curves]
    if not seen:
        axes.text(0.5, 0.5, "no episode has finished", transform=axes.transAxes, ha="center",
                  color=theme.faint)  # fmt: skip
    if metric == RETURN:
        _draw_target(axes, groups, theme)
    elif seen and spans_decades(np.concatenate(seen)):
        axes.set_yscale("log")
    _explain(axes, bands, ends, len(groups[0].runs) > 1 or several, theme.colours[0] if not several
             else theme.faint)  # fmt: skip
    axes.set_xlabel("environment steps" if x == "steps" else "time (s)")
    axes.set_ylabel(f"return ({window}-episode mean)" if metric == RETURN else words_of(metric))
    axes.set_xlim(left=0)
    short_numbers(axes, y=axes.get_yscale() == "linear")
    axes.margins(x=0.01)


def _label(group: Group, curves: int, metric: str, window: int, *, several: bool) -> str:
    """What a line is, for the legend."""
    if several:
        return group.label + (_seeds(group) if len(group.runs) > 1 else "")
    if curves > 1:
        return f"mean of {_seeds(group)[2:]}"
    return f"mean of the last {window} episodes" if metric == RETURN else words_of(metric)


def _draw_seeds(axes: Any, curves: list[Curve], whole: Curve, colour: str) -> bool:
    """A thin line for each; True when one ends before the mean does."""
    early = [c for c in curves if c.x[-1] < whole.x[-1]]
    for curve in curves:
        axes.plot(curve.x, curve.mean, color=colour, linewidth=0.6, alpha=0.4)
    for curve in early:
        axes.plot(curve.x[-1], curve.mean[-1], ".", color=colour, markersize=5, zorder=3)
    return bool(early)


def _explain(axes: Any, bands: bool, ends: bool, seeds: bool, colour: str) -> None:
    """Entries of the legend for what is no line."""
    if bands:
        what = "lowest to highest seed" if seeds else "10th to 90th percentile of them"
        axes.fill_between([], [], [], color=colour, alpha=0.2, linewidth=0, label=what)
    if ends:
        axes.plot([], [], ".", color=colour, markersize=5,
                  label="solved: keeps its last value")  # fmt: skip


def spans_decades(values: Array) -> bool:
    """Whether a linear axis would show a few large numbers and nothing else."""
    if not len(values) or values.min() <= 0:
        return False
    low, middle, high = np.percentile(values, (5, 50, 95))
    return bool(high > 30 * low or values.max() > 30 * middle)


def _draw_target(axes: Any, groups: Sequence[Group], theme: Theme) -> None:
    targets = {run.experiment.run.target_return for group in groups for run in group.runs}
    for target in sorted(t for t in targets if t is not None):
        axes.axhline(target, color=theme.faint, linewidth=0.9, linestyle=(0, (4, 3)), zorder=1)
        axes.annotate(
            f"target {target:g}".replace("-", "−"), (0, target), xycoords=("axes fraction", "data"),
            xytext=(4, 3), textcoords="offset points", color=theme.faint, fontsize="small",
        )  # fmt: skip


def words_of(metric: str) -> str:
    """policy_loss -> policy loss."""
    return metric.replace("_", " ").replace("seconds/", "seconds of ")


def short_numbers(axes: Any, *, y: bool = True) -> None:
    """100000 -> 100k; all numbers of an axis in the same unit."""
    from matplotlib.ticker import FuncFormatter, MaxNLocator

    def formatter(axis: Any) -> Any:
        return FuncFormatter(
            lambda value, _: short(value, float(np.abs(axis.get_view_interval()).max()))
        )

    for axis in (axes.xaxis, axes.yaxis) if y else (axes.xaxis,):
        axis.set_major_formatter(formatter(axis))
        axis.set_major_locator(MaxNLocator(6, steps=[1, 2, 2.5, 5, 10]))


def short(value: float, largest: float | None = None) -> str:
    """150000 -> 150k, in the unit that suits the largest number beside it."""
    largest = abs(value) if largest is None else largest
    for size, letter in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if largest >= (10 * size if letter == "k" else size):
            text = f"{value / size:.4g}{letter}" if value else "0"
            return text.replace("-", "−")
    text = f"{value:,.0f}" if largest >= 1000 else f"{value:.4g}"
    return text.replace("-", "−")


def pyplot() -> Any:
    """matplotlib, drawing into files only."""
    try:
        import matplotlib
    except ImportError as error:
        raise SupportError("plots need matplotlib; type: pip install matplotlib") from error
    matplotlib.use("agg")
    import matplotlib.pyplot

    return matplotlib.pyplot


def style(theme: Theme = LIGHT, size: float = 8.5) -> AbstractContextManager[None]:
    """How all our pictures look, for as long as the context lasts."""
    import matplotlib

    found: AbstractContextManager[None] = matplotlib.rc_context(
        {
            "font.size": size,
            "axes.titlesize": size,
            "axes.titleweight": "bold",
            "axes.labelsize": size,
            "legend.fontsize": size - 1,
            "legend.frameon": False,
            "xtick.labelsize": size - 1,
            "ytick.labelsize": size - 1,
            "figure.facecolor": theme.paper,
            "savefig.facecolor": theme.paper,
            "axes.facecolor": theme.paper,
            "text.color": theme.ink,
            "axes.labelcolor": theme.ink,
            "axes.edgecolor": theme.faint,
            "xtick.color": theme.ink,
            "ytick.color": theme.ink,
            "grid.color": theme.grid,
            "grid.linewidth": 0.6,
            "axes.grid": True,
            "axes.axisbelow": True,
            "axes.spines.top": False,
            "axes.spines.right": False,
            "axes.linewidth": 0.8,
            "lines.solid_capstyle": "round",
            "pdf.fonttype": 42,  # text stays text: journals refuse Type 3 fonts
            "svg.hashsalt": "manyhands",  # the same picture is the same file
        }
    )
    return found

"""Learning curves for a paper: readable in print, safe for the colour-blind, honest about seeds.

One run: the rolling mean of its episodes' returns, with a band of one standard deviation of those
episodes. Several runs that differ in their seed alone: the mean of their rolling means, with a band
of one standard deviation over the seeds, as far as all of them got; each seed is a thin line.
Beside other curves a single run is a line alone: its band would not mean what the others' mean.
"""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np

from manyhands.config import nearest
from manyhands.errors import ConfigError, SupportError
from manyhands.viewing.runs import Group, Run, group_runs

Array = np.ndarray[Any, np.dtype[Any]]
X = Literal["steps", "time"]

RETURN = "return"  # the metric that is no column of metrics.jsonl
WINDOW = 100  # episodes in a rolling mean, as for --target-return
POINTS = 300  # of a common grid: finer than a printer or a screen shows
# Okabe and Ito's palette, the darkest and most different first; yellow is left out on white paper
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
_SUFFIXES = (".png", ".svg", ".pdf")


@dataclass(frozen=True)
class Curve:
    """One line and its band."""

    x: Array
    mean: Array
    spread: Array  # one standard deviation to each side


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


def rolling(values: Array, window: int) -> tuple[Array, Array]:
    """Mean and standard deviation of the last `window` values, at each; fewer at the start."""
    ends = np.arange(1, len(values) + 1)
    starts = np.maximum(0, ends - window)
    count = ends - starts
    # Sums of differences from the overall mean: squares of large returns would eat the digits.
    middle = values.mean() if len(values) else 0.0
    sums, squares = (
        np.concatenate([[0.0], np.cumsum((values - middle) ** power)]) for power in (1, 2)
    )
    mean = (sums[ends] - sums[starts]) / count
    variance = (squares[ends] - squares[starts]) / count - mean**2
    return mean + middle, np.sqrt(np.maximum(variance, 0.0))


def curve_of(run: Run, x: X, metric: str = RETURN, window: int = WINDOW) -> Curve | None:
    """A run's own line; None when it has nothing to show yet."""
    if metric != RETURN:
        return _metric_curve(run, x, metric)
    returns = run.episodes["return"]
    if not len(returns):
        return None
    where = run.episodes["global_step" if x == "steps" else "wall_seconds"]
    mean, spread = rolling(returns, window)
    # Episodes of one update share their place: the last one's mean is over them all.
    last = np.flatnonzero(np.diff(where, append=math.inf) > 0)
    return _thinned(Curve(where[last], mean[last], spread[last]))


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
    there = np.isfinite(values) & np.isfinite(where)
    if not there.any():
        return None
    return _thinned(Curve(where[there], values[there], np.zeros(int(there.sum()))))


def _thinned(curve: Curve) -> Curve:
    if len(curve.x) <= POINTS:
        return curve
    pick = np.unique(np.linspace(0, len(curve.x) - 1, POINTS).round().astype(int))
    return Curve(curve.x[pick], curve.mean[pick], curve.spread[pick])


def over_seeds(curves: Sequence[Curve]) -> Curve:
    """Mean and standard deviation over runs, on a grid that all of them cover."""
    if len(curves) == 1:
        return curves[0]
    first, last = max(c.x[0] for c in curves), min(c.x[-1] for c in curves)
    grid = np.linspace(first, max(first, last), POINTS)
    table = np.stack([np.interp(grid, c.x, c.mean) for c in curves])  # [seeds, points]
    return Curve(grid, table.mean(axis=0), table.std(axis=0))


# -- from lines to pictures ------------------------------------------------------------------------


def plot(
    runs: Sequence[Run],
    path: str | os.PathLike[str],
    *,
    x: Literal["steps", "time", "both"] = "both",
    metric: str = RETURN,
    window: int = WINDOW,
) -> Path:
    """Draw the runs into a file: a row of panels for each environment."""
    path = Path(path)
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
    compared = {g.label for groups in rows.values() if len(groups) > 1 for g in groups}
    with style():
        size = (3.5 * len(axes_of), 2.55 * len(rows) + 0.25 + 0.17 * math.ceil(len(compared) / 2))
        figure, grid = plt.subplots(
            len(rows), len(axes_of), figsize=size, squeeze=False, sharey="row", layout="constrained"
        )
        try:
            for panels, (env, groups) in zip(grid, rows.items(), strict=True):
                for axes, kind in zip(panels, axes_of, strict=True):
                    draw(axes, groups, kind, metric=metric, window=window)
                one = f"{groups[0].label} on {env}{_seeds(groups[0])}"
                panels[0].set_title(one if len(groups) == 1 else env, loc="left")
                for axes in panels[1:]:
                    axes.set_ylabel("")
            legend(figure, [panels[0] for panels, groups in zip(grid, rows.values(), strict=True)
                            if len(groups) > 1], columns=len(axes_of))  # fmt: skip
            figure.savefig(path, dpi=220)
        finally:
            plt.close(figure)
    return path


def legend(figure: Any, panels: list[Any], columns: int) -> None:
    """Below all panels, where it hides nothing."""
    found = [axes.get_legend_handles_labels() for axes in panels]
    by_label = {
        text: line for lines, texts in found for line, text in zip(lines, texts, strict=True)
    }
    if by_label:
        figure.legend(by_label.values(), by_label.keys(), loc="outside lower center", ncols=columns)


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
    drawn = 0
    for i, group in enumerate(groups):
        found = [curve_of(run, x, metric, window) for run in group.runs]
        curves = [curve for curve in found if curve is not None]
        if not curves:
            continue
        drawn += 1
        colour = theme.colours[i % len(theme.colours)]
        label = group.label + (_seeds(group) if len(groups) > 1 and len(group.runs) > 1 else "")
        _draw_curves(axes, curves, colour, label, band=len(groups) == 1 or len(curves) > 1)
    if not drawn:
        axes.text(0.5, 0.5, "no episode has finished", transform=axes.transAxes, ha="center",
                  color=theme.faint)  # fmt: skip
    if metric == RETURN:
        _draw_target(axes, groups, theme)
    axes.set_xlabel("environment steps" if x == "steps" else "time (s)")
    axes.set_ylabel(f"return ({window}-episode mean)" if metric == RETURN else words_of(metric))
    axes.set_xlim(left=0)
    short_numbers(axes)
    axes.margins(x=0.01)


def _draw_curves(axes: Any, curves: list[Curve], colour: str, label: str, *, band: bool) -> None:
    if len(curves) > 1:
        for curve in curves:
            axes.plot(curve.x, curve.mean, color=colour, linewidth=0.6, alpha=0.4)
    whole = over_seeds(curves)
    if band:
        low, high = whole.mean - whole.spread, whole.mean + whole.spread
        axes.fill_between(whole.x, low, high, color=colour, alpha=0.2, linewidth=0)
    axes.plot(whole.x, whole.mean, color=colour, linewidth=1.6, label=label)


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

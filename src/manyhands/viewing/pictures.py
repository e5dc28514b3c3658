"""What a policy does and expects, as pictures: over a plane of states, and along an episode.

The plane is the state itself where it has two numbers (a pendulum's angle and speed, also when they
are shown as cosine, sine and speed; MountainCar). Larger observations are cut: two components vary
and the others stand still, and the picture's caption says which and at what.
"""

from __future__ import annotations

import textwrap
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from manyhands.policy import Policy
from manyhands.viewing.curves import COLOURS, LIGHT, Theme
from manyhands.viewing.video import Played

Array = np.ndarray[Any, np.dtype[Any]]

CELLS = 121  # of a side; odd, so that the middle is one
SHOWN = 200  # steps of an episode's lines: more would be a smear
_FADING = 40  # steps in which a path over a map fades to a third
_MOST_COMPONENTS = 64  # beyond, a cut through two of them says nothing


@dataclass(frozen=True)
class _Known:
    """What we know of an environment that its spaces do not say."""

    components: tuple[int, int] = (0, 1)
    names: tuple[str, str] = ("", "")
    ranges: tuple[tuple[float, float] | None, tuple[float, float] | None] = (None, None)
    actions: tuple[str, ...] = ()


_KNOWN = {
    "CartPole": _Known(
        (2, 3),
        ("pole's angle (rad)", "pole's angular speed (rad/s)"),
        ((-0.12, 0.12), (-1.2, 1.2)),
        ("push left", "push right"),
    ),
    "MountainCarContinuous": _Known((0, 1), ("position", "speed")),
    "MountainCar": _Known(
        (0, 1), ("position", "speed"), actions=("push left", "do nothing", "push right")
    ),
    "Pendulum": _Known((0, 1), ("angle θ from upright (rad)", "angular speed θ̇ (rad/s)")),
}


@dataclass(frozen=True)
class Plane:
    """Two numbers that stand for a state."""

    names: tuple[str, str]
    x: Array  # [CELLS]
    y: Array  # [CELLS]
    observe: Callable[[Array], Array]  # points [N, 2] -> observations [N, d]
    project: Callable[[Array], Array]  # observations [T, d] -> points [T, 2]
    note: str = ""  # what the picture leaves out
    wraps: bool = False  # x is an angle
    actions: tuple[str, ...] = field(default=())

    def points(self) -> Array:
        """[CELLS * CELLS, 2], row by row from below."""
        x, y = np.meshgrid(self.x, self.y)
        return np.stack([x.ravel(), y.ravel()], axis=1)


def known(env: str) -> _Known:
    name = env.split("/")[-1].split(":")[-1]
    return next((k for start, k in _KNOWN.items() if name.startswith(start)), _Known())


def plane_of(policy: Policy, env: str, played: Played) -> Plane | str:
    """The plane to draw over, or a sentence that says why there is none."""
    space = policy.observation_space
    if type(space).__name__ != "Box":
        return f"the observation is a {type(space).__name__}, not a vector of numbers"
    if len(space.shape) != 1:
        return f"the observation is an image or table of shape {list(space.shape)}"
    size = int(space.shape[0])
    if not 2 <= size <= _MOST_COMPONENTS or np.dtype(space.dtype).kind != "f":
        return f"the observation has {size} numbers of type {np.dtype(space.dtype)}"
    seen = np.asarray(played.observations, np.float64)
    if _is_angle_and_speed(space, seen):
        return _angle_plane(space, seen, env)
    return _component_plane(policy, space, seen, env)


def _is_angle_and_speed(space: Any, seen: Array) -> bool:
    """(cos θ, sin θ, θ̇)?"""
    if space.shape != (3,) or np.abs(np.r_[space.low[:2], space.high[:2]]).max() > 1.01:
        return False
    return bool(np.allclose(seen[:, 0] ** 2 + seen[:, 1] ** 2, 1.0, atol=1e-3))


def _angle_plane(space: Any, seen: Array, env: str) -> Plane:
    names = known(env).names
    low, high = _range(space, seen, 2)
    most = max(abs(low), abs(high))
    return Plane(
        names=names if names[0] else ("angle θ (rad)", "angular speed θ̇ (rad/s)"),
        x=np.linspace(-np.pi, np.pi, CELLS),
        y=np.linspace(-most, most, CELLS),
        observe=lambda p: np.stack([np.cos(p[:, 0]), np.sin(p[:, 0]), p[:, 1]], 1).astype(
            space.dtype
        ),
        project=lambda o: np.stack([np.arctan2(o[:, 1], o[:, 0]), o[:, 2]], 1),
        wraps=True,
        actions=known(env).actions,
    )


def _component_plane(policy: Policy, space: Any, seen: Array, env: str) -> Plane:
    size, facts = seen.shape[1], known(env)
    named = bool(facts.names[0]) and max(facts.components) < size
    i, j = facts.components if named or size == 2 else _most_telling(policy, seen)
    rest = np.zeros(size) if named else seen.mean(axis=0)
    names = facts.names if named else (f"observation[{i}]", f"observation[{j}]")
    ranges = facts.ranges if named else (None, None)
    x, y = (
        _widened(known_, seen[:, c]) if known_ else _range(space, seen, c)
        for known_, c in zip(ranges, (i, j), strict=True)
    )

    def observe(points: Array) -> Array:
        observations = np.tile(rest, (len(points), 1))
        observations[:, i], observations[:, j] = points[:, 0], points[:, 1]
        return observations.astype(space.dtype)

    note = ""
    if size > 2:
        at = "at 0" if named else "at their mean over the episode"
        chosen = "" if named else ", the two on which the action depends the most there"
        note = f"A cut: components {i} and {j} of {size} vary{chosen}; the others stand {at}."
    return Plane(
        names=(names[0], names[1]),
        x=np.linspace(*x, CELLS),
        y=np.linspace(*y, CELLS),
        observe=observe,
        project=lambda o: o[:, [i, j]],
        note=note,
        wraps=size == 2 and "θ" in names[0],
        actions=facts.actions,
    )


def _most_telling(policy: Policy, seen: Array) -> tuple[int, int]:
    """The two components that move the action most, each over the range that it was seen in."""
    middle, effects = seen.mean(axis=0), []
    for i in range(seen.shape[1]):
        rows = np.tile(middle, (33, 1))
        rows[:, i] = np.linspace(seen[:, i].min(), seen[:, i].max(), 33)
        policy.reset()
        actions = policy.act_batch(rows.astype(policy.observation_space.dtype))
        effects.append(float(np.asarray(actions, np.float64).reshape(33, -1).std(axis=0).sum()))
    order = np.argsort(effects, kind="stable")[::-1]
    first, second = sorted((int(order[0]), int(order[1])))
    return first, second


def _widened(known: tuple[float, float], seen: Array) -> tuple[float, float]:
    """That range, or as much more as was seen: no path may leave its map."""
    return min(known[0], 1.05 * float(seen.min())), max(known[1], 1.05 * float(seen.max()))


def _range(space: Any, seen: Array, i: int) -> tuple[float, float]:
    """The bounds, where they are near what was seen; else half as far again as was seen."""
    low, high = float(space.low[i]), float(space.high[i])
    least, most = float(seen[:, i].min()), float(seen[:, i].max())
    width = max(most - least, 1e-3)
    if high - low <= 10 * width:
        return low, high
    return least - 0.25 * width, most + 0.25 * width


# -- drawing ---------------------------------------------------------------------------------------


def draw_policy(axes: Any, policy: Policy, plane: Plane, played: Played, theme: Theme) -> str:
    """The deterministic action over the plane; gives the words for its caption."""
    policy.reset()  # a memory starts from nothing, at every point
    actions = policy.act_batch(plane.observe(plane.points()))
    space = policy.action_space
    if type(space).__name__ == "Discrete":
        _draw_choices(axes, plane, actions, space, theme)
        words = "the action that is taken."
    else:
        flat = np.asarray(actions, np.float64).reshape(len(actions), -1)
        shape = np.shape(actions)[1:]
        one = flat.shape[1] == 1
        _draw_field(
            axes, plane, flat[:, 0], "RdBu_r", "action" if one else "action[0]", centred=True
        )
        words = (
            "the action that is taken."
            if one
            else f"the first of {flat.shape[1]} actions {list(shape)}."
        )
    _draw_path(axes, plane, played, theme)
    return words


def draw_value(axes: Any, policy: Policy, plane: Plane, played: Played, theme: Theme) -> str:
    """The critic's expectation over the plane."""
    values = policy.value_batch(plane.observe(plane.points()))
    _draw_field(axes, plane, values, "viridis", "value")
    _draw_path(axes, plane, played, theme)
    scaled = policy.normaliser.returns is not None
    return "what the critic expects to come, discounted" + (
        ", in units of the scaled reward that it learned from." if scaled else "."
    )


def _extent(plane: Plane) -> list[float]:
    return [plane.x[0], plane.x[-1], plane.y[0], plane.y[-1]]


def _draw_field(
    axes: Any, plane: Plane, values: Array, colours: str, name: str, *, centred: bool = False
) -> None:
    grid = np.asarray(values, np.float64).reshape(CELLS, CELLS)
    limit = float(np.abs(grid).max()) or 1.0
    image = axes.imshow(
        grid, origin="lower", extent=_extent(plane), aspect="auto", cmap=colours,
        interpolation="bilinear", **({"vmin": -limit, "vmax": limit} if centred else {}),
    )  # fmt: skip
    if not centred and np.ptp(grid) > 0:
        axes.contour(plane.x, plane.y, grid, levels=8, colors="white", linewidths=0.5, alpha=0.5,
                     linestyles="solid")  # fmt: skip
    bar = axes.figure.colorbar(image, ax=axes, pad=0.02, aspect=28)
    bar.set_label(name)
    bar.outline.set_visible(False)


def _draw_choices(axes: Any, plane: Plane, actions: Array, space: Any, theme: Theme) -> None:
    from matplotlib.colors import ListedColormap
    from matplotlib.patches import Patch

    numbers = np.asarray(actions).reshape(CELLS, CELLS) - int(space.start)
    count = int(space.n)
    colours = [COLOURS[i % len(COLOURS)] for i in range(count)]
    axes.imshow(
        numbers, origin="lower", extent=_extent(plane), aspect="auto", vmin=-0.5, vmax=count - 0.5,
        cmap=ListedColormap(colours), interpolation="nearest", alpha=0.75,
    )  # fmt: skip
    names = plane.actions if len(plane.actions) == count else ()
    shown = sorted(set(numbers.ravel().tolist()))
    patches = [
        Patch(
            color=colours[n], alpha=0.75, label=names[n] if names else f"action {n + space.start}"
        )
        for n in shown
    ]
    axes.legend(handles=patches, loc="lower center", bbox_to_anchor=(0.5, 1.0), ncols=4)


def _draw_path(axes: Any, plane: Plane, played: Played, theme: Theme) -> None:
    """The episode over the plane, from the circle to the square. It fades on the way: a long one
    that has come to rest would hide the map under it."""
    from matplotlib.collections import LineCollection

    path = plane.project(np.asarray(played.observations, np.float64))
    pieces = np.delete(np.stack([path[:-1], path[1:]], 1), _jumps(plane, path) - 1, axis=0)
    strength = np.maximum(0.03, np.exp(-np.arange(len(pieces)) / _FADING))
    for width, colour, alpha in ((2.6, "black", 0.6), (1.2, "white", 1.0)):
        line = LineCollection(list(pieces), colors=colour, linewidths=width * np.sqrt(strength),
                              alpha=alpha * strength, capstyle="round", zorder=3)  # fmt: skip
        axes.add_collection(line, autolim=False)
    marks = {"markersize": 6, "markerfacecolor": "white", "markeredgecolor": "black"}
    for point, mark in ((path[0], "o"), (path[-1], "s")):
        axes.plot(*point, mark, scalex=False, scaley=False, zorder=5, clip_on=False, **marks)
    axes.set_xlabel(plane.names[0])
    axes.set_ylabel(plane.names[1])
    axes.grid(False)
    if plane.wraps:
        axes.set_xticks([-np.pi, -np.pi / 2, 0, np.pi / 2, np.pi], ["−π", "−π/2", "0", "π/2", "π"])


def _jumps(plane: Plane, path: Array) -> Array:
    """Where the angle goes from π to −π: no line may be drawn across the picture."""
    if not plane.wraps:
        return np.zeros(0, int)
    return np.flatnonzero(np.abs(np.diff(path[:, 0])) > np.pi) + 1


def draw_episode(figure: Any, plane: Plane, played: Played, theme: Theme = LIGHT) -> None:
    """Both numbers of the plane, the action and the reward, step by step, from the beginning."""
    path = plane.project(np.asarray(played.observations[: SHOWN + 1], np.float64))
    actions = np.asarray(played.actions[:SHOWN], np.float64)
    actions = actions.reshape(len(actions), -1)
    first = path[:, 0].copy()
    first[_jumps(plane, path)] = np.nan
    rows = [
        (plane.names[0], first, "-"),
        (plane.names[1], path[:, 1], "-"),
        ("action" if actions.shape[1] == 1 else "action[0]", actions[:, 0], "steps-post"),
        ("reward", np.asarray(played.rewards[:SHOWN]), "-"),
    ]
    panels = figure.subplots(len(rows), 1, sharex=True)
    for axes, (name, values, kind), colour in zip(panels, rows, theme.colours, strict=False):
        drawstyle = "default" if kind == "-" else kind
        axes.plot(values, color=colour, linewidth=1.2, drawstyle=drawstyle)
        axes.set_ylabel(textwrap.fill(name, 15), fontsize="small")
        axes.margins(x=0.01)
        axes.locator_params(axis="y", nbins=4)
    figure.align_ylabels(panels)
    panels[-1].set_xlabel("step")

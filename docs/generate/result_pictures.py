"""Pictures for docs/results, as SVG from stored numbers: curves with bands, maps, an episode.

They are text without dates or random names, so that the same numbers give the same file.
"""

from __future__ import annotations

import base64
import itertools
import math
import statistics
import struct
import zlib
from collections.abc import Sequence
from typing import Any

WIDE, HIGH = 520, 220  # in pixels
_LEFT, _RIGHT, _TOP, _BELOW = 56, 8, 8, 26
COLORS = ("#3b7dd8", "#d8743b", "#3ba55d")
_SECONDS = 0.1  # of a step of the pendulum

Points = Sequence[tuple[float, float]]


class Axes:
    """Numbers to pixels; `log`: the logarithm of y."""

    def __init__(self, xs: Sequence[float], ys: Sequence[float], *, log: bool = False) -> None:
        self.log = log
        seen = [y for y in ys if y > 0 or not log]
        self.left, self.right = min(xs), max(xs)
        low, high = self._scaled(min(seen)), self._scaled(max(seen))
        self.low, self.high = low, high + 0.05 * (high - low or 1.0)

    def _scaled(self, y: float) -> float:
        return math.log10(y) if self.log else y

    def at(self, x: float, y: float) -> str:
        across = (x - self.left) / (self.right - self.left or 1.0)
        up = (self._scaled(y) - self.low) / (self.high - self.low)
        px = _LEFT + across * (WIDE - _LEFT - _RIGHT)
        py = HIGH - _BELOW - up * (HIGH - _BELOW - _TOP)
        return f"{px:.1f},{py:.1f}"

    def marks(self, foot: str) -> str:
        """Three heights, or each power of ten; below, where the axis begins and ends."""
        first, last = math.ceil(self.low), math.floor(self.high)
        levels = [10.0**k for k in range(first, last + 1)] if self.log else [
            self.low + share * (self.high - self.low) / 1.05 for share in (0.0, 0.5, 1.0)
        ]  # fmt: skip
        rows = []
        for level in levels:
            y = float(self.at(self.left, level).split(",")[1])
            text = f"{level:g}" if self.log or abs(self.high) < 10 else f"{level:,.0f}"
            rows.append(
                f'<line x1="{_LEFT}" x2="{WIDE - _RIGHT}" y1="{y:.1f}" y2="{y:.1f}" '
                f'stroke="#8884"/><text x="{_LEFT - 6}" y="{y + 4:.1f}" text-anchor="end">{text}'
                "</text>"
            )
        rows.append(
            f'<text x="{_LEFT}" y="{HIGH - 8}">{self.left:,.0f}</text>'
            f'<text x="{WIDE - _RIGHT}" y="{HIGH - 8}" text-anchor="end">{foot}</text>'
        )
        return "\n".join(rows)


def svg(title: str, *parts: str, high: int = HIGH) -> str:
    body = "\n".join(parts)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDE} {high}" width="{WIDE}" '
        f'height="{high}" font-family="sans-serif" font-size="11" fill="#777">\n'
        f"<title>{title}</title>\n{body}\n</svg>\n"
    )


def line(axes: Axes, points: Points, color: str, dash: str = "") -> str:
    placed = " ".join(axes.at(x, y) for x, y in points)
    dashes = f' stroke-dasharray="{dash}"' if dash else ""
    return f'<polyline points="{placed}" fill="none" stroke="{color}" stroke-width="2"{dashes}/>'


def band(axes: Axes, low: Points, high: Points, color: str) -> str:
    placed = " ".join(axes.at(x, y) for x, y in [*high, *reversed(low)])
    return f'<polygon points="{placed}" fill="{color}" opacity="0.25"/>'


def curve(title: str, points: Points, *, log: bool = False) -> str:
    """One run."""
    points = [(x, y) for x, y in points if y > 0 or not log]
    axes = Axes([x for x, _ in points], [y for _, y in points], log=log)
    foot = f"{points[-1][0]:,.0f} steps"
    return svg(title, axes.marks(foot), line(axes, points, COLORS[0]))


def several(title: str, groups: dict[str, list[list[float]]], steps: int) -> str:
    """Of each group the mean over its curves, and a band from the lowest to the highest. Later
    groups are dashed: where all are the same, all are seen."""
    every = [y for curves in groups.values() for one in curves for y in one]
    count = len(next(iter(groups.values()))[0])
    xs = [(i + 1) / count * steps for i in range(count)]
    axes = Axes([0.0, float(steps)], [0.0, *every])
    parts = [axes.marks(f"{steps:,} steps")]
    for i, (name, curves) in enumerate(groups.items()):
        columns = list(zip(*curves, strict=True))
        low = list(zip(xs, map(min, columns), strict=True))
        high = list(zip(xs, map(max, columns), strict=True))
        mean = list(zip(xs, map(statistics.mean, columns), strict=True))
        dash = ("", "8 6", "2 5")[i % 3]
        parts += [band(axes, low, high, COLORS[i]), line(axes, mean, COLORS[i], dash)]
        if not name:
            continue
        parts.append(  # curves rise: there is room on the left
            f'<text x="{_LEFT + 12}" y="{_TOP + 14 + 15 * i}" fill="{COLORS[i]}">{name}</text>'
        )
    return svg(title, *parts)


# -- the pendulum ----------------------------------------------------------------------------------


def maps(title: str, found: dict[str, Any]) -> str:
    """Torque and value over angle (across, from -π to π) and speed (up)."""
    side, top = 200, 22
    parts = []
    for i, name in enumerate(("torque", "value")):
        numbers = found[name]
        low, high = min(map(min, numbers)), max(map(max, numbers))
        x = 56 + i * (side + 40)
        data = base64.b64encode(png(numbers)).decode()
        parts.append(
            f'<text x="{x}" y="14">{name}, {low:.1f} (blue) to {high:.1f} (red)</text>'
            f'<image x="{x}" y="{top}" width="{side}" height="{side}" '
            f'preserveAspectRatio="none" href="data:image/png;base64,{data}"/>'
            f'<text x="{x}" y="{top + side + 14}">−π</text>'
            f'<text x="{x + side / 2:g}" y="{top + side + 14}" text-anchor="middle">upright</text>'
            f'<text x="{x + side}" y="{top + side + 14}" text-anchor="end">π</text>'
        )
    speed = f"{found['speed']:g}"
    parts.append(
        f'<text x="50" y="{top + 10}" text-anchor="end">{speed}</text>'
        f'<text x="50" y="{top + side}" text-anchor="end">−{speed}</text>'
        f'<text x="50" y="{top + side / 2:g}" text-anchor="end">speed</text>'
    )
    return svg(title, *parts, high=top + side + 24)


def png(numbers: list[list[float]]) -> bytes:
    """A picture with a pixel for each number: blue, white, red."""
    low, high = min(map(min, numbers)), max(map(max, numbers))
    rows = b""
    for row in numbers:
        rows += b"\0"  # no filter
        for value in row:
            share = 2 * (value - low) / (high - low or 1.0) - 1
            fade = round(235 * (1 - abs(share))) + 20
            rows += bytes((255, fade, fade) if share > 0 else (fade, fade, 255))

    def chunk(kind: bytes, data: bytes) -> bytes:
        check = struct.pack(">I", zlib.crc32(kind + data))
        return struct.pack(">I", len(data)) + kind + data + check

    size = struct.pack(">IIBBBBB", len(numbers[0]), len(numbers), 8, 2, 0, 0, 0)
    packed = zlib.compress(rows, 9)
    return (
        b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", size) + chunk(b"IDAT", packed) + chunk(b"IEND", b"")
    )


def trajectory(title: str, episode: list[list[float]]) -> str:
    """Angle and torque of an episode, over its seconds."""
    times = [i * _SECONDS for i in range(len(episode))]
    angle = [(t, row[0]) for t, row in zip(times, episode, strict=True)]
    torque = [(t, row[2]) for t, row in zip(times, episode, strict=True)]
    axes = Axes([0.0, times[-1]], [-5.0, 5.0])
    parts = [axes.marks(f"{times[-1]:.0f} seconds")]
    # An angle beyond π begins again at -π: the line is cut there.
    pieces: list[list[tuple[float, float]]] = [[angle[0]]]
    for before, now in itertools.pairwise(angle):
        if abs(now[1] - before[1]) > math.pi:
            pieces.append([])
        pieces[-1].append(now)
    parts += [line(axes, piece, COLORS[0]) for piece in pieces if len(piece) > 1]
    parts.append(line(axes, torque, COLORS[1], "2 5"))
    for i, name in enumerate(("angle, 0 is upright", "torque")):
        y = HIGH - _BELOW - 22 + 15 * i
        parts.append(f'<text x="{WIDE - 140}" y="{y}" fill="{COLORS[i]}">{name}</text>')
    return svg(title, *parts)


def moving(title: str, episode: list[list[float]]) -> str:
    """The episode at its real pace, again and again."""
    turned, turns = [episode[0][0]], 0.0
    for before, now in itertools.pairwise(episode):
        turns -= round((now[0] - before[0]) / (2 * math.pi))
        turned.append(now[0] + 2 * math.pi * turns)
    # θ grows against the clock, and SVG turns with it.
    values = ";".join(f"{-math.degrees(angle):.1f} {WIDE / 2:g} 110" for angle in turned)
    seconds = _SECONDS * len(episode)
    return svg(
        title,
        f'<circle cx="{WIDE / 2:g}" cy="110" r="4"/>',
        f'<g stroke="{COLORS[0]}" fill="{COLORS[0]}">'
        f'<line x1="{WIDE / 2:g}" y1="110" x2="{WIDE / 2:g}" y2="25" stroke-width="5"/>'
        f'<circle cx="{WIDE / 2:g}" cy="25" r="11"/>'
        f'<animateTransform attributeName="transform" type="rotate" dur="{seconds:g}s" '
        f'repeatCount="indefinite" values="{values}"/></g>',
    )

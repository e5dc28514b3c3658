"""Pictures and sentences of docs/results, made of numbers that are known."""

from __future__ import annotations

import io
import itertools
import math
import re
import xml.etree.ElementTree as ET
from typing import Any

import numpy as np
import pytest
import result_pictures as pictures
import results
from matplotlib import image


def points_of(svg: str, kind: str = "polyline") -> list[list[tuple[float, float]]]:
    found = ET.fromstring(svg).iter(f"{{http://www.w3.org/2000/svg}}{kind}")
    return [
        [
            (float(x), float(y))
            for x, y in (pair.split(",") for pair in one.get("points", "").split())
        ]
        for one in found
    ]


def test_on_a_log_axis_powers_of_ten_are_equally_far_apart() -> None:
    svg = pictures.curve("loss", [(1, 1000.0), (2, 100.0), (3, 10.0), (4, 0.0)], log=True)
    ((_, a), (_, b), (_, c)) = points_of(svg)[0]  # what has no logarithm is left out
    assert c - b == pytest.approx(b - a, abs=0.11)
    assert re.findall(r'text-anchor="end">(10*)<', svg) == ["10", "100", "1000"]


def test_a_line_and_a_band_for_each_number_of_workers() -> None:
    groups = {"1 worker": [[0.0, 10.0], [2.0, 6.0]], "2 workers": [[1.0, 8.0], [1.0, 8.0]]}
    svg = pictures.several("curves", groups, steps=100)
    first, second = points_of(svg)
    assert first == second  # the means are the same
    wide, narrow = points_of(svg, "polygon")
    assert len(wide) == 4
    assert narrow[:2] == narrow[:1:-1]  # both seeds are the same
    assert "2 workers" in svg


def test_a_map_has_a_pixel_for_each_number() -> None:
    numbers = [[-1.0, 0.0, 1.0], [1.0, 0.0, -1.0]]
    found = np.round(255 * image.imread(io.BytesIO(pictures.png(numbers)))[..., :3])
    assert found.shape == (2, 3, 3)
    assert found[0].tolist() == [[20, 20, 255], [255, 255, 255], [255, 20, 20]]
    assert found[1].tolist() == found[0][::-1].tolist()


def test_the_pendulum_turns_on_where_its_angle_begins_again() -> None:
    angles = [3.0, -3.1, -2.9, 3.1]  # over the bottom and back
    svg = pictures.moving("swing", [[angle, 0.0, 0.0, 0.0] for angle in angles])
    (values,) = re.findall(r'values="([^"]*)"', svg)
    turned = [math.radians(float(one.split()[0])) for one in values.split(";")]
    assert max(abs(b - a) for a, b in itertools.pairwise(turned)) < 0.4
    assert [math.cos(t) for t in turned] == pytest.approx([math.cos(a) for a in angles], abs=1e-2)
    pieces = points_of(pictures.trajectory("swing", [[a, 0.0, 1.0, 0.0] for a in angles]))
    assert [len(piece) for piece in pieces] == [2, 4]  # and the torque; a single point is no line


def stored(curves: dict[int, list[list[float]]], *, synchronous: bool) -> dict[str, Any]:
    return {
        "strategy": "gather", "synchronous": synchronous, "algorithm": "ppo", "env": "Toy-v0",
        "engine": "local", "asked": 50, "machine": "a machine",
        "runs": [{"acting": n, "seed": 7 + i, "return": c[-1], "steps": 64, "curve": c}
                 for n, all_of_it in curves.items() for i, c in enumerate(all_of_it)],
    }  # fmt: skip


def test_what_is_said_of_workers() -> None:
    same = {1: [[1.0, 2.0], [3.0, 4.0]], 2: [[1.0, 2.0], [3.0, 4.0]]}
    assert "Every curve of several workers is that of one" in results.by_workers(
        [stored(same, synchronous=True)]
    )
    apart = same | {4: [[1.0, 2.0], [3.0, 4.5]]}
    said = results.by_workers([stored(apart, synchronous=True)])
    assert "Of all places, 12% differ from the run with one worker, by 0.5 at most" in said
    assert "--seeds 7..8 --steps 50" in said
    bands = {1: [[1.0, 2.0], [3.0, 4.0]], 2: [[2.0, 9.0], [5.0, 5.0]]}
    said = results.by_workers([stored(bands, synchronous=False)])
    assert "meet that of one in 1 of 2 places" in said
    assert results.by_workers([]) == results.pendulum([]) == ""

"""Schedules at the points where they are easy to get wrong."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from manyhands.errors import ConfigError
from manyhands.math.optimiser import make_schedule


@pytest.mark.parametrize(
    ("spec", "points"),
    [
        (3e-4, {0.0: 3e-4, 0.5: 3e-4, 1.0: 3e-4}),
        (2, {0.0: 2.0, 1.0: 2.0}),
        ("3e-4", {0.0: 3e-4, 1.0: 3e-4}),
        ("constant:0.1", {0.3: 0.1}),
        ("linear:3e-4", {0.0: 3e-4, 0.5: 1.5e-4, 1.0: 0.0}),
        ("linear:4:2", {0.0: 4.0, 0.5: 3.0, 1.0: 2.0}),
        ("warmup:4:0.1", {0.0: 0.0, 0.05: 2.0, 0.1: 4.0, 1.0: 4.0}),
        ("warmup:4:0", {0.0: 4.0, 1.0: 4.0}),
        ("warmup-linear:4:0.2", {0.0: 0.0, 0.1: 2.0, 0.2: 4.0, 0.6: 2.0, 1.0: 0.0}),
    ],
)
def test_values(spec, points):
    schedule = make_schedule(spec)
    for progress, value in points.items():
        assert schedule(progress) == pytest.approx(value, abs=1e-15)


@given(
    st.sampled_from(["linear:3e-4", "warmup:3e-4:0.3", "warmup-linear:3e-4:0.3"]), st.floats(-2, 3)
)
def test_progress_outside_the_run_never_gives_a_value_outside_the_schedule(spec, progress):
    """The last batch may end beyond the last step: a learning rate must not go negative."""
    assert 0.0 <= make_schedule(spec)(progress) <= 3e-4


@pytest.mark.parametrize(
    "spec",
    [
        "cosine:1",
        "linear",
        "linear:",
        "linear:1:2:3",
        "warmup:1",
        "warmup:1:2",
        "nan",
        "inf",
        "",
        True,
    ],
)
def test_nonsense_is_refused_with_the_known_forms(spec):
    with pytest.raises(ConfigError, match="linear:START"):
        make_schedule(spec)

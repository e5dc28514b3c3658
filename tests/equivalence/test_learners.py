"""Two learners are one learner with twice the batch."""

from __future__ import annotations

import async_programs
import numpy as np
import pytest

from manyhands import launch

pytestmark = [pytest.mark.usefixtures("nothing_left")]


@pytest.mark.parametrize("engine", ["inline", "local"])
def test_two_learners_are_one_with_twice_the_batch(engine: str) -> None:
    one = launch(async_programs.learn_from_the_same, 40, 1, workers=1, engine="inline")[0]
    two = launch(async_programs.learn_from_the_same, 40, 2, workers=2, engine=engine, timeout=60)
    assert np.array_equal(two[0], two[1])
    start = launch(async_programs.learn_from_the_same, 0, 1, workers=1, engine="inline")[0]
    assert np.abs(one - start).max() > 0.01  # something was learned
    np.testing.assert_allclose(two[0], one, rtol=1e-3, atol=1e-4)


def test_replicas_are_equal_after_a_thousand_updates() -> None:
    two = launch(async_programs.learn_from_the_same, 1000, 2, workers=2, engine="local", timeout=60)
    assert np.isfinite(two[0]).all()
    assert np.array_equal(two[0], two[1])

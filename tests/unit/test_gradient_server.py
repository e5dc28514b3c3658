"""The arithmetic of the gradient server: exact, whatever the number of levels."""

from __future__ import annotations

import async_programs
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from manyhands import launch
from manyhands.blocks.reducer import Reducer
from manyhands.errors import ConfigError, WorkerError


def test_mean_and_sum_by_hand() -> None:
    pushes = [np.array([1.0, -2.0]), np.array([3.0, 4.0]), np.array([-1.0, 1.0])]
    for reduce, want in (("mean", [1.0, 1.0]), ("sum", [3.0, 3.0])):
        reducer = Reducer(3, reduce)  # type: ignore[arg-type]
        for push in pushes:
            assert not reducer.full
            assert reducer.offer(push, version=1, newest=1)
        assert reducer.full
        np.testing.assert_array_equal(reducer.take(), want)
        assert reducer.counters() == {"pushed": 3, "applied": 3, "refused": 0, "waiting": 0}
    np.testing.assert_array_equal(pushes[0], [1.0, -2.0])  # the caller's own is left alone


@settings(max_examples=50, deadline=None)
@given(
    st.lists(st.integers(-1000, 1000), min_size=1, max_size=24),
    st.integers(1, 5),
    st.sampled_from(["mean", "sum"]),
)
def test_levels_change_nothing(numbers: list[int], each: int, reduce: str) -> None:
    """Sums of sums, with a rest that does not fill its reducer, are the sum of all."""
    flat, top = Reducer(len(numbers), reduce), Reducer(len(numbers), reduce)  # type: ignore[arg-type]
    below = Reducer(each)
    for i, number in enumerate(numbers):
        gradient = np.array([float(number), 1.0])
        flat.offer(gradient, i, i)
        below.offer(gradient, i, i)
        if below.full or i == len(numbers) - 1:
            oldest = below.oldest
            assert oldest is not None
            total, count = below.take_sum()
            top.offer(total, oldest, i, count)
    assert flat.full
    assert top.full
    np.testing.assert_array_equal(flat.take(), top.take())
    assert flat.counters() == top.counters()


def test_too_old_is_refused_and_counted() -> None:
    reducer = Reducer(2, "mean", max_lag=3)
    assert reducer.offer(np.ones(2), version=7, newest=10)
    assert not reducer.offer(np.ones(2), version=6, newest=10)
    assert not reducer.offer(np.ones(2), version=1, newest=10, count=5)
    assert reducer.counters() == {"pushed": 7, "applied": 0, "refused": 6, "waiting": 1}
    assert reducer.drop() == 1
    assert reducer.counters() == {"pushed": 7, "applied": 0, "refused": 7, "waiting": 0}


def test_wrong_use_is_said() -> None:
    with pytest.raises(ConfigError, match="pushes=0"):
        Reducer(0)
    with pytest.raises(ConfigError, match="'median' is not mean or sum"):
        Reducer(1, "median")  # type: ignore[arg-type]
    reducer = Reducer(2)
    with pytest.raises(ConfigError, match="nothing was pushed"):
        reducer.take()
    reducer.offer(np.ones(3), 0, 0)
    with pytest.raises(ConfigError, match=r"\(2,\).*\(3,\)"):
        reducer.offer(np.ones(2), 0, 0)


@pytest.mark.parametrize("engine", ["inline", "local"])
@pytest.mark.parametrize(("reduce", "relays"), [("mean", []), ("sum", []), ("sum", [1, 2])])
def test_ten_thousand_pushes_of_eight_workers(engine: str, reduce: str, relays: list[int]) -> None:
    each, workers = (1250, 8) if engine == "local" and reduce == "mean" else (125, 8)
    told = launch(
        async_programs.push_many, each, 4, reduce, relays, -1,
        workers=workers, engine=engine, timeout=60,
    )  # fmt: skip
    pushes = each * workers
    counters = told[0]["counters"]
    assert counters["pushed"] == pushes
    assert counters["applied"] + counters["waiting"] == pushes
    assert counters["refused"] == 0
    # SGD with a step of 1 on whole numbers: the weights are minus the sum of all pushes
    if relays:  # a step takes the four that came together, or the next sum above
        assert counters["waiting"] < 4
        assert {-one["weight"][0] for one in told} == {counters["applied"]}
        return
    assert counters["version"] == 1 + pushes // 4
    total = np.array([pushes, each * sum(range(workers))]) / (4 if reduce == "mean" else 1)
    for one in told:
        np.testing.assert_array_equal(one["weight"], -total)
        assert (one["taken"], one["refused"]) == (each, 0)


@pytest.mark.parametrize("engine", ["inline", "local"])
def test_every_push_is_taken_or_refused(engine: str) -> None:
    """Workers that pull only now and then push old gradients, and are told of each."""
    each, workers = 200, 8
    told = launch(
        async_programs.push_many, each, 1, "sum", [], 4,
        workers=workers, engine=engine, timeout=60,
    )  # fmt: skip
    counters = told[0]["counters"]
    assert counters["pushed"] == each * workers == counters["applied"] + counters["refused"]
    assert counters["refused"] == sum(one["refused"] for one in told) > 0
    assert counters["applied"] == sum(one["taken"] for one in told) > 0
    assert counters["version"] == 1 + counters["applied"]
    np.testing.assert_array_equal(told[0]["weight"][0], -counters["applied"])


def test_relays_must_divide_the_pushes() -> None:
    with pytest.raises(WorkerError, match="3 pushes do not go evenly into 2 relays"):
        launch(async_programs.push_many, 1, 3, "sum", [1, 2], -1, workers=3, engine="inline")

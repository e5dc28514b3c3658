"""The arithmetic of the gradient server: exact, whatever the number of levels."""

from __future__ import annotations

import functools
from types import SimpleNamespace
from typing import Any

import async_programs
import five_workers
import numpy as np
import pytest
from five_workers import APPLIED, OLD, Pushes
from hypothesis import given, settings
from hypothesis import strategies as st
from suite import suite

from manyhands import launch
from manyhands.blocks.gradients import Reducer
from manyhands.errors import CollectiveError, ConfigError, WorkerError
from manyhands.strategies import gradient_server
from manyhands.strategies.context import Context
from manyhands.strategies.messages import Weights
from manyhands.strategies.progress import RunProgress


def fake(**facts: Any) -> Any:
    return SimpleNamespace(**facts)


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


def pushes(cases: list[Pushes]) -> list[Any]:
    """Ten thousand of them as a slow test."""
    return [
        pytest.param(case, marks=[pytest.mark.slow] * case.slow, id=case.name) for case in cases
    ]


def acting(engine: str, slow: bool) -> int:
    """Workers that push; one more owns the model. Nine processes take long to start."""
    return five_workers.WORKERS - 1 if engine == "local" and not slow else 8


@functools.cache
def all_told(engine: str, slow: bool) -> list[dict[str, Any]]:
    """What each worker tells of each case, in one launch."""
    many = acting(engine, slow)
    if engine == "local" and not slow:
        return five_workers.five_workers(engine, slow)
    plan = [case.program(many) for case in APPLIED + OLD if case.slow == slow]
    return launch(suite, plan, workers=1 + many, engine=engine, timeout=60)


def told(engine: str, case: Pushes) -> list[Any]:
    return [answer[case.name] for answer in all_told(engine, case.slow)]


@pytest.mark.parametrize("case", pushes(APPLIED))
@pytest.mark.parametrize("engine", ["inline", "local"])
def test_every_push_is_applied(engine: str, case: Pushes) -> None:
    """SGD with a step of 1 on whole numbers: the weights are minus the sum, or mean, of all.

    The owner only serves.
    """
    found, many = told(engine, case), acting(engine, case.slow)
    each = case.count // many
    assert found[0]["counters"] == {
        "pushed": case.count, "applied": case.count, "refused": 0, "waiting": 0,
        "version": 1 + case.count // 4,
    }  # fmt: skip
    total = np.array([case.count, each * sum(range(1 + many))])
    for one in found:
        np.testing.assert_array_equal(one["weight"], -total / (4 if case.reduce == "mean" else 1))
    assert [(one["taken"], one["refused"]) for one in found[1:]] == [(each, 0)] * many


@pytest.mark.parametrize("case", pushes(OLD))
@pytest.mark.parametrize("engine", ["inline", "local"])
def test_every_push_is_applied_or_refused(engine: str, case: Pushes) -> None:
    """Workers that pull only now and then push old gradients: each is told of its own, and the
    server knows of all. A relay's answer is the one to its last sum."""
    found = told(engine, case)
    counters = found[0]["counters"]
    assert counters["pushed"] == case.count
    assert counters["applied"] + counters["refused"] + counters["waiting"] == case.count
    assert counters["waiting"] < case.together
    assert counters["refused"] > 0
    assert counters["applied"] > 0
    assert counters["version"] == 1 + counters["applied"] // case.together
    np.testing.assert_array_equal(found[0]["weight"][0], -counters["applied"])
    if case.levels == 1:
        assert counters["refused"] == sum(one["refused"] for one in found)
        assert counters["applied"] == sum(one["taken"] for one in found)


def test_a_restarted_worker_counts_from_one() -> None:
    """A worker that was started again is not told of the pushes of the one before it."""
    answers = gradient_server._Answers(fake(acting=[1, 2]))
    for number in range(1, 6):
        answers.note({"actor": 2, "number": number, "restarts": 0}, number != 4)
    under_way: Any = {4: "fourth", 5: "fifth", 6: "sixth"}
    me = fake(part=fake(rank=1), restarts=0)
    assert gradient_server.refused(me, under_way, answers.news()) == ["fourth"]
    assert under_way == {6: "sixth"}
    again, mine = fake(part=fake(rank=1), restarts=1), {1: "first", 4: "fourth"}
    assert gradient_server.refused(again, mine, answers.news()) == []  # type: ignore[arg-type]
    assert len(mine) == 2
    answers.note({"actor": 2, "number": 1, "restarts": 1}, False)
    answers.note({"actor": 2, "number": 9, "restarts": 0}, True)  # it was on its way when it died
    assert gradient_server.refused(again, mine, answers.news()) == ["first"]  # type: ignore[arg-type]
    assert mine == {4: "fourth"}


@pytest.mark.parametrize("restarts", [0, 1])
def test_what_died_with_a_worker_is_no_fault_of_the_count(restarts: int) -> None:
    """Killed near the end: when it is back it says good-bye and no more."""
    events: list[Any] = []
    records = fake(folder=fake(event=lambda name, **facts: events.append((name, facts))))
    context = fake(group=None, phases=fake(totals=dict), changes=None, worker=fake(later=set))
    last = {"actor": 1, "restarts": restarts, "sent": 0, "phases": {}}
    inbox = fake(drain=list, left={1: last}, lost=1, senders_left=set())
    reducer = Reducer(3)
    reducer.offer(np.ones(2), 0, 0)
    progress = RunProgress(context, records)
    progress._speeds = lambda *_: ""  # type: ignore[method-assign]
    if restarts == 0:
        with pytest.raises(WorkerError, match="0 were pushed, 0 applied and 1 refused"):
            gradient_server.finish(progress, inbox, reducer)
        return
    gradient_server.finish(progress, inbox, reducer)
    assert (progress.restarts, progress.lost) == (1, 1)
    assert events == [("restart", {"worker": 1, "life": 1})]


@pytest.mark.parametrize("error", [CollectiveError("it has finished"), FileNotFoundError()])
def test_a_worker_that_comes_back_when_all_is_over(error: Exception) -> None:
    """Killed between its good-bye and its end: when it is back it has nothing to do, and leaves."""

    def pull(**_: Any) -> None:
        raise error

    context = Context.__new__(Context)
    context.worker = fake(
        timeout=1.0, main_has_left=lambda: True, weights=lambda *_, **__: fake(pull=pull)
    )
    context.stop, context.restarts = False, 1
    weights = Weights(context)
    assert weights.pull() is None
    assert context.stop
    context.restarts = 0  # one that was never restarted has not seen a run yet
    with pytest.raises(type(error)):
        weights.pull()


def test_relays_must_divide_the_pushes() -> None:
    with pytest.raises(WorkerError, match="3 pushes do not go evenly into 2 relays"):
        launch(async_programs.push_many, "x", 1, 3, "sum", [1, 2], -1, workers=3, engine="inline")

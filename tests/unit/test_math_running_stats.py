"""Running statistics: equal to numpy over everything seen, however it is cut and merged."""

import json

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from manyhands.errors import ConfigError
from manyhands.math.running_stats import Moments, RunningStats


def check(stats, rows):
    assert stats.count == len(rows)
    np.testing.assert_allclose(stats.mean, rows.mean(axis=0), atol=1e-9)
    np.testing.assert_allclose(stats.variance, rows.var(axis=0), atol=1e-9)


@settings(max_examples=50, deadline=None)
@given(st.lists(st.integers(0, 7), min_size=1, max_size=6), st.integers(0, 2**32 - 1))
def test_batches_of_any_size_give_the_moments_of_all_rows(sizes, seed):
    rng = np.random.default_rng(seed)
    batches = [rng.normal(3.0, 2.0, (n, 2, 3)) for n in sizes]
    stats = RunningStats((2, 3))
    for batch in batches:
        stats.update(batch)
        stats.synchronise()
    if sum(sizes):
        check(stats, np.concatenate(batches))
    else:
        assert stats.count == 0


def in_lockstep(workers):
    """`total` for several workers in one process: replayed until all contributions are known."""
    rounds = [[], []]
    for own in workers:  # the first sum
        flat = own.pending.mean.ravel()
        rounds[0].append(np.concatenate([[own.pending.count], own.pending.count * flat]))
    first = np.sum(rounds[0], axis=0)
    mean = first[1:] / max(first[0], 1)
    for own in workers:
        gap = own.pending.mean.ravel() - mean
        rounds[1].append(own.pending.m2.ravel() + own.pending.count * gap**2)
    second = np.sum(rounds[1], axis=0)
    for number, own in enumerate(workers):
        answers = iter([(rounds[0][number], first), (rounds[1][number], second)])

        def total(x, answers=answers):
            given_in, answer = next(answers)
            np.testing.assert_array_equal(x, given_in)
            return answer

        own.synchronise(total)


def by_deltas(workers):
    deltas = [own.delta() for own in workers]
    for own in workers:
        own.absorb(deltas)


@pytest.mark.parametrize("merge", [in_lockstep, by_deltas])
@pytest.mark.parametrize("shards", [(5, 5, 5), (0, 9, 2), (7,), (0, 0)])
def test_history_is_counted_once_over_many_merges(merge, shards):
    rng = np.random.default_rng(0)
    workers = [RunningStats((4,)) for _ in shards]
    seen = []
    for _ in range(5):
        for own, rows in zip(workers, shards, strict=True):
            batch = rng.normal(-1.0, 3.0, (rows, 4))
            own.update(batch)
            seen.append(batch)
        merge(workers)
    everything = np.concatenate(seen)
    for own in workers:
        if len(everything):
            check(own, everything)
        assert own.agreed.mean.tobytes() == workers[0].agreed.mean.tobytes()
        assert own.agreed.m2.tobytes() == workers[0].agreed.m2.tobytes()


def test_one_worker_without_any_engine_updates_too():
    stats = RunningStats((1,))
    stats.update(np.array([[1.0], [3.0]]))
    stats.synchronise()
    assert (stats.count, stats.mean.item(), stats.variance.item()) == (2, 2.0, 1.0)


def test_statistics_do_not_move_between_merges():
    """An observation is normalised in the update exactly as it was when acted upon."""
    stats = RunningStats((2,))
    stats.update(np.random.default_rng(0).normal(5, 2, (10, 2)))
    stats.synchronise()
    x = np.ones((3, 2), np.float32)
    acted = stats.normalise(x)
    stats.update(np.full((100, 2), 1000.0))
    np.testing.assert_array_equal(stats.normalise(x), acted)
    stats.synchronise()
    assert not np.array_equal(stats.normalise(x), acted)


def test_a_small_spread_survives_a_large_mean():
    rng = np.random.default_rng(0)
    rows = 1e6 + 1e-2 * rng.standard_normal((4000, 1))
    stats = RunningStats((1,))
    for batch in rows.reshape(40, 100, 1):
        stats.update(batch)
        stats.synchronise()
    np.testing.assert_allclose(stats.variance, rows.var(axis=0), rtol=1e-5)


def test_normalise():
    stats = RunningStats((2,))
    x = np.array([[1.0, -30.0]])
    np.testing.assert_array_equal(stats.normalise(x), [[1.0, -10.0]])  # nothing seen yet
    stats.update(np.array([[0.0, 1.0], [2.0, 1.0]]))
    stats.synchronise()
    found = stats.normalise(np.array([[3.0, 1.0], [3.0, 2.0]]), clip=5.0)
    np.testing.assert_allclose(found, [[2.0, 0.0], [2.0, 5.0]])  # the constant feature: no nan
    assert found.dtype == np.float32
    scaled = stats.normalise(np.array([[3.0, 0.0]]), center=False)
    np.testing.assert_allclose(scaled, [[3.0, 0.0]])
    assert np.array_equal(x, [[1.0, -30.0]])


def test_whole_numbers_and_bytes_are_accepted():
    stats = RunningStats((2,))
    stats.update(np.array([[0, 255], [2, 255]], np.uint8))
    stats.synchronise()
    assert stats.mean.tolist() == [1.0, 255.0]
    assert stats.normalise(np.array([[0, 255]], np.uint8)).tolist() == [[-1.0, 0.0]]


def test_state_goes_through_plain_arrays_with_what_is_pending():
    stats = RunningStats((3,))
    stats.update(np.random.default_rng(0).random((5, 3)))
    stats.synchronise()
    stats.update(np.random.default_rng(1).random((4, 3)))
    plain = json.loads(json.dumps({key: value.tolist() for key, value in stats.state().items()}))
    again = RunningStats((3,))
    again.load_state({key: np.array(value) for key, value in plain.items()})
    x = np.random.default_rng(2).random((2, 3))
    np.testing.assert_array_equal(again.normalise(x), stats.normalise(x))
    stats.synchronise()
    again.synchronise()
    np.testing.assert_array_equal(again.mean, stats.mean)
    np.testing.assert_array_equal(again.variance, stats.variance)
    with pytest.raises(ConfigError, match="shape"):
        RunningStats((2,)).load_state(stats.state())


def test_a_batch_of_another_shape_is_refused():
    with pytest.raises(ConfigError, match=r"\[N, 3\].*\(5, 2\)"):
        RunningStats((3,)).update(np.zeros((5, 2)))


def test_merge_is_symmetric():
    rng = np.random.default_rng(0)
    a, b = Moments.of(rng.random((3, 2))), Moments.of(rng.random((8, 2)))
    np.testing.assert_allclose(a.merge(b).m2, b.merge(a).m2)
    assert a.merge(Moments.empty((2,))) is a


def test_many_small_batches_that_are_overwritten_at_once():
    """As a rollout does: one array, written over by every step, and far more rows than are kept."""
    rng = np.random.default_rng(4)
    rows, stats, now = rng.normal(5.0, 3.0, (1000, 4, 2)), RunningStats((2,)), np.zeros((4, 2))
    for row in rows:
        now[:] = row
        stats.update(now)
    stats.synchronise()
    check(stats, rows.reshape(-1, 2))


def test_state_between_two_steps_changes_no_bit_of_what_follows():
    rng = np.random.default_rng(5)
    rows = rng.normal(5.0, 3.0, (600, 4, 2))
    whole, first, second = (RunningStats((2,)) for _ in range(3))
    for number, row in enumerate(rows):
        whole.update(row)
        (first if number < 301 else second).update(row)
        if number == 300:
            second.load_state(first.state())
    assert whole.pending.count == second.pending.count == 2400
    np.testing.assert_array_equal(whole.pending.mean, second.pending.mean)
    np.testing.assert_array_equal(whole.pending.m2, second.pending.m2)

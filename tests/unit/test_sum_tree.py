"""The sum tree against a naive list, for every operation and sizes that are no powers of two."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from manyhands.errors import ConfigError
from manyhands.replay import compiled_loops
from manyhands.replay.sum_tree import CompiledTree, SumTree

LOOPS = compiled_loops()
assert LOOPS is not None, "the loops need numba: pip install 'manyhands[compiled]'"
# As Python runs them: what numba makes of them is compared with that, too.
PLAIN = SimpleNamespace(draw=LOOPS.draw.py_func, put=LOOPS.put.py_func)
BOTH = pytest.mark.parametrize("loops", [None, LOOPS], ids=["numpy", "loops"])

SIZES = st.one_of(
    st.integers(1, 40),
    st.integers(41, 5000),
    st.integers(5001, 1_000_000),
    st.sampled_from([255, 256, 257, 4095, 4096, 4097, 65_536, 65_537, 99_999, 1_000_000]),
)
PRIORITY = st.one_of(st.just(0.0), st.floats(1e-6, 1e6))


def make(size: int, loops: Any) -> SumTree:
    return SumTree(size) if loops is None else CompiledTree(size, loops)


def naive_find(values: list[float], target: float) -> int:
    running = 0.0
    for i, value in enumerate(values):
        running += value
        if target < running:
            return i
    return max(i for i, value in enumerate(values) if value > 0.0)


def accepts(values: np.ndarray, target: float, found: int) -> bool:
    """Whether `found` is right but for rounding in the running sums."""
    slack = 1e-9 * max(values.sum(), 1e-300)
    before = values[:found].sum()
    return values[found] > 0.0 and before - slack <= target <= before + values[found] + slack


@settings(max_examples=120, deadline=None)
@given(st.integers(1, 300), st.sampled_from([None, PLAIN, LOOPS]), st.data())
def test_every_operation_against_a_list(size: int, loops: Any, data: st.DataObject) -> None:
    tree, values = make(size, loops), [0.0] * size
    for _ in range(data.draw(st.integers(1, 6))):
        if data.draw(st.integers(0, 9)) == 0:
            tree.clear()
            values = [0.0] * size
        batch = data.draw(
            st.lists(st.tuples(st.integers(0, size - 1), PRIORITY), min_size=1, max_size=40)
        )
        tree.set(np.array([i for i, _ in batch]), np.array([p for _, p in batch]))
        for i, priority in batch:  # in order: the last one wins
            values[i] = priority
        assert tree.values.tolist() == values
        assert tree.total == pytest.approx(sum(values), rel=1e-12)
        assert tree.max() == max(values)
        positive = [v for v in values if v > 0.0]
        assert tree.min_positive() == (min(positive) if positive else np.inf)
        some = data.draw(st.lists(st.integers(0, size - 1), max_size=5))
        assert tree.get(np.array(some, np.int64)).tolist() == [values[i] for i in some]
        if positive:
            targets = np.array(data.draw(st.lists(st.floats(0, 1), min_size=1, max_size=20)))
            targets *= tree.total
            for target, found in zip(targets, tree.find(targets), strict=True):
                right = naive_find(values, target)
                assert found == right or accepts(np.array(values), target, int(found))


@settings(max_examples=40, deadline=None)
@given(SIZES, st.sampled_from([None, LOOPS]), st.integers(0, 2**32 - 1))
def test_sizes_up_to_a_million(size: int, loops: Any, seed: int) -> None:
    rng = np.random.default_rng(seed)
    tree, values = make(size, loops), np.zeros(size)
    for count in (size, 1, int(rng.integers(1, 700)), int(rng.integers(1, 700))):
        indices = rng.integers(0, size, count)
        priorities = rng.random(count) * (rng.random(count) < 0.7)
        tree.set(indices, priorities)
        values[indices] = priorities
    np.testing.assert_array_equal(tree.values, values)
    assert tree.total == pytest.approx(values.sum(), rel=1e-12)
    assert tree.max() == values.max()
    if tree.total == 0.0:
        return
    assert tree.min_positive() == values[values > 0].min()
    targets = rng.random(200) * tree.total
    targets[:2] = 0.0, tree.total  # both ends
    found = tree.find(targets)
    assert (values[found] > 0.0).all()
    running = np.cumsum(values)
    slack = 1e-9 * tree.total
    assert (running[found] >= targets - slack).all()
    assert (running[found] - values[found] <= targets + slack).all()


@BOTH
@pytest.mark.parametrize("size", [1, 2, 16, 17, 256, 257, 70_000, 1_100_000])
def test_a_batch_of_one(size: int, loops: Any) -> None:
    tree = make(size, loops)
    tree.set(np.array([size - 1]), np.array([3.0]))
    assert tree.find(np.array([0.0])).tolist() == [size - 1]
    assert tree.find(np.array([2.999])).tolist() == [size - 1]
    assert (tree.total, tree.max(), tree.min_positive()) == (3.0, 3.0, 3.0)


@BOTH
def test_last_of_two_writes_to_one_index_wins_at_any_size(loops: Any) -> None:
    for size in (1, 5, 1000, 1_000_000):
        tree = make(size, loops)
        tree.set(np.array([0, 0, 0]), np.array([5.0, 7.0, 2.0]))
        assert (tree.values[0], tree.total, tree.max()) == (2.0, 2.0, 2.0)


@BOTH
def test_zero_is_never_found(loops: Any) -> None:
    rng = np.random.default_rng(0)
    tree = make(100_000, loops)
    tree.set(np.arange(100_000), np.where(rng.random(100_000) < 0.999, 0.0, 1.0))
    found = tree.find(rng.random(20_000) * tree.total)
    assert (tree.values[found] > 0.0).all()
    assert set(found.tolist()) == set(np.flatnonzero(tree.values).tolist())


@BOTH
@pytest.mark.parametrize("last", [0, 1, 17, 4095, 4096, 99_999])
def test_a_target_at_the_total_means_the_last_priority(loops: Any, last: int) -> None:
    """Rounding can lead there. Behind it are only zeros, up to the end of the tree."""
    tree = make(100_000, loops)
    tree.set(np.array([0, last]), np.array([0.1, 0.2]))
    assert tree.find(np.array([tree.total, 2 * tree.total])).tolist() == [last, last]


@BOTH
@pytest.mark.parametrize("size", [3, 500, 70_000])
def test_largest_and_smallest_after_they_were_taken_away(loops: Any, size: int) -> None:
    """More changes than are looked through at once, and the answer overwritten in between."""
    rng = np.random.default_rng(size)
    tree, values = make(size, loops), np.zeros(size)
    for turn in range(300):
        ends = [values.argmax(), np.where(values > 0.0, values, np.inf).argmin()]
        indices = np.append(rng.integers(0, size, 3), ends if turn % 3 else [])
        priorities = rng.random(len(indices)) * (rng.random(len(indices)) < 0.8)
        tree.set(indices, priorities)
        for i, priority in zip(indices.astype(int), priorities, strict=True):
            values[i] = priority
        if turn % 70 > 3 or turn % 2:
            continue  # nobody asks for a while
        assert tree.max() == values.max()
        assert tree.min_positive() == np.where(values > 0.0, values, np.inf).min()


@BOTH
def test_arrays_of_any_form_are_taken(loops: Any) -> None:
    tree, values = make(40, loops), np.arange(1.0, 41.0)
    values.flags.writeable = False
    tree.set(np.arange(40), values)
    tree.set(np.arange(40)[::2], values[::-2])
    assert tree.values[::2].tolist() == values[::-2].tolist()
    assert tree.find(np.linspace(0.0, tree.total, 9)[::-2]).tolist()[0] == 39


@BOTH
def test_nothing_to_set_changes_nothing(loops: Any) -> None:
    tree = make(10, loops)
    tree.set(np.array([3]), np.array([2.0]))
    tree.set(np.array([], np.int64), np.array([]))
    assert (tree.total, tree.max(), tree.find(np.zeros(0)).tolist()) == (2.0, 2.0, [])


def test_all_zero_says_so() -> None:
    tree = SumTree(10)
    assert (tree.total, tree.max(), tree.min_positive()) == (0.0, 0.0, np.inf)
    with pytest.raises(ConfigError, match="all priorities are 0"):
        tree.find(np.array([0.0]))


def test_priorities_of_very_unlike_size() -> None:
    """A tiny priority behind a huge one is lost in rounding; nothing else may go wrong."""
    tree = SumTree(1000)
    values = np.where(np.arange(1000) % 2, 1e-300, 1e12)
    tree.set(np.arange(1000), values)
    found = tree.find(np.linspace(0.0, 1.0, 5000) * tree.total)
    assert (values[found] > 0.0).all()
    assert tree.min_positive() == 1e-300


@BOTH
def test_sums_do_not_drift(loops: Any) -> None:
    """Half a million writes, huge and tiny in turn: the sums are those of a tree built at once."""
    rng = np.random.default_rng(1)
    grown = make(50_000, loops)
    for _ in range(1000):
        grown.set(rng.integers(0, 50_000, 512), rng.random(512) * 10.0 ** rng.integers(-9, 9))
    built = make(50_000, loops)
    built.set(np.arange(50_000), grown.values)
    assert grown.total == built.total
    targets = rng.random(10_000) * built.total
    np.testing.assert_array_equal(grown.find(targets), built.find(targets))


@BOTH
@pytest.mark.parametrize("size", [1, 7, 300, 70_000])
def test_draw_takes_one_of_each_part_with_weight_and_chance(size: int, loops: Any) -> None:
    """PAPER: P(i) = p_i / Σ p; w_i = (N · P(i))^-β / max_j w_j, the maximum over all rows."""
    rng = np.random.default_rng(size)
    values = rng.random(size) * (rng.random(size) < 0.9) + (np.arange(size) == size // 2)
    tree, beta = make(size, loops), 0.7
    tree.set(np.arange(size), values)
    for count in (1, 5, 32, 2000):
        numbers = rng.random(count)
        targets = (np.arange(count) + numbers) * values.sum() / count
        indices, weights, chances = tree.draw(numbers, beta)
        assert all(
            i == naive_find(values.tolist(), t) or accepts(values, t, i)
            for t, i in zip(targets[:40], indices[:40].tolist(), strict=True)
        )
        probability = values / values.sum()
        every = (np.count_nonzero(values) * probability[values > 0]) ** -beta
        wanted = (np.count_nonzero(values) * probability[indices]) ** -beta / every.max()
        np.testing.assert_allclose(weights, wanted, rtol=1e-6)
        np.testing.assert_allclose(chances, probability[indices], rtol=1e-12)
        assert weights.dtype == np.float32


@BOTH
@pytest.mark.parametrize("size", [1, 20, 5000])
def test_put_where_leaves_alone_what_is_marked_otherwise(size: int, loops: Any) -> None:
    rng = np.random.default_rng(size)
    tree, values = make(size, loops), rng.random(size)
    tree.set(np.arange(size), values)
    marks = rng.integers(0, 3, size)
    for count in (1, 32, 300):
        indices, priorities = rng.integers(0, size, count), rng.random(count)
        wanted = rng.integers(0, 3, count)
        refused = 0
        for i, priority, mark in zip(indices, priorities, wanted, strict=True):
            if marks[i] == mark:
                values[i] = priority
            else:
                refused += 1
        assert tree.put_where(marks, wanted, indices, priorities) == refused
        np.testing.assert_array_equal(tree.values, values)
        assert tree.total == pytest.approx(values.sum(), rel=1e-12)
        assert (tree.max(), tree.min_positive()) == (values.max(), values.min())


def test_clear_empties_it() -> None:
    tree = SumTree(300)
    tree.set(np.arange(300), np.ones(300))
    tree.clear()
    assert (tree.total, tree.max(), tree.min_positive()) == (0.0, 0.0, np.inf)


@pytest.mark.parametrize(
    ("indices", "priorities", "words"),
    [
        ([0, 1], [1.0], "2 indices, 1 priorities"),
        ([10], [1.0], "there are 0 to 9"),
        ([-1], [1.0], "there are 0 to 9"),
        ([0], [-1.0], "finite number"),
        ([0, 1], [1.0, float("nan")], "finite number"),
        ([0], [float("inf")], "finite number"),
    ],
)
def test_bad_input_is_refused_and_changes_nothing(
    indices: list[int], priorities: list[float], words: str
) -> None:
    tree = SumTree(10)
    tree.set(np.arange(10), np.ones(10))
    with pytest.raises(ConfigError, match=words):
        tree.set(np.array(indices), np.array(priorities))
    assert tree.values.tolist() == [1.0] * 10


def test_no_capacity_is_refused() -> None:
    with pytest.raises(ConfigError, match="capacity 0"):
        SumTree(0)

"""Replay in one process: frequencies, weights, new rows, stale updates, resuming."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from manyhands.errors import ConfigError
from manyhands.replay.buffer import PrioritizedReplay, Replay

EXAMPLE = {"number": np.int64(0), "square": np.float32(0)}
# 99.99 % of honest draws stay below mean + 4 deviations of a chi-square distribution
DEVIATIONS = 4.0


def rows(first: int, count: int) -> dict:
    numbers = np.arange(first, first + count)
    return {"number": numbers, "square": (numbers.astype(np.float32)) ** 2}


def chi_square(drawn: np.ndarray, expected: np.ndarray) -> float:
    """In deviations from what chance would give."""
    there = expected > 0
    assert (drawn[~there] == 0).all()
    statistic = ((drawn[there] - expected[there]) ** 2 / expected[there]).sum()
    freedom = np.count_nonzero(there) - 1
    return float((statistic - freedom) / np.sqrt(2 * freedom))


def counts(replay: Replay, batches: int, batch: int, size: int) -> np.ndarray:
    found = np.zeros(size)
    for _ in range(batches):
        sample = replay.sample(batch)
        assert sample.rows["square"].tolist() == (sample.rows["number"] ** 2).tolist()
        np.add.at(found, sample.rows["number"], 1)
    return found


def seen(replay: Replay, batch: int) -> set[int]:
    """All that comes in twenty batches."""
    return set(np.concatenate([replay.sample(batch).rows["number"] for _ in range(20)]).tolist())


def test_uniform_draws_are_uniform_also_after_wrapping() -> None:
    replay = Replay(50, EXAMPLE)
    replay.append(rows(0, 80))
    expected = np.where(np.arange(80) >= 30, 20_000 / 50, 0.0)
    assert chi_square(counts(replay, 400, 50, 80), expected) < DEVIATIONS
    assert (replay.sample(10).weights == 1.0).all()


@pytest.mark.parametrize("batch", [1, 7, 40])
def test_draws_follow_priorities(batch: int) -> None:
    replay = PrioritizedReplay(40, EXAMPLE, alpha=0.7, eps=0.0)
    errors = np.arange(60.0) % 9
    replay.append(rows(0, 60), errors)
    p = np.where(np.arange(60) >= 20, errors**0.7, 0.0)
    drawn = 20_000 // batch * batch
    found = counts(replay, drawn // batch, batch, 60)
    # Stratified draws vary less than independent ones, so the test is on the safe side.
    assert chi_square(found, drawn * p / p.sum()) < DEVIATIONS


def test_weights_are_those_of_the_paper() -> None:
    replay = PrioritizedReplay(100, EXAMPLE, alpha=0.6, eps=0.01)
    errors = np.random.default_rng(0).normal(size=70)
    replay.append(rows(0, 70), errors)
    p = (np.abs(errors) + 0.01) ** 0.6
    probability = p / p.sum()
    weights = (70 * probability) ** -0.4
    weights /= weights.max()
    batch = replay.sample(64, beta=0.4)
    numbers = batch.rows["number"]
    np.testing.assert_allclose(batch.weights, weights[numbers], rtol=1e-6)
    np.testing.assert_allclose(batch.probabilities, probability[numbers], rtol=1e-9)
    np.testing.assert_allclose(replay.sample(64, beta=0.0).weights, 1.0)


def test_a_new_row_has_the_true_maximum() -> None:
    """Not that of an earlier day, nor raised to alpha twice."""
    replay = PrioritizedReplay(10, EXAMPLE, alpha=0.5, eps=0.0)
    replay.append(rows(0, 1))
    tree = replay._priorities.tree
    replay.sample(1)
    assert tree.values[0] == 1.0  # the first of all
    replay.append(rows(1, 2), [100.0, 4.0])
    replay.append(rows(3, 1))
    batch = replay.sample(8)
    assert tree.values[3] == 10.0
    number = np.array([0, 1, 2, 3])
    replay.update_priorities(number, np.full(4, 9.0))
    replay.append(rows(4, 1))
    replay.sample(1)
    assert tree.values[4] == 3.0  # 100 is no longer there
    assert (batch.weights <= 1.0).all()


def test_rows_with_priority_0_are_not_drawn_unless_all_are() -> None:
    replay = PrioritizedReplay(10, EXAMPLE, eps=0.0)
    replay.append(rows(0, 10), [0.0] * 9 + [1.0])
    assert seen(replay, 10) == {9}
    replay.update_priorities(replay.sample(1).ids, [0.0])
    assert seen(replay, 10) == set(range(10))
    assert (replay.sample(10).weights == 1.0).all()
    assert replay.counters["uniform_draws"] == 210


def test_stale_updates_are_dropped_after_overwriting_and_after_clear() -> None:
    replay = PrioritizedReplay(4, EXAMPLE, alpha=1.0, eps=0.0)
    replay.append(rows(0, 4), [1.0, 1.0, 1.0, 1.0])
    ids = np.sort(replay.sample(4).ids)
    replay.append(rows(4, 2), [2.0, 2.0])  # over rows 0 and 1
    assert replay.update_priorities(ids, np.full(4, 50.0)) == 2
    tree = replay._priorities.tree
    assert tree.values.tolist() == [2.0, 2.0, 50.0, 50.0]
    assert replay.counters["stale_updates"] == 2
    ids = np.sort(replay.sample(4).ids)
    replay.clear()
    replay.append(rows(6, 4), [3.0] * 4)  # the same four slots
    assert replay.update_priorities(ids, np.full(4, 99.0)) == 4
    assert tree.values.tolist() == [3.0] * 4
    assert replay.size == 4
    assert seen(replay, 4) == {6, 7, 8, 9}


def test_a_row_of_its_own_at_a_time() -> None:
    """Batches of one row, in and out, past the end of the buffer."""
    replay = PrioritizedReplay(3, EXAMPLE, alpha=1.0, eps=0.0)
    for number in range(8):
        replay.append(rows(number, 1), [number + 1.0])
        batch = replay.sample(1)
        assert batch.rows["number"].shape == batch.weights.shape == batch.ids.shape == (1,)
        assert batch.rows["square"].tolist() == (batch.rows["number"] ** 2).tolist()
        assert replay.update_priorities(batch.ids, [1.0]) == 0
    assert seen(replay, 3) == {5, 6, 7}


def test_many_updates_between_two_looks() -> None:
    """The largest and smallest priority are right also when nobody asked for long."""
    replay, rng = PrioritizedReplay(500, EXAMPLE, alpha=1.0, eps=0.0), np.random.default_rng(0)
    replay.append(rows(0, 500), rng.random(500) + 0.1)
    replay.sample(1)
    for _ in range(200):
        ids = rng.integers(0, 500, 40)
        assert replay.update_priorities(ids, rng.random(40) + 0.1) == 0
    errors = replay._priorities.tree.values.copy()
    batch = replay.sample(64, beta=1.0)
    np.testing.assert_allclose(
        batch.weights, errors.min() / errors[batch.rows["number"]], rtol=1e-6
    )
    replay.append(rows(500, 1))
    replay.sample(1)
    assert replay._priorities.tree.values[0] == np.delete(errors, 0).max()


def test_the_last_of_two_updates_of_one_row_counts() -> None:
    replay = PrioritizedReplay(4, EXAMPLE, alpha=1.0, eps=0.0)
    replay.append(rows(0, 2), [1.0, 1.0])
    replay.sample(1)
    assert replay.update_priorities([0, 0, 1], [5.0, -7.0, 2.0]) == 0
    assert replay._priorities.tree.values[:2].tolist() == [7.0, 2.0]


@pytest.mark.parametrize("kind", [Replay, PrioritizedReplay])
def test_resumed_draws_are_the_same_to_the_bit(kind: type[Replay]) -> None:
    replay, rng = kind(300, EXAMPLE, seed=5), np.random.default_rng(0)

    def work(one: Replay, chance: np.random.Generator, first: int) -> list:
        seen = []
        for i in range(30):
            one.append(rows(first + 13 * i, 13))
            batch = one.sample(32)
            if isinstance(one, PrioritizedReplay):
                one.update_priorities(batch.ids, chance.normal(size=32))
            seen.append((batch.ids.tolist(), batch.weights.tolist()))
        return seen

    work(replay, rng, 0)
    other = kind(300, EXAMPLE, seed=99)
    other.load_state(replay.state())
    assert other.size == replay.size
    assert work(replay, np.random.default_rng(1), 390) == work(other, np.random.default_rng(1), 390)
    assert other.counters == replay.counters


def test_clear_empties_it_and_it_fills_again() -> None:
    for replay in (Replay(5, EXAMPLE), PrioritizedReplay(5, EXAMPLE)):
        replay.append(rows(0, 5))
        replay.sample(3)
        replay.clear()
        assert len(replay) == 0
        with pytest.raises(ConfigError, match="empty"):
            replay.sample(1)
        replay.append(rows(5, 2))
        assert seen(replay, 5) == {5, 6}


def test_bad_input() -> None:
    replay = PrioritizedReplay(5, EXAMPLE)
    replay.append(rows(0, 5))
    with pytest.raises(ConfigError, match="batch of 0"):
        replay.sample(0)
    with pytest.raises(ConfigError, match="batch of 6 rows from a buffer for 5"):
        replay.sample(6)
    with pytest.raises(ConfigError, match="batch of 512 rows"):
        Replay(100, EXAMPLE).sample(512)
    with pytest.raises(ConfigError, match="2 ids, but 1 priorities"):
        replay.update_priorities([0, 1], [1.0])
    with pytest.raises(ConfigError, match="finite"):
        replay.update_priorities([0], [float("nan")])
    steep = PrioritizedReplay(5, EXAMPLE, alpha=2.0)
    steep.append(rows(0, 5), [1.0] * 5)
    with pytest.raises(ConfigError, match="too large"):
        steep.update_priorities(steep.sample(1).ids, [1e200])
    with pytest.raises(ConfigError, match="alpha -1"):
        PrioritizedReplay(5, EXAMPLE, alpha=-1.0)
    with pytest.raises(ConfigError, match="cannot take a state"):
        PrioritizedReplay(6, EXAMPLE).load_state(replay.state())


def test_without_numba_the_same_rows_are_drawn(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two trees that add in another order: the same rows, and weights, but for rounding."""
    from manyhands.replay import sampling
    from manyhands.replay.sum_tree import SumTree

    def drawn() -> list[Any]:
        rng = np.random.default_rng(3)
        replay = PrioritizedReplay(3000, {"x": 0.0}, seed=5)
        found: list[Any] = []
        for _ in range(30):
            replay.append({"x": rng.random(200)}, rng.random(200))
            batch = replay.sample(64, beta=0.5)
            replay.update_priorities(batch.ids, rng.random(64))
            found.append((batch.ids, batch.weights, batch.probabilities))
        return found

    compiled = drawn()
    monkeypatch.setattr(sampling, "sum_tree", SumTree)
    for (ids, weights, chances), (i, w, c) in zip(compiled, drawn(), strict=True):
        np.testing.assert_array_equal(ids, i)
        np.testing.assert_allclose(weights, w, rtol=1e-6)
        np.testing.assert_allclose(chances, c, rtol=1e-12)


@pytest.mark.parametrize("kind", ["every second", "backwards", "read-only", "a list", "a column"])
def test_ids_come_in_any_form(kind: str) -> None:
    replay = PrioritizedReplay(100, {"x": 0.0}, alpha=1.0, eps=0.0)
    replay.append({"x": np.arange(20.0)}, np.ones(20))
    ids = np.arange(20)
    ids.flags.writeable = kind != "read-only"
    some: Any = {
        "every second": ids[::2], "backwards": ids[::-1], "read-only": ids, "a list": ids.tolist(),
        "a column": ids[:, None],
    }[kind]  # fmt: skip
    wanted = np.ones(20)
    wanted[np.ravel(some)] = np.arange(np.size(some)) + 2.0
    errors = np.arange(np.size(some)) + 2.0
    errors.flags.writeable = kind != "read-only"
    assert replay.update_priorities(some, errors) == 0
    assert replay._priorities.tree.values[:20].tolist() == wanted.tolist()

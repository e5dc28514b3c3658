"""The ring: rows in order, wrap-around, tickets that only grow, rows that a writer took back."""

from __future__ import annotations

import gc
import sys
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from manyhands.errors import ConfigError
from manyhands.replay.frames import Frames
from manyhands.replay.ring import Ring, build
from manyhands.replay.sharded import ShardedReplay

EXAMPLE = {"obs": {"image": np.zeros((2, 2), np.uint8), "speed": np.float32(0)}, "reward": 0.0}


def rows(first: int, count: int) -> dict:
    numbers = np.arange(first, first + count)
    return {
        "obs": {
            "image": np.tile((numbers % 251).astype(np.uint8)[:, None, None], (1, 2, 2)),
            "speed": numbers.astype(np.float32),
        },
        "reward": numbers.astype(np.float64),
    }


def rewards(ring: Ring) -> list[float]:
    out, whole = ring.read(np.arange(ring.first, ring.written))
    assert whole.all()
    tree = ring.tree(out)
    assert tree["obs"]["image"][:, 1, 0].tolist() == (tree["reward"] % 251).tolist()
    assert tree["obs"]["speed"].tolist() == tree["reward"].tolist()
    return tree["reward"].tolist()


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 20), st.lists(st.one_of(st.integers(0, 45), st.just("clear")), max_size=12))
def test_it_holds_the_newest_rows(capacity: int, actions: list) -> None:
    ring, naive, count = Ring(capacity, EXAMPLE), [], 0
    for action in actions:
        if action == "clear":
            ring.clear()
            naive = []
            continue
        assert ring.append(rows(count, action)) == count
        naive = [*naive, *range(count, count + action)][-capacity:]
        count += action
        assert ring.written == count
        assert ring.size == len(naive)
        assert rewards(ring) == naive


def test_generations_grow_and_clear_does_not_reset_them() -> None:
    ring = Ring(4, EXAMPLE)
    assert [ring.generation(s) for s in range(4)] == [0, 0, 0, 0]
    ring.append(rows(0, 6))
    assert [ring.generation(s) for s in range(4)] == [2, 2, 1, 1]
    ring.clear()
    assert ring.size == 0
    assert [ring.generation(s) for s in range(4)] == [2, 2, 1, 1]
    assert ring.append(rows(6, 1)) == 6
    assert [ring.generation(s) for s in range(4)] == [2, 2, 2, 1]
    ring.drop()
    assert ring.size == 0
    assert ring.append(rows(7, 1)) == 7


def test_a_row_begun_anew_is_not_whole() -> None:
    ring = Ring(4, EXAMPLE)
    ring.append(rows(0, 4))
    ring._words[0] = 6  # a writer has begun tickets 4 and 5, in slots 0 and 1
    assert ring.read(np.arange(4))[1].tolist() == [False, False, True, True]
    assert ring.size == 2
    # That writer died; the next one writes on from what was whole.
    assert ring.append(rows(4, 1)) == 4
    assert ring.read(np.arange(5))[1].tolist() == [False, False, True, True, True]
    ring.append(rows(5, 3))
    assert rewards(ring) == [4, 5, 6, 7]


def test_two_openings_are_one_ring() -> None:
    ring = Ring(5, EXAMPLE, shared=True, priorities=True)
    opened = Ring.open(ring.describe())
    opened.append(rows(0, 3), np.array([1.0, 2.0, 3.0]))
    assert rewards(ring) == [0, 1, 2]
    tickets, given_priorities = ring.given(1, 3)
    assert (tickets.tolist(), given_priorities.tolist()) == ([1, 2], [2.0, 3.0])
    opened.append(rows(3, 1))
    assert np.isnan(ring.given(3, 4)[1]).all()
    ring.allow(7)
    assert opened.limit == 7
    ring.drop()
    assert opened.size == 0


def test_another_ring_behind_the_address_is_noticed() -> None:
    ring, other = Ring(5, EXAMPLE, shared=True), Ring(5, EXAMPLE, shared=True)
    wrong = {**ring.describe(), "address": other.describe()["address"]}
    with pytest.raises(OSError, match="not the ring"):
        Ring.open(wrong)


def test_state_continues_with_the_same_tickets() -> None:
    ring = Ring(4, EXAMPLE, priorities=True)
    ring.append(rows(0, 7), np.arange(7.0))
    copy = Ring(4, EXAMPLE, priorities=True)
    copy.load_state(ring.state())
    assert (copy.first, copy.written, rewards(copy)) == (3, 7, [3, 4, 5, 6])
    assert copy.given(0, 7)[1].tolist() == [3.0, 4.0, 5.0, 6.0]
    assert copy.append(rows(7, 1)) == 7
    assert rewards(copy) == [4, 5, 6, 7]
    with pytest.raises(ConfigError, match="cannot take a state"):
        Ring(3, EXAMPLE, priorities=True).load_state(ring.state())
    empty = Ring(4, EXAMPLE)
    empty.load_state(Ring(4, EXAMPLE).state())
    assert empty.size == 0


def test_large_results_use_memory_again_only_when_nobody_looks_at_it() -> None:
    ring = Ring(4, {"x": np.zeros(600_000)})
    ring.append({"x": np.ones((4, 600_000))})
    (held,), _ = ring.read(np.array([0]))
    view = held[:, 5:10]
    del held
    ring.append({"x": np.full((4, 600_000), 2.0)})
    (second,), _ = ring.read(np.array([4]))
    assert (view == 1.0).all()
    place = second.__array_interface__["data"][0]
    del second
    gc.collect()
    (third,), _ = ring.read(np.array([4]))
    assert third.__array_interface__["data"][0] == place


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"reward": np.zeros(2)}, "'reward' has shape"),
        ({"reward": np.zeros((3, 1))}, "'reward' has shape"),
        ({"reward": 1.0}, "'reward' has shape"),
        ({"reward": np.zeros(3, complex)}, "does not fit"),
        ({"more": np.zeros(3)}, "was expected"),
        ({"obs": {**rows(0, 3)["obs"], "more": np.zeros(3)}}, "was expected"),
        ({"obs": {**rows(0, 3)["obs"], "image": np.zeros((3, 4), np.uint8)}}, "has shape"),
        ({"obs": np.zeros(3)}, "was expected"),
        ({"obs": {"speed": np.zeros(3)}}, "was expected"),
        ({"obs": {**rows(0, 3)["obs"], "image": np.zeros((3, 2, 2))}}, "does not fit"),
    ],
)
def test_rows_of_another_form_are_refused(change: dict, words: str) -> None:
    ring = Ring(10, EXAMPLE)
    with pytest.raises(ConfigError, match=words):
        ring.append({**rows(0, 3), **change})
    assert ring.written == 0


@pytest.mark.parametrize("given_rows", [None, 3.0, [], np.zeros(3), {"reward": None}])
def test_what_is_no_dict_of_arrays_is_refused(given_rows: object) -> None:
    with pytest.raises(ConfigError):
        Ring(10, EXAMPLE).append(given_rows)


def test_rows_need_not_be_arrays_nor_of_the_same_dtype() -> None:
    ring = Ring(10, {"number": np.int64(0), "pair": np.zeros(2, np.float32)})
    ring.append({"number": [1, 2], "pair": [[1.0, 2.0], [3.0, 4.0]]})
    ring.append({"number": np.array([3], np.int32), "pair": np.array([[5.0, 6.0]])})
    number, pair = ring.read(np.arange(3))[0]
    assert number.tolist() == [1, 2, 3]
    assert pair.tolist() == [[1.0, 2.0], [3.0, 4.0], [5.0, 6.0]]


def test_a_refused_row_does_no_harm_to_those_that_are_there() -> None:
    ring = Ring(4, {"a": 0.0, "b": np.zeros((2, 2))})
    ring.append({"a": np.arange(3.0), "b": np.ones((3, 2, 2))})
    with pytest.raises(ConfigError, match="'b' has shape"):  # the size is right, the shape is not
        ring.append({"a": np.array([9.0]), "b": np.zeros((1, 4))})
    assert ring.written == 3
    ring.append({"a": np.array([3.0]), "b": np.ones((1, 2, 2))})
    (a, b), whole = ring.read(np.arange(4))
    assert whole.all()
    assert a.tolist() == [0.0, 1.0, 2.0, 3.0]
    assert (b == 1.0).all()


def maps_of_shared_memory() -> int:
    return Path("/proc/self/maps").read_text().count("memfd:manyhands")


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="looks into /proc")
def test_released_memory_goes_back_at_once() -> None:
    before = maps_of_shared_memory()
    ring = Ring(5, EXAMPLE, shared=True, priorities=True)
    ring.append(rows(0, 3), [1.0, 2.0, 3.0])
    out, _ = ring.read(np.arange(3))
    assert maps_of_shared_memory() == before + 1
    for _ in range(2):
        ring.release()
    assert maps_of_shared_memory() == before
    assert out[-1].tolist() == [0.0, 1.0, 2.0]  # what was read is a copy
    assert (ring.size, ring.written) == (0, 3)
    with pytest.raises(ConfigError, match="given back"):
        ring.append(rows(3, 1))


def numbers(count: int) -> dict:
    return {"number": np.arange(count), "double": 2.0 * np.arange(count)}


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="looks into /proc")
@pytest.mark.parametrize("prefetch", [0, 2])
def test_a_sharded_replay_gives_its_memory_back(prefetch: int) -> None:
    before = maps_of_shared_memory()
    stack = np.zeros((2, 4, 4), np.uint8)
    plain = ShardedReplay(
        {"number": 0, "double": 0.0},
        shards=3,
        capacity=90,
        batch_size=8,
        prefetch=prefetch,
        timeout=20,
    )
    framed = ShardedReplay(
        {"obs": stack, "next_obs": stack}, shards=1, capacity=90, batch_size=8, frames=Frames()
    )
    writer = plain.writer(1)
    writer.append(numbers(20))
    batch = plain.sample()
    assert maps_of_shared_memory() == before + 3 + 2
    for replay in (plain, plain, framed):
        replay.release()
    assert maps_of_shared_memory() == before
    assert (batch.rows["double"] == 2 * batch.rows["number"]).all()
    assert (plain.all_size, plain.counters["inserted"]) == (0, 20)
    for action in (plain.sample, plain.state, lambda: plain.describe(0),
                   lambda: writer.append(numbers(1))):  # fmt: skip
        with pytest.raises(ConfigError, match="given back"):
            action()


@pytest.mark.parametrize(
    ("priorities", "words"),
    [([1.0], "1 priorities for 3"), ([1.0, float("nan"), 1.0], "not a finite number")],
)
def test_bad_priorities_are_refused(priorities: list[float], words: str) -> None:
    ring = Ring(10, EXAMPLE, priorities=True)
    with pytest.raises(ConfigError, match=words):
        ring.append(rows(0, 3), priorities)
    with pytest.raises(ConfigError, match="without them"):
        Ring(10, EXAMPLE).append(rows(0, 3), [1.0, 1.0, 1.0])


@pytest.mark.parametrize("example", [{}, 3.0, {"a": "text"}, {3: 1.0}])
def test_odd_examples_are_refused(example: object) -> None:
    with pytest.raises(ConfigError):
        Ring(10, example)
    with pytest.raises(ConfigError, match="capacity 0"):
        Ring(0, EXAMPLE)
    with pytest.raises(ConfigError, match="shared=True"):
        Ring(1, EXAMPLE).describe()


def test_names_with_slashes_and_tildes_come_back_as_they_were() -> None:
    """Parts of nested observations are called camera/left."""
    row = {"obs": {"camera/left": np.arange(3.0), "a~1b": np.int64(4)}, "camera": {"left": 1.0}}
    ring = Ring(4, row)
    batch = {"obs": {"camera/left": np.arange(3.0)[None], "a~1b": np.array([4])},
             "camera": {"left": np.array([2.0])}}  # fmt: skip
    ring.append(batch)
    leaves, whole = ring.read(np.array([0]))
    assert whole.all()
    found = build([path for path, _, _ in ring.layout], leaves)
    assert found["obs"].keys() == row["obs"].keys()
    np.testing.assert_array_equal(found["obs"]["camera/left"][0], np.arange(3.0))
    assert found["camera"]["left"][0] == 2.0

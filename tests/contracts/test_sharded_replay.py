"""Sharded replay against one buffer with the same content, and over the engines."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

import numpy as np
import pytest
from answers import answers
from conftest import ALL_ENGINES

from manyhands.errors import CollectiveError, ConfigError
from manyhands.replay.buffer import PrioritizedReplay
from manyhands.replay.sharded import RateLimit, ShardedReplay, ShardWriter

EXAMPLE = {"number": np.int64(0), "double": np.float32(0)}
DEVIATIONS = 4.0  # of a chi-square statistic: 99.99 % of honest draws stay below
SHAPES = {
    "equal": [50, 50, 50, 50],
    "one empty": [60, 0, 70, 70],
    "first and last empty": [0, 90, 10, 0],
    "very unequal": [1, 400, 3, 36],
    "only one": [0, 0, 0, 200],
}


def rows(numbers: np.ndarray) -> dict:
    return {"number": numbers, "double": numbers.astype(np.float32) * 2}


def pair(shape: str, **options: object) -> tuple[ShardedReplay, PrioritizedReplay, np.ndarray]:
    """The same rows and TD errors in four shards and in one buffer."""
    sizes = SHAPES[shape]
    errors = np.random.default_rng(7).exponential(size=sum(sizes)) * 3
    four = ShardedReplay(EXAMPLE, shards=4, capacity=1600, batch_size=64, eps=0.05, **options)
    one = PrioritizedReplay(1600, EXAMPLE, eps=0.05)
    start = 0
    for shard, size in enumerate(sizes):
        part = slice(start, start + size)
        if size:
            four.writer(shard).append(rows(np.arange(start, start + size)), errors[part])
            one.append(rows(np.arange(start, start + size)), errors[part])
        start += size
    return four, one, errors


def chi_square(drawn: np.ndarray, expected: np.ndarray) -> float:
    statistic = ((drawn - expected) ** 2 / expected).sum()
    return float((statistic - len(drawn) + 1) / np.sqrt(2 * (len(drawn) - 1)))


@pytest.mark.parametrize("shape", SHAPES)
def test_draws_are_those_of_one_buffer(shape: str) -> None:
    four, one, errors = pair(shape)
    p = (errors + 0.05) ** 0.6
    weights = (len(p) * p / p.sum()) ** -0.5
    weights /= weights.max()
    found = np.zeros((2, len(p)))
    for _ in range(600):
        for which, batch in enumerate((four.sample(beta=0.5), one.sample(64, beta=0.5))):
            number = batch.rows["number"]
            assert (batch.rows["double"] == 2 * number).all()
            np.testing.assert_allclose(batch.weights, weights[number], rtol=1e-6)
            np.add.at(found[which], number, 1)
    assert four.all_size == one.size == len(p)
    for drawn in found:
        assert chi_square(drawn, 600 * 64 * p / p.sum()) < DEVIATIONS


@pytest.mark.parametrize("shape", SHAPES)
def test_uniform_draws_too(shape: str) -> None:
    four = ShardedReplay(EXAMPLE, shards=4, capacity=1600, batch_size=64, prioritized=False)
    total = sum(SHAPES[shape])
    start = 0
    for shard, size in enumerate(SHAPES[shape]):
        four.writer(shard).append(rows(np.arange(start, start + size)))
        start += size
    found = np.zeros(total)
    for _ in range(600):
        batch = four.sample()
        assert (batch.weights == 1.0).all()
        np.add.at(found, batch.rows["number"], 1)
    assert chi_square(found, np.full(total, 600 * 64 / total)) < DEVIATIONS


def test_same_draws_weights_and_updates_to_the_bit() -> None:
    """With equal shards, filled in order, the leaves are the same: so are the draws."""
    four = ShardedReplay(EXAMPLE, shards=4, capacity=400, batch_size=32, seed=3)
    one = PrioritizedReplay(400, EXAMPLE, seed=3)
    for shard in range(4):
        part = np.arange(100 * shard, 100 * shard + 100)
        four.writer(shard).append(rows(part))
        one.append(rows(part))
    rng = np.random.default_rng(0)
    for _ in range(50):
        ours, theirs = four.sample(), one.sample(32)
        assert ours.rows["number"].tolist() == theirs.rows["number"].tolist()
        assert ours.weights.tolist() == theirs.weights.tolist()
        errors = rng.normal(size=32)
        assert four.update_priorities(ours.ids, errors) == 0
        assert one.update_priorities(theirs.ids, errors) == 0


def test_stale_updates_never_reach_the_new_row() -> None:
    replay = ShardedReplay(EXAMPLE, shards=2, capacity=8, batch_size=8, alpha=1.0, eps=0.0)
    writers = [replay.writer(k) for k in range(2)]
    for k in range(2):
        writers[k].append(rows(np.arange(4) + 10 * k), np.ones(4))
    ids = np.sort(replay.sample().ids)
    assert len(set(ids.tolist())) == 8
    writers[1].append(rows(np.arange(14, 16)), np.full(2, 2.0))  # over two rows of shard 1
    assert replay.update_priorities(ids, np.full(8, 50.0)) == 2
    assert replay._sampler.tree.values.tolist() == [50.0] * 4 + [2.0, 2.0, 50.0, 50.0]
    replay.clear(0)
    writers[0].append(rows(np.arange(4)), np.full(4, 3.0))
    assert replay.update_priorities(ids, np.full(8, 70.0)) == 6
    assert replay._sampler.tree.values[:4].tolist() == [3.0] * 4
    writers[1].clear()  # by the writer this time
    assert (replay.size(0), replay.size(1), replay.all_size) == (4, 0, 4)
    assert replay.update_priorities(ids, np.full(8, 70.0)) == 8
    assert set(replay.sample().ids >> 44) == {0}
    replay.all_clear()
    assert replay.all_size == 0
    assert replay.counters["stale_updates"] == 16


@pytest.mark.parametrize("shape", ["one empty", "very unequal"])
def test_stale_updates_of_many_shards_against_a_list(shape: str) -> None:
    """Rows are overwritten and shards cleared at random while ids of old batches come back: each
    update reaches the very row it was meant for, or none, and the others are counted."""
    sizes = SHAPES[shape]
    replay = ShardedReplay(EXAMPLE, shards=4, capacity=64, batch_size=16, alpha=1.0, eps=0.0)
    rng, meant, late = np.random.default_rng(3), {}, []  # id -> the priority it must have
    writers, stale, number = [replay.writer(k) for k in range(4)], 0, 0
    for turn in range(400):
        k = int(rng.choice(4, p=np.array(sizes) / sum(sizes)))
        count = int(rng.integers(1, 6))
        ids = (k << 44) + np.arange(writers[k].written, writers[k].written + count)
        errors = rng.random(count) + 0.1
        writers[k].append(rows(np.arange(number, number + count)), errors)
        meant |= dict(zip(ids.tolist(), errors.tolist(), strict=True))
        number += count
        if turn % 50 == 49:
            replay.clear(k) if turn % 100 == 49 else writers[k].clear()
        if not replay.all_size:
            continue
        alive = {(s << 44) + t for s in range(4)
                 for t in range(replay._rings[s].first, replay._rings[s].written)}  # fmt: skip
        batch = replay.sample()
        assert set(batch.ids.tolist()) <= alive
        late.append(batch.ids)
        if len(late) > 5:  # five batches later
            old, new = late.pop(0), rng.random(16) + 0.1
            dead = [i for i in old.tolist() if i not in alive]
            stale += len(dead)
            meant |= dict(zip(old.tolist(), new.tolist(), strict=True))
            assert replay.update_priorities(old, new) == len(dead)
        sampler = replay._sampler
        tickets, tree = sampler._tickets, sampler.tree.values
        for leaf in np.flatnonzero(tickets >= 0):
            assert tree[leaf] == meant[(int(leaf) // 16 << 44) + int(tickets[leaf])]
    assert replay.counters["stale_updates"] == stale > 100


@pytest.mark.parametrize("prioritized", [True, False])
def test_size_and_clear_of_one_shard_and_of_all(prioritized: bool) -> None:
    replay = ShardedReplay(EXAMPLE, shards=3, capacity=30, batch_size=8, prioritized=prioritized)
    for k, count in enumerate((4, 25, 0)):
        replay.writer(k).append(rows(np.arange(count) + 100 * k))
    assert [replay.size(k) for k in range(3)] == [4, 10, 0]
    assert (replay.all_size, replay.capacity) == (14, 30)
    replay.clear(1)
    assert ([replay.size(k) for k in range(3)], replay.all_size) == ([4, 0, 0], 4)
    assert (replay.sample().rows["number"] < 4).all()
    replay.all_clear()
    assert replay.all_size == 0
    with pytest.raises(CollectiveError, match="there are 0"):
        replay.sample(timeout=0.05)
    replay.writer(2).append(rows(np.arange(200, 203)))
    assert set(replay.sample().rows["number"].tolist()) <= {200, 201, 202}
    if not prioritized:
        with pytest.raises(ConfigError, match="draws uniformly"):
            replay.update_priorities(np.zeros(1, np.int64), np.ones(1))


def test_a_closed_replay_keeps_no_actor_waiting() -> None:
    limit = RateLimit(samples_per_insert=1.0, min_size=10, error_buffer=8)
    replay = ShardedReplay(EXAMPLE, shards=1, capacity=1000, batch_size=8, limit=limit)
    writer = replay.writer(0, timeout=0.05)
    assert until_it_waits(lambda i: writer.append(rows(np.arange(1))), "not drawn enough") < 30
    replay.close()
    for _ in range(100):
        writer.append(rows(np.arange(1)))
    assert writer.written > 100


@pytest.mark.parametrize("on_loss", ["keep", "drop"])
def test_rows_of_a_lost_actor(on_loss: str) -> None:
    replay = ShardedReplay(EXAMPLE, shards=2, capacity=20, batch_size=16, on_loss=on_loss)
    for k in range(2):
        replay.writer(k).append(rows(np.arange(5) + 10 * k))
    assert replay.lose(1) == 5
    seen = set(np.concatenate([replay.sample().rows["number"] for _ in range(20)]).tolist())
    kept = on_loss == "keep"
    assert seen == (set(range(5)) | set(range(10, 15)) if kept else set(range(5)))
    counters = replay.counters
    assert counters["lost_shards"] == 1
    assert (counters["kept_rows"], counters["dropped_rows"]) == ((5, 0) if kept else (0, 5))
    again = ShardWriter.open(replay.describe(1))  # the actor that takes its place
    again.append(rows(np.arange(20, 22)))
    assert replay.size(1) == (7 if kept else 2)


def test_state_continues_to_the_bit() -> None:
    def make(seed: int) -> ShardedReplay:
        return ShardedReplay(EXAMPLE, shards=3, capacity=90, batch_size=16, seed=seed)

    def work(replay: ShardedReplay, first: int) -> list:
        rng, seen = np.random.default_rng(first), []
        for i in range(first, first + 20):
            replay.writer(i % 3).append(rows(np.arange(i * 7, i * 7 + 7)), rng.random(7))
            batch = replay.sample()
            replay.update_priorities(batch.ids, rng.random(16))
            seen.append((batch.ids.tolist(), batch.weights.tolist()))
        return seen

    one, other = make(1), make(2)
    work(one, 0)
    other.load_state(one.state())
    assert work(one, 20) == work(other, 20)
    assert one.counters == other.counters
    with pytest.raises(ConfigError, match="2 shards cannot take a state of 3"):
        ShardedReplay(EXAMPLE, shards=2, capacity=90, batch_size=16).load_state(one.state())


def until_it_waits(action: Callable[[int], object], words: str) -> int:
    """How often it can be done before it would have to wait."""
    for i in range(1000):
        try:
            action(i)
        except CollectiveError as error:
            return i if words in str(error) else -1
    raise AssertionError("it never waited")


def test_rate_is_bounded_from_both_sides() -> None:
    limit = RateLimit(samples_per_insert=2.0, min_size=10, error_buffer=8)
    replay = ShardedReplay(EXAMPLE, shards=2, capacity=1000, batch_size=4, limit=limit)
    writers = [replay.writer(k, timeout=0.05) for k in range(2)]
    with pytest.raises(CollectiveError, match=r"10 rows \(there are 0\)"):
        replay.sample(timeout=0.05)
    added = until_it_waits(
        lambda i: writers[i % 2].append(rows(np.arange(1))), "has not drawn enough"
    )
    assert 10 <= added <= 14 + 2  # (2 * 10 + 8) / 2, and a row an actor for rounding
    drawn = 4 * until_it_waits(lambda i: replay.sample(timeout=0.05), "rows were added")
    # surplus - B >= 2 * 10 - 8 held at every draw
    assert 2 * added - drawn >= 12
    assert 2 * added - drawn - 4 < 12
    writers[0].append(rows(np.arange(1)))
    assert writers[0].seconds_waited == 0.0
    assert writers[1].seconds_waited > 0.0 or writers[0].written > writers[1].written


@pytest.mark.parametrize("prioritized", [True, False])
def test_prefetch_gives_whole_batches_and_survives_clear(prioritized: bool) -> None:
    replay = ShardedReplay(
        EXAMPLE, shards=2, capacity=200, batch_size=32, prefetch=2, prioritized=prioritized,
        timeout=20,
    )  # fmt: skip
    with replay:
        for k in range(2):
            replay.writer(k).append(rows(np.arange(k * 1000, k * 1000 + 80)))
        for _ in range(30):
            batch = replay.sample()
            assert (batch.rows["double"] == 2 * batch.rows["number"]).all()
            if prioritized:
                replay.update_priorities(batch.ids, np.ones(32))
        replay.all_clear()
        with pytest.raises(CollectiveError, match="waited"):
            replay.sample(timeout=0.1)
        replay.writer(0).append(rows(np.arange(5000, 5050)))
        assert (replay.sample().rows["number"] >= 5000).all()
    assert not [t for t in threading.enumerate() if t.name == "prefetch" and t.is_alive()]
    assert until_it_waits(lambda i: replay.sample(timeout=5), "closed") <= 2  # what was ready


def test_an_error_of_the_prefetching_thread_reaches_the_learner() -> None:
    replay = ShardedReplay(EXAMPLE, shards=1, capacity=20, batch_size=4, prefetch=1, timeout=10)
    replay.writer(0).append(rows(np.arange(20)))

    def broken(count: int, beta: float) -> None:
        raise ValueError("it broke")

    replay._sampler.draw = broken  # type: ignore[method-assign, assignment]
    with replay, pytest.raises(ValueError, match="it broke"):
        replay.sample()


def test_waiting_for_the_first_rows() -> None:
    replay = ShardedReplay(EXAMPLE, shards=1, capacity=20, batch_size=4, timeout=20)

    def later() -> None:
        time.sleep(0.1)
        replay.writer(0).append(rows(np.arange(20)))

    thread = threading.Thread(target=later)
    thread.start()
    assert len(replay.sample().ids) == 4
    thread.join()


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"shards": 0}, "shards 0"),
        ({"capacity": 3}, "capacity 3 is too small"),
        ({"capacity": 10, "batch_size": 16}, "batches of 16"),
        ({"on_loss": "burn"}, "'burn'"),
        ({"prefetch": -1}, "prefetch -1"),
        ({"limit": RateLimit(1.0, 5, 1.0)}, "error_buffer 1 is too small"),
        ({"limit": RateLimit(0.0)}, "above 0"),
        ({"limit": RateLimit(1.0, 1000)}, "min_size 1000 does not fit"),
    ],
)
def test_bad_input_is_refused_before_anything_starts(options: dict, words: str) -> None:
    given = {"shards": 4, "capacity": 40, "batch_size": 8, **options}
    with pytest.raises(ConfigError, match=words):
        ShardedReplay(EXAMPLE, **given)


@pytest.mark.parametrize("shard", [-1, 2])
def test_a_shard_that_is_not_there(shard: int) -> None:
    replay = ShardedReplay(EXAMPLE, shards=2, capacity=20, batch_size=4)
    for ask in (replay.size, replay.clear, replay.lose, replay.writer, replay.describe):
        with pytest.raises(ConfigError, match=f"no shard {shard}, but 0 to 1"):
            ask(shard)
    with pytest.raises(ConfigError, match="not ids that this replay"):
        replay.update_priorities(np.array([5 << 44]), np.ones(1))


# -- over the engines ------------------------------------------------------------------------------


@pytest.mark.usefixtures("nothing_left")
@pytest.mark.parametrize("way", ["memory", "sent"])
@pytest.mark.parametrize("engine", ALL_ENGINES)
def test_actors_and_a_learner(engine: str, way: str) -> None:
    learner, *actors = answers(engine, f"replay, {way}")
    far = way == "sent"
    assert all(a["written"] == 200 and a["in_memory"] is not far for a in actors)
    assert learner["bad"] == 0
    assert learner["batches"] >= 40
    assert learner["counters"]["inserted"] == 400
    assert learner["sizes"] == [60, 60]
    assert learner["after_clear"] == 0
    low, high = learner["surplus"]
    assert low >= 4 * 20 - 64
    # Two actors, each up to five rows at once and one for rounding, and as many on their way
    assert high < 4 * 20 + 64 + 4 * 2 * (6 + 6 * far)


@pytest.mark.usefixtures("nothing_left")
@pytest.mark.parametrize("way", ["memory", "sent"])
@pytest.mark.parametrize("engine", ALL_ENGINES)
def test_frames(engine: str, way: str) -> None:
    assert answers(engine, f"frames, {way}") == [True, 150, None]

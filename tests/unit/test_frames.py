"""Frames stored once: stacks equal those of a plain replay, over ends, wraps and restarts."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from manyhands.data.frames import FramedRing, Frames, FrameStacker
from manyhands.data.replay import PrioritizedReplay, Replay
from manyhands.errors import ConfigError

STACK = 3
EXAMPLE = {
    "obs": np.zeros((STACK, 2, 2), np.int32),
    "next_obs": np.zeros((STACK, 2, 2), np.int32),
    "number": np.int64(0),
}


def frame(numbers: np.ndarray) -> np.ndarray:
    return np.tile(np.asarray(numbers, np.int32)[:, None, None], (1, 2, 2))


class Games:
    """Environments whose frames are numbered; keeps plain stacks beside."""

    def __init__(self, envs: int, ring: FramedRing, seed: int) -> None:
        self.rng, self.envs, self.count = np.random.default_rng(seed), envs, 0
        self.stacker = FrameStacker(ring.frames, envs, STACK)
        first = self.numbers(envs)
        self.tickets = self.stacker.start(frame(first))
        self.plain = np.repeat(first[:, None], STACK, axis=1)

    def numbers(self, count: int) -> np.ndarray:
        self.count += count
        return np.arange(self.count - count, self.count)

    def step(self) -> tuple[dict, np.ndarray, np.ndarray]:
        """Rows as written; the plain stacks before and after."""
        ended = self.rng.random(self.envs) < 0.3
        new, finals = self.numbers(self.envs), self.numbers(int(ended.sum()))
        before, obs = self.tickets, self.plain
        reached, self.tickets = self.stacker.step(frame(new), ended, frame(finals))
        led_to = np.concatenate([obs[:, 1:], new[:, None]], axis=1)
        self.plain = np.where(ended[:, None], new[:, None], led_to)
        led_to[ended, -1] = finals
        rows = {"obs": before, "next_obs": reached}
        return rows, obs, led_to


@settings(max_examples=40, deadline=None)
@given(st.integers(1, 4), st.integers(1, 30), st.integers(1, 40), st.integers(0, 2**32 - 1))
def test_stacks_are_those_of_a_plain_replay(
    envs: int, capacity: int, steps: int, seed: int
) -> None:
    ring = FramedRing(capacity, EXAMPLE, Frames(capacity=2 * capacity + 8 * envs))
    games, before, after = Games(envs, ring, seed), [], []
    for _ in range(steps):
        rows, obs, led_to = games.step()
        ring.append({**rows, "number": np.arange(len(before), len(before) + envs)})
        before.extend(obs)
        after.extend(led_to)
    out, whole = ring.read(np.arange(ring.first, ring.written))
    tree = ring.tree(out)
    assert whole.all()
    assert len(whole) == min(capacity, steps * envs)
    for i, number in enumerate(tree["number"]):
        assert tree["obs"][i, :, 0, 1].tolist() == before[number].tolist()
        assert tree["next_obs"][i, :, 1, 0].tolist() == after[number].tolist()


def test_rows_whose_frames_are_gone_are_not_drawn() -> None:
    for kind in (Replay, PrioritizedReplay):
        replay = kind(50, EXAMPLE, frames=Frames(capacity=20))
        games, after = Games(1, replay._ring, 0), []
        for number in range(40):
            rows, _, led_to = games.step()
            replay.append({**rows, "number": np.array([number])})
            after.extend(led_to)
        for _ in range(20):
            batch = replay.sample(64)
            for i, number in enumerate(batch.rows["number"]):
                assert batch.rows["next_obs"][i, :, 0, 0].tolist() == after[number].tolist()
        assert replay.counters["redrawn"] > 0


def test_frames_are_kept_once() -> None:
    replay = Replay(100, EXAMPLE, frames=Frames())
    games = Games(2, replay._ring, 1)
    for _ in range(10):
        rows, *_ = games.step()
        replay.append({**rows, "number": np.zeros(2, np.int64)})
    assert replay.frames.written == games.count


def test_two_openings_and_state() -> None:
    ring = FramedRing(20, EXAMPLE, Frames(), shared=True, priorities=True)
    opened = FramedRing.open(ring.describe())
    games = Games(2, opened, 3)
    for _ in range(15):
        rows, *_ = games.step()
        opened.append({**rows, "number": np.arange(2)})
    tickets = np.arange(ring.first, ring.written)
    copy = FramedRing(20, EXAMPLE, Frames(), priorities=True)
    copy.load_state(ring.state())
    expected, whole = ring.read(tickets)
    assert whole.all()
    got, whole = copy.read(tickets)
    assert whole.all()
    for one, other in zip(expected, got, strict=True):
        np.testing.assert_array_equal(one, other)
    stacker = FrameStacker(copy.frames, 2, STACK)
    stacker.load_state(games.stacker.state())
    ended, new = np.zeros(2, bool), frame(np.array([7, 8]))
    one = games.stacker.step(new, ended, new[:0])[1]
    assert one.tolist() == stacker.step(new, ended, new[:0])[1].tolist()


def test_nonsense_is_refused() -> None:
    with pytest.raises(ConfigError, match="columns"):
        FramedRing(10, EXAMPLE, Frames(("obs", "missing")))
    with pytest.raises(ConfigError, match="shape"):
        FramedRing(10, {"obs": np.zeros(3)}, Frames(("obs",)))
    stacker = FrameStacker(FramedRing(10, EXAMPLE, Frames()).frames, 1, STACK)
    with pytest.raises(ConfigError, match="1 episodes ended, but 0 last frames"):
        stacker.step(frame(np.array([1])), np.array([True]), frame(np.array([])))
    with pytest.raises(ConfigError, match="without frames"):
        _ = Replay(10, EXAMPLE).frames

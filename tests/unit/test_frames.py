"""Frames stored once: stacks equal those of a plain replay, over ends, wraps and restarts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.numpy import load_file

import manyhands as mh
from manyhands.errors import ConfigError
from manyhands.experiment import checkpoint
from manyhands.replay.buffer import PrioritizedReplay, Replay
from manyhands.replay.frames import FramedRing, Frames, FrameStacker, HeldFrames, StackLog
from manyhands.strategies import experience

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
            batch = replay.sample(50)
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


# -- environments that give whole stacks -----------------------------------------------------------


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 3), st.sampled_from(["same", "next"]), st.booleans(), st.integers(0, 2**32))
def test_whole_stacks_are_found_again(envs: int, habit: str, padded: bool, seed: int) -> None:
    """Whatever an environment shows at starts and ends: what is read is what was seen."""
    rng = np.random.default_rng(seed)
    ring = FramedRing(400, EXAMPLE, Frames(capacity=3000))
    log = StackLog(ring.frames, envs, STACK)

    def first() -> np.ndarray:
        stack = np.zeros((STACK, 2, 2), np.int32) if padded else frame(np.full(STACK, 7))
        stack[-1] = rng.integers(1, 6)  # few kinds: neighbours are often the same
        return stack

    seen = np.stack([first() for _ in range(envs)])
    log.start(seen)
    plain, waiting = [], np.zeros(envs, bool)
    for _ in range(30):
        new = np.concatenate([seen[:, 1:], rng.integers(1, 6, (envs, 1, 2, 2))], axis=1)
        ended = (rng.random(envs) < 0.3) & ~waiting
        after = new.astype(np.int32)
        for env in np.flatnonzero(waiting):  # a reset in disguise
            after[env] = first()
        finals = [(int(env), after[env].copy()) for env in np.flatnonzero(ended)]
        reached = after.copy()
        if habit == "same":
            for env, _ in finals:
                after[env] = first()
        waiting = ended if habit == "next" else waiting
        kept = log.current
        tickets = log.step(seen, after, finals)
        ring.append({"obs": kept, "next_obs": tickets, "number": np.arange(envs)})
        plain.append((seen, reached))
        seen = after
    tree = ring.tree(ring.read(np.arange(30 * envs))[0])
    np.testing.assert_array_equal(tree["obs"], np.concatenate([before for before, _ in plain]))
    np.testing.assert_array_equal(tree["next_obs"], np.concatenate([after for _, after in plain]))


def test_a_stack_costs_one_frame_a_step() -> None:
    ring = FramedRing(400, EXAMPLE, Frames(capacity=3000))
    log = StackLog(ring.frames, 2, STACK)
    seen = frame(np.arange(6)).reshape(2, STACK, 2, 2)
    log.start(seen)
    for number in range(10, 60):
        after = np.concatenate([seen[:, 1:], np.full((2, 1, 2, 2), number, np.int32)], axis=1)
        log.step(seen, after, [])
        seen = after
    assert ring.frames.written == 2 * STACK + 2 * 50


def test_frames_are_held_until_their_rows_go() -> None:
    ring = FramedRing(40, EXAMPLE, Frames(capacity=100))
    held = HeldFrames(ring.frames, room=8)
    assert [held.append({"frame": frame(np.array([n]))}) for n in range(5)] == [0, 1, 2, 3, 4]
    assert ring.frames.written == 0
    assert held.stacks(np.array([[0, 2, 4]]))[0, :, 0, 0].tolist() == [0, 2, 4]
    held.release()
    held.release()
    assert ring.frames.written == 5
    for n in range(5, 13):
        held.append({"frame": frame(np.array([n]))})
    with pytest.raises(ConfigError, match="cannot be held back"):
        held.append({"frame": frame(np.array([0]))})
    with pytest.raises(ConfigError, match="older than"):
        held.stacks(np.array([[4, 5, 6]]))
    held.release()
    (column,) = ring.frames.columns
    assert column[:13, 0, 0].tolist() == list(range(13))


@pytest.mark.parametrize(
    ("backend", "strategy"),
    [
        ("atari", "single"),  # shows black before an episode's first frame
        ("envpool", "apex"),  # shows the first frame instead, and resets in disguise
        pytest.param("atari", "apex", marks=pytest.mark.slow),
        pytest.param("envpool", "single", marks=pytest.mark.slow),
    ],
)
def test_training_is_the_same_as_with_plain_storage(
    backend: str, strategy: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same rows are drawn: weights equal to the bit; but the frames lie there once."""
    pytest.importorskip({"envpool": "envpool", "atari": "ale_py"}[backend])
    short = {"envpool": {"max_episode_steps": 12}, "atari": {"max_num_frames_per_episode": 60}}
    options: dict[str, Any] = {
        "env": {"envpool": "Pong-v5", "atari": "ALE/Pong-v5"}[backend], "env_backend": backend,
        "env_kwargs": short[backend], "num_envs": 2, "steps": 160, "rollout_length": 16,
        "learning_starts": 32, "batch_size": 8, "updates_per_step": 0.1, "n_step": 3,
        "replay_size": 120, "strategy": strategy, "workers": 1 if strategy == "single" else 3,
        "engine": "inline", "quiet": True, "tensorboard": False, "checkpoint_replay": True,
    }  # fmt: skip
    left, sizes = [], []
    for name in ("framed", "plain"):
        if name == "plain":
            monkeypatch.setattr(experience, "frames_of", lambda *_: None)
        mh.train("dqn", run_dir=str(tmp_path / name), **options)
        state = checkpoint.newest(tmp_path / name)[0].state
        rings = (
            [state["worker"]["replay"]["ring"]]
            if strategy == "single"
            else state["replay"]["shards"]
        )
        columns = [
            c for r in rings for c in [*r["columns"], *r.get("frames", {}).get("columns", ())]
        ]
        sizes.append(sum(c.nbytes for c in columns))
        left.append(load_file(tmp_path / name / "policy.safetensors"))
        assert state["algorithm"]["version"] > 5
    assert all(np.array_equal(left[0][k], left[1][k]) for k in left[0])
    assert sizes[1] > 4 * sizes[0], sizes

"""Every kind of environment, through the adapter, gives the same clean transitions."""

from __future__ import annotations

from collections import Counter
from typing import Any

import gymnasium
import numpy as np
import pytest
from gymnasium.vector import AutoresetMode, SyncVectorEnv
from hypothesis import given, settings
from hypothesis import strategies as st

from manyhands import seeding
from manyhands.envs import EnvLoop, Step, VecAdapter, VectorAdapter, make_vec
from manyhands.envs.toys import TimeLimit
from manyhands.envs.vector import autoreset_mode
from manyhands.errors import ConfigError, WorkerError

MODES = ("NEXT_STEP", "SAME_STEP", "DISABLED")


def counter(**kwargs: Any) -> gymnasium.Env:
    return gymnasium.make("manyhands/Counter-v0", disable_env_checker=True, **kwargs)


def build(kind: str, num_envs: int, seed: int, **kwargs: Any) -> VecAdapter:
    """The counter env behind each adapter, seeded once per sub-env so that all can be compared."""
    factories = [lambda: counter(**kwargs)] * num_envs
    if kind == "loop":
        return EnvLoop(factories, seed=seed, episode_seeds=False)
    vector = SyncVectorEnv(factories, autoreset_mode=AutoresetMode[kind])
    return VectorAdapter(vector, seed=seed, episode_seeds=False)


def flat(obs: Any, i: int) -> tuple[float, ...]:
    part = obs["all"][i] if isinstance(obs, dict) else obs[i]
    return tuple(part.tolist())


def action_for(obs: Any, num_envs: int) -> np.ndarray:
    """Depends on what is seen only, so that rows a mode adds or leaves out change nothing."""
    return np.array([int(sum(flat(obs, i))) % 3 for i in range(num_envs)])


def play(envs: VecAdapter, wanted: int) -> tuple[Counter, Counter]:
    """Transitions and finished episodes of the first `wanted` valid steps of every sub-env."""
    transitions: Counter = Counter()
    episodes: Counter = Counter()
    taken = [0] * envs.num_envs
    obs = envs.reset()
    while min(taken) < wanted:
        actions = action_for(obs, envs.num_envs)
        step = envs.step(actions)
        after = step.next_obs()
        done = step.terminated | step.truncated
        assert sorted(f.env for f in step.finals) == np.flatnonzero(done).tolist()
        for i in range(envs.num_envs):
            if not step.valid[i]:
                assert not done[i]
                assert step.reward[i] == 0
                continue
            taken[i] += 1
            if taken[i] > wanted:
                continue
            end = (bool(step.terminated[i]), bool(step.truncated[i]))
            key = (flat(obs, i), int(actions[i]), float(step.reward[i]), *end, flat(after, i))
            transitions[(i, *key)] += 1
            for e in step.episodes:
                if e.env == i:
                    episodes[(i, e.number, e.total_return, e.length)] += 1
        obs = step.obs
    envs.close()
    return transitions, episodes


@settings(max_examples=80, deadline=None)
@given(seed=st.integers(0, 2**31 - 1), num_envs=st.integers(1, 4), longest=st.integers(1, 6))
def test_all_modes_give_the_same_transitions(seed: int, num_envs: int, longest: int) -> None:
    expected = play(build("loop", num_envs, seed, longest=longest), 20)
    assert sum(expected[0].values()) == 20 * num_envs
    for mode in MODES:
        assert play(build(mode, num_envs, seed, longest=longest), 20) == expected, mode


@pytest.mark.parametrize("mode", MODES)
def test_dict_observations_in_every_mode(mode: str) -> None:
    expected = play(build("loop", 3, 11, as_dict=True), 30)
    assert play(build(mode, 3, 11, as_dict=True), 30) == expected


def test_the_transitions_are_those_of_the_env_itself() -> None:
    """Against a loop written out by hand: nothing of ours in it but the seed."""
    transitions, _ = play(build("loop", 1, 5), 25)
    env, seen = counter(), Counter()
    obs, _ = env.reset(seed=seeding.integer(5, "env", 0, 0, 0))
    for _ in range(25):
        action = int(obs.sum()) % 3
        after, reward, terminated, truncated, _ = env.step(action)
        seen[(0, tuple(obs), action, reward, terminated, truncated, tuple(after))] += 1
        obs = env.reset()[0] if terminated or truncated else after
    assert transitions == seen


@pytest.mark.parametrize("kind", ["loop", "DISABLED"])
def test_every_episode_can_be_played_again_from_its_seed(kind: str) -> None:
    factories = [counter] * 3
    if kind == "loop":
        envs: VecAdapter = EnvLoop(factories, seed=3, worker=2)
    else:
        vector = SyncVectorEnv(factories, autoreset_mode=AutoresetMode.DISABLED)
        envs = VectorAdapter(vector, seed=3, worker=2)
    envs.reset()
    found = []
    for _ in range(30):
        found += envs.step(np.zeros(3, dtype=np.int64)).episodes
    assert {e.number for e in found} >= {0, 1, 2}
    env = counter()
    for e in found:
        assert e.seed == seeding.integer(3, "env", 2, e.env, e.number)
        env.reset(seed=e.seed)
        total, length, done = 0.0, 0, False
        while not done:
            _, reward, terminated, truncated, _ = env.step(0)
            total, length, done = total + reward, length + 1, terminated or truncated
        assert (total, length) == (e.total_return, e.length)


@pytest.mark.parametrize("kind", ["loop", *MODES])
def test_truncation_probe_bootstraps_from_the_true_last_observation(kind: str) -> None:
    """V(s) = 1/(1-γ) everywhere; the backward sum over [T, B] storage must find it at every row."""
    gamma, T, B = 0.9, 23, 2
    make = lambda: gymnasium.make("manyhands/TimeLimit-v0", limit=5)  # noqa: E731
    if kind == "loop":
        envs: VecAdapter = EnvLoop([make] * B, seed=0)
    else:
        envs = VectorAdapter(SyncVectorEnv([make] * B, autoreset_mode=AutoresetMode[kind]), seed=0)
    true_value = 1 / (1 - gamma)
    obs = np.zeros((T + 1, B, 1), np.float32)
    reward = np.zeros((T, B), np.float32)
    flags = [np.zeros((T, B), bool) for _ in range(3)]
    finals = {}
    envs.reset(obs[0])
    for t in range(T):
        row = Step(obs[t + 1], reward[t], *(flag[t] for flag in flags))
        assert envs.step(np.zeros(B, dtype=np.int64), row) is row
        finals.update({(t, f.env): f.obs for f in row.finals})
    terminated, truncated, valid = flags
    assert not terminated.any()
    assert set(finals) == set(zip(*np.nonzero(truncated), strict=True))
    assert all(last == 1.0 for last in finals.values())
    value = np.full(B, true_value)
    for t in reversed(range(T)):
        value = np.where(truncated[t], true_value, value)  # V(final), never V of the next episode
        value = np.where(valid[t], reward[t] + gamma * value, value)
        np.testing.assert_allclose(value[valid[t]], true_value, rtol=1e-5)


def test_rows_fill_the_callers_storage_and_fresh_rows_are_not_shared() -> None:
    envs = build("loop", 2, 1)
    first = envs.reset()
    a = envs.step(np.zeros(2, dtype=np.int64))
    kept = a.obs.copy()
    b = envs.step(np.zeros(2, dtype=np.int64))
    assert a.obs is not b.obs
    assert first is not a.obs
    np.testing.assert_array_equal(a.obs, kept)


def test_cartpoles_own_vector_env_and_a_users_vector_env() -> None:
    for envs in (
        make_vec("CartPole-v1", 4, backend="vector", seed=1),
        make_vec(gymnasium.make_vec("CartPole-v1", 4, vectorization_mode="sync"), 4, seed=1),
        make_vec(lambda: gymnasium.make_vec("CartPole-v1", 4), 4, seed=1),
    ):
        assert isinstance(envs, VectorAdapter)
        assert autoreset_mode(envs.env) == "NextStep"
        envs.reset()
        rng = np.random.default_rng(0)
        valid, finished = 0, []
        for _ in range(200):
            step = envs.step(rng.integers(0, 2, 4))
            valid += int(step.valid.sum())
            finished += step.episodes
        # CartPole pays 1 a step, so the books must balance: no step lost, none counted twice.
        assert all(e.total_return == e.length for e in finished)
        running = sum(envs._length(i) for i in range(4) if step.valid[i] and not envs._ended[i])
        assert valid == sum(e.length for e in finished) + running
        envs.close()


def test_envpool_gives_the_same_contract() -> None:
    pytest.importorskip("envpool")
    envs = make_vec("CartPole-v1", 4, backend="envpool", seed=1)
    again = make_vec("CartPole-v1", 4, backend="envpool", seed=1)
    other = make_vec("CartPole-v1", 4, backend="envpool", seed=1, worker=1)
    start = envs.reset()
    np.testing.assert_array_equal(start, again.reset())
    assert not np.array_equal(start, other.reset())
    assert len({tuple(row) for row in start.tolist()}) == 4
    invalid, finished = 0, []
    for _ in range(100):
        step = envs.step(np.zeros(4, dtype=np.int64))
        invalid += int((~step.valid).sum())
        finished += step.episodes
    assert all(e.total_return == e.length for e in finished)
    assert len(finished) - 4 <= invalid <= len(finished)
    for pool in (envs, again, other):
        pool.close()


def test_atari_images_and_ram() -> None:
    pytest.importorskip("ale_py")
    options = {"seed": 1, "max_num_frames_per_episode": 60}
    image = make_vec("ALE/Pong-v5", 2, **options)
    obs = image.reset()
    assert obs.shape == (2, 4, 84, 84)
    assert obs.dtype == np.uint8
    finished = []
    for _ in range(40):
        step = image.step(np.zeros(2, dtype=np.int64))
        assert step.valid.all()
        for final in step.finals:
            assert final.obs.shape == (4, 84, 84)
            assert not np.array_equal(final.obs, step.obs[final.env])
        finished += step.episodes
    assert len(finished) >= 2
    assert {e.env for e in finished} == {0, 1}
    image.close()

    ram = make_vec("ALE/Pong-v5", 2, obs_type="ram", **options)
    assert ram.reset().shape == (2, 128)
    steps = [ram.step(np.zeros(2, dtype=np.int64)) for _ in range(20)]
    assert sum(int(s.truncated.sum()) for s in steps) == 2  # 60 frames are 15 steps
    ram.close()


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("where", ["observation", "reward"])
def test_vector_envs_are_checked_for_nan_too(mode: str, where: str) -> None:
    make = lambda: gymnasium.make("manyhands/NotANumber-v0", where=where)  # noqa: E731
    vector = SyncVectorEnv([make] * 2, autoreset_mode=AutoresetMode[mode])
    envs = VectorAdapter(vector, seed=1)
    envs.reset()
    for _ in range(3):
        envs.step(np.zeros(2, dtype=np.int64))
    with pytest.raises(WorkerError, match=rf"{where}.*env 0 \(episode 0, step 4, seed \d+\)"):
        envs.step(np.zeros(2, dtype=np.int64))


def test_same_step_without_final_observations_is_refused() -> None:
    class Forgets(SyncVectorEnv):
        def step(self, actions: Any) -> Any:
            return (*super().step(actions)[:4], {})

    vector = Forgets([counter] * 2, autoreset_mode=AutoresetMode.SAME_STEP)
    envs = VectorAdapter(vector, seed=1)
    envs.reset()
    with pytest.raises(ConfigError, match="final_obs"):  # noqa: PT012 - the step is not known
        for _ in range(10):
            envs.step(np.zeros(2, dtype=np.int64))


@pytest.mark.parametrize("backend", ["gymnasium", "vector"])
def test_a_second_reset_never_repeats_the_first(backend: str) -> None:
    envs = make_vec("CartPole-v1", 3, backend=backend, seed=1)
    starts = np.concatenate([envs.reset(), envs.reset(), envs.reset()])
    assert len({tuple(row) for row in starts.tolist()}) == 9
    envs.close()


def test_an_env_that_reuses_its_observation_array_loses_nothing() -> None:
    class Reuses(TimeLimit):
        _kept = None

        def _observation(self) -> Any:
            if self._kept is None:
                self._kept = np.zeros(1, np.float32)
            self._kept[0] = self._steps / self.limit
            return self._kept

    envs = EnvLoop([lambda: Reuses(limit=2)], seed=1)
    envs.reset()
    envs.step(np.array([0]))
    step = envs.step(np.array([0]))
    assert (step.obs[0, 0], step.finals[0].obs[0]) == (0.0, 1.0)

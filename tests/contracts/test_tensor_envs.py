"""CartPole and Pendulum as tensors are Gymnasium's, transition by transition and end by end."""

from __future__ import annotations

from typing import Any

import gymnasium
import numpy as np
import pytest
import torch

from manyhands.envs import make_vec
from manyhands.envs.tensors import WORLDS, TensorEnvs
from manyhands.errors import ConfigError

ROWS = 3000


def states(name: str, rng: np.random.Generator) -> np.ndarray:
    """[S, ROWS] from all over, beyond where episodes end too."""
    reach = {"CartPole-v1": [2.6, 3.0, 0.25, 3.5], "Pendulum-v1": [7.0, 8.0]}[name]
    return rng.uniform(-1, 1, (len(reach), ROWS)) * np.array(reach)[:, None]


@pytest.mark.parametrize("name", WORLDS)
def test_transitions_are_gymnasiums(name: str) -> None:
    rng = np.random.default_rng(1)
    env: Any = gymnasium.make(name).unwrapped
    before = states(name, rng)
    actions = [env.action_space.sample() for _ in range(ROWS)]
    world = WORLDS[name]()
    after, reward, terminated = world.move(
        torch.as_tensor(before), torch.as_tensor(np.array(actions))
    )
    seen = world.see(after).numpy()
    assert seen.dtype == np.float32
    for i, action in enumerate(actions):
        env.reset()
        env.state = before[:, i].copy()
        obs, expected, ended, _, _ = env.step(action)
        np.testing.assert_allclose(seen[i], obs, atol=1e-6, rtol=0)
        assert abs(float(reward[i]) - float(expected)) < 1e-6
        assert bool(terminated[i]) == ended
    assert terminated.any() == (name == "CartPole-v1")
    assert (world.observation_space, world.action_space) == (
        env.observation_space, env.action_space
    )  # fmt: skip


@pytest.mark.parametrize("name", WORLDS)
def test_whole_episodes_end_as_gymnasiums_do(name: str) -> None:
    """Side by side from the same starts, with the same actions: rewards, flags, last observations,
    returns and lengths. 520 steps: CartPole falls, and Pendulum runs into its time limit."""
    envs = make_vec(f"manyhands/{name}", 3, backend="torch", seed=5)
    assert isinstance(envs, TensorEnvs)
    mirror: list[Any] = [
        gymnasium.make(f"manyhands/{name}", disable_env_checker=True) for _ in range(3)
    ]
    rng = np.random.default_rng(2)
    envs.reset()
    for i, env in enumerate(mirror):
        env.reset()
        env.unwrapped.state = envs._state[:, i].numpy().copy()
    lengths, totals, ends = [0] * 3, [0.0] * 3, 0
    for _ in range(520):
        discrete = hasattr(envs.action_space, "n")
        actions = rng.integers(2, size=3) if discrete else rng.normal(size=(3, 1)).astype("f4")
        row = envs.step(actions)
        finals = {final.env: final.obs for final in row.finals}
        episodes = {episode.env: episode for episode in row.episodes}
        for i, env in enumerate(mirror):
            obs, reward, *flags, _ = env.step(envs.to_env(actions)[i])
            lengths[i], totals[i] = lengths[i] + 1, totals[i] + float(reward)
            assert [bool(row.terminated[i]), bool(row.truncated[i])] == flags
            assert row.reward[i] == pytest.approx(float(reward), abs=1e-6)
            np.testing.assert_allclose(finals.get(i, row.obs[i]), obs, atol=1e-6)
            if any(flags):
                ends += 1
                assert (episodes[i].length, episodes[i].total_return) == (
                    lengths[i], pytest.approx(totals[i], abs=1e-4)
                )  # fmt: skip
                env.reset()
                env.unwrapped.state = envs._state[:, i].numpy().copy()
                lengths[i], totals[i] = 0, 0.0
        assert len(row.finals) == len(row.episodes) == int((row.terminated | row.truncated).sum())
    assert ends >= 6


def test_a_time_limit_and_a_fall_in_one_step_are_both_told() -> None:
    envs = make_vec("CartPole-v1", 1, backend="torch", seed=1, max_episode_steps=3)
    assert isinstance(envs, TensorEnvs)
    envs.reset()
    envs._state[:, 0] = torch.tensor([2.39, 0.1, 0.0, 0.0])
    flags = []
    for _ in range(3):
        row = envs.step(np.array([1]))
        flags.append((bool(row.terminated[0]), bool(row.truncated[0])))
    assert flags == [(False, False), (False, False), (True, True)]


def test_the_same_seed_plays_the_same_and_a_checkpoint_goes_on_exactly() -> None:
    def played(envs: Any, steps: int) -> list[bytes]:
        return [envs.step(np.ones(8, int)).obs.tobytes() for _ in range(steps)]

    def made(seed: int) -> Any:
        envs = make_vec("manyhands/CartPole-v1", 8, backend="torch", seed=seed)
        envs.reset()
        return envs

    one, two, other = made(1), made(1), made(2)
    assert played(one, 30) == played(two, 30) != played(other, 30)
    kept = one.state(one.blank().obs)
    expected = played(one, 30)
    restored = other.load_state(kept)
    assert not restored.restarted
    assert played(other, 30) == expected


def test_what_torch_does_not_step_is_refused_with_what_it_does() -> None:
    with pytest.raises(ConfigError, match="manyhands/CartPole-v1"):
        make_vec("Acrobot-v1", 2, backend="torch")
    with pytest.raises(ConfigError, match="manyhands/Pendulum-v1"):
        make_vec(lambda: gymnasium.make("CartPole-v1"), 2, backend="torch")

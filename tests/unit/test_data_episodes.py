"""Whole episodes: every row once, contiguous, as the policy that acted saw it; GAE per episode."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import pytest
import torch
from gymnasium.vector import AutoresetMode, SyncVectorEnv
from safetensors.numpy import load_file

from manyhands import train, wire
from manyhands.algorithms.a2c import A2C
from manyhands.algorithms.registry import A2CConfig
from manyhands.collect.episodes import EpisodeCollector, EpisodeRollout, Queue
from manyhands.engines import inline
from manyhands.engines.attach import attach
from manyhands.envs import make_vec
from manyhands.envs.toys import Counter, TimeLimit
from manyhands.errors import WorkerError
from manyhands.math.running_stats import Normaliser
from manyhands.networks.build import build_actor_critic
from manyhands.streams import EnvNoise
from manyhands.types import Acted

ENV = "manyhands/Counter-v0"


class Teller:
    """A policy whose numbers tell what it saw and which version it was."""

    def __init__(self) -> None:
        self.version = 0

    def act(self, obs: Any, noise: Any) -> Acted:
        seen = np.asarray(obs["all"] if isinstance(obs, dict) else obs)
        step = seen[:, 2]
        actions = (noise.random((len(step), 1))[:, 0] * 3).astype(np.int64)
        ours = np.full(len(step), self.version, np.float32)
        parameters = np.stack([ours, step], axis=1).astype(np.float32)
        return Acted(actions, -ours - 1, self.value(obs), parameters)

    def value(self, obs: Any) -> np.ndarray[Any, Any]:
        seen = np.asarray(obs["all"] if isinstance(obs, dict) else obs)
        return (1000.0 * self.version + seen[:, 2]).astype(np.float32)


def collector(
    envs: int = 4, batch_steps: int = 30, obs: bool = False, **kwargs: Any
) -> tuple[EpisodeCollector, Teller]:
    made = make_vec(ENV, envs, seed=3, **kwargs)
    made.number_from(0)
    normaliser = Normaliser(made.observation_space, obs, False, 0.99)
    teller = Teller()
    return EpisodeCollector(made, teller, batch_steps, EnvNoise(3, 0, envs), normaliser), teller


def batches(many: int, gatherer: EpisodeCollector, teller: Teller) -> list[EpisodeRollout]:
    """Copies of so many batches; the policy changes after each."""
    out = []
    for number in range(many):
        teller.version = number
        out.append(_copy(gatherer.collect()))
    return out


def _copy(rollout: EpisodeRollout) -> EpisodeRollout:
    def own(x: Any) -> Any:
        if isinstance(x, dict):
            return {k: own(v) for k, v in x.items()}
        return x.copy() if isinstance(x, np.ndarray) else x

    return EpisodeRollout(**{k: own(v) for k, v in vars(rollout).items()})


def episodes_of(rollout: EpisodeRollout) -> list[slice]:
    ends = np.flatnonzero(rollout.terminated | rollout.truncated) + 1
    starts = [0, *ends[:-1]]
    return [slice(int(a), int(b)) for a, b in zip(starts, ends, strict=True)]


def test_a_batch_is_the_first_episodes_to_end_on_any_worker() -> None:
    said: list[list[Any]] = []
    queue = Queue(30, lambda value: [value, said.pop(0)])
    queue.add(5, 5)
    said.append([7, [[4, 4], [9, 5]]])
    queue.look(running=3)
    assert not queue.full
    assert (queue.rows, queue.running) == (14, 10)
    queue.add(12, 7)
    queue.add(20, 8)
    said.append([0, [[12, 9], [20, 9]]])
    queue.look(running=0)
    assert queue.full
    taken = [(e.rank, e.number, e.length) for e in queue.take()]
    assert taken == [(1, 0, 4), (0, 0, 5), (1, 1, 5), (0, 1, 7), (1, 2, 9)]
    assert queue.rows == 17  # (0, 2) and (1, 3) wait


def test_each_episode_is_what_playing_it_again_gives() -> None:
    """The slow reference: one environment, one episode at a time, from its seed."""
    gatherer, teller = collector()
    for number, batch in enumerate(batches(20, gatherer, teller)):
        assert 30 <= len(batch.logp) < 30 + Counter().longest
        for rows in episodes_of(batch):
            env = Counter()
            seen, _ = env.reset(seed=int(batch.obs[rows.start, 0, 0]))
            for t in range(rows.start, rows.stop):
                np.testing.assert_array_equal(batch.obs[t, 0], seen)
                seen, reward, terminated, truncated, _ = env.step(batch.action[t, 0])
                assert batch.reward[t, 0] == reward
                assert (batch.terminated[t, 0], batch.truncated[t, 0]) == (terminated, truncated)
                by = batch.versions[t, 0]
                assert batch.logp[t, 0] == -by - 1  # of whoever acted
                assert batch.value[t, 0] == 1000 * by + (t - rows.start)
                assert tuple(batch.parameters[t, 0]) == (number, t - rows.start)  # of now
            after = batch.next_value[rows, 0]
            np.testing.assert_array_equal(after[:-1], batch.value[rows, 0][1:])
            last = rows.stop - 1
            if batch.terminated[last, 0]:
                assert after[-1] == 0
            else:  # V(final observation), by the policy that was there when it ended
                assert after[-1] == 1000 * batch.versions[last, 0] + seen[2]


def test_no_row_is_lost_or_doubled_and_no_seed_used_twice() -> None:
    gatherer, teller = collector(envs=5, batch_steps=17)
    got = batches(200, gatherer, teller)
    seeds = [int(b.obs[rows.start, 0, 0]) for b in got for rows in episodes_of(b)]
    assert len(set(seeds)) == len(seeds)
    rows = np.concatenate([b.obs[:, 0] for b in got])
    assert len(np.unique(rows, axis=0)) == len(rows)
    waiting = gatherer._filled - gatherer._given + int(gatherer._lengths.sum())
    assert sum(b.steps for b in got) == len(rows) + waiting
    told = [e.seed for b in got for e in b.episodes]
    assert len(set(told)) == len(told)
    assert set(told[: len(seeds)]) == set(seeds)  # the first to end; each batch sorted by env


def test_surplus_opens_the_next_batch() -> None:
    """Four environments end together: one batch's worth is taken, the rest waits."""
    made = make_vec("manyhands/TimeLimit-v0", 4, seed=1, limit=10)
    normaliser = Normaliser(made.observation_space, False, False, 0.99)

    class Still(Teller):
        def value(self, obs: Any) -> np.ndarray[Any, Any]:
            return np.full(len(obs), self.version, np.float32)

        def act(self, obs: Any, noise: Any) -> Acted:
            own = self.value(obs)
            return Acted(np.zeros(len(obs), int), own, own, own[:, None])

    still = Still()
    gatherer = EpisodeCollector(made, still, 15, EnvNoise(1, 0, 4), normaliser)
    first, second, third = batches(3, gatherer, still)
    assert [len(b.logp) for b in (first, second, third)] == [20, 20, 20]
    assert [b.steps for b in (first, second, third)] == [40, 0, 40]
    assert [b.stale_share for b in (first, second, third)] == [0.0, 1.0, 0.0]
    assert second.versions.tolist() == [[0]] * 20
    np.testing.assert_array_equal(second.obs[:, 0, 0], np.tile(np.arange(10) / 10, 2).astype("f4"))


def test_the_same_seed_gives_the_same_batches() -> None:
    one, two = (batches(10, *collector()) for _ in range(2))
    for a, b in zip(one, two, strict=True):
        for name in ("obs", "action", "reward", "next_value", "versions", "parameters"):
            np.testing.assert_array_equal(getattr(a, name), getattr(b, name))


def test_resets_in_disguise_are_no_rows() -> None:
    """NEXT_STEP vector environments: one call an episode is no transition."""
    made = make_vec(
        SyncVectorEnv([Counter] * 3, autoreset_mode=AutoresetMode.NEXT_STEP), 3, seed=5
    )  # fmt: skip
    normaliser = Normaliser(made.observation_space, False, False, 0.99)
    teller = Teller()
    gatherer = EpisodeCollector(made, teller, 25, EnvNoise(5, 0, 3), normaliser)
    got = batches(20, gatherer, teller)
    for batch in got:
        for rows in episodes_of(batch):
            steps = batch.obs[rows, 0, 2]
            np.testing.assert_array_equal(steps, np.arange(len(steps)))
    rows = np.concatenate([b.obs[:, 0] for b in got])
    assert len(np.unique(rows, axis=0)) == len(rows)


def test_dict_observations() -> None:
    plain = batches(5, *collector())
    parted = batches(5, *collector(as_dict=True))
    for a, b in zip(plain, parted, strict=True):
        np.testing.assert_array_equal(a.obs, b.obs["all"])
        np.testing.assert_array_equal(a.obs[..., 2], b.obs["step"])
        np.testing.assert_array_equal(a.next_value, b.next_value)


def test_observations_are_kept_as_the_policy_saw_them() -> None:
    gatherer, teller = collector(obs=True)
    gatherer.collect()
    first = gatherer.collect()
    assert first.obs.dtype == np.float32
    before = gatherer.normaliser.parts[""].mean.copy()
    gatherer.normaliser.synchronise(None)
    assert not np.array_equal(before, gatherer.normaliser.parts[""].mean)
    for batch in batches(5, gatherer, teller):
        # the value was told from what was seen: the same number must be in the row
        acted = batch.versions >= 2
        seen = batch.value - 1000.0 * (batch.versions - 2)
        np.testing.assert_allclose(batch.obs[..., 2][acted], seen[acted], atol=1e-2)


def test_long_episodes_find_room() -> None:
    made = make_vec("manyhands/TimeLimit-v0", 2, seed=1, limit=1500)
    model = build_actor_critic(made.observation_space, made.action_space, hidden=(4,), seed=1)
    algorithm = A2C(model, A2CConfig(), seed=1)
    normaliser = Normaliser(made.observation_space, False, False, 0.99)
    gatherer = EpisodeCollector(made, algorithm.actor, 2000, EnvNoise(1, 0, 2), normaliser)
    batch = gatherer.collect()
    expected = np.tile(np.arange(1500) / 1500, 2).astype("f4")
    np.testing.assert_array_equal(batch.obs[:, 0, 0], expected)
    rows = algorithm.prepare(batch)
    assert len(rows["advantage"]) == 3000


def test_advantages_stop_at_the_ends() -> None:
    """GAE over [N, 1] equals the equation, episode by episode."""
    made = make_vec(ENV, 4, seed=2)
    model = build_actor_critic(made.observation_space, made.action_space, hidden=(4,), seed=1)
    algorithm = A2C(model, A2CConfig(gamma=0.9, gae_lambda=0.8), seed=1)
    normaliser = Normaliser(made.observation_space, True, False, 0.9)
    gatherer = EpisodeCollector(made, algorithm.actor, 40, EnvNoise(2, 0, 4), normaliser)
    for _ in range(3):
        batch = gatherer.collect()
        got = algorithm.prepare(batch)
        slow = np.zeros(len(batch.logp))
        for rows in episodes_of(batch):
            running = 0.0
            for t in reversed(range(rows.start, rows.stop)):
                alive = 1.0 - batch.terminated[t, 0]
                delta = batch.reward[t, 0] + 0.9 * alive * batch.next_value[t, 0]
                running = delta - batch.value[t, 0] + 0.9 * 0.8 * running
                slow[t] = running
        np.testing.assert_allclose(got["advantage"], slow, rtol=1e-4, atol=1e-3)
        np.testing.assert_allclose(got["target"], slow + batch.value[:, 0], rtol=1e-4, atol=1e-3)


@pytest.mark.parametrize("workers", [2, 3])
def test_any_number_of_workers_has_the_batches_of_one(workers: int) -> None:
    def play() -> list[EpisodeRollout]:
        group = attach().group
        here = 6 // group.size
        made = make_vec(ENV, here, seed=3, longest=40)
        made.number_from(here * group.rank)
        noise = EnvNoise(3, here * group.rank, here)
        normaliser = Normaliser(made.observation_space, False, False, 0.99)
        teller = Teller()
        gatherer = EpisodeCollector(
            made, teller, 500, noise, normaliser,
            rank=group.rank, size=group.size, exchange=group.exchange,
        )  # fmt: skip
        return batches(12, gatherer, teller)

    (alone,) = inline.run(play, 1, 30)
    for number, parts in enumerate(zip(*inline.run(play, workers, 30), strict=True)):
        one = alone[number]
        assert len(one.logp) >= 500
        assert sum(part.steps for part in parts) == one.steps
        for name in ("obs", "action", "reward", "next_value", "versions", "parameters"):
            joined = np.concatenate([getattr(part, name) for part in parts])
            np.testing.assert_array_equal(joined, getattr(one, name))


class Endless(TimeLimit):
    def step(self, action: Any) -> Any:
        return (*super().step(action)[:3], False, {})


def test_an_episode_that_never_ends_is_an_error() -> None:
    made = make_vec(Endless, 2, seed=1)
    normaliser = Normaliser(made.observation_space, False, False, 0.99)
    model = build_actor_critic(made.observation_space, made.action_space, hidden=(4,), seed=1)
    actor = A2C(model, A2CConfig(), seed=1).actor
    gatherer = EpisodeCollector(made, actor, 5, EnvNoise(1, 0, 2), normaliser, longest=300)
    with pytest.raises(WorkerError, match=r"has not ended in 300 steps.*--collect steps"):
        gatherer.collect()


@pytest.mark.parametrize("strategy", ["gather", "allreduce"])
def test_two_workers_train_on_whole_episodes(strategy: str, tmp_path: Path) -> None:
    """Unequal rows per worker; the same run again is the same to the bit."""
    gymnasium.logger.min_level = gymnasium.logger.ERROR
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        results = [
            train(
                "trpo", env="CartPole-v1", strategy=strategy, engine="inline", workers=2, seed=4,
                steps=2400, collect="episodes", batch_steps=801, num_envs=4, value_epochs=2,
                hidden=(16,), run_dir=str(tmp_path / str(i)), quiet=True,
            )
            for i in range(2)
        ]  # fmt: skip
    finally:
        torch.set_num_threads(threads)
    assert results[0].summary["env_steps"] >= 2400
    assert results[0].summary["updates"] >= 2
    policies = [(r.run_dir / "policy.safetensors").read_bytes() for r in results]
    assert policies[0] == policies[1]


def weights_of(folder: Path, algorithm: str, strategy: str, workers: int) -> dict[str, Any]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        result = train(
            algorithm, env="CartPole-v1", strategy=strategy, engine="inline", workers=workers,
            seed=4, steps=1000, collect="episodes", batch_steps=250, num_envs=6, hidden=(16,),
            run_dir=str(folder / f"{algorithm} {workers}"), quiet=True, tensorboard=False,
        )  # fmt: skip
    finally:
        torch.set_num_threads(threads)
    assert result.summary["updates"] > 2
    return load_file(result.run_dir / "policy.safetensors")


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """algorithm -> what one worker has learned."""
    folder = tmp_path_factory.mktemp("alone")
    return functools.cache(lambda algorithm: weights_of(folder, algorithm, "single", 1))


@pytest.mark.parametrize("strategy", ["gather", "allreduce"])
@pytest.mark.parametrize("algorithm", ["a2c", "ppo", "trpo"])
def test_any_number_of_workers_learns_as_one(
    algorithm: str, strategy: str, alone: Any, tmp_path: Path
) -> None:
    """Whole episodes: the same rows in the same minibatches, so the same weights."""
    for workers in (2, 3):
        together = weights_of(tmp_path, algorithm, strategy, workers)
        for name, one in alone(algorithm).items():
            np.testing.assert_allclose(together[name], one, rtol=1e-4, atol=1e-5, err_msg=name)


def test_a_restored_collector_goes_on_as_the_first_would_have() -> None:
    """Running episodes, surplus episodes and the order of what has ended come back."""

    def made() -> EpisodeCollector:
        envs = make_vec("CartPole-v1", 4, seed=3)
        normaliser = Normaliser(envs.observation_space, True, True, 0.99)
        model = build_actor_critic(envs.observation_space, envs.action_space, hidden=(8,), seed=1)
        actor = A2C(model, A2CConfig(), seed=1).actor
        return EpisodeCollector(envs, actor, 300, EnvNoise(3, 0, 4), normaliser)

    first, fresh, second = made(), made(), made()
    fresh.load_state(wire.decode(bytes(wire.encode(first.state()))))  # before the first batch
    for _ in range(3):
        first.collect()
        first.normaliser.synchronise(None)
    assert fresh.collect().taken > 0
    state = [first.state(), first.normaliser.training_state()]
    collector, normaliser = wire.decode(bytes(wire.encode(state)))
    assert len(collector["filed"]) > 0  # there was a surplus
    second.normaliser.load_training_state(normaliser)
    assert second.load_state(collector) == []
    for _ in range(3):
        one, other = first.collect(), second.collect()
        for name in ("obs", "action", "logp", "value", "reward", "next_value", "versions"):
            np.testing.assert_array_equal(getattr(one, name), getattr(other, name))
        assert one.episodes == other.episodes
        first.normaliser.synchronise(None)
        second.normaliser.synchronise(None)

"""How environments, and all that is drawn by chance, are put back after a resume."""

from __future__ import annotations

import random
from typing import Any

import gymnasium
import numpy as np
import pytest
import torch
from resume_programs import Forgetful, Remembers, check_same

from manyhands import seeding
from manyhands.envs import make_vec
from manyhands.envs.loop import ActionLog, EnvLoop, keeps_itself
from manyhands.experiment.checkpoint import pack, unpack
from manyhands.streams import EnvNoise, global_chance, load_global_chance


def played(envs: Any, obs: Any, steps: int, seed: int) -> list[Any]:
    """What comes of random actions."""
    rng, seen = np.random.default_rng(seed), []
    for _ in range(steps):
        size = (envs.num_envs, *envs.action_space.shape)
        actions = rng.integers(0, 2, size) if not envs.action_space.shape else rng.normal(size=size)
        step = envs.step(actions)
        ends = [(e.env, e.number, e.total_return, e.length, e.seed) for e in step.episodes]
        seen.append([step.obs, step.reward, step.terminated, step.truncated, ends])
        obs = step.obs
    return [seen, obs]


@pytest.mark.parametrize(
    "env", ["CartPole-v1", "Pendulum-v1", "manyhands/Counter-v0", "resume_programs:remembers"]
)
@pytest.mark.parametrize("steps", [1, 40, 700])
def test_running_episodes_go_on(env: str, steps: int) -> None:
    envs, again = (make_vec(env, 3, seed=4) for _ in range(2))
    _, obs = played(envs, envs.reset(), steps, 1)
    kept = unpack(*pack(envs.state(obs)))
    restored = again.load_state(kept)
    assert (restored.restarted, restored.reasons) == ([], [])
    check_same(restored.obs, obs)
    check_same(played(again, None, 300, 2), played(envs, None, 300, 2))
    check_same(again.state(obs), envs.state(obs))  # and could be put back again


def test_an_environment_that_does_not_repeat() -> None:
    envs, again = (EnvLoop([Forgetful] * 2, seed=4) for _ in range(2))
    _, obs = played(envs, envs.reset(), 9, 1)
    kept = unpack(*pack(envs.state(obs)))
    restored = again.load_state(kept)
    assert restored.restarted == [0, 1]
    assert "env 1 (episode 0, step 9, seed" in restored.reasons[1]
    assert "does not repeat" in restored.reasons[1]
    assert again.episodes_begun == [2, 2]  # a new episode, with a seed that was not used before
    assert (again._seeds[0], again._length(0)) == (seeding.integer(4, "env", 0, 0, 1), 0)
    assert (restored.obs > obs).all()


def test_playing_again_has_a_deadline(monkeypatch: pytest.MonkeyPatch) -> None:
    envs, again = (make_vec("CartPole-v1", 2, seed=4) for _ in range(2))
    _, obs = played(envs, envs.reset(), 5, 1)
    monkeypatch.setattr("manyhands.envs.loop.SECONDS", 0.0)
    restored = again.load_state(envs.state(obs))
    assert restored.restarted == [0, 1]
    assert "takes too long to play again" in restored.reasons[0]


@pytest.mark.parametrize("backend", ["vector", "envpool"])
def test_vector_environments_begin_new_episodes(backend: Any) -> None:
    if backend == "envpool":
        pytest.importorskip("envpool")
    envs = make_vec("CartPole-v1", 3, backend=backend, seed=4)
    first = np.array(envs.reset())
    _, obs = played(envs, None, 50, 1)
    begun = envs.episodes_begun
    again = make_vec("CartPole-v1", 3, backend=backend, seed=4)
    restored = again.load_state(unpack(*pack(envs.state(obs))))
    assert restored.restarted == [0, 1, 2]
    assert "cannot be put back" in restored.reasons[0]
    assert again.episodes_begun == [n + 1 for n in begun]
    assert not np.isclose(restored.obs, first).all(axis=1).any()  # no seed is used twice
    envs.close()
    again.close()


def test_who_can_say_its_state() -> None:
    limited = gymnasium.wrappers.TimeLimit(Remembers(), 5)
    assert keeps_itself(limited)
    assert not keeps_itself(gymnasium.wrappers.FlattenObservation(limited))  # may hide more
    assert not keeps_itself(gymnasium.make("CartPole-v1"))


def test_the_log_of_actions_forgets_what_is_over(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("manyhands.envs.loop.LONGEST", 2000)
    log, starts, sent = ActionLog(), [0, 0], []
    for clock in range(5000):
        if clock % 7 == 0:
            starts[0] = clock
        sent.append(np.array([clock, -clock]))
        log.add(sent[-1], starts)
    assert [a[0] for a in sent[starts[0] :]] == log.of(0, starts[0]).tolist()  # type: ignore[union-attr]
    assert log.of(1, 0) is None  # an episode that is too long to play again
    assert log._rows.nbytes < 5000 * 2 * 8
    starts[1] = 4990
    again = ActionLog()
    again.load(5000, [log.of(i, starts[i]) for i in range(2)])
    for clock in range(5000, 5600):
        for one in (log, again):
            one.add(np.array([clock, -clock]), starts)
    for i in range(2):
        check_same(again.of(i, starts[i]), log.of(i, starts[i]))


def test_noise_and_global_generators() -> None:
    noise, again = EnvNoise(1, 0, 3), EnvNoise(1, 0, 3)
    for _ in range(150):
        noise.random((3, 2))
        noise.standard_normal((3,))
    again.load_state(unpack(*pack(noise.state())))
    for _ in range(200):
        check_same(again.random((3, 2)), noise.random((3, 2)))
        check_same(again.standard_normal((3,)), noise.standard_normal((3,)))
    before = global_chance()
    try:
        random.gauss(0, 1)
        np.random.standard_normal()
        kept = unpack(*pack(global_chance()))
        drawn = [random.gauss(0, 1), np.random.standard_normal(), float(torch.rand(()))]
        load_global_chance(kept)
        assert drawn == [random.gauss(0, 1), np.random.standard_normal(), float(torch.rand(()))]
    finally:
        load_global_chance(before)

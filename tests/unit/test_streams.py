"""Global generators change hands: whole, and without a trace."""

from __future__ import annotations

import random
from typing import Any

import gymnasium
import numpy as np
import pytest
import torch

from manyhands import streams
from manyhands.envs.loop import EnvLoop


def draws() -> tuple[float, ...]:
    """An odd number of normal ones: numpy makes them in pairs and keeps the second in waiting."""
    return (np.random.normal(), random.gauss(0, 1), random.random(), float(torch.rand(())))


@pytest.fixture(autouse=True)
def generators_given_back() -> Any:
    with streams.given_back():
        yield


@pytest.mark.parametrize("waiting", [0, 1])
def test_two_owners_in_turn_draw_what_each_draws_alone(waiting: int) -> None:
    np.random.seed(1)
    for _ in range(waiting):
        np.random.normal()
    start = streams.take_all()
    streams.put_all(streams.copy_all(start))
    alone = [draws() for _ in range(6)]
    owners = [streams.copy_all(start) for _ in range(2)]
    seen: list[list[Any]] = [[], []]
    for turn in range(12):
        owner = turn % 2
        streams.put_all(owners[owner])
        seen[owner].append(draws())
        owners[owner] = streams.take_all()
        streams.put_all(owners[owner])  # an idle turn
        owners[owner] = streams.take_all()
    assert seen == [alone, alone]


def test_a_generator_of_the_users_choice_comes_back() -> None:
    chosen = np.random.PCG64(3)
    np.random.set_bit_generator(chosen)
    expected = np.random.Generator(np.random.PCG64(3)).bit_generator.random_raw()
    with streams.given_back():
        np.random.random(5)
    assert np.random.get_bit_generator() is chosen
    assert chosen.random_raw() == expected


class Late(gymnasium.Env):  # type: ignore[misc]
    """Draws from numpy's generator, once `Late.draws`."""

    observation_space = gymnasium.spaces.Box(-1e9, 1e9, (1,), np.float64)
    action_space = gymnasium.spaces.Discrete(2)
    draws = False

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        return np.zeros(1), {}

    def step(self, action: Any) -> Any:
        seen = np.random.random() if Late.draws else 0.0
        return np.array([seen]), 1.0, False, False, {}


def test_only_environments_that_draw_have_streams_of_their_own(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    envs = EnvLoop([Late, Late], seed=1)
    actions = np.zeros(2, np.int64)
    envs.reset()
    for _ in range(200):
        envs.step(actions)
    assert envs._chance is not None
    assert list(envs._chance.kinds) == []
    assert envs._steps[0] == envs.envs[0].step  # nothing stands in the way
    monkeypatch.setattr(Late, "draws", True)
    for _ in range(1024 + 64):
        envs.step(actions)
    assert list(envs._chance.kinds) == ["numpy"]
    # From here on as from the beginning: its own numbers, whatever happens elsewhere.
    before = [envs.step(actions).obs.ravel().tolist() for _ in range(3)]
    again = EnvLoop([Late, Late], seed=1)
    monkeypatch.setattr(Late, "draws", False)
    again.reset()
    for _ in range(200):
        again.step(actions)
    monkeypatch.setattr(Late, "draws", True)
    for _ in range(1024 + 64):
        again.step(actions)
    np.random.seed(99)
    assert [again.step(actions).obs.ravel().tolist() for _ in range(3)] == before

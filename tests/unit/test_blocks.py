"""Weight server, shared values and the checks of users' own networks."""

from __future__ import annotations

from typing import Any

import async_programs
import pytest
import torch
from answers import answers
from conftest import ALL_ENGINES
from second_launch import answers_of
from torch.distributions import Categorical

import manyhands as mh
from manyhands import launch
from manyhands.errors import ConfigError


@pytest.mark.parametrize("engine", ALL_ENGINES)
def test_versions_are_compared_and_set(engine: str) -> None:
    owner, second, third = answers(engine, "weight versions")
    assert [w["first"] for w in (owner, second, third)] == [1, 1, 1]
    assert (second["pushed"], second["version"], second["nothing newer"]) == (True, 2, False)
    assert (third["too late"], third["then"], third["again"]) == (False, 2, True)
    assert owner["counters"] == {"version": 7, "refused": 1}
    assert owner["old"] is True
    assert "version 1 is not kept; there are 5, 6, 7" in owner["gone"]


@pytest.mark.parametrize("engine", ALL_ENGINES)
def test_networks_that_differ_are_named(engine: str) -> None:
    main, *others = answers(engine, "other networks")
    assert main == ""
    for rank, said in enumerate(others, 1):
        assert "weight is (2, 3) at worker 0 of 3" in said
        assert f"(3, 3) at worker {rank} of 3" in said


def test_networks_that_differ_are_named_by_the_gradient_server_too() -> None:
    said = launch(async_programs.different_networks, "gradients", workers=2, engine="inline")
    assert said[0] == ""
    assert "weight is (2, 3) at worker 0 of 2" in said[1]
    assert "(3, 3) at worker 1 of 2" in said[1]


def test_an_owner_that_has_left_is_said_so() -> None:
    said = answers_of("local", "one that left")
    assert "'weights: policy': the worker that serves it has left" in said[1]
    assert "end the script with par.barrier()" in said[1]


@pytest.mark.parametrize("engine", ALL_ENGINES)
def test_whoever_has_room_gets_it(engine: str) -> None:
    """Nobody reads the full channel before the other one has got two."""
    assert answers(engine, "room") == [[0], [1, 2], []]


@pytest.mark.parametrize("engine", ALL_ENGINES)
def test_shared_values(engine: str) -> None:
    told = answers(engine, "values")
    assert {t[0] for t in told} == {150}
    winners = [rank for rank, t in enumerate(told) if t[2]]
    assert len(winners) == 1
    assert {t[1] for t in told} == {winners[0]}
    assert {t[3] for t in told} == {7}


def _actor(give: Any) -> Any:
    return lambda state: give(Categorical(logits=torch.zeros(len(state), 2)))


def test_an_actor_must_give_its_log_probability() -> None:
    state = torch.zeros(3, 4)
    action = torch.zeros(3, dtype=torch.long)
    mh.check_actor(_actor(lambda d: (action, d.log_prob(action), d.entropy())), state)
    for give, words in (
        (lambda d: action, r"Tensor of shape \(3,\) and no log-probability"),
        (lambda d: (action,), "1 thing and no log-probability"),
        (lambda d: (action, action), "where the log-probability should be"),
        (lambda d: (action, d.logits), r"3 actions and log-probabilities of shape \(3, 2\)"),
        (lambda d: (action, torch.full((3,), float("nan"))), "not finite"),
    ):
        with pytest.raises(ConfigError, match=words):
            mh.check_actor(_actor(give), state)

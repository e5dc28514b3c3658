"""check_env finds what people get wrong, and finds nothing in what is right."""

from __future__ import annotations

import re
from typing import Any

import gymnasium
import numpy as np
import pytest
from gymnasium import spaces

from manyhands.envs import check_env, toys


class Good(gymnasium.Env):
    observation_space = spaces.Box(-1, 1, (2,), np.float32)
    action_space = spaces.Discrete(2)

    def reset(self, *, seed: Any = None, options: Any = None) -> Any:
        super().reset(seed=seed)
        return self.np_random.random(2, dtype=np.float32), {}

    def step(self, action: Any) -> Any:
        return self.np_random.random(2, dtype=np.float32), 1.0, False, False, {}


def variant(**members: Any) -> type[Good]:
    return type("Variant", (Good,), members)


def old_reset(self: Any) -> Any:
    return np.zeros(2, np.float32), {}


def unseeded_reset(self: Any, *, seed: Any = None, options: Any = None) -> Any:
    return np.zeros(2, np.float32), {}


def bare_reset(self: Any, *, seed: Any = None, options: Any = None) -> Any:
    gymnasium.Env.reset(self, seed=seed)
    return np.zeros(2, np.float32)


def gives(*result: Any) -> Any:
    return lambda self, action: result


ZERO = np.zeros(2, np.float32)


@pytest.mark.parametrize(
    ("members", "words"),
    [
        ({"observation_space": None}, "observation_space is missing"),
        ({"action_space": spaces.Tuple([spaces.Discrete(2)])}, "Tuple"),
        ({"reset": old_reset}, "def reset"),
        ({"reset": unseeded_reset}, "does not pass the seed on"),
        ({"reset": bare_reset}, "must return"),
        ({"step": gives(ZERO, 1.0, False, {})}, "old Gym form"),
        ({"step": gives(np.zeros(3, np.float32), 1.0, False, False, {})}, r"shape is \(3,\)"),
        ({"step": gives(np.zeros(2), 1.0, False, False, {})}, "float64"),
        ({"step": gives(ZERO + 5, 1.0, False, False, {})}, "outside"),
        ({"step": gives(ZERO * np.nan, 1.0, False, False, {})}, "NaN"),
        ({"step": gives(ZERO, np.ones(1), False, False, {})}, "one number"),
        ({"step": gives(ZERO, float("inf"), False, False, {})}, "reward is inf"),
        ({"step": gives(ZERO, 1.0, 0, False, {})}, "terminated must be"),
        ({"step": gives(ZERO, 1.0, False, False, None)}, "info must be"),
        ({"step": lambda self, action: 1 / 0}, "ZeroDivisionError"),
        (
            {"step": lambda self, a: (np.random.rand(2).astype("f4"), 1.0, False, False, {})},
            "same seed",
        ),
    ],
)
def test_faults_are_found_and_said(members: dict[str, Any], words: str) -> None:
    findings = check_env(variant(**members))
    assert findings
    assert re.search(words, findings[0]), findings


@pytest.mark.parametrize("name", ["TimeLimit", "Identity", "Delayed", "Counter", "Sleep"])
def test_the_toys_are_sound(name: str) -> None:
    assert check_env(toys.TOYS[name](), steps=60) == []


def test_good_envs_pass() -> None:
    assert check_env(Good) == []
    assert check_env(gymnasium.make("CartPole-v1")) == []
    assert check_env(toys.Counter(as_dict=True)) == []
    assert check_env(toys.Identity("multibinary")) == []


def test_bad_toy_and_wrong_kinds() -> None:
    assert "NaN" in check_env(toys.NotANumber())[0]
    assert "not a gymnasium.Env" in check_env(3)[0]  # type: ignore[arg-type]
    never = check_env(Good(), steps=1000)
    assert "no episode ended" in never[0]

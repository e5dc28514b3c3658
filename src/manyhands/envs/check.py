"""Is this environment fit to train on? Plain answers for people who have written their own."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import gymnasium
import numpy as np

from manyhands import trees
from manyhands.envs.spaces import (
    MaskedObservation,
    check_action_space,
    check_mask,
    check_observation_space,
    choices,
    flat_mask,
    flat_space,
    has_mask,
    shape_fault,
)
from manyhands.errors import ConfigError, described
from manyhands.types import MASK


def check_env(
    env: gymnasium.Env[Any, Any] | Callable[[], gymnasium.Env[Any, Any]],
    *,
    steps: int = 200,
    seed: int = 1,
) -> list[str]:
    """Try an environment and say in plain English what is wrong with it.

    Args:
        env: an environment, or a callable that makes one (then it is closed afterwards).
        steps: how many random actions to try.
        seed: of the trial.

    Returns:
        Findings, most basic first; an empty list means that nothing was found.
    """
    made_here = not isinstance(env, gymnasium.Env) and callable(env)
    subject = env() if made_here else env
    if not isinstance(subject, gymnasium.Env):
        return [
            f"this is a {type(subject).__name__}, not a gymnasium.Env: "
            "write `class MyEnv(gymnasium.Env):`"
        ]
    space: Any = getattr(subject, "observation_space", None)
    if has_mask(space) and isinstance(space[MASK], gymnasium.spaces.Tuple):
        subject = MaskedObservation(subject)  # as in training
    try:
        findings = _space_findings(subject)
        if not findings:
            findings = _reset_findings(subject, seed)
        if not findings:
            findings = _step_findings(subject, steps, seed)
        if not findings:
            findings = _determinism_findings(subject, min(steps, 50), seed)
        return findings
    finally:
        if made_here:
            subject.close()


def _space_findings(env: Any) -> list[str]:
    findings = []
    for name, check in (
        ("observation_space", check_observation_space),
        ("action_space", check_action_space),
    ):
        space = getattr(env, name, None)
        if not isinstance(space, gymnasium.Space):
            findings.append(f"{name} is missing: set self.{name} in __init__")
            continue
        try:
            check(space)
        except ConfigError as fault:
            findings.append(str(fault))
    if not findings:
        try:
            check_mask(env.observation_space, env.action_space)
        except ConfigError as fault:
            findings.append(str(fault))
    return findings


def _reset_findings(env: Any, seed: int) -> list[str]:
    try:
        result = env.reset(seed=seed)
    except TypeError as error:
        return [
            f"reset(seed=...) raised {error}; write `def reset(self, *, seed=None, options=None)`"
        ]
    except Exception as error:
        return [f"reset(seed={seed}) raised {described(error)}"]
    if not (isinstance(result, tuple) and len(result) == 2 and isinstance(result[1], dict)):
        return [f"reset() must return (observation, info dict); it returned {_shorten(result)}"]
    findings = _observation_findings(env, result[0], "reset()")
    # An env that never calls super().reset(seed=seed) has a generator with a seed of its own.
    if env.unwrapped.np_random_seed != seed:
        findings.append(
            "reset() does not pass the seed on: call super().reset(seed=seed) first, and draw "
            "from self.np_random"
        )
    return findings


def _step_findings(env: Any, steps: int, seed: int) -> list[str]:
    env.action_space.seed(seed)
    needs_reset, ended = True, 0
    for t in range(steps):
        if needs_reset:
            observation, info = env.reset()
        action = _any_action(env, observation, info)
        try:
            result = env.step(action)
        except Exception as error:
            return [f"step({_shorten(action)}) raised {described(error)}"]
        findings = _result_findings(env, result, t)
        if findings:
            return findings
        observation, info = result[0], result[4]
        needs_reset = bool(result[2] or result[3])
        ended += needs_reset
    if ended == 0 and steps >= 1000:
        return [f"no episode ended in {steps} random steps: give it a time limit (truncated=True)"]
    return []


def _result_findings(env: Any, result: Any, t: int) -> list[str]:
    if not isinstance(result, tuple) or len(result) != 5:
        count = len(result) if isinstance(result, tuple) else 1
        old = " (four is the old Gym form, with one flag `done`)" if count == 4 else ""
        return [
            "step() must return (observation, reward, terminated, truncated, info); it returned "
            f"{count} value(s){old}"
        ]
    observation, reward, terminated, truncated, info = result
    findings = _observation_findings(env, observation, f"step {t}")
    if isinstance(reward, (bool, np.bool_)) or np.ndim(reward) != 0 or not _is_number(reward):
        findings.append(f"step {t}: reward must be one number; it is {_shorten(reward)}")
    elif not np.isfinite(float(reward)):
        findings.append(f"step {t}: reward is {reward}")
    for name, flag in (("terminated", terminated), ("truncated", truncated)):
        if not isinstance(flag, (bool, np.bool_)):
            findings.append(f"step {t}: {name} must be True or False; it is {_shorten(flag)}")
    if not isinstance(info, dict):
        findings.append(f"step {t}: info must be a dict; it is a {type(info).__name__}")
    return findings


def _observation_findings(env: Any, observation: Any, where: str) -> list[str]:
    space = flat_space(env.observation_space)
    if space is not env.observation_space:
        if not isinstance(observation, (dict, tuple)):
            return [f"{where}: the observation is a {type(observation).__name__}, and the space is "
                    f"{env.observation_space}"]  # fmt: skip
        observation = trees.named(observation)
    if fault := shape_fault(space, observation):
        return [f"{where}: the observation does not fit observation_space: {fault}"]
    parts = observation if isinstance(observation, dict) else {"": observation}
    findings = []
    for key, part in parts.items():
        leaf = space.spaces[key] if isinstance(observation, dict) else space
        name = f"observation key {key!r}" if key else "observation"
        values = np.asarray(part)
        if values.dtype.kind == "f" and not np.isfinite(values).all():
            findings.append(f"{where}: the {name} has a NaN or an infinity in it")
        elif values.dtype != leaf.dtype and not isinstance(leaf, gymnasium.spaces.Discrete):
            findings.append(
                f"{where}: the {name} has dtype {values.dtype}, the space says {leaf.dtype}; "
                f"convert with np.asarray(x, dtype=np.{leaf.dtype})"
            )
        elif not leaf.contains(part):
            findings.append(
                f"{where}: the {name} is outside its space {leaf}: it is {_shorten(part)}"
            )
    return findings


def _determinism_findings(env: Any, steps: int, seed: int) -> list[str]:
    first, second = _trace(env, steps, seed), _trace(env, steps, seed)
    for t, (a, b) in enumerate(zip(first, second, strict=False)):
        if not _same(a, b):
            when = "right after reset" if t == 0 else f"after {t} equal actions"
            return [
                f"the same seed gives different episodes ({when}): draw every random number "
                "from self.np_random, never from random or np.random, and reset all state"
            ]
    return []


def _any_action(env: Any, observation: Any, info: dict[str, Any]) -> Any:
    """One that is possible, where the environment says which ones are."""
    mask = observation.get(MASK) if isinstance(observation, dict) else info.get(MASK)
    if mask is None:
        return env.action_space.sample()
    sizes = choices(env.action_space)
    parts = np.split(flat_mask(mask), np.cumsum(sizes)[:-1])
    return env.action_space.sample(mask=parts[0] if len(sizes) == 1 else tuple(parts))


def _trace(env: Any, steps: int, seed: int) -> list[Any]:
    env.action_space.seed(seed)
    observation, info = env.reset(seed=seed)
    trace = [_frozen(observation)]
    for _ in range(steps):
        action = _any_action(env, observation, info)
        observation, reward, terminated, truncated, info = env.step(action)
        trace.append((_frozen(observation), float(reward), bool(terminated), bool(truncated)))
        if terminated or truncated:
            break
    return trace


def _frozen(observation: Any) -> Any:
    if isinstance(observation, (dict, tuple)):
        return {key: np.array(part) for key, part in trees.named(observation).items()}
    return np.array(observation)


def _same(a: Any, b: Any) -> bool:
    if isinstance(a, tuple):
        return _same(a[0], b[0]) and a[1:] == b[1:]
    if isinstance(a, dict):
        return all(np.array_equal(a[key], b[key]) for key in a)
    return bool(np.array_equal(a, b))


def _is_number(x: Any) -> bool:
    return isinstance(x, (int, float, np.integer, np.floating, np.ndarray))


def _shorten(x: Any) -> str:
    text = repr(x)
    return text if len(text) <= 80 else text[:77] + "..."

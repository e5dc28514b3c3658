"""The quickest way to step Python environments that live in this process: a plain loop.

Each sub-environment writes straight into the caller's arrays; nothing is stacked, copied twice or
boxed into info dicts. Episodes begin in the same step in which the last one ended, so every row is
a transition, and every episode has its own seed from the tree: any of them can be played again.

For a checkpoint, an environment that has `get_state()` and `set_state(state)` is put back by these,
which also brings back what it remembers from one episode to the next. All others play their running
episode again: see `ActionLog`.
"""

from __future__ import annotations

import inspect
import math
import time
from collections.abc import Callable, Sequence
from typing import Any

import gymnasium
import numpy as np

from manyhands import trees, wire
from manyhands.envs.adapter import (
    BoxActions,
    DictRows,
    Final,
    FiniteCheck,
    Restored,
    Step,
    VecAdapter,
    copy_single,
    take_row,
)
from manyhands.envs.spaces import check_observation_space, flat_space, shape_fault, zeros
from manyhands.errors import ConfigError, Stopped, WorkerError
from manyhands.streams import OwnChance
from manyhands.trees import Array, Parts
from manyhands.types import Obs

LONGEST = 100_000  # steps of an episode that is played again; a longer one is not resumed
SECONDS = 30.0  # that playing again may take on a worker; the others wait for it
_ROOM, _MOST_BYTES = 256, 256 << 20
_LOOKED_AT = 100  # steps whose results are looked at closely; later only what costs nothing

EnvFactory = Callable[[], gymnasium.Env[Any, Any]]


class ActionLog:
    """The actions since the oldest running episode began, [room, B, ...]; the oldest go first.

    Every episode has its own seed, so `reset(seed)` and the same actions play it again: that is how
    a running episode continues after a resume. One row is written for each step of all
    environments together, about 0.3 µs (a step of one CartPole takes 10).
    """

    def __init__(self) -> None:
        self._rows: Array = np.zeros(0)
        self._room = 0
        self._first = 0  # the clock at row 0
        self._at = 0  # rows that are in use

    def add(self, sent: Array, starts: Sequence[int]) -> None:
        """What was sent in this step; `starts` is when the running episodes began."""
        if self._at >= self._room:
            self._make_room(sent, starts)
        self._rows[self._at] = sent
        self._at += 1

    def of(self, env: int, start: int) -> Array | None:
        """The actions of an env since `start`; None if that is too long ago."""
        if start < self._first:
            return None
        return self._rows[start - self._first : self._at, env].copy()

    def load(self, clock: int, actions: Sequence[Array | None]) -> None:
        """Go on from what `of` gave for each env."""
        kept = [(i, a) for i, a in enumerate(actions) if a is not None]
        length = max((len(a) for _, a in kept), default=0)
        self._first, self._at, self._room = clock - length, length, 0
        if kept:
            shape, dtype = kept[0][1].shape[1:], kept[0][1].dtype
            self._rows = np.zeros((length, len(actions), *shape), dtype)
            for i, a in kept:
                self._rows[length - len(a) :, i] = a
            self._room = length

    def _make_room(self, sent: Array, starts: Sequence[int]) -> None:
        clock = self._first + self._at
        longest = min(LONGEST, max(_ROOM, _MOST_BYTES // max(1, sent.nbytes)))
        oldest = max(min(starts), clock - longest)
        kept = self._rows[max(0, oldest - self._first) : self._at]
        if self._room == 0 or len(kept) > self._room // 2:
            self._room = max(_ROOM, 2 * len(kept))
            rows = np.zeros((self._room, *sent.shape), sent.dtype)
            if len(kept):
                rows[: len(kept)] = kept
            self._rows = rows
        else:
            self._rows[: len(kept)] = kept  # numpy minds that the two may overlap
        self._first, self._at = clock - len(kept), len(kept)


class EnvLoop(VecAdapter):
    """Steps `gymnasium.Env` objects one after the other.

    Args:
        factories: one callable per sub-environment, each returning a fresh environment.
        episode_seeds: seed every episode from the tree (default), or only the first one of each
            sub-environment and let its own generator run on, as Gymnasium's vector envs do.
        reward_clip: give the learner rewards cut to ±reward_clip; returns stay the true ones.
    """

    def __init__(
        self,
        factories: Sequence[EnvFactory],
        *,
        seed: int | None = None,
        worker: int = 0,
        box_actions: BoxActions = "clip",
        check_finite: bool = True,
        episode_seeds: bool = True,
        reward_clip: float | None = None,
    ) -> None:
        self.envs = [_build(factory) for factory in factories]
        if not self.envs:
            raise ConfigError("num_envs=0; at least 1 is needed")
        first = self.envs[0]
        for i, env in enumerate(self.envs[1:], start=1):
            if (env.observation_space, env.action_space) != (
                first.observation_space,
                first.action_space,
            ):
                raise ConfigError(
                    f"env {i} has different spaces from env 0: {env.observation_space}, "
                    f"{env.action_space} against {first.observation_space}, {first.action_space}"
                )
        super().__init__(
            first.observation_space,
            first.action_space,
            len(self.envs),
            seed=seed,
            worker=worker,
            box_actions=box_actions,
            check_finite=check_finite,
        )
        self._episode_seeds = episode_seeds
        self._reward_clip = reward_clip
        self._finite_one = FiniteCheck(self.observation_space, 1)
        self._numbers = range(self.num_envs)
        self._plain = not isinstance(self.observation_space, gymnasium.spaces.Dict)
        self._log = ActionLog()  # what a resume needs to play the running episodes again
        # Without a seed an environment draws from wherever its user has put the generators.
        self._chance = None if seed is None else OwnChance(self.num_envs, self._chance_of)
        self._bind_steps()

    def reset(self, out: Obs | None = None) -> Obs:
        obs = zeros(self.observation_space, (self.num_envs,)) if out is None else out
        rows = obs if self._plain else DictRows(obs)
        for i in range(self.num_envs):
            try:
                value = self._reset_one(i, seeded=self._episode_seeds or not self._running)
            except BaseException as error:
                error.add_note(f"raised by the first reset() of env {self._first + i}")
                raise
            if fault := shape_fault(self.observation_space, value):
                raise ConfigError(f"env {i}: reset() gave an observation whose {fault}")
            rows[i] = value
        self._leave_chance()
        self._running = True
        self._check_row(obs)
        self._check_masks(obs)
        return obs

    def step(self, actions: Array, out: Step | None = None) -> Step:
        row = self.blank() if out is None else out
        sent = self._sent(actions)
        row.terminated.fill(False)
        row.truncated.fill(False)
        row.valid.fill(True)
        row.finals, row.episodes = [], []
        rows = row.obs if self._plain else DictRows(row.obs)
        returns = self._returns
        self._log.add(sent, self._starts)
        self._clock += 1
        rewards: list[float] = []
        i, early = -1, self._clock <= _LOOKED_AT
        try:
            for i, env_step, action in zip(self._numbers, self._steps, sent, strict=True):
                value, reward, terminated, truncated, info = env_step(action)
                if early:
                    self._look_at(value, reward, (terminated, truncated), info)
                rewards.append(reward)
                returns[i] += reward
                if terminated or truncated:
                    row.terminated[i] = terminated
                    row.truncated[i] = truncated
                    value = self._finish(i, value, info, row)
                rows[i] = value
        except BaseException as error:
            self._annotate(error, i, sent)
            raise
        finally:
            self._leave_chance()
        if self._chance is not None and self._chance.tick():
            self._bind_steps()
        self._store_rewards(rewards, row)
        self._check_row(row.obs)
        self._check_masks(row.obs)
        return row

    def close(self) -> None:
        for env in self.envs:
            env.close()
        self._running = False

    def set_attribute(self, name: str, value: Any) -> None:
        for env in self.envs:
            if not env.has_wrapper_attr(name):
                raise ConfigError(
                    f"{env.unwrapped} has no attribute {name!r} to be set; give it one in its "
                    "__init__, or write its name as it is there"
                )
            env.set_wrapper_attr(name, value)

    def state(self, obs: Obs) -> dict[str, Any]:
        starts, own = self._starts, [own_state(env) for env in self.envs]
        for i, kept in enumerate(own):  # these are not played again
            if kept is not None and self._chance is not None:
                kept["streams"] = self._chance.streams_of(i)
        actions = [self._log.of(i, starts[i]) if own[i] is None else None for i in self._numbers]
        return super().state(obs) | {
            "clock": self._clock,
            "starts": list(starts),
            "seeds": list(self._seeds),
            "returns": [float(total) for total in self._returns],
            "obs": obs,
            "actions": actions,
            "own": own,
            "chance": None if self._chance is None else self._chance.state(),
        }

    def load_state(self, state: dict[str, Any]) -> Restored:
        self.continue_from(state["begun"])
        self._clock = int(state["clock"])
        self._starts = [int(start) for start in state["starts"]]
        self._seeds = list(state["seeds"])
        if self._chance is not None and state.get("chance") is not None:
            self._chance.load_state(state["chance"])
            self._bind_steps()
        obs = zeros(self.observation_space, (self.num_envs,))
        rows = obs if self._plain else DictRows(obs)
        reasons: dict[int, str] = {}
        deadline = time.perf_counter() + SECONDS
        for i in self._numbers:
            rows[i] = take_row(state["obs"], i)
            if fault := self._go_on(i, state, deadline):
                reasons[i] = f"{self._where(i)} {fault}; it begins a new episode"
        self._log.load(self._clock, state["actions"])
        for i in reasons:
            rows[i] = self._reset_one(i, seeded=True)
        self._leave_chance()
        self._running = True
        return Restored(obs, list(reasons), list(reasons.values()))

    def state_from(self, parts: Parts) -> dict[str, Any]:
        (one, _), *_ = parts
        names = ("starts", "seeds", "returns", "obs", "actions", "own")
        chance = [state["chance"] for state, _ in parts]
        return super().state_from(parts) | trees.joined(parts, *names) | {
            "clock": one["clock"],  # all have taken the same number of steps
            "chance": None if chance[0] is None else OwnChance.state_from(chance),
        }  # fmt: skip

    def _go_on(self, i: int, state: dict[str, Any], deadline: float) -> str:
        """Bring env i back to where it was in its episode; why that was not possible, or ""."""
        env, seed, total = self.envs[i], self._seeds[i], float(state["returns"][i])
        self._enter_chance(i, self._begun[i] - 1)
        if (kept := state["own"][i]) is not None:
            put_back(env, kept, seed, self._length(i))
            self._returns[i] = total
            if self._chance is not None:
                self._chance.leave()
                self._chance.load_streams_of(i, kept.get("streams", {}))
            return ""
        actions = state["actions"][i]
        if seed is None:
            return "continued with a generator of its own, which cannot be put back"
        if actions is None:
            return "is too long for its actions to be played again"
        value, _ = env.reset(seed=seed)
        self._leave_chance()
        ended, self._returns[i] = False, 0.0
        for action in actions:
            if ended:
                break
            if time.perf_counter() > deadline:
                return f"takes too long to play again (more than {SECONDS:g} s)"
            value, reward, terminated, truncated, _ = self._steps[i](action)
            self._leave_chance()  # after each step, as in step()
            self._returns[i] += reward  # in the environment's own type, as in step()
            ended = terminated or truncated
        seen = copy_single(self.observation_space, value)
        if ended or float(self._returns[i]) != total or not same(seen, take_row(state["obs"], i)):
            return "does not repeat: the same seed and actions led elsewhere"
        return ""

    def _finish(self, i: int, last: Any, info: dict[str, Any], row: Step) -> Any:
        """File the episode and begin the next; its first observation is what to act on."""
        final = copy_single(self.observation_space, last)
        self._check_final(i, final)
        if self._legal is not None and not row.terminated[i]:  # a value of it will be asked for
            self._check_masks(trees.map(lambda x: x[None], final), [i])
        row.finals.append(Final(i, final))
        # A bad reward earlier in the episode was refused in its own step, so it is this one's.
        if self._finite is not None and not math.isfinite(self._returns[i]):
            raise self._not_finite("a reward", i)
        row.episodes.append(self._end(i, info))
        return self._reset_one(i, seeded=self._episode_seeds)

    def _reset_one(self, i: int, *, seeded: bool) -> Any:
        seed = self._episode_seed(i) if seeded else None
        self._enter_chance(i, self._begun[i] if seeded else None)
        observation, _ = self.envs[i].reset(seed=seed)
        self._begin(i, seed)
        return observation

    # -- what environments draw from global generators ------------------------------------------

    def _chance_of(self, env: int, episode: int) -> np.random.SeedSequence:
        return self._seed_of[env].chance(episode)

    def _bind_steps(self) -> None:
        """Bound once: one lookup less per step; within its own streams where it draws from them."""
        shared = self._chance is None or not self._chance.kinds
        step_of = (lambda i: self.envs[i].step) if shared else self._own_step
        self._steps: list[Callable[[Any], Any]] = [step_of(i) for i in self._numbers]

    def _own_step(self, i: int) -> Callable[[Any], Any]:
        assert self._chance is not None
        enter, step = self._chance.enter, self.envs[i].step

        def own_step(action: Any) -> Any:
            enter(i)
            return step(action)

        return own_step

    def _enter_chance(self, i: int, episode: int | None) -> None:
        """Before env i begins an episode; None: its generators run on."""
        if self._chance is None:
            return
        if episode is None:
            self._chance.enter(i)
        else:
            self._chance.begin(i, episode)

    def _leave_chance(self) -> None:
        if self._chance is not None:
            self._chance.leave()

    def _look_at(self, value: Any, reward: Any, flags: tuple[Any, Any], info: Any) -> None:
        """What numpy would take without a word, and ought not to."""
        if fault := shape_fault(self.observation_space, value):
            raise ValueError(f"step() gave an observation whose {fault}")
        if np.iscomplexobj(value):
            raise ValueError("step() gave an observation of complex numbers")
        if np.shape(reward) != () or np.iscomplexobj(reward):
            raise ValueError(f"step() gave the reward {reward!r}; one number is expected")
        for flag in flags:
            if not isinstance(flag, (bool, np.bool_, int, np.integer)):
                raise ValueError(
                    f"step() gave terminated={flags[0]!r}, truncated={flags[1]!r}; True or False "
                    "is expected"
                )
        if not isinstance(info, dict):
            raise ValueError(f"step() gave the info {info!r}; a dict is expected")

    def _store_rewards(self, rewards: list[float], row: Step) -> None:
        row.reward[:] = rewards
        # As they are stored: 1e300 is a number, and infinite in four bytes.
        if self._finite is not None and not math.isfinite(row.reward.sum(dtype=np.float64)):
            bad = int(np.argmin(np.isfinite(row.reward)))
            raise self._not_finite("a reward", bad)
        if self._reward_clip is not None:
            np.clip(row.reward, -self._reward_clip, self._reward_clip, out=row.reward)

    def _check_final(self, i: int, final: Obs) -> None:
        if self._finite is None:
            return
        if not self._finite_one.holds(final):
            raise self._not_finite("the last observation", i)

    def _annotate(self, error: BaseException, i: int, sent: Array) -> None:
        """Say which environment it was; type and traceback stay the environment's own."""
        if 0 <= i < self.num_envs and not isinstance(error, (WorkerError, Stopped)):
            error.add_note(f"raised by {self._where(i)}, action {sent[i]}")


def _build(factory: EnvFactory) -> gymnasium.Env[Any, Any]:
    env = factory()
    if not isinstance(env, gymnasium.Env):
        raise ConfigError(
            f"the environment factory returned a {type(env).__name__}, not a gymnasium.Env"
        )
    check_observation_space(env.observation_space)
    flat = flat_space(env.observation_space)
    return env if flat is env.observation_space else NamedParts(env, flat)


class NamedParts(gymnasium.ObservationWrapper):  # type: ignore[misc]
    """Shows observations of a nested space as the parts of a flat one."""

    def __init__(self, env: gymnasium.Env[Any, Any], flat: gymnasium.Space[Any]) -> None:
        super().__init__(env)
        self.observation_space = flat

    def observation(self, observation: Any) -> dict[str, Any]:
        return trees.named(observation)


# -- environments that keep their own state --------------------------------------------------------


# Wrappers whose own state is known: they count steps, or remember that there was a reset.
_KNOWN_WRAPPERS = (
    "OrderEnforcing",
    "PassiveEnvChecker",
    "TimeLimit",
    "MaskedObservation",
    "NamedParts",
)


def own_state(env: gymnasium.Env[Any, Any]) -> dict[str, Any] | None:
    """What the environment itself says its state is; None where its actions must do.

    These are environments that do not say, that are wrapped too far, or whose state is no plain
    data and arrays.
    """
    if not keeps_itself(env):
        return None
    inner = env.unwrapped
    generator = getattr(inner, "_np_random", None)
    rng = generator.bit_generator.state if isinstance(generator, np.random.Generator) else None
    kept = {"state": inner.get_state(), "rng": rng}
    try:
        wire.encode(kept)
    except ConfigError:
        return None
    return kept


def put_back(env: gymnasium.Env[Any, Any], kept: dict[str, Any], seed: int | None,
             length: int) -> None:  # fmt: skip
    """Put an environment where `own_state` found it, `length` steps into its episode."""
    env.reset(seed=seed)
    inner = env.unwrapped
    inner.set_state(kept["state"])
    if kept["rng"] is not None:
        inner.np_random.bit_generator.state = kept["rng"]
    for wrapper in _wrappers(env):
        if type(wrapper).__name__ == "TimeLimit":
            wrapper._elapsed_steps = length


def keeps_itself(env: gymnasium.Env[Any, Any]) -> bool:
    """Whether `get_state()` and `set_state(state)` are there, and no wrapper hides more state."""
    inner = env.unwrapped
    if any(type(wrapper).__name__ not in _KNOWN_WRAPPERS for wrapper in _wrappers(env)):
        return False
    return _takes(inner, "get_state", 0) and _takes(inner, "set_state", 1)


def same(one: Obs, other: Obs) -> bool:
    """Whether two observations are equal to the bit."""
    equal: list[bool] = []
    trees.map(lambda a, b: equal.append(np.array_equal(a, b)), one, other)
    return all(equal)


def _wrappers(env: gymnasium.Env[Any, Any]) -> list[Any]:
    found = []
    while isinstance(env, gymnasium.Wrapper):
        found.append(env)
        env = env.env
    return found


def _takes(inner: Any, name: str, count: int) -> bool:
    """Whether there is a method of that name with so many arguments that must be given."""
    method = getattr(inner, name, None)
    if not callable(method):
        return False
    try:
        parameters = inspect.signature(method).parameters.values()
    except (TypeError, ValueError):  # written in C, and silent about itself
        return False
    needed = [p for p in parameters if p.default is p.empty and p.kind in (0, 1)]
    return len(needed) == count

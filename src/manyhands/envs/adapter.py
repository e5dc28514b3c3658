"""Clean transitions from any environment, whatever its habit of resetting.

Gymnasium knows three habits at the end of an episode: NEXT_STEP (the next call is a reset in
disguise), SAME_STEP (the observation is already the next episode's) and DISABLED (reset it
yourself). A `VecAdapter` turns each into the same thing, a row of a rollout [T, B]:

    obs[t]                   what the policy saw
    reward[t], terminated[t], truncated[t]
    obs[t + 1]               what the policy acts on next: after an end, the next episode's start
    finals                   the true last observation of each episode that ended in this row
    valid[t]                 False where the row is no transition (NEXT_STEP's reset in disguise)

The value after row t is 0 where terminated, V(final) where only truncated, V(obs[t + 1])
elsewhere: bootstrap if and only if not terminated. Both flags may be set at once.

Actions come from the policy in the policy's own terms (numbers from 0, raw Gaussians); the
`ActionMap` turns them into what the environment expects, and leaves the raw ones untouched.
"""

from __future__ import annotations

import secrets
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

import gymnasium
import numpy as np
from gymnasium import spaces

from manyhands import seeding, trees
from manyhands.envs.spaces import (
    LegalCheck,
    check_action_space,
    check_mask,
    check_observation_space,
    flat_space,
    has_mask,
    zeros,
)
from manyhands.errors import ConfigError, WorkerError
from manyhands.streams import EpisodeSeeds
from manyhands.trees import Array, Parts
from manyhands.types import MASK, Obs

BoxActions = Literal["clip", "scale", "raw"]


class Episode(NamedTuple):
    """A finished episode. `env.reset(seed=seed)` and the same actions play it again."""

    env: int
    number: int  # how many episodes this sub-environment had begun before
    total_return: float  # of the environment's own rewards, whatever the learner is given
    length: int
    seed: int | None  # None: the library went on with its own generator; see `VectorAdapter`
    info: tuple[float, ...] = ()  # what its last `info` had of `log_info`, NaN for what it had not


class Restored(NamedTuple):
    """What became of the environments of a checkpoint."""

    obs: Obs  # [B, ...] to act on next
    restarted: list[int]  # those that had to begin a new episode
    reasons: list[str]  # why, in words


class Final(NamedTuple):
    """The last observation of an episode, which `obs` no longer shows."""

    env: int
    obs: Obs


@dataclass(slots=True)
class Step:
    """One row of a rollout. Give views into your own [T, B] storage: they are filled in place."""

    obs: Obs  # [B, ...] to act on next
    reward: Array  # [B] float32
    terminated: Array  # [B] bool
    truncated: Array  # [B] bool
    valid: Array  # [B] bool
    finals: list[Final] = field(default_factory=list)  # one per True in terminated | truncated
    episodes: list[Episode] = field(default_factory=list)

    def next_obs(self) -> Obs:
        """[B, ...] where each transition led: for replay, which stores (s, a, r, s') whole."""
        copy = trees.map(np.copy, self.obs)
        for env, last in self.finals:
            trees.put(copy, env, last)
        return copy


class VecAdapter(ABC):
    """`num_envs` environments that step together: `reset()` once, then `step(actions)`.

    Args:
        observation_space, action_space: of one sub-environment; observations of nested spaces
            come as named parts.
        num_envs: how many.
        seed: root of the seed tree; None draws one (it is kept in `seed`).
        worker: this worker's number: its seeds overlap with no other worker's.
        box_actions: how a Box action is brought within bounds, see `ActionMap`.
        check_finite: look for NaN and infinity in every observation and reward.
    """

    log_info: tuple[str, ...] = ()  # keys of `info` whose last values episodes are filed with

    def __init__(
        self,
        observation_space: gymnasium.Space[Any],
        action_space: gymnasium.Space[Any],
        num_envs: int,
        *,
        seed: int | None = None,
        worker: int = 0,
        box_actions: BoxActions = "clip",
        check_finite: bool = True,
    ) -> None:
        if num_envs < 1:
            raise ConfigError(f"num_envs={num_envs}; at least 1 is needed")
        check_observation_space(observation_space)
        check_mask(observation_space, action_space)
        self.observation_space = flat_space(observation_space)
        self.action_space = action_space
        self.to_env = ActionMap(action_space, box_actions)
        self.num_envs = num_envs
        self.seed = secrets.randbits(31) if seed is None else seed
        self.worker = worker
        self.action_space.seed(seeding.integer(self.seed, "action", worker))
        self._finite = FiniteCheck(self.observation_space, num_envs) if check_finite else None
        self._legal = LegalCheck(action_space) if has_mask(observation_space) else None
        self._seed_of = [EpisodeSeeds(self.seed, worker, i) for i in range(num_envs)]
        self._first = 0  # the number of sub-environment 0 among all workers' together
        self._begun = [0] * num_envs  # episodes begun; the next one's index
        self._seeds: list[int | None] = [None] * num_envs  # of the running episodes
        self._clock = 0  # calls of step()
        self._starts = [0] * num_envs  # the clock when the running episodes began
        self._returns = [0.0] * num_envs
        self._running = False

    @abstractmethod
    def reset(self, out: Obs | None = None) -> Obs:
        """Begin an episode in every sub-environment; [B, ...] observations to act on."""

    @abstractmethod
    def step(self, actions: Array, out: Step | None = None) -> Step:
        """Act in every sub-environment; fills and returns `out`, or a fresh `Step`."""

    @abstractmethod
    def close(self) -> None:
        """Release what the environments hold. Safe to call twice."""

    def blank(self) -> Step:
        """A `Step` with arrays of its own."""
        n = self.num_envs
        return Step(
            obs=zeros(self.observation_space, (n,)),
            reward=np.zeros(n, dtype=np.float32),
            terminated=np.zeros(n, dtype=np.bool_),
            truncated=np.zeros(n, dtype=np.bool_),
            valid=np.ones(n, dtype=np.bool_),
        )

    def set_attribute(self, name: str, value: Any) -> None:
        """Set an attribute of every sub-environment, at once; ConfigError where there is none."""
        raise ConfigError(
            f"environments of this kind ({type(self).__name__}) have no attribute that can be set"
        )

    @property
    def episodes_begun(self) -> list[int]:
        """Per sub-environment; save it with a checkpoint so that no seed is used twice."""
        return list(self._begun)

    def continue_from(self, episodes_begun: Sequence[int]) -> None:
        """Count episodes (and so seeds) on from a checkpoint; call before `reset`."""
        if len(episodes_begun) != self.num_envs:
            raise ConfigError(
                f"episodes_begun has {len(episodes_begun)} numbers for {self.num_envs} envs"
            )
        self._begun = [int(n) for n in episodes_begun]

    def state(self, obs: Obs) -> dict[str, Any]:
        """What a checkpoint keeps of the environments; `obs` is what would be acted on next."""
        return {"begun": list(self._begun)}

    def load_state(self, state: dict[str, Any]) -> Restored:
        """Go on from a `state()` of a running adapter; call it instead of `reset`.

        Here: every environment begins a new episode, with a seed that was never used. Where more
        is possible, adapters do more.
        """
        self.continue_from(state["begun"])
        reason = (
            "resumes at an episode boundary: environments of this kind cannot be put back into the "
            "middle of an episode"
        )
        return Restored(self.reset(), list(range(self.num_envs)), [reason])

    def state_from(self, parts: Parts) -> dict[str, Any]:
        """A `state()` of these environments, made of those of workers that have had them."""
        return trees.joined(parts, "begun")

    def number_from(self, first: int) -> None:
        """Sub-environment i is number `first + i` of all workers' together; call before `reset`.

        Its seeds then depend on that number alone, so that the episodes played do not depend on
        how the environments are shared out among workers.
        """
        self._seed_of = [EpisodeSeeds(self.seed, 0, first + i) for i in range(self.num_envs)]
        self._first = first

    def _episode_seed(self, env: int) -> int:
        return self._seed_of[env](self._begun[env])

    def _begin(self, env: int, seed: int | None) -> None:
        self._begun[env] += 1
        self._seeds[env] = seed
        self._starts[env] = self._clock
        self._returns[env] = 0.0

    def _length(self, env: int) -> int:
        return self._clock - self._starts[env]

    def _end(self, env: int, info: Mapping[str, Any]) -> Episode:
        """The record of the episode that has just ended in `env`, with its last `info`."""
        return Episode(
            env,
            self._begun[env] - 1,
            self._returns[env],
            self._length(env),
            self._seeds[env],
            tuple(self._logged(env, key, info.get(key)) for key in self.log_info),
        )

    def _logged(self, env: int, key: str, value: Any) -> float:
        if value is None:
            return float("nan")
        try:
            return float(value)
        except (TypeError, ValueError):
            raise WorkerError(
                f"info[{key!r}] of {self._where(env)} is {value!r}; --log-info takes keys whose "
                "values are numbers, or true and false",
                rank=self.worker,
            ) from None

    @property
    def clock(self) -> int:
        """How often the environments have been stepped."""
        return self._clock

    def _sent(self, actions: Array) -> Array:
        """What goes to the environments, once it is certain that there is one for each."""
        if not self._running:
            raise ConfigError("step() before reset(): call reset() once first")
        sent = self.to_env(actions)
        if len(sent) != self.num_envs:
            raise ConfigError(f"{len(sent)} actions for {self.num_envs} envs")
        return sent

    def _check_row(self, obs: Obs) -> None:
        if self._finite is not None and not self._finite.holds(obs):
            env, part = self._finite.bad_row(obs), self._finite.bad_part(obs)
            raise self._not_finite(f"an observation{part}", env)

    def _check_masks(self, obs: Obs, envs: Sequence[int] | Array | None = None) -> None:
        """Whether something can be done wherever an action is to be chosen; `envs`: the rows'."""
        if self._legal is None:
            return
        if (fault := self._legal.fault(obs[MASK])) is not None:
            env = fault[0] if envs is None else int(envs[fault[0]])
            raise WorkerError(f"the {MASK} of {self._where(env)} {fault[1]}", rank=self.worker)

    def _not_finite(self, what: str, env: int) -> WorkerError:
        return WorkerError(
            f"{what} of {self._where(env)} has a NaN or an infinity in it; the environment "
            "is at fault: play that episode again with this seed, or check it with "
            "manyhands.envs.check_env",
            rank=self.worker,
        )

    def _where(self, env: int) -> str:
        return (
            f"env {self._first + env} (episode {self._begun[env] - 1}, step {self._length(env)}, "
            f"seed {self._seeds[env]})"
        )


class ActionMap:
    """From the policy's actions to the environment's, a batch at a time.

    Discrete and MultiDiscrete: as the policy's head gives them, the space's `start` included.
    Box: "clip" cuts to the bounds, "scale" takes [-1, 1] to [low, high], "raw" sends as it is.
    The given array is never changed: log-probabilities belong to the raw action.
    """

    def __init__(self, space: gymnasium.Space[Any], box_actions: BoxActions = "clip") -> None:
        check_action_space(space)
        if box_actions not in ("clip", "scale", "raw"):
            raise ConfigError(
                f"box_actions={box_actions!r} is not known; choose clip, scale or raw"
            )
        self.space = space
        self._shape: tuple[int, ...] = tuple(space.shape or ())
        self._dtype = space.dtype
        self._convert: Callable[[Array], Array]
        if isinstance(space, spaces.Box):
            self._convert = self._box_conversion(space, box_actions)
        else:
            self._convert = self._typed

    def __call__(self, actions: Array) -> Array:
        """[B, ...] of the policy -> [B, ...] for the environments."""
        actions = np.asarray(actions)
        if actions.shape[1:] != self._shape:
            raise ConfigError(
                f"actions have shape {actions.shape}, expected (envs, *{self._shape}) "
                f"for the action space {self.space}"
            )
        return self._convert(actions)

    def _typed(self, actions: Array) -> Array:
        return actions.astype(self._dtype, copy=False)

    def _box_conversion(self, space: spaces.Box, how: BoxActions) -> Callable[[Array], Array]:
        low, high = space.low, space.high
        if how == "clip":
            return lambda a: np.clip(a, low, high).astype(self._dtype, copy=False)
        if how == "raw":
            return self._typed
        if not (np.isfinite(low).all() and np.isfinite(high).all()):
            raise ConfigError(
                f"box_actions='scale' needs finite bounds, the action space is {space}; "
                "use box_actions='clip'"
            )
        middle, half = (high + low) / 2, (high - low) / 2
        # WHY clip twice: rounding may carry middle + half a hair over `high`.
        return lambda a: np.clip(middle + half * np.clip(a, -1.0, 1.0), low, high).astype(
            self._dtype, copy=False
        )


class FiniteCheck:
    """Is there a NaN or an infinity in a batch of observations? Integers are never looked at.

    x · 0 is zero for every finite x and NaN for NaN and ±inf, so one dot product with zeros
    answers exactly, at a quarter of the cost of `np.isfinite(x).all()`, and cannot overflow.
    """

    def __init__(self, space: gymnasium.Space[Any], rows: int) -> None:
        self._is_dict = isinstance(space, spaces.Dict)
        parts = space.spaces if self._is_dict else {"": space}
        self._zeros: dict[str, Array] = {
            key: np.zeros(rows * int(np.prod(part.shape)), dtype=part.dtype)
            for key, part in parts.items()
            if part.dtype is not None and part.dtype.kind == "f"
        }
        self._plain_zeros = self._zeros.get("") if not self._is_dict else None

    def holds(self, batch: Obs) -> bool:
        """Whether every number of the batch is finite."""
        if self._plain_zeros is not None:
            return bool(batch.reshape(-1).dot(self._plain_zeros) == 0)
        if not self._is_dict:
            return True
        return all(batch[key].reshape(-1).dot(nil) == 0 for key, nil in self._zeros.items())

    def bad_row(self, batch: Obs) -> int:
        """The first row with a NaN or an infinity, once `holds` has said no."""
        parts = [batch[key] if self._is_dict else batch for key in self._zeros]
        finite = [np.isfinite(part).reshape(len(part), -1).all(axis=1) for part in parts]
        return int(np.argmin(np.logical_and.reduce(finite)))

    def bad_part(self, batch: Obs) -> str:
        """In words, which part of a Dict has one."""
        if not self._is_dict:
            return ""
        return next(f" ({k!r})" for k in self._zeros if not np.isfinite(batch[k]).all())


class DictRows:
    """Makes `rows[i] = observation` work for a batch of Dict observations."""

    def __init__(self, batch: dict[str, Array]) -> None:
        self._parts = list(batch.items())

    def __setitem__(self, i: int, observation: Any) -> None:
        for key, part in self._parts:
            part[i] = observation[key]


def take_row(batch: Obs, i: int) -> Obs:
    """A copy of row i."""
    return trees.map(lambda part: np.array(part[i]), batch)


def copy_single(space: gymnasium.Space[Any], value: Any) -> Obs:
    """One sub-environment's observation as arrays of our own, in the space's dtype."""
    if isinstance(space, spaces.Dict):
        return {key: np.array(value[key], dtype=part.dtype) for key, part in space.spaces.items()}
    return np.array(value, dtype=space.dtype)


class Stepper(ABC):
    """A policy in environments, one step at a time, and what is kept of it.

        act ─► envs.step ─► observe          until it is `full`; then something is made of it

    `manyhands train` steps the environments itself (`fill`). In a loop of their own (agent.py)
    users do: they show what is acted on (`current`), step, and `row` gets what came of it.
    """

    envs: VecAdapter
    full = False  # whether there is enough to make something of
    begun = False  # whether the environments have been reset

    @property
    @abstractmethod
    def current(self) -> Obs:
        """[B, ...] what is acted on next, in storage that may be written to."""

    @property
    @abstractmethod
    def row(self) -> Step:
        """Where the step that was acted for goes."""

    @abstractmethod
    def act(self) -> Array:
        """Actions for `current`, in the policy's own terms."""

    @abstractmethod
    def observe(self) -> None:
        """`row` has been filled."""

    def fill(self) -> None:
        """Step the environments until there is enough."""
        if not self.begun:
            self.begun = True
            self.envs.reset(self.current)
        while not self.full:
            self.envs.step(self.act(), self.row)
            self.observe()

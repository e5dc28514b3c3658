"""Small environments whose right answer is known, for tests and first tries.

Registered with Gymnasium under `manyhands/` when `manyhands.envs` is imported:

    manyhands/TimeLimit-v0     reward 1 each step, truncated after n steps, never terminated
    manyhands/Identity-v0      the action that repeats the observation earns 1
    manyhands/Delayed-v0       one reward, at the very end, for having gone right all the way
    manyhands/Counter-v0       the observation says (seed, episode, step)
    manyhands/NotANumber-v0    NaN in the observation or the reward after n steps
    manyhands/Sleep-v0         takes a set time per step
    manyhands/Masked-v0        few of many actions are possible, one of them is right
    manyhands/Recall-v0        a cue is shown once, and must be repeated some steps later
"""

from __future__ import annotations

import time
from typing import Any, Literal

import gymnasium
import numpy as np
from gymnasium import spaces

from manyhands.errors import ConfigError

Result = tuple[Any, float, bool, bool, dict[str, Any]]


class TimeLimit(gymnasium.Env):  # type: ignore[misc]
    """Nothing but a time limit. The true value is 1 / (1 - gamma) in every state.

    Whoever takes truncation for termination learns a value that falls to 1 at the end; whoever
    bootstraps from the next episode's start learns it right only by luck, for the observation (the
    share of the limit that has passed) differs.
    """

    def __init__(self, limit: int = 10) -> None:
        self.limit = limit
        self.observation_space = spaces.Box(0.0, 1.0, (1,), np.float32)
        self.action_space = spaces.Discrete(2)
        self._steps = 0

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        self._steps = 0
        return self._observation(), {}

    def step(self, action: Any) -> Result:
        self._steps += 1
        return self._observation(), 1.0, False, self._steps >= self.limit, {}

    def _observation(self) -> Any:
        return np.array([self._steps / self.limit], dtype=np.float32)


_IDENTITY_SPACES: dict[str, Any] = {
    "discrete": lambda: spaces.Discrete(4),
    "shifted": lambda: spaces.Discrete(4, start=3),
    "box": lambda: spaces.Box(-1.0, 1.0, (2,), np.float32),
    "multidiscrete": lambda: spaces.MultiDiscrete([3, 4]),
    "multibinary": lambda: spaces.MultiBinary(3),
}


class Identity(gymnasium.Env):  # type: ignore[misc]
    """Repeat what you see. Reward 1 for an equal action; in a box, minus the mean distance."""

    def __init__(self, kind: str = "discrete", length: int = 16) -> None:
        if kind not in _IDENTITY_SPACES:
            raise ConfigError(f"kind={kind!r} is not known; choose from {list(_IDENTITY_SPACES)}")
        self.observation_space = _IDENTITY_SPACES[kind]()
        self.action_space = _IDENTITY_SPACES[kind]()
        self.length = length
        self._steps = 0
        self._shown: Any = None

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        if seed is not None:
            self.observation_space.seed(seed)
        self._steps = 0
        self._shown = self.observation_space.sample()
        return self._shown, {}

    def step(self, action: Any) -> Result:
        if isinstance(self.action_space, spaces.Box):
            reward = -float(np.abs(np.asarray(action) - self._shown).mean())
        else:
            reward = float(np.array_equal(action, self._shown))
        self._steps += 1
        self._shown = self.observation_space.sample()
        return self._shown, reward, False, self._steps >= self.length, {}


class Delayed(gymnasium.Env):  # type: ignore[misc]
    """A corridor: go right `length` times for the only reward, 1, at its end. Left ends it at 0."""

    def __init__(self, length: int = 5) -> None:
        self.length = length
        self.observation_space = spaces.Box(0.0, 1.0, (length,), np.float32)
        self.action_space = spaces.Discrete(2)
        self._place = 0

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        self._place = 0
        return self._observation(), {}

    def step(self, action: Any) -> Result:
        if int(action) == 0:
            return self._observation(), 0.0, True, False, {}
        self._place += 1
        arrived = self._place >= self.length
        return self._observation(), float(arrived), arrived, False, {}

    def _observation(self) -> Any:
        seen = np.zeros(self.length, dtype=np.float32)
        seen[min(self._place, self.length - 1)] = 1.0
        return seen


class Counter(gymnasium.Env):  # type: ignore[misc]
    """Transitions that say where they come from: observation (seed, episode since, step).

    The length of an episode, and whether it is terminated, truncated or both, are drawn from the
    seed. reward = 100 · episode + step + action. `as_dict` shows the same under two keys.
    """

    def __init__(self, longest: int = 7, as_dict: bool = False) -> None:
        self.longest = longest
        self.as_dict = as_dict
        box = spaces.Box(-1.0, 2.0**31, (3,), np.float64)
        self.observation_space: Any = box
        if as_dict:
            self.observation_space = spaces.Dict({"all": box, "step": spaces.Discrete(1000)})
        self.action_space = spaces.Discrete(3)
        self._seed, self._episode, self._step, self._length = -1, -1, 0, 1
        self._flags = (True, False)

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        if seed is not None:
            self._seed, self._episode = seed, -1
        self._episode += 1
        self._step = 0
        self._length = int(self.np_random.integers(1, self.longest + 1))
        flags = ((True, False), (False, True), (True, True))
        self._flags = flags[int(self.np_random.integers(3))]
        return self._observation(), {}

    def step(self, action: Any) -> Result:
        if self._step >= self._length:
            raise RuntimeError("step() after the end of an episode")
        self._step += 1
        reward = 100.0 * self._episode + self._step + float(action)
        terminated, truncated = self._flags if self._step == self._length else (False, False)
        return self._observation(), reward, terminated, truncated, {}

    def _observation(self) -> Any:
        seen = np.array([self._seed, self._episode, self._step], dtype=np.float64)
        return {"all": seen, "step": np.int64(self._step)} if self.as_dict else seen


class NotANumber(gymnasium.Env):  # type: ignore[misc]
    """Sound for `after` steps of an episode, then NaN (or infinity) where asked."""

    def __init__(
        self,
        where: Literal["observation", "reward"] = "observation",
        after: int = 3,
        value: float = float("nan"),
    ) -> None:
        self.where, self.after, self.value = where, after, value
        self.observation_space = spaces.Box(-np.inf, np.inf, (4,), np.float32)
        self.action_space = spaces.Discrete(2)
        self._steps = 0

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        self._steps = 0
        return np.zeros(4, dtype=np.float32), {}

    def step(self, action: Any) -> Result:
        self._steps += 1
        bad = self._steps > self.after
        observation = np.zeros(4, dtype=np.float32)
        if bad and self.where == "observation":
            observation[2] = self.value
        return observation, self.value if bad and self.where == "reward" else 0.0, False, False, {}


class Sleep(gymnasium.Env):  # type: ignore[misc]
    """Costs `seconds` a step, as a slow simulator does, and uses no processor while it waits."""

    def __init__(self, seconds: float = 0.001, limit: int = 100) -> None:
        self.seconds, self.limit = seconds, limit
        self.observation_space = spaces.Box(0.0, 1.0, (4,), np.float32)
        self.action_space = spaces.Discrete(2)
        self._steps = 0

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        self._steps = 0
        return self.np_random.random(4, dtype=np.float32), {}

    def step(self, action: Any) -> Result:
        time.sleep(self.seconds)
        self._steps += 1
        seen = self.np_random.random(4, dtype=np.float32)
        return seen, 1.0, False, self._steps >= self.limit, {}


class Masked(gymnasium.Env):  # type: ignore[misc]
    """`actions` actions, of which `possible` others are possible at each step; an impossible one is
    an error. Of those the lowest earns 1 where the observation is 0, and the highest where it is 1.

    The mask stands in the observation or in info. With `choices` an action is so many of them, each
    with a mask of its own.
    """

    def __init__(
        self,
        actions: int = 100,
        possible: int = 3,
        where: Literal["observation", "info"] = "observation",
        choices: int = 0,
        length: int = 16,
    ) -> None:
        self.actions, self.possible, self.where, self.length = actions, possible, where, length
        self.choices = choices
        count, shown = max(1, choices), spaces.Box(0.0, 1.0, (1,), np.float32)
        self.action_space: Any = spaces.Discrete(actions)
        mask: Any = spaces.MultiBinary(actions)
        if choices:
            self.action_space = spaces.MultiDiscrete([actions] * choices)
            mask = spaces.Tuple([spaces.MultiBinary(actions)] * choices)
        self.observation_space: Any = shown
        if where == "observation":
            self.observation_space = spaces.Dict({"observation": shown, "action_mask": mask})
        self._legal = [np.zeros(possible, np.int64)] * count
        self._bit = self._steps = 0

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        self._steps = 0
        return self._draw()

    def step(self, action: Any) -> Result:
        chosen = np.ravel(action).tolist()
        for one, legal in zip(chosen, self._legal, strict=True):
            if one not in legal:
                raise ConfigError(f"action {one} is impossible now; possible are {legal.tolist()}")
        right = [one == legal[-self._bit] for one, legal in zip(chosen, self._legal, strict=True)]
        self._steps += 1
        observation, info = self._draw()
        return observation, float(np.mean(right)), False, self._steps >= self.length, info

    def _draw(self) -> tuple[Any, dict[str, Any]]:
        self._bit = int(self.np_random.integers(2))
        self._legal = [
            np.sort(self.np_random.choice(self.actions, self.possible, replace=False))
            for _ in self._legal
        ]
        masks = []
        for legal in self._legal:
            masks.append(np.zeros(self.actions, np.int8))
            masks[-1][legal] = 1
        mask: Any = tuple(masks) if self.choices else masks[0]
        shown = np.array([self._bit], np.float32)
        if self.where == "info":
            return shown, {"action_mask": mask}
        return {"observation": shown, "action_mask": mask}, {}


class Recall(gymnasium.Env):  # type: ignore[misc]
    """A cue at the first step, then nothing; `delay` steps later the action must repeat it.

    Return 1 for the right action in the last step, 0 for any other; by chance 1 / cues.
    """

    def __init__(self, cues: int = 4, delay: int = 10) -> None:
        self.cues, self.delay = cues, delay
        self.observation_space = spaces.Box(0.0, 1.0, (cues + 1,), np.float32)
        self.action_space = spaces.Discrete(cues)
        self._cue = self._steps = 0

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        self._cue, self._steps = int(self.np_random.integers(self.cues)), 0
        return self._observation(), {}

    def step(self, action: Any) -> Result:
        asked = self._steps == self.delay
        self._steps += 1
        return self._observation(), float(asked and int(action) == self._cue), asked, False, {}

    def _observation(self) -> Any:
        seen = np.zeros(self.cues + 1, np.float32)
        if self._steps == 0:
            seen[self._cue] = 1.0
        seen[-1] = self._steps == self.delay  # the question
        return seen


TOYS: dict[str, type[Any]] = {
    "TimeLimit": TimeLimit,
    "Identity": Identity,
    "Delayed": Delayed,
    "Counter": Counter,
    "NotANumber": NotANumber,
    "Sleep": Sleep,
    "Masked": Masked,
    "Recall": Recall,
}


def register() -> None:
    """Make the toys known to Gymnasium; doing it again changes nothing."""
    for name, toy in TOYS.items():
        full = f"manyhands/{name}-v0"
        if full not in gymnasium.registry:
            gymnasium.register(full, entry_point=f"{__name__}:{toy.__name__}")

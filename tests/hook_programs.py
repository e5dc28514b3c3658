"""Hooks, and an environment for them, that workers find by name."""

from __future__ import annotations

import random
from typing import Any

import gymnasium
import numpy as np


class Staged(gymnasium.Env[Any, Any]):
    """Six steps an episode; `stage` is what a curriculum sets, and the reward of each step."""

    observation_space = gymnasium.spaces.Box(-1, 1, (2,))
    action_space = gymnasium.spaces.Discrete(2)

    def __init__(self, stage: int = 0) -> None:
        self.stage, self._at = stage, 0

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        self._at = 0
        return self._seen(), {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        self._at += 1
        info = {"stage": self.stage, "success": self.stage > 1, "words": "none"}
        if self._at == 6 and self.np_random.random() < 0.5:
            info["sometimes"] = 1.0
        return self._seen(), float(self.stage), self._at == 6, False, info

    def _seen(self) -> Any:
        return self.np_random.uniform(-1, 1, 2).astype(np.float32)


class Curriculum:
    """After two updates the next stage, after four, or `last`, the end."""

    def __init__(self, last: int = 4) -> None:
        self.calls: list[str] = []
        self.seen, self.last = 0, last

    def on_start(self, run: Any) -> None:
        self.calls.append("start")
        assert run.steps == 0 or run.updates > 0

    def on_episode(self, run: Any, episode: Any) -> None:
        self.seen += 1
        assert episode.length == 6
        assert episode.total_return <= 6 * episode.info["stage"]
        run.record("own/length", episode.length)

    def on_update(self, run: Any) -> None:
        self.calls.append("update")
        assert run.metrics["update"] == run.updates
        assert run.episodes == run.metrics["episodes"] >= self.seen
        run.record("own/updates", run.updates)
        if run.updates == 2:
            run.set_env_attribute("stage", 3)
            run.set_option("learning_rate", 1e-5)
        if run.updates == self.last:
            run.stop("the last stage\nis reached")

    def on_end(self, run: Any) -> None:
        self.calls.append("end")
        assert run.policy.act(np.zeros(2, np.float32)) in (0, 1)

    def state(self) -> dict[str, int]:
        return {"seen": self.seen}

    def load_state(self, state: dict[str, int]) -> None:
        self.seen = state["seen"]


class Looks:
    """Draws, looks and records, and so changes nothing."""

    def on_update(self, run: Any) -> None:
        run.policy.act(np.zeros(run.policy.observation_space.shape, np.float32))
        run.record("luck", random.random() + np.random.rand())


class Fails:
    def on_episode(self, run: Any, episode: Any) -> None:
        raise LookupError("no such shelf")


class Mistyped:
    def __init__(self, size: int) -> None:
        self.size = size

    def on_step(self, run: Any) -> None:
        """There is no such method."""

    def on_update(self) -> None:
        """It takes a run."""


class Unbound:
    """As good as any: their methods need no object."""

    @staticmethod
    def on_update(run: Any) -> None:
        run.record("static", 1)

    @classmethod
    def on_episode(cls, run: Any, episode: Any) -> None:
        run.record("class", 1)


class Awaited:
    async def on_update(self, run: Any) -> None:
        """Nobody awaits it."""

    def on_end(self, run: Any) -> Any:
        yield


class SetsNothing:
    def on_update(self, run: Any) -> None:
        run.set_env_attribute("stagee", 1)


class Endless(Staged):
    """An episode that does not end."""

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        return self._seen(), 0.0, False, False, {}


class Breaks(Staged):
    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        raise OSError("it broke")


def long_pole(length: float = 1.0) -> gymnasium.Env[Any, Any]:
    """CartPole with another pole; Gymnasium's own has 0.5."""
    env = gymnasium.make("CartPole-v1")
    cart: Any = env.unwrapped
    cart.length, cart.polemass_length = length, cart.masspole * length
    return env


class UntilGood:
    """Ends a run once an evaluation has a mean return of at least 475."""

    def on_evaluation(self, run: Any, evaluation: Any) -> None:
        if evaluation.mean_return >= 475:
            run.stop("475 is reached")

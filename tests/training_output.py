"""An environment that prints while it is trained on: lines must not be lost, nor tear a view."""

from __future__ import annotations

from typing import Any

from gymnasium.envs.classic_control.cartpole import CartPoleEnv
from gymnasium.wrappers import TimeLimit

EVERY = 1000  # steps of a process between two lines
_steps = 0


class Talkative(CartPoleEnv):
    def __init__(self, fail_at: int = 0, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self._fail_at = fail_at

    def step(self, action: Any) -> Any:
        global _steps
        _steps += 1
        if _steps % EVERY == 0:
            print(f"said at step {_steps}", flush=True)
        if _steps == self._fail_at:
            raise RuntimeError("failed as asked")
        return super().step(action)


def talkative(**kwargs: Any) -> Any:
    return TimeLimit(Talkative(**kwargs), 500)

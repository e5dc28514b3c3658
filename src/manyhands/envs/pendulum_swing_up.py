"""`manyhands/PendulumSwingUp-v0`: swing a pendulum up and keep it there, for 100 steps of 0.1 s.

    m l² θ'' = τ − b θ' + m g l sin θ,      m = 1, g = 9.8, l = 1, b = 0.1, |τ| <= 5

θ is measured from upright, counter-clockwise, and wrapped to [−π, π). Gravity pulls with up to 9.8
and the motor has 5: it cannot lift the bob, it has to swing it. The torque is held for the 0.1 s.

Both rewards look at the state that the step has led to, and at the action as it was given:

    dense     max(−100, −θ² − 0.01 θ'² − 0.01 a²)
    sparse    1 while |θ| < 0.1 π, else 0
    both      −100 where |θ'| > 15

Too fast costs, but ends nothing: an episode is truncated after 100 steps and never terminated.
"""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from typing import Any, ClassVar

import gymnasium
import numpy as np
from gymnasium import spaces

from manyhands.errors import ConfigError, SupportError

MASS, GRAVITY, LENGTH, DAMPING = 1.0, 9.8, 1.0, 0.1
MAX_TORQUE = 5.0
STEP_SECONDS = 0.1
EPISODE_STEPS = 100
UPRIGHT = 0.1 * math.pi  # |θ| below this counts as upright
MAX_SPEED = 15.0  # |θ'| above this costs 100 a step
START_SPEED = 5.0  # |θ'| at the start is at most this
TOO_FAST = -100.0

_INERTIA = MASS * LENGTH**2
_PULL = MASS * GRAVITY * LENGTH
# Above this speed damping is stronger than motor and gravity together: it is never reached.
_SPEED_BOUND = (MAX_TORQUE + _PULL) / DAMPING
# Two Runge-Kutta steps of order 4: within 3e-5 of the exact solution up to |θ'| = 8, and 2e-4 up to
# 15, for the price of eight sines. A test holds it to that.
_SUBSTEPS = 2


def wrap(angle: float) -> float:
    """The same angle in [−π, π)."""
    return (angle + math.pi) % (2 * math.pi) - math.pi


def simulate(theta: float, theta_dot: float, torque: float) -> tuple[float, float]:
    """(θ, θ') after one step of 0.1 s under a constant torque; θ is not wrapped."""
    h = STEP_SECONDS / _SUBSTEPS
    drive, damping, pull = torque / _INERTIA, DAMPING / _INERTIA, _PULL / _INERTIA
    sin = math.sin
    for _ in range(_SUBSTEPS):
        v1 = theta_dot
        a1 = drive - damping * v1 + pull * sin(theta)
        v2 = theta_dot + 0.5 * h * a1
        a2 = drive - damping * v2 + pull * sin(theta + 0.5 * h * v1)
        v3 = theta_dot + 0.5 * h * a2
        a3 = drive - damping * v3 + pull * sin(theta + 0.5 * h * v2)
        v4 = theta_dot + h * a3
        a4 = drive - damping * v4 + pull * sin(theta + h * v3)
        theta += h / 6 * (v1 + 2 * v2 + 2 * v3 + v4)
        theta_dot += h / 6 * (a1 + 2 * a2 + 2 * a3 + a4)
    return theta, theta_dot


def dense_reward(theta: float, theta_dot: float, action: float) -> float:
    """Near upright, slow and with little effort; θ is wrapped."""
    if abs(theta_dot) > MAX_SPEED:
        return TOO_FAST
    return max(-100.0, -(theta**2) - 0.01 * theta_dot**2 - 0.01 * action**2)


def sparse_reward(theta: float, theta_dot: float) -> float:
    """Upright or not; θ is wrapped."""
    if abs(theta_dot) > MAX_SPEED:
        return TOO_FAST
    return float(abs(theta) < UPRIGHT)


class PendulumSwingUp(gymnasium.Env):  # type: ignore[misc]
    """Observation (cos θ, sin θ, θ'), as Gymnasium's Pendulum has it; action: the torque [1].

    The founding exercise showed (θ, θ') itself, which jumps from π to −π where the bob hangs, just
    where every upswing begins. Cosine and sine say the same without the jump.

    `info` has `theta`, `theta_dot` and `upright` (|θ| < 0.1 π) at every step, and at the last one
    `is_success`: upright through the whole second half of the episode.

    Args:
        sparse: 1 for upright and 0 for the rest, instead of the dense reward.
        render_mode: None, "rgb_array" or "human".
    """

    metadata: ClassVar[dict[str, Any]] = {
        "render_modes": ["human", "rgb_array"],
        "render_fps": round(1 / STEP_SECONDS),  # as fast as it really swings
    }

    def __init__(self, sparse: bool = False, render_mode: str | None = None) -> None:
        if render_mode is not None and render_mode not in self.metadata["render_modes"]:
            raise ConfigError(
                f"render_mode={render_mode!r} is not known; choose from "
                f"{self.metadata['render_modes']} or None"
            )
        self.sparse, self.render_mode = sparse, render_mode
        high = np.array([1.0, 1.0, _SPEED_BOUND], dtype=np.float32)
        self.observation_space = spaces.Box(-high, high, dtype=np.float32)
        self.action_space = spaces.Box(-MAX_TORQUE, MAX_TORQUE, (1,), np.float32)
        self._theta, self._theta_dot, self._torque = 0.0, 0.0, 0.0
        self._steps, self._last_fall = 0, 0  # the step at which it was last not upright
        self._window: Any = None

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Any, dict[str, Any]]:
        """A random start, or the one that `options` give: {"theta": ..., "theta_dot": ...}."""
        super().reset(seed=seed)
        theta = self.np_random.uniform(-math.pi, math.pi)
        theta_dot = self.np_random.uniform(-START_SPEED, START_SPEED)
        given = options or {}
        self._theta = wrap(float(given.get("theta", theta)))
        self._theta_dot = float(given.get("theta_dot", theta_dot))
        self._torque, self._steps, self._last_fall = 0.0, 0, 0
        if self.render_mode == "human":
            self.render()
        return self._observation(), self._info()

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        if self._steps >= EPISODE_STEPS:
            raise RuntimeError(f"the episode is over after {EPISODE_STEPS} steps: call reset()")
        a = float(action[0])
        self._torque = min(max(a, -MAX_TORQUE), MAX_TORQUE)
        theta, self._theta_dot = simulate(self._theta, self._theta_dot, self._torque)
        self._theta = wrap(theta)
        reward = (
            sparse_reward(self._theta, self._theta_dot)
            if self.sparse
            else dense_reward(self._theta, self._theta_dot, a)
        )
        self._steps += 1
        info = self._info()
        if not info["upright"]:
            self._last_fall = self._steps
        truncated = self._steps >= EPISODE_STEPS
        if truncated:
            info["is_success"] = self._last_fall <= EPISODE_STEPS // 2
        if self.render_mode == "human":
            self.render()
        return self._observation(), reward, False, truncated, info

    def get_state(self) -> dict[str, Any]:
        """All that decides what comes next, the random numbers included, as plain data."""
        return {
            "theta": self._theta,
            "theta_dot": self._theta_dot,
            "torque": self._torque,
            "steps": self._steps,
            "last_fall": self._last_fall,
            "rng": self.np_random.bit_generator.state,
        }

    def set_state(self, state: Mapping[str, Any]) -> None:
        """Go on from where `get_state` was called, in this or in another environment."""
        self._theta, self._theta_dot = float(state["theta"]), float(state["theta_dot"])
        self._torque = float(state["torque"])
        self._steps, self._last_fall = int(state["steps"]), int(state["last_fall"])
        self.np_random.bit_generator.state = state["rng"]

    def render(self) -> Any:
        """The picture [400, 400, 3] for "rgb_array"; "human" shows it in a window."""
        if self.render_mode is None:
            gymnasium.logger.warn('render() without a render_mode: make it with "rgb_array"')
            return None
        picture = draw(self._theta, self._torque)
        if self.render_mode == "rgb_array":
            return picture
        if self._window is None:
            self._window = Window()
        self._window.show(picture, self.metadata["render_fps"])
        return None

    def close(self) -> None:
        if self._window is not None:
            self._window.close()
            self._window = None

    def _observation(self) -> Any:
        seen = (math.cos(self._theta), math.sin(self._theta), self._theta_dot)
        return np.array(seen, dtype=np.float32)

    def _info(self) -> dict[str, Any]:
        return {
            "theta": self._theta,
            "theta_dot": self._theta_dot,
            "upright": abs(self._theta) < UPRIGHT,
        }


# -- pictures --------------------------------------------------------------------------------------

SIZE = 400  # pixels of a side
_FINE = 2  # drawn this much larger, then made smaller: smooth edges
_PAPER, _RING, _GOAL = (250, 249, 246), (226, 224, 218), (203, 230, 208)
_ROD, _BOB, _BOB_UP, _PIVOT = (70, 76, 88), (205, 74, 60), (46, 140, 86), (38, 41, 48)
_TORQUE = (58, 110, 190)

Point = tuple[float, float]  # pixels to the right, pixels down


def draw(theta: float, torque: float) -> Any:
    """The pendulum as a picture [SIZE, SIZE, 3] of bytes; needs no screen.

    The green sector is where it counts as upright; the blue arc around the pivot is the torque:
    its length is the strength, its arrow the direction.
    """
    pygame = _pygame()
    side = SIZE * _FINE
    paper = pygame.Surface((side, side))
    paper.fill(_PAPER)
    middle = side / 2

    def at(angle: float, radius: float) -> Point:
        """Pixel at an angle from upright, counter-clockwise; `radius` 1 is the rod's length."""
        reach = radius * 0.36 * side
        return middle - reach * math.sin(angle), middle - reach * math.cos(angle)

    def arc(start: float, end: float, radius: float) -> list[Point]:
        return [at(a, radius) for a in np.linspace(start, end, 48)]

    pygame.draw.polygon(paper, _GOAL, [(middle, middle), *arc(-UPRIGHT, UPRIGHT, 1.2)])
    pygame.draw.circle(paper, _RING, (middle, middle), 0.36 * side, width=_FINE)
    _draw_rod(pygame, paper, (middle, middle), at(theta, 1.0))
    if torque != 0.0:
        sweep = 0.75 * math.pi * torque / MAX_TORQUE
        inner, outer = arc(0.0, sweep, 0.29), arc(0.0, sweep, 0.34)
        pygame.draw.polygon(paper, _TORQUE, [*inner, *reversed(outer)])
        tip = sweep + math.copysign(0.32, torque)
        pygame.draw.polygon(paper, _TORQUE, [at(sweep, 0.23), at(tip, 0.315), at(sweep, 0.40)])
    pygame.draw.circle(paper, _PIVOT, (middle, middle), 0.022 * side)
    bob = _BOB_UP if abs(wrap(theta)) < UPRIGHT else _BOB
    pygame.draw.circle(paper, bob, at(theta, 1.0), 0.055 * side)
    small = pygame.transform.smoothscale(paper, (SIZE, SIZE))
    return np.ascontiguousarray(pygame.surfarray.array3d(small).transpose(1, 0, 2))


def _draw_rod(pygame: Any, paper: Any, start: Point, end: Point) -> None:
    """A rod with straight sides at every angle, which a thick `draw.line` has not."""
    along = np.subtract(end, start)
    side = np.array([-along[1], along[0]]) / np.hypot(*along) * 0.0125 * paper.get_width()
    corners = [start + side, end + side, end - side, start - side]
    pygame.draw.polygon(paper, _ROD, [tuple(corner) for corner in corners])


class Window:
    """A window on the screen that shows pictures at their real pace."""

    def __init__(self) -> None:
        self._pygame = _pygame()
        self._pygame.display.init()
        self._pygame.display.set_caption("PendulumSwingUp")
        self._screen = self._pygame.display.set_mode((SIZE, SIZE))
        self._clock = self._pygame.time.Clock()

    def show(self, picture: Any, per_second: int) -> None:
        self._pygame.event.pump()  # else the window system takes us for dead
        self._pygame.surfarray.blit_array(self._screen, picture.transpose(1, 0, 2))
        self._pygame.display.flip()
        self._clock.tick(per_second)

    def close(self) -> None:
        self._pygame.display.quit()


def _pygame() -> Any:
    """pygame, without its greeting, or the line that says what to type."""
    os.environ.setdefault("PYGAME_HIDE_SUPPORT_PROMPT", "1")
    try:
        import pygame
    except ImportError as error:
        raise SupportError("drawing needs pygame; type: pip install pygame") from error
    return pygame

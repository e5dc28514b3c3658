"""CartPole and Pendulum as torch tensors: any number of them in one call, on any device.

    manyhands train ppo --env manyhands/CartPole-v1 --env-backend torch --num-envs 4096

Equations, time limits and starts are those of Gymnasium's environments of the same name, computed
in float64 and shown in float32 as there: from the same state the same action leads to the same
transition. What is drawn at a start comes from one generator for all of them, so an episode has no
seed of its own.

An episode that ends begins again in the same step. On the device (`move`) nothing is read back;
behind the door that all environments have (`step`) it becomes numpy.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
from gymnasium import spaces
from torch import Tensor

from manyhands import seeding
from manyhands.envs.adapter import BoxActions, Final, Restored, Step, VecAdapter
from manyhands.envs.registry import unknown_id
from manyhands.errors import ConfigError
from manyhands.trees import Array
from manyhands.types import Obs

PREFIX = "manyhands/"


class Moved(NamedTuple):
    """What one step of B environments gave, on their device."""

    obs: Tensor  # [B, ...] to act on next: after an end, the next episode's first
    reward: Tensor  # [B] float32
    terminated: Tensor  # [B] bool
    truncated: Tensor  # [B] bool
    final: Tensor  # [B, ...] where the step led, an episode's last observation included
    total: Tensor  # [B] float64 return of the episode up to here
    length: Tensor  # [B] int64 steps of it


class World(Protocol):
    """The equations of one environment. A state is [S, B]: each of its numbers lies in a row."""

    observation_space: spaces.Box
    action_space: Any
    size: int  # S
    limit: int  # steps after which an episode is truncated

    def start(self, chance: Tensor) -> Tensor:
        """States to begin from, of numbers [S, B] drawn evenly from 0 to 1."""
        ...

    def see(self, state: Tensor) -> Tensor:
        """Observations [B, ...] float32."""
        ...

    def move(self, state: Tensor, action: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """(the next states, rewards [B], terminated [B])."""
        ...


class CartPole:
    """A pole on a cart that is pushed left or right: Barto, Sutton and Anderson (1983)."""

    size, limit = 4, 500
    gravity, pole, cart, half_length, force, tau = 9.8, 0.1, 1.0, 0.5, 10.0, 0.02
    furthest, steepest = 2.4, 12 * 2 * math.pi / 360

    def __init__(self) -> None:
        high = np.array([2 * self.furthest, np.inf, 2 * self.steepest, np.inf], np.float32)
        self.observation_space = spaces.Box(-high, high, dtype=np.float32)
        self.action_space = spaces.Discrete(2)

    def start(self, chance: Tensor) -> Tensor:
        return chance * 0.1 - 0.05

    def see(self, state: Tensor) -> Tensor:
        return state.t().to(torch.float32)

    def move(self, state: Tensor, action: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        x, speed, angle, turn = state
        mass, lever = self.pole + self.cart, self.pole * self.half_length
        cos, sin = angle.cos(), angle.sin()
        push = action.to(state.dtype) * (2 * self.force) - self.force
        pull = (push + lever * turn.square() * sin) / mass
        inertia = self.half_length * (4.0 / 3.0 - self.pole * cos.square() / mass)
        turning = (self.gravity * sin - cos * pull) / inertia
        moving = pull - lever * turning * cos / mass
        x, angle = x + self.tau * speed, angle + self.tau * turn
        after = torch.stack([x, speed + self.tau * moving, angle, turn + self.tau * turning])
        fallen = (x.abs() > self.furthest) | (angle.abs() > self.steepest)
        return after, torch.ones_like(x), fallen


class Pendulum:
    """A pendulum to be swung up and held; it never terminates."""

    size, limit = 2, 200
    gravity, dt, fastest, strongest = 10.0, 0.05, 8.0, 2.0

    def __init__(self) -> None:
        high = np.array([1.0, 1.0, self.fastest], np.float32)
        self.observation_space = spaces.Box(-high, high, dtype=np.float32)
        self.action_space = spaces.Box(-self.strongest, self.strongest, (1,), np.float32)

    def start(self, chance: Tensor) -> Tensor:
        angle, speed = chance * 2 - 1
        return torch.stack([angle * math.pi, speed])

    def see(self, state: Tensor) -> Tensor:
        angle, speed = state
        return torch.stack([angle.cos(), angle.sin(), speed], -1).to(torch.float32)

    def move(self, state: Tensor, action: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        angle, speed = state
        torque = action[:, 0].clamp(-self.strongest, self.strongest)  # float32, as there
        off = torch.remainder(angle + math.pi, 2 * math.pi) - math.pi
        cost = off.square() + 0.1 * speed.square() + 0.001 * torque.square()
        speed = speed + (1.5 * self.gravity * angle.sin() + 3.0 * torque) * self.dt
        speed = speed.clamp(-self.fastest, self.fastest)
        after = torch.stack([angle + speed * self.dt, speed])
        return after, -cost, torch.zeros_like(off, dtype=torch.bool)


WORLDS: dict[str, type[World]] = {"CartPole-v1": CartPole, "Pendulum-v1": Pendulum}


class TensorEnvs(VecAdapter):
    """`num_envs` environments of one `World`; their state never leaves the device in `move`.

    Args:
        world: the equations.
        max_episode_steps: the time limit; 0: the environment's own.
        num_envs, seed, worker, box_actions, check_finite: as for `make_vec`.
    """

    def __init__(
        self, world: World, num_envs: int, *, max_episode_steps: int = 0, **common: Any
    ) -> None:
        super().__init__(world.observation_space, world.action_space, num_envs, **common)
        self.world = world
        self.limit = max_episode_steps or world.limit
        self._box: BoxActions = common.get("box_actions", "clip")
        self.to(torch.device("cpu"))

    def to(self, device: torch.device) -> None:
        """Live on that device; call before `reset`."""
        self.device = device
        n, size = self.num_envs, self.world.size
        self._state = torch.zeros(size, n, dtype=torch.float64, device=device)
        self._steps = torch.zeros(n, dtype=torch.int64, device=device)
        self._totals = torch.zeros(n, dtype=torch.float64, device=device)
        self.generator = torch.Generator(device)
        self.number_from(self._first)

    def number_from(self, first: int) -> None:
        super().number_from(first)
        self.generator.manual_seed(seeding.integer(self.seed, "tensors", first))

    # -- on the device ---------------------------------------------------------------------------

    def begin(self) -> Tensor:
        """Begin an episode everywhere; [B, ...] observations to act on."""
        self._state.copy_(self._fresh())
        self._steps.zero_()
        self._totals.zero_()
        self._running = True
        return self.world.see(self._state)

    def move(self, actions: Tensor) -> Moved:
        """Act everywhere, in the policy's own terms. Tensors of ours are changed in place, so that
        it can be part of a CUDA graph."""
        after, reward, terminated = self.world.move(self._state, self._sent_tensor(actions))
        self._steps += 1
        self._totals += reward
        truncated = self._steps >= self.limit
        over = terminated | truncated
        total, length = self._totals.clone(), self._steps.clone()
        self._state.copy_(torch.where(over, self._fresh(), after))
        self._steps.masked_fill_(over, 0)
        self._totals.masked_fill_(over, 0.0)
        obs, final = self.world.see(self._state), self.world.see(after)
        return Moved(obs, reward.to(torch.float32), terminated, truncated, final, total, length)

    def _fresh(self) -> Tensor:
        drawn = torch.rand(
            self._state.shape, generator=self.generator, dtype=torch.float64, device=self.device
        )
        return self.world.start(drawn)

    def _sent_tensor(self, actions: Tensor) -> Tensor:
        """What `ActionMap` does, in torch."""
        space = self.action_space
        if not isinstance(space, spaces.Box) or self._box == "raw":
            return actions
        low, high = float(space.low.min()), float(space.high.max())
        if self._box == "scale":
            actions = (high + low) / 2 + (high - low) / 2 * actions.clamp(-1.0, 1.0)
        return actions.clamp(low, high)

    # -- as all environments are stepped ---------------------------------------------------------

    def reset(self, out: Obs | None = None) -> Obs:
        shown = self.begin().cpu().numpy()
        for i in range(self.num_envs):
            self._begin(i, None)
        if out is None:
            return shown
        out[...] = shown
        return out

    def step(self, actions: Array, out: Step | None = None) -> Step:
        row = self.blank() if out is None else out
        self._sent(actions)  # whether there is one for each, before anything moves
        moved = self.move(torch.as_tensor(np.asarray(actions)).to(self.device))
        row.obs[...] = moved.obs.cpu().numpy()
        row.reward[:] = moved.reward.cpu().numpy()
        row.terminated[:] = moved.terminated.cpu().numpy()
        row.truncated[:] = moved.truncated.cpu().numpy()
        row.valid.fill(True)
        row.finals, row.episodes = [], []
        self._clock += 1
        self._check_row(row.obs)
        ended = np.flatnonzero(row.terminated | row.truncated).tolist()
        if ended:
            finals, totals = moved.final.cpu().numpy(), moved.total.tolist()
            for i in ended:
                self._returns[i] = totals[i]
                row.finals.append(Final(i, finals[i].copy()))
                row.episodes.append(self._end(i, {}))
                self._begin(i, None)
        return row

    def close(self) -> None:
        self._running = False

    def state(self, obs: Obs) -> dict[str, Any]:
        return super().state(obs) | {
            "clock": self._clock,
            "starts": list(self._starts),
            "tensors": [t.cpu().numpy().copy() for t in (self._state, self._steps, self._totals)],
            "generator": self.generator.get_state().numpy(),
        }

    def load_state(self, state: dict[str, Any]) -> Restored:
        self.continue_from(state["begun"])
        self._clock, self._starts = int(state["clock"]), [int(n) for n in state["starts"]]
        own = (self._state, self._steps, self._totals)
        for tensor, kept in zip(own, state["tensors"], strict=True):
            tensor.copy_(torch.as_tensor(np.array(kept)))
        self.generator.set_state(torch.as_tensor(np.array(state["generator"])))
        self._running = True
        return Restored(self.world.see(self._state).cpu().numpy(), [], [])


def make_tensors(env: Any, num_envs: int, **options: Any) -> TensorEnvs:
    """Environments that torch steps, by name; ConfigError names those that there are."""
    if not isinstance(env, str):
        raise ConfigError(
            f"backend='torch' knows {', '.join(PREFIX + n for n in WORLDS)}, not a "
            f"{type(env).__name__}"
        )
    name = env.removeprefix(PREFIX)
    if name not in WORLDS:
        known = [PREFIX + n for n in WORLDS]
        raise unknown_id(env, known, f"backend='torch' has {' and '.join(known)}")
    return TensorEnvs(WORLDS[name](), num_envs, **options)

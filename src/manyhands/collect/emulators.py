"""Rollouts of emulators that run on the host, with policy, storage and learner on the device.

    group 0    emulated ───► recv ─ frames ─► policy ─ actions ─► send ───► emulated
    group 1    ──► recv ─ frames ─► policy ─ actions ─► send ───► emulated ───► recv

The same rollout as `rollout.py` makes, of environments that show stacks of frames and are stepped
by threads of their own (`Groups` of envs/vector.py). While one group is emulated, the policy acts
for the other. Only the newest frame of each environment travels, [B, H, W] bytes; it is kept there
once, and stacks are made of frames where they are looked at. Actions follow from the chance that
belongs to each environment (streams.py), so nothing depends on who is ready first, nor on the
number of groups.

On a GPU what the policy does for a group, and where its frames go, are CUDA graphs (devices.py).
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor

from manyhands.collect.on_device import TensorRollout
from manyhands.devices import Captured
from manyhands.envs.adapter import Episode, Step
from manyhands.envs.vector import Groups, VectorAdapter
from manyhands.math.running_stats import Normaliser
from manyhands.streams import EnvNoise
from manyhands.trees import Array

GROUPS = 2


class Stacks:
    """Observations of a rollout, [T + 1, B] stacks of S frames, of which each frame is kept once.

    The stack of row t shows the frames of slots t … t + S − 1; those before the start of its
    episode are black. `stacks[rows]` makes those of flat rows, t · B + b.
    """

    def __init__(self, length: int, envs: int, shape: tuple[int, ...], device: Any) -> None:
        self.length, self.depth = length, shape[0]
        slots = length + self.depth
        self._kept = torch.zeros(slots * envs + 1, *shape[1:], dtype=torch.uint8, device=device)
        self._black = slots * envs  # where a frame that nothing is written to lies
        flat = self._kept.flatten(1)  # eight bytes at once, where a frame is made of such
        self._words = flat.view(torch.int64) if flat.shape[1] % 8 == 0 else flat
        self.frames = self._kept[:-1].view(slots, envs, *shape[1:])
        self.first = torch.ones(slots, envs, dtype=torch.bool, device=device)
        numbers = torch.arange(slots * envs, device=device).view(slots, envs)
        self._places = numbers.unfold(0, self.depth, 1)  # [T + 1, B, S]
        self._tickets = torch.zeros_like(self._places).flatten(0, 1)

    def __getitem__(self, rows: Tensor) -> Tensor:
        tickets = self._tickets[rows]
        chosen = self._words.index_select(0, tickets.flatten()).view(torch.uint8)
        return chosen.view(*tickets.shape, *self._kept.shape[1:])

    @property
    def kept(self) -> list[Tensor]:
        """What rows are made of."""
        return [self._kept, self._tickets]

    def settle(self) -> None:
        """All frames are there: what each stack shows is worked out."""
        begins = self.first.unfold(0, self.depth, 1).to(torch.int64)
        later = begins.flip(-1).cumsum(-1).flip(-1) - begins  # starts behind each frame
        self._tickets.copy_(torch.where(later > 0, self._black, self._places).flatten(0, 1))

    def move_on(self) -> None:
        """What was the last observation is the first one."""
        self.frames[: self.depth] = self.frames[self.length :].clone()
        self.first[: self.depth] = self.first[self.length :].clone()


def tensors_of(rollout: TensorRollout) -> list[Tensor]:
    """All that a learner reads of it."""
    stacks, *columns = rollout
    return [*stacks.kept, *columns]


def room_for(rollout: TensorRollout) -> TensorRollout:
    """Room for a copy of it."""
    return copy.deepcopy(rollout)


def copied(room: TensorRollout, rollout: TensorRollout) -> None:
    for to, column in zip(tensors_of(room), tensors_of(rollout), strict=True):
        to.copy_(column)


class EmulatorCollector:
    """T steps of every environment with the policy `model`, on its device.

    Args:
        envs: in groups that are stepped in turn.
        model: with a head that chooses one of n.
        length: T.
        noise: what actions are drawn by.
        normaliser: of rewards; images are taken as they are.
        device: of the model.
        say: called with what cannot be a CUDA graph.
    """

    def __init__(
        self, envs: Groups, model: Any, length: int, noise: EnvNoise, normaliser: Normaliser,
        device: torch.device, *, say: Callable[[str], None],
    ) -> None:  # fmt: skip
        self.envs, self.length, self.begun = envs, length, False
        self._model, self._noise, self._normaliser = model, noise, normaliser
        self._device, b = device, envs.num_envs
        self._starts = False  # whether the first step of the next rollout is on its way
        self._host = _Host(length, b, pinned=device.type == "cuda")
        self.stacks = Stacks(length, b, tuple(envs.observation_space.shape), device)
        self.chance = torch.zeros(length, b, device=device)

        def room(dtype: torch.dtype = torch.float32) -> Tensor:
            return torch.zeros(length, b, dtype=dtype, device=device)

        self.rollout = TensorRollout(
            obs=self.stacks, action=room(torch.int64), logp=room(), value=room(), reward=room(),
            terminated=room(torch.bool), truncated=room(torch.bool), next_value=room(),
        )  # fmt: skip
        parts = zip(envs.parts, envs.slices, strict=True)
        self._groups = [_Group(self, part, where, model, device, say) for part, where in parts]

    def start(self) -> None:
        """Send the first actions of the next rollout, so that the emulators do not wait for
        whoever is not done with the last one's numbers."""
        if self._starts:
            return
        self._starts = True
        if not self.begun:
            self._begin(self.envs.reset())
        self.stacks.move_on()
        self._host.draw(self._noise, self.chance)
        for group in self._groups:
            group.at.zero_()
            group.act()

    def collect(self) -> tuple[TensorRollout, list[Episode]]:
        """The next T steps of every environment, and the episodes that ended in them."""
        self.start()
        episodes: list[Episode] = []
        finals: list[tuple[int, int, Any]] = []
        for t in range(self.length):
            for group in self._groups:
                row = group.recv(self._host.row(t, group.where, group.frame))
                if t + 1 < self.length:
                    group.act()
                first = group.where.start
                episodes += [e._replace(env=e.env + first) for e in row.episodes]
                finals += [(t, f.env + first, f.obs) for f in row.finals if row.truncated[f.env]
                           and not row.terminated[f.env]]  # fmt: skip
            self._normaliser.scale(self._host.reward[t], self._host.ended(t))
        self._starts = False
        self._close(finals)
        return self.rollout, episodes

    def _begin(self, obs: Any) -> None:
        self.begun = True
        for group in self._groups:
            group.begin(obs[group.where], self.length)

    @torch.no_grad()
    def _close(self, finals: list[tuple[int, int, Any]]) -> None:
        """What follows from the whole rollout."""
        out = self.rollout
        for column, kept in self._host.columns(out):
            column.copy_(kept, non_blocking=True)
        self.stacks.settle()
        out.next_value[:-1] = out.value[1:]
        out.next_value[-1] = torch.cat([self._model.value(group.stack) for group in self._groups])
        if finals:
            seen = torch.from_numpy(np.stack([obs for _, _, obs in finals])).to(self._device)
            rows, envs = ([final[i] for final in finals] for i in (0, 1))
            out.next_value[rows, envs] = self._model.value(seen)

    def state(self) -> dict[str, Any]:
        """As that of a `Collector`: an emulator begins a new episode when a run is resumed."""
        envs = self.envs.state(None) if self.begun else None
        return {"envs": envs, "noise": self._noise.state()}

    def load_state(self, state: dict[str, Any]) -> list[str]:
        self._noise.load_state(state["noise"])
        if state["envs"] is None:
            return []
        restored = self.envs.load_state(state["envs"])
        self._begin(restored.obs)
        self._normaliser.forget(restored.restarted)
        return restored.reasons


class _Host:
    """What lies on the host's side of a rollout, in memory that the device can read by itself."""

    def __init__(self, length: int, envs: int, *, pinned: bool) -> None:
        def room(dtype: torch.dtype) -> Tensor:
            return torch.zeros(length, envs, dtype=dtype, pin_memory=pinned)

        flags = ("terminated", "truncated", "valid")
        self._kept = {name: room(torch.bool) for name in flags}
        self._kept |= {"reward": room(torch.float32), "chance": room(torch.float32)}
        self._seen = {name: tensor.numpy() for name, tensor in self._kept.items()}
        self.reward = self._seen["reward"]

    def row(self, t: int, where: slice, frame: Any) -> Step:
        reward, terminated, truncated, valid = (
            self._seen[name][t, where] for name in ("reward", "terminated", "truncated", "valid")
        )
        return Step(frame, reward, terminated, truncated, valid)

    def ended(self, t: int) -> Any:
        return self._seen["terminated"][t] | self._seen["truncated"][t]

    def columns(self, rollout: TensorRollout) -> list[tuple[Tensor, Tensor]]:
        names = ("reward", "terminated", "truncated")
        return [(getattr(rollout, name), self._kept[name]) for name in names]

    def draw(self, noise: EnvNoise, chance: Tensor) -> None:
        """The same numbers as a collector draws step by step, of all steps at once."""
        kept = self._seen["chance"]
        for row in kept:
            row[:] = noise.random((len(row), 1))[:, 0]
        chance.copy_(self._kept["chance"], non_blocking=True)


class _Group:
    """Environments that step together: their side of the way to the device and back."""

    def __init__(
        self, whole: EmulatorCollector, part: VectorAdapter, where: slice, model: Any,
        device: torch.device, say: Callable[[str], None],
    ) -> None:  # fmt: skip
        self.where, self._part, self._model = where, part, model
        self._stacks, self._out, self._chance = whole.stacks, whole.rollout, whole.chance
        part.newest_only = True
        shape = tuple(part.observation_space.shape)
        cuda, b = device.type == "cuda", part.num_envs
        sent = torch.zeros(b, *shape[1:], dtype=torch.uint8, pin_memory=cuda)
        over = torch.zeros(b, dtype=torch.bool, pin_memory=cuda)
        self.frame, self._over = sent.numpy(), over.numpy()
        self._sent = (sent, over)
        self._arrived = (sent.to(device, copy=True), over.to(device, copy=True))
        self._returned = torch.zeros(b, dtype=torch.int64, pin_memory=cuda)
        self._action = torch.zeros(b, dtype=torch.int64, device=device)
        self._done = torch.cuda.Event() if cuda else None  # type: ignore[no-untyped-call]
        self.at = torch.zeros(1, dtype=torch.int64, device=device)  # the row that is acted for
        self.stack = torch.zeros(b, *shape, dtype=torch.uint8, device=device)  # to act on next
        self._show = Captured(self._take_in, device, (), "way of a frame", say)
        self._choose = Captured(self._policy, device, (), "policy", say)

    def begin(self, frame: Array, row: int) -> None:
        """Episodes begin everywhere, with what is shown at that row."""
        self.frame[:], self._over[:] = frame, True
        self.at.fill_(row - 1)
        self._bring()

    def recv(self, row: Step) -> Step:
        """The end of a step; the newest frames are on their way to the device."""
        self._part.recv(row)
        np.logical_or(row.terminated, row.truncated, out=self._over)
        self._bring()
        return row

    def act(self) -> None:
        """The policy's actions for what has arrived, and the next step."""
        self._choose()
        self._returned.copy_(self._action, non_blocking=True)
        if self._done is not None:
            self._done.record()
            self._done.synchronize()
        self._part.send(self._returned.numpy())

    def _bring(self) -> None:
        for arrived, sent in zip(self._arrived, self._sent, strict=True):
            arrived.copy_(sent, non_blocking=True)
        self._show()

    # -- what may be a CUDA graph: no number is read, and every tensor stays where it is ---------

    @torch.no_grad()
    def _take_in(self) -> None:
        frame, over = self._arrived
        self.at.add_(1)
        kept = self.stack[:, 1:] * ~over.view(-1, 1, 1, 1)
        self.stack.copy_(torch.cat([kept, frame[:, None]], 1))
        slot = self.at + (self._stacks.depth - 1)
        self._stacks.frames[:, self.where].index_copy_(0, slot, frame[None])
        self._stacks.first[:, self.where].index_copy_(0, slot, over[None])

    @torch.no_grad()
    def _policy(self) -> None:
        out, head = self._out, self._model.head
        parameters, values = self._model(self.stack)
        chance = self._chance[:, self.where].index_select(0, self.at)[0]
        self._action.copy_(head.choose(parameters, chance))
        logp = head.log_prob(parameters, self._action)
        for column, new in ((out.action, self._action), (out.logp, logp), (out.value, values)):
            column[:, self.where].index_copy_(0, self.at, new[None])

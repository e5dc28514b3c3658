"""One worker with emulators on the cores of its host, and a GPU for all the rest.

    emulators ── newest frames ─► rollout ─► update ─► the next rollout
        ▲                            │
        └────────── actions ─────────┘      half of them run while the policy acts for the rest

Who holds what: everything but the emulators is on the device. What moves: a frame of each
environment a step, and its action. The weights are those of the last update: no lag. Emulators wait
while it is learned.

With overlap they do not: a copy of the weights collects while the others learn what came before.
Rows are then exactly one update old when they are learned from, as with gather, and the run still
repeats to the bit.

    learner    ── learn batch k−1 ──┐   ┌── learn batch k ──────┐
    its copy   ── collect batch k ──┴─►─┴── collect batch k+1 ──┴─►
"""

from __future__ import annotations

import copy
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import numpy as np
import torch

from manyhands.algorithms.base import PolicyGradient
from manyhands.algorithms.impala import IMPALA
from manyhands.algorithms.on_device import TensorLearner, TraceLearner, fits
from manyhands.collect.emulators import GROUPS, EmulatorCollector, copied, room_for, tensors_of
from manyhands.collect.on_device import TensorRollout
from manyhands.envs.adapter import Episode
from manyhands.envs.make import shows_frames
from manyhands.envs.vector import Groups
from manyhands.networks.flat import FlatParameters
from manyhands.strategies.context import Context, Part
from manyhands.strategies.progress import (
    EveryWorker,
    RunProgress,
    episode_rows,
    load_process_state,
    process_state,
)


def fit(context: Context) -> bool:
    """Whether this is how the run goes: one update a rollout, of images as ALE shows them."""
    experiment, run = context.experiment, context.experiment.run
    return (
        context.seat.device != "cpu"
        and run.collect == "steps"
        and run.unrolls_per_update == 1
        and not run.normalize_observations
        and shows_frames(run.env, run.env_backend, run.env_kwargs)
        and fits(experiment.spec.load(), experiment.options)
    )


def part(context: Context, progress: RunProgress) -> Part:
    overlap = context.experiment.run.overlap
    return (Overlapped if overlap else InTurn)(context, progress)


class InTurn(Part):
    """A rollout, then the update. The first step of a rollout is on its way before the numbers of
    the update before it are asked for."""

    def __init__(self, context: Context, progress: RunProgress) -> None:
        self.context, self.progress = context, progress
        run = context.experiment.run
        with context.phases("starting"):
            envs, noise = context.make_envs(groups=min(GROUPS, run.envs_per_worker))
            assert isinstance(envs, Groups)
            if context.synchronous:
                context.build((envs.observation_space, envs.action_space))
        algorithm = context.algorithm
        assert isinstance(algorithm, PolicyGradient)
        self.algorithm = algorithm
        self._collector = EmulatorCollector(
            envs, self._acting(), run.rollout_length, noise, context.normaliser, algorithm.device,
            say=self._say,
        )  # fmt: skip
        learner = TraceLearner if isinstance(algorithm, IMPALA) else TensorLearner
        self._learner = learner(algorithm, self._learned_from(), seed=run.seed, say=self._say)
        if not context.synchronous:
            progress.begin(self)
            return
        keeper = EveryWorker(context, self._collector)
        keeper.extra = self._own_state
        progress.begin(keeper)
        if keeper.loaded is not None:  # a run that began on the CPU has none
            self._load_own_state(keeper.loaded)

    def goes_on(self) -> bool:
        return self.progress.goes_on()

    def update(self) -> None:
        context, progress, learner = self.context, self.progress, self._learner
        with context.phases("rollout"):
            rollout, episodes = self._collector.collect()
        if not context.synchronous:
            progress.learned(0)
        with context.phases("optimisation"):
            learner.launch(progress.fraction)
        with context.phases("rollout"):
            self._start_next(rollout)
        with context.phases("optimisation"):
            info = learner.report()
        self._count(rollout, episodes)
        progress.close_update(info)

    def _acting(self) -> Any:
        """The model that acts."""
        return self.algorithm.model

    def _learned_from(self) -> TensorRollout:
        return self._collector.rollout

    def _start_next(self, rollout: TensorRollout) -> None:
        """Unless this was the last one."""
        if self.progress.steps + rollout.reward.numel() < self.context.experiment.run.steps:
            self._collector.start()

    def _count(self, rollout: TensorRollout, episodes: list[Episode]) -> None:
        self.progress.took(rollout.reward.numel(), episode_rows(self.context, episodes))

    # -- checkpoints -----------------------------------------------------------------------------

    def state(self) -> dict[str, Any]:
        """Of an asynchronous algorithm's run; `EveryWorker` keeps those of the others."""
        worker = {"collector": self._collector.state(), "own": self._own_state()}
        return {"worker": worker} | process_state(self.context)

    def load_state(self, state: dict[str, Any]) -> list[str]:
        """What could not be restored exactly, in words."""
        worker = state["worker"]
        self.context.session = int(state["crew"]["session"])
        notes = self._collector.load_state(worker["collector"])
        self._load_own_state(worker.get("own") or {})
        load_process_state(self.context, state)
        return notes

    def _own_state(self) -> dict[str, Any]:
        return {"minibatches": self._learner.generator.get_state().numpy()}

    def _load_own_state(self, kept: dict[str, Any]) -> None:
        if "minibatches" in kept:
            self._learner.generator.set_state(torch.as_tensor(np.array(kept["minibatches"])))

    def _say(self, text: str) -> None:
        self.progress.records.note([text])


class Overlapped(InTurn):
    """A rollout by a copy of the weights, while the others learn from the rollout before."""

    def __init__(self, context: Context, progress: RunProgress) -> None:
        self._there = False  # whether a rollout waits to be learned from
        self._version = -1  # of the policy that made it
        super().__init__(context, progress)
        # Acting comes first: the emulators wait for it, and nobody for the learner.
        cuda = self.algorithm.device.type == "cuda"
        self._stream = torch.cuda.Stream(priority=-1) if cuda else None  # type: ignore[no-untyped-call]
        self._hand_over()

    def update(self) -> None:
        """Collect batch k with the weights from which batch k − 1 is learned."""
        context, progress, learned = self.context, self.progress, self._there
        lag = float(self.algorithm.version - self._version)
        if learned:
            with context.phases("optimisation"):
                self._learner.launch(progress.fraction)
        with context.phases("rollout"), self._apart():
            rollout, episodes = self._collector.collect()
        info = {}
        with context.phases("optimisation"):
            if learned:
                info = self._learner.report() | {"lag": lag}
            self._meet()
            copied(self._held, rollout)
            self._there, self._version = True, self._acting_version
            self._hand_over()
        with context.phases("rollout"), self._apart():
            self._start_next(rollout)
        self._count(rollout, episodes)
        progress.close_update(info, learned=learned)

    def close(self) -> None:
        """The last rollout is learned from, too."""
        if self._there and not self.progress.stopped:
            lag = float(self.algorithm.version - self._version)
            self._there = False
            with self.context.phases("optimisation"):
                info = self._learner.update(self.progress.fraction) | {"lag": lag}
            self.progress.close_update(info)

    def _acting(self) -> Any:
        model = copy.deepcopy(self.algorithm.model)
        self._flat = FlatParameters(model)
        return model

    def _learned_from(self) -> TensorRollout:
        self._held = room_for(self._collector.rollout)
        return self._held

    def _hand_over(self) -> None:
        """The copy acts with the weights as they are now."""
        self._flat.data.copy_(self.algorithm.flat.data)
        self._acting_version = self.algorithm.version
        self._meet()

    def _meet(self) -> None:
        if self._stream is not None:
            torch.cuda.synchronize(self.algorithm.device)

    def _apart(self) -> AbstractContextManager[Any]:
        """Where the acting copy's kernels are queued."""
        return nullcontext() if self._stream is None else torch.cuda.stream(self._stream)

    def _own_state(self) -> dict[str, Any]:
        rows = [x.cpu() for x in tensors_of(self._held)] if self._there else []
        waiting = {"rows": rows, "there": self._there, "version": self._version}
        return super()._own_state() | waiting

    def _load_own_state(self, kept: dict[str, Any]) -> None:
        super()._load_own_state(kept)
        if kept.get("there") and "minibatches" in kept:
            for tensor, value in zip(tensors_of(self._held), kept["rows"], strict=True):
                tensor.copy_(torch.as_tensor(value))
            self._there, self._version = True, int(kept["version"])

"""One worker does everything: acts, keeps, learns, in turn. No message, no lag; the seam is the
identity, and a run repeats to the bit.

    PPO, A2C, TRPO   envs ─► rollout ─► update ─► the next rollout
    PPO, A2C with environments that are tensors: the same, and nothing leaves the device
    IMPALA           envs ─► unrolls ─► update ─► the next unrolls
    PPO, A2C, IMPALA with emulators and a GPU: emulators.py
    from a replay    envs ─► n-step transitions ─► replay ─► so many gradient steps for each
                      ▲                               ▲     environment step
                      └────────── the same weights ───┴─ priorities ─┘

From a replay, an update as it is counted and written down is a round of rollout_length steps of
each environment and the gradient steps that belong to them.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from manyhands.algorithms.base import Alone, PolicyGradient
from manyhands.algorithms.impala import IMPALA
from manyhands.algorithms.on_device import TensorLearner, fits
from manyhands.collect.on_device import TensorCollector
from manyhands.collect.unroll import Unroll, joined
from manyhands.envs.tensors import TensorEnvs
from manyhands.replay.buffer import PrioritizedReplay
from manyhands.strategies import emulators, experience
from manyhands.strategies.actor_learner import UnrollReplay
from manyhands.strategies.allreduce import Replica
from manyhands.strategies.context import Context, Part
from manyhands.strategies.progress import (
    EveryWorker,
    RunProgress,
    episode_rows,
    load_process_state,
    process_state,
)
from manyhands.types import Info


def run(context: Context, progress: RunProgress) -> None:
    (emulators.part if emulators.fit(context) else part)(context, progress).run()


def part(context: Context, progress: RunProgress) -> Part:
    match context.learns_from:
        case "rollout":
            experiment = context.experiment
            tensors = experiment.run.env_backend == "torch" and experiment.run.collect == "steps"
            if tensors and fits(experiment.spec.load(), experiment.options):
                return DeviceWorker(context, progress)
            return Replica(context, progress)
        case "unroll":
            return UnrollWorker(context, progress)
        case _:
            return ReplayWorker(context, progress)


class DeviceWorker(Part):
    """Environments, policy, rollout and learner on one device; the host gets metrics and
    checkpoints. Of the episodes that end in one rollout all count, and the last are listed."""

    def __init__(self, context: Context, progress: RunProgress) -> None:
        self.context, self.progress = context, progress
        run = context.experiment.run
        with context.phases("starting"):
            envs, _ = context.make_envs()
            assert isinstance(envs, TensorEnvs)
            context.build((envs.observation_space, envs.action_space))
        algorithm = context.algorithm
        assert isinstance(algorithm, PolicyGradient)
        envs.to(algorithm.device)
        self._collector = TensorCollector(
            envs, algorithm.model, run.rollout_length, context.normaliser, algorithm.options.gamma,
            seed=run.seed, say=self._say,
        )  # fmt: skip
        self._learner = TensorLearner(
            algorithm, self._collector.rollout, seed=run.seed, say=self._say
        )
        keeper = EveryWorker(context, self._collector)
        keeper.extra = lambda: {"minibatches": self._learner.generator.get_state().numpy()}
        progress.begin(keeper)
        if keeper.loaded is not None:
            kept = torch.as_tensor(np.array(keeper.loaded["minibatches"]))
            self._learner.generator.set_state(kept)

    def goes_on(self) -> bool:
        return self.progress.goes_on()

    def update(self) -> None:
        context, progress = self.context, self.progress
        with context.phases("rollout"):
            rollout, finished = self._collector.collect()
        with context.phases("optimisation"):
            info = self._learner.update(progress.fraction)
        if finished.ended > len(finished.last):
            progress.records.returns.also(finished.ended - len(finished.last), finished.best)
        rows = np.zeros((len(finished.last), 4 + len(context.experiment.run.log_info)))
        rows[:, :3], rows[:, 3], rows[:, 4:] = finished.last, context.rank, np.nan
        progress.took(rollout.reward.numel(), rows)
        progress.close_update(info)

    def _say(self, text: str) -> None:
        self.progress.records.note([text])


class UnrollWorker(Part):
    """Environments and a learner: as many unrolls as an update takes, then the update. All of it
    is in its checkpoints."""

    def __init__(self, context: Context, progress: RunProgress) -> None:
        self.context, self.progress = context, progress
        self.stepper = self._collector = experience.unroll_collector(context)
        self._replay = UnrollReplay(context)
        self._waiting: list[Unroll] = []
        self._steps = 0  # since the last update
        progress.begin(self)
        self._learn_what_waits()  # of a checkpoint between two updates on unrolls of one round

    def goes_on(self) -> bool:
        return self.progress.goes_on()

    def update(self) -> None:
        with self.context.phases("rollout"):
            self._waiting += self._collector.take(self.context.algorithm.version)
        self._steps += int(self._collector.valid_steps)
        self._learn_what_waits()

    def _learn_what_waits(self) -> None:
        while len(self._waiting) >= self._replay.fresh_share and self.goes_on():
            self._learn()

    def _learn(self) -> None:
        context, progress, algorithm = self.context, self.progress, self.context.algorithm
        assert isinstance(algorithm, IMPALA)
        share = self._replay.fresh_share
        fresh, self._waiting = self._waiting[:share], self._waiting[share:]
        done, self._collector.finished = self._collector.finished, []
        progress.took(self._steps, episode_rows(context, done))
        self._steps = 0
        for unroll in fresh:
            progress.learned(progress.lag(int(unroll["version"])))
        with context.phases("optimisation"):
            batch = algorithm.prepare_unroll(joined(self._replay.mixed_with(fresh, progress)))
            info = algorithm.update(batch, context.across, progress.fraction)
        progress.close_update(info)

    def state(self) -> dict[str, Any]:
        worker = {
            "collector": self._collector.state(),
            "replay": self._replay.state(),
            "waiting": self._waiting,
        }
        return {"worker": worker} | process_state(self.context)

    def load_state(self, state: dict[str, Any]) -> list[str]:
        """What could not be restored exactly, in words."""
        worker = state.get("worker")
        if worker is None:  # of version 0.1.0: new episodes, of the next session
            self.context.close()
            self.stepper = self._collector = experience.unroll_collector(self.context)
            return ["this checkpoint of an earlier version has no environments: new episodes begin"]
        self.context.session = int(state["crew"]["session"])  # the same episodes continue
        notes = self._collector.load_state(worker["collector"])
        self._replay.load_state(worker["replay"])
        self._waiting = list(worker["waiting"])
        load_process_state(self.context, state)
        return notes


class ReplayWorker(Part):
    """Environments, a replay and a learner; all of them are in its checkpoints."""

    def __init__(self, context: Context, progress: RunProgress) -> None:
        self.context, self.progress = context, progress
        self.options = context.experiment.options
        self.replay = experience.make_replay(context)
        framed = experience.frames_of(context) is not None
        frames = self.replay.frames if framed else None
        self.stepper = self.transitions = experience.Transitions(context, frames)
        self.learner = experience.ReplayLearner(context)
        self.owed = 0.0  # gradient steps that the environment steps so far have a right to
        self._made = 0  # steps of each environment in this round
        progress.begin(self)
        self.transitions.steps_of_all = progress.steps

    def goes_on(self) -> bool:
        return self.progress.goes_on()

    def update(self) -> None:
        """After one step of each environment: the gradient steps that belong to it."""
        context, o, progress = self.context, self.options, self.progress
        with context.phases("rollout"):
            rows = self.transitions.take()
            if rows is not None:
                self.replay.append(rows)
        if self.replay.size >= max(o.learning_starts, o.batch_size):
            self.owed += o.updates_per_step * self.transitions.last_steps
            if self.owed >= 1.0:
                with context.phases("optimisation"):
                    self._learn(int(self.owed), progress.fraction)
                self.owed -= int(self.owed)
        self._made += 1
        if self._made == context.experiment.run.rollout_length:
            self._made = 0
            steps, episodes = self.transitions.taken()
            progress.took(steps, episode_rows(context, episodes))
            progress.close_update(self.report())
        self.transitions.steps_of_all = progress.steps + self.transitions.steps

    def _learn(self, times: int, fraction: float) -> None:
        o, replay, learner = self.options, self.replay, self.learner
        for _ in range(times):
            if isinstance(replay, PrioritizedReplay):
                drawn = replay.sample(o.batch_size, learner.beta(fraction))
            else:
                drawn = replay.sample(o.batch_size)
            errors = learner.learn(learner.rows(drawn), Alone(), fraction)
            if isinstance(replay, PrioritizedReplay):
                replay.update_priorities(drawn.ids, errors)
            learner.drawn += o.batch_size

    def report(self) -> Info:
        return self.learner.report() | {
            "exploration": self.transitions.explorer.reach,
            "replay_size": float(self.replay.size),
            "samples_per_insert": self.learner.drawn / max(1, self.transitions.made),
        }

    def state(self) -> dict[str, Any]:
        keep = self.options.checkpoint_replay
        worker = {
            "experience": self.transitions.state(),
            "replay": self.replay.state() if keep else None,
            "owed": self.owed,
            "drawn": self.learner.drawn,
        }
        return {"worker": worker} | process_state(self.context)

    def load_state(self, state: dict[str, Any]) -> list[str]:
        """What could not be restored exactly, in words."""
        worker = state["worker"]
        self.context.session = int(state["crew"]["session"])  # the same episodes continue
        kept = worker["replay"]
        if kept is not None:  # first: frames of what the environments show now are added to it
            self.replay.load_state(kept)
        notes = self.transitions.load_state(worker["experience"])
        self.owed, self.learner.drawn = float(worker["owed"]), int(worker["drawn"])
        if kept is None:
            self.transitions.n_step.forget()
            notes.append(
                "the replay was not saved (--checkpoint-replay saves it): a new one is filled, to "
                f"{self.options.learning_starts:,} transitions, before learning goes on"
            )
        load_process_state(self.context, state)
        return notes

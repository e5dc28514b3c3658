"""One worker does everything: acts, keeps, learns, in turn. No message, no lag; the seam is the
identity, and a run repeats to the bit.

    PPO, A2C, TRPO   envs ─► rollout ─► update ─► the next rollout
    IMPALA           envs ─► unrolls ─► update ─► the next unrolls
    DQN, DDPG        envs ─► n-step transitions ─► replay ─► so many gradient steps for each
                      ▲                               ▲     environment step
                      └────────── the same weights ───┴─ priorities ─┘

From a replay, an update as it is counted and written down is a round of rollout_length steps of
each environment and the gradient steps that belong to them.
"""

from __future__ import annotations

from typing import Any

from manyhands.algorithms.base import Alone
from manyhands.algorithms.impala import IMPALA
from manyhands.collect.unroll import Unroll, joined
from manyhands.replay.buffer import PrioritizedReplay
from manyhands.strategies import experience
from manyhands.strategies.actor_learner import UnrollReplay
from manyhands.strategies.context import Context
from manyhands.strategies.progress import (
    EveryWorker,
    RunProgress,
    episode_rows,
    load_process_state,
    process_state,
)
from manyhands.types import Info


def run(context: Context, progress: RunProgress) -> None:
    match context.learns_from:
        case "rollout":
            from_rollouts(context, progress)
        case "unroll":
            from_unrolls(context, progress)
        case "replay":
            from_replay(context, progress)


def from_rollouts(context: Context, progress: RunProgress) -> None:
    collector = experience.rollout_collector(context)
    algorithm = context.algorithm
    progress.begin(EveryWorker(context, collector))
    while progress.goes_on():
        with context.phases("rollout"):
            rollout = collector.collect()
            batch = algorithm.prepare(rollout)
        with context.phases("optimisation"):
            info = algorithm.update(batch, context.across, progress.fraction)
        progress.close_update(info, rollout)


def from_unrolls(context: Context, progress: RunProgress) -> None:
    algorithm = context.algorithm
    assert isinstance(algorithm, IMPALA)
    progress.begin()
    collector, replay = experience.unroll_collector(context), UnrollReplay(context)
    waiting: list[Unroll] = []
    while progress.goes_on():
        steps = 0
        while len(waiting) < replay.fresh_share:
            with context.phases("rollout"):
                waiting += collector.collect(algorithm.version)
            steps += int(collector.valid_steps)
        fresh, waiting = waiting[: replay.fresh_share], waiting[replay.fresh_share :]
        done, collector.finished = collector.finished, []
        progress.took(steps, episode_rows(context, done))
        for unroll in fresh:
            progress.learned(progress.lag(int(unroll["version"])))
        with context.phases("optimisation"):
            batch = algorithm.prepare_unroll(joined(replay.mixed_with(fresh, progress)))
            info = algorithm.update(batch, context.across, progress.fraction)
        progress.close_update(info)


def from_replay(context: Context, progress: RunProgress) -> None:
    length = context.experiment.run.rollout_length
    here = ReplayWorker(context)
    progress.begin(here)
    while progress.goes_on():
        here.round(length, progress.steps, progress.fraction)
        steps, episodes = here.transitions.taken()
        progress.took(steps, episode_rows(context, episodes))
        progress.close_update(here.report())


class ReplayWorker:
    """Environments, a replay and a learner; all of them are in its checkpoints."""

    def __init__(self, context: Context) -> None:
        self.context, self.options = context, context.experiment.options
        self.replay = experience.make_replay(context)
        framed = experience.frames_of(context) is not None
        frames = self.replay.frames if framed else None
        self.transitions = experience.Transitions(context, frames)
        self.learner = experience.ReplayLearner(context)
        self.owed = 0.0  # gradient steps that the environment steps so far have a right to

    def round(self, length: int, steps: int, fraction: float) -> None:
        """So many steps of each environment, learning in between."""
        context, o = self.context, self.options
        ready = max(o.learning_starts, o.batch_size)
        for _ in range(length):
            with context.phases("rollout"):
                rows = self.transitions.step(steps + self.transitions.steps)
                if len(rows["reward"]):
                    self.replay.append(rows)
            if self.replay.size < ready:
                continue
            self.owed += o.updates_per_step * self.transitions.last_steps
            if self.owed >= 1.0:
                with context.phases("optimisation"):
                    self._learn(int(self.owed), fraction)
                self.owed -= int(self.owed)

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

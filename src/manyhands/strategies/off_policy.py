"""What one worker of an off-policy run needs, and strategy single for it; the counterpart of Team.

    envs ─► n-step transitions ─► replay ─► gradient steps, so many for each environment step
     ▲                               ▲              │
     └────────── the same weights ───┴─ priorities ─┘

Acting and learning take turns, at a fixed ratio: the run repeats to the bit. An update, as it is
counted and written down, is a round of rollout_length steps of each environment and the gradient
steps that belong to them.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from manyhands import seeding
from manyhands.algorithms.base import Across, Alone, Batch, Info
from manyhands.algorithms.off_policy import OffPolicy
from manyhands.data.n_step import NStep
from manyhands.data.noise import global_chance, load_global_chance
from manyhands.data.replay import PrioritizedReplay, Replay
from manyhands.data.rollout import Obs
from manyhands.envs.adapter import Episode
from manyhands.envs.spaces import zeros
from manyhands.experiment.records import Records
from manyhands.math.schedules import make_schedule
from manyhands.strategies.crew import Crew
from manyhands.strategies.ledger import Ledger
from manyhands.trees import Array


def run(crew: Crew, records: Records, state: dict[str, Any] | None) -> dict[str, Any]:
    """Strategy single."""
    run = crew.experiment.run
    here = Worker(crew)
    ledger = ReplayLedger(crew, records, here)
    if state is None:
        ledger.checkpoint()  # of step 0: from here on the run can always be gone on with
    else:
        ledger.restore(state)
    while ledger.goes_on():
        here.round(run.rollout_length, ledger.steps, ledger.progress)
        ledger.taken(*here.experience.told())
        ledger.close_update(here.report())
    return {"times": [crew.phases.totals()], "table": "", "ledger": ledger}


class Worker:
    """Acts, keeps, learns, in turns."""

    def __init__(self, crew: Crew) -> None:
        self.crew, self.options = crew, crew.experiment.options
        self.experience = Experience(crew)
        self.replay = make_replay(crew)
        self.lesson = Lesson(crew)
        self.owed = 0.0  # gradient steps that the environment steps so far have a right to

    def round(self, length: int, steps: int, progress: float) -> None:
        """So many steps of each environment, learning in between."""
        crew, o = self.crew, self.options
        ready = max(o.learning_starts, o.batch_size)
        for _ in range(length):
            with crew.phases("rollout"):
                rows = self.experience.step(steps + self.experience.steps)
                if len(rows["reward"]):
                    self.replay.append(rows)
            if self.replay.size < ready:
                continue
            self.owed += o.updates_per_step * self.experience.last_steps
            if self.owed >= 1.0:
                with crew.phases("optimisation"):
                    self._learn(int(self.owed), progress)
                self.owed -= int(self.owed)

    def _learn(self, times: int, progress: float) -> None:
        o, replay, lesson = self.options, self.replay, self.lesson
        for _ in range(times):
            if isinstance(replay, PrioritizedReplay):
                drawn = replay.sample(o.batch_size, lesson.beta(progress))
            else:
                drawn = replay.sample(o.batch_size)
            errors = lesson.learn(lesson.rows(drawn), Alone(), progress)
            if isinstance(replay, PrioritizedReplay):
                replay.update_priorities(drawn.ids, errors)
            lesson.drawn += o.batch_size

    def report(self) -> Info:
        return self.lesson.report() | {
            "exploration": self.experience.explorer.reach,
            "replay_size": float(self.replay.size),
            "samples_per_insert": self.lesson.drawn / max(1, self.experience.made),
        }

    def state(self) -> dict[str, Any]:
        keep = self.options.checkpoint_replay
        return {
            "experience": self.experience.state(),
            "replay": self.replay.state() if keep else None,
            "owed": self.owed,
            "drawn": self.lesson.drawn,
        }

    def load_state(self, state: dict[str, Any]) -> list[str]:
        """What could not be restored exactly, in words."""
        notes = self.experience.load_state(state["experience"])
        self.owed, self.lesson.drawn = float(state["owed"]), int(state["drawn"])
        if state["replay"] is None:
            self.experience.n_step.forget()
            notes.append(
                "the replay was not saved (--checkpoint-replay saves it): it is filled anew, to "
                f"{self.options.learning_starts:,} transitions, before learning goes on"
            )
        else:
            self.replay.load_state(state["replay"])
        return notes


class Experience:
    """Steps environments and makes n-step transitions of what happens."""

    def __init__(self, crew: Crew) -> None:
        o, algorithm = crew.experiment.options, crew.algorithm
        assert isinstance(algorithm, OffPolicy)
        self.crew, self.normaliser = crew, crew.normaliser
        self.envs, self._chance = crew.make_envs()
        here = self.envs.num_envs
        total = crew.experiment.run.num_envs
        self.explorer = algorithm.explorer(self._chance, crew.first_env, here, total)
        self.n_step = NStep(o.n_step, o.gamma, here)
        self._row = self.envs.blank()
        self.obs: Obs = None
        self.episodes: list[Episode] = []
        self.steps = 0  # since it was last told
        self.last_steps = 0  # of the last call
        self.made = 0  # transitions, ever

    def step(self, steps: int) -> Batch:
        """One step of each environment; the transitions that it completed. `steps` of all workers
        decide how much is explored."""
        if self.obs is None:
            self.obs = self.envs.reset()
        seen = self.normaliser.see(self.obs)
        stored, sent = self.explorer.act(seen, steps)
        row = self.envs.step(sent, self._row)
        ended = row.terminated | row.truncated
        self.normaliser.scale(row.reward, ended)
        reached = row.next_obs() if row.finals else row.obs
        # Raw observations: they are normalised when they are learned from, as the policy then sees.
        rows: Batch = self.n_step.push(
            {"obs": self.obs, "action": stored},
            row.reward,
            reached,
            row.terminated,
            row.truncated,
            row.valid,
        )
        del rows["steps"]
        _copy(self.obs, row.obs)
        if row.finals:
            self.explorer.restart(ended)
            self.episodes += row.episodes
        self.last_steps = int(np.count_nonzero(row.valid))
        self.steps += self.last_steps
        self.made += len(rows["reward"])
        return rows

    def told(self) -> tuple[int, Array]:
        """(steps, episodes) since the last time, for the books."""
        crew, steps = self.crew, self.steps
        rows = [[crew.first_env + e.env, e.total_return, e.length, crew.rank]
                for e in self.episodes]  # fmt: skip
        self.steps, self.episodes = 0, []
        return steps, np.array(rows, np.float64).reshape(-1, 4)

    def state(self) -> dict[str, Any]:
        return {
            "envs": None if self.obs is None else self.envs.state(self.obs),
            "chance": self._chance.state(),
            "explorer": self.explorer.state(),
            "n_step": self.n_step.state(),
            "made": self.made,
        }

    def load_state(self, state: dict[str, Any]) -> list[str]:
        self._chance.load_state(state["chance"])
        self.explorer.load_state(state["explorer"])
        self.n_step.load_state(state["n_step"])
        self.made = int(state["made"])
        if state["envs"] is None:
            return []
        restored = self.envs.load_state(state["envs"])
        self.obs = restored.obs
        if restored.restarted:
            self.n_step.forget(restored.restarted)
            self.normaliser.forget(restored.restarted)
        return list(restored.reasons)


class Lesson:
    """Gradient steps on batches from a replay, and what is told of them."""

    def __init__(self, crew: Crew) -> None:
        algorithm = crew.algorithm
        assert isinstance(algorithm, OffPolicy)
        self.algorithm, self._normaliser = algorithm, crew.normaliser
        self._beta = make_schedule(crew.experiment.options.beta)
        self._sums: Info = {}
        self._count = 0
        self.drawn = 0  # transitions, ever

    def beta(self, progress: float) -> float:
        return min(1.0, max(0.0, self._beta(progress)))

    def rows(self, drawn: Any) -> Batch:
        """What was drawn, as the algorithm takes it."""
        rows, see = drawn.rows, self._normaliser.apply
        seen = {"obs": see(rows["obs"]), "next_obs": see(rows["next_obs"])}
        return {**rows, **seen, "weight": drawn.weights}

    def learn(self, rows: Batch, across: Across, progress: float) -> Array:
        """One gradient step; the new TD errors of these rows."""
        info = self.algorithm.update(rows, across, progress)
        for name, value in info.items():
            self._sums[name] = self._sums.get(name, 0.0) + value
        self._count += 1
        return self.algorithm.errors

    def report(self) -> Info:
        """Means since the last report; nothing where nothing was learned."""
        count, sums = self._count, self._sums
        self._count, self._sums = 0, {}
        return {name: value / count for name, value in sums.items()} | {
            "gradient_steps": float(count)
        }


class ReplayLedger(Ledger):
    """The books of a run whose checkpoints hold the acting side too."""

    def __init__(self, crew: Crew, records: Records, worker: Worker) -> None:
        super().__init__(crew, records)
        self._worker = worker

    def checkpoint(self) -> None:
        with self.crew.phases("checkpoint"):
            state = {
                "algorithm": self.crew.algorithm.state(),
                "crew": {"steps": self.steps, "updates": self.updates},
                "normaliser": self.crew.normaliser.training_state(),
                "worker": self._worker.state(),
                "chance": global_chance(),
                "phases": self.crew.phases.totals(),
            }
            self.records.checkpoint(state, self.steps, self.updates)

    def restore(self, state: dict[str, Any]) -> None:
        crew, kept = self.crew, state["crew"]
        crew.algorithm.load_state(state["algorithm"])
        crew.normaliser.load_training_state(state["normaliser"])
        self.steps, self.updates = int(kept["steps"]), int(kept["updates"])
        self.solved = self.records.returns.solved(crew.experiment.run.target_return)
        notes = self._worker.load_state(state["worker"])
        for name, seconds in state["phases"].items():
            crew.phases.add(name, seconds)
        load_global_chance(state["chance"])  # last: environments may have drawn from it
        self.records.note(notes)


def example_row(crew: Crew) -> Batch:
    """One transition of zeros: the shape of the replay."""
    space, actions = crew.spaces
    obs = zeros(space, (1,))
    first = {k: v[0] for k, v in obs.items()} if isinstance(obs, dict) else obs[0]
    discrete = type(actions).__name__ == "Discrete"
    return {
        "obs": first,
        "action": np.int64(0) if discrete else np.zeros(actions.shape, np.float32),
        "reward": np.float32(0.0),
        "next_obs": first,
        "discount": np.float32(0.0),
    }


def make_replay(crew: Crew) -> Replay:
    o, example = crew.experiment.options, example_row(crew)
    seed = seeding.integer(crew.experiment.run.seed, "replay")
    if not o.prioritized:
        return Replay(o.replay_size, example, seed=seed)
    return PrioritizedReplay(
        o.replay_size, example, alpha=o.priority_alpha, eps=o.priority_epsilon, seed=seed
    )


def _copy(target: Obs, source: Obs) -> None:
    if isinstance(target, dict):
        for key in target:
            target[key][...] = source[key]
    else:
        target[...] = source

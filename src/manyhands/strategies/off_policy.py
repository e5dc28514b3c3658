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
from manyhands.algorithms.base import Across, Alone
from manyhands.algorithms.off_policy import OffPolicy
from manyhands.envs.adapter import Episode
from manyhands.envs.spaces import zeros
from manyhands.experiment.records import Records
from manyhands.math.optimiser import make_schedule
from manyhands.replay.buffer import PrioritizedReplay, Replay
from manyhands.replay.frames import Frames, HeldFrames, StackLog
from manyhands.replay.n_step import NStep
from manyhands.strategies.crew import Crew
from manyhands.strategies.ledger import Ledger
from manyhands.streams import global_chance, load_global_chance
from manyhands.trees import Array, copy_into
from manyhands.types import Batch, Info, Obs


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
        self.replay = make_replay(crew)
        self.experience = Experience(crew, self.replay.frames if frames_of(crew) else None)
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
        kept = state["replay"]
        if kept is not None:  # first: frames of what the environments show now are added to it
            self.replay.load_state(kept)
        notes = self.experience.load_state(state["experience"])
        self.owed, self.lesson.drawn = float(state["owed"]), int(state["drawn"])
        if kept is None:
            self.experience.n_step.forget()
            notes.append(
                "the replay was not saved (--checkpoint-replay saves it): it is filled anew, to "
                f"{self.options.learning_starts:,} transitions, before learning goes on"
            )
        return notes


class Experience:
    """Steps environments and makes n-step transitions of what happens.

    `frames` is where frames of stacked images go: transitions then hold their tickets (frames.py).
    """

    def __init__(self, crew: Crew, frames: Any = None) -> None:
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
        self._frames = frames
        stack = 0 if frames is None else crew.spaces[0].shape[0]
        self._log = None if frames is None else StackLog(frames, here, stack)
        self.episodes: list[Episode] = []
        self.steps = 0  # since it was last told
        self.last_steps = 0  # of the last call
        self.made = 0  # transitions, ever

    def step(self, steps: int) -> Batch:
        """One step of each environment; the transitions that it completed. `steps` of all workers
        decide how much is explored."""
        if self.obs is None:
            self._begin(self.envs.reset())
        seen = self.normaliser.see(self.obs)
        stored, sent = self.explorer.act(seen, steps)
        row = self.envs.step(sent, self._row)
        ended = row.terminated | row.truncated
        self.normaliser.scale(row.reward, ended)
        # Raw observations: they are normalised when they are learned from, as the policy then sees.
        kept, reached = self.obs, row.obs
        if self._log is not None:
            kept = self._log.current
            reached = self._log.step(self.obs, row.obs, row.finals)
        elif row.finals:
            reached = row.next_obs()
        rows: Batch = self.n_step.push(
            {"obs": kept, "action": stored},
            row.reward,
            reached,
            row.terminated,
            row.truncated,
            row.valid,
        )
        del rows["steps"]
        copy_into(self.obs, row.obs)
        if row.finals:
            self.explorer.restart(ended)
            self.episodes += row.episodes
        self.last_steps = int(np.count_nonzero(row.valid))
        self.steps += self.last_steps
        self.made += len(rows["reward"])
        return rows

    def _begin(self, obs: Obs) -> None:
        self.obs = obs
        if self._log is not None:
            self._log.start(obs)

    def whole(self, rows: Batch) -> Batch:
        """Transitions that were made just now, with their observations as they were seen."""
        if not isinstance(self._frames, HeldFrames):
            return rows
        stacks = self._frames.stacks
        return rows | {name: stacks(rows[name]) for name in ("obs", "next_obs")}

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
        self._begin(restored.obs)
        if self._log is not None:
            self.n_step.forget()  # its tickets are of frames that need not be there any more
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

    def state(self) -> dict[str, Any]:
        return super().state() | {"worker": self._worker.state()} | own_state(self.crew)

    def restore(self, state: dict[str, Any]) -> None:
        super().restore(state)
        self.crew.session = int(state["crew"]["session"])  # the same episodes go on
        notes = self._worker.load_state(state["worker"])
        load_own_state(self.crew, state)  # last: environments may have drawn from the generators
        self.records.note(notes)


def own_state(crew: Crew) -> dict[str, Any]:
    """Of this process: the generators that all share, and its time by phase."""
    return {"chance": global_chance(), "phases": crew.phases.totals()}


def load_own_state(crew: Crew, state: dict[str, Any]) -> None:
    for name, seconds in state["phases"].items():
        crew.phases.add(name, seconds)
    load_global_chance(state["chance"])


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


def frames_of(crew: Crew, shards: int = 1) -> Frames | None:
    """How to keep observations that are stacks of frames; None where they are something else.

    Those of ALE and of EnvPool's Atari games are; of other environments' images it is not known.
    """
    run, o, space = crew.experiment.run, crew.experiment.options, crew.spaces[0]
    shape: Any = getattr(space, "shape", None) or ()
    ale = run.env.startswith("ALE/") and run.env_backend in ("auto", "atari")
    if len(shape) != 3 or space.dtype != np.uint8 or not (ale or run.env_backend == "envpool"):
        return None
    stack = int(run.env_kwargs.get("frame_stack" if ale else "stack_num", 4))
    if shape[0] != stack or stack < 2:
        return None
    rows = o.replay_size // shards
    # A frame a step and a few more at each start; and those of transitions that are not complete.
    return Frames(capacity=rows + rows // 10 + held_room(crew))


def held_room(crew: Crew) -> int:
    """Frames that may be on their way on an actor: of the steps between two messages and of the
    transitions that begin in them, were each of them to end an episode."""
    run, o, stack = crew.experiment.run, crew.experiment.options, crew.spaces[0].shape[0]
    return int(run.envs_per_worker * (o.pull_every + o.n_step + stack + 1) * (stack + 2))


def make_replay(crew: Crew) -> Replay:
    o, example, frames = crew.experiment.options, example_row(crew), frames_of(crew)
    seed = seeding.integer(crew.experiment.run.seed, "replay")
    if not o.prioritized:
        return Replay(o.replay_size, example, seed=seed, frames=frames)
    return PrioritizedReplay(
        o.replay_size, example, alpha=o.priority_alpha, eps=o.priority_epsilon, seed=seed,
        frames=frames,
    )  # fmt: skip

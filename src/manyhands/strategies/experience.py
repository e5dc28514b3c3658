"""Where experience comes from: the collectors of this worker's environments, and its replay.

    rollouts      on-policy algorithms      Collector, EpisodeCollector   collect/
    unrolls       IMPALA                    UnrollCollector               collect/
    transitions   from a replay             Transitions, into a replay    here

In games that are played in turns, somebody sits in the other seats: `Opponents`, below.

Steps of the environments and what is learned from are counted where the collector is used.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch.nn.utils import parameters_to_vector, vector_to_parameters

from manyhands import seeding, trees
from manyhands.algorithms.base import Across
from manyhands.algorithms.off_policy import OffPolicy
from manyhands.collect.episodes import EpisodeCollector
from manyhands.collect.rollout import Collector
from manyhands.collect.unroll import UnrollCollector
from manyhands.envs.adapter import Episode, Step, Stepper
from manyhands.envs.spaces import zeros
from manyhands.math.optimiser import make_schedule
from manyhands.policy import Policy, Seat
from manyhands.replay.buffer import PrioritizedReplay, Replay
from manyhands.replay.frames import Frames, HeldFrames, StackLog
from manyhands.replay.n_step import NStep
from manyhands.strategies.context import Context
from manyhands.trees import Array
from manyhands.types import Batch, Info, Obs

# -- on-policy, and IMPALA -------------------------------------------------------------------------


def rollout_collector(context: Context) -> Collector | EpisodeCollector:
    """Environments first: the policy is built for their spaces."""
    run, group = context.experiment.run, context.worker.group
    with context.phases("starting"):
        actors = group
        if run.overlap:
            actors = group.subgroup(context.acting) or group
        envs, noise = context.make_envs()
        context.build((envs.observation_space, envs.action_space))
    actor, normaliser = context.algorithm.actor, context.normaliser
    if run.collect == "steps":
        size = getattr(context.algorithm.model, "state_size", 0)
        return Collector(envs, actor, run.rollout_length, noise, normaliser, state_size=size)

    def exchange(value: Any) -> list[Any]:
        with context.phases("synchronisation"):
            return actors.exchange(value)

    return EpisodeCollector(
        envs,
        actor,
        run.batch_steps,
        noise,
        normaliser,
        rank=actors.rank,
        size=actors.size,
        exchange=exchange,
    )


def unroll_collector(context: Context) -> UnrollCollector:
    run, algorithm = context.experiment.run, context.algorithm
    envs, noise = context.make_envs()
    return UnrollCollector(
        envs,
        algorithm.actor,
        run.rollout_length,
        noise,
        context.normaliser,
        whole_episodes=run.collect == "episodes",
        state_size=getattr(algorithm.model, "state_size", 0),
    )


# -- transitions -----------------------------------------------------------------------------------


class Transitions(Stepper):
    """Steps environments and makes n-step transitions of what happens.

    Args:
        context: of this worker.
        frames: where frames of stacked images go: transitions then hold their tickets (frames.py).
        length: steps of each environment that are taken together.
    """

    def __init__(self, context: Context, frames: Any = None, length: int = 1) -> None:
        o, algorithm = context.experiment.options, context.algorithm
        assert isinstance(algorithm, OffPolicy)
        self.context, self.normaliser = context, context.normaliser
        self.envs, self._chance = context.make_envs()
        here = self.envs.num_envs
        total = context.experiment.run.num_envs
        self.explorer = algorithm.explorer(self._chance, context.first_env, here, total)
        self.n_step = NStep(o.n_step, o.gamma, here)
        self._length, self._at = length, 0
        self._row = self.envs.blank()
        self._obs = self.envs.blank().obs
        self._stored: Array = np.zeros(0)  # the actions of this step, as they are kept
        self._rows: list[Batch] = []  # since the last `take`
        self._frames = frames
        stack = 0 if frames is None else context.spaces[0].shape[0]
        self._log = None if frames is None else StackLog(frames, here, stack)
        self._logs = False  # whether the log has begun
        self.episodes: list[Episode] = []
        self.steps_of_all = 0  # by all workers, as far as is known here: how much is explored
        self.steps = 0  # since `taken` was last called
        self.last_steps = 0  # of the last step of all environments
        self.made = 0  # transitions, ever

    @property
    def current(self) -> Obs:
        return self._obs

    @property
    def row(self) -> Step:
        return self._row

    def act(self) -> Array:
        if self._log is not None and not self._logs:
            self._log.start(self._obs)
            self._logs = True
        seen = self.normaliser.see(self._obs)
        self._stored, sent = self.explorer.act(seen, self.steps_of_all)
        return sent

    def observe(self) -> None:
        row = self._row
        ended = row.terminated | row.truncated
        self.normaliser.scale(row.reward, ended)
        # Raw observations: they are normalised when they are learned from, as the policy then sees.
        kept, reached = self._obs, row.obs
        if self._log is not None:
            kept = self._log.current
            reached = self._log.step(self._obs, row.obs, row.finals)
        elif row.finals:
            reached = row.next_obs()
        rows: Batch = self.n_step.push(
            {"obs": kept, "action": self._stored},
            row.reward,
            reached,
            row.terminated,
            row.truncated,
            row.valid,
        )
        del rows["steps"]
        trees.copy_into(self._obs, row.obs)
        if row.finals:
            self.explorer.restart(ended)
            self.episodes += row.episodes
        self.last_steps = int(np.count_nonzero(row.valid))
        self.steps += self.last_steps
        if len(rows["reward"]):
            self.made += len(rows["reward"])
            self._rows.append(rows)
        self._at += 1
        self.full = self._at == self._length

    def take(self) -> Batch | None:
        """The transitions that these steps have completed; None where they completed none."""
        rows, self._rows = self._rows, []
        self._at, self.full = 0, False
        if not rows:
            return None
        together: Batch = rows[0] if len(rows) == 1 else trees.concat(rows)
        return together

    def whole(self, rows: Batch) -> Batch:
        """Transitions that were made just now, with their observations as they were seen."""
        if not isinstance(self._frames, HeldFrames):
            return rows
        stacks = self._frames.stacks
        return rows | {name: stacks(rows[name]) for name in ("obs", "next_obs")}

    def taken(self) -> tuple[int, list[Episode]]:
        """Steps and finished episodes since the last time."""
        taken = self.steps, self.episodes
        self.steps, self.episodes = 0, []
        return taken

    def state(self) -> dict[str, Any]:
        return {
            "envs": self.envs.state(self._obs) if self.begun else None,
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
        self.begun, self._obs = True, restored.obs
        if self._log is not None:
            self._log.start(restored.obs)
            self._logs = True
            self.n_step.forget()  # its tickets are of frames that need not be there any more
        if restored.restarted:
            self.n_step.forget(restored.restarted)
            self.normaliser.forget(restored.restarted)
        return list(restored.reasons)


class ReplayLearner:
    """Gradient steps on batches from a replay, and what is reported of them."""

    def __init__(self, context: Context) -> None:
        algorithm = context.algorithm
        assert isinstance(algorithm, OffPolicy)
        self.algorithm, self._normaliser = algorithm, context.normaliser
        self._beta = make_schedule(context.experiment.options.beta)
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
        """Means since the last report; none of them where no step was taken."""
        count, sums = self._count, self._sums
        self._count, self._sums = 0, {}
        return {name: value / count for name, value in sums.items()} | {
            "gradient_steps": float(count)
        }


def example_row(context: Context) -> Batch:
    """One transition of zeros: the shape of the replay."""
    space, actions = context.spaces
    obs = zeros(space, (1,))
    first = trees.take(obs, 0)
    discrete = type(actions).__name__ == "Discrete"
    return {
        "obs": first,
        "action": np.int64(0) if discrete else np.zeros(actions.shape, np.float32),
        "reward": np.float32(0.0),
        "next_obs": first,
        "discount": np.float32(0.0),
    }


def frames_of(context: Context, shards: int = 1) -> Frames | None:
    """How to keep observations that are stacks of frames; None where they are something else."""
    if not context.frame_stack:
        return None
    rows = context.experiment.options.replay_size // shards
    # A frame a step and a few more at each start; and those of transitions that are not complete.
    return Frames(capacity=rows + rows // 10 + held_room(context))


def held_room(context: Context) -> int:
    """Frames that may be on their way on an actor: of the steps between two messages and of the
    transitions that begin in them, were each of them to end an episode."""
    run, o, stack = context.experiment.run, context.experiment.options, context.spaces[0].shape[0]
    return int(run.envs_per_worker * (o.pull_every + o.n_step + stack + 1) * (stack + 2))


def make_replay(context: Context) -> Replay:
    o, example, frames = context.experiment.options, example_row(context), frames_of(context)
    seed = seeding.integer(context.experiment.run.seed, "replay")
    if not o.prioritized:
        return Replay(o.replay_size, example, seed=seed, frames=frames)
    return PrioritizedReplay(
        o.replay_size, example, alpha=o.priority_alpha, eps=o.priority_epsilon, seed=seed,
        frames=frames,
    )  # fmt: skip


# -- who sits in the other seats of a game ---------------------------------------------------------


@dataclass
class _Game:
    number: int
    version: int  # of the policy that plays the other seats
    seat: Seat


class Opponents:
    """The policy as it is, or as it was, in the other seats: plays for the `Seats` of one worker
    (envs/multi_agent.py).

        --opponents 0      the policy itself, with the weights of the moment
        --opponents K      one of its last K stored versions, drawn anew for each game

    A version is stored at the start and after every `opponent_every` updates. Which of them a game
    is played against, and what it does there, follows from the seed, the number of the row and the
    number of the game: N workers play the games of one. What an LSTM remembers is each game's own.
    All of it is in the checkpoint, with the weights.

    WHY past versions: a policy that only ever meets itself forgets what it no longer meets, and may
    go round in circles (Bansal et al., 2018, arXiv:1710.03748, who draw from all of the past).
    """

    def __init__(self, context: Context) -> None:
        run = context.experiment.run
        self._context = context
        self._keep, self._every, self._seed = run.opponents, run.opponent_every, run.seed
        self._now = self._policy(context.algorithm.model)
        self._past: dict[int, Policy] = {}  # by version, the oldest first
        self._playing: dict[int, _Game] = {}  # by row

    def __call__(self, obs: Obs, games: list[tuple[int, int]]) -> Array:
        if self._keep:
            self._store()
        running = [self._game(row, number) for row, number in games]
        actions: Array | None = None
        for version in sorted({game.version for game in running}):
            theirs = [k for k, game in enumerate(running) if game.version == version]
            policy = self._past[version] if self._keep else self._now
            chosen = policy.act_in([running[k].seat for k in theirs], trees.take(obs, theirs))
            if actions is None:
                actions = np.zeros((len(games), *chosen.shape[1:]), chosen.dtype)
            actions[theirs] = chosen
        assert actions is not None
        return actions

    def state(self) -> dict[str, Any]:
        return {
            "past": {str(version): parameters_to_vector(policy.model.parameters()).detach()
                     for version, policy in self._past.items()},
            "playing": [
                [row, game.number, game.version, game.seat.chance.bit_generator.state,
                 game.seat.memory]
                for row, game in self._playing.items()
            ],
        }  # fmt: skip

    def load_state(self, state: dict[str, Any]) -> None:
        self._playing = {}
        for row, number, version, chance, memory in state.get("playing", ()):
            game = _Game(int(number), int(version), self._seat(int(row), int(number)))
            game.seat.chance.bit_generator.state = chance
            game.seat.memory = None if memory is None else torch.as_tensor(memory)
            self._playing[int(row)] = game
        self._past = {}
        for version, weights in state["past"].items():
            policy = self._past[int(version)] = self._copy()
            vector_to_parameters(torch.as_tensor(weights), policy.model.parameters())

    def state_from(self, states: list[dict[str, Any]]) -> dict[str, Any]:
        past = {version: weights for state in states for version, weights in state["past"].items()}
        return {"past": past, "playing": [game for state in states for game in state["playing"]]}

    def _store(self) -> None:
        """The policy of the moment, if it is time."""
        newest = max(self._past, default=None)
        version = self._context.algorithm.version
        if newest is not None and version < newest + self._every:
            return
        self._past[version] = self._copy()
        in_use = {game.version for game in self._playing.values()}
        for old in sorted(self._past)[: -self._keep]:
            if old not in in_use:  # a game that has begun is played to its end
                del self._past[old]

    def _game(self, row: int, number: int) -> _Game:
        game = self._playing.get(row)
        if game is None or game.number != number:
            stored = sorted(self._past)[-self._keep :] if self._keep else [0]
            version = stored[seeding.integer(self._seed, "opponent", row, number) % len(stored)]
            game = self._playing[row] = _Game(number, version, self._seat(row, number))
        return game

    def _seat(self, row: int, number: int) -> Seat:
        return Seat(seeding.generator(self._seed, "opponents", row, number))

    def _copy(self) -> Policy:
        return self._policy(copy.deepcopy(self._context.algorithm.model).requires_grad_(False))

    def _policy(self, model: Any) -> Policy:
        context, training = self._context, model.training
        observations, actions = context.spaces
        policy = Policy(
            model,
            context.normaliser,
            actions,
            context.experiment.run.box_actions,
            observation_space=observations,
        )
        model.train(training)  # the live model is in training, which is the algorithm's affair
        return policy

"""Who sits in the other seats of a game in turns: the policy as it is, or as it was.

    --opponents 0      the policy itself, with the weights of the moment
    --opponents K      one of its last K stored versions, drawn anew for each game

A version is stored at the start and after every `opponent_every` updates. Which of them a game is
played against follows from the seed, the number of the row and the number of the game; what it does
is drawn from one generator of this worker. Both are in the checkpoint, with the weights.

WHY past versions: a policy that only ever meets itself forgets what it no longer meets, and may go
round in circles (Bansal et al., 2018, arXiv:1710.03748, who draw from all of the past).
"""

from __future__ import annotations

import copy
from typing import Any

import numpy as np
import torch
from torch.nn.utils import parameters_to_vector, vector_to_parameters

from manyhands import seeding, trees
from manyhands.policy import Policy
from manyhands.strategies.context import Context
from manyhands.trees import Array
from manyhands.types import Obs


class Opponents:
    """Plays seats for the `Seats` of one worker (envs/multi_agent.py)."""

    def __init__(self, context: Context) -> None:
        run = context.experiment.run
        self._context = context
        self._keep, self._every, self._seed = run.opponents, run.opponent_every, run.seed
        self._rng = seeding.generator(run.seed, "opponents", context.rank)
        self._now = self._policy(context.algorithm.model)
        self._past: dict[int, Policy] = {}  # by version, the oldest first
        self._of: dict[int, tuple[int, int]] = {}  # row -> (its game, the version that plays in it)

    def __call__(self, obs: Obs, games: list[tuple[int, int]]) -> Array:
        if not self._keep:
            return self._now.act_batch(obs, deterministic=False)
        self._store()
        versions = np.array([self._version(row, game) for row, game in games])
        actions: Array | None = None
        for version in np.unique(versions).tolist():
            theirs = np.flatnonzero(versions == version)
            chosen = self._past[version].act_batch(trees.take(obs, theirs), deterministic=False)
            if actions is None:
                actions = np.zeros((len(games), *chosen.shape[1:]), chosen.dtype)
            actions[theirs] = chosen
        assert actions is not None
        return actions

    def state(self) -> dict[str, Any]:
        return {
            "rng": self._rng.bit_generator.state,
            "past": {str(version): parameters_to_vector(policy.model.parameters()).detach()
                     for version, policy in self._past.items()},
            "of": [[row, *of] for row, of in self._of.items()],
        }  # fmt: skip

    def load_state(self, state: dict[str, Any]) -> None:
        self._rng.bit_generator.state = state["rng"]
        self._of = {int(row): (int(game), int(version)) for row, game, version in state["of"]}
        self._past = {}
        for version, weights in state["past"].items():
            policy = self._past[int(version)] = self._copy()
            vector_to_parameters(torch.as_tensor(weights), policy.model.parameters())

    def _store(self) -> None:
        """The policy of the moment, if it is time."""
        newest = max(self._past, default=None)
        version = self._context.algorithm.version
        if newest is not None and version < newest + self._every:
            return
        self._past[version] = self._copy()
        in_use = {version for _, version in self._of.values()}
        for old in sorted(self._past)[: -self._keep]:
            if old not in in_use:  # a game that has begun is played to its end
                del self._past[old]

    def _version(self, row: int, game: int) -> int:
        before, version = self._of.get(row, (-1, -1))
        if before != game:
            stored = sorted(self._past)[-self._keep :]
            version = stored[seeding.integer(self._seed, "opponent", row, game) % len(stored)]
            self._of[row] = game, version
        return version

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
        policy.draw_from(self._rng)
        return policy

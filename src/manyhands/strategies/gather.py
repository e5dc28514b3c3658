"""Every worker acts; the main worker learns from all rows and hands the weights back.

    worker 0   envs ─► rows ─┐
    worker 1   envs ─► rows ─┼─ gather ─► main: update ─► weights to all
    worker 2   envs ─► rows ─┘

Who holds what: the optimiser lives on the main worker; weights on all, the same while acting.
What moves: every row once, the weights once an update. Synchronous, no staleness. It wins when
minibatches are many and observations small; its limit is the one worker that learns.

With overlap nobody waits for that one: it only learns, while the others collect the next batch
with the weights that it starts from. Rows are then exactly one update old when they are learned
from, and the run still repeats to the bit.

    main       ── learn batch k−1 ──┐   ┌── learn batch k ──────┐
    worker 1   ── collect batch k ──┼─ gather, weights to all ──┼─ ...
    worker 2   ── collect batch k ──┘   └── collect batch k+1 ──┘
"""

from __future__ import annotations

from typing import Any

from manyhands.algorithms.base import Alone, recentred
from manyhands.collect.rollout import Collector, Rollout
from manyhands.policy import build_normaliser
from manyhands.strategies.team import Team
from manyhands.trees import take
from manyhands.types import Batch


def run(team: Team) -> None:
    if team.experiment.run.overlap:
        return overlapped(team)
    algorithm, alone = team.algorithm, Alone()
    while team.goes_on():
        with team.phases("synchronisation"):
            team.share_weights()
        with team.phases("rollout"):
            rollout = team.collector.collect()
            batch = algorithm.prepare(rollout)
        with team.phases("synchronisation"):
            rows = team.group.gather(batch)
        info = {}
        if rows is not None:
            with team.phases("optimisation"):
                info = algorithm.update(rows, alone, team.progress)
        team.close_update(rollout, info)
    team.share_weights()


def overlapped(team: Team) -> None:
    algorithm = team.algorithm
    waiting = _Waiting(team)
    nothing = None if team.acts else _no_rows(team)
    while team.goes_on():
        with team.phases("synchronisation"):
            team.share_weights()
        rollout: Rollout | None = None
        version, info = algorithm.version, {}
        learned = waiting.there
        if team.acts:
            with team.phases("rollout"):
                rollout = team.collector.collect()
                batch = algorithm.prepare(rollout)
        else:
            assert nothing is not None
            batch, info = nothing, waiting.learn()
        with team.phases("synchronisation"):
            rows = team.group.gather(batch)
        waiting.take(rows, version)
        team.close_update(rollout, info, learned=learned)
    if not team.stopped and waiting.there:
        team.close_update(None, waiting.learn())
    team.share_weights()


class _Waiting:
    """The batch that has been gathered and not yet learned from. Rows are on the main worker only,
    but all workers know whether there is one."""

    def __init__(self, team: Team) -> None:
        self._team = team
        self._rows: Batch | None = None
        self.version = -1  # of the policy that made it
        self.there = False
        team.extra_state = self._state
        if team.loaded_extra is not None:
            self._rows, self.there = team.loaded_extra["rows"], team.loaded_extra["there"]
            self.version = team.loaded_extra["version"]

    def take(self, rows: Batch | None, version: int) -> None:
        self._rows, self.version, self.there = rows, version, True

    def learn(self) -> dict[str, float]:
        rows, self._rows, team = self._rows, None, self._team
        self.there = False
        if rows is None:
            return {}
        with team.phases("optimisation"):
            lag = float(team.algorithm.version - self.version)
            rows = recentred(rows, team.algorithm.actor) if lag else rows
            return team.algorithm.update(rows, Alone(), team.progress) | {"lag": lag}

    def _state(self) -> dict[str, Any]:
        return {"rows": self._rows, "there": self.there, "version": self.version}


def _no_rows(team: Team) -> Batch:
    """The main worker's part of every batch: the right columns, and none of them filled."""
    collector = team.collector
    normaliser = build_normaliser(team.experiment, collector.envs.observation_space)
    probe = Collector(collector.envs, team.algorithm.actor, 1, collector.noise, normaliser)
    return take(team.algorithm.prepare(probe.collect()), slice(0, 0))

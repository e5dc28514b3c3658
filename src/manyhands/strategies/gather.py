"""Every worker acts; the main worker learns from all rows and hands the weights back.

    worker 0   envs ─► rows ─┐
    worker 1   envs ─► rows ─┼─ gather ─► main: update ─► weights to all
    worker 2   envs ─► rows ─┘

Who holds what: the optimiser lives on the main worker; weights on all, the same while acting.
What moves: every row once, the weights once an update. Synchronous, no staleness. It wins when
minibatches are many and observations small; its limit is the one worker that learns.
"""

from __future__ import annotations

from manyhands.algorithms.base import Alone
from manyhands.strategies.team import Team


def run(team: Team) -> None:
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

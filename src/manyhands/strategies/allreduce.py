"""Every worker acts and learns; gradients are summed over workers.

    worker 0   envs ─► rows ─► gradient ─┐         ┌─► the same step
    worker 1   envs ─► rows ─► gradient ─┼─ sum ───┼─► the same step
    worker 2   envs ─► rows ─► gradient ─┘         └─► the same step

Who holds what: weights on all workers, equal to the bit (checked every so often); rows stay where
they were collected. What moves: one gradient per minibatch. Synchronous, no staleness. It wins
when learning takes long or observations are large; it loses when minibatches are tiny.
"""

from __future__ import annotations

from manyhands.strategies.team import Team

CHECK_EVERY = 100  # updates between two looks at whether the replicas are still equal


def run(team: Team) -> None:
    algorithm = team.algorithm
    team.share_weights()
    while team.goes_on():
        with team.phases("rollout"):
            rollout = team.collector.collect()
            batch = algorithm.prepare(rollout)
        with team.phases("optimisation"):
            info = algorithm.update(batch, team.across, team.progress)
        team.close_update(rollout, info)
        if algorithm.version % CHECK_EVERY == 0:
            team.check_replicas()

"""Every worker acts and learns; gradients are summed over workers.

    worker 0   envs ─► rows ─► gradient ─┐         ┌─► the same step
    worker 1   envs ─► rows ─► gradient ─┼─ sum ───┼─► the same step
    worker 2   envs ─► rows ─► gradient ─┘         └─► the same step

Who holds what: weights on all workers, equal to the bit (checked every so often); rows stay where
they were collected. What moves: one gradient per minibatch. Synchronous, no staleness. It wins
when learning takes long or observations are large; it loses when minibatches are tiny.
"""

from __future__ import annotations

from manyhands.strategies.context import Context
from manyhands.strategies.experience import rollout_collector
from manyhands.strategies.progress import EveryWorker, RunProgress

CHECK_EVERY = 100  # updates between two looks at whether the replicas are still equal


def run(context: Context, progress: RunProgress) -> None:
    collector = rollout_collector(context)
    algorithm = context.algorithm
    progress.begin(EveryWorker(context, collector))
    context.share_weights()
    while progress.goes_on():
        with context.phases("rollout"):
            rollout = collector.collect()
            batch = algorithm.prepare(rollout)
        with context.phases("optimisation"):
            info = algorithm.update(batch, context.across, progress.fraction)
        progress.close_update(info, rollout)
        if algorithm.version % CHECK_EVERY == 0:
            context.check_equal("replicas")

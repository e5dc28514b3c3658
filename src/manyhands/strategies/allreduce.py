"""Every worker acts and learns; gradients are summed over workers.

    worker 0   envs ─► rows ─► gradient ─┐         ┌─► the same step
    worker 1   envs ─► rows ─► gradient ─┼─ sum ───┼─► the same step
    worker 2   envs ─► rows ─► gradient ─┘         └─► the same step

Who holds what: weights on all workers, equal to the bit (checked every so often); rows stay where
they were collected. What moves: one gradient per minibatch. Synchronous, no staleness. It wins
when learning takes long or observations are large; it loses when minibatches are tiny.
"""

from __future__ import annotations

from manyhands.strategies.context import Context, Part
from manyhands.strategies.experience import rollout_collector
from manyhands.strategies.progress import EveryWorker, RunProgress

CHECK_EVERY = 100  # updates between two looks at whether the replicas are still equal


def run(context: Context, progress: RunProgress) -> None:
    Replica(context, progress).run()


class Replica(Part):
    """One of the workers that act and learn together; alone it is a worker that does both."""

    def __init__(self, context: Context, progress: RunProgress) -> None:
        self.context, self.progress = context, progress
        self.stepper = self._collector = rollout_collector(context)
        progress.begin(EveryWorker(context, self._collector))
        context.share_weights()

    def goes_on(self) -> bool:
        return self.progress.goes_on()

    def update(self) -> None:
        context, progress, algorithm = self.context, self.progress, self.context.algorithm
        with context.phases("rollout"):
            rollout = self._collector.take()
            batch = algorithm.prepare(rollout)
        with context.phases("optimisation"):
            info = algorithm.update(batch, context.across, progress.fraction)
        progress.close_update(info, rollout)
        if algorithm.version % CHECK_EVERY == 0:
            context.check_equal("replicas")

"""What can be wrong with the parts that workers play in an asynchronous run, before it starts."""

from __future__ import annotations

from collections.abc import Iterator

from manyhands import support
from manyhands.config import Experiment, RunConfig


def faults(experiment: Experiment) -> Iterator[str]:
    run, strategy = experiment.run, experiment.strategy
    if support.cells_of(experiment.spec).get(strategy) != support.OK:
        return  # refused already: the parts in it do not matter
    if strategy == "actor_learner":
        yield from _learner_faults(run)
    elif run.learners != 1 and strategy != "apex":
        yield (
            f"learners={run.learners} is for strategies actor_learner and apex, and this is "
            f"{strategy}"
        )
    if strategy == "gradient_server":
        yield from _server_faults(run)
    elif run.pushes != 1 or run.reducers:
        yield f"pushes and reducers are for strategy gradient_server, and this is {strategy}"
    if strategy in ("actor_learner", "gradient_server") and run.queue < 1:
        yield f"queue={run.queue}: a worker must be able to have one waiting; type: --queue 1"
    yield from _replay_faults(experiment)


def _learner_faults(run: RunConfig) -> Iterator[str]:
    if run.learners < 1:
        yield f"learners={run.learners}: at least 1 is needed; type: --learners 1"
    elif run.workers <= run.learners:
        yield (
            f"{run.workers} workers of which {run.learners} learn leave nobody to act; type: "
            f"--workers {run.learners + 1}, or more"
        )
    elif run.unrolls_per_update % run.learners:
        up = -(-run.unrolls_per_update // run.learners) * run.learners
        yield (
            f"{run.unrolls_per_update} unrolls an update do not go evenly into {run.learners} "
            f"learners; type: --unrolls {up}"
        )


def _server_faults(run: RunConfig) -> Iterator[str]:
    if run.workers < 2 + run.reducers:
        yield (
            f"gradient_server needs a server and others that act, and has {run.workers} workers"
            + (f" of which {run.reducers} only add up" if run.reducers else "")
            + f"; type: --workers {2 + run.reducers}, or more"
        )
    if run.pushes < 1:
        yield f"pushes={run.pushes}: at least 1 is needed; type: --pushes 1"
    elif run.reducers and run.pushes % run.reducers:
        up = -(-run.pushes // run.reducers) * run.reducers
        yield (
            f"{run.pushes} pushes do not go evenly into {run.reducers} reducers; type: "
            f"--pushes {up}"
        )
    elif run.reducers and run.reducers > run.actors > 0:
        yield (
            f"{run.reducers} reducers for {run.actors} workers that act; type: --reducers "
            f"{run.actors}, or fewer"
        )
    if run.collect == "episodes":
        yield "gradient_server collects a fixed number of steps; type: --collect steps"


def _replay_faults(experiment: Experiment) -> Iterator[str]:
    options = experiment.options
    share = getattr(options, "replay_share", 0.0)
    if not 0 <= share < 1:
        yield f"replay_share={share:g} must lie from 0 to less than 1: every update has new data"

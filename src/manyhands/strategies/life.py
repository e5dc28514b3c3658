"""One worker's life in an asynchronous run: from its place to its last word.

The counterpart of what `run.train_worker` does with a Team. Only those that learn or serve read a
checkpoint and keep records; an actor that was started again after a death attends nothing that all
workers do together.
"""

from __future__ import annotations

import time
from typing import Any

from manyhands import devices
from manyhands.config import Experiment
from manyhands.engines import stopping
from manyhands.engines.base import Worker
from manyhands.errors import ConfigError
from manyhands.experiment import checkpoint
from manyhands.experiment.records import Records
from manyhands.experiment.state_files import difference
from manyhands.strategies import Program
from manyhands.strategies.crew import Crew


def live(
    program: Program, experiment: Experiment, worker: Worker, resumed: dict[str, Any] | None
) -> dict[str, Any]:
    """The summary on the main worker; nothing elsewhere."""
    import torch

    began = time.perf_counter()
    crew = Crew(experiment, worker)
    learners = crew.roles.ranks("learner")
    if len(learners) > 1 and crew.part.role == "learner":
        crew.group = worker.group.among(learners, "learners")
    acts = crew.part.role in ("actor", "worker", "reducer") and not crew.is_main
    state = None if acts or resumed is None else _state(crew, resumed["checkpoint"])
    seats = [list(crew.seat)] if crew.group is None else crew.group.exchange(list(crew.seat))
    records = Records(
        experiment,
        main=crew.is_main,
        threads=torch.get_num_threads(),
        device=devices.told([devices.Seat(*seat) for seat in seats]),
        resumed=state and state["records"],
        notes=resumed["notes"] if resumed and not acts else (),
    )
    ended: dict[str, Any] = {}
    try:
        crew.phases.add("starting", time.perf_counter() - began)
        ended = program(crew, records, state)
        if not crew.is_main:
            return {}
        ledger = ended["ledger"]
        records.keep(crew.algorithm.model, crew.normaliser, now=True)
        records.restarts = ledger.restarts
        records.lost_fragments = ledger.refused + ledger.lost
        if ended["table"]:
            records.folder.event("asynchronous", late=ledger.late, lost=ledger.lost,
                                 refused=ledger.refused, restarts=ledger.restarts)  # fmt: skip
        return records.finish(
            ledger.steps,
            ledger.updates,
            ledger.solved,
            ended["times"],
            ledger.stopped,
            more=ended["table"],
        )
    except BaseException as error:
        why = stopping.reason() if isinstance(error, SystemExit) else ""
        steps, updates = crew.counted
        records.fail(steps, updates, error, why)
        raise
    finally:
        crew.close()


def _state(crew: Crew, path: str) -> dict[str, Any]:
    """The state of a checkpoint on all learners, if it is of such a run as this one."""
    state = checkpoint.load_on_all(crew.group, path)
    if other := difference(crew.algorithm.state(), state["algorithm"], "algorithm"):
        raise ConfigError(
            f"the checkpoint does not fit this run: {other}. The network, the environment or the "
            "version of manyhands is another than the one that it was made with"
        )
    return state

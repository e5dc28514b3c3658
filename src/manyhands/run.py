"""`train`: from a configuration to a run folder. The only place where all parts meet."""

from __future__ import annotations

import os
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from manyhands.config import Experiment, build, from_plain, to_plain
from manyhands.engines import calls, inline
from manyhands.engines.launch import Job
from manyhands.engines.launch import run as run_job
from manyhands.errors import ConfigError
from manyhands.experiment.folder import default_run_dir
from manyhands.validate import check


@dataclass(frozen=True)
class Result:
    """How a run ended."""

    run_dir: Path
    summary: dict[str, Any]

    @property
    def solved(self) -> bool:
        return bool(self.summary["solved"])

    @property
    def mean_return(self) -> float | None:
        """Of the last 100 finished episodes."""
        mean: float | None = self.summary["mean_return"]
        return mean


def train(algorithm: str, **options: Any) -> Result:
    """Train a policy; `options` are the names that `manyhands train ALGORITHM --help` lists.

        result = train("ppo", env="CartPole-v1", workers=2, steps=100_000)

    Raises ConfigError with all faults of the configuration at once, before anything starts.
    """
    if calls.importing_main:
        raise ConfigError(
            "train() was reached while a worker imported your script. Put the call under a main "
            'guard: if __name__ == "__main__":'
        )
    experiment = build(algorithm, **options)
    check(experiment)
    return train_experiment(experiment)


def train_experiment(experiment: Experiment) -> Result:
    """Run a checked configuration on its engine."""
    run = experiment.run
    run_dir = os.path.abspath(run.run_dir or default_run_dir(experiment))
    run = replace(run, run_dir=run_dir)
    plain = to_plain(replace(experiment, run=run))
    if run.engine == "inline":
        summaries = inline.run(lambda: train_worker(plain), run.workers, run.timeout)
    else:
        job = Job(
            workers=run.workers,
            engine=run.engine,
            call=calls.pack(train_worker, (plain,), {}),
            timeout=run.timeout,
            address=run.address,
            results=True,
        )
        summaries = run_job(job)
    return Result(Path(run_dir), summaries[0])


def train_worker(plain: dict[str, Any]) -> dict[str, Any]:
    """One worker's life in a run."""
    import torch

    from manyhands.engines.attach import attach
    from manyhands.experiment.records import Records
    from manyhands.strategies import STRATEGIES, Team

    began = time.perf_counter()
    experiment = from_plain(plain)
    worker = attach()
    main = worker.place.rank == 0
    records = Records(experiment, main=main, threads=torch.get_num_threads())
    team: Team | None = None
    try:
        team = Team(experiment, worker, records)
        team.phases.add("starting", time.perf_counter() - began)
        STRATEGIES[experiment.strategy](team)
        records.keep(team.algorithm.model, team.normaliser, now=True)
        times = worker.group.exchange(team.phases.totals())
        return records.finish(team.steps, team.updates, team.solved, times)
    except BaseException as error:
        records.fail(team.steps if team else 0, team.updates if team else 0, error)
        raise
    finally:
        if team is not None:
            team.collector.envs.close()

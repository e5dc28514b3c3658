"""The folder of a run. Its files are a contract:

config.toml      the resolved configuration; `manyhands train --config` on it repeats the run
metrics.jsonl    one record an update; metrics.csv has the same numbers
episodes.csv     one row a finished episode
events.jsonl     starts, stops, faults, restarts, checkpoints
summary.json     how it ended
"""

from __future__ import annotations

import dataclasses
import os
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from manyhands.config import Experiment, save_toml
from manyhands.errors import ConfigError
from manyhands.experiment.metrics import Csv, JsonLines, write_json

EPISODE_COLUMNS = ("global_step", "worker", "env", "return", "length", "wall_seconds")

# Every key of summary.json, with what it is when a run had nothing to say
SUMMARY: dict[str, Any] = {
    "env_steps": 0,
    "episodes": 0,
    "updates": 0,
    "wall_seconds": 0.0,
    "steps_per_second": 0.0,
    "mean_return": None,
    "best_return": None,
    "solved": False,
    "algorithm": "",
    "strategy": "",
    "engine": "",
    "workers": 1,
    "seed": 0,
    "restarts": 0,
    "lost_fragments": 0,
    "phase_seconds": {},
    "exit": "finished",
}


def default_run_dir(experiment: Experiment) -> Path:
    """runs/ENV/ALGORITHM-STRATEGY/SEED-TIME, a name that is not taken yet."""
    run = experiment.run
    env = "".join(c if c.isalnum() or c in "-_." else "-" for c in run.env).strip(".") or "env"
    parent = Path("runs", env, f"{experiment.algorithm}-{experiment.strategy}")
    name = f"{run.seed}-{time.strftime('%Y%m%d-%H%M%S')}"
    tries = [parent / name, *(parent / f"{name}-{i}" for i in range(2, 1000))]
    return next(path for path in tries if not path.exists())


def holds_a_run(path: str | os.PathLike[str]) -> bool:
    return any(Path(path, name).exists() for name in ("config.toml", "metrics.jsonl"))


class RunFolder:
    """Writes what a run leaves behind. With path None it writes nothing: other workers' folder."""

    def __init__(self, path: str | os.PathLike[str] | None) -> None:
        self.path = None if path is None else Path(path).absolute()
        self._experiment: Experiment | None = None
        self._files: dict[str, Any] = {}
        self._started = time.time()

    @classmethod
    def of(cls, experiment: Experiment) -> RunFolder:
        """The folder that the experiment names, or a new one under runs/; opened."""
        folder = cls(experiment.run.run_dir or default_run_dir(experiment))
        folder.open(experiment)
        return folder

    def open(self, experiment: Experiment) -> None:
        """Make the folder and write config.toml. A folder that holds a run is left alone."""
        self._experiment, self._started = experiment, time.time()
        if self.path is None:
            return
        if holds_a_run(self.path):
            raise ConfigError(f"{self.path} already holds a run; give another --run-dir")
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            # WHY without run_dir: a repeated run must not write over the one that it repeats.
            run = dataclasses.replace(experiment.run, run_dir="", strategy=experiment.strategy)
            save_toml(self.path / "config.toml", dataclasses.replace(experiment, run=run))
        except OSError as error:
            raise ConfigError(f"{self.path} cannot be written: {error.strerror}") from error
        self._files = {
            "metrics": JsonLines(self.path / "metrics.jsonl"),
            "table": Csv(self.path / "metrics.csv"),
            "episodes": Csv(self.path / "episodes.csv", EPISODE_COLUMNS),
            "events": JsonLines(self.path / "events.jsonl"),
        }

    def metrics(self, record: Mapping[str, Any]) -> None:
        """One record an update: a line of metrics.jsonl and a row of metrics.csv."""
        if self._files:
            self._files["metrics"].write(record)
            self._files["table"].write(record)

    def episode(
        self,
        global_step: int,
        worker: int,
        env: int,
        total_return: float,
        length: int,
        wall_seconds: float,
    ) -> None:
        """A finished episode: a row of episodes.csv."""
        if self._files:
            values = (global_step, worker, env, total_return, length, round(wall_seconds, 3))
            self._files["episodes"].write(dict(zip(EPISODE_COLUMNS, values, strict=True)))

    def event(self, kind: str, **facts: Any) -> None:
        """Something happened: a line of events.jsonl with the time of day and of the run."""
        if self._files:
            now = time.time()
            clock = {"time": round(now, 3), "wall_seconds": round(now - self._started, 3)}
            self._files["events"].write({"event": kind, **clock, **facts})

    def summary(self, facts: Mapping[str, Any]) -> dict[str, Any]:
        """Write summary.json, whole or not at all; what was written, every key of the contract."""
        known: dict[str, Any] = {}
        if self._experiment is not None:
            run = self._experiment.run
            known = {
                "algorithm": self._experiment.algorithm,
                "strategy": self._experiment.strategy,
                "engine": run.engine,
                "workers": run.workers,
                "seed": run.seed,
            }
        record = {**SUMMARY, **known, **facts}
        if "steps_per_second" not in facts and record["wall_seconds"] > 0:
            record["steps_per_second"] = record["env_steps"] / record["wall_seconds"]
        if self.path is not None:
            write_json(self.path / "summary.json", record)
        return record

    def close(self) -> None:
        for file in self._files.values():
            file.close()
        self._files = {}

    def __enter__(self) -> RunFolder:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

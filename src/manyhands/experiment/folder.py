"""The folder of a run. Its files are a contract:

config.toml      the resolved configuration; `manyhands train --config` on it repeats the run
metrics.jsonl    one record an update; metrics.csv has the same numbers
episodes.csv     one row a finished episode
events.jsonl     starts, stops, faults, restarts, checkpoints
checkpoints/     step-numbered, complete or absent; `manyhands resume` goes on from the newest
best/            with --eval-every: the best policy by evaluation
summary.json     how it ended
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from manyhands.config import Experiment, holds_a_run, save_toml
from manyhands.errors import ConfigError
from manyhands.experiment.metrics import Csv, JsonLines, cut_lines, to_disk, write_json

EPISODE_COLUMNS = ("global_step", "worker", "env", "return", "length", "wall_seconds")

# What a resume cuts back: part -> (file, lines of its header)
_ROWS = {
    "metrics": ("metrics.jsonl", 0),
    "table": ("metrics.csv", 1),
    "episodes": ("episodes.csv", 1),
}
# Files that are written beside and then put in place: a killed writer leaves NAME.tmp
_REPLACED = ("config.toml", "metrics.csv", "summary.json", "policy.safetensors")

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
    parent = Path("runs", env, f"{experiment.spec.name}-{experiment.strategy}")
    name = f"{run.seed}-{time.strftime('%Y%m%d-%H%M%S')}"
    tries = [parent / name, *(parent / f"{name}-{i}" for i in range(2, 1000))]
    return next(path for path in tries if not path.exists())


class RunFolder:
    """Writes what a run leaves behind. With path None it writes nothing: other workers' folder."""

    def __init__(self, path: str | os.PathLike[str] | None) -> None:
        self.path = None if path is None else Path(path).absolute()
        self._experiment: Experiment | None = None
        self._files: dict[str, Any] = {}
        self._started = time.time()
        self.lost_rows = 0  # that the disk had no room for

    @classmethod
    def of(cls, experiment: Experiment) -> RunFolder:
        """The folder that the experiment names, or a new one under runs/; opened."""
        folder = cls(experiment.run.run_dir or default_run_dir(experiment))
        folder.open(experiment)
        return folder

    @classmethod
    def for_summary(cls, path: Path, experiment: Experiment) -> RunFolder:
        """A folder to which only a summary is written, for a run whose own writer is gone."""
        folder = cls(path)
        folder._experiment = experiment
        return folder

    def open(self, experiment: Experiment) -> None:
        """Make the folder and write config.toml. A folder that holds a run is left alone."""
        self._experiment, self._started = experiment, time.time()
        if self.path is None:
            return
        if holds_a_run(self.path):
            raise ConfigError(
                f"{self.path} already holds a run; to continue it, type: manyhands resume "
                f"{self.path}; for a new one, give another --run-dir"
            )
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            self._write_config(self.path)
        except OSError as error:
            raise ConfigError(f"{self.path} cannot be written: {error.strerror}") from error
        self._open_files(self.path, {})

    def reopen(
        self, experiment: Experiment, rows: Mapping[str, int], wall_seconds: float
    ) -> list[str]:
        """Go on in the folder of a run, from where its files had so many rows.

        Later rows are cut off; events are a log of what happened, and stay. Gives back, in words,
        rows that are missing.
        """
        self._experiment, self._started = experiment, time.time() - wall_seconds
        if self.path is None:
            return []
        for name in ("summary.json", *(f"{n}.tmp" for n in _REPLACED)):
            (self.path / name).unlink(missing_ok=True)
        self._write_config(self.path)
        lost = []
        for part, (name, head) in _ROWS.items():
            wanted = rows[part] + head if rows[part] else 0
            found = cut_lines(self.path / name, wanted)
            if found < wanted:
                lost.append(f"{name} has lost {wanted - found:,} of {rows[part]:,} rows")
        cut_lines(self.path / "events.jsonl", None)
        self._open_files(self.path, rows)
        return lost

    def rows(self) -> dict[str, int]:
        """How many rows each file has that a resumed run would cut back."""
        return {part: self._files[part].rows for part in _ROWS if self._files}

    def sync(self) -> None:
        """Force all rows to the disk: a checkpoint must not know of rows that are not there."""
        for file in self._files.values():
            file.sync()

    def _open_files(self, path: Path, rows: Mapping[str, int]) -> None:
        self._files = {
            "metrics": JsonLines(path / "metrics.jsonl", rows.get("metrics", 0)),
            "table": Csv(path / "metrics.csv", rows=rows.get("table", 0)),
            "episodes": Csv(path / "episodes.csv", EPISODE_COLUMNS, rows.get("episodes", 0)),
            "events": JsonLines(path / "events.jsonl"),
        }

    def _write_config(self, path: Path) -> None:
        """config.toml, whole or not at all."""
        assert self._experiment is not None
        # WHY without run_dir: a repeated run must not write over the one that it repeats.
        run = dataclasses.replace(
            self._experiment.run, run_dir="", strategy=self._experiment.strategy
        )
        beside = path / "config.toml.tmp"
        save_toml(beside, dataclasses.replace(self._experiment, run=run))
        with open(beside, "rb+") as file:
            to_disk(file)
        os.replace(beside, path / "config.toml")

    def metrics(self, record: Mapping[str, Any]) -> None:
        """One record an update: a line of metrics.jsonl and a row of metrics.csv."""
        self._put("metrics", record)
        self._put("table", record)

    def episode(
        self,
        global_step: int,
        worker: int,
        env: int,
        total_return: float,
        length: int,
        wall_seconds: float,
        info: Mapping[str, float] | None = None,
    ) -> None:
        """A finished episode: a row of episodes.csv; with --log-info its values come last."""
        values = (global_step, worker, env, total_return, length, round(wall_seconds, 3))
        row = dict(zip(EPISODE_COLUMNS, values, strict=True))
        self._put("episodes", row | {f"info/{key}": value for key, value in (info or {}).items()})

    def event(self, kind: str, **facts: Any) -> None:
        """Something happened: a line of events.jsonl with the time of day and of the run."""
        now = time.time()
        clock = {"time": round(now, 3), "wall_seconds": round(now - self._started, 3)}
        self._put("events", {"event": kind, **clock, **facts})

    def _put(self, part: str, record: Mapping[str, Any]) -> None:
        """One row. A full disk does not stop a training: the row is lost, and that is reported."""
        if not self._files:
            return
        try:
            self._files[part].write(record)
        except OSError as error:
            self.lost_rows += 1
            if self.lost_rows.bit_count() == 1:  # 1st, 2nd, 4th, 8th: heard, not drowned in
                text = f"{self.lost_rows} rows of metrics, episodes or events are lost: {error}"
                with contextlib.suppress(OSError, ValueError):  # whoever read has gone
                    print(f"manyhands: {text}", file=sys.stderr, flush=True)

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

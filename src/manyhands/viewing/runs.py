"""Reading the folder of a run, finished or not.

A run that goes on, was killed or has failed is read as far as it got: a summary that is missing is
worked out from the records, and a last line that was cut off is left out.
"""

from __future__ import annotations

import contextlib
import csv
import dataclasses
import json
import math
import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from manyhands.config import Experiment, load_toml, to_plain
from manyhands.errors import ConfigError
from manyhands.experiment.folder import EPISODE_COLUMNS, SUMMARY, short_env

Array = np.ndarray[Any, np.dtype[Any]]

# What two runs may differ in and still be repetitions of one experiment
_NO_MATTER = ("seed", "run_dir", "quiet", "tensorboard", "wandb", "log_every",
              "checkpoint_seconds", "timeout", "address", "steps", "target_return",
              "eval_every", "eval_episodes")  # fmt: skip
SWEEP = "sweep.toml"  # what the folder of a sweep has
_RENAMED_PHASES = {"learning": "optimisation"}  # what earlier versions wrote


@dataclass(frozen=True)
class Run:
    """What a run has left in its folder."""

    path: Path
    experiment: Experiment
    metrics: dict[str, Array]  # column -> one number a record, NaN where there was none
    episodes: dict[str, Array]  # column of episodes.csv -> one number a finished episode
    events: list[dict[str, Any]]
    summary: dict[str, Any]  # every key of the contract
    finished: bool  # whether the run itself wrote the summary

    @property
    def name(self) -> str:
        return f"{self.experiment.spec.name.upper()} on {short_env(self.experiment.run.env)}"

    @property
    def phases(self) -> dict[str, float]:
        """Seconds by phase."""
        found: dict[str, float] = {}
        for name, seconds in (self.summary["phase_seconds"] or {}).items():
            name = _RENAMED_PHASES.get(name, name)
            found[name] = found.get(name, 0.0) + float(seconds)
        return found


@dataclass
class Group:
    """Runs of one experiment that differ in nothing but their seeds."""

    label: str
    runs: list[Run] = field(default_factory=list)

    @property
    def env(self) -> str:
        return self.runs[0].experiment.run.env


def read_run(path: str | os.PathLike[str]) -> Run:
    """The run in a folder; ConfigError when there is none."""
    folder = Path(path)
    experiment = read_config(folder)
    metrics = _columns(_json_lines(folder / "metrics.jsonl"))
    episodes = _episodes(folder / "episodes.csv")
    known = {
        "algorithm": experiment.algorithm,
        "strategy": experiment.strategy,
        "engine": experiment.run.engine,
        "workers": experiment.run.workers,
        "seed": experiment.run.seed,
    }
    written = _summary(folder / "summary.json")
    summary = SUMMARY | known | (written or _so_far(metrics, episodes))
    if not summary["phase_seconds"]:  # a run that failed writes none: take the last record's
        summary["phase_seconds"] = _last_phases(metrics)
    events = _json_lines(folder / "events.jsonl")
    return Run(folder, experiment, metrics, episodes, events, summary, written is not None)


def runs_in(dirs: Sequence[str | os.PathLike[str]]) -> list[Path]:
    """The folders of runs that are meant: those of a sweep for its own."""
    found: list[Path] = []
    for folder in map(Path, dirs):
        if (folder / SWEEP).is_file():
            below = [*folder.glob("seed-*/config.toml"), *folder.glob("*/seed-*/config.toml")]
            found += sorted(path.parent for path in below)
        else:
            found.append(folder)
    return found


def read_config(folder: Path) -> Experiment:
    """What runs in a folder; ConfigError when it is not that of a run."""
    if not folder.is_dir():
        raise ConfigError(f"there is no folder {folder}; give the folder of a run (runs/...)")
    if not (folder / "config.toml").is_file():
        raise ConfigError(
            f"{folder} holds no config.toml: it is not the folder of a run{_near(folder)}"
        )
    return load_toml(folder / "config.toml")


def group_runs(runs: Sequence[Run]) -> list[Group]:
    """Runs by experiment, each with a label that says in what it differs from the others.

    WHY not by algorithm and strategy alone: a band over runs with other learning rates would look
    like chance.
    """
    settings = [_settings(run.experiment) for run in runs]
    groups: dict[str, Group] = {}
    for run, own in zip(runs, settings, strict=True):
        # Only against runs of the same kind: other environments and algorithms have other options.
        alike = [s for s in settings if _kind(s) == _kind(own)]
        telling = {k: v for k, v in own.items() if any(s.get(k) != v for s in alike)}
        label = _label(run.experiment, telling)
        groups.setdefault(f"{own['env']} {label}", Group(label)).runs.append(run)
    return list(groups.values())


def _kind(settings: dict[str, Any]) -> tuple[Any, Any]:
    return settings["env"], settings["algorithm"]


def _label(experiment: Experiment, telling: dict[str, Any]) -> str:
    words = [f"{experiment.spec.name.upper()} {experiment.strategy}"]
    for key, value in sorted(telling.items(), key=lambda item: (item[0] != "workers", item[0])):
        name = key.replace("_", " ")
        if key == "workers":
            words.append(f"{value} worker{'' if value == 1 else 's'}")
        elif key == "engine":
            words.append(f"{value} engine")
        elif key == "start_from":
            words.append(f"from {'/'.join(Path(value).parts[-2:]) if value else 'scratch'}")
        elif isinstance(value, bool) or value in ("", [], {}):
            words.append(name if value else f"no {name}")
        elif key != "strategy":
            words.append(f"{name} {value}")
    return ", ".join(words)


def _settings(experiment: Experiment) -> dict[str, Any]:
    plain = to_plain(experiment)
    run = {k: v for k, v in plain["run"].items() if k not in _NO_MATTER}
    run["strategy"] = experiment.strategy
    return {**run, **plain[experiment.spec.name], "algorithm": experiment.algorithm}


def _near(folder: Path) -> str:
    """The runs that lie below a folder, for whoever gave its parent."""
    below = sorted(p.parent for p in folder.glob("**/config.toml"))[:3]
    return f"; there is one in {', '.join(map(str, below))}" if below else ""


# -- the files -------------------------------------------------------------------------------------


def _json_lines(path: Path) -> list[dict[str, Any]]:
    if not path.is_file():
        return []
    records = []
    lines = path.read_text(encoding="utf-8", errors="replace").splitlines()
    for number, line in enumerate(lines, 1):
        try:
            records.append(dict(json.loads(line)))
        except (ValueError, TypeError, RecursionError) as error:
            if number == len(lines):
                break  # still being written, or cut off
            raise ConfigError(f"{path}, line {number} is not a record: {error}") from error
    return records


def _columns(records: list[dict[str, Any]]) -> dict[str, Array]:
    names = dict.fromkeys(
        name for record in records for name, value in record.items() if is_number(value)
    )
    return {
        name: np.array([r[name] if is_number(r.get(name)) else math.nan for r in records], float)
        for name in names
    }


def is_number(value: Any) -> bool:
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return False
    return isinstance(value, float) or value.bit_length() < 1000  # more is none for a float


def _episodes(path: Path) -> dict[str, Array]:
    rows: list[list[float]] = []
    if path.is_file():
        with open(path, encoding="utf-8", errors="replace", newline="") as file:
            try:
                for row in csv.DictReader(file):
                    # Not numbers: the row that was being written when the run was killed.
                    with contextlib.suppress(TypeError, ValueError, KeyError):
                        rows.append([float(row[name]) for name in EPISODE_COLUMNS])
            except csv.Error as error:
                raise ConfigError(f"{path} is no table of episodes: {error}") from error
    table = np.array(rows, float).reshape(-1, len(EPISODE_COLUMNS))
    return {name: table[:, i] for i, name in enumerate(EPISODE_COLUMNS)}


def _summary(path: Path) -> dict[str, Any] | None:
    if not path.is_file():
        return None
    try:
        found = dict(json.loads(path.read_bytes()))
    except (ValueError, TypeError, RecursionError) as error:
        raise ConfigError(f"{path} is not a summary: {error}") from error
    return found


def _so_far(metrics: dict[str, Array], episodes: dict[str, Array]) -> dict[str, Any]:
    """A summary from the records alone: the run goes on, or nobody could write one."""

    def last(name: str) -> float:
        column = metrics.get(name, np.zeros(0))
        return float(column[-1]) if len(column) and math.isfinite(column[-1]) else 0.0

    returns = episodes["return"]
    steps, wall = int(last("env_steps")), last("wall_seconds")
    return {
        "env_steps": steps,
        "episodes": len(returns),
        "updates": int(last("update")),
        "wall_seconds": wall,
        "steps_per_second": steps / wall if wall > 0 else 0.0,
        "mean_return": float(returns[-100:].mean()) if len(returns) else None,
        "best_return": float(returns.max()) if len(returns) else None,
        "exit": "not finished",
    }


def _last_phases(metrics: dict[str, Array]) -> dict[str, float]:
    return {
        name.removeprefix("seconds/"): float(column[-1])
        for name, column in metrics.items()
        if name.startswith("seconds/") and len(column) and math.isfinite(column[-1])
    }


def command_of(experiment: Experiment) -> str:
    """The `manyhands train` line that says the same as the configuration, defaults left out."""
    import shlex

    plain = to_plain(experiment)
    defaults = _defaults(experiment)
    words = ["manyhands", "train", experiment.algorithm, "--env", experiment.run.env]
    # The number of workers is always told: its default on the command line is the machine's cores.
    words += ["--workers", str(experiment.run.workers)]
    for name, value in {**plain["run"], **plain[experiment.spec.name]}.items():
        if name in ("env", "workers", "run_dir") or value is None or value == defaults.get(name):
            continue
        flag = f"--{name.replace('_', '-')}"
        if isinstance(value, bool):
            words.append(flag if value else f"--no-{flag[2:]}")
        elif isinstance(value, dict):
            words += [flag, *(f"{k}={json.dumps(v)}" for k, v in value.items())]
        elif isinstance(value, list):
            words += [flag, *map(str, value)]
        else:
            words += [flag, str(value)]
    return shlex.join(words)


def _defaults(experiment: Experiment) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for part in (experiment.run, experiment.options):
        for f in dataclasses.fields(part):
            if f.default is not dataclasses.MISSING:
                found[f.name] = list(f.default) if isinstance(f.default, tuple) else f.default
            elif f.default_factory is not dataclasses.MISSING:
                found[f.name] = f.default_factory()
    found["rollout_length"] = getattr(type(experiment.options), "ROLLOUT_LENGTH", 256)
    return found

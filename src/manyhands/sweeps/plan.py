"""What a sweep tries: from words to runs, and the folder in which that is written down."""

from __future__ import annotations

import contextlib
import dataclasses
import difflib
import itertools
import json
import math
import operator
import os
import re
import time
import tomllib
import typing
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import tomli_w

from manyhands.config import (
    Experiment,
    RunConfig,
    from_plain,
    hints_of,
    holds_a_run,
    join_faults,
    nearest,
    of_others,
    read_toml,
    to_plain,
    validate,
)
from manyhands.config.values import coerce, plain
from manyhands.errors import ConfigError
from manyhands.experiment.folder import short_env
from manyhands.math.optimiser import make_schedule
from manyhands.viewing import scores
from manyhands.viewing.runs import SWEEP

_TABLES = ("env_kwargs", "network_kwargs")  # whose entries can be tried one by one
# What makes no setting, and what to do instead
_NOT_TRIED = {
    "seed": "type: --seeds 1..5",
    "run_dir": "each run has a folder of its own below --dir",
    "quiet": "it changes nothing that is learned",
}
_LONGEST_NAME = 100  # of a folder; file systems take 255 bytes
_PLACES = 100  # of a schedule, at which two are compared
_MOST_RUNS = 10_000  # all are checked before the first starts, and shown while they run


@dataclass(frozen=True)
class Trial:
    """One run of a sweep, before it begins."""

    setting: dict[str, Any]
    seed: int
    experiment: Experiment
    name: str  # of its folder, below the sweep's


@dataclass(frozen=True)
class Plan:
    """What a sweep tries: every setting with every combination of the grid, with every seed; or, of
    the values of a grid and of ranges, as many settings as Optuna is to draw."""

    base: Experiment
    grid: dict[str, list[Any]]
    settings: list[dict[str, Any]]
    seeds: list[int]
    metric: str
    optuna: int = 0  # settings that it draws
    ranges: dict[str, list[Any]] = field(default_factory=dict)  # [low, high], "log" after them

    def trials(self) -> list[Trial]:
        """In the order of their names: all seeds of a setting one after the other."""
        taken = set[str]()
        return [one for setting in self.combinations() for one in self.trials_of(setting, taken)]

    def trials_of(self, setting: dict[str, Any], taken: set[str]) -> list[Trial]:
        """One setting with every seed; `taken` are the names of the folders of others."""
        folder = _folder_name(setting, taken)
        names = {s: f"{folder}/seed-{s}" if folder else f"seed-{s}" for s in self.seeds}
        return [
            Trial(setting, seed, _applied(self.base, setting, seed), name)
            for seed, name in names.items()
        ]

    def combinations(self) -> list[dict[str, Any]]:
        """All settings; of a range, its ends."""
        tried = self._tried()
        values = list(itertools.product(*tried.values()))
        grid = [dict(zip(tried, row, strict=True)) for row in values]
        return [one | row for one in self.settings or [{}] for row in grid]

    def settings_to_check(self) -> list[dict[str, Any]]:
        """All; or, where Optuna has more to draw from than anybody could look at, those in which
        one option after the other takes each of its values."""
        tried = self._tried()
        if max(1, len(self.settings)) * math.prod(map(len, tried.values())) <= _MOST_RUNS:
            return self.combinations()
        first = {name: values[0] for name, values in tried.items()}
        return [first | {name: value} for name, values in tried.items() for value in values]

    def looked_at(self) -> list[Experiment]:
        """One experiment of every setting."""
        return [_applied(self.base, s, self.seeds[0]) for s in self.settings_to_check()]

    def _tried(self) -> dict[str, list[Any]]:
        return {**self.grid, **{name: ends[:2] for name, ends in self.ranges.items()}}

    def to_toml(self) -> dict[str, Any]:
        """As in sweep.toml; `manyhands sweep --config` on it repeats the sweep."""
        data = {
            name: {k: v for k, v in part.items() if v is not None}
            if isinstance(part, Mapping)
            else part
            for name, part in to_plain(self.base).items()
        }
        own = {"grid": self.grid, "settings": self.settings, "seeds": self.seeds}
        drawn = {"optuna": self.optuna, "ranges": self.ranges} if self.optuna else {}
        return {**data, "sweep": {**own, "metric": self.metric, **drawn}}


# -- from words to a plan --------------------------------------------------------------------------


def make_plan(
    base: Experiment,
    grid: Mapping[str, Sequence[Any]],
    settings: Sequence[Mapping[str, Any]] = (),
    seeds: int | Sequence[int] = 1,
    metric: str = "",
    *,
    optuna: int = 0,
    ranges: Mapping[str, Sequence[Any]] | None = None,
    typed: bool = False,
) -> Plan:
    """ConfigError with every fault. `typed`: values are text, as on the command line."""
    faults: list[str] = []
    if not isinstance(settings, Sequence) or not all(isinstance(one, Mapping) for one in settings):
        raise ConfigError(f"settings={settings!r}: a list is needed, of a table for each setting")
    between = _ranges(base, ranges or {}, typed, faults)
    values = {name: _values(base, name, grid[name], typed, faults) for name in grid}
    rows = [
        {name: value for name in row for value in _values(base, name, [row[name]], typed, faults)}
        for row in settings
    ]
    faults += _faults_of_a_search(values, settings, optuna, ranges or {}, between)
    both = [name for name in grid if any(name in row for row in settings)]
    faults += [f"{name} is in --grid and in --setting: one of them, please" for name in both]
    chosen = _seeds(base.run.seed, seeds, faults)
    runs = len(chosen) * (optuna or max(1, len(rows)) * math.prod(map(len, values.values())))
    if runs > _MOST_RUNS:
        raise ConfigError(
            f"this makes {runs:,} runs, and a sweep has at most {_MOST_RUNS:,}; "
            "try fewer values or seeds, or let --optuna N draw some of them"
        )
    faults += [f"seed {seed} is given twice" for seed in _repeated(chosen)]
    faults += [f"seed {seed}: a whole number from 0 on is needed" for seed in chosen if seed < 0]
    metric = metric or ("final" if base.run.target_return is None else "area")
    faults += _faults_of_a_metric(base, metric, grid)
    if faults:
        raise ConfigError(join_faults(faults))
    plan = Plan(base, values, rows, list(chosen), metric, optuna, between)
    if not optuna:
        _check_different(plan)
    return plan


def _faults_of_a_metric(base: Experiment, metric: Any, tried: Iterable[str]) -> list[str]:
    """What can be known before the first run has written its columns."""
    if not isinstance(metric, str):
        return [f"metric={metric!r}: text is expected: final, area or a column of metrics.jsonl"]
    near = difflib.get_close_matches(metric, ("final", "area"), 1, 0.75)
    if near and metric not in near:
        return [f"--metric {metric}: did you mean {near[0]}?"]
    if metric.startswith("eval_") and base.run.eval_every == 0 and "eval_every" not in tried:
        return [f"--metric {metric}: nothing is evaluated; add --eval-every N"]
    return []


def _ranges(
    base: Experiment, given: Mapping[str, Sequence[Any]], typed: bool, faults: list[str]
) -> dict[str, list[Any]]:
    """[low, high] or [low, high, "log"] of each option, as its type has them."""
    found = {}
    for name, ends in given.items():
        known = len(faults)
        if isinstance(ends, str) or not isinstance(ends, Sequence) or len(ends) not in (2, 3):
            faults.append(f'ranges {name}={ends!r}: (LOW, HIGH) or (LOW, HIGH, "log") is needed')
            continue
        pair = _values(base, name, list(ends[:2]), typed, faults)
        if len(faults) > known:
            continue
        if ends[2:] and ends[2] != "log":
            faults.append(f"--range {name}: {ends[2]!r} is no scale; there is log, or none")
        elif any(isinstance(x, bool) or not isinstance(x, int | float) for x in pair):
            faults.append(f"--range {name}: two numbers are needed; type: {name}=1e-4..1e-2:log")
        elif pair[0] >= pair[1] or (ends[2:] and pair[0] <= 0):
            faults.append(
                f"--range {name}: from a number to a larger one, on a log scale both above 0"
            )
        found[name] = [*pair, *ends[2:]]
    return found


def _faults_of_a_search(
    grid: Mapping[str, Sequence[Any]],
    settings: Sequence[Any],
    optuna: int,
    ranges: Mapping[str, Any],
    between: Mapping[str, Sequence[Any]],
) -> list[str]:
    faults = [f"{name} is in --grid and in --range: one of them, please" for name in grid
              if name in ranges]  # fmt: skip
    if optuna < 0:
        faults.append(f"--optuna {optuna}: at least 1 is needed")
    if ranges and not optuna:
        faults.append("--range is for Optuna to draw from; add --optuna N, or give --grid")
    if optuna and settings:
        faults.append("--optuna draws settings itself: --grid and --range, but no --setting")
    if optuna and not (grid or ranges):
        faults.append("--optuna has nothing to draw from; add --range OPTION=LOW..HIGH or --grid")
    whole = [ends for ends in between.values() if all(isinstance(end, int) for end in ends[:2])]
    if optuna and len(whole) == len(ranges) and all(grid.values()):
        there = math.prod([*map(len, grid.values()), *(high - low + 1 for low, high, *_ in whole)])
        if optuna > there and (grid or ranges):
            faults.append(
                f"--optuna {optuna}: there {'is one setting' if there == 1 else f'are {there}'} in "
                "all; leave --optuna out, and --grid tries each of them"
            )
    return faults


def _seeds(first: int, given: Any, faults: list[str]) -> Sequence[int]:
    """So many from the first on, or these."""
    if isinstance(given, int | np.integer) and not isinstance(given, bool):
        if given < 1:
            faults.append(f"--seeds {given}: at least 1 is needed")
        return range(first, first + int(given))
    if isinstance(given, range) and given:
        return given
    with contextlib.suppress(TypeError):
        chosen = [operator.index(seed) for seed in given]
        if chosen:
            return chosen
    faults.append(f"seeds={given!r}: a number of seeds (5), or a list of whole numbers, which")
    return []


def _values(base: Experiment, name: Any, given: Any, typed: bool, faults: list[str]) -> list[Any]:
    """The values of one option as its type has them; what is wrong is added to the faults."""
    if not isinstance(name, str):
        faults.append(f"{name!r} is no option: text is expected")
        return []
    table, dot, key = name.partition(".")
    hints = {**hints_of(RunConfig), **hints_of(base.spec.options)}
    if name in _NOT_TRIED:
        faults.append(f"{name} is no setting: {_NOT_TRIED[name]}")
        return []
    if not (dot and key and table in _TABLES) and name not in hints:
        other = of_others(base.spec, name)
        faults.append(other or f"there is no option {name!r}; {nearest(name, hints)}")
        return []
    if hasattr(given, "tolist"):  # numpy's
        given = given.tolist()
    if isinstance(given, (str, bytes)) or not isinstance(given, Sequence):
        faults.append(f"grid {name}={given!r}: a list of values is needed")
        return []
    if not given:
        faults.append(f"--grid {name}= has no values; type: --grid {name}=VALUE,VALUE")
    found = []
    for value in given:
        try:
            found.append(_as_typed(name, value, hints.get(name), typed))
        except ConfigError as error:
            faults.append(str(error))
    faults += [
        f"--grid {name}: {scores.value_in_words(value)} is given twice"
        for value in _repeated(found)
    ]
    return found


def _as_typed(name: str, value: Any, hint: Any, typed: bool) -> Any:
    tries = [value]
    if typed:  # 1e-3 is a number and true a truth value where the option takes one
        with contextlib.suppress(tomllib.TOMLDecodeError):
            tries.insert(0, tomllib.loads(f"value = {value}")["value"])
    faults = []
    for one in tries:
        try:
            found = plain(name, one) if hint is None else coerce(name, one, hint)
            if found is None:
                raise ConfigError(
                    f"{name}=None: sweep.toml cannot hold it; leave {name} out of one of the "
                    "settings, as in settings=[{}, {...}]"
                )
            return list(found) if isinstance(found, tuple) else found
        except ConfigError as error:
            faults.append(error)
    raise faults[0]


def _repeated(values: Iterable[Any]) -> list[Any]:
    seen: list[Any] = []
    again: list[Any] = []
    for value in values:
        (again if value in seen and value not in again else seen).append(value)
    return again


def _check_different(plan: Plan) -> None:
    """No two runs alike, and more than one of them."""
    trials = plan.trials()
    if len(trials) < 2:
        raise ConfigError(
            "this is one run, not several; add --grid OPTION=VALUE,VALUE or --seeds 5, or type: "
            "manyhands train"
        )
    seen: dict[str, Trial] = {}
    for trial in trials:
        key = json.dumps(_meant(trial.experiment), sort_keys=True)
        if key in seen:
            same = scores.label(seen[key].setting), scores.label(trial.setting)
            raise ConfigError(
                f"{same[0]} and {same[1]} are the same run (seed {trial.seed}); leave one out"
            )
        seen[key] = trial


def _meant(experiment: Experiment) -> dict[str, Any]:
    """A configuration in which schedules that are the same look the same: 1e-3, linear:0.001:0."""
    data = to_plain(experiment)
    own = data[experiment.spec.name]
    for name, hint in hints_of(experiment.spec.options).items():
        if {float, str} <= set(typing.get_args(hint)) and own[name] is not None:
            with contextlib.suppress(ConfigError):  # said with the other values
                schedule = make_schedule(own[name])
                own[name] = [schedule(place / _PLACES) for place in range(_PLACES + 1)]
    return data


def _applied(base: Experiment, setting: Mapping[str, Any], seed: int) -> Experiment:
    data = to_plain(base)
    run, own = dict(data["run"]), dict(data[base.spec.name])
    for name, value in setting.items():
        table, dot, key = name.partition(".")
        if dot:
            run[table] = run[table] | {key: value}
        else:
            (run if name in run else own)[name] = value
    return from_plain(
        {"algorithm": base.algorithm, "run": {**run, "seed": seed}, base.spec.name: own}
    )


def _folder_name(setting: Mapping[str, Any], taken: set[str]) -> str:
    if not setting:
        return ""
    text = scores.label(setting).replace(", ", ",")
    text = re.sub(r"[^\w=.,+-]", "-", text)[:_LONGEST_NAME].strip(".")
    name, again = text, 2
    while name in taken:  # two that differ in what a folder cannot be called
        name, again = f"{text}-{again}", again + 1
    taken.add(name)
    return name


def without_needless_processes(base: Experiment, tried: Iterable[str]) -> Experiment:
    """A run of one worker needs no process beside it, unless somebody has asked for one."""
    run = base.run
    if run.workers == 1 and run.engine == "local" and not {"workers", "engine"} & set(tried):
        return dataclasses.replace(base, run=dataclasses.replace(run, engine="inline"))
    return base


def check(plan: Plan, folder: Path) -> None:
    """ConfigError unless every run can start; a fault of all is said once."""
    faults: dict[str, list[str]] = {}
    combinations = plan.settings_to_check()
    for setting in combinations:
        trial = _applied(plan.base, setting, plan.seeds[0])
        run = dataclasses.replace(trial.run, run_dir=str(folder / "seed"))
        found = validate.faults(dataclasses.replace(trial, run=run))
        if run.start_from and not found:
            from manyhands.policy import check_start  # which needs torch

            try:
                check_start(trial)
            except ConfigError as error:
                found.append(str(error))
        for fault in found:
            fault = fault.replace(f"run_dir {folder / 'seed'}", f"dir {folder}")
            fault = fault.replace("--run-dir", "--dir")
            faults.setdefault(fault, []).append(scores.label(setting))
    said = [
        fault if len(whose) == len(combinations) else f"{'; '.join(whose)}: {fault}"
        for fault, whose in faults.items()
    ]
    if said:
        raise ConfigError(join_faults(said))


# -- the folder ------------------------------------------------------------------------------------


def default_dir(base: Experiment) -> Path:
    """sweeps/ENV/ALGORITHM-TIME, a name that is not taken yet."""
    env = re.sub(r"[^\w.-]", "-", short_env(base.run.env)).strip(".") or "env"
    name = f"{base.spec.name}-{time.strftime('%Y%m%d-%H%M%S')}"
    parent = Path("sweeps", env)
    tries = [parent / name, *(parent / f"{name}-{i}" for i in range(2, 1000))]
    return next(path for path in tries if not path.exists())


def load_file(path: str | os.PathLike[str]) -> tuple[Experiment, dict[str, Any]]:
    """The configuration in a file, and its table [sweep]; that of a run has none."""
    data = read_toml(path)
    own = data.pop("sweep", {})
    kinds: dict[str, Any] = {
        "grid": Mapping,
        "settings": list,
        "seeds": (int, list),
        "metric": str,
        "optuna": int,
        "ranges": Mapping,
    }
    try:
        experiment = from_plain(data)
        if not isinstance(own, Mapping):
            raise ConfigError(f"sweep={own!r}: a table [sweep] is expected")
        faults = [f"[sweep] has no {key!r}; {nearest(key, kinds)}" for key in own.keys() - kinds]
        wrong = [key for key in kinds.keys() & own if not isinstance(own[key], kinds[key])]
        faults += [f"[sweep] {key}={own[key]!r} is of the wrong kind" for key in wrong]
        if faults:
            raise ConfigError(join_faults(faults))
    except ConfigError as error:
        raise ConfigError(f"{os.fspath(path)}: {error}") from error
    return experiment, dict(own)


def load_plan(folder: Path) -> Plan:
    """The plan that a folder was made for; ConfigError when there is none."""
    path = folder / SWEEP
    if not path.is_file():
        raise ConfigError(f"{folder} holds no {SWEEP}: it is not the folder of a sweep")
    base, own = load_file(path)
    try:
        return Plan(base, **own)
    except TypeError as error:
        raise ConfigError(f"{path} is not as a sweep has left it: {error}") from error


def claim(folder: Path, plan: Plan) -> bool:
    """Write the plan into a new folder; False when it holds this very sweep already."""
    if holds_a_run(folder):
        raise ConfigError(f"{folder} holds a run; give the sweep a folder of its own: --dir")
    if (folder / SWEEP).exists():
        if _essence(load_plan(folder)) != _essence(plan):
            raise ConfigError(
                f"{folder} belongs to another sweep; to continue that one, type: manyhands resume "
                f"{folder}; for this one, give another --dir"
            )
        return False
    trials = [] if plan.optuna else plan.trials()
    there = next((t.name for t in trials if (folder / t.name).exists()), None)
    if there is not None:
        raise ConfigError(f"{folder / there} is there already; give the sweep another --dir")
    beside = folder / f"{SWEEP}.tmp"
    beside.write_bytes(tomli_w.dumps(plan.to_toml()).encode())
    os.replace(beside, folder / SWEEP)
    return True


def _essence(plan: Plan) -> dict[str, Any]:
    """All but what may change between the parts of one sweep."""
    data = plan.to_toml()
    own = {k: v for k, v in data["sweep"].items() if k != "metric"}
    return {**data, "sweep": own, "run": {k: v for k, v in data["run"].items() if k != "quiet"}}

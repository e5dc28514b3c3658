"""`manyhands train ALGORITHM --env ID [options]`: every option is a field of a dataclass.

`manyhands resume DIR`: go on with a run or a sweep that was stopped, exactly where it stood.
`manyhands sweep ALGORITHM --env ID --grid OPTION=VALUE,VALUE --seeds N`: several runs, compared.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import difflib
import os
import tomllib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import MISSING, field
from types import NoneType
from typing import Annotated, Any, get_args, get_origin

from manyhands import support
from manyhands.algorithms.registry import SPECS, AlgorithmSpec, spec_of
from manyhands.config import (
    GROUPS,
    USUAL,
    Experiment,
    RunConfig,
    build,
    default_strategy,
    help_of,
    hints_of,
    in_words,
    join_faults,
    load_recipe,
    load_toml,
    names_of,
    of_others,
    usual,
)
from manyhands.config.values import Workers
from manyhands.engines import joined
from manyhands.errors import ConfigError
from manyhands.strategies import registry as strategies

HELP = """\
usage: manyhands train ALGORITHM --env ID [options]
       manyhands train --recipe NAME [options]           a tuned run: `manyhands recipes` lists them
       manyhands train --config FILE.toml [options]      such as config.toml of an earlier run
       manyhands train ... --slurm FILE [--nodes M]      write a batch file for SLURM instead

Train a policy. Every number is for all workers together, so that more workers make a run faster
and change nothing of what it learns.

algorithms (`manyhands train ALGORITHM --help` shows all options of one):
{algorithms}
  one of your own is given as package.module:SPEC (examples/own_algorithm.py)

strategies, by --strategy (with one worker: {alone}):
{strategies}

engines, by --engine: {engines}; `manyhands support` says what goes with what

examples:
  manyhands train ppo --env CartPole-v1                        on all cores
  manyhands train --recipe ppo-cartpole --seed 2
  manyhands train ppo --env CartPole-v1 -n 4 --target-return 475 --learning-rate linear:1e-3
  manyhands train a2c --env Pendulum-v1 --strategy gather --engine ray --normalize-observations
  manyhands train a2c --env CartPole-v1 -n 4 --strategy gradient_server           A3C
  manyhands train impala --env CartPole-v1 -n 4 --learners 2                      2 actors
  manyhands train trpo --env mypackage.envs:make_env --env-kwargs size=5 hard=true
  manyhands train --config runs/CartPole-v1/ppo-allreduce/1-20250101-120000/config.toml --seed 2
"""

_SOURCES = {
    "--config": "a file: --config FILE.toml",
    "--recipe": "a name: --recipe NAME; `manyhands recipes` lists them",
}
_GROUP_HELP = {
    "run": "What to train, for how long, and where the results go.",
    "worker": "Who works, and how they talk.",
    "batch": "What one update learns from: num_envs × rollout_length steps.",
    "asynchronous": "For {asynchronous}: nobody waits for the slowest.",
    "environment": "How environments are made and seen.",
    "network": "Policy and value function.",
}


def train(argv: list[str]) -> int:
    if not argv or argv[0] in ("-h", "--help"):
        print(teach())
        raise SystemExit(0 if argv else 2)
    argv, slurm = _slurm(argv)
    with joined.main_speaks():
        experiment = parse(argv)
    from manyhands.config import validate

    validate.check(experiment)
    if slurm:
        return _for_slurm(argv, experiment, **slurm)
    from manyhands.run import train_experiment

    train_experiment(experiment)
    return 0


def _slurm(argv: list[str]) -> tuple[list[str], dict[str, str]]:
    """The words without --slurm FILE and --nodes M, and these two."""
    words, left, found = list(argv), [], {}
    while words:
        option, equals, value = words.pop(0).partition("=")
        if option not in ("--slurm", "--nodes"):
            left.append(option + equals + value)
        elif not equals and not words:
            raise ConfigError(f"{option} needs a value: --slurm FILE --nodes M")
        else:
            found[option[2:]] = value if equals else words.pop(0)
    if "nodes" in found and "slurm" not in found:
        raise ConfigError(f"--nodes {found['nodes']} goes with --slurm FILE")
    return left, found


def _for_slurm(argv: list[str], experiment: Experiment, slurm: str, nodes: str = "1") -> int:
    from manyhands.cli import slurm as batch

    run, words = experiment.run, list(argv)
    try:
        several = whole_number(nodes)
    except ValueError as error:
        raise ConfigError(f"--nodes {error}") from None
    for place, word in enumerate(argv):  # it is said once, for resume too
        if word.split("=")[0] in ("--run-dir", "--run_dir"):
            words[place : place + (1 if "=" in word else 2)] = []
    if not any(word.split("=")[0] in ("--workers", "-n") for word in argv):
        words += ["--workers", str(run.workers)]
    command = ("manyhands", "train", *words)
    return batch.write(
        batch.Batch(slurm, run.engine, run.workers, several, command, True,
                    run.run_dir, run.quiet)
    )  # fmt: skip


def parse(
    argv: list[str],
    command: str = "train",
    load: Callable[[str], Experiment] = load_toml,
    workers: int | None = None,
) -> Experiment:
    """The experiment that the words stand for; tyro leaves with code 2 if they are not options.

    `load` reads the file of --config; `workers` is what is meant by none, instead of all cores.
    """
    import tyro

    algorithm, source, words = _split(argv, command)
    if any(word.split("=")[0] == "--roles" for word in words):
        raise ConfigError(
            "--roles is an option of `manyhands launch`; `manyhands train` counts with --workers N "
            "--learners M (the rest are actors), or --reducers M with gradient_server"
        )
    base = None
    if source is not None:
        option, name = source
        base = load(name) if option == "--config" else load_recipe(name)
        if algorithm and algorithm != base.algorithm:
            raise ConfigError(f"{name} configures {base.algorithm}, but {algorithm} was asked for")
        algorithm = base.algorithm
    spec = spec_of(algorithm)
    names = (word.split("=")[0].lstrip("-").replace("-", "_") for word in words if word[:2] == "--")
    if faults := [said for name in names if (said := of_others(spec, name, "--"))]:
        raise ConfigError(join_faults(faults))
    given = tyro.cli(
        _options(spec, base),
        args=words,
        prog=f"manyhands {command} {algorithm}",
        description=f"{spec.about}\n\n--recipe NAME takes what is not "
        "given here from a tuned run (`manyhands recipes` lists them), --config FILE.toml from a "
        "file, such as config.toml of an earlier run.",
        config=(tyro.conf.OmitArgPrefixes,),
    )
    values: dict[str, Any] = {}
    for group in dataclasses.fields(given):
        part = getattr(given, group.name)
        values |= {name: getattr(part, name) for name in names_of(type(part))}
    if values["workers"] is None:
        values["workers"] = workers or joined.defaults(values["engine"]).get("workers")
    if values["workers"] is None:
        strategy = values["strategy"] or default_strategy(algorithm, os.cpu_count() or 1)
        run = build(algorithm, **values | {"workers": 1, "strategy": strategy}).run
        values["workers"] = default_workers(run)
    return build(algorithm, **values)


def default_workers(run: RunConfig) -> int:
    """Those that act, and those that only learn or serve on top."""
    strategy = strategies.spec_of(run.strategy)
    return 1 if strategy.one_worker else acting_workers(run.num_envs) + strategy.not_acting(run)


def acting_workers(num_envs: int) -> int:
    """One for each core, or the nearest smaller number that the environments go into."""
    cores = os.cpu_count() or 1
    return next((n for n in range(cores, 0, -1) if num_envs >= n and num_envs % n == 0), 1)


def _split(argv: list[str], command: str) -> tuple[str, tuple[str, str] | None, list[str]]:
    """Algorithm (or ""), --config or --recipe with its value, and the words that are left."""
    words, left = list(argv), []
    source: tuple[str, str] | None = None
    algorithm = words.pop(0) if not words[0].startswith("-") else ""
    while words:
        word = words.pop(0)
        option, equals, value = word.partition("=")
        if option not in _SOURCES:
            left.append(word)
        elif source is not None:
            raise ConfigError(f"{source[0]} {source[1]} and {option}: one of them, please")
        elif not equals and not words:
            raise ConfigError(f"{option} needs {_SOURCES[option]}")
        else:
            source = option, value if equals else words.pop(0)
    if not algorithm and source is None:
        raise ConfigError(
            f"the algorithm comes first: manyhands {command} ppo {' '.join(argv)}; there are "
            f"{', '.join(SPECS)}"
        )
    return algorithm, source, left


def teach() -> str:
    """What `manyhands train --help` says."""
    rows = "\n".join(f"  {spec.name:<10} {spec.about}" for spec in SPECS.values())
    wide = max(map(len, strategies.SPECS))
    return HELP.format(
        algorithms=rows,
        alone=strategies.default_of("rollout", workers=1),
        strategies="\n".join(
            f"  {spec.name:<{wide}}  {spec.about}{_default_of(spec.name)}"
            for spec in strategies.SPECS.values()
        ),
        engines=", ".join(support.ENGINES),
    )


def _default_of(strategy: str) -> str:
    """Whose default a strategy is with several workers, in brackets."""
    whose = [name for name in SPECS if default_strategy(name, 2) == strategy]
    return f" (default of {in_words(whose)})" if whose else ""


# -- from the dataclasses to tyro's ----------------------------------------------------------------


def _options(spec: AlgorithmSpec, base: Experiment | None) -> type[Any]:
    """A dataclass of groups, each a dataclass of flags; defaults are the base's where given."""
    import tyro

    name, own = spec.name, spec.options
    run = base.run if base else None
    asynchronous = [s.name for s in strategies.SPECS.values() if not s.synchronous]
    about = {k: v.format(asynchronous=", ".join(asynchronous)) for k, v in _GROUP_HELP.items()}
    groups = {
        name: _group(name, RunConfig, fields, run, about[name], own)
        for name, fields in GROUPS.items()
    }
    what = f"Options of {name} itself."
    groups[name] = _group(name, own, tuple(names_of(own)), base.options if base else None, what)
    # With the help said here tyro does not look for it in source that there is none of: 60 ms.
    rows = [(name, Annotated[g, tyro.conf.arg(help=g.__doc__)]) for name, g in groups.items()]
    return dataclasses.make_dataclass("Options", rows)


def _group(
    title: str,
    cls: type[Any],
    names: tuple[str, ...],
    values: Any,
    description: str,
    algorithm: type[Any] | None = None,
) -> type[Any]:
    fields = {f.name: f for f in dataclasses.fields(cls)}
    hints, texts = hints_of(cls), help_of(cls)
    rows: list[Any] = []
    for name in names:
        hint, flag = hints[name], _flag(name, texts.get(name, ""), values)
        default = _default(fields[name], values)
        if cls is RunConfig and name in USUAL:
            (hint,) = (kind for kind in get_args(hint) if kind is not NoneType)
            default = usual(algorithm or cls, name) if default is None else default
        kind = _flag_type(hint)
        # A factory also for plain values: dataclasses refuse a dict as a default.
        rest = () if default is MISSING else (field(default_factory=_always(default)),)
        rows.append((name, Annotated[kind, flag], *rest))
    made = dataclasses.make_dataclass(f"{title.title()}Flags", rows, frozen=True, kw_only=True)
    made.__doc__ = description
    return made


def _default(f: dataclasses.Field[Any], values: Any) -> Any:
    launched = joined.defaults(None)
    if f.name == "engine" and launched:  # a file says how it ran then
        return launched["engine"]
    if values is not None:
        return getattr(values, f.name)
    if f.name == "workers":
        return None  # the number of cores, when all else is known
    return f.default if f.default_factory is MISSING else f.default_factory()


def _always(value: Any) -> Callable[[], Any]:
    return lambda: value


def _flag(name: str, text: str, values: Any) -> Any:
    import tyro

    more: dict[str, Any] = {}
    if name == "workers":
        more = {"aliases": ["-n"], "metavar": "N"}
        if values is None:
            cores = os.cpu_count() or 1
            more["help_behavior_hint"] = f"(default: one for each core, {cores} here)"
    elif name == "env":
        more = {"metavar": "ID"}
    elif name == "target_return":
        more = {"metavar": "X", "help_behavior_hint": "(default: none)"}
    return tyro.conf.arg(help=text, **more)


def _flag_type(hint: Any) -> Any:
    """The field's type, with our own reading of whole numbers, schedules and tables."""
    if hint is Workers:
        return _read_by("N", 1, lambda words: number_of_workers(words[0]))
    if hint is int:
        return _read_by("N", 1, lambda words: whole_number(words[0]))
    if float in get_args(hint) and str in get_args(hint):
        return _read_by("X|SCHEDULE", 1, lambda words: _number_or_text(words[0]))
    if get_origin(hint) is dict:
        return _read_by("[NAME=VALUE ...]", "*", table_of)
    return hint


def _read_by(metavar: str, count: Any, read: Callable[[list[str]], Any]) -> Any:
    from tyro.constructors import PrimitiveConstructorSpec

    spec: Any = PrimitiveConstructorSpec(
        nargs=count,
        metavar=metavar,
        instance_from_str=read,
        is_instance=lambda value: True,  # defaults are our own
        str_from_instance=_words_of,
    )
    return Annotated[Any, spec]


def whole_number(text: str) -> int:
    """100000, 100_000 and 1e5 are the same; ValueError for what is not whole."""
    try:
        return int(text)
    except ValueError:
        value = _number_or_text(text)
    if isinstance(value, str) or not value.is_integer():
        raise ValueError(f"{text} is not a whole number")
    return int(value)


def _argument(read: Callable[[str], Any]) -> Callable[[str], Any]:
    """For argparse, which keeps the words of an error of its own only."""

    def argument(text: str) -> Any:
        try:
            return read(text)
        except ValueError as error:
            raise argparse.ArgumentTypeError(str(error)) from None

    return argument


def number_of_workers(text: str) -> Workers:
    """A whole number, or two: 2..16."""
    least, dots, most = text.partition("..")
    if not dots:
        return Workers(whole_number(text))
    return Workers(whole_number(most), whole_number(least))


def _number_or_text(text: str) -> float | str:
    try:
        return float(text)
    except ValueError:
        return text


def table_of(words: list[str]) -> dict[str, Any]:
    """["size=5", "hard=true", "name=maze"] -> values as TOML reads them, else text."""
    found: dict[str, Any] = {}
    for word in words:
        name, equals, text = word.partition("=")
        if not name or not equals:
            raise ValueError(f"{word} is not of the form NAME=VALUE")
        try:
            found[name] = tomllib.loads(f"value = {text}")["value"]
        except tomllib.TOMLDecodeError:
            found[name] = text
    return found


def _words_of(value: Any) -> list[str]:
    """A default as it would be typed."""
    if isinstance(value, Mapping):
        return [f"{name}={part}" for name, part in value.items()] or ["none"]
    return [str(value)]


# -- resume ----------------------------------------------------------------------------------------

_RESUME = """\
Go on with a run from its newest checkpoint: weights, optimiser, random numbers, normalisers and the
running episodes are as they were, and metrics and curves continue in the same folder. A run that
was stopped and resumed ends with the weights of one that was not. Of a sweep, all runs go on that
have not finished.

examples:
  manyhands resume runs/CartPole-v1/ppo-allreduce/1-20250101-120000
  manyhands resume runs/mine --steps 2e6            train on, to two million steps in all
  manyhands resume runs/mine --target-return none   train on although it is solved
  manyhands resume runs/mine --workers 4            on four workers, however many there were
  mpiexec -n 4 manyhands resume runs/mine           the same on those that a launcher has started
  manyhands resume sweeps/mine --at-once 2          a sweep: what has finished is not repeated
"""


def resume(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(
        prog="manyhands resume",
        description=_RESUME,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        argument_default=argparse.SUPPRESS,  # what is not given stays as it was
    )
    add = parser.add_argument
    add("run_dir", metavar="DIR", help="the folder of the run, or of the sweep")
    add(
        "--steps",
        type=_argument(whole_number),
        metavar="N",
        help="environment steps of the whole run",
    )
    add(
        "--target-return",
        type=_target,
        metavar="X",
        help="end as solved at this mean return; none: not before the last step",
    )
    add(
        "-n",
        "--workers",
        type=_argument(number_of_workers),
        metavar="N",
        help="another number of workers: gather and allreduce learn the same, but for rounding",
    )
    add("--engine", help="how workers run and talk")
    add("--timeout", type=float, metavar="S", help="seconds that a wait for workers may take")
    add("--checkpoint-seconds", type=float, metavar="S", help="seconds between checkpoints")
    add("--quiet", action="store_true", help="print nothing but errors")
    add(
        "--at-once",
        type=_argument(whole_number),
        metavar="N",
        help="of a sweep: runs at the same time",
    )
    add("--ray", metavar="HOST:PORT", help="of a sweep: train on the nodes of this Ray cluster")
    add("--metric", metavar="NAME", help="of a sweep: what settings are ranked by")
    options: dict[str, Any] = vars(parser.parse_args(argv))
    run_dir = options.pop("run_dir")
    if os.path.isfile(os.path.join(run_dir, "sweep.toml")):
        return _resume_sweep(run_dir, options)
    if given := [name for name in ("at_once", "ray", "metric") if name in options]:
        raise ConfigError(
            f"--{given[0].replace('_', '-')} is for sweeps, and {run_dir} is not the folder of one"
        )

    from manyhands import run

    result = run.resume(run_dir, **options)
    if not result.worked:
        with joined.main_speaks():
            _say_finished(run_dir, result.summary)
    return 0


def _say_finished(run_dir: str, summary: dict[str, Any]) -> None:
    done = f"{summary['env_steps']:,} steps"
    if summary["solved"]:
        print(
            f"{run_dir} is solved, after {done}. To train longer, type: manyhands resume {run_dir} "
            "--target-return X (a higher one, or none)"
        )
    else:
        print(
            f"{run_dir} has finished its {done}. To train longer, type: manyhands resume {run_dir} "
            f"--steps {2 * summary['env_steps']}"
        )


def _target(text: str) -> float | None:
    return None if text == "none" else float(text)


# -- sweep -----------------------------------------------------------------------------------------

_SWEEP = """\
usage: manyhands sweep ALGORITHM --env ID --grid OPTION=VALUE,VALUE [...] --seeds N [options]
       manyhands sweep --recipe NAME --grid ...
       manyhands sweep --config FILE.toml        with a table [sweep], such as an earlier sweep.toml

Train with every combination of the grid and every seed, and compare what came of it. Each run is an
ordinary one, in a process and a folder of its own: plot, report, watch, evaluate and resume know
it. A run that fails does not stop the others. Ctrl-C saves all that run; a sweep that was stopped
or killed goes on with: manyhands resume DIR

  --grid OPTION=VALUE,VALUE     all combinations of all grids; any option of `manyhands train`, and
                                env_kwargs.NAME; lists in brackets: "hidden=[64,64],[128,128]"
  --setting OPTION=VALUE ...    one more setting, with all of the grid; may be given several times
  --optuna N                    N settings that Optuna draws from --grid and --range, not all
                                combinations; those that do worse than others are given up
  --range OPTION=LOW..HIGH      numbers for Optuna to draw from; LOW..HIGH:log on a log scale
  --seeds N | A..B | A,B,C      how many, from --seed on, or which (default: 1)
  --at-once N                   runs at the same time (default: cores / workers of a run)
  --ray HOST:PORT               train on the nodes of this Ray cluster, as many runs at once as its
                                CPUs can take; `auto` for the cluster that runs here. The nodes
                                share the disk that --dir is on
  --dir DIR                     folder of the sweep (default: sweeps/ENV/ALGORITHM-TIME)
  --metric NAME                 what settings are ranked by: final (mean return of the last 100
                                episodes), area (mean height of the learning curve; default with
                                --target-return), or a column of metrics.jsonl
  and all options of `manyhands train ALGORITHM --help`; a run has one worker unless -n says more

At the end: a table with the interquartile mean over seeds and its 95 % interval, also in results.md
and results.json, and curves.png.

examples:
  manyhands sweep ppo --env CartPole-v1 --steps 50000 --grid learning_rate=1e-3,3e-4 --seeds 5
  manyhands sweep --recipe ppo-cartpole -n 1 --strategy single --seeds 1..10 --dir sweeps/cartpole
  manyhands sweep dqn --env CartPole-v1 --setting n_step=1 --setting n_step=3 gamma=0.98 --seeds 3
  manyhands sweep ppo --env CartPole-v1 --optuna 20 --range learning_rate=1e-4..1e-2:log
  manyhands sweep --config sweeps/cartpole/sweep.toml --dir sweeps/again
"""
_OWN = ("--grid", "--setting", "--range", "--optuna", "--seeds", "--at-once", "--metric", "--ray")
_MOST_SEEDS = 100_000  # that are looked at; a sweep refuses fewer
_OF_A_SWEEP = ("at_once", "ray", "metric", "quiet")  # what may be another when one goes on


def sweep(argv: list[str]) -> int:
    if not argv or argv[0] in ("-h", "--help"):
        print(_SWEEP)
        raise SystemExit(0 if argv else 2)
    own, words = _own_options(argv)
    _check_words(words)
    if not words:
        raise ConfigError("the algorithm comes first: manyhands sweep ppo --env ID --grid ...")
    from manyhands import sweeps

    filed: dict[str, Any] = {}

    def load(path: str) -> Experiment:
        experiment, table = sweeps.load_file(path)
        filed.update(table)
        return experiment

    base = parse(words, "sweep", load, workers=1)
    grid = {
        name: split_values(text) for name, text in _choices([w for one in own.grid for w in one])
    }
    settings = [dict(_choices(words, "setting")) for words in own.setting]
    ranges = {n: _ends(n, text) for n, text in _choices([w for r in own.range for w in r], "range")}
    if not any(word.split("=")[0] == "--engine" for word in words):
        base = sweeps.without_needless_processes(base, [*grid, *ranges, *filed.get("grid", {})])
    typed = bool(grid or settings or ranges)
    plan = sweeps.make_plan(
        base,
        grid if typed else filed.get("grid", {}),
        settings if typed else filed.get("settings", ()),
        _seeds(own.seeds) if own.seeds else filed.get("seeds", 1),
        own.metric or filed.get("metric", ""),
        optuna=own.optuna or filed.get("optuna", 0),
        ranges=ranges if typed else filed.get("ranges", {}),
        typed=typed,
    )
    return _exit_code(sweeps.begin(plan, own.dir, own.at_once, own.ray))


def _own_options(argv: list[str]) -> tuple[argparse.Namespace, list[str]]:
    """The sweep's own, and the words that are left for `train`."""
    parser = argparse.ArgumentParser(
        prog="manyhands sweep", usage="manyhands sweep --help", add_help=False, allow_abbrev=False
    )
    add = parser.add_argument
    add("--grid", action="append", nargs="+", default=[])
    add("--setting", action="append", nargs="+", default=[])
    add("--range", action="append", nargs="+", default=[])
    add("--optuna", type=_argument(whole_number), default=0)
    add("--seeds", default="")
    add("--at-once", type=_argument(whole_number), default=0)
    add("--ray", default="")
    add("--dir", default="")
    add("--metric", default="")
    return parser.parse_known_args(argv)


def _check_words(words: list[str]) -> None:
    """What `train` would take, or would say nothing helpful about."""
    known = {*names_of(RunConfig), *(n for spec in SPECS.values() for n in names_of(spec.options))}
    for word in words:
        name = word.split("=")[0]
        if name in ("--run-dir", "--run_dir"):
            raise ConfigError(f"{name} is for one run; the folder of a sweep is --dir DIR")
        near = difflib.get_close_matches(name, _OWN, 1, 0.7) if name.startswith("--") else []
        if near and name[2:].replace("-", "_") not in known:
            raise ConfigError(f"there is no option {name}; did you mean {near[0]}?")


def _ends(name: str, text: str) -> list[str]:
    """LOW..HIGH or LOW..HIGH:log"""
    numbers, colon, scale = text.partition(":")
    ends = numbers.split("..")
    if len(ends) != 2 or not all(ends) or (colon and scale != "log"):
        raise ConfigError(f"--range {name}={text}: LOW..HIGH or LOW..HIGH:log is expected")
    return [*ends, *([scale] if scale else [])]


def _resume_sweep(folder: str, options: dict[str, Any]) -> int:
    from manyhands import sweeps

    wrong = [f"--{name.replace('_', '-')}" for name in options if name not in _OF_A_SWEEP]
    if wrong:
        raise ConfigError(
            f"{in_words(wrong)} cannot change in a sweep that goes on; what can: --at-once, "
            "--ray, --metric, --quiet. A single run of it takes more: manyhands resume "
            "DIR/SETTING/seed-N"
        )
    return _exit_code(sweeps.resume(folder, **options))


def _exit_code(swept: Any) -> int:
    return 1 if swept.failed else 0


def _choices(words: list[str], kind: str = "grid") -> list[tuple[str, str]]:
    """["learning_rate=1e-3,3e-4"] -> names and what is after the sign; no name twice."""
    found = [_choice(word, kind) for word in words]
    names = [name for name, _ in found]
    if again := [name for name in dict.fromkeys(names) if names.count(name) > 1]:
        several = "; type all its values once, with commas" if kind == "grid" else ""
        raise ConfigError(f"{again[0]} is given twice{several}")
    return found


_FORMS = {"grid": "VALUE,VALUE", "setting": "VALUE", "range": "LOW..HIGH"}


def _choice(word: str, kind: str) -> tuple[str, str]:
    name, equals, text = word.partition("=")
    if not name or not equals:
        raise ConfigError(
            f"{word or 'an empty word'} is not of the form OPTION=VALUE; type: --{kind} "
            f"OPTION={_FORMS[kind]}"
        )
    return name.replace("-", "_"), text


def split_values(text: str) -> list[str]:
    """Split at commas, but for those in brackets and quotes."""
    found, depth, quote = [""], 0, ""
    for c in text:
        if c == "," and not depth and not quote:
            found.append("")
            continue
        if c in "'\"" and quote in ("", c):
            quote = "" if quote else c
        elif not quote:
            depth += (c in "[{(") - (c in "]})")
        found[-1] += c
    return [one.strip() for one in found] if text.strip() else []


def _seeds(text: str) -> int | Sequence[int]:
    """5 is a number of seeds; 1..5, 3,7 and 1..3,9 are seeds."""
    with contextlib.suppress(ValueError):
        if text.isdecimal():
            return int(text)
        parts = []
        for part in text.split(","):
            first, dots, last = part.partition("..")
            parts.append(range(int(first), int(last if dots else first) + 1))
        if len(parts) == 1 and parts[0]:
            return parts[0]
        if all(parts):
            return [seed for part in parts for seed in part[:_MOST_SEEDS]]
    raise ConfigError(f"--seeds {text}: a number of seeds (5), or which: 1..5 or 1,2,7")

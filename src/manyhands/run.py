"""`train` and `resume`: from a configuration to a run folder. Here all parts meet."""

from __future__ import annotations

import functools
import json
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from manyhands import devices, seeding, streams
from manyhands.config import (
    Experiment,
    RunConfig,
    build,
    from_plain,
    load_recipe,
    load_toml,
    to_plain,
)
from manyhands.config.resumed import changed, said_of_workers
from manyhands.config.validate import check
from manyhands.engines import calls, inline, joined, stopping
from manyhands.engines.attach import attach
from manyhands.engines.launch import Job
from manyhands.engines.launch import run as run_job
from manyhands.engines.recovery import Recovery
from manyhands.errors import ConfigError, Stopped, WorkerError
from manyhands.experiment import checkpoint
from manyhands.experiment.folder import RunFolder, RunLock, default_run_dir

# What every worker of a run imports, whatever it is: the launcher has it imported once for all.
PRELOAD = ("torch", "manyhands.strategies.progress", "manyhands.viewing.evaluator")

# What only one process may decide: the folder, and the configuration with the checkpoint to resume
# from, or the summary of a run that has nothing left to do.
Plan = dict[str, Any]
Start = Callable[[dict[str, Any], dict[str, Any] | None], dict[str, Any]]


@dataclass(frozen=True, repr=False)
class Result:
    """How a run ended. It can stand for its folder: `evaluate(result)`, `plot([one, two])`."""

    run_dir: Path
    summary: dict[str, Any]
    worked: bool = True  # False: the run had ended before, and there was nothing left to do

    def __fspath__(self) -> str:
        return str(self.run_dir)

    def __repr__(self) -> str:
        shown = ("exit", "mean_return", "env_steps", "episodes", "wall_seconds")
        facts = [f"{name}={self.summary[name]!r}" for name in shown]
        return f"Result({str(self.run_dir)!r}, {', '.join(facts)})"

    def _repr_html_(self) -> str:
        """What a notebook shows."""
        from manyhands.viewing.report import card

        return card(self.run_dir)

    @property
    def solved(self) -> bool:
        return bool(self.summary["solved"])

    @property
    def mean_return(self) -> float | None:
        """Of the last 100 finished episodes."""
        mean: float | None = self.summary["mean_return"]
        return mean


class Paused(Stopped):
    """A signal ended the run, and `resume(run_dir)` goes on with it."""

    def __init__(self, number: int, run_dir: str, env_steps: int) -> None:
        super().__init__(number)
        self.run_dir, self.env_steps = run_dir, env_steps


def train(algorithm: str = "", *, recipe: str = "", **options: Any) -> Result:
    """Train a policy; `options` are the names that `manyhands train ALGORITHM --help` lists.

        result = train("ppo", env="CartPole-v1", workers=2, steps=100_000)
        result = train(recipe="ppo-cartpole", seed=2)     # one of `manyhands recipes`

    `env` and `network` may be a class or function of yours: with engine="inline" any, on other
    engines one that a worker process can find by its name.

    Raises ConfigError with all faults of the configuration at once, before anything starts.
    """
    _not_in_a_worker("train")
    options = with_names(options)
    options = joined.defaults(options.get("engine")) | options
    if bool(algorithm) == bool(recipe):
        raise ConfigError('give an algorithm, train("ppo", ...), or a recipe, train(recipe=NAME)')
    if recipe:
        base = load_recipe(recipe)
        plain = to_plain(base)
        algorithm, options = base.algorithm, plain["run"] | plain[base.spec.name] | options
    with _named_hooks(options) as options:
        experiment = build(algorithm, **options)
        with streams.given_back():  # environments are made, and may draw, when they are looked at
            check(experiment)
        return train_experiment(experiment)


@contextmanager
def _named_hooks(options: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Hooks travel by name: a class by its own. Where the workers are this process, any object
    will do, and is found by a name for as long as the run goes on."""
    hooks, engine = options.get("hooks", ""), options.get("engine", "local")
    if hooks is None or isinstance(hooks, str):
        yield options | ({"hooks": ""} if hooks is None else {})
        return
    if engine != "inline" and joined.place_in(engine) is None:
        if not isinstance(hooks, type):
            kind = type(hooks).__name__
            raise ConfigError(
                f"hooks={hooks!r} is an object of this process, and with engine={engine!r} the "
                f"main worker is another; give the class, hooks={kind}, or engine='inline'"
            )
        yield options | {"hooks": calls.name_of(hooks)}
        return
    with calls.remembered(hooks) as name:
        yield options | {"hooks": name}


def with_names(options: dict[str, Any], *, elsewhere: bool = False) -> dict[str, Any]:
    """Classes and functions as their names: that is how they travel, and stand in config.toml.

    Where the workers are this process, whatever has no name elsewhere is found here by one;
    `elsewhere`: they are not, whatever the engine.
    """
    env = options.get("env")
    if isinstance(env, functools.partial):
        if env.args:
            raise ConfigError("env=partial(...): give its arguments by name, partial(Env, size=3)")
        options = options | {"env": env.func}
        options["env_kwargs"] = env.keywords | options.get("env_kwargs", {})
    engine = (joined.defaults(options.get("engine")) | options).get("engine", "local")
    here = not elsewhere and (engine == "inline" or joined.place_in(engine) is not None)
    named = calls.remember if here else calls.name_of
    return {
        option: named(value) if option in ("env", "network") and callable(value) else value
        for option, value in options.items()
    }


def resume(run_dir: str | os.PathLike[str], **options: Any) -> Result:
    """Go on with a run that was stopped, exactly where its newest checkpoint stands.

        result = resume("runs/CartPole-v1/ppo-allreduce/1-...", steps=500_000)

    A run that has finished is left as it is, unless more `steps` are asked for. Raises ConfigError
    when another process is in the folder, and when no checkpoint can be used.
    """
    _not_in_a_worker("resume")
    folder = os.path.abspath(run_dir)
    if os.path.isfile(os.path.join(folder, "sweep.toml")):
        raise ConfigError(
            f"{folder} is the folder of a sweep; to continue it, type: manyhands resume {folder}, "
            f"or in Python: sweep(dir={str(run_dir)!r})"
        )
    if not os.path.isfile(os.path.join(folder, "config.toml")):
        raise ConfigError(f"{folder} holds no config.toml: it is not the folder of a run")
    launched = joined.defaults(options.get("engine"))
    before = load_toml(os.path.join(folder, "config.toml"))
    with _named_hooks({"engine": before.run.engine} | launched | options) as options:
        after = changed(before, options)
        return _resume(folder, after, said_of_workers(before, after))


def _resume(folder: str, experiment: Experiment, said: list[str]) -> Result:
    with streams.given_back():
        check(experiment)

    def prepare(stack: ExitStack) -> Plan:
        stack.enter_context(RunLock(folder))
        summary = finished(folder, experiment)
        if summary is not None:
            return {"run_dir": folder, "finished": summary}
        swept = checkpoint.sweep(folder)
        found, damaged = checkpoint.newest(folder, tensors=False)
        notes = [f"{swept} half-written checkpoints removed"] if swept else []
        notes += said
        for path, reason in damaged:
            aside = checkpoint.set_aside(path)
            notes.append(f"a checkpoint is damaged and was set aside as {aside.name}: {reason}")
        if damaged:
            notes.append(f"going back to the checkpoint at step {found.facts['env_steps']:,}")
        plain = to_plain(replace(experiment, run=replace(experiment.run, run_dir=folder)))
        resumed = {"checkpoint": str(found.path), "notes": notes}
        return {"run_dir": folder, "plain": plain, "resumed": resumed}

    return _perform(experiment.run, prepare)


def finished(run_dir: str, experiment: Experiment) -> dict[str, Any] | None:
    """The summary of a run that is complete as it is; None when there is more to do."""
    with suppress(OSError, ValueError, LookupError, TypeError):
        with open(os.path.join(run_dir, "summary.json"), encoding="utf-8") as file:
            summary: dict[str, Any] = json.load(file)
        run, mean = experiment.run, summary["mean_return"]
        solved = (
            summary["exit"] == "solved" and run.target_return is not None
            and mean is not None and mean >= run.target_return
        )  # fmt: skip
        if solved or (summary["exit"] == "finished" and summary["env_steps"] >= run.steps):
            return summary
    return None


def train_experiment(experiment: Experiment) -> Result:
    """Run a checked configuration on its engine."""

    def prepare(stack: ExitStack) -> Plan:
        run = experiment.run
        if run.start_from:
            from manyhands.policy import check_start

            check_start(experiment)
            run = replace(run, start_from=os.path.abspath(run.start_from))
        run_dir = os.path.abspath(run.run_dir or default_run_dir(experiment))
        stack.enter_context(RunLock(run_dir))
        plain = to_plain(replace(experiment, run=replace(run, run_dir=run_dir)))
        return {"run_dir": run_dir, "plain": plain, "resumed": None}

    return _perform(experiment.run, prepare)


def train_worker(plain: dict[str, Any], resumed: dict[str, Any] | None = None) -> dict[str, Any]:
    """One worker's part in a run, from its place to its last word, whatever its role.

    Only those that learn or serve read the checkpoint that `resumed` names. An actor that was
    restarted after a death attends nothing that all workers do together.
    """
    with devices.no_garbage_collection():
        import torch

        from manyhands.experiment.hooks import Hooks
        from manyhands.experiment.records import Records
        from manyhands.policy import spaces_of
        from manyhands.strategies.context import Context
        from manyhands.strategies.progress import RunProgress
        from manyhands.viewing.evaluator import Evaluator

    began = time.perf_counter()
    experiment = from_plain(plain)
    worker = attach()
    # Before any environment is made: whatever draws from the generators that all share repeats.
    seeding.seed_everything(experiment.run.seed, "worker", worker.place.rank)
    context = Context(experiment, worker)
    if resumed is not None:
        context.start_from = ""  # all that it was is in the checkpoint
    if not context.synchronous:  # those take the spaces of the environments that they all have
        context.build(spaces_of(experiment.run))
    resumed = resumed if context.learns else None
    state = resumed and checkpoint.load_on_all(context.group, resumed["checkpoint"])
    seat = list(context.seat)
    seats = [seat] if context.group is None else context.group.exchange(seat)
    records = Records(
        experiment,
        main=context.is_main,
        threads=torch.get_num_threads(),
        device=devices.described([devices.Seat(*one) for one in seats]),
        emulators=context.emulators,
        resumed=state and state["records"],
        peers=worker.peers,
        notes=resumed["notes"] if resumed else (),
    )
    progress = RunProgress(context, records, state)
    try:
        if experiment.run.hooks and context.is_main:
            progress.hooks = Hooks(experiment.run.hooks, progress)
        if experiment.run.eval_every and context.is_main:
            progress.evaluator = Evaluator(experiment, records.folder)
        context.phases.add("starting", time.perf_counter() - began)
        experiment.strategy_spec.load()(context, progress)
        return progress.finish()
    except SystemExit as left:
        if stopping.asked_for(left):
            progress.fail(left)
            raise
        # Not ours, which come by a signal: it must not look like a worker that has finished.
        error = WorkerError(f"something called sys.exit({left.code!r}), maybe an environment")
        for note in getattr(left, "__notes__", ()):  # which one it was
            error.add_note(note)
        progress.fail(error)
        raise error from left
    except BaseException as error:
        progress.fail(error)
        raise
    finally:
        if progress.evaluator is not None:
            progress.evaluator.close()
        context.close()


def _perform(run: RunConfig, prepare: Callable[[ExitStack], Plan]) -> Result:
    """Prepare a run and go through with it: on workers of our own, or as one of a launcher's."""
    with ExitStack() as stack:
        if joined.place_in(run.engine) is None:
            plan = prepare(stack)
            start = _start_inline if run.engine == "inline" else _start_workers
        else:
            group = attach(run.timeout).group
            plan = joined.main_decides(group, lambda: prepare(stack))
            start = _join_workers
        if "finished" in plan:
            return Result(Path(plan["run_dir"]), plan["finished"], worked=False)
        return _run(plan["plain"], plan["resumed"], start)


def _run(plain: dict[str, Any], resumed: dict[str, Any] | None, start: Start) -> Result:
    """Be or start the workers, and wait for their end. Paused when a signal has ended the run."""
    run_dir = str(plain["run"]["run_dir"])
    try:
        summary = start(plain, resumed)
    except WorkerError as error:
        _record_end(plain, f"failed: {error}")
        raise
    except Stopped as stopped:
        _record_end(plain, f"stopped: {signal.Signals(stopped.number).name}")
        raise _paused(run_dir, stopped.number) from None
    if summary["exit"].startswith("stopped: "):
        number = signal.Signals[summary["exit"].removeprefix("stopped: ")]
        raise Paused(number, run_dir, summary["env_steps"])
    return Result(Path(run_dir), summary)


def _start_workers(plain: dict[str, Any], resumed: dict[str, Any] | None) -> dict[str, Any]:
    experiment = from_plain(plain)
    run = experiment.run
    job = Job(
        workers=int(run.workers),
        engine=run.engine,
        call=calls.pack(train_worker, (plain, resumed), {}),
        timeout=run.timeout,
        address=run.address,
        results=True,
        roles=run.roles.text if run.workers > 1 else "",
        recovery=_recovery(experiment),
        graceful=True,
        preload=PRELOAD,
    )
    summary: dict[str, Any] = run_job(job)[0]
    return summary


def _recovery(experiment: Experiment) -> Recovery:
    """What is done when a worker fails; only workers that act, and that nobody waits for in
    particular, may."""
    run, role = experiment.run, experiment.strategy_spec.restarts
    log = os.path.join(run.run_dir, "events.jsonl")
    if run.engine not in ("local", "ray") or not (role and run.elastic):
        return Recovery(log=log)
    return Recovery(
        policy=run.recovery,
        ranks=tuple(run.roles.ranks(role)[-run.actors :]),
        minimum=run.min_workers,
        least=run.least_workers if run.least_workers < run.workers else 0,
        restarts=run.max_restarts,
        silence=run.timeout,
        log=log,
    )


def _start_inline(plain: dict[str, Any], resumed: dict[str, Any] | None) -> dict[str, Any]:
    with devices.no_garbage_collection():
        import torch  # noqa: F401 (from the beginning, so that its generator is given back too)

    run = from_plain(plain).run

    def work() -> dict[str, Any]:
        devices.one_thread_here()
        return train_worker(plain, resumed)

    with stopping.SoftStop() as soft, soft.named(), devices.one_thread():
        summary: dict[str, Any] = inline.run(work, int(run.workers), run.timeout, run.roles)[0]
    return summary


def _join_workers(plain: dict[str, Any], resumed: dict[str, Any] | None) -> dict[str, Any]:
    """This process is one worker of the run; the main worker's summary, on all."""
    with devices.no_garbage_collection():
        import torch  # noqa: F401 (as above)

    group = attach().group
    with ExitStack() as stack:
        stack.enter_context(streams.given_back())  # the script that called us may go on
        if not joined.launched_by_us():
            soft = stopping.SoftStop(joined=True, speaks=joined.is_main())
            stack.enter_context(soft)
            stack.enter_context(soft.named())
            stack.enter_context(devices.one_thread())
        summary = train_worker(plain, resumed)
    decided: dict[str, Any] = joined.main_decides(group, lambda: summary)
    return decided


def _paused(run_dir: str, number: int) -> Stopped:
    """With the step from which the run can be resumed, if there is one."""
    with suppress(ConfigError):
        found, _ = checkpoint.newest(run_dir, tensors=False)
        return Paused(number, run_dir, found.facts["env_steps"])
    return Stopped(number)


def _record_end(plain: dict[str, Any], ended: str) -> None:
    """summary.json, where the main worker could not write it: it was killed, or never began."""
    folder = Path(plain["run"]["run_dir"])
    if (folder / "summary.json").exists() or not (folder / "config.toml").exists():
        return
    last: dict[str, Any] = {}
    with suppress(OSError, ValueError, IndexError):
        last = json.loads((folder / "metrics.jsonl").read_bytes().splitlines()[-1])
    names = {"env_steps": "env_steps", "episodes": "episodes", "update": "updates",
             "wall_seconds": "wall_seconds", "mean_return": "mean_return"}  # fmt: skip
    facts = {names[name]: value for name, value in last.items() if name in names}
    lines = ended.strip().splitlines()
    ended = lines[0] if len(lines) == 1 else f"{lines[0]} {lines[-1]}"
    try:
        RunFolder.for_summary(folder, from_plain(plain)).summary(facts | {"exit": ended[:500]})
    except OSError as error:
        print(f"manyhands: summary.json could not be written: {error}", file=sys.stderr)


def _not_in_a_worker(name: str) -> None:
    if calls.importing_main:
        raise ConfigError(
            f"{name}() was reached while a worker imported your script. Put the call under a main "
            'guard: if __name__ == "__main__":'
        )

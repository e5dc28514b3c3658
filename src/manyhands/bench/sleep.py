"""many workers whose environments mostly wait: their rate, their memory, and how weights reach them

An environment that sleeps 10 ms a step stands for a slow simulator, or one on another machine: N
workers can make N / 10 ms steps a second and no more, however few cores there are. What keeps them
from it is what we spend on a step: acting, handing over, learning, and looking whether anything has
come. Beside each run as many processes take turns with it that only sleep and count.

    of the limit    steps/s of the run, learning on, over N / seconds of sleep
    µs a step       processor time of all of the run's processes for each step
    own memory      of the actor that needs most: its share of what it has in common with others,
                    and all that it has alone (PSS)
    weights         1 MB, published by one worker and pulled by all others: processor time of a
                    pull, in plain copies of as many bytes that the same worker has written

Claims are judged only on a quiet machine; elsewhere the figures are printed with the reason.
"""

from __future__ import annotations

import subprocess
import tempfile
import time
from argparse import ArgumentParser, Namespace
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import psutil

from manyhands.bench._tools import (
    Claim,
    OtherPrograms,
    end,
    fingerprint,
    median,
    others_now,
    records_of,
    train,
    verdicts,
    why_it_failed,
    why_not_judged,
)
from manyhands.config import Experiment, build, save_toml
from manyhands.config.validate import check
from manyhands.engines.launch import launch
from manyhands.engines.shared import Segment
from manyhands.errors import ConfigError, WorkerError
from manyhands.parallel import Parallel

WORKERS, SECONDS, TIMED, ROUNDS = 64, 0.01, 10.0, 3
FEW = 4  # workers, beside which the cost of a pull is to stay the same
WEIGHT_BYTES, PULLS = 1_000_000, 20
_START_SECONDS = 300.0  # for the first update of so many workers
SLEEPERS = "processes that only sleep"

# In both the actors act and one worker more learns. Long rollouts: a hand-over costs the same for
# a hundred steps as for one, and gather waits for the last of all workers at each.
RUNS: dict[str, dict[str, Any]] = {
    "actor_learner": {"algorithm": "impala", "rollout_length": 64, "unrolls": 16},
    "gather": {"algorithm": "ppo", "rollout_length": 256, "overlap": True},
}


def add_options(parser: ArgumentParser) -> None:
    for name, kind, default, words in (
        ("workers", int, WORKERS, "workers that act; one more learns"),
        ("sleep", float, SECONDS, "seconds that a step of the environment sleeps"),
        ("seconds", float, TIMED, "of each run that are timed, after its first update"),
        ("rounds", int, ROUNDS, "how often each takes its turn"),
    ):
        words += " (default: %(default)s)"
        parser.add_argument(f"--{name}", type=kind, default=default, metavar="N", help=words)


def measure(options: Namespace) -> dict[str, Any]:
    for name in ("workers", "sleep", "seconds", "rounds"):
        if getattr(options, name) <= 0:
            raise ConfigError(f"--{name} {getattr(options, name)}: must be above 0")
    workers, sleep, seconds = options.workers, options.sleep, options.seconds
    turns: dict[str, Callable[[], dict[str, float]]] = {
        SLEEPERS: lambda: sleepers(workers, sleep, seconds)
    }
    for strategy, settings in RUNS.items():
        experiment = _experiment(strategy, workers, sleep, **settings)
        turns[strategy] = lambda e=experiment: trained(e, seconds)  # type: ignore[misc]
    before, watch = others_now(), OtherPrograms()
    found: dict[str, list[dict[str, float]]] = {name: [] for name in turns}
    for number in range(1, options.rounds + 1):
        for name, turn in turns.items():
            found[name].append(turn())
            speed = found[name][-1]["steps_per_second"]
            print(f"round {number}  {name:<26}{speed:>8,.0f} steps/s", flush=True)
    facts: dict[str, Any] = {
        "benchmark": "sleep",
        "machine": fingerprint(),
        "settings": {"workers": workers, "sleep": sleep, "seconds": seconds,
                     "rounds": options.rounds, "limit": workers / sleep},
        "runs": rows(found, workers / sleep),
        "weights": [pulled(n) for n in sorted({min(FEW, workers), workers})],
    }  # fmt: skip
    reasons = why_not_judged(facts["machine"]["cores"], 1, before, watch.cores())
    judged = [] if reasons else claims(facts)
    return facts | {"claims": [claim.facts for claim in judged], "not_judged": reasons}


# -- who takes turns -------------------------------------------------------------------------------


def sleepers(workers: int, sleep: float, seconds: float) -> dict[str, float]:
    """Steps a second of so many processes that do nothing else."""
    counted = launch(sleep_and_count, sleep, seconds, workers=workers, timeout=_START_SECONDS)
    return {"steps_per_second": sum(steps / took for steps, took in counted)}


def sleep_and_count(sleep: float, seconds: float) -> tuple[int, float]:
    par = Parallel()
    par.barrier()
    began, steps = time.perf_counter(), 0
    while (took := time.perf_counter() - began) < seconds:
        time.sleep(sleep)
        steps += 1
    return steps, took


def _experiment(strategy: str, actors: int, sleep: float, algorithm: str, **how: Any) -> Experiment:
    experiment = build(
        algorithm,
        env="manyhands/Sleep-v0",
        env_kwargs={"seconds": sleep},
        strategy=strategy,
        workers=actors + 1,
        num_envs=actors,
        steps=10**9,  # it is ended
        quiet=True,
        tensorboard=False,
        timeout=_START_SECONDS,
        **how,
    )
    check(experiment)
    return experiment


def trained(experiment: Experiment, seconds: float) -> dict[str, float]:
    """A run, looked at for so long after its first update, and then ended."""
    with tempfile.TemporaryDirectory() as folder:
        home = Path(folder, "run")
        toml = Path(folder, "run.toml")
        save_toml(toml, experiment)
        process = train(home, toml)
        try:
            _after_first_update(process, home)
            memory = own_memory(process.pid)
            used, began = _processor_time(process.pid), time.time()
            time.sleep(seconds)
            used, ended = _processor_time(process.pid) - used, time.time()
        finally:
            end(process)
        steps = steps_between(records_of(home), began, ended)
    return {
        "steps_per_second": steps / (ended - began),
        "us_per_step": 1e6 * used / steps,
        "actor_mb": max(memory[1:]),
        "learner_mb": memory[0],
    }


def _after_first_update(process: subprocess.Popen[bytes], home: Path) -> None:
    deadline = time.monotonic() + _START_SECONDS
    records = home / "metrics.jsonl"
    while not (records.exists() and records.stat().st_size):
        if (code := process.poll()) is not None:
            raise why_it_failed(home, code)
        if time.monotonic() > deadline:
            raise WorkerError("manyhands train", f"no update within {_START_SECONDS:g} s")
        time.sleep(0.1)


def steps_between(records: list[dict[str, Any]], began: float, ended: float) -> float:
    """Environment steps in that time; between two records they are taken to be spread evenly."""
    at, steps = [r["at"] for r in records], [r["env_steps"] for r in records]
    if at[-1] <= began:
        raise ConfigError("there was no update while it was timed; use more --seconds")
    # CRUCIAL: not beyond the last record: `interp` would take the steps to stand still there.
    last = min(ended, at[-1])
    first, final = np.interp([began, last], at, steps)
    return float((final - first) * (ended - began) / (last - began))


def _tree(pid: int) -> list[psutil.Process]:
    launcher = psutil.Process(pid)
    return [launcher, *launcher.children(recursive=True)]


def _processor_time(pid: int) -> float:
    return sum(sum(process.cpu_times()[:2]) for process in _tree(pid))


def own_memory(pid: int) -> list[float]:
    """MB (PSS) of the workers of a launch, by rank."""
    found = {}
    for process in _tree(pid):
        name, _, rank = process.name().partition("-")
        if name == "manyhands" and rank.isdigit():
            found[int(rank)] = process.memory_full_info().pss / 1e6
    return [found[rank] for rank in sorted(found)]


# -- weights ---------------------------------------------------------------------------------------


def pulled(workers: int) -> dict[str, float]:
    """What a pull costs each of so many workers, medians over workers."""
    costs = launch(pull_weights, WEIGHT_BYTES, workers=workers, timeout=_START_SECONDS)[1:]
    pull, copy = (median(list(part)) for part in zip(*costs, strict=True))
    copies = median([mine / own for mine, own in costs])
    return {"workers": workers, "pull_us": round(pull * 1e6, 1), "memcpy_us": round(copy * 1e6, 1),
            "copies": round(copies, 3)}  # fmt: skip


def pull_weights(nbytes: int) -> tuple[float, float]:
    """(processor time of a pull, of a plain copy of what the same worker has just written into
    shared memory), medians."""
    par = Parallel()
    store = par.weights("bench")
    weights = np.zeros(nbytes, np.uint8)
    plain = Segment(nbytes) if par.is_main else None
    address = par.group.exchange(plain.address if plain is not None else "")[0]
    plain = plain or Segment(address=str(address))
    taken: dict[str, list[float]] = {"pull": [], "copy": []}
    for version in range(1, PULLS + 1):
        if par.is_main:
            weights[:] = plain.bytes[:] = version
            store.publish({"weights": weights})
        par.barrier()
        # In turns, for what one has read is in the processor's cache when the other reads.
        for name in ("pull", "copy") if version % 2 else ("copy", "pull"):
            if par.is_main:
                continue
            began = time.thread_time()
            if name == "pull":
                found = store.pull(newer_than=version - 1)
            else:
                np.copyto(weights, plain.bytes)
            taken[name].append(time.thread_time() - began)
        if not par.is_main and (found is None or found[1]["weights"][-1] != version):
            raise WorkerError("weights", f"pull {version} gave {found}")
        found = None  # its memory is used again
        par.barrier()
    return (0.0, 1.0) if par.is_main else (median(taken["pull"]), median(taken["copy"]))


# -- what it comes to ------------------------------------------------------------------------------


def rows(found: dict[str, list[dict[str, float]]], limit: float) -> list[dict[str, Any]]:
    """One for each that took turns: medians over rounds."""

    def middle(values: list[float]) -> float:
        return round(median(values), 3)

    made = []
    for name, runs in found.items():
        speeds = [run["steps_per_second"] for run in runs]
        beside = [run["steps_per_second"] for run in found[SLEEPERS]]
        row = {key: middle([run[key] for run in runs]) for key in runs[0]}
        row["of_limit"] = middle([speed / limit for speed in speeds])
        row["of_sleepers"] = middle([a / b for a, b in zip(speeds, beside, strict=True)])
        made.append({"name": name} | row)
    return made


def claims(facts: dict[str, Any]) -> list[Claim]:
    settings, made = facts["settings"], []
    n = settings["workers"]
    runs = [run for run in facts["runs"] if run["name"] in RUNS]
    for run in runs:
        made.append(Claim(f"{run['name']}, {n} workers, share of the limit", run["of_limit"], 0.97))
    own = max(run["actor_mb"] for run in runs)
    made.append(Claim("own memory of an actor, MB", own, 60, at_most=True))
    few, many = facts["weights"][0], facts["weights"][-1]
    words = f"1 MB of weights to each of {many['workers']} workers, in copies"
    made.append(Claim(words, many["copies"], 1.5, at_most=True))
    flat = f"the same, times that for {few['workers']} workers"
    return [*made, Claim(flat, many["copies"] / few["copies"], 1.25, at_most=True)]


def table(facts: dict[str, Any]) -> list[str]:
    settings, machine = facts["settings"], facts["machine"]
    titles = ["steps/s", "of the limit", "of sleepers", "µs a step", "actor MB", "learner MB"]
    keys = ["steps_per_second", "of_limit", "of_sleepers", "us_per_step", "actor_mb", "learner_mb"]
    forms = [",.0f", ".1%", ".1%", ".0f", ".0f", ".0f"]
    cells = [[f"{settings['workers']} workers × {settings['sleep'] * 1e3:g} ms", *titles]]
    for run in facts["runs"]:
        shown = [format(run[k], f) if k in run else "-" for k, f in zip(keys, forms, strict=True)]
        cells.append([run["name"], *shown])
    cells.append(["the limit", f"{settings['limit']:,.0f}", *["-"] * (len(titles) - 1)])
    widths = [max(len(row[i]) for row in cells) for i in range(len(cells[0]))]
    lines = []
    for name, *numbers in cells:
        right = [cell.rjust(width) for cell, width in zip(numbers, widths[1:], strict=True)]
        lines.append("  ".join([name.ljust(widths[0]), *right]))
    lines.append("")
    lines += [
        f"1 MB of weights, {w['workers']} workers: a pull takes {w['pull_us']:.0f} µs of processor "
        f"time, a copy {w['memcpy_us']:.0f}: {w['copies']:.2f} copies"
        for w in facts["weights"]
    ]
    lines += ["", *verdicts(facts["claims"])]
    lines += [f"NOT JUDGED  {reason}" for reason in facts["not_judged"]]
    lines.append(
        f"medians of {settings['rounds']} rounds in turn, {settings['seconds']:g} s each, on "
        f"{machine['cores']} cores of {machine['cpu']}, load {machine['load']} at the start"
    )
    return lines

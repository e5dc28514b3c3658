"""What a run costs on this machine, for `manyhands plan`: measured in about twenty seconds.

    one worker      the whole batch and a part of it by turns, in one process: what a call of the
                    policy, a step, an update and a row cost
    as many as      the same part at once on half of the processors, and on all: how much longer
    processors      work takes where others work too
    two, and more   how long they take to meet, with work of uneven length in between, as in a run;
                    to send a message and to take it

Work is counted in processor time, which other programs lengthen by some per cent, not by the share
of the machine that they take. Meetings have only the clock: of many the lower quartile counts.
"""

from __future__ import annotations

import dataclasses
import json
import math
import statistics
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np

from manyhands.bench._tools import median
from manyhands.config import Experiment, build, from_plain, names_of, to_plain
from manyhands.engines import calls
from manyhands.engines.attach import attach
from manyhands.engines.base import cores
from manyhands.engines.launch import Job
from manyhands.engines.launch import run as run_job
from manyhands.experiment.bottleneck import Phases
from manyhands.run import PRELOAD, train_experiment
from manyhands.strategies.simulate import Costs

TURNS = 3
PART = 8  # the smaller batch is an eighth
_TURN_SECONDS = 0.7
_UPDATES = 3  # at least, of a turn
_MOST = 64  # workers that are started
_TIMEOUT = 600.0  # of a machine with a lot of other work
_MESSAGES = 32
_MEGABYTE = 1 << 20

Seconds = dict[str, float]  # of an update: rollout, learn, other


def measure(one: Experiment) -> Costs:
    workers = cores() if cores() > 4 else max(2, 2 * cores())
    job = Job(
        workers=min(_MOST, workers), engine="local", timeout=_TIMEOUT, results=True,
        call=calls.pack(work, (to_plain(one),), {}), preload=PRELOAD,
    )  # fmt: skip
    return Costs(**run_job(job)[0])


def work(plain: dict[str, Any]) -> dict[str, Any]:
    """In each worker; worker 0 knows everything at the end."""
    one, worker = from_plain(plain), attach()
    group = worker.group
    found: dict[str, Any] = {}
    if worker.place.is_main:
        found = _sizes(one) | _alone(one)
        found["apply"] = _apply_seconds(found["weight_bytes"])
    found = group.exchange(found)[0]
    found["crowd"] = _crowd(one, group, found.pop("part"))
    found["meet"] = _meetings(group, found["weight_bytes"])
    return found | _messages(worker)


# -- one worker ------------------------------------------------------------------------------------


def _alone(one: Experiment) -> dict[str, Any]:
    """Both sizes by turns, so that whatever else the machine does hits both alike."""
    whole, part = _copy(one, 1), _copy(one, PART)
    lengths = [_updates(whole), _updates(part)]
    turns = [
        [_run(e, n) for e, n in zip((whole, part), lengths, strict=True)] for _ in range(TURNS)
    ]
    big, small = ({name: median([turn[i][name] for turn in turns]) for name in turns[0][0]}
                  for i in (0, 1))  # fmt: skip
    # Seconds that are always spent and seconds for each more; of an update the first are of all
    # its minibatches, which are as many in a part, where workers share them.
    always, each = _line(big["rollout"], whole.run.num_envs, small["rollout"], part.run.num_envs)
    update, row = _line(big["learn"], whole.run.batch, small["learn"], part.run.batch)
    length = whole.run.batch / whole.run.num_envs
    return {"act": always / length, "step": each / length, "update": update, "update_row": row,
            "other": big["other"], "batch": whole.run.batch,
            "part": {"updates": lengths[1], "seconds": small["rollout"] + small["learn"]},
            }  # fmt: skip


def _copy(one: Experiment, parts: int) -> Experiment:
    """One worker's part of the run, if there were so many: its rows, its part of minibatches."""
    run = one.run
    plain: dict[str, Any] = {n: getattr(run, n) for n in names_of(type(run))}
    own = {n: getattr(one.options, n) for n in names_of(type(one.options))}
    plain["num_envs"] = max(1, run.num_envs // parts)
    for name in ("minibatch", "value_minibatch"):
        if name in own:
            own[name] = max(1, own[name] // parts)
    if "learning_starts" in own:
        own["learning_starts"] = own["batch_size"]  # there is learning in every update
    fixed = {"quiet": True, "tensorboard": False, "target_return": None, "engine": "inline"}
    return build(one.algorithm, **plain | own | fixed)


def _updates(one: Experiment) -> int:
    """How many make a turn of the length that was meant."""
    seconds = sum(_run(one, _UPDATES).values())
    return max(_UPDATES, round(_TURN_SECONDS / max(seconds, 1e-6)))


def _run(one: Experiment, updates: int) -> Seconds:
    """A run in this process; its first update is not counted."""
    with tempfile.TemporaryDirectory() as folder:
        home = Path(folder, "run")
        length = (updates + 1) * one.run.batch
        run = dataclasses.replace(one.run, steps=length, run_dir=str(home))
        with mock.patch.object(Phases, "clock", time.thread_time):
            train_experiment(dataclasses.replace(one, run=run))
        rows = [json.loads(line) for line in (home / "metrics.jsonl").read_text().splitlines()]
    first, last = rows[0], rows[-1]
    phases = {
        name.removeprefix("seconds/"): (last[name] - first.get(name, 0.0)) / updates
        for name in last
        if name.startswith("seconds/")
    }
    rollout, learn = phases.pop("rollout"), phases.pop("optimisation")
    unequal = sum(phases.pop(name, 0.0) for name in ("starting", "checkpoint"))
    del unequal  # they come by the clock, not with updates
    return {"rollout": rollout, "learn": learn, "other": sum(phases.values())}


def _line(y1: float, x1: int, y2: float, x2: int) -> tuple[float, float]:
    """Seconds that are always spent, and seconds for each more; neither is negative."""
    if x1 == x2:
        return 0.0, y1 / x1
    slope = min(max(0.0, (y1 - y2) / (x1 - x2)), y1 / x1)
    return y1 - slope * x1, slope


def _sizes(one: Experiment) -> dict[str, int]:
    """Bytes of a row and of the weights, and how often workers would meet in an update."""
    from manyhands.policy import build_model, spaces_of

    spaces = spaces_of(one.run)
    floats = sum(int(np.prod(space.shape)) or 1 for space in spaces)  # TODO nested
    weights = sum(p.numel() for p in build_model(one, *spaces).parameters())
    own, batch, meetings = one.options, one.run.batch, 1
    if minibatch := getattr(own, "minibatch", 0):
        meetings = own.epochs * math.ceil(batch / minibatch)
    elif hasattr(own, "cg_iterations"):
        meetings = own.cg_iterations + 4 + own.value_epochs * math.ceil(batch / own.value_minibatch)
    return {"row_bytes": 4 * (floats + 6), "weight_bytes": 4 * weights, "meetings": meetings}


def _apply_seconds(size: int) -> float:
    """A step of Adam over so many bytes of parameters."""
    w, g, m, v = (np.ones(size // 4, np.float32) for _ in range(4))

    def adam() -> None:
        m[:] = 0.9 * m + 0.1 * g
        v[:] = 0.999 * v + 0.001 * g * g
        w[:] -= 1e-3 * m / (np.sqrt(v) + 1e-5)

    return _processor_seconds(adam, 50)


def _processor_seconds(action: Callable[[], Any], repeats: int) -> float:
    taken = []
    for _ in range(repeats):
        began = time.thread_time()
        action()
        taken.append(time.thread_time() - began)
    return median(taken)


# -- several ---------------------------------------------------------------------------------------


def _some(group: Any, count: int) -> Any:
    """The first so many of all workers, as a group; None on the others."""
    ranks = list(range(count))
    return group if count == group.size else group.subgroup(ranks)


def _crowd(one: Experiment, group: Any, alone: dict[str, Any]) -> list[list[float]]:
    """Rows of (share of the processors that are busy, how much longer work takes)."""
    part, here = _copy(one, PART), min(cores(), group.size)
    rows = [[1.0 / cores(), 1.0]]
    for count in sorted({max(2, here // 2), here} - {1}):
        crowd = _some(group, count)
        seconds = 0.0
        if crowd is not None:
            crowd.barrier()
            run = _run(part, alone["updates"])
            seconds = run["rollout"] + run["learn"]
        of_all = [s for s in group.exchange(seconds) if s]
        rows.append([count / cores(), max(1.0, statistics.mean(of_all) / alone["seconds"])])
    return rows


def _meetings(group: Any, size: int) -> list[list[float]]:
    """Rows of (workers, seconds of a meeting for a few numbers, of one for weights)."""
    counts = sorted({min(n, group.size) for n in (2, cores() // 2, cores(), 2 * cores())} - {0, 1})
    rows = [[1, 0.0, 0.0]]
    for count in counts:
        some = _some(group, count)
        found = [0.0, 0.0]
        if some is not None:
            found = [_meeting(some, np.zeros(n, np.float32)) for n in (8, size // 4)]
        all_ = [row for row in group.exchange(found) if any(row)]
        rows.append(
            [count, *(max(1e-6, statistics.mean(column)) for column in zip(*all_, strict=True))]
        )
    return rows


def _meeting(group: Any, array: Any, repeats: int = 300) -> float:
    """Seconds that a sum adds to the work between it and the one before."""
    a = np.random.default_rng(0).standard_normal((64, 64)).astype(np.float32)
    share = max(1.0, group.size / cores())
    added = []
    for _ in range(repeats):
        began, busy = time.perf_counter(), time.thread_time()
        for _ in range(8):
            np.tanh(a @ a)
        busy = time.thread_time() - busy
        group.sum(array)
        added.append(time.perf_counter() - began - share * busy)
    return float(np.quantile(added[repeats // 10 :], 0.25))


def _messages(worker: Any) -> dict[str, float]:
    """Processor seconds of a small message, on either side, and bytes a second of a large one."""
    group, rank = worker.group, worker.place.rank
    reader, writer = 0, 1
    seconds = []
    for name, size in (("small", 1024), ("large", _MEGABYTE)):
        channel = worker.channel(f"plan: {name}", reader=reader, capacity=_MESSAGES)
        tree = {str(i): np.zeros(size // 32, np.float32) for i in range(8)}
        mine = 0.0
        if rank == writer:
            mine = _processor_seconds(partial(channel.put, tree), _MESSAGES)
        group.barrier()
        if rank == reader:  # all of them are there: nothing is waited for
            mine = _processor_seconds(partial(channel.get, timeout=60.0), _MESSAGES)
        seconds.append(sum(group.exchange(mine)[:2]) / 2)
    small, large = seconds
    return {"message": small, "bandwidth": _MEGABYTE / max(large - small, 1e-6)}

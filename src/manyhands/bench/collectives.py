"""collectives of every engine between two workers or more, beside raw gloo and memcpy

Each engine is started once. In that one run its measurements take turns, round after round, so
that whatever else the machine does hits all of them alike; only ratios of numbers from the same
run mean anything. The yardsticks run in the same processes: np.copyto of 64 MB in the main worker
while the others wait, and (beside the local engine) torch.distributed's gloo all_reduce.

Beside the time of a call stands the processor time that it costs a worker, waiting included: with
as many workers as cores the first is what counts; with more, the second.
"""

from __future__ import annotations

import os
import tempfile
import time
from argparse import ArgumentParser, Namespace
from collections.abc import Callable
from typing import Any

import numpy as np

from manyhands.bench._tools import (
    Claim,
    add_engines,
    engines_in,
    fingerprint,
    median,
    missing_package,
    seconds_of,
    verdicts,
)
from manyhands.engines import ENGINES
from manyhands.engines.launch import launch
from manyhands.errors import ConfigError, ManyhandsError

FLOATS = 10_000
PART_BYTES = 32 << 20  # of each of two workers; of more, as much less
BROADCAST_BYTES = 1 << 20
ROUNDS = 12
WARM_UP = 2  # rounds that are not counted: memory is touched, connections are made

# measurement -> calls in one round; the large ones are long enough by themselves
REPEATS = {"mean": 40, "one": 40, "gloo": 40, "barrier": 40, "exchange": 40, "broadcast": 10,
           "gather": 2, "memcpy": 2}  # fmt: skip


def add_options(parser: ArgumentParser) -> None:
    add_engines(parser, ENGINES)
    parser.add_argument(
        "--workers",
        type=int,
        default=2,
        metavar="N",
        help="how many meet (default: %(default)s); claims are about two",
    )
    parser.add_argument(
        "--rounds",
        type=int,
        default=ROUNDS,
        metavar="N",
        help="how often each measurement gets its turn (default: %(default)s)",
    )


def measure(options: Namespace) -> dict[str, Any]:
    chosen = engines_in(options.engines, ENGINES)
    if options.rounds < 1:
        raise ConfigError(f"--rounds {options.rounds}: at least 1 is needed")
    if options.workers < 2:
        raise ConfigError(f"--workers {options.workers}: it takes at least 2 to meet")
    facts: dict[str, Any] = {
        "benchmark": "collectives",
        "machine": fingerprint(),
        "workers": options.workers,
        "engines": {},
    }
    for engine in chosen:
        facts["engines"][engine] = _engine(engine, options.workers, options.rounds)
    judged = claims(facts["engines"]) if options.workers == 2 else []
    facts["claims"] = [c.facts for c in judged]
    return facts


def _engine(engine: str, workers: int, rounds: int) -> dict[str, Any]:
    """Medians of one engine, or the reason why there are none."""
    if reason := missing_package(engine):
        return {"missing": reason}
    with tempfile.TemporaryDirectory() as folder:
        meeting = os.path.join(folder, "gloo") if engine == "local" else ""
        try:
            found = launch(work, meeting, rounds, workers=workers, engine=engine, timeout=60)
            return dict(found[0])
        except ManyhandsError as error:
            return {"missing": " ".join(str(error).split())[-300:]}  # its end says what it was


def work(meeting: str, rounds: int) -> dict[str, float]:
    """What each worker does. The main worker's medians count: it is the one that waits for all."""
    from manyhands.parallel import Parallel

    par = Parallel()
    actions = _actions(par)
    if meeting:
        actions["gloo"] = _gloo(meeting, par.rank, par.size)
    taken: dict[str, list[float]] = {name: [] for name in actions}
    used: dict[str, list[float]] = {name: [] for name in actions}  # processor time of a call
    for number in range(WARM_UP + rounds):
        for name, action in actions.items():
            par.barrier()
            before = time.thread_time()
            seconds = seconds_of(action, REPEATS[name])
            if number >= WARM_UP:
                used[name].append((time.thread_time() - before) / REPEATS[name])
                taken[name] += seconds
    if meeting:
        _leave_gloo()
    medians = {name: median(seconds) for name, seconds in taken.items()}
    return _in_units(medians, {name: median(seconds) for name, seconds in used.items()}, par.size)


def _actions(par: Any) -> dict[str, Callable[[], Any]]:
    small = np.random.default_rng(par.rank).random(FLOATS, dtype=np.float32)
    part = np.ones(2 * PART_BYTES // par.size, np.uint8)  # 64 MB in all
    message = np.zeros(BROADCAST_BYTES, np.uint8)
    source, target = (np.full(2 * PART_BYTES, i, np.uint8) for i in (1, 0))

    def memcpy() -> None:
        if par.is_main:  # the others go on to the barrier and wait there
            np.copyto(target, source)

    return {
        "mean": lambda: par.mean(small),
        "one": lambda: par.mean(1.0),
        "gather": lambda: par.gather(part),
        "memcpy": memcpy,
        "broadcast": lambda: par.broadcast(message),
        "barrier": par.barrier,
        "exchange": lambda: par.group.exchange(1),
    }


def _gloo(meeting: str, rank: int, size: int) -> Callable[[], Any]:
    """torch.distributed's own all_reduce of the same numbers, between the same two processes."""
    import datetime

    import torch
    import torch.distributed as dist
    from torch._C._distributed_c10d import FileStore

    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    limit = datetime.timedelta(seconds=60)
    store = FileStore(meeting, size)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=size, timeout=limit)
    tensor = torch.zeros(FLOATS)
    return lambda: dist.all_reduce(tensor)


def _leave_gloo() -> None:
    """WHY: gloo's threads must end before the interpreter does, or it aborts the process."""
    import torch.distributed as dist

    dist.destroy_process_group()


def _in_units(seconds: dict[str, float], used: dict[str, float], size: int) -> dict[str, float]:
    both = 2 * PART_BYTES // size * size
    facts = {
        "mean_us": seconds["mean"] * 1e6,
        "mean_cpu_us": used["mean"] * 1e6,
        "one_us": seconds["one"] * 1e6,
        "one_cpu_us": used["one"] * 1e6,
        "gather_gb_s": both / seconds["gather"] / 1e9,
        "memcpy_gb_s": both / seconds["memcpy"] / 1e9,
        "gather_of_memcpy": seconds["memcpy"] / seconds["gather"],
        "broadcast_us": seconds["broadcast"] * 1e6,
        "barrier_us": seconds["barrier"] * 1e6,
        "exchange_us": seconds["exchange"] * 1e6,
    }
    if "gloo" in seconds:
        facts["gloo_mean_us"] = seconds["gloo"] * 1e6
    return {name: round(value, 3) for name, value in facts.items()}


def claims(engines: dict[str, Any]) -> list[Claim]:
    local = engines.get("local", {})
    if "mean_us" not in local:
        return []
    return [
        Claim(
            f"local averages {FLOATS:,} floats, times faster than raw gloo",
            local["gloo_mean_us"] / local["mean_us"],
            10,
        ),
        # Two workers copy their parts at the same time, so that more than 1 is possible.
        Claim("local gathers 64 MB, part of memcpy's speed", local["gather_of_memcpy"], 0.7),
    ]


COLUMNS = {
    "mean_us": ("average 10k", "µs"),
    "mean_cpu_us": ("its processor", "µs"),
    "one_us": ("average 1", "µs"),
    "one_cpu_us": ("its processor", "µs"),
    "gather_gb_s": ("gather 64 MB", "GB/s"),
    "gather_of_memcpy": ("of memcpy", ""),
    "broadcast_us": ("broadcast 1 MB", "µs"),
    "barrier_us": ("barrier", "µs"),
    "exchange_us": ("exchange", "µs"),
}


def table(facts: dict[str, Any]) -> list[str]:
    titles = [f"{title} {unit}".strip() for title, unit in COLUMNS.values()]
    rows = [[f"{facts['workers']} workers", *titles]]
    reasons, gloo = [], ""
    for engine, row in facts["engines"].items():
        if "missing" in row:
            reasons.append(f"{engine}: not measured: {row['missing']}")
            continue
        rows.append([engine, *(_number(row[name]) for name in COLUMNS)])
        if "gloo_mean_us" in row:
            gloo = _number(row["gloo_mean_us"])
    if gloo:
        rows.append(["raw gloo", gloo, *["-"] * (len(COLUMNS) - 1)])
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    lines = []
    for name, *cells in rows:
        numbers = [cell.rjust(width) for cell, width in zip(cells, widths[1:], strict=True)]
        lines.append("  ".join([name.ljust(widths[0]), *numbers]))
    lines += ["", *reasons, *verdicts(facts["claims"])]
    machine = facts["machine"]
    lines.append(
        f"on {machine['cores']} cores of {machine['cpu']}, load {machine['load']} at the start; "
        "compare numbers of one row, or ratios"
    )
    if machine["load"] > 0.5:
        lines.append("the machine was not idle: run it again when it is")
    return lines


def _number(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"

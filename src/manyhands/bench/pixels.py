"""Pong from pixels, learning on: the emulator's limit, ours by strategy, and Stable-Baselines3

One setting for all: 8 environments x 128 steps = 1,024 an update, minibatches of 256, 4 epochs, the
Nature CNN shared by policy and value, on the CPU. The limit is ALE's own C++ vector environment
with a thread for each core and random actions, in one group or in two of which one is always on its
way, whichever is faster: nobody who steps it can be faster. IMPALA learns from each row once, PPO
four times; it stands there to show what actors and a learner make of the machine. The peer is
measured where it can be imported (pip install --target DIR stable-baselines3
opencv-python-headless; PYTHONPATH=DIR), with one torch thread and with one for each core; the
better of the two counts.

With a GPU, three more: one worker whose rollout stays there, with 16 environments for each core, so
that two groups of 8 take turns; IMPALA, PPO, and PPO that learns while it collects. How much of the
limit they reach is a claim of its own.

They take turns, round after round; reported are medians over rounds, and ratios of runs of one
round: whatever else the machine does then hits all alike. Starting and the first update are not
counted. The claim is judged only on a quiet machine: on a busy one threads that wait for each other
lose more than processes that do not.
"""

from __future__ import annotations

import importlib.util
import json
import os
import sys
import tempfile
import time
from argparse import ArgumentParser, Namespace
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from manyhands import devices
from manyhands.bench._tools import (
    Claim,
    OtherPrograms,
    fingerprint,
    in_repository,
    median,
    others_now,
    output_of,
    verdicts,
    why_not_judged,
)
from manyhands.bench.train import timed
from manyhands.errors import ConfigError, SupportError

ENVS, LENGTH, MINIBATCH, EPOCHS = 8, 128, 256, 4
BATCH = ENVS * LENGTH
STEPS, REPEATS = 8 * BATCH, 3
ENV = "ALE/Pong-v5"
LIMIT = "the emulator alone"
PEER = "stable-baselines3"
TARGET = 2.5  # times the peer's speed
_EMULATED = 4000  # steps of the limit, for every two cores

# name in the table -> algorithm, workers, strategy
OURS = {
    "manyhands ppo, 1 worker": ("ppo", 1, "single"),
    "manyhands ppo, 2 workers, allreduce": ("ppo", 2, "allreduce"),
    "manyhands ppo, 2 workers, gather": ("ppo", 2, "gather"),
    "manyhands impala, 2 actors, actor_learner": ("impala", 3, "actor_learner"),
}

# The same on a GPU: name -> algorithm, rollout length, options, and the share of the limit that it
# is to reach.
ON_GPU: dict[str, tuple[str, int, tuple[str, ...], float]] = {
    "manyhands impala, 1 worker, GPU": ("impala", 32, (), 0.85),
    "manyhands ppo, 1 worker, GPU": ("ppo", 64, (), 0.7),
    "manyhands ppo, 1 worker, GPU, overlap": ("ppo", 64, ("--overlap",), 0.7),
}
_GPU_UPDATES, _GPU_MINIBATCH = 12, 2048

Run = dict[str, Any]


def add_options(parser: ArgumentParser) -> None:
    for name, default, words in (
        ("repeats", REPEATS, "how often each takes its turn"),
        ("steps", STEPS, f"steps that are timed, rounded up to whole updates of {BATCH:,}"),
    ):
        words += " (default: %(default)s)"
        parser.add_argument(f"--{name}", type=int, default=default, metavar="N", help=words)
    parser.add_argument("--no-peer", action="store_true", help="measure our own runs only")


def measure(options: Namespace) -> dict[str, Any]:
    if options.repeats < 1 or options.steps < 1:
        raise ConfigError(
            f"--repeats {options.repeats} --steps {options.steps}: at least 1 of each is needed"
        )
    steps = -(-options.steps // BATCH) * BATCH
    contestants: dict[str, Callable[[int], float]] = {LIMIT: _emulated}
    for name, what in OURS.items():
        contestants[name] = _contestant(steps, *what)
    for name, (algorithm, length, more, _) in ON_GPU.items() if devices.present() else ():
        contestants[name] = _on_gpu(algorithm, length, *more)
    missing = "not asked for" if options.no_peer else _why_no_peer()
    if not missing:
        for threads in sorted({1, len(os.sched_getaffinity(0))}):
            contestants[f"{PEER}, {threads} torch threads"] = _peer(steps, threads)
    before, watch = others_now(), OtherPrograms()
    speeds: dict[str, list[float]] = {name: [] for name in contestants}
    for number in range(1, options.repeats + 1):
        for name, contest in contestants.items():
            speeds[name].append(round(contest(number), 1))
            print(f"round {number}  {name:<44}{speeds[name][-1]:>9,.0f} steps/s", flush=True)
    facts: dict[str, Any] = {
        "benchmark": "pixels",
        "machine": fingerprint(),
        "setting": {"env": ENV, "envs": ENVS, "rollout_length": LENGTH, "minibatch": MINIBATCH,
                    "epochs": EPOCHS, "steps": steps},
        "repeats": options.repeats,
        "runs": rows(speeds),
    }  # fmt: skip
    if missing:
        facts["peer_missing"] = missing
    reasons = why_not_judged(facts["machine"]["cores"], 2, before, watch.cores())
    judged = [] if reasons else claims(facts["runs"])
    return facts | {"claims": [claim.facts for claim in judged], "not_judged": reasons}


# -- who takes turns: each gives steps a second ----------------------------------------------------


def _emulated(seed: int) -> float:
    """The better of two ways: all at once, and in two groups, of which one is always on its way."""
    return max(_stepped(seed, groups) for groups in (1, 2))


def _stepped(seed: int, groups: int) -> float:
    from manyhands.envs import make_vec

    cores = len(os.sched_getaffinity(0))
    size = 8 * cores
    envs: Any = make_vec(ENV, groups * size, seed=seed, num_threads=cores, groups=groups)
    chosen = np.random.default_rng(seed).integers(6, size=(100, size))
    try:
        envs.reset()
        rows = [part.blank() for part in envs.parts]
        for part in envs.parts:
            part.send(chosen[0])

        def turns(count: int) -> None:
            for number in range(count):
                part, row = envs.parts[number % groups], rows[number % groups]
                part.recv(row)
                part.send(chosen[number % len(chosen)])

        turns(10)
        began, count = time.perf_counter(), _EMULATED * cores // 2 // size
        turns(count)
        return count * size / (time.perf_counter() - began)
    finally:
        envs.close()


def _contestant(steps: int, algorithm: str, workers: int, strategy: str) -> Callable[[int], float]:
    options: dict[str, Any] = {
        "workers": workers, "strategy": strategy, "num-envs": ENVS, "rollout-length": LENGTH,
        "steps": BATCH + steps,
    }  # fmt: skip
    if algorithm == "ppo":
        options |= {"minibatch": MINIBATCH}
    else:
        options |= {"unrolls": 1, "rollout-length": 32}
    return lambda seed: _trained(algorithm, options | {"seed": seed}, BATCH)


def _on_gpu(algorithm: str, length: int, *more: str) -> Callable[[int], float]:
    envs = 16 * len(os.sched_getaffinity(0))
    batch = envs * length
    options: dict[str, Any] = {
        "workers": 1, "strategy": "single", "num-envs": envs, "rollout-length": length,
        "steps": 2 * _GPU_UPDATES * batch, "device": "cuda",
    }  # fmt: skip
    if algorithm == "ppo":
        options |= {"minibatch": min(_GPU_MINIBATCH, batch)}
    # Graphs are made in the first updates, which are not counted.
    return lambda seed: _trained(algorithm, options | {"seed": seed}, _GPU_UPDATES * batch, *more)


def _trained(algorithm: str, options: dict[str, Any], warm_up: int, *more: str) -> float:
    options |= {"env": ENV, "learning-rate": 2.5e-4, "entropy-weight": 0.01}
    if algorithm == "ppo":
        options |= {"epochs": EPOCHS, "clip": 0.1}
    words = [word for name, value in options.items() for word in (f"--{name}", str(value))]
    words += ["--shared-network", "--no-normalize-rewards", "--quiet", "--no-tensorboard", *more]
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "run")
        words += ["--run-dir", str(path)]
        output_of([sys.executable, "-m", "manyhands.cli.main", "train", algorithm, *words])
        lines = (path / "metrics.jsonl").read_text().splitlines()
    found = timed([json.loads(line) for line in lines], warm_up)
    return float(found["steps"] / found["seconds"])


def _why_no_peer() -> str:
    for module in ("stable_baselines3", "cv2"):
        if importlib.util.find_spec(module) is None:
            return f"there is no module {module} on the path"
    try:
        in_repository("sb3_ppo.py")
    except SupportError as error:
        return str(error)
    return ""


def _peer(steps: int, threads: int) -> Callable[[int], float]:
    def run(seed: int) -> float:
        setting = {
            "env": ENV, "envs": ENVS, "rollout_length": LENGTH, "minibatch": MINIBATCH,
            "epochs": EPOCHS, "learning_rate": 2.5e-4, "warm_up": BATCH, "steps": steps,
            "threads": threads, "seed": seed,
        }  # fmt: skip
        words = [sys.executable, str(in_repository("sb3_ppo.py")), json.dumps(setting)]
        found = json.loads(output_of(words, OMP_NUM_THREADS=str(threads)).splitlines()[-1])
        return float(found["steps"] / found["seconds"])

    return run


# -- what it comes to ------------------------------------------------------------------------------


def rows(speeds: dict[str, list[float]]) -> list[dict[str, Any]]:
    """One a contestant: median, and the medians of its ratios to the limit and to the peer's better
    setting."""
    peers = [name for name in speeds if name.startswith(PEER)]
    peer = max(peers, key=lambda name: median(speeds[name]), default="")

    def ratio(name: str, to: str) -> float | None:
        if to not in speeds:
            return None
        pairs = zip(speeds[name], speeds[to], strict=True)
        return round(median([one / other for one, other in pairs]), 3)

    return [
        {"name": name, "steps_per_second": found, "median": median(found),
         "of_limit": ratio(name, LIMIT), "times_peer": ratio(name, peer)}
        for name, found in speeds.items()
    ]  # fmt: skip


def claims(found: list[dict[str, Any]]) -> list[Claim]:
    """The best of our PPO runs on the CPU against the peer; those on a GPU against the limit."""
    cpu = [r for r in found if "manyhands ppo" in r["name"] and r["name"] not in ON_GPU]
    ours = [r["times_peer"] for r in cpu if r["times_peer"]]
    words = f"PPO on Pong from pixels on {len(os.sched_getaffinity(0))} cores, times {PEER}"
    shares = [
        Claim(f"{r['name']}, share of the emulator alone", r["of_limit"], ON_GPU[r["name"]][-1])
        for r in found if r["name"] in ON_GPU
    ]  # fmt: skip
    return [Claim(words, max(ours), TARGET), *shares] if ours else shares


def table(facts: dict[str, Any]) -> list[str]:
    def shown(value: float | None, form: str) -> str:
        return "-" if value is None else format(value, form)

    cells = [("Pong from pixels", "steps/s", "of the limit", "times the peer")]
    cells += [
        (r["name"], f"{r['median']:,.0f}", shown(r["of_limit"], ".0%"),
         shown(r["times_peer"], ".2f"))
        for r in facts["runs"]
    ]  # fmt: skip
    widths = [max(len(row[i]) for row in cells) for i in range(4)]
    lines = []
    for name, *numbers in cells:
        right = [cell.rjust(width) for cell, width in zip(numbers, widths[1:], strict=True)]
        lines.append("  ".join([name.ljust(widths[0]), *right]))
    machine = facts["machine"]
    lines += ["", *verdicts(facts["claims"])]
    lines += [f"NOT JUDGED  {reason}" for reason in facts["not_judged"]]
    if "peer_missing" in facts:
        lines.append(f"{PEER}: not measured: {facts['peer_missing']}")
    lines.append(
        f"medians of {facts['repeats']} rounds in turn, {facts['setting']['steps']:,} steps each, "
        f"on {machine['cores']} cores of {machine['cpu']}, load {machine['load']} at the start"
    )
    return lines

"""PPO on CartPole-v1 with learning on, beside Stable-Baselines3: environment steps a second

One setting for all: two MLPs of 64 x 64, 8 environments x 256 steps = 2,048 an update, minibatches
of 256, 10 epochs, the same learning rate, clip and discount. Ours: one worker, and two workers with
each strategy, as `manyhands train` starts them. The peer: PPO with DummyVecEnv, on 1 and on 2 torch
threads; its better one counts (one that is hopeless in a short trial is left out of the rounds).
They take turns, round after round, so that whatever else the machine does hits all of them alike.
The clock of each runs from the end of the update that closes the warm-up to the end of the last
update, over the same number of steps; starting is not counted.

The peer belongs to the repository (benchmarks/), not to the package: in a copy of the repository it
is installed on demand into a virtual environment of its own, with this environment's torch version.
Elsewhere, and without a network, the benchmark measures our own runs only, and says so.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
from argparse import ArgumentParser, Namespace
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from manyhands.bench._tools import Claim, fingerprint, median, output_of, peers, verdicts
from manyhands.errors import ConfigError, SupportError

ENVS, ROLLOUT_LENGTH, MINIBATCH, EPOCHS = 8, 256, 256, 10
HIDDEN = (64, 64)
LEARNING_RATE = 1e-3
BATCH = ENVS * ROLLOUT_LENGTH
WARM_UP = 2 * BATCH  # steps that are not counted: memory is touched, caches are filled
STEPS = 20 * BATCH
REPEATS = 5
TARGET = 3.0  # times the peer's speed

PEER = "stable-baselines3"
_RESAMPLES = 10_000

# name in the table -> workers, strategy
OURS = {
    "manyhands, 1 worker": (1, "single"),
    "manyhands, 2 workers, allreduce": (2, "allreduce"),
    "manyhands, 2 workers, gather": (2, "gather"),
}

Run = dict[str, Any]  # steps, seconds, mean_return


def add_options(parser: ArgumentParser) -> None:
    parser.add_argument(
        "--repeats",
        type=int,
        default=REPEATS,
        metavar="N",
        help="how often each takes its turn (default: %(default)s)",
    )
    parser.add_argument(
        "--steps",
        type=int,
        default=STEPS,
        metavar="N",
        help=f"steps that are timed, rounded up to whole updates of {BATCH:,} "
        "(default: %(default)s)",
    )
    parser.add_argument(
        "--peer-venv",
        metavar="DIR",
        help="the peer's virtual environment; made there when there is none "
        "(default: one in ~/.cache/manyhands/peers)",
    )
    parser.add_argument("--no-peer", action="store_true", help="measure our own runs only")


def measure(options: Namespace) -> dict[str, Any]:
    if options.repeats < 1 or options.steps < 1:
        raise ConfigError(
            f"--repeats {options.repeats} --steps {options.steps}: at least 1 of each is needed"
        )
    steps = -(-options.steps // BATCH) * BATCH
    facts: dict[str, Any] = {
        "benchmark": "train",
        "machine": fingerprint(),
        "setting": _setting(steps),
        "repeats": options.repeats,
        "peer": {"name": PEER},
    }
    contestants = _ours(steps)
    try:
        if options.no_peer:
            raise SupportError("not asked for")
        contestants |= peers().ppo_runs(options.peer_venv, facts["setting"], BATCH, facts["peer"])
    except SupportError as error:
        facts["peer"]["missing"] = str(error)
        print(f"going on without {PEER}: {error}", flush=True)
    facts["runs"], facts["loads"] = _take_turns(contestants, options.repeats, facts["peer"])
    facts["ratios"] = ratios(facts["runs"])
    facts["claims"] = [c.facts for c in claims(facts["ratios"])]
    return facts


def _setting(steps: int) -> dict[str, Any]:
    return {
        "env": "CartPole-v1",
        "envs": ENVS,
        "rollout_length": ROLLOUT_LENGTH,
        "minibatch": MINIBATCH,
        "epochs": EPOCHS,
        "hidden": list(HIDDEN),
        "learning_rate": LEARNING_RATE,
        "warm_up": WARM_UP,
        "steps": steps,
    }


def _take_turns(
    contestants: dict[str, Callable[[int], Run]], repeats: int, peer: dict[str, Any]
) -> tuple[dict[str, Any], list[float]]:
    """Every contestant once a round; a round's number is the seed of all its runs."""
    runs: dict[str, Any] = {
        name: {"steps_per_second": [], "mean_return": []} for name in contestants
    }
    loads = []
    for number in range(1, repeats + 1):
        loads.append(round(os.getloadavg()[0], 2))
        for name, contest in contestants.items():
            run = contest(number)
            speed = run["steps"] / run["seconds"]
            print(f"round {number} of {repeats}  {name:<36}{speed:>9,.0f} steps/s", flush=True)
            runs[name]["steps_per_second"].append(round(speed, 1))
            runs[name]["mean_return"].append(run["mean_return"])
            peer |= {"versions": run["versions"]} if "versions" in run else {}
    for row in runs.values():
        row["median"] = median(row["steps_per_second"])
    return runs, loads


# -- our own runs ----------------------------------------------------------------------------------


def _ours(steps: int) -> dict[str, Callable[[int], Run]]:
    def contestant(workers: int, strategy: str) -> Callable[[int], Run]:
        return lambda seed: _own_run(workers, strategy, steps, seed)

    return {name: contestant(*what) for name, what in OURS.items()}


def _own_run(workers: int, strategy: str, steps: int, seed: int) -> Run:
    """`manyhands train`, as a user types it; times from the records that it leaves."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "run")
        options = {
            "env": "CartPole-v1",
            "workers": workers,
            "strategy": strategy,
            "num-envs": ENVS,
            "rollout-length": ROLLOUT_LENGTH,
            "minibatch": MINIBATCH,
            "epochs": EPOCHS,
            "learning-rate": LEARNING_RATE,
            "steps": WARM_UP + steps,
            "seed": seed,
            "run-dir": path,
        }
        words = [word for name, value in options.items() for word in (f"--{name}", str(value))]
        words += ["--hidden", *map(str, HIDDEN), "--quiet"]
        output_of([sys.executable, "-m", "manyhands.cli.main", "train", "ppo", *words])
        lines = (path / "metrics.jsonl").read_text().splitlines()
    return timed([json.loads(line) for line in lines], WARM_UP)


def timed(records: list[dict[str, Any]], warm_up: int) -> Run:
    """Steps and seconds between the update that closes the warm-up and the last."""
    first = next(r for r in records if r["env_steps"] >= warm_up)
    last = records[-1]
    return {
        "steps": last["env_steps"] - first["env_steps"],
        "seconds": last["wall_seconds"] - first["wall_seconds"],
        "mean_return": last["mean_return"],
    }


# -- what it comes to ------------------------------------------------------------------------------


def ratios(runs: dict[str, Any]) -> dict[str, Any]:
    """Each of ours against the peer's better setting: ratio of medians, 95 % interval."""
    peers = {name: row for name, row in runs.items() if name.startswith(PEER)}
    if not peers:
        return {}
    best = max(peers, key=lambda name: peers[name]["median"])
    found = {}
    for name in runs:
        if name not in peers:
            ours, theirs = (runs[n]["steps_per_second"] for n in (name, best))
            low, high = interval(ours, theirs)
            ratio = median(ours) / median(theirs)
            found[name] = {"ratio": round(ratio, 2), "low": low, "high": high, "to": best}
    return found


def interval(ours: list[float], theirs: list[float]) -> tuple[float, float]:
    """95 % bootstrap interval of the ratio of medians; rounds are drawn whole, as pairs."""
    drawn = np.random.default_rng(0).integers(len(ours), size=(_RESAMPLES, len(ours)))
    medians = (np.median(np.asarray(speeds)[drawn], axis=1) for speeds in (ours, theirs))
    low, high = np.quantile(np.divide(*medians), [0.025, 0.975])
    return round(float(low), 2), round(float(high), 2)


def claims(found: dict[str, Any]) -> list[Claim]:
    """The better of our two-worker runs, as the better of the peer's settings counts."""
    two = [row["ratio"] for name, row in found.items() if OURS[name][0] == 2]
    words = f"PPO on CartPole-v1 with two workers, times the speed of {PEER}"
    return [Claim(words, max(two), TARGET)] if two else []


def table(facts: dict[str, Any]) -> list[str]:
    rows = [("PPO on CartPole-v1, learning on", "steps/s", "times the peer", "95 %", "return")]
    for name, row in facts["runs"].items():
        ratio = facts["ratios"].get(name)
        returns = [r for r in row["mean_return"] if r is not None]
        rows.append(
            (
                name,
                f"{row['median']:,.0f}",
                f"{ratio['ratio']:.2f}" if ratio else "-",
                f"{ratio['low']:.2f} to {ratio['high']:.2f}" if ratio else "-",
                f"{median(returns):.0f}" if returns else "-",
            )
        )
    widths = [max(len(row[i]) for row in rows) for i in range(5)]
    lines = []
    for name, *cells in rows:
        numbers = [cell.rjust(width) for cell, width in zip(cells, widths[1:], strict=True)]
        lines.append("  ".join([name.ljust(widths[0]), *numbers]))
    lines.append("")
    peer, machine = facts["peer"], facts["machine"]
    if "missing" in peer:
        lines.append(f"{PEER}: not measured: {peer['missing']}")
    elif "versions" in peer:
        lines.append("peer: " + ", ".join(f"{n} {v}" for n, v in peer["versions"].items()))
    loads = facts["loads"]
    lines += [
        *verdicts(facts["claims"]),
        f"medians of {facts['repeats']} rounds in turn, {facts['setting']['steps']:,} steps each "
        f"after {facts['setting']['warm_up']:,} of warm-up; return: mean of the last 100 episodes",
        f"on {machine['cores']} cores of {machine['cpu']}, load {min(loads)} to {max(loads)}; "
        "only the ratios travel to other machines",
    ]
    if machine["load"] > 0.5:
        lines.append(
            "the machine was not idle, where two processes get twice the share of one and threads "
            "wait for each other: run it again on an idle one"
        )
    return lines

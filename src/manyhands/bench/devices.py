"""seconds of an update by phase on the CPU, on one GPU and on two: rollout, optimisation, logging

The table of the exercise that this project grew out of (docs/how-to/pendulum.md): PPO on the
pendulum that has to be swung up, 20 trajectories of 100 steps an update, 20 epochs for the policy
and 40 more for the critic. The rows take turns, round after round; shown are means over the updates
of a run, medians over rounds; the first update is not counted. A row for which the machine has too
few GPUs says so. Acting stays in the process that steps the environments: on a GPU each of its
steps waits for one, which is why a network as small as this one is fastest on the CPU (--hidden
takes another).
"""

from __future__ import annotations

from argparse import ArgumentParser, Namespace
from typing import Any

from manyhands import devices
from manyhands.bench._tools import fingerprint, median
from manyhands.bench.scaling import PHASES, Run, measured
from manyhands.config import Experiment, build
from manyhands.config.validate import check
from manyhands.errors import ConfigError

ENV, ENVS, LENGTH, MINIBATCH = "manyhands/PendulumSwingUp-v0", 20, 100, 500
UPDATES, ROUNDS = 20, 3

# name in the table -> device, workers
ROWS = {
    "CPU, 1 worker": ("cpu", 1),
    "CPU, 2 workers": ("cpu", 2),
    "1 GPU, 1 worker": ("cuda", 1),
    "2 GPUs, 2 workers": ("cuda", 2),
}


def add_options(parser: ArgumentParser) -> None:
    for name, default, words in (
        ("updates", UPDATES, "updates of each run; the first is not counted"),
        ("rounds", ROUNDS, "how often each run takes its turn"),
    ):
        words += " (default: %(default)s)"
        parser.add_argument(f"--{name}", type=int, default=default, metavar="N", help=words)
    parser.add_argument(
        "--hidden", default="64,64", metavar="N,N", help="units of the layers (default: 64,64)"
    )


def measure(options: Namespace) -> dict[str, Any]:
    for name, least in (("updates", 2), ("rounds", 1)):
        if getattr(options, name) < least:
            raise ConfigError(f"--{name} {getattr(options, name)}: at least {least} is needed")
    gpus = devices.present()
    turns = {
        row: _experiment(device, workers, options.updates, options.hidden)
        for row, (device, workers) in ROWS.items()
        if device == "cpu" or workers <= gpus
    }
    rounds: list[dict[str, Run]] = []
    for _ in range(options.rounds):
        rounds.append({row: measured([experiment]) for row, experiment in turns.items()})
    return {
        "benchmark": "devices",
        "machine": fingerprint() | {"gpus": gpus},
        "settings": {"env": ENV, "num_envs": ENVS, "rollout_length": LENGTH,
                     "hidden": options.hidden, "updates": options.updates,
                     "rounds": options.rounds},
        "runs": [_seconds(row, [r[row] for r in rounds], options.updates - 1) for row in turns],
        "missing": [row for row in ROWS if row not in turns],
        "claims": [],
    }  # fmt: skip


def _experiment(device: str, workers: int, updates: int, hidden: str) -> Experiment:
    try:
        layers = tuple(int(units) for units in hidden.split(","))
    except ValueError:
        raise ConfigError(f"--hidden {hidden}: numbers are needed, as 64,64") from None
    experiment = build(
        "ppo",
        env=ENV,
        strategy="allreduce" if workers > 1 else "single",
        workers=workers,
        device=device,
        num_envs=ENVS,
        rollout_length=LENGTH,
        steps=updates * ENVS * LENGTH,
        hidden=layers,
        minibatch=MINIBATCH,
        epochs=20,
        critic_epochs=40,
        critic_learning_rate=1e-3,
        quiet=True,
    )
    check(experiment)
    return experiment


def _seconds(name: str, runs: list[Run], updates: int) -> dict[str, Any]:
    """Of one update."""

    def of(seconds: list[float]) -> float:
        return round(median(seconds) / updates, 5)

    phases = {phase: of([run["phases"][phase] for run in runs]) for phase in PHASES}
    speed = round(median([run["steps_per_second"] for run in runs]), 1)
    update = of([run["seconds"] for run in runs])
    return {"name": name, "steps_per_second": speed, "update": update} | phases


def table(facts: dict[str, Any]) -> list[str]:
    settings, machine = facts["settings"], facts["machine"]
    rows = [["seconds of an update", "all of it", *PHASES, "steps/s"]]
    for run in facts["runs"]:
        seconds = [f"{run[name]:.4f}" for name in ("update", *PHASES)]
        rows.append([run["name"], *seconds, f"{run['steps_per_second']:,.0f}"])
    for name in facts["missing"]:
        rows.append([name, *["-"] * (len(rows[0]) - 1)])
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    lines = []
    for name, *cells in rows:
        numbers = [cell.rjust(width) for cell, width in zip(cells, widths[1:], strict=True)]
        lines.append("  ".join([name.ljust(widths[0]), *numbers]))
    lines.append("")
    if facts["missing"]:
        lines.append(f"not measured: {'; '.join(facts['missing'])}: GPUs here: {machine['gpus']}")
    lines.append(
        f"ppo on {settings['env']}, {settings['num_envs']} envs × {settings['rollout_length']} "
        f"steps an update, networks of {settings['hidden']}; the main worker's phases, medians of "
        f"{settings['rounds']} rounds"
    )
    lines.append(
        f"on {machine['cores']} cores of {machine['cpu']}, load {machine['load']} at the start"
    )
    return lines

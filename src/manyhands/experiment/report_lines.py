"""What a run prints: its arithmetic at the start, where the time went at the end."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from manyhands.config import Experiment
from manyhands.experiment.bottleneck import bottleneck, shares


def start_table(experiment: Experiment, facts: Mapping[str, Any]) -> str:
    """Workers × envs × length = batch, and all that follows from it.

    Args:
        experiment: what will run.
        facts: what only the run knows: "threads" per process, "device", "network" (the user's
            own), "run_dir"; any other fact gets a row of its own under its name.
    """
    run = experiment.run
    facts = dict(facts)
    rows = {
        "training": f"{experiment.spec.name} on {run.env}, seed {run.seed}",
        "workers": _workers(experiment, facts.pop("threads", None)),
        "device": str(facts.pop("device", run.device)),
        **({"network": str(facts.pop("network"))} if "network" in facts else {}),
        "batch": _batch(experiment),
        "updates": _updates(experiment),
    }
    minibatch = getattr(experiment.options, "minibatch", 0)
    if minibatch and run.batch:
        rows["minibatches"] = _minibatches(experiment, minibatch)
    if run.target_return is not None:
        rows["target"] = f"mean return of the last 100 episodes at least {run.target_return:g}"
    if "run_dir" in facts:
        rows["results"] = str(facts.pop("run_dir"))
    rows |= {name.replace("_", " "): str(value) for name, value in facts.items()}
    return _aligned(rows)


def end_table(experiment: Experiment, summary: Mapping[str, Any]) -> str:
    """How it went, the seconds and share of each phase, and the bottleneck in one sentence."""
    wall = float(summary["wall_seconds"])
    mean, best = summary.get("mean_return"), summary.get("best_return")
    rows = {
        "end": ("solved" if summary.get("solved") else str(summary.get("exit", "finished")))
        + f" after {number(summary['env_steps'])} steps, {number(summary['updates'])} updates, "
        + f"{number(summary['episodes'])} episodes",
        "speed": f"{number(summary['steps_per_second'])} steps/s, {wall:.1f} s",
        "return": "no episode has finished"
        if mean is None or best is None
        else f"{mean:.2f} on average over the last 100 episodes, {best:.2f} at best",
    }
    phases: Mapping[str, float] = summary.get("phase_seconds") or {}
    for i, (name, seconds, share) in enumerate(shares(phases, wall)):
        rows["time" if i == 0 else " " * i] = f"{name:<16} {seconds:9.2f} s {share:6.1%}"
    lines = _aligned(rows)
    if phases:
        lines += "\n" + bottleneck(phases, experiment, wall_seconds=wall)
    return lines


def number(value: float) -> str:
    """1234567 -> 1,234,567; with one decimal below a hundred unless it is whole."""
    return f"{value:,.0f}" if abs(value) >= 100 or value == int(value) else f"{value:,.1f}"


def _workers(experiment: Experiment, threads: int | None) -> str:
    run = experiment.run
    each = "" if threads is None else f", {_many(threads, 'thread')} per process"
    parts = run.roles.counts
    who = ", ".join(_many(count, role) for role, count in parts.items())
    who = f" ({who})" if len(parts) > 1 else ""
    return f"{run.workers}{who}, {experiment.strategy} on the {run.engine} engine{each}"


def _batch(experiment: Experiment) -> str:
    run = experiment.run
    who = "acting worker" if run.actors < run.workers else "worker"
    here = f"{_many(run.actors, who)} × {_many(run.envs_per_worker, 'env')} each"
    if run.collect == "episodes":
        return f"{here}: whole episodes, at least {number(run.batch)} steps an update"
    return f"{here} × {_many(run.rollout_length, 'step')} = {number(run.batch)} steps an update"


def _updates(experiment: Experiment) -> str:
    run = experiment.run
    if not run.batch:
        return "unknown"
    count = math.ceil(run.steps / run.batch)
    about = "at most " if run.collect == "episodes" else ""
    return f"{about}{number(count)} ({number(run.steps)} steps / {number(run.batch)} an update)"


def _minibatches(experiment: Experiment, minibatch: int) -> str:
    batch = experiment.run.batch
    count = math.ceil(batch / minibatch)
    epochs = getattr(experiment.options, "epochs", 1)
    return (
        f"{count} of {number(minibatch)} steps (all workers), {_many(epochs, 'epoch')}: "
        f"{number(count * epochs)} gradient steps an update"
    )


def _many(count: int, noun: str) -> str:
    return f"{number(count)} {noun}{'' if count == 1 else 's'}"


def _aligned(rows: Mapping[str, str]) -> str:
    width = max(len(name) for name in rows) + 2
    return "\n".join(f"{name:<{width}}{text}" for name, text in rows.items())

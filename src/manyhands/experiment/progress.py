"""What a run prints: its arithmetic at the start, how far it is, where the time went at the end.

    terminal    a few lines that are redrawn in place (live.py)
    notebook    one line that is rewritten
    elsewhere   a new line every ten seconds

A reader that goes away is no reason to stop the training.
"""

from __future__ import annotations

import math
import os
import sys
import time
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol, TextIO

from manyhands.config import Experiment
from manyhands.experiment.bottleneck import Phases, bottleneck, shares
from manyhands.terminal import Outlet, Relay, Standing, can_draw, in_notebook, is_terminal

_LIVE_SECONDS, _NOTEBOOK_SECONDS, _FILE_SECONDS = 0.2, 0.5, 10.0
_FIRST_LINE_SECONDS = 2.0  # a file gets its first line early: a sign that it runs
_SPEED_SECONDS = 10.0  # the speed shown is that of the last so many seconds
_MOST_SECONDS = 5.0  # a view that is slow to draw is drawn less often, but at least this often
_DRAWING_SHARE = 100  # drawing may take one part in so many of the time


class Facts(NamedTuple):
    """What a run tells after an update."""

    env_steps: int
    mean_return: float | None
    note: str
    info: Mapping[str, float]
    phases: Phases | Mapping[str, float]
    alive: int | None
    restarts: int


@dataclass(frozen=True)
class State:
    """The facts, and what follows from them at the moment of drawing."""

    facts: Facts
    steps: int  # of the whole run
    seconds: float  # since the start, or since the run was resumed
    speed: float  # steps a second, of late
    left: float | None  # seconds to go at that speed; None when it stands still
    best: float | None  # the highest mean return so far
    target: float | None
    workers: int

    @property
    def share(self) -> float:
        return min(1.0, self.facts.env_steps / max(1, self.steps))


class View(Protocol):
    def show(self, state: State) -> None: ...
    def say(self, text: str) -> None: ...
    def close(self, state: State | None) -> None: ...


class Progress:
    """Shows a run on standard output.

    Args:
        steps: environment steps of the whole run.
        quiet: print nothing.
        stream: instead of standard output.
        interval: seconds between two drawings; by default 0.2 in a terminal, 0.5 in a notebook,
            and 10 elsewhere.
        target: the mean return that ends the run.
        workers: how many there are meant to be.
    """

    def __init__(
        self,
        steps: int,
        *,
        quiet: bool = False,
        stream: TextIO | None = None,
        interval: float | None = None,
        target: float | None = None,
        workers: int = 1,
    ) -> None:
        self._steps, self._target, self._workers = steps, target, workers
        self._view, usual = _choose_view(sys.stdout if stream is None else stream, quiet)
        self._interval = usual if interval is None else interval
        self._facts: Facts | None = None
        self._best: float | None = None
        self._alive: int | None = None
        self._restarts = 0
        self._started = time.perf_counter()
        self._next = self._started + min(self._interval, _FIRST_LINE_SECONDS)
        self._seen: deque[tuple[float, int]] = deque()  # (time, steps), for the speed

    def update(
        self,
        env_steps: int,
        mean_return: float | None = None,
        note: str = "",
        *,
        info: Mapping[str, float] | None = None,
        phases: Phases | Mapping[str, float] | None = None,
        alive: int | None = None,
        restarts: int | None = None,
        resumed_steps: int = 0,
    ) -> None:
        """Draw if it is time to; a microsecond when it is not.

        Args:
            env_steps: of all workers, so far.
            mean_return: of the last episodes; None before the first has ended.
            note: words to show as they are.
            info: what the update reported: losses, "lag" where there is any.
            phases: where the time went.
            alive: workers that are there now; None where an update needs all of them.
            restarts: of workers, so far. Both stay what `workers_are` has said if not given.
            resumed_steps: what an earlier process did of `env_steps`; no part of the speed.
        """
        if self._view is None:
            return
        # The phases are asked only when they are drawn: their totals take longer than all this.
        self.workers_are(alive, restarts)
        self._facts = Facts(
            env_steps, mean_return, note, info or {}, phases or {}, self._alive, self._restarts
        )  # fmt: skip
        if mean_return is not None and (self._best is None or mean_return > self._best):
            self._best = mean_return
        now = time.perf_counter()
        if not self._seen:
            self._seen.append((self._started, resumed_steps))
        if now < self._next:
            return
        self._see(now, env_steps)
        self._view.show(self._state(now))
        spent = time.perf_counter() - now
        wait = min(_MOST_SECONDS, max(self._interval, _DRAWING_SHARE * spent))
        self._next = now + (self._interval if self._interval in (0, _FILE_SECONDS) else wait)

    def workers_are(self, alive: int | None = None, restarts: int | None = None) -> None:
        """How many are there, and how many were started again: shown from the next update on."""
        self._alive = self._alive if alive is None else alive
        self._restarts = self._restarts if restarts is None else restarts

    def say(self, text: str) -> None:
        """Lines that stay, such as the tables at the start and the end."""
        if self._view is not None:
            self._view.say(text)

    def close(self) -> None:
        """Leave the last state behind, and the terminal as it was."""
        if self._view is not None:
            now = time.perf_counter()
            self._view.close(None if self._facts is None else self._state(now))

    def _see(self, now: float, env_steps: int) -> None:
        """Remember this moment, forget those too long ago to tell the speed of late."""
        self._seen.append((now, env_steps))
        reach = max(_SPEED_SECONDS, 3 * self._interval)
        # The start is forgotten as soon as it can be: making environments is no steps.
        while len(self._seen) > 2 and (
            self._seen[0][0] == self._started or now - self._seen[0][0] > reach
        ):
            self._seen.popleft()

    def _state(self, now: float) -> State:
        assert self._facts is not None
        then, steps = self._seen[0]
        done = self._facts.env_steps - steps
        speed = max(0.0, done / (now - then)) if now > then else 0.0
        left = max(0, self._steps - self._facts.env_steps)
        return State(
            facts=self._facts,
            steps=self._steps,
            seconds=now - self._started,
            speed=speed,
            left=left / speed if speed > 0 else None,
            best=self._best,
            target=self._target,
            workers=self._workers,
        )


class Lines:
    """One line after the other."""

    def __init__(self, outlet: Outlet) -> None:
        self._outlet = outlet
        self._standing = Standing()
        if outlet.stream is sys.stdout:
            self._standing.put("stdout", Relay(outlet))
            if sys.stderr is not None:
                self._standing.put("stderr", Relay(Outlet(sys.stderr)))

    def show(self, state: State) -> None:
        self._outlet.write(one_line(state) + "\n")

    def say(self, text: str) -> None:
        self._outlet.write(text + "\n")

    def close(self, state: State | None) -> None:
        self._standing.remove()


class Rewritten:
    """One line, written over: what a notebook can show."""

    def __init__(self, outlet: Outlet) -> None:
        self._outlet = outlet
        self._length = 0  # of the line that waits for its end

    def show(self, state: State) -> None:
        line = one_line(state)
        # Blanks, because not every notebook knows the code that clears the rest of a line.
        self._outlet.write("\r" + line.ljust(self._length))
        self._length = len(line)

    def say(self, text: str) -> None:
        self._outlet.write(self._end() + text + "\n")

    def close(self, state: State | None) -> None:
        if state is not None:
            self.show(state)
        self._outlet.write(self._end())

    def _end(self) -> str:
        was_open, self._length = self._length > 0, 0
        return "\n" if was_open else ""


def one_line(state: State) -> str:
    """63%  126,976 steps  6,332 steps/s  return 465.94  12s left"""
    facts = state.facts
    mean = facts.mean_return
    lag = lag_of(facts)
    parts = [
        f"{state.share:4.0%}",
        f"{number(facts.env_steps)} steps",
        f"{number(state.speed)} steps/s",
        "return -" if mean is None else f"return {mean:.2f}",
        *([f"{facts.alive} of {state.workers} at work"] if some_are_missing(state) else []),
        *([f"lag {lag:.3g}"] if lag is not None else []),
        *([f"{facts.restarts} restarted"] if facts.restarts else []),
        *([facts.note] if facts.note else []),
        "? left" if state.left is None else f"{duration(state.left)} left",
    ]
    return "  ".join(parts)


def some_are_missing(state: State) -> bool:
    """Of the workers that are meant to be there."""
    return state.facts.alive not in (None, state.workers)


def lag_of(facts: Facts) -> float | None:
    """How many versions old the data learned from is, on average; None where data cannot be old."""
    return facts.info.get("lag", facts.info.get("lag_mean"))


def duration(seconds: float) -> str:
    """3725 -> 1h02m; 65 -> 1m05s; 5 -> 5s."""
    whole = round(seconds)
    if whole >= 3600:
        return f"{whole // 3600}h{whole % 3600 // 60:02d}m"
    return f"{whole // 60}m{whole % 60:02d}s" if whole >= 60 else f"{whole}s"


def _choose_view(stream: TextIO | None, quiet: bool) -> tuple[View | None, float]:
    """What suits the stream, and the seconds between two drawings."""
    if quiet or stream is None:
        return None, _FILE_SECONDS
    outlet = Outlet(stream)
    # A kernel gives the commands of its cells (`!manyhands train`) a terminal that cannot move
    # the cursor up.
    if in_notebook(stream) or (is_terminal(stream) and "JPY_PARENT_PID" in os.environ):
        return Rewritten(outlet), _NOTEBOOK_SECONDS
    if can_draw(stream):
        from manyhands.experiment.live import Live

        return Live(outlet), _LIVE_SECONDS
    return Lines(outlet), _FILE_SECONDS


# -- tables at the start and the end ---------------------------------------------------------------


def start_table(experiment: Experiment, facts: Mapping[str, Any]) -> str:
    """Workers × envs × length = batch, and all that follows from it.

    Args:
        experiment: what will run.
        facts: what only the run knows: "threads" per process, "device", "network" (the user's
            own), "environments", "run_dir"; any other fact gets a row of its own under its name.
    """
    run = experiment.run
    facts = dict(facts)
    rows: dict[str, str] = {
        "training": f"{experiment.spec.name} on {run.env}, seed {run.seed}",
        "workers": _workers(experiment, facts.pop("threads", None)),
        "device": str(facts.pop("device", run.device)),
        **{name: str(facts.pop(name)) for name in ("network", "environments") if name in facts},
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

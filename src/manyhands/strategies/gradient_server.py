"""Workers push gradients when they are ready; a server takes the steps. A2C on it is A3C.

    worker 0   envs ─► rows ─► gradient ─┐                  ┌── newest weights
    worker 1   envs ─► rows ─► gradient ─┼─► server: k pushes, one step ─► version + 1
    worker 2   envs ─► rows ─► gradient ─┘                  └── newest weights

Who holds what: the optimiser and its schedules live on the server; each worker has weights that
may be some versions old. What moves: one gradient a rollout, one set of weights a version.
Asynchronous: nobody waits for the slowest; a gradient that was computed with weights more than
`max_lag` versions old is refused, counted, and computed anew from the newest weights. It wins when
rollouts take uneven time; its price is gradients that are a little out of date.

With very many workers, `reducers` stand between: each adds up some pushes and sends their sum.
pushed = applied + refused holds at the end of every run, or the run says so.
"""

from __future__ import annotations

from collections import deque
from typing import Any

import numpy as np
import torch

from manyhands import trees
from manyhands.algorithms.a2c import A2C
from manyhands.blocks.gradients import Reducer
from manyhands.collect.rollout import Collector
from manyhands.errors import WorkerError
from manyhands.math.optimiser import check_gradient, make_schedule
from manyhands.strategies.context import Context, Part
from manyhands.strategies.messages import Inbox, Message, Weights, channel_to, goodbye, send
from manyhands.strategies.progress import RunProgress
from manyhands.types import Batch

_KEPT = 16  # refusals of each worker that the server repeats with every version


def run(context: Context, progress: RunProgress) -> None:
    part(context, progress).run()


def part(context: Context, progress: RunProgress) -> Part:
    match context.part.role:
        case "server":
            return Server(context, progress)
        case "reducer":
            return Adder(context)
        case _:
            return Pusher(context)


def sends_to(context: Context, rank: int) -> int:
    """Where a worker's, or a reducer's, gradients go."""
    reducers = context.roles.ranks("reducer")
    if rank in reducers or not reducers:
        return 0
    return reducers[context.roles.of(rank).rank % len(reducers)]


# -- workers ---------------------------------------------------------------------------------------


class Pusher(Part):
    """Plays with the newest weights it has, and pushes the gradient of each rollout."""

    def __init__(self, context: Context) -> None:
        self.context, algorithm = context, context.algorithm
        self._weights = Weights(context)
        self._outbox = channel_to(context, sends_to(context, context.rank))
        self._weights.pull()
        envs, noise = context.make_envs()
        length = context.experiment.run.rollout_length
        self.stepper = self._collector = Collector(
            envs,
            algorithm.actor,
            length,
            noise,
            context.normaliser,
            state_size=getattr(algorithm.model, "state_size", 0),
        )
        self._under_way: dict[int, Batch] = {}  # rows whose gradient the server has not answered

    def goes_on(self) -> bool:
        return not self.context.stop

    def update(self) -> None:
        context = self.context
        with context.phases("rollout"):
            rollout = self._collector.take()
            # Copied: the collector writes over its rollout.
            batch = trees.map(np.array, context.algorithm.prepare(rollout))
        self._push(batch, rollout.steps, rollout.episodes)
        news = self._weights.pull()
        if not context.stop:
            for rows in refused(context, self._under_way, news):
                self._push(rows, 0, ())  # the same rows, with the newest weights

    def _push(self, batch: Batch, steps: int, episodes: Any) -> None:
        context, algorithm = self.context, self.context.algorithm
        assert isinstance(algorithm, A2C)
        with context.phases("gradient"):
            stats = algorithm.push(batch)
        norm = float(algorithm.flat.grad.norm())
        check_gradient(norm, algorithm.version + 1, f", which {context.name} computed,")
        load = {
            "gradient": algorithm.flat.grad,
            "version": algorithm.version,
            "stats": np.array(stats),
            "count": 1,
        }
        number = send(context, self._outbox, load, steps=steps, episodes=episodes)
        self._under_way[number] = batch

    def close(self) -> None:
        goodbye(self.context, self._outbox)


def refused(
    context: Context, under_way: dict[int, Batch], news: dict[str, Any] | None
) -> list[Batch]:
    """Rows whose gradient came too late; what the server has answered for is forgotten."""
    me = context.part.rank
    # What the server last heard may be from before this worker was restarted: its numbers were
    # others.
    if news is None or "handled" not in news or int(news["restarts"][me]) != context.restarts:
        return []
    last, too_late = int(news["handled"][me]), set(news["refused"][me].tolist())
    answered = {n: under_way.pop(n) for n in list(under_way) if n <= last}
    return [batch for number, batch in answered.items() if number in too_late]


# -- reducers --------------------------------------------------------------------------------------


class Adder(Part):
    """Adds up some pushes and sends their sum, until all senders have said good-bye."""

    def __init__(self, context: Context) -> None:
        self.context, run = context, context.experiment.run
        self._senders = [r for r in context.acting if sends_to(context, r) == context.rank]
        self._inbox = Inbox(context, channel_to(context, context.rank), self._senders)
        self._outbox = channel_to(context, 0)
        self._adding = Reducer(max(1, run.pushes // run.reducers))
        self._messages: list[Message] = []

    def goes_on(self) -> bool:
        return not self._inbox.all_left

    def update(self) -> None:
        message = self._inbox.get()
        if message is not None:
            self._adding.offer(message["gradient"].numpy(), int(message["version"]), 0)
            self._messages.append(message)
        if self._adding.full or (self._inbox.all_left and self._messages):
            self._outbox.put(_summed(self._adding, self._messages))
            self._messages = []

    def close(self) -> None:
        for last in self._inbox.left.values():
            self._outbox.put(last)
        goodbye(self.context, self._outbox)


def _summed(adding: Reducer, messages: list[Message]) -> Message:
    oldest = adding.oldest
    total, count = adding.take_sum()
    return {
        "gradient": torch.from_numpy(total),
        "version": oldest,
        "count": count,
        "stats": np.sum([m["stats"] for m in messages], axis=0),
        "parts": [
            {k: m[k] for k in ("actor", "restarts", "number", "steps", "episodes", "seen")}
            for m in messages
        ],
    }


# -- the server ------------------------------------------------------------------------------------


class Server(Part):
    """Takes gradients as they arrive; so many of them are one step of the optimiser."""

    def __init__(self, context: Context, progress: RunProgress) -> None:
        self.context, self.progress, run = context, progress, context.experiment.run
        senders = context.acting + context.roles.ranks("reducer")
        self._weights = Weights(context)
        self._inbox = Inbox(context, channel_to(context, 0), senders)
        self._reducer = Reducer(run.pushes, run.reduce, run.max_lag)
        self._answers = _Answers(context)
        progress.begin()
        self._weights.publish()

    def goes_on(self) -> bool:
        return self.progress.goes_on() and not self._inbox.all_left

    def update(self) -> None:
        """One step; none where everybody has left before there was enough for one."""
        context, progress, reducer = self.context, self.progress, self._reducer
        stats = np.zeros(0)
        while not reducer.full:
            if self._inbox.all_left:
                return
            message = self._inbox.get()
            if message is None or not take(message, context, progress, reducer, self._answers):
                continue
            stats = message["stats"] if stats.size == 0 else stats + message["stats"]
        with context.phases("optimisation"):
            count = reducer.waiting
            info = step(context, reducer, progress.fraction)
        self._weights.publish(**self._answers.news())
        means = dict(zip(context.algorithm.stats, stats / count, strict=True))
        progress.close_update(means | info, inbox=self._inbox)

    def close(self) -> None:
        self.context.stop = True
        self._weights.publish()
        finish(self.progress, self._inbox, self._reducer)


def take(
    message: Message, context: Context, progress: RunProgress, reducer: Reducer, answers: _Answers
) -> bool:
    """Count a push, or the sum of several, and offer it; whether it was taken."""
    version, now, count = int(message["version"]), context.algorithm.version, int(message["count"])
    taken = reducer.offer(message["gradient"].numpy(), version, now, count)
    for part in message.get("parts", [message]):
        progress.arrived(part)
        answers.note(part, taken)
    if taken:
        progress.learned(now - version)
    else:
        progress.refuse(count)
    return taken


def step(context: Context, reducer: Reducer, fraction: float) -> dict[str, float]:
    algorithm, o = context.algorithm, context.experiment.options
    lr = make_schedule(o.learning_rate)(fraction)
    gradient = torch.from_numpy(reducer.take()).to(algorithm.device)
    norm = algorithm.apply(gradient, lr, o.max_grad_norm)
    algorithm.version += 1
    return {"grad_norm": norm, "learning_rate": lr, "gradient_steps": 1.0}


class _Answers:
    """What became of each worker's pushes; it travels with the weights."""

    def __init__(self, context: Context) -> None:
        workers = context.acting
        self._first = workers[0]
        self._restarts = np.zeros(len(workers), np.int64)
        self._handled = np.zeros(len(workers), np.int64)
        self._refused = [deque([-1] * _KEPT, maxlen=_KEPT) for _ in workers]

    def note(self, part: Message, taken: bool) -> None:
        i, number = int(part["actor"]) - self._first, int(part["number"])
        restarts = int(part["restarts"])
        if restarts < self._restarts[i]:
            return  # of a worker that was killed since: nobody is there to hear it
        if restarts > self._restarts[i]:  # it counts from 1 now
            self._restarts[i], self._handled[i] = restarts, 0
            self._refused[i].extend([-1] * _KEPT)
        self._handled[i] = max(self._handled[i], number)
        if not taken:
            self._refused[i].append(number)

    def news(self) -> dict[str, Any]:
        return {
            "restarts": self._restarts,
            "handled": self._handled,
            "refused": np.array(self._refused),
        }


def finish(progress: RunProgress, inbox: Inbox, reducer: Reducer) -> None:
    """What is still under way is refused, so that pushed = applied + refused."""
    progress.late = sum(int(message["count"]) for message in inbox.drain())
    refused = reducer.refused + reducer.drop() + progress.late
    sent = sum(int(last["sent"]) for last in inbox.left.values())
    progress.all_left(inbox)
    if progress.restarts == 0 and not inbox.senders_left and sent != reducer.applied + refused:
        raise WorkerError(
            f"gradients were lost: {sent:,} were pushed, {reducer.applied:,} applied and "
            f"{refused:,} refused"
        )

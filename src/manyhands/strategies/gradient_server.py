"""Workers push gradients when they are ready; a server takes the steps. A2C on it is A3C.

    worker 0   envs ─► rows ─► gradient ─┐                  ┌── newest weights
    worker 1   envs ─► rows ─► gradient ─┼─► server: k pushes, one step ─► version + 1
    worker 2   envs ─► rows ─► gradient ─┘                  └── newest weights

Who holds what: the optimiser and its schedules live on the server; each worker has weights that
may be some versions old. What moves: one gradient a rollout, one set of weights a version.
Asynchronous: nobody waits for the slowest; a gradient that was computed with weights more than
`max_lag` versions old is refused, counted, and computed again from the newest weights. It wins when
rollouts take uneven time; its price is gradients that are a little out of date.

With very many workers, `reducers` stand between: each adds up some pushes and hands on their sum.
pushed = applied + refused holds at the end of every run, or the run says so.
"""

from __future__ import annotations

from collections import deque
from typing import Any

import numpy as np
import torch

from manyhands.algorithms.a2c import A2C
from manyhands.blocks.reducer import Reducer
from manyhands.collect.rollout import Collector
from manyhands.engines.base import Channel
from manyhands.errors import WorkerError
from manyhands.experiment.records import Records
from manyhands.math.optimiser import make_schedule
from manyhands.strategies.crew import PARCELS, Crew, Inbox, Parcel
from manyhands.strategies.ledger import Ledger
from manyhands.types import Batch

_KEPT = 16  # refusals of each worker that the server tells again and again


def run(crew: Crew, records: Records, state: dict[str, Any] | None) -> dict[str, Any]:
    match crew.part.role:
        case "server":
            return serve(crew, Ledger(crew, records), state)
        case "reducer":
            reduce(crew)
        case _:
            work(crew)
    return {}


def channel_to(crew: Crew, rank: int) -> Channel:
    return crew.worker.channel(f"{PARCELS} {rank}", reader=rank, capacity=crew.experiment.run.queue)


def sends_to(crew: Crew, rank: int) -> int:
    """Where a worker's, or a reducer's, gradients go."""
    reducers = crew.roles.ranks("reducer")
    if rank in reducers or not reducers:
        return 0
    return reducers[crew.roles.of(rank).rank % len(reducers)]


# -- workers ---------------------------------------------------------------------------------------


def work(crew: Crew) -> None:
    run, algorithm = crew.experiment.run, crew.algorithm
    assert isinstance(algorithm, A2C)
    outbox = channel_to(crew, sends_to(crew, crew.rank))
    told = crew.pull()
    envs, noise = crew.make_envs()
    collector = Collector(envs, algorithm.actor, run.rollout_length, noise, crew.normaliser)
    under_way: dict[int, Batch] = {}  # rows whose gradient the server has not answered for

    def push(batch: Batch, steps: int, episodes: Any) -> None:
        with crew.phases("gradient"):
            stats = algorithm.push(batch)
        load = {
            "gradient": algorithm.flat.grad,
            "version": algorithm.version,
            "stats": np.array(stats),
            "count": 1,
        }
        under_way[crew.send(outbox, load, steps=steps, episodes=episodes)] = batch

    while not crew.stop:
        for batch in refused(crew, under_way, told):
            push(batch, 0, ())  # the same rows, with the newest weights
        with crew.phases("rollout"):
            rollout = collector.collect()
            batch = kept(algorithm.prepare(rollout))
        push(batch, rollout.steps, rollout.episodes)
        told = crew.pull()
    crew.say_bye(outbox)


def refused(crew: Crew, under_way: dict[int, Batch], told: dict[str, Any] | None) -> list[Batch]:
    """Rows whose gradient came too late; what the server has answered for is forgotten."""
    me = crew.part.rank
    # What the server last heard may be of this worker's life before: its numbers mean others.
    if told is None or "handled" not in told or int(told["life"][me]) != crew.life:
        return []
    last, again = int(told["handled"][me]), set(told["refused"][me].tolist())
    answered = {n: under_way.pop(n) for n in list(under_way) if n <= last}
    return [batch for number, batch in answered.items() if number in again]


def kept(batch: Batch) -> Batch:
    """With memory of its own: the collector writes over its rollout."""
    copies = {k: kept(v) if isinstance(v, dict) else np.array(v) for k, v in batch.items()}
    return copies


# -- reducers --------------------------------------------------------------------------------------


def reduce(crew: Crew) -> None:
    """Add up some pushes and hand on their sum, until all senders have said good-bye."""
    run = crew.experiment.run
    mine = [r for r in crew.acting if sends_to(crew, r) == crew.rank]
    inbox, outbox = Inbox(crew, channel_to(crew, crew.rank), mine), channel_to(crew, 0)
    adding = Reducer(max(1, run.pushes // run.reducers))
    parcels: list[Parcel] = []
    while len(inbox.left) < len(mine):
        parcel = inbox.get()
        if parcel is not None:
            adding.offer(parcel["gradient"].numpy(), int(parcel["version"]), 0)
            parcels.append(parcel)
        over = len(inbox.left) == len(mine)
        if adding.full or (over and parcels):
            outbox.put(_summed(adding, parcels))
            parcels = []
    for last in inbox.left.values():
        outbox.put(last)
    outbox.put({"bye": True, "actor": crew.rank, "life": 0, "sent": 0,
                "phases": crew.phases.totals()})  # fmt: skip


def _summed(adding: Reducer, parcels: list[Parcel]) -> Parcel:
    oldest = adding.oldest
    total, count = adding.take_sum()
    return {
        "gradient": torch.from_numpy(total),
        "version": oldest,
        "count": count,
        "stats": np.sum([p["stats"] for p in parcels], axis=0),
        "parts": [
            {k: p[k] for k in ("actor", "life", "number", "steps", "episodes", "seen")}
            for p in parcels
        ],
    }


# -- the server ------------------------------------------------------------------------------------


def serve(crew: Crew, ledger: Ledger, state: dict[str, Any] | None) -> dict[str, Any]:
    run, algorithm = crew.experiment.run, crew.algorithm
    inbox = Inbox(crew, channel_to(crew, 0), crew.acting + crew.roles.ranks("reducer"))
    reducer = Reducer(run.pushes, run.reduce, run.max_lag)
    answers = _Answers(crew)
    stats = np.zeros(0)
    if state is None:
        ledger.checkpoint()  # of step 0: from here on the run can always be gone on with
    else:
        ledger.restore(state)
    crew.publish()
    while ledger.goes_on():
        parcel = inbox.get()
        if parcel is None:
            continue
        if not take(parcel, crew, ledger, reducer, answers):
            continue
        stats = parcel["stats"] if stats.size == 0 else stats + parcel["stats"]
        if not reducer.full:
            continue
        with crew.phases("optimisation"):
            count = reducer.waiting
            info = step(crew, reducer, ledger.progress)
        crew.publish(**answers.tell())
        ledger.close_update(dict(zip(algorithm.stats, stats / count, strict=True)) | info, inbox)
        stats = np.zeros(0)
    return farewell(crew, ledger, inbox, reducer)


def take(parcel: Parcel, crew: Crew, ledger: Ledger, reducer: Reducer, answers: _Answers) -> bool:
    """Count a push, or the sum of several, and offer it; whether it was taken."""
    version, now, count = int(parcel["version"]), crew.algorithm.version, int(parcel["count"])
    taken = reducer.offer(parcel["gradient"].numpy(), version, now, count)
    for part in parcel.get("parts", [parcel]):
        ledger.arrived(part)
        answers.note(part, taken)
    if taken:
        ledger.learned(now - version)
    else:
        ledger.turned_away(count)
    return taken


def step(crew: Crew, reducer: Reducer, progress: float) -> dict[str, float]:
    algorithm, o = crew.algorithm, crew.experiment.options
    lr = make_schedule(o.learning_rate)(progress)
    gradient = torch.from_numpy(reducer.take()).to(algorithm.device)
    norm = algorithm.apply(gradient, lr, o.max_grad_norm)
    algorithm.version += 1
    return {"grad_norm": norm, "learning_rate": lr, "gradient_steps": 1.0}


class _Answers:
    """What became of each worker's pushes; it travels with the weights."""

    def __init__(self, crew: Crew) -> None:
        workers = crew.acting
        self._first = workers[0]
        self._life = np.zeros(len(workers), np.int64)
        self._handled = np.zeros(len(workers), np.int64)
        self._refused = [deque([-1] * _KEPT, maxlen=_KEPT) for _ in workers]

    def note(self, part: Parcel, taken: bool) -> None:
        i, number, life = int(part["actor"]) - self._first, int(part["number"]), int(part["life"])
        if life < self._life[i]:
            return  # of a worker that was killed since: nobody is there to hear it
        if life > self._life[i]:  # it counts from 1 again
            self._life[i], self._handled[i] = life, 0
            self._refused[i].extend([-1] * _KEPT)
        self._handled[i] = max(self._handled[i], number)
        if not taken:
            self._refused[i].append(number)

    def tell(self) -> dict[str, Any]:
        return {
            "life": self._life,
            "handled": self._handled,
            "refused": np.array(self._refused),
        }


def farewell(crew: Crew, ledger: Ledger, inbox: Inbox, reducer: Reducer) -> dict[str, Any]:
    """The word to stop; what is still under way is refused, so that the sum is right."""
    crew.stop = True
    crew.publish()
    late = sum(int(parcel["count"]) for parcel in inbox.drain())
    refused = reducer.refused + reducer.drop() + late
    sent = sum(int(last["sent"]) for last in inbox.left.values())
    ledger.gone(inbox)
    if ledger.restarts == 0 and sent != reducer.applied + refused:
        raise WorkerError(
            f"gradients were lost: {sent:,} were pushed, {reducer.applied:,} applied and "
            f"{refused:,} refused"
        )
    ledger.late = late
    times = {rank: dict(last["phases"]) for rank, last in inbox.left.items()}
    everyone = [crew.phases.totals(), *times.values()]
    return {"times": everyone, "table": ledger.table(inbox, times), "ledger": ledger}

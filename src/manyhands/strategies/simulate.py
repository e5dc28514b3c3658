"""What N workers would do: each strategy as events in time, from measured costs. No training.

A host has processors and one wire. Work takes its measured seconds, longer where a host has more
workers than processors. Messages within a host cost a copy; between hosts they queue, in order, for
the sender's wire and for the receiver's. What is asynchronous is a heap of events, earliest first.

    single            collect, learn
    gather            all collect; rows go to worker 0, which learns; weights go to every host
    allreduce         all collect and learn; at each gradient step all meet
    gradient_server   each collects, computes and pushes; the server takes one push after the other
    actor_learner     each collects and sends; the learner takes unrolls in order of arrival
    apex              the same with a replay: learner and actors wait for whoever is behind

Each function is the model of one strategy (`StrategySpec.model`); `docs/concepts/scale.md` says
what it leaves out.
"""

from __future__ import annotations

import dataclasses
import heapq
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

UPDATES = 60  # simulated; the first third is not counted
_SKIPPED = UPDATES // 3


@dataclass(frozen=True)
class Costs:
    """Seconds and bytes, as measured (`manyhands plan --measure`)."""

    act: float  # one call of the policy, however many rows
    step: float  # one step of one environment, its row of the policy's call included
    update: float  # one update of `batch` rows, whoever has how many of them: calls, small arrays
    update_row: float  # one row of it
    other: float  # between updates, by the main worker: records, checkpoints
    apply: float  # a step of the optimiser with a gradient that somebody else made
    meetings: int  # of all workers in one update, where gradients are summed
    batch: int  # rows of the update that was measured; larger ones have more minibatches
    row_bytes: int
    weight_bytes: int
    latency: float  # of a meeting of two workers on one host
    bandwidth: float  # bytes a second between them
    crowd: float = 1.0  # how much longer work takes when all processors of the host are busy


@dataclass(frozen=True)
class Cluster:
    hosts: int = 1
    cores: int = 1  # of each host
    latency: float = 1e-4  # between hosts
    bandwidth: float = 1.25e8  # bytes a second of a host's wire, each way


@dataclass(frozen=True)
class Load:
    """One run: who works, and on how much."""

    workers: int
    actors: int  # of them
    envs: int  # of one actor
    length: int  # steps of each between two messages
    unrolls: int = 1  # of one update
    queue: int = 2
    max_lag: int = 20

    @property
    def rows(self) -> int:
        """Of one actor, between two messages."""
        return self.envs * self.length


@dataclass(frozen=True)
class Outcome:
    steps_per_second: float
    bottleneck: str
    lag: float  # updates between the weights that acted and those that learned, in the mean
    bytes_per_second: float  # between hosts


class _Network:
    """Wires of hosts; worker i sits on host i % hosts, so that hosts are filled alike."""

    def __init__(self, costs: Costs, cluster: Cluster, workers: int) -> None:
        self.costs, self.cluster, self.workers = costs, cluster, workers
        self.hosts = min(cluster.hosts, workers)
        self._out = [0.0] * self.hosts
        self._in = [0.0] * self.hosts
        self.bytes = 0
        self.busy = 0.0  # seconds of the wire into host 0

    def host(self, worker: int) -> int:
        return worker % self.hosts

    def slow(self, busy_workers: int) -> float:
        """How much longer work takes with so many busy workers in all."""
        here = math.ceil(busy_workers / self.hosts)
        share = min(1.0, max(0, here - 1) / max(1, self.cluster.cores - 1))
        return max(1.0, here / self.cluster.cores) * (1 + (self.costs.crowd - 1) * share)

    def send(self, now: float, source: int, target: int, size: int) -> float:
        """When a message from host to host is there."""
        if source == target:
            return now + self.costs.latency + size / self.costs.bandwidth
        seconds = size / self.cluster.bandwidth
        start = max(now, self._out[source])
        self._out[source] = start + seconds
        arrives = max(start + self.cluster.latency, self._in[target])
        self._in[target] = arrives + seconds
        self.bytes += size
        if target == 0:
            self.busy += seconds
        return self._in[target]

    def to_all(self, now: float, size: int) -> float:
        """When everybody has what worker 0 sends: each host once, then within the host."""
        there = [self.send(now, 0, host, size) for host in range(1, self.hosts)]
        return max([now, *there]) + self.costs.latency + size / self.costs.bandwidth

    def meeting(self, size: int) -> float:
        """Seconds of a sum over all workers: within hosts, then a ring of hosts."""
        here = math.ceil(self.workers / self.hosts)
        seconds = 0.0
        if here > 1:
            seconds += (
                (self.costs.latency + 2 * size / self.costs.bandwidth) * math.log2(2 * here) / 2
            )
        if self.hosts > 1:
            share = 2 * (self.hosts - 1) / self.hosts
            seconds += share * size / self.cluster.bandwidth
            seconds += 2 * math.log2(self.hosts) * self.cluster.latency
            self.bytes += int(share * size) * self.hosts
        return seconds


def _collect(costs: Costs, load: Load) -> float:
    return load.length * (costs.act + load.envs * costs.step)


def _learn(costs: Costs, rows: float, of: float) -> float:
    """Seconds of one worker for its rows of an update of so many; minibatches stay as large."""
    return costs.update * of / costs.batch + rows * costs.update_row


def _outcome(
    steps: float, seconds: float, lag: float, sent: float, busy: dict[str, float]
) -> Outcome:
    name = max(busy, key=lambda key: busy[key])
    return Outcome(steps / seconds, name, lag, sent / seconds)


# -- synchronous -----------------------------------------------------------------------------------


def single(costs: Costs, load: Load, cluster: Cluster) -> Outcome:
    collect = _collect(costs, load)
    learn = _learn(costs, load.rows, load.rows)
    busy = {"environments": collect, "learning": learn, "records": costs.other}
    return _outcome(load.rows, sum(busy.values()), 0.0, 0.0, busy)


def gather(costs: Costs, load: Load, cluster: Cluster) -> Outcome:
    net = _Network(costs, cluster, load.workers)
    collect = _collect(costs, load) * net.slow(load.actors)
    rows = load.rows * load.actors
    learn = _learn(costs, rows, rows)
    now = 0.0
    for _ in range(UPDATES):
        done = now + collect
        first = load.workers - load.actors
        size = load.rows * costs.row_bytes
        there = [net.send(done, net.host(i), 0, size) for i in range(first, load.workers)]
        now = net.to_all(max(there) + learn + costs.other, costs.weight_bytes)
    seconds = now / UPDATES
    messages = seconds - collect - learn - costs.other
    busy = {"environments": collect, "learner": learn + costs.other, "messages": messages}
    return _outcome(rows, seconds, 0.0, net.bytes / UPDATES, busy)


def allreduce(costs: Costs, load: Load, cluster: Cluster) -> Outcome:
    net = _Network(costs, cluster, load.workers)
    slow = net.slow(load.workers)
    collect = _collect(costs, load) * slow
    rows = load.rows * load.workers
    learn = _learn(costs, load.rows, rows) * slow
    count = max(1, round(costs.meetings * rows / costs.batch))
    meet = sum(net.meeting(costs.weight_bytes) for _ in range(count))
    busy = {"environments": collect, "learning": learn, "meetings": meet, "records": costs.other}
    return _outcome(rows, sum(busy.values()), 0.0, net.bytes, busy)


# -- asynchronous ----------------------------------------------------------------------------------


class _Events:
    """A heap of (time, what happens then)."""

    def __init__(self) -> None:
        self.now = 0.0
        self._heap: list[tuple[float, int, Callable[[], Any]]] = []
        self._count = 0

    def at(self, time: float, action: Callable[[], Any]) -> None:
        self._count += 1  # equal times: first come, first served
        heapq.heappush(self._heap, (time, self._count, action))

    def run(self, goes_on: Callable[[], bool]) -> None:
        while self._heap and goes_on():
            self.now, _, action = heapq.heappop(self._heap)
            action()


class _Learning:
    """Actors that send messages of rows, and one learner that takes `unrolls` of them at a time."""

    def __init__(
        self, costs: Costs, load: Load, cluster: Cluster, *, work: float, takes: float, size: int
    ) -> None:
        """`work`: an actor's seconds for a message; `takes`: the learner's for an update."""
        self.load, self.costs = load, costs
        self.net = _Network(costs, cluster, load.workers)
        self.first = load.workers - load.actors
        self.work, self.takes, self.size = work, takes, size
        self.events = _Events()
        self.version, self.free_at = 0, 0.0  # of the learner
        self.queue: list[tuple[int, int]] = []  # (actor, version it had)
        self.under_way = [0] * load.workers
        self.stalled: set[int] = set()
        self.refused = 0
        self.learning = False
        self.updates: list[tuple[float, float]] = []  # (when, mean lag)
        self.busy = self.worked = 0.0

    def run(self, need: int) -> _Learning:
        for actor in range(self.first, self.load.workers):
            # Not all at once: real ones have drifted apart after a while.
            offset = self.work * (actor - self.first) / max(1, self.load.actors)
            self.events.at(offset, lambda a=actor: self._begin(a))  # type: ignore[misc]
        self.events.run(lambda: len(self.updates) < need)
        return self

    def _begin(self, actor: int) -> None:
        if self.under_way[actor] >= self.load.queue:
            self.stalled.add(actor)
            return
        now = self.net.send(self.events.now, 0, self.net.host(actor), self.costs.weight_bytes)
        had = self.version
        self.events.at(now + self.work, lambda: self._send(actor, had))

    def _send(self, actor: int, had: int) -> None:
        self.under_way[actor] += 1
        self.worked += self.work
        there = self.net.send(self.events.now, self.net.host(actor), 0, self.size)
        self.events.at(there, lambda: self._arrived(actor, had))
        self._begin(actor)

    def _arrived(self, actor: int, had: int) -> None:
        self.queue.append((actor, had))
        self._take()

    def _take(self) -> None:
        if self.learning or len(self.queue) < self.load.unrolls:
            return
        taken, self.queue = self.queue[: self.load.unrolls], self.queue[self.load.unrolls :]
        lags = [self.version - had for _, had in taken]
        self.refused += sum(lag > self.load.max_lag for lag in lags)
        self.learning, self.busy = True, self.busy + self.takes
        for actor, _ in taken:
            self.under_way[actor] -= 1
            if actor in self.stalled:
                self.stalled.discard(actor)
                self.events.at(self.events.now, lambda a=actor: self._begin(a))  # type: ignore[misc]
        end = self.events.now + self.takes
        self.events.at(end, lambda: self._learned(sum(lags) / len(lags)))

    def _learned(self, lag: float) -> None:
        self.version += 1
        self.learning = False
        self.updates.append((self.events.now, lag))
        self._take()

    def outcome(self, server: str) -> Outcome:
        counted = self.updates[len(self.updates) // 3 :]
        seconds = counted[-1][0] - counted[0][0]
        steps = (len(counted) - 1) * self.load.unrolls * self.load.rows
        lag = sum(lag for _, lag in counted) / len(counted)
        total = self.events.now
        busy = {
            server: self.busy / total,
            f"the wire to the {server}": self.net.busy / total,
            "environments": self.worked / (total * self.load.actors),
        }
        return _outcome(steps, seconds, lag, self.net.bytes / total * seconds, busy)


def gradient_server(costs: Costs, load: Load, cluster: Cluster) -> Outcome:
    slow = _Network(costs, cluster, load.workers).slow(load.actors)
    work = _collect(costs, load) + _learn(costs, load.rows, load.rows)
    takes = costs.apply + costs.other
    model = _Learning(costs, load, cluster, work=work * slow, takes=takes, size=costs.weight_bytes)
    return model.run(max(UPDATES, 8 * load.actors)).outcome("server")


def actor_learner(costs: Costs, load: Load, cluster: Cluster) -> Outcome:
    slow = _Network(costs, cluster, load.workers).slow(load.workers)
    rows = load.unrolls * load.rows
    takes = _learn(costs, rows, rows)
    work, size = _collect(costs, load) * slow, load.rows * costs.row_bytes
    takes = takes * slow + costs.other
    model = _Learning(costs, load, cluster, work=work, takes=takes, size=size)
    return model.run(max(UPDATES, 8 * load.actors // load.unrolls)).outcome("learner")


def apex(costs: Costs, load: Load, cluster: Cluster) -> Outcome:
    """An "update" is here what the learner does for one message of an actor."""
    slow = _Network(costs, cluster, load.workers).slow(load.workers)
    takes = load.rows * costs.update_row * slow + costs.other * load.rows / costs.batch
    load = dataclasses.replace(load, unrolls=1)
    model = _Learning(costs, load, cluster, work=_collect(costs, load) * slow, takes=takes,
                      size=load.rows * costs.row_bytes)  # fmt: skip
    return model.run(max(UPDATES, 8 * load.actors)).outcome("learner")

"""What N workers would do: each strategy as events in time, from measured costs. No training.

A host has processors and one wire. Work takes its measured seconds; where a host has more work than
processors, all of it goes on at an equal share. Messages within a host cost whoever sends or takes
them a copy; between hosts they queue, in order, for the sender's wire and for the receiver's. What
is asynchronous is a heap of events, earliest first.

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
import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from manyhands.config import Experiment
from manyhands.config.values import Workers
from manyhands.strategies import registry

UPDATES = 60  # simulated; the first third is not counted

# Meetings of an update beside those for gradients, which are of a few numbers: two sums of what
# normalisers have seen, one of records; where all learn, those of advantages and of losses, too.
_RECORDS, _ADVANTAGES = 3, 7

Table = Sequence[Sequence[float]]


def _on(table: Table, x: float, column: int = 1) -> float:
    """Between the rows of a table on a straight line, and beyond the last as between the last two;
    before the first as in the first."""
    if x <= table[0][0]:
        return table[0][column]
    for left, right in itertools.pairwise(table):
        if x <= right[0] or right is table[-1]:
            slope = (right[column] - left[column]) / (right[0] - left[0])
            return left[column] + slope * (x - left[0])
    return table[0][column]


@dataclass(frozen=True)
class Costs:
    """Seconds of processor time, and bytes, as measured (`manyhands plan --measure`)."""

    act: float  # one call of the policy, however many rows
    step: float  # one step of one environment, its row of the policy's call included
    update: float  # one update of `batch` rows, whoever has how many of them: calls, small arrays
    update_row: float  # one row of it
    other: float  # between updates, by the main worker: records
    apply: float  # a step of the optimiser with a gradient that somebody else made
    meetings: int  # of all workers in one update, where gradients are summed
    batch: int  # rows of the update that was measured; larger ones have more minibatches
    row_bytes: int
    weight_bytes: int
    message: float  # to send one, or to take one; and its bytes:
    bandwidth: float  # copied in a second
    meet: Table = ((1, 0.0, 0.0),)
    """Rows of (workers on one host, seconds of a meeting for a few numbers, of one that sums
    weights): all that it adds to the work between two meetings, so waiting, too."""
    crowd: Table = field(default=((0.0, 1.0),))
    """Rows of (share of a host's processors that are busy, how much longer work takes)."""

    def copy(self, size: float) -> float:
        """Of one message, on either side."""
        return self.message + size / self.bandwidth


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


def load_of(one: Experiment, strategy: str, workers: int) -> Load | None:
    """Environments are divided among those that act; one each where there are more of these."""
    spec = registry.SPECS[strategy]
    run = dataclasses.replace(one.run, strategy=strategy, workers=Workers(workers))
    actors, length = run.actors, run.rollout_length or 1
    if "Service" in spec.engine_parts:  # a message as often as actors look for weights
        length = one.options.pull_every
    if actors < 1:
        return None
    envs = max(1, run.num_envs // actors)
    whole = dataclasses.replace(run, num_envs=envs * actors, rollout_length=length)
    messages = max(1, spec.batch(whole) // (envs * length))
    return Load(workers, actors, envs, length, messages, run.queue, run.max_lag)


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
        return slow(self.costs, self.cluster.cores, math.ceil(busy_workers / self.hosts))

    def send(self, now: float, source: int, target: int, size: int) -> float:
        """When a message from host to host is there."""
        if source == target:
            return now
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
        return max([now, *there]) + size / self.costs.bandwidth

    def meeting(self, size: int = 0) -> float:
        """Seconds of a sum over all workers: within hosts, then a ring of hosts."""
        here = math.ceil(self.workers / self.hosts)
        seconds = _on(self.costs.meet, here, 2 if size else 1)
        if self.hosts > 1:
            share = 2 * (self.hosts - 1) / self.hosts
            seconds += share * size / self.cluster.bandwidth
            seconds += 2 * math.log2(self.hosts) * self.cluster.latency
            self.bytes += int(share * size) * self.hosts
        return seconds


def slow(costs: Costs, cores: int, busy: int) -> float:
    """How much longer each of so many pieces of work on one host takes than alone."""
    return max(1.0, busy / cores) * _on(costs.crowd, min(1.0, busy / cores))


def _collect(costs: Costs, load: Load) -> float:
    return load.length * (costs.act + load.envs * costs.step)


def _learn(costs: Costs, rows: float, of: float) -> float:
    """Seconds of one worker for its rows of an update of so many. Minibatches stay as large, so
    that a larger update has more of them; without minibatches there is one gradient step."""
    steps = of / costs.batch if costs.meetings > 1 else 1.0
    return costs.update * steps + rows * costs.update_row


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
    meet = (_RECORDS + 2) * net.meeting()  # and rows, and weights
    now = 0.0
    for _ in range(UPDATES):
        done = now + collect
        first = load.workers - load.actors
        size = load.rows * costs.row_bytes
        there = [net.send(done, net.host(i), 0, size) for i in range(first, load.workers)]
        copied = max(there) + rows * costs.row_bytes / costs.bandwidth
        now = net.to_all(copied + meet + learn + costs.other, costs.weight_bytes)
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
    steps = costs.meetings * rows / costs.batch if costs.meetings > 1 else 1
    meet = sum(net.meeting(costs.weight_bytes) for _ in range(max(1, round(steps))))
    meet += (_RECORDS + _ADVANTAGES) * net.meeting()
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


class _Processors:
    """Those of one host: all work that is there goes on at the same speed, which falls with the
    amount of it. So a heap by how much has been done for each when a piece is finished will do."""

    def __init__(self, events: _Events, costs: Costs, cores: int) -> None:
        self._events, self._costs, self._cores = events, costs, cores
        self._work: list[tuple[float, int, Callable[[], Any]]] = []
        self._done = self._since = 0.0  # seconds of work for each that was there all the time
        self._count = 0

    def work(self, seconds: float, then: Callable[[], Any]) -> None:
        self._look()
        self._count += 1
        heapq.heappush(self._work, (self._done + seconds, self._count, then))
        self._next()

    def _speed(self) -> float:
        return 1.0 / slow(self._costs, self._cores, len(self._work))

    def _look(self) -> None:
        now = self._events.now
        if self._work:
            self._done += (now - self._since) * self._speed()
        self._since = now

    def _next(self) -> None:
        """When the first of them is finished, if no more work comes until then."""
        self._count += 1
        if self._work:
            left = max(0.0, self._work[0][0] - self._done) / self._speed()
            count = self._count
            self._events.at(self._events.now + left, lambda: self._finish(count))

    def _finish(self, count: int) -> None:
        if count == self._count:
            self._look()
            _, _, then = heapq.heappop(self._work)
            self._next()
            then()


class _Learning:
    """Actors that send messages of rows, and one learner that takes `unrolls` of them at a time."""

    def __init__(
        self, costs: Costs, load: Load, cluster: Cluster, *, work: float, takes: float, size: int
    ) -> None:
        """`work`: an actor's seconds for a message; `takes`: the learner's for an update."""
        self.load, self.costs = load, costs
        self.net = _Network(costs, cluster, load.workers)
        self.first = load.workers - load.actors
        # Both sides copy each message, and the weights once for each that they make of them.
        self.work = work + costs.copy(size) + costs.copy(costs.weight_bytes)
        self.takes = takes + load.unrolls * costs.copy(size) + costs.copy(costs.weight_bytes)
        self.size = size
        self.events = _Events()
        self.hosts = [_Processors(self.events, costs, cluster.cores) for _ in range(self.net.hosts)]
        self.version = 0  # of the learner
        self.queue: list[tuple[int, int]] = []  # (actor, version it had)
        self.taken: list[int] = []  # the versions of those that wait for an update
        self.has = [0] * load.workers  # the version that each has
        self.under_way = [0] * load.workers
        self.stalled: dict[int, int] = {}  # actor -> version of the message in its hand
        self.learning, self.began = False, 0.0
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
        now, host = self.events.now, self.net.host(actor)
        if self.has[actor] < self.version:
            self.has[actor] = self.version
            now = self.net.send(now, 0, host, self.costs.weight_bytes)
        self.events.at(now, lambda: self._work(actor, now))

    def _work(self, actor: int, since: float) -> None:
        host, had = self.net.host(actor), self.has[actor]

        def done() -> None:
            self.worked += self.events.now - since
            self._send(actor, had)

        self.hosts[host].work(self.work, done)

    def _send(self, actor: int, had: int) -> None:
        """Once there is room."""
        if self.under_way[actor] >= self.load.queue:
            self.stalled[actor] = had
            return
        self.under_way[actor] += 1
        there = self.net.send(self.events.now, self.net.host(actor), 0, self.size)
        self.events.at(there, lambda: self._arrived(actor, had))
        self._begin(actor)

    def _arrived(self, actor: int, had: int) -> None:
        self.queue.append((actor, had))
        self._take()

    def _take(self) -> None:
        """One message after the other, as they come; the update once there are enough."""
        while self.queue and not self.learning:
            actor, had = self.queue.pop(0)
            self.taken.append(had)
            self.under_way[actor] -= 1
            if actor in self.stalled:
                self._send(actor, self.stalled.pop(actor))
            if len(self.taken) == self.load.unrolls:
                self.learning, self.began = True, self.events.now
                self.hosts[0].work(self.takes, self._learned)

    def _learned(self) -> None:
        lag = sum(self.version - had for had in self.taken) / len(self.taken)
        self.version += 1
        self.learning, self.taken = False, []
        self.busy += self.events.now - self.began
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
    work = _collect(costs, load) + _learn(costs, load.rows, load.rows)
    takes = costs.apply + costs.other
    model = _Learning(costs, load, cluster, work=work, takes=takes, size=costs.weight_bytes)
    return model.run(max(UPDATES, 8 * load.actors)).outcome("server")


def actor_learner(costs: Costs, load: Load, cluster: Cluster) -> Outcome:
    rows = load.unrolls * load.rows
    takes = _learn(costs, rows, rows) + costs.other
    model = _Learning(costs, load, cluster, work=_collect(costs, load), takes=takes,
                      size=load.rows * costs.row_bytes)  # fmt: skip
    return model.run(max(UPDATES, 8 * load.actors // load.unrolls)).outcome("learner")


def apex(costs: Costs, load: Load, cluster: Cluster) -> Outcome:
    """An "update" is here what the learner does for one message of an actor."""
    share = load.rows / costs.batch
    takes = load.rows * costs.update_row + (costs.update + costs.other) * share
    load = dataclasses.replace(load, unrolls=1)
    model = _Learning(costs, load, cluster, work=_collect(costs, load), takes=takes,
                      size=load.rows * costs.row_bytes)  # fmt: skip
    return model.run(max(UPDATES, 8 * load.actors)).outcome("learner")

"""Workers as Ray actors: one actor a worker, kept for the whole run. Ray core only.

    driver: start or join Ray -> coordinator and actors -> the program in each -> first true failure
    actor:  the user's program in its main thread; `attach` meets the others

Collectives go over c10d between the actors' processes; everything else through the coordinator
(ray_parts.py). Ray's own serialisation sees bytes, numpy arrays and plain data only.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import sys
import time
from collections.abc import Callable
from typing import Any

from manyhands import devices, wire
from manyhands.engines import hosts
from manyhands.engines.process import alive
from manyhands.engines.ray import START_SECONDS
from manyhands.engines.ray.seat import Seat
from manyhands.engines.ray.session import Session
from manyhands.engines.recovery import Recovery, Restart
from manyhands.engines.shared import DEAD, EMPTY, FAILED, RUNNING, Board
from manyhands.errors import ConfigError, WorkerError

_NOWHERE: dict[str, Any] = {
    "host": "no host",
    "node": "",
    "pid": 0,
}  # of a worker that is not there
_LOOK_SECONDS = 1.0  # between two looks whether there is room for one
_SETTLE_SECONDS = 15.0  # for the nodes of a cluster to know each other
_GRACE = 0.5  # seconds that the true cause gets to show itself, once a mere consequence has come
_LAST_WORDS = "ended silently: SIGKILL (kill -9 or out of memory), a crash in native code, \
or os._exit"


# -- the driver ------------------------------------------------------------------------------------


def run(*, workers: int, run_worker: str, payload: dict[str, Any], timeout: float,
        env: dict[str, str], address: str = "", cpus_per_worker: float = 1,
        on_ready: Callable[[list[int]], None] | None = None,
        recovery: Recovery | None = None) -> list[Any]:  # fmt: skip
    """Run `module:function` once in each of `workers` actors, on `payload`; results by rank.

    Args:
        workers: how many actors.
        run_worker: the function to call there, as "module:function".
        payload: its argument: plain data (JSON).
        timeout: seconds that any wait between workers may take; 0 means for ever.
        env: environment variables for the workers (thread caps, MANYHANDS_*).
        address: the Ray cluster to join; empty starts a private Ray on this machine.
        cpus_per_worker: CPUs that Ray sets aside for each.
        on_ready: called with the pids once all actors are up.
        recovery: who is started again when it fails or its process or host is gone.

    Raises:
        ConfigError: the cluster cannot be reached or is too small.
        WorkerError: a worker failed; the true cause, not what followed from it.
    """
    caps = str(max(1, int(cpus_per_worker)))
    env = {
        **{n: os.environ.get(n, caps) for n in devices.THREAD_VARIABLES},
        "MANYHANDS_TIMEOUT": f"{timeout:g}",
        **env,
    }
    folder = os.path.dirname(payload.get("script") or "")
    recovery = recovery or Recovery()
    with Session(recovery.least or workers, cpus_per_worker, address, env, folder) as session:
        actors = _Actors(session, workers, cpus_per_worker, env, recovery)
        try:
            actors.start(on_ready)
            return actors.work(run_worker, payload)
        finally:
            actors.end()


class _Actors:
    """The actors of one run, as the driver sees them."""

    def __init__(
        self, session: Any, workers: int, cpus: float, env: dict[str, str], recovery: Recovery
    ) -> None:
        import ray
        from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

        self._ray, self._session, self._size, self._env = ray, session, workers, env
        token = env.get("MANYHANDS_BOARD", "")
        self._board = Board.open(token, workers) if token else None
        here = self._driver = ray.get_runtime_context().get_node_id()
        self._on_node: Callable[[str], Any] = lambda node: NodeAffinitySchedulingStrategy(
            node, soft=True
        )
        self._recovery, self._cpus = recovery, cpus
        self._unlike = set[str]()  # nodes that run something else, and have no part in this
        room, begin = self._room(), workers
        if recovery.least:
            room = {node: self._free(node) for node in room}
            begin = _fitting(recovery.least, workers, cpus, room)
        self._coordinator = self._new_coordinator(workers, begin, nodes=len(room))
        self._seat = ray.remote(num_cpus=cpus, max_restarts=0)(Seat)
        self._options = _runtime_env(session, env)
        nodes = spread(begin, cpus, room, here)
        self._seats = {rank: self._new_seat(rank, node, 0) for rank, node in enumerate(nodes)}
        self._where = [dict(_NOWHERE) for _ in range(workers)]
        self._absent = set(range(begin, workers))  # who is not there, and may come
        self._next_look = 0.0
        self._coming: dict[Any, tuple[int, str]] = {}  # whereabouts to be told -> (rank, node)
        self._run, self._payload = "", dict[str, Any]()
        self._restarts: dict[int, Restart] = {}

    def _new_coordinator(self, workers: int, begin: int, nodes: int) -> Any:
        """On the driver's node: with any other host that dies the run can go on.

        WHY a second look: nodes of a cluster that has just come up do not know each other yet, and
        one of them may keep what was meant for another.
        """
        from manyhands.engines.ray import parts as ray_parts

        made = self._ray.remote(num_cpus=0, max_concurrency=100 * (workers + 1))(
            ray_parts.Coordinator
        ).options(scheduling_strategy=self._on_node(self._driver))
        deadline = time.monotonic() + _SETTLE_SECONDS
        while True:
            coordinator = made.remote(workers, begin)
            left = deadline - time.monotonic()
            if nodes == 1 or left <= 0:
                return coordinator
            # An error: it is too late, or its node has gone meanwhile.
            with contextlib.suppress(self._ray.exceptions.RayError):
                if self._ray.get(coordinator.node.remote(), timeout=left) == self._driver:
                    return coordinator
            self._ray.kill(coordinator)
            time.sleep(0.2)

    def _room(self) -> dict[str, float]:
        """CPUs by node, of those that may have a part in this run."""
        nodes = [node for node in self._ray.nodes() if node["Alive"]]
        found = {node["NodeID"]: node["Resources"].get("CPU", 0) for node in nodes}
        return {node: cpus for node, cpus in found.items() if node not in self._unlike}

    def _new_seat(self, rank: int, node: str, restarts: int, **more: Any) -> Any:
        """An actor for that worker, on that node if it is still there."""
        place = self._on_node(node)
        options = self._options | more
        return self._seat.options(scheduling_strategy=place, **options).remote(
            self._coordinator, rank, self._size, restarts
        )

    def start(self, on_ready: Callable[[list[int]], None] | None) -> None:
        """Wait until all actors are up, under one deadline."""
        refs = [s.where.remote(self._session.output) for s in self._seats.values()]
        refs.append(self._coordinator.ready.remote())
        _, late = self._ray.wait(refs, num_returns=len(refs), timeout=START_SECONDS)
        if late:
            free = self._ray.available_resources().get("CPU", 0)
            raise ConfigError(
                f"{len(late)} of {len(self._seats)} Ray actors did not start in "
                f"{START_SECONDS:g} s; Ray has {free:g} CPUs free. Is another job using the "
                "cluster?"
            )
        try:
            found = [json.loads(w) for w in self._ray.get(refs[:-1])]
        except self._ray.exceptions.RayError as error:
            raise WorkerError(f"a Ray actor died while it started:\n{error}") from None
        self._where[: len(found)] = found
        if on_ready is not None:
            on_ready([int(w["pid"]) for w in found])

    def work(self, run_worker: str, payload: dict[str, Any]) -> list[Any]:
        self._run, self._payload = run_worker, payload
        ranks = self._recovery.ranks if self._recovery.policy == "restart" else ()
        self._restarts = {rank: Restart([], {}) for rank in ranks}
        return self._watch({self._begin(rank): rank for rank in self._seats})

    def _begin(self, rank: int) -> Any:
        """Let a worker run; the reference to its end."""
        nodes = [w["node"] for w in self._where]
        place = {
            "MANYHANDS_ENGINE": "ray",
            "MANYHANDS_RANK": str(rank),
            "MANYHANDS_SIZE": str(self._size),
            "MANYHANDS_LOCAL_RANK": str(nodes[:rank].count(nodes[rank])),
            "MANYHANDS_LOCAL_SIZE": str(nodes.count(nodes[rank])),
            "MANYHANDS_RESTARTS": str(self._restarts[rank].times if rank in self._restarts else 0),
        }
        order = {
            "run": self._run,
            "payload": self._payload,
            "env": {**self._env, **place},
            "path": [p for p in sys.path if p],
            "folder": os.getcwd(),
            # Who comes after the start runs what the main worker runs, or not at all.
            "runs": self._where[0]["runs"] if place["MANYHANDS_RESTARTS"] != "0" else {},
            "travels": self._session.travels if nodes[rank] != self._driver else "",
        }
        return self._seats[rank].run.remote(json.dumps(order))

    def _watch(self, running: dict[Any, int]) -> list[Any]:
        results: list[Any] = [None] * self._size
        consequence: WorkerError | None = None
        deadline = float("inf")
        while running and time.monotonic() < deadline:
            left = min(deadline - time.monotonic(), self._until_look())
            refs = [*running, *self._coming]
            done, _ = self._ray.wait(refs, num_returns=1, timeout=max(left, 0.0))
            self._invite(running)
            for ref in done:
                if ref in self._coming:
                    self._joined(ref, running)
                    continue
                rank = running.pop(ref)
                if self._restarted(ref, rank, running):
                    continue
                error, secondary, results[rank] = self._outcome(ref, rank)
                if error is not None and not secondary:
                    raise error
                if error is not None and consequence is None:
                    consequence, deadline = error, time.monotonic() + _GRACE
            if consequence is not None and time.monotonic() >= deadline and self._a_death(running):
                deadline += _GRACE  # Ray will say it in a moment
        if consequence is not None:
            raise consequence
        return results

    def _restarted(self, ref: Any, rank: int, running: dict[Any, int]) -> bool:
        """Whether a worker that failed, or whose process or host is gone, has a new one.

        It goes to its node again, else to where most CPUs are free. Where none is, it shares one:
        a run that goes on with fewer CPUs than it was promised beats one that ends.
        """
        allowance = self._restarts.get(rank)
        if allowance is None or 0 not in running.values():
            return False
        fault = self._fault(ref)
        if fault is None:
            return False
        leaves = len(running) >= self._recovery.least > 0  # enough are left without it
        if not self._allowed(rank, allowance, *fault, leaves=leaves):
            return False
        with contextlib.suppress(self._ray.exceptions.RayError):
            self._ray.kill(self._seats[rank])  # one that raised is still there
        if leaves:
            self._leave(rank, fault[1], len(running))
            return True
        old, name = self._where[rank]["node"], self._name(rank)
        self._where[rank] = {"host": "a new place", "node": old, "pid": 0}
        room = self._room()
        if old not in room:
            old = max(room, key=lambda node: self._free(node))
        if self._board is not None:
            self._board.set_state(rank, EMPTY)
        allowance.times += 1
        more = {} if self._free(old) >= 1 else {"num_cpus": 0}
        self._seats[rank] = self._new_seat(rank, old, allowance.times, **more)
        seated = self._seats[rank].where.remote(self._session.output)
        del seated  # it takes our output; where it is does not matter any more
        running[self._begin(rank)] = rank
        said = f"{name} {fault[1]}; it is started again (restart {allowance.times})"
        print(f"manyhands: {said}", file=sys.stderr, flush=True)
        return True

    # -- workers that come and go ------------------------------------------------------------------

    def _until_look(self) -> float:
        """Seconds until there may be room for somebody who is not there."""
        return _LOOK_SECONDS if self._absent else 3600.0

    def _invite(self, running: dict[Any, int]) -> None:
        """Actors for those who are not there, where CPUs are free; they come when they are up."""
        if time.monotonic() < self._next_look or 0 not in running.values():
            return
        self._next_look = time.monotonic() + _LOOK_SECONDS
        coming = [rank for rank, _ in self._coming.values()]
        waiting = [r for r in sorted(self._absent - set(coming)) if self._is_due(r)]
        for node in self._room() if waiting else ():
            # What comes to it may not have taken its CPU yet.
            free = self._free(node) - self._cpus * [n for _, n in self._coming.values()].count(node)
            while waiting and free >= self._cpus:
                rank, free = waiting.pop(0), free - self._cpus
                allowance = self._restarts[rank]
                allowance.times, allowance.due = allowance.times + 1, None
                seat = self._seats[rank] = self._new_seat(rank, node, allowance.times)
                self._coming[seat.where.remote(self._session.output)] = rank, node

    def _is_due(self, rank: int) -> bool:
        due = self._restarts[rank].due
        return due is None or due <= time.monotonic()

    def _joined(self, ref: Any, running: dict[Any, int]) -> None:
        """Somebody who was not there is up, and begins; or its host has gone meanwhile."""
        rank, node = self._coming.pop(ref)
        try:
            found = json.loads(self._ray.get(ref))
        except self._ray.exceptions.RayError:
            return  # another look finds another place
        if said := self._differs(rank, found):
            self._unlike.add(node)
            self._ray.kill(self._seats.pop(rank))
            self._recovery.event("node_refused", host=found["host"], why=said)
            print(f"manyhands: {found['host']} has no part in this run: {said}", file=sys.stderr,
                  flush=True)  # fmt: skip
            return
        self._where[rank] = found
        self._absent.discard(rank)
        self._coordinator.is_there.remote(rank, True)
        if self._board is not None:
            self._board.set_state(rank, EMPTY)
        running[self._begin(rank)] = rank
        self._recovery.event("worker_joined", **self._there(rank, "has joined", len(running)))

    def _differs(self, rank: int, found: dict[str, Any]) -> str:
        """What somebody who comes runs in place of what the main worker runs; "" where nothing."""
        names = self._name(0), f"worker {rank} of {self._size} on {found['host']}"
        try:
            hosts.compare(names, [self._where[0]["runs"], found["runs"]])
        except hosts.Differs as error:
            return str(error)
        return ""

    def _leave(self, rank: int, why: str, left: int) -> None:
        """It is gone, and the run goes on without it until there is room for it again."""
        self._absent.add(rank)
        self._coordinator.is_there.remote(rank, False)
        if self._board is not None:
            self._board.set_state(rank, EMPTY)
        why = why if self._where[rank]["node"] in self._room() else "is gone with its host"
        self._recovery.event("worker_left", **self._there(rank, f"{why}, and has left", left))
        self._where[rank] = dict(_NOWHERE)

    def _there(self, rank: int, said: str, there: int) -> dict[str, Any]:
        """Say that somebody has come or gone; the facts of the event."""
        name = self._name(rank)
        text = f"{name} {said}: {there} of {self._size} are there"
        print(f"manyhands: {text}", file=sys.stderr, flush=True)
        return {"worker": rank, "who": name, "there": there, "most": self._size}

    # -- how workers end ---------------------------------------------------------------------------

    def _fault(self, ref: Any) -> tuple[str, str, str] | None:
        """(kind, in words, traceback) of an end that was not well and is the worker's own."""
        try:
            said: Any = wire.decode(self._ray.get(ref))
        except self._ray.exceptions.RayError:
            return "killed", _LAST_WORDS, ""
        if said["ok"] or said["secondary"] or said["differs"]:
            return None  # or its node would run something else the next time, too
        return "raised", f"raised {said['summary']}", said["traceback"]

    def _allowed(
        self, rank: int, allowance: Restart, kind: str, what: str, trace: str, *, leaves: bool
    ) -> bool:
        """Whether the run goes on: with a new one, after a pause, or without it (`leaves`). Either
        way the fault is recorded."""
        allowed = allowance.allowed(self._recovery.restarts)
        self._recovery.event(
            "worker_fault",
            kind=kind, worker=rank, who=self._name(rank), what=what, signal=None, exit_code=None,
            traceback=trace,
            action=("continue" if leaves else "restart") if allowed else "stop",
            restarts=allowance.times,
        )  # fmt: skip
        if allowed and not leaves and allowance.due is not None:
            time.sleep(max(0.0, allowance.due - time.monotonic()))  # 5 s at most
        return allowed

    def _free(self, node: str) -> float:
        found = self._ray._private.state.available_resources_per_node()
        return float(found.get(node, {}).get("CPU", 0.0))

    def _outcome(self, ref: Any, rank: int) -> tuple[WorkerError | None, bool, Any]:
        """(error, whether it only follows from another, value) of a worker that has ended."""
        name = self._name(rank)
        try:
            said: Any = wire.decode(self._ray.get(ref))
        except self._ray.exceptions.RayError as error:
            self._tell(rank, _LAST_WORDS, DEAD)
            text = f"{name} {_LAST_WORDS}.\nRay says: {str(error).strip()}"
            return WorkerError(text, rank=rank, exit_code=137), False, None
        if said["ok"]:
            self._coordinator.gone.remote(rank, "has finished and will not come", False)
            return None, False, said["value"]
        self._tell(rank, f"failed: {said['summary']}", FAILED)
        text = f"{name} failed: {said['summary']}\n{said['traceback']}".rstrip()
        return (
            WorkerError(text, rank=rank, exit_code=said["exit_code"]), said["secondary"], None
        )  # fmt: skip

    def _tell(self, rank: int, why: str, state: int) -> None:
        """Let the waiting workers know, on every host."""
        self._coordinator.gone.remote(rank, why, True)
        if self._board is not None and self._board.state(rank) <= RUNNING:
            self._board.set_state(rank, state, why, code=137 if state == DEAD else 1)

    def _a_death(self, running: dict[Any, int]) -> bool:
        """Whether a process of this host is gone and Ray has not said so yet."""
        here = socket.gethostname()
        where = [self._where[r] for r in running.values()]
        return any(w["host"] == here and not alive(w["pid"]) for w in where)

    def _name(self, rank: int) -> str:
        w = self._where[rank]
        return f"worker {rank} of {self._size} on {w['host']} (pid {w['pid']})"

    def end(self) -> None:
        for actor in [*self._seats.values(), self._coordinator]:
            with contextlib.suppress(self._ray.exceptions.RayError):
                self._ray.kill(actor)


def _runtime_env(session: Any, env: dict[str, str]) -> dict[str, Any]:
    """Options of an actor that Ray has to prepare its process for.

    WHY at the start of the process: BLAS reads the caps when numpy is imported, and that is before
    an actor's first line. A private Ray has them in its own environment already.
    """
    if session.private:
        return {}
    caps = {k: v for k, v in env.items() if k.endswith("_THREADS")}
    return {"runtime_env": {"env_vars": caps}}


def _fitting(least: int, most: int, cpus: float, free: dict[str, float]) -> int:
    """How many workers there is room for; ConfigError where they are too few."""
    fit = sum(int(have // cpus) for have in free.values())
    if fit < least:
        raise ConfigError(
            f"{least} workers x {cpus:g} CPU = {least * cpus:g} are the least of --workers "
            f"{least}..{most}, and the cluster has {sum(free.values()):g} free; ask for fewer, "
            f"such as --workers {max(fit, 2)}..{most}, or add nodes"
        )
    return min(fit, most)


def spread(workers: int, cpus: float, room: dict[str, float], driver: str) -> list[str]:
    """A node for each worker: all nodes filled alike, the main worker at the driver's side.

    WHY there: it writes the results, and the driver's folder is where the user looks for them.

    Args:
        room: CPUs by node.
        driver: the node of the process that asks.
    """
    taken = dict.fromkeys(room, 0.0)

    def filled(node: str) -> tuple[float, bool]:
        """How full it would be with one more; between equals, the driver's node comes last."""
        return (taken[node] + cpus) / room[node], node == driver

    nodes = []
    for rank in range(workers):
        able = [n for n in room if taken[n] + cpus <= room[n]] or [n for n in room if room[n] > 0]
        node = driver if rank == 0 and driver in able else min(able, key=filled)
        taken[node] += cpus
        nodes.append(node)
    return nodes

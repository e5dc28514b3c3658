"""What workers do with channels, weight stores and services; like `programs`, without pytest."""

from __future__ import annotations

import time
from typing import Any

import numpy as np

from manyhands.engines.attach import attach
from manyhands.errors import CollectiveError, ConfigError, WorkerError


def channel(messages: int) -> list[Any]:
    worker = attach()
    rank, size = worker.place.rank, worker.place.size
    queue = worker.channel("rollouts", reader=0, capacity=2)
    if rank != 0:
        for i in range(messages):
            queue.put({"from": rank, "number": i, "data": np.full(1000 * (i + 1), rank)})
        worker.group.barrier()
        return []
    got = []
    for _ in range(messages * (size - 1)):
        tree = queue.get()
        assert (tree["data"] == tree["from"]).all()
        assert len(tree["data"]) == 1000 * (tree["number"] + 1)
        got.append([tree["from"], tree["number"]])
    assert len(queue) == 0
    worker.group.barrier()
    return got


def channel_full() -> str:
    worker = attach()
    queue = worker.channel("full", reader=0, capacity=3)
    said = ""
    if worker.place.rank == 1:
        try:
            for i in range(10):
                queue.put(i, timeout=0.5)
        except CollectiveError as error:
            said = f"{i} {error}"
    worker.group.barrier()
    return said


def channel_empty() -> str:
    worker = attach()
    queue = worker.channel("empty", reader=0)
    said = ""
    if worker.place.rank == 0:
        try:
            queue.get(timeout=0.5)
        except CollectiveError as error:
            said = str(error)
    worker.group.barrier()
    return said


def weights(versions: int) -> list[Any]:
    """One writer, the rest pull: versions only grow, and every pull is whole."""
    worker = attach()
    store = worker.weights("policy", writer=0)
    if worker.place.rank == 0:
        assert store.pull() is None
        for v in range(1, versions + 1):
            assert store.publish({"w": np.full(5000 + v, v, np.float32), "b": [v]}) == v
            time.sleep(0.001)
        worker.group.barrier()
        return []
    seen: list[int] = []
    while not seen or seen[-1] < versions:
        pulled = store.pull(newer_than=seen[-1] if seen else 0, timeout=20)
        assert pulled is not None
        version, tree = pulled
        assert (tree["w"] == version).all()
        assert tree["w"].shape == (5000 + version,)
        assert tree["b"] == [version]
        tree["w"][:] = -1  # a puller's copy is its own
        seen.append(version)
    assert store.pull(newer_than=versions) is None
    try:
        store.publish({"w": np.zeros(1)})
    except ConfigError as error:
        assert "worker 0" in str(error)
    else:
        raise AssertionError("only the writer may publish")
    worker.group.barrier()
    return seen


class Counter:
    def __init__(self) -> None:
        self.total = 0

    def add(self, amount: int, twice: bool = False) -> int:
        before = self.total
        time.sleep(0.001)  # a lost update would show, were two calls to run at once
        self.total = before + amount * (2 if twice else 1)
        return self.total

    def big(self, array: Any) -> Any:
        return {"sum": float(array.sum()), "back": array * 2}

    def fail(self) -> None:
        raise ValueError("the service says no")

    def slow(self) -> str:
        time.sleep(10)
        return "late"

    def odd(self) -> object:
        return object()

    def _secret(self) -> int:
        return 42


def service() -> dict[str, Any]:
    worker = attach()
    counter = Counter()
    if worker.place.rank == 0:
        worker.serve("counter", counter)
        try:
            worker.serve("counter", counter)
        except ConfigError as error:
            assert "already" in str(error)
    handle = worker.service("counter", timeout=20)
    for _ in range(5):
        handle.call("add", 1)
    futures = [handle.call_async("add", 1, twice=True) for _ in range(5)]
    for future in futures:
        future.result(20)
    answer = handle.call("big", np.ones(200_000))
    assert answer["sum"] == 200_000
    assert (answer["back"] == 2).all()
    said: dict[str, Any] = {}
    for method in ("fail", "_secret", "missing", "odd"):
        try:
            handle.call(method)
        except WorkerError as error:
            said[method] = str(error)
    worker.group.barrier()
    total = handle.call("add", 0)
    worker.group.barrier()
    return {"total": total, "said": said}


def service_deadline() -> str:
    worker = attach()
    if worker.place.rank == 0:
        worker.serve("slow", Counter())
    said = ""
    if worker.place.rank == 1:
        handle = worker.service("slow", timeout=20)
        start = time.monotonic()
        try:
            handle.call("slow", timeout=0.5)
        except CollectiveError as error:
            said = str(error)
        assert time.monotonic() - start < 8  # half a second, and what a busy machine adds
        try:
            worker.service("nobody", timeout=0.5)
        except CollectiveError as error:
            said += " | " + str(error)
    worker.group.barrier()
    return said

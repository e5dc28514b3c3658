"""A worker inside a Ray actor: how it meets the others, and its door to channels and services."""

from __future__ import annotations

import os
import socket
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from manyhands.engines import hosts as hosts_of_a_run
from manyhands.engines import process
from manyhands.engines.base import Channel, Place, Service, WeightStore
from manyhands.engines.group import Group
from manyhands.errors import CollectiveError, ConfigError
from manyhands.trees import Tree

if TYPE_CHECKING:
    from manyhands.engines.ray.parts import Client

START_SECONDS = 60.0  # the most that the start of all actors may take
CLIENT: list[Client] = []  # in an actor's process: its door to the coordinator


def attach(place: Place, timeout: float) -> RayWorker:
    """Meet the other actors of this run; CollectiveError names those who do not come."""
    if not CLIENT:
        raise ConfigError(
            "MANYHANDS_ENGINE=ray, but this process is not one of manyhands' Ray actors; type "
            "`manyhands launch --engine ray -n N script.py`"
        )
    return RayWorker(place, timeout, CLIENT[0])


class RayWorker(process.ProcessWorker):
    def __init__(self, place: Place, timeout: float, client: Client) -> None:
        import ray
        import torch

        from manyhands.engines.ray.parts import NewsRoster
        from manyhands.engines.torch import Arrival, own_gpus
        from manyhands.engines.torch import transport as c10d

        self._client = client
        self._process_group: Any
        self._handed: WeightStore | None = None
        self._version = 0  # of the weights that were handed out last
        start = max(timeout, START_SECONDS) if timeout > 0 else 0.0
        one_node = place.local_size == place.size  # nobody who may come elsewhere, either
        ip = "127.0.0.1" if one_node else ray.util.get_node_ip_address()
        listener = socket.create_server((ip, 0)) if place.rank == 0 else None
        port = listener.getsockname()[1] if listener is not None else 0
        gpus = torch.cuda.device_count() if torch.distributed.is_nccl_available() else 0
        visible = os.environ.get("CUDA_VISIBLE_DEVICES", "")
        here = [place.host, gpus, visible, ip, port]
        state, met = client.ask("start of the ray engine", "meet", "start", place.rank, here, start,
                              wait=start)  # fmt: skip
        if state != "ok":
            raise _nobody(state, met, place.size, start)
        self._began = len(met)  # workers; others may come
        hosts = [m[0] for m in met] + [place.host] * (place.rank >= len(met))

        def tell(what: str, mine: str) -> list[str]:
            state, said = client.ask(f"start of the ray engine: {what}", "meet", what, place.rank,
                                     mine, start, wait=start)  # fmt: skip
            if state != "ok":
                raise _nobody(state, said, place.size, start)
            return list(said)

        together = replace(place, size=len(met))
        if not client.restarts:
            hosts_of_a_run.meet(together, hosts, tell, near=met[0][3], script=False)
        arrivals = [Arrival(*m[:3]) for m in met]
        board = process.open_board(place.size) if len(set(hosts)) == 1 else None
        super().__init__(place, timeout, board)
        store, self._process_group = None, None
        if (
            not client.restarts
        ):  # else the others have made their group, and this one attends nothing
            store = _store(met[0][3], met[0][4], together.size, listener, start)
            mine = place.local_rank % gpus if own_gpus(arrivals) else None
            self._process_group = c10d.init_process_group(
                place.rank, together.size, store, timeout, gpu=mine, one_host=len(set(hosts)) == 1
            )
        members = place.size if client.restarts else together.size
        known = {**dict(enumerate(m[0] for m in met)), place.rank: place.host}
        roster = self.roster([known.get(r, hosts[0] if board else "?") for r in range(place.size)])
        client.names = roster.names
        if board is None:
            roster = NewsRoster(client, roster.names)
        self.group = Group(
            c10d.C10dTransport(self._process_group, range(members), place.rank, roster, timeout,
                               board, store)
        )  # fmt: skip

    def channel(self, name: str, *, reader: int = 0, capacity: int = 8) -> Channel:
        from manyhands.engines.ray.parts import RayChannel

        return RayChannel(self._client, name, reader, capacity, self.timeout)

    def weights(self, name: str, *, writer: int = 0) -> WeightStore:
        from manyhands.engines.ray.parts import RayWeights

        return RayWeights(self._client, name, writer, self.timeout)

    def hand_out(self, weights: Tree) -> Tree:
        """Through the object store: put once a version, fetched once a node."""
        if self._handed is None:
            self._handed = self.weights("manyhands: handed out")
        self._version += 1
        if self.place.rank == 0:
            self._handed.publish(weights)
            return weights
        found = self._handed.pull(newer_than=self._version - 1, timeout=self.timeout)
        assert found is not None  # pull waits, and raises at its deadline
        return found[1]

    def serve(self, name: str, target: object) -> None:
        self._client.serve(name, target)

    def service(self, name: str, timeout: float | None = None) -> Service:
        from manyhands.engines.ray.parts import RayService

        limit = self.timeout if timeout is None else timeout
        state, found = self._client.ask(f"service {name!r}", "find", name, limit, wait=limit)
        if state != "ok":
            raise CollectiveError(
                f"service {name!r}: nobody offered it within {limit:g} s; offered are: "
                f"{', '.join(found) or 'none'}"
            )
        return RayService(self._client, name, int(found), self.timeout)

    @property
    def restarts(self) -> int:
        return self._client.restarts

    def alive(self) -> int | None:
        elastic = self._began < self.place.size or self._client.absent
        return self.place.size - len(self._client.absent) if elastic else None

    def lost(self) -> set[int]:
        return super().lost() | self._client.absent

    def away(self) -> set[int]:
        return super().away() | self._client.absent

    def later(self) -> set[int]:
        return set(range(self._began, self.place.size))

    def main_has_left(self) -> bool:
        return bool(self._client.ask("the main worker", "has_left", 0, wait=self.timeout))

    def fail(self, error: BaseException) -> None:
        super().fail(error)
        self._leave()

    def close(self) -> None:
        super().close()  # first the word on the board, so that who waits learns why
        self._leave()

    def _leave(self) -> None:
        from manyhands.engines.torch.transport import leave_process_group

        group, self._process_group = self._process_group, None
        if group is not None:
            leave_process_group(group)


def _nobody(state: str, met: Any, size: int, waited: float) -> CollectiveError:
    if state == "gone":
        return CollectiveError(f"start of the ray engine: another worker {met}")
    who = ", ".join(f"worker {r} of {size}" for r in met)
    return CollectiveError(f"start of the ray engine: waited {waited:g} s for {who}")


def _store(host: str, port: int, size: int, listener: Any, timeout: float) -> Any:
    """The c10d store: a small key-value server in worker 0, on its node's address."""
    from torch._C._distributed_c10d import PrefixStore, TCPStore

    from manyhands.engines.torch.transport import group_timeout

    try:
        store = TCPStore(
            host, port, size,
            is_master=listener is not None,
            timeout=group_timeout(timeout),
            wait_for_workers=False,
            master_listen_fd=listener.detach() if listener is not None else None,
        )  # fmt: skip
    except RuntimeError as error:
        reason = str(error).strip().split("\n", 1)[0]
        raise CollectiveError(
            f"worker 0's store at {host}:{port} is out of reach: {reason}"
        ) from None
    return PrefixStore("manyhands", store)

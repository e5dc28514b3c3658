"""Workers under torch.distributed: `manyhands launch --engine torch`, torchrun, or srun.

1. everybody reaches the store (a small key-value server in worker 0 or in torchrun)
2. everybody says there who and where it is: from here on a missing worker has a name
3. on several hosts: which interface, whether all run the same, and whether all reach all (hosts.py)
4. on one host all share a board; on several the store has to do
5. the process group: gloo, and nccl when every worker has a GPU of its own
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import socket
from collections.abc import Mapping
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, TCPStore

from manyhands.engines import hosts as hosts_of_a_run
from manyhands.engines.base import Patience, Place, Roster
from manyhands.engines.group import Group
from manyhands.engines.process import ProcessWorker, open_board
from manyhands.engines.shared import Board
from manyhands.engines.torch.transport import (
    C10dTransport,
    group_timeout,
    init_process_group,
    leave_process_group,
)
from manyhands.errors import CollectiveError, ConfigError

_LOOPBACK = "127.0.0.1"
_START_SECONDS = 30.0  # the least that a start may take: imports on a busy disk are slow


def attach(place: Place, timeout: float) -> TorchWorker:
    """Meet the other workers of this start; CollectiveError names those who do not come."""
    start = max(timeout, _START_SECONDS) if timeout > 0 else 0.0
    store = PrefixStore("manyhands", _store(place, start))
    arrivals = [Arrival(**json.loads(a)) for a in _all_say(store, "here", place, _arrival(), start)]
    hosts = [a.host for a in arrivals]
    place = replace(
        place,
        local_rank=hosts[: place.rank].count(place.host),
        local_size=hosts.count(place.host),
    )
    hosts_of_a_run.meet(
        place, hosts, lambda what, mine: _all_say(store, what, place, mine, start), near=_near()
    )
    board = _common_board(store, place, hosts, start)
    return TorchWorker(place, timeout, store, arrivals, board)


class TorchWorker(ProcessWorker):
    def __init__(
        self, place: Place, timeout: float, store: Any, arrivals: list[Arrival], board: Board | None
    ) -> None:
        super().__init__(place, timeout, board)
        hosts = [a.host for a in arrivals]
        self._process_group: Any = init_process_group(
            place.rank,
            place.size,
            store,
            timeout,
            gpu=place.local_rank % arrivals[place.rank].gpus if own_gpus(arrivals) else None,
            one_host=len(set(hosts)) == 1,
        )
        ranks = range(place.size)
        start = max(timeout, _START_SECONDS) if timeout > 0 else 0.0

        def say(what: str, mine: Any) -> list[Any]:
            said = _all_say(store, what, place, json.dumps(mine), start)
            return [json.loads(word) for word in said]

        roster = self.meet(hosts, say, meeting_point(os.environ)[0])
        self.group = Group(
            C10dTransport(self._process_group, ranks, place.rank, roster, timeout, board, store)
        )

    def fail(self, error: BaseException) -> None:
        super().fail(error)
        self._leave()

    def close(self) -> None:
        super().close()  # first the word on the board, so that who waits learns why
        self._leave()

    def _leave(self) -> None:
        group, self._process_group = self._process_group, None
        if group is not None:
            leave_process_group(group)


# -- who is there ------------------------------------------------------------------------------


@dataclass(frozen=True)
class Arrival:
    """What each worker tells the others at the start."""

    host: str
    gpus: int
    visible: str  # CUDA_VISIBLE_DEVICES


def _arrival() -> str:
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", "")
    gpus = torch.cuda.device_count() if dist.is_nccl_available() else 0
    return json.dumps({"host": socket.gethostname(), "gpus": gpus, "visible": visible})


def own_gpus(arrivals: list[Arrival]) -> bool:
    """Whether every worker has a GPU that no other worker uses: nccl refuses to share one.

    Either each sees all GPUs of its host and there are enough, or the launcher has dealt them out.
    """
    for host in {a.host for a in arrivals}:
        here = [a for a in arrivals if a.host == host]
        dealt = [v for a in here for v in a.visible.split(",") if v]
        if all(a.gpus >= len(here) for a in here):
            continue
        if any(a.gpus == 0 or not a.visible for a in here) or len(set(dealt)) < len(dealt):
            return False
    return True


def _all_say(store: Any, what: str, place: Place, mine: str, timeout: float) -> list[str]:
    """Every worker's word under that heading, by rank."""
    keys = [f"{what}/{rank}" for rank in range(place.size)]
    patience = Patience(timeout)
    try:
        store.set(keys[place.rank], mine)
        missing = list(range(place.size))
        while True:
            missing = [r for r in missing if not store.check([keys[r]])]
            if not missing:
                return [store.get(key).decode() for key in keys]
            if patience.over:
                names = [f"worker {r} of {place.size}" for r in range(place.size)]
                raise Roster(names).late(missing, "start of the torch engine", patience.waited)
            patience.pause()
    except RuntimeError as error:
        raise CollectiveError(
            f"start of the torch engine: the store is gone; worker 0 or the launcher has ended "
            f"({_first_line(error)})"
        ) from None


def _common_board(store: Any, place: Place, hosts: list[str], timeout: float) -> Board | None:
    """The launcher's board, or one made by worker 0; None unless everybody can open it."""
    if len(set(hosts)) > 1:
        return None
    board = open_board(place.size)
    if all(say == "yes" for say in _all_say(store, "launched", place, _yes(board), timeout)):
        return board
    board = Board(place.size) if place.rank == 0 else None
    token = Board.token(board.address) if board is not None else ""
    token = _all_say(store, "token", place, token, timeout)[0]
    board = board or Board.open(token, place.size)
    opened = _all_say(store, "opened", place, _yes(board), timeout)
    return board if all(say == "yes" for say in opened) else None


def _yes(board: Board | None) -> str:
    return "no" if board is None else "yes"


# -- where the store is --------------------------------------------------------------------------


def _store(place: Place, timeout: float) -> Any:
    if dist.is_initialized():
        if dist.get_world_size() != place.size or dist.get_rank() != place.rank:
            raise ConfigError(
                f"torch.distributed says rank {dist.get_rank()} of {dist.get_world_size()}, the "
                f"launcher says {place.rank} of {place.size}; start the script in one way only"
            )
        return dist.distributed_c10d._get_default_store()
    host, port, alone = meeting_point(os.environ)
    listener = -1
    serves = place.rank == 0 and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True"
    if serves and "MANYHANDS_MASTER_FD" in os.environ:
        listener = int(os.environ.pop("MANYHANDS_MASTER_FD"))
    elif serves and alone:
        listener = _listen(port)
    try:
        store = TCPStore(
            host,
            port,
            place.size,
            is_master=serves,
            timeout=timedelta(seconds=timeout) if timeout > 0 else group_timeout(0),
            wait_for_workers=False,
            master_listen_fd=listener if listener >= 0 else None,
        )
    except RuntimeError as error:
        raise CollectiveError(
            f"start of the torch engine: worker 0 cannot be reached at {host}:{port}, or the port "
            f"is taken ({_first_line(error)}); set MASTER_ADDR and MASTER_PORT"
        ) from None
    return PrefixStore(f"start-{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}", store)


def _near() -> str:
    """The host of the store, where it is known by a name."""
    return "" if dist.is_initialized() else meeting_point(os.environ)[0]


def meeting_point(env: Mapping[str, str]) -> tuple[str, int, bool]:
    """(host, port) of the store, and whether only this host needs to reach it."""
    if "MANYHANDS_MASTER" in env:
        host, _, port = env["MANYHANDS_MASTER"].rpartition(":")
        return host, _number(port), host == _LOOPBACK
    nodes = env.get("SLURM_STEP_NODELIST", env.get("SLURM_JOB_NODELIST", ""))
    if "MASTER_ADDR" in env or not nodes:
        host = env.get("MASTER_ADDR", _LOOPBACK)
        return host, _number(env.get("MASTER_PORT", "29500")), host in (_LOOPBACK, "localhost")
    first = slurm_first_host(nodes)
    number = _number(env["MASTER_PORT"]) if "MASTER_PORT" in env else slurm_port(env)
    if first.split(".")[0] == socket.gethostname().split(".")[0]:
        return _LOOPBACK, number, first == nodes
    return first, number, False


def slurm_first_host(nodelist: str) -> str:
    """`gpu[03-05,9],x1` -> `gpu03`: where worker 0 of a SLURM step runs."""
    first = re.match(r"(?:[^\[,]|\[[^\]]*\])*", nodelist)
    # Of each bracket the first number: `rack[1-2]node[3-4]` begins with `rack1node3`.
    host = re.sub(r"\[(\d+)[^\]]*\]", r"\1", first.group()) if first else ""
    return host or "127.0.0.1"


def slurm_port(env: Mapping[str, str]) -> int:
    """A port that all workers of a step compute alike and two steps hardly share."""
    return (
        15000 + (int(env.get("SLURM_JOB_ID", "0")) * 7 + int(env.get("SLURM_STEP_ID", "0"))) % 20000
    )


def _number(port: str) -> int:
    if not port.isdigit():
        raise ConfigError(f"{port!r} is not a port number; set MASTER_PORT to one")
    return int(port)


def _listen(port: int) -> int:
    """A listening socket on the loopback: nobody outside this host can reach the store."""
    with socket.socket() as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listener.bind((_LOOPBACK, port))
        except OSError as error:
            raise ConfigError(f"port {port} is taken ({error}); set MASTER_PORT") from None
        listener.listen(1024)
        return listener.detach()  # the store closes it


def _first_line(error: Exception) -> str:
    with contextlib.suppress(IndexError):
        return str(error).strip().splitlines()[0]
    return type(error).__name__

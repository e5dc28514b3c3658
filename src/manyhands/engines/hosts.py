"""Several hosts: whether all reach all, and whether all run the same.

    each worker   who and where I am, by which address I am reached, what I run
    all           compare what they run: what differs is named
    each host     opens a port, and its first worker calls those of all others: who cannot reach
                  whom is named, in seconds

The three checks are made once, at the start, and only where there is more than one host. The engine
gives the means to tell all workers something; nothing here knows how.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib.metadata
import json
import os
import platform
import secrets
import socket
import sys
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from manyhands.engines import addresses
from manyhands.engines.base import Place, worker_names
from manyhands.errors import CollectiveError, ConfigError

# What each worker says under a heading (plain text), by rank, on all.
Tell = Callable[[str, str], list[str]]

_CALL_SECONDS = 4.0  # for a connection that a working network makes in milliseconds
_VERSIONS = ("numpy", "torch", "gymnasium")
_MOST_FILES = 500  # of the user's own that are compared


class Differs(ConfigError):
    """Workers do not all run the same."""


# -- all together ----------------------------------------------------------------------------------


def meet(place: Place, hosts: Sequence[str], tell: Tell, *, near: str = "",
         reach: Callable[[], list[str]] | None = None, script: bool = True) -> None:  # fmt: skip
    """Everything that is looked at before workers on several hosts begin.

    Args:
        place: where this worker stands.
        hosts: of all workers, by rank.
        tell: the engine's means to tell all something.
        near: a host that all can reach, such as that of the rendezvous.
        reach: a line for each host that this worker cannot reach, by the engine's own means;
            without it our own sockets are tried, on the interface that gloo then uses.
        script: whether each worker was started with the user's script and its arguments.
    """
    if len(set(hosts)) == 1:
        return
    compare(worker_names(place.size, hosts), [json.loads(text) for text in
            tell("runs", json.dumps(what_runs(script)))])  # fmt: skip
    address = interface = ""
    if reach is None:
        address = _own_address(place, hosts, tell, near)
        interface = addresses.choose_interface(address)
        found = _all_pairs(place, hosts, tell, address)
    else:
        found = [json.loads(text) for text in tell("reached", json.dumps(reach()))]
    missing = [f"  {line}" for lines in found for line in lines]
    if missing:
        raise CollectiveError(
            "start: not all hosts reach each other:\n" + "\n".join(missing) + "\n"
            "Look at their firewalls and routes. Where a host has several interfaces, name the one "
            f"to use: {addresses.INTERFACES[0]}=eth0 (torch, ray), UCX_NET_DEVICES=eth0 (MPICH)"
        )
    if place.is_main:
        _say(hosts, interface, address)


def _own_address(place: Place, hosts: Sequence[str], tell: Tell, near: str) -> str:
    """By which the others reach this host."""
    mine = addresses.address_towards(near or hosts[0])
    mine = "" if addresses.is_loopback(mine) else mine
    # Whose own name leads to the loopback finds its address on the way to another.
    said = tell("address", mine)
    others = [a for r, a in enumerate(said) if a and hosts[r] != place.host]
    ways = [mine] if mine else map(addresses.address_towards, others)
    return next((a for a in ways if not addresses.is_loopback(a)), "")


def _all_pairs(place: Place, hosts: Sequence[str], tell: Tell, address: str) -> list[list[str]]:
    """The first worker of each host calls those of all others."""
    first = hosts.index(place.host) == place.rank
    with _Door(address if first else None) as door:
        doors = [json.loads(text) for text in tell("door", json.dumps(door.where))]
        failed = _calls(doors, hosts, place.rank) if first else []
        return [json.loads(text) for text in tell("reached", json.dumps(failed))]


def _say(hosts: Sequence[str], interface: str, address: str) -> None:
    counts = {host: hosts.count(host) for host in dict.fromkeys(hosts)}
    each = ", ".join(f"{host} ({n} worker{'s' * (n > 1)})" for host, n in counts.items())
    by = f"; this one by {interface or 'an interface without a name'}, {address}" if address else ""
    print(f"manyhands: {len(counts)} hosts: {each}{by}", file=sys.stderr, flush=True)


class _Door:
    """A port at which the first worker of a host answers, for as long as the test takes."""

    def __init__(self, address: str | None) -> None:
        self._listener: socket.socket | None = None
        self.where: list[Any] = []  # address, port, the word to say
        if address is None:
            return
        word = secrets.token_hex(16)
        try:
            family = socket.AF_INET6 if ":" in address else socket.AF_INET
            self._listener = socket.create_server((address, 0), family=family)
        except OSError as error:
            self.where = ["", 0, str(error)]
            return
        self.where = [address, self._listener.getsockname()[1], word]
        threading.Thread(target=self._answer, args=(word,), daemon=True).start()

    def _answer(self, word: str) -> None:
        assert self._listener is not None
        with contextlib.suppress(OSError):  # closed: the test is over
            while True:
                caller, _ = self._listener.accept()
                with caller, contextlib.suppress(OSError):
                    caller.settimeout(_CALL_SECONDS)
                    if caller.recv(64) == word.encode():
                        caller.sendall(word[::-1].encode())

    def __enter__(self) -> _Door:
        return self

    def __exit__(self, *exc: object) -> None:
        if self._listener is not None:
            with contextlib.suppress(OSError):  # macOS has no such thing for a listener
                self._listener.shutdown(socket.SHUT_RDWR)  # else it listens on while accept() waits
            self._listener.close()


def _calls(doors: list[list[Any]], hosts: Sequence[str], rank: int) -> list[str]:
    """Call all other hosts at once; a line for each that does not answer."""
    others = [r for r, door in enumerate(doors) if door and hosts[r] != hosts[rank]]
    said: dict[int, str] = {}

    def call(other: int) -> None:
        said[other] = _call(*doors[other])

    threads = [threading.Thread(target=call, args=(r,), daemon=True) for r in others]
    for thread in threads:
        thread.start()
    deadline = time.monotonic() + 2 * _CALL_SECONDS
    for thread in threads:
        thread.join(max(0.0, deadline - time.monotonic()))
    late = f"no answer within {2 * _CALL_SECONDS:g} s"
    return [
        f"{hosts[rank]} cannot reach {hosts[r]} at {doors[r][0] or 'any address'} ({why})"
        for r in others
        if (why := said.get(r, late))
    ]


def _call(address: str, port: int, word: str) -> str:
    if not address:
        return word  # why it has none
    try:
        with socket.create_connection((address, port), _CALL_SECONDS) as line:
            line.sendall(word.encode())
            answer = line.recv(64).decode(errors="replace")
    except OSError as error:
        return "timed out" if isinstance(error, TimeoutError) else str(error)
    return "" if answer == word[::-1] else "somebody else answers there"


# -- what runs -------------------------------------------------------------------------------------


def what_runs(script: bool = True) -> dict[str, list[str]]:
    """All that has to be the same on all hosts: what it is -> as it is shown, and compared."""
    found = {"Python": [platform.python_version()]}
    for name in _VERSIONS:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            found[name] = [importlib.metadata.version(name)]
    package = Path(__file__).parents[1]
    digest = hashlib.sha256()
    for file in sorted(package.rglob("*.py")):
        digest.update(str(file.relative_to(package)).encode() + b"\0" + file.read_bytes())
    found["manyhands"] = _shown(str(package), digest.hexdigest())
    if script:
        found["arguments"] = [" ".join(sys.argv[1:]) or "none"]
    return found | _own_files()


def _shown(path: str, digest: str) -> list[str]:
    return [f"{path} ({digest[:12]})", digest]


def _own_files() -> dict[str, list[str]]:
    """The user's script, and what it has imported that is not installed."""
    installed = (sys.prefix, sys.base_prefix, str(Path(__file__).parents[1]))
    found: dict[str, list[str]] = {}
    for name, module in list(sys.modules.items()):
        path = getattr(module, "__file__", None)
        if not isinstance(path, str) or os.path.abspath(path).startswith(installed):
            continue
        with contextlib.suppress(OSError):
            digest = hashlib.sha256(Path(path).read_bytes()).hexdigest()
            what = "the script" if name == "__main__" else f"module {name}"
            found[what] = _shown(os.path.abspath(path), digest)
        if len(found) == _MOST_FILES:
            break
    return found


def compare(names: Sequence[str], said: Sequence[dict[str, list[str]]]) -> None:
    """`Differs` names what differs, and on which workers.

    Where a file lies may differ; what is in it may not. A module that only some have imported is no
    fault: workers may play different parts.
    """
    differ = []
    for what in dict.fromkeys(key for one in said for key in one):
        values = {r: one[what] for r, one in enumerate(said) if what in one}
        if len({value[-1] for value in values.values()}) > 1:
            lines = [f"    {names[r]}: {value[0]}" for r, value in values.items()]
            differ.append(f"  {what}:\n" + "\n".join(lines))
    if differ:
        raise Differs(
            "start: workers do not all run the same:\n" + "\n".join(differ) + "\nInstall the same "
            "versions on all hosts, and copy the script to all (or put it on a disk they share)"
        )

"""Hostile bytes by the million: frames for the control socket, checkpoints for their reader.

    python tests/faults/fuzz.py socket --count 1000000 --seed 1
    python tests/faults/fuzz.py checkpoint --count 1000000 --seed 1

Nothing may crash or hang, and memory has a bound: this process may take two gigabytes more than it
has at the start, and what claims more is refused before anything is allocated. Every so often a
well-behaved caller asks the same server, and is answered. Prints what it counted, as JSON.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import resource
import shutil
import socket
import struct
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Generator
from pathlib import Path
from typing import Any

import numpy as np

from manyhands import wire
from manyhands.config import load_toml
from manyhands.engines.parts import sockets
from manyhands.engines.parts.sockets import Caller, Server, UnixListener, connect, same_user
from manyhands.errors import ConfigError
from manyhands.experiment import checkpoint

ROOM = 2 << 30
EVERY = 1_000  # frames between two looks at the server
LOOK_SECONDS = 60.0
VALUES: list[Any] = [
    *(None, True, -1, 0, 1, 2**31, 2**40, 2**63, 1e308, float("inf"), "", "x", "<f8", "|O"),
    *("f4,,", "_secret", "echo", "numpy", "torch", [], [0], [-1], {}, {"@tuple": []}),
    *({"@bytes": 0}, {"@array": 0, "t": "<f4", "s": [4], "k": "numpy"}, [[]] * 1000),
]
BYTES = b'0123456789-"[]{},.:@eE <>|?\x00\xff=\n'


def spoiled(data: bytes, chance: random.Random) -> bytes:
    """Some bytes changed, cut, doubled or put in; most of them near the head."""
    out = bytearray(data)
    for _ in range(chance.randrange(1, 6)):
        near = chance.random() < 0.8
        at = chance.randrange(max(1, min(len(out), 200 if near else len(out))))
        how = chance.randrange(4)
        if how == 0 and out:
            out[at % len(out)] = chance.choice(BYTES)
        elif how == 1:
            del out[at : at + chance.randrange(1, 20)]
        elif how == 2:
            out[at:at] = out[at : at + chance.randrange(1, 20)]
        else:
            out[at:at] = chance.randbytes(chance.randrange(1, 6))
    return bytes(out)


def lied(tree: Any, chance: random.Random) -> Any:
    """The same JSON with other values here and there."""
    if isinstance(tree, dict):
        return {k: lied(v, chance) for k, v in tree.items() if chance.random() > 0.03}
    if isinstance(tree, list) and len(tree) < 100:
        return [lied(v, chance) for v in tree]
    return chance.choice(VALUES) if chance.random() < 0.15 else tree


# -- the control socket ----------------------------------------------------------------------------


class Target:
    """What the server offers."""

    def echo(self, *args: Any, **kwargs: Any) -> Any:
        return [list(args), kwargs]


def message(body: Any, sizes: Any, payload: bytes) -> bytes:
    header = json.dumps([body, sizes]).encode()
    head = struct.pack("<I", len(header)) + header
    return head + bytes(-len(head) % 64) + payload


def frames(chance: random.Random) -> Generator[tuple[bytes, int], None, None]:
    """(bytes, a file to send along or -1)."""
    calls = [
        [1, "target", "echo", [1, "a", None], {"x": 2.5}],
        [2, "target", "echo", [np.arange(6, dtype=np.float32), b"abc"], {}],
        [3, "target", "missing", [], {}],
        [4, "nobody", "echo", [(1, 2)], {}],
    ]
    whole = [bytes(wire.encode(call)) for call in calls]
    parts = []
    for data in whole:
        (length,) = struct.unpack_from("<I", data)
        body, sizes = json.loads(data[4 : 4 + length])
        parts.append((body, sizes, data[(4 + length + 63) // 64 * 64 :]))
    memory = os.memfd_create("fuzz")
    os.write(memory, whole[1])
    holes = os.memfd_create("holes")
    os.ftruncate(holes, 1 << 40)
    others = [memory, holes, os.open("/dev/zero", os.O_RDWR), os.open("/", os.O_RDONLY)]
    try:
        while True:
            yield frame(chance, whole, parts, others)
    finally:
        for fd in others:
            os.close(fd)


def frame(
    chance: random.Random, whole: list[bytes], parts: list[Any], files: list[int]
) -> tuple[bytes, int]:
    kind = chance.random()
    if kind < 0.45:
        body, sizes, payload = chance.choice(parts)
        data = message(lied(body, chance), lied(sizes, chance), payload)
    elif kind < 0.8:
        data = spoiled(chance.choice(whole), chance)
    elif kind < 0.9:
        data = chance.choice(whole)
    else:
        data = chance.randbytes(chance.randrange(200))
    length, file = len(data), -1
    if chance.random() < 0.05:  # what is said of the length is not so
        length = chance.choice([0, -1, 7, 2**18, 2**31, 2**39, 2**62, -(2**62), length + 1])
    if chance.random() < 0.02:
        file, length = chance.choice(files), -chance.choice([1, 64, len(whole[1]), 2**40])
    return struct.pack("<q", length) + (b"" if file >= 0 else data), file


def fuzz_socket(count: int, chance: random.Random) -> dict[str, Any]:
    crashed: list[str] = []
    hook = threading.excepthook
    threading.excepthook = lambda args: crashed.append(f"{args.exc_type}: {args.exc_value}")
    threads, files = threading.active_count() + 50, len(os.listdir("/proc/self/fd")) + 50
    door = UnixListener()
    server = Server("fuzz", door.listener, same_user)
    server.offer("target", Target())
    told: Counter[str] = Counter()
    make, worst, seen = frames(chance), 0.0, -1
    real = count_frames(told)
    while sum(told.values()) < count:
        with connect(door.address) as sock:
            sock.settimeout(LOOK_SECONDS)
            with contextlib.suppress(OSError):  # it hangs up on the first that it does not know
                for _ in range(chance.randrange(1, 5)):
                    data, file = next(make)
                    if file >= 0:
                        socket.send_fds(sock, [data], [file])
                    else:
                        sock.sendall(data)
            read_to_the_end(sock)
        if sum(told.values()) // EVERY != seen:
            seen = sum(told.values()) // EVERY
            began = time.monotonic()
            caller = Caller(connect(door.address), "fuzz")
            answer = caller.start("target", "echo", [seen], {})
            assert answer.result(LOOK_SECONDS) == [[seen], {}]
            worst = max(worst, time.monotonic() - began)
            caller._sock.shutdown(socket.SHUT_RDWR)  # its thread waits there
            caller._sock.close()
            assert not crashed, crashed
            deadline = time.monotonic() + LOOK_SECONDS
            while threading.active_count() > threads or len(os.listdir("/proc/self/fd")) > files:
                assert time.monotonic() < deadline, f"{threading.active_count()} threads"
                time.sleep(0.01)
    make.close()
    server.close()
    door.close()
    sockets.receive, threading.excepthook = real, hook
    return dict(told) | {"slowest_answer_ms": round(1000 * worst, 1)}


def count_frames(told: Counter[str]) -> Any:
    """Of what the server has looked at: well formed, refused, and broken off in the middle."""
    real = sockets.receive

    def receive(sock: socket.socket) -> Any:
        if not sock.recv(1, socket.MSG_PEEK):
            raise EOFError  # no frame: the end
        how = "refused"
        try:
            tree, how = real(sock), "well formed"
            return tree
        except EOFError:
            how = "broken off"
            raise
        finally:
            told[how] += 1

    sockets.receive = receive
    return real


def read_to_the_end(sock: socket.socket) -> None:
    """Say that no more will come, and hear the answers; a server that hangs runs out of time."""
    with contextlib.suppress(ConnectionError):
        sock.shutdown(socket.SHUT_WR)
        while sock.recv(65536):
            pass


# -- checkpoints and configurations ----------------------------------------------------------------

CONFIG = """algorithm = "ppo"
[run]
env = "CartPole-v1"
steps = 1000
hidden = [64, 64]
env_kwargs = {x = 1}
[ppo]
gamma = 0.99
learning_rate = "linear:3e-4"
"""


def fuzz_checkpoint(count: int, chance: random.Random) -> dict[str, Any]:
    told: Counter[str] = Counter()
    # In memory where there is room for it: no disk is worn out by a million files.
    place = "/dev/shm" if os.path.isdir("/dev/shm") else None
    folder = Path(tempfile.mkdtemp(prefix="manyhands-fuzz-", dir=place))
    try:
        state = {"w": np.arange(8.0), "rng": 2**100, "rows": [1, None, -0.5, "ü"], "b": b"xy"}
        path = checkpoint.save(folder, state, env_steps=9)
        whole = {p.name: p.read_bytes() for p in path.iterdir()}
        for _ in range(count):
            if chance.random() < 0.1:
                told[read_config(folder / "config.toml", chance)] += 1
                continue
            forge(path, whole, chance)
            try:
                checkpoint.load(path, tensors=False)
                told["read"] += 1
            except (checkpoint.Damaged, ConfigError) as fault:
                told[refusal(fault, path)] += 1
        return dict(told)
    finally:
        shutil.rmtree(folder)


def forge(path: Path, whole: dict[str, bytes], chance: random.Random) -> None:
    """One file is spoiled; most of the time all checksums fit what it holds now."""
    files = dict(whole)
    name = chance.choice(sorted(files))
    if name == checkpoint.STATE and chance.random() < 0.5:
        files[name] = json.dumps(lied(json.loads(files[name]), chance)).encode()
    elif name == checkpoint.ARRAYS and chance.random() < 0.5:
        (length,) = struct.unpack_from("<Q", files[name])
        header = json.dumps(lied(json.loads(files[name][8 : 8 + length]), chance)).encode()
        files[name] = struct.pack("<Q", len(header)) + header + files[name][8 + length :]
    else:
        files[name] = spoiled(files[name], chance)
    manifest = json.loads(whole[checkpoint.MANIFEST])
    del manifest["sha256"]
    if name == checkpoint.MANIFEST:
        if chance.random() < 0.8:
            told = lied(manifest, chance)
            with contextlib.suppress(TypeError):
                files[name] = checkpoint._manifest_text(told)
    elif chance.random() < 0.9:
        manifest["files"][name] = checkpoint._print_of(files[name])
        files[checkpoint.MANIFEST] = checkpoint._manifest_text(manifest)
    for name, data in files.items():
        (path / name).write_bytes(data)


def read_config(file: Path, chance: random.Random) -> str:
    file.write_bytes(spoiled(CONFIG.encode(), chance))
    try:
        load_toml(file)
    except ConfigError as fault:
        return f"config {refusal(fault, file)}"
    return "config read"


def refusal(fault: Exception, path: Path) -> str:
    """A refusal names the file."""
    if str(path) not in str(fault):
        raise AssertionError(f"{path} is not named: {fault}") from fault
    return "refused" if isinstance(fault, ConfigError) else "damaged"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("what", choices=["socket", "checkpoint"])
    parser.add_argument("--count", type=int, default=10_000)
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    limit = pages * os.sysconf("SC_PAGE_SIZE") + ROOM
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    import torch  # noqa: F401 (a message may hold tensors: what it takes is not theirs)

    before, began = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, time.monotonic()
    fuzz = fuzz_socket if options.what == "socket" else fuzz_checkpoint
    told = fuzz(options.count, random.Random(options.seed))
    grown = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024
    seconds = round(time.monotonic() - began, 1)
    print(json.dumps(told | {"seconds": seconds, "megabytes_more": round(grown, 1)}))
    sys.exit(grown > 512)


if __name__ == "__main__":
    main()

"""Where the metrics of a run go besides its own files: TensorBoard, Weights & Biases.

A sink never stops a training: what fails while the run goes on is said once, and the run goes on
without it. Only what is wrong at the start (a package that is not there, a login that is missing)
is an error.
"""

from __future__ import annotations

import contextlib
import functools
import math
import os
import socket
import struct
import sys
import threading
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from manyhands.config import RunConfig
from manyhands.errors import SupportError, needs

Record = Mapping[str, Any]
Say = Callable[[str], None]

_FINISH_SECONDS = 60.0  # what Weights & Biases may take to send the rest


class Sink(Protocol):
    def write(self, record: Record) -> None: ...
    def close(self) -> None: ...


def tell(text: str) -> None:
    """One line on standard error; a reader that has gone does not matter."""
    with contextlib.suppress(OSError, ValueError):
        print(f"manyhands: {text}", file=sys.stderr, flush=True)


class Sinks:
    """Several sinks as one. A sink that fails is reported once and left out from then on."""

    def __init__(self, sinks: Sequence[Sink] = (), say: Say = tell) -> None:
        self._sinks, self._say = list(sinks), say

    def write(self, record: Record) -> None:
        for sink in list(self._sinks):
            self._try(sink, functools.partial(sink.write, record))

    def close(self) -> None:
        for sink in list(self._sinks):
            self._try(sink, sink.close)
        self._sinks = []

    def _try(self, sink: Sink, act: Callable[[], None]) -> None:
        try:
            act()
        except Exception as error:  # other people's code, and a full disk: the training goes on
            self._sinks.remove(sink)
            name = type(sink).__name__
            self._say(f"{name} gets no more metrics ({type(error).__name__}: {error})")


def make_sinks(
    run: RunConfig,
    folder: Path | None,
    plain_config: dict[str, Any],
    purge_step: int | None = None,
    say: Say = tell,
) -> Sinks:
    """The sinks that a run asks for. SupportError when one of them cannot be had.

    Args:
        run: its `tensorboard` and `wandb`.
        folder: of the run; None writes nothing (every worker but the main one).
        plain_config: what to show beside the curves.
        purge_step: in a resumed run, the first step that is written anew.
        say: where a warning goes.
    """
    sinks: list[Sink] = []
    if folder is not None and run.wandb:
        sinks.append(WeightsAndBiases(run.wandb, plain_config, folder))
    if folder is not None and run.tensorboard:
        try:
            sinks.append(TensorBoard(folder, purge_step))
        except (ImportError, OSError) as error:
            say(f"no metrics for TensorBoard ({error}); --no-tensorboard leaves them out")
    return Sinks(sinks, say)


@functools.lru_cache(maxsize=1024)  # the same few names at every update
def tag_of(name: str) -> str:
    """A metric's name in TensorBoard and Weights & Biases, which group by what is before the slash.

    mean_return -> return/mean    policy_loss -> loss/policy    seconds/rollout -> time/rollout
    episodes -> run/episodes      lag_max -> lag/max            lag -> lag/mean
    entropy -> learning/entropy   steps_per_second -> speed/steps_per_second
    eval_return -> eval/return
    """
    first, slash, rest = name.partition("/")
    if slash:
        return f"time/{rest}" if first == "seconds" else name
    if name in ("update", "episodes", "wall_seconds"):
        return f"run/{name}"
    if name.startswith("eval_"):
        return f"eval/{name[5:]}"
    if name.endswith("_per_second"):
        return f"speed/{name}"
    for group in ("return", "loss"):
        if name.endswith(f"_{group}"):
            return f"{group}/{name[: -len(group) - 1]}"
    if name == "lag" or name.startswith("lag_"):
        return f"lag/{name[4:] or 'mean'}"
    return f"learning/{name}"


def numbers_of(record: Record) -> dict[str, float]:
    """Tag -> value of all that is a finite number; the step itself is the axis, not a curve."""
    found = {}
    for name, value in record.items():
        if hasattr(value, "tolist"):  # numpy's and torch's numbers
            value = value.tolist()
        if name != "env_steps" and isinstance(value, (int, float)) and math.isfinite(value):
            found[tag_of(name)] = float(value)
    return found


class TensorBoard:
    """Event files in FOLDER/tensorboard, with environment steps as the axis.

    WHY our own few lines and not SummaryWriter: importing that takes a sixth of a second of every
    start, and it writes from a thread, whose death shows as a hang at the end. A record is small:
    here it is on disk, or an error, when `write` returns.

    Args:
        folder: of the run.
        purge_step: what an earlier process wrote at this step or later is no longer shown.
    """

    def __init__(self, folder: Path, purge_step: int | None = None) -> None:
        try:
            from tensorboard.compat.proto import event_pb2
        except ImportError as error:
            raise ImportError(f"tensorboard is not installed: {error}") from error
        self._proto, self._checksum = event_pb2, _Checksum()
        inside = Path(folder) / "tensorboard"
        inside.mkdir(parents=True, exist_ok=True)
        # CRUCIAL: files are read in the order of their names. This one must come last, even when
        # the clock was set back, or the purge would not find what it is to purge.
        stamp = max([int(time.time()), *(_stamp(p.name) + 1 for p in inside.iterdir())])
        name = f"events.out.tfevents.{stamp:010d}.{socket.gethostname()}.{os.getpid()}.manyhands"
        self._file = open(inside / name, "ab", buffering=0)  # noqa: SIM115 (see close)
        self._event, self._tags, self._slots = event_pb2.Event(), list[str](), list[Any]()
        self._put(event_pb2.Event(wall_time=time.time(), file_version="brain.Event:2"))
        # In every file, the first too: of several starts TensorBoard takes the first one as no
        # restart, and would not purge at the second if that were the first.
        start = event_pb2.SessionLog(status=event_pb2.SessionLog.START)
        at = 0 if purge_step is None else purge_step
        self._put(event_pb2.Event(wall_time=time.time(), step=at, session_log=start))

    def write(self, record: Record) -> None:
        found = numbers_of(record)
        values = {tag: x for tag, x in found.items() if abs(x) <= _FLOAT32_MAX}
        if list(values) != self._tags:
            self._lay_out(list(values))
        self._event.wall_time, self._event.step = time.time(), int(record["env_steps"])
        for slot, value in zip(self._slots, values.values(), strict=True):
            slot.simple_value = value
        self._put(self._event)

    def _lay_out(self, tags: list[str]) -> None:
        """An event with a slot for each tag: filling it again is quicker than making another."""
        self._event, self._tags = self._proto.Event(), tags
        for tag in tags:
            self._event.summary.value.add(tag=tag)
        self._slots = list(self._event.summary.value)

    def close(self) -> None:
        self._file.close()

    def _put(self, event: Any) -> None:
        """One record: length, checksum of the length, data, checksum of the data."""
        data = event.SerializeToString()
        head = struct.pack("<Q", len(data))
        framed = head + self._checksum(head) + data + self._checksum(data)
        if self._file.write(framed) != len(framed):
            raise OSError("the disk took half a record")


class WeightsAndBiases:
    """A run of a Weights & Biases project; a resumed run goes on in the same one.

    Args:
        project: its name; "entity/project" is understood too.
        experiment_plain_config: shown beside the curves.
        folder: of the run; gives its name, and holds what wandb writes.
    """

    def __init__(
        self, project: str, experiment_plain_config: dict[str, Any], folder: Path
    ) -> None:  # fmt: skip
        try:
            import wandb
        except ImportError as error:
            raise needs("wandb", "wandb", error) from error
        entity, _, name = project.rpartition("/")
        inside = Path(folder) / "wandb"
        try:
            inside.mkdir(parents=True, exist_ok=True)
            self._run = wandb.init(
                project=name,
                entity=entity or None,
                name=Path(folder).name,
                id=_kept_id(inside / "id"),
                resume="allow",
                dir=str(folder),
                config=experiment_plain_config,
                # The terminal is ours: wandb neither wraps the output nor asks for a key in it.
                settings=wandb.Settings(console="off", login_timeout=30, silent=True),
            )
        except Exception as error:
            raise SupportError(
                f"wandb could not start: {str(error).rstrip('.')}; type: wandb login, or export "
                "WANDB_MODE=offline"
            ) from error

    def write(self, record: Record) -> None:
        step = int(record["env_steps"])
        # A resumed run repeats the steps after its checkpoint; those are there already.
        if step >= self._run.step:
            self._run.log(numbers_of(record), step=step)

    def close(self) -> None:
        """Send the rest, for a minute at most: a network that is down must not hold the run."""
        faults: list[Exception] = []

        def finish() -> None:
            try:
                self._run.finish()
            except Exception as error:
                faults.append(error)

        ending = threading.Thread(target=finish, daemon=True)
        ending.start()
        ending.join(_FINISH_SECONDS)
        if ending.is_alive():
            raise TimeoutError(
                f"not all was sent within {_FINISH_SECONDS:.0f} s; type: wandb sync --sync-all"
            )
        if faults:
            raise faults[0]


_FLOAT32_MAX = 3.4028234e38


def _kept_id(path: Path) -> str:
    """The id of the run, made once."""
    if not path.exists():
        path.write_text(uuid.uuid4().hex[:12], encoding="utf-8")
    return path.read_text(encoding="utf-8").strip()


def _stamp(name: str) -> int:
    """The number by which TensorBoard's files are ordered; 0 if it is not one of them."""
    parts = name.split(".")
    return int(parts[3]) if "tfevents" in name and len(parts) > 3 and parts[3].isdigit() else 0


class _Checksum:
    """CRC-32C (Castagnoli), masked as TensorBoard's files have it.

    WHY numpy: a loop over bytes takes as long as all else that is logged. A CRC is linear: it is
    the XOR of what each byte brings at its distance from the end, which a table knows.
    """

    def __init__(self) -> None:
        row: Any = np.arange(256, dtype=np.uint32)
        for _ in range(8):
            row = row >> 1 ^ np.where(row & 1, np.uint32(0x82F63B78), np.uint32(0))
        self._last = row  # what a last byte brings
        self._rows = row[None]  # [distance from the end, value of the byte]

    def __call__(self, data: bytes) -> bytes:
        if len(data) > len(self._rows):
            self._grow(len(data))
        values = np.frombuffer(data, np.uint8).astype(np.intp)
        values[:4] ^= 0xFF  # the register starts with ones
        distances = np.arange(len(data) - 1, -1, -1)
        crc = int(np.bitwise_xor.reduce(self._rows[distances, values])) ^ 0xFFFFFFFF
        return struct.pack("<I", ((crc >> 15 | crc << 17) + 0xA282EAD8) & 0xFFFFFFFF)

    def _grow(self, length: int) -> None:
        rows = list(self._rows)
        while len(rows) < 2 * length:
            rows.append(self._last[rows[-1] & 0xFF] ^ rows[-1] >> 8)
        self._rows = np.array(rows)

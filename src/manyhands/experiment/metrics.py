"""The files of a run that grow, JSON lines and CSV, and the returns that are counted on the way.

Every line is handed to the operating system when it is written (a few microseconds), so that
whoever reads along sees it and a killed run loses none.
"""

from __future__ import annotations

import contextlib
import csv
import errno
import io
import json
import math
import os
from collections import deque
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

StrPath = str | os.PathLike[str]


class Appended:
    """A file that grows by whole rows: one that the disk refuses leaves nothing behind."""

    def __init__(self, path: StrPath) -> None:
        self._fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o666)
        self.size = os.fstat(self._fd).st_size

    def write(self, text: str) -> None:
        """OSError when the disk is full: the file is then as it was before."""
        data = text.encode()
        if (written := os.write(self._fd, data)) != len(data):
            # The launcher writes to the same file of events: nothing but our own part goes.
            os.ftruncate(self._fd, os.fstat(self._fd).st_size - written)
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        self.size += len(data)

    def sync(self) -> None:
        """Force what was written to the disk."""
        os.fsync(self._fd)

    def close(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
        self._fd = -1


class JsonLines:
    """One record a line; `rows` counts those of the whole run."""

    def __init__(self, path: StrPath, rows: int = 0) -> None:
        self._file = Appended(path)
        self.rows = rows

    def write(self, record: Mapping[str, Any]) -> None:
        self._file.write(to_json(record) + "\n")
        self.rows += 1

    def sync(self) -> None:
        self._file.sync()

    def close(self) -> None:
        self._file.close()


class Csv:
    """Rows under a header that grows: a name seen for the first time becomes a new last column."""

    def __init__(self, path: StrPath, columns: Sequence[str] = (), rows: int = 0) -> None:
        self._path = Path(path)
        self.rows = rows  # of the whole run, the header not counted
        self.columns = _header_of(self._path) or list(columns)
        self._open()

    def write(self, *records: Mapping[str, Any]) -> None:
        """Rows, all of them in one stroke; none when the disk has no room for all."""
        new = {name: None for record in records for name in record if name not in self.columns}
        if new:
            # A disk that has no room for the longer table may still have some for this row; the
            # next row tries again.
            with contextlib.suppress(OSError):
                self._widen(list(new))
        cells = [[_cell(record.get(name)) for name in self.columns] for record in records]
        self._file.write(_csv_text(cells))
        self.rows += len(records)

    def sync(self) -> None:
        self._file.sync()

    def close(self) -> None:
        self._file.close()

    def _open(self) -> None:
        self._file = Appended(self._path)
        if self.columns and self._file.size == 0:
            self._file.write(_csv_text([self.columns]))

    def _widen(self, new: list[str]) -> None:
        """Write the file again under the longer header, beside the old one, then swap them."""
        columns = [*self.columns, *new]
        with open(self._path, encoding="utf-8", newline="") as file:
            rows = list(csv.reader(file))[1:] if self.columns else []
        # An empty row would be a blank line, which readers skip: rows keep their full width.
        padded = [row + [""] * (len(columns) - len(row)) for row in rows]
        beside = self._path.with_name(self._path.name + ".tmp")
        try:
            with open(beside, "w", encoding="utf-8", newline="") as file:
                file.write(_csv_text([columns, *padded]))
                to_disk(file)
            os.replace(beside, self._path)
        except OSError:
            beside.unlink(missing_ok=True)
            raise
        self._file.close()
        self.columns = columns
        self._open()


def _csv_text(rows: Sequence[Sequence[Any]]) -> str:
    text = io.StringIO()
    csv.writer(text, lineterminator="\n").writerows(rows)
    return text.getvalue()


class Returns:
    """Returns of finished episodes: the mean of the last few, the best of all."""

    def __init__(self, last: int = 100) -> None:
        self._recent: deque[float] = deque(maxlen=last)
        self.episodes = 0
        self.best: float | None = None
        """the highest return of a single episode"""

    def add(self, total: float) -> None:
        total = float(total)
        self._recent.append(total)
        self.episodes += 1
        if self.best is None or total > self.best:
            self.best = total

    def also(self, episodes: int, best: float) -> None:
        """So many have ended besides those that are added, and the best return of all of them."""
        self.episodes += episodes
        self.best = best if self.best is None else max(best, self.best)

    @property
    def mean(self) -> float | None:
        """Of the last episodes, as many as there are; None before the first has ended."""
        # fsum is exact, so the answer is the same whatever order workers' episodes came in
        return math.fsum(self._recent) / len(self._recent) if self._recent else None

    @property
    def full(self) -> bool:
        """Whether as many episodes have ended as are looked at."""
        return len(self._recent) == self._recent.maxlen

    def solved(self, target: float | None) -> bool:
        """Whether as many episodes as are looked at have ended, with a mean of at least target."""
        return target is not None and self.full and self.mean is not None and self.mean >= target

    def state(self) -> dict[str, Any]:
        return {"recent": list(self._recent), "episodes": self.episodes, "best": self.best}

    def load_state(self, state: Mapping[str, Any]) -> None:
        self._recent = deque(state["recent"], maxlen=self._recent.maxlen)
        self.episodes, self.best = int(state["episodes"]), state["best"]


def cut_lines(path: StrPath, lines: int | None) -> int:
    """Keep the first lines of a file, whole ones only (None: all that are whole); how many.

    What follows was written after the checkpoint that is gone back to, or is half a line of a
    process that was killed.
    """
    if not os.path.exists(path):
        return 0
    found, end, offset = 0, 0, 0
    with open(path, "rb") as file:
        for line in file:
            if found == lines or not line.endswith(b"\n"):
                break
            offset += len(line)
            found, end = found + 1, offset
    os.truncate(path, end)
    return found


def to_json(record: Mapping[str, Any], indent: int | None = None) -> str:
    """JSON that every reader accepts: NaN and infinities are null, and named in "not_finite"."""
    lost: dict[str, str] = {}
    plain = _plain(dict(record), "", lost)
    if lost:
        plain["not_finite"] = lost
    return json.dumps(plain, ensure_ascii=False, allow_nan=False, indent=indent)


def write_json(path: StrPath, record: Mapping[str, Any]) -> None:
    """The whole file or none of it, whenever the machine stops: temporary file, fsync, rename."""
    path = Path(path)
    beside = path.with_name(path.name + ".tmp")
    try:
        with open(beside, "w", encoding="utf-8") as file:
            file.write(to_json(record, indent=2) + "\n")
            to_disk(file)
        os.replace(beside, path)
    except OSError:
        beside.unlink(missing_ok=True)
        raise
    folder = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(folder)  # the rename itself
    finally:
        os.close(folder)


def to_disk(file: Any) -> None:
    """Everything written so far, past every cache."""
    file.flush()
    os.fsync(file.fileno())


def _plain(value: Any, name: str, lost: dict[str, str]) -> Any:
    """numpy's and torch's scalars and arrays as Python's; what is not finite as None."""
    if isinstance(value, Mapping):
        return {
            str(key): _plain(part, f"{name}.{key}" if name else str(key), lost)
            for key, part in value.items()
        }
    if isinstance(value, (list, tuple)):
        return [_plain(part, f"{name}[{i}]", lost) for i, part in enumerate(value)]
    if hasattr(value, "tolist"):
        return _plain(value.tolist(), name, lost)
    if isinstance(value, float) and not math.isfinite(value):
        lost[name] = str(value)
        return None
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    return str(value)  # paths, enums, errors


def _cell(value: Any) -> Any:
    """A CSV cell; the writer leaves None empty and writes floats so that they read back exactly."""
    if hasattr(value, "tolist"):
        value = value.tolist()
    if isinstance(value, (Mapping, list, tuple)):
        return json.dumps(_plain(value, "", {}))
    return value


def _header_of(path: Path) -> list[str]:
    if not path.exists():
        return []
    with open(path, encoding="utf-8", newline="") as file:
        return next(csv.reader(file), [])

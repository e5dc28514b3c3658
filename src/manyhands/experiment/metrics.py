"""The files of a run that grow, JSON lines and CSV, and the returns that are counted on the way.

Every line is handed to the operating system when it is written (a few microseconds), so that
whoever reads along sees it and a killed run loses none.
"""

from __future__ import annotations

import csv
import json
import math
import os
from collections import deque
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

StrPath = str | os.PathLike[str]


class JsonLines:
    """One record a line."""

    def __init__(self, path: StrPath) -> None:
        self._file = open(path, "a", encoding="utf-8", buffering=1)  # noqa: SIM115 (see close)

    def write(self, record: Mapping[str, Any]) -> None:
        self._file.write(to_json(record) + "\n")

    def close(self) -> None:
        self._file.close()


class Csv:
    """Rows under a header that grows: a name seen for the first time becomes a new last column."""

    def __init__(self, path: StrPath, columns: Sequence[str] = ()) -> None:
        self._path = Path(path)
        self.columns = _header_of(self._path) or list(columns)
        self._open()

    def write(self, record: Mapping[str, Any]) -> None:
        new = [name for name in record if name not in self.columns]
        if new:
            self._widen(new)
        self._writer.writerow([_cell(record.get(name)) for name in self.columns])

    def close(self) -> None:
        self._file.close()

    def _open(self) -> None:
        self._file = open(self._path, "a", encoding="utf-8", newline="", buffering=1)  # noqa: SIM115
        self._writer = csv.writer(self._file, lineterminator="\n")
        if self.columns and self._file.tell() == 0:
            self._writer.writerow(self.columns)

    def _widen(self, new: list[str]) -> None:
        """Write the file again under the longer header, beside the old one, then swap them."""
        self._file.close()
        columns = [*self.columns, *new]
        with open(self._path, encoding="utf-8", newline="") as file:
            rows = list(csv.reader(file))[1:] if self.columns else []
        # An empty row would be a blank line, which readers skip: rows keep their full width.
        padded = [row + [""] * (len(columns) - len(row)) for row in rows]
        text_path = self._path.with_name(self._path.name + ".tmp")
        with open(text_path, "w", encoding="utf-8", newline="") as file:
            csv.writer(file, lineterminator="\n").writerows([columns, *padded])
            _to_disk(file)
        os.replace(text_path, self._path)
        self.columns = columns
        self._open()


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

    @property
    def mean(self) -> float | None:
        """Of the last episodes, as many as there are; None before the first has ended."""
        # fsum is exact, so the answer is the same whatever order workers' episodes came in
        return math.fsum(self._recent) / len(self._recent) if self._recent else None

    def solved(self, target: float | None) -> bool:
        """Whether as many episodes as are looked at have ended, with a mean of at least target."""
        full = len(self._recent) == self._recent.maxlen
        return target is not None and full and self.mean is not None and self.mean >= target


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
    with open(beside, "w", encoding="utf-8") as file:
        file.write(to_json(record, indent=2) + "\n")
        _to_disk(file)
    os.replace(beside, path)
    folder = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(folder)  # the rename itself
    finally:
        os.close(folder)


def _to_disk(file: Any) -> None:
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

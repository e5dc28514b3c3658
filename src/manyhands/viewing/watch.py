"""`manyhands watch`: a page about runs while they go on, served to this machine alone.

What keeps others out: it listens on the loopback address; every path begins with a token that only
the printed address has; a request whose Host is not ours is refused, so that no page of the web can
reach it under a name of its own (DNS rebinding). There is a fixed list of things to ask for, none
of them a path of the file system, and nothing can be changed. The page loads only what is here.
"""

from __future__ import annotations

import hmac
import json
import math
import os
import secrets
import threading
import time
import webbrowser
from collections import deque
from collections.abc import Sequence
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from importlib import resources
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

from manyhands import files
from manyhands.errors import ConfigError
from manyhands.experiment.folder import short_env
from manyhands.viewing.runs import is_number, read_config, runs_in

HOST = "127.0.0.1"
_FILES = {
    "": ("watch.html", "text/html; charset=utf-8"),
    "watch.js": ("watch.js", "text/javascript; charset=utf-8"),
    "watch.css": ("watch.css", "text/css; charset=utf-8"),
}
_HEADERS = {
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; "
    "connect-src 'self'; img-src data:; base-uri 'none'; form-action 'none'; "
    "frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    "Referrer-Policy": "no-referrer",  # the address has the token in it
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cache-Control": "no-store",
}
_SECONDS = 20.0  # for a client to say what it wants, and to take it


class Watcher:
    """The server; `url` is where the page is."""

    def __init__(self, dirs: Sequence[str | os.PathLike[str]], port: int = 0) -> None:
        self.runs = [Followed(path) for path in runs_in(dirs)]
        self.token = secrets.token_urlsafe(24)
        handler = type("Handler", (_Handler,), {"watcher": self})
        try:
            self._server = ThreadingHTTPServer((HOST, port), handler)
        except OSError as error:
            raise ConfigError(
                f"--port {port}: {error.strerror}; give another, or leave it out for a free one"
            ) from error
        self._server.daemon_threads = True
        self.port = int(self._server.server_address[1])
        self.url = f"http://{HOST}:{self.port}/{self.token}/"

    def serve(self, *, browser: bool = True) -> None:
        """Until Ctrl-C."""
        if browser:
            # In a thread: some browsers return only when their window is closed.
            threading.Thread(target=webbrowser.open, args=(self.url,), daemon=True).start()
        try:
            self._server.serve_forever(poll_interval=0.2)
        except KeyboardInterrupt:
            pass
        finally:
            self._server.server_close()

    def news(self, query: str) -> dict[str, object]:
        """`at=GENERATION,ROWS,EVENTS;...`: what the page has of each run; nothing at first."""
        text = parse_qs(query).get("at", [""])[0]
        seen = [tuple(int(n) for n in part.split(",")) for part in text.split(";") if part]
        if seen and (len(seen) != len(self.runs) or any(len(one) != 3 for one in seen)):
            raise ValueError(text)
        if not seen:
            first = [{**run.about(), **run.news(-1, 0, 0)} for run in self.runs]
            return {"runs": first}
        pairs = zip(self.runs, seen, strict=True)
        return {"runs": [run.news(*one) for run, one in pairs]}


class _Handler(BaseHTTPRequestHandler):
    watcher: Watcher
    timeout = _SECONDS
    protocol_version = "HTTP/1.1"
    server_version, sys_version = "manyhands", ""

    def do_GET(self) -> None:
        address = urlsplit(self.path)
        token, _, name = address.path.removeprefix("/").partition("/")
        if self.headers.get("Host", "") not in self._hosts():
            self._answer(HTTPStatus.FORBIDDEN, b"this page is served under its own address only")
        elif not hmac.compare_digest(token.encode(), self.watcher.token.encode()):
            self._answer(HTTPStatus.FORBIDDEN, b"the address that was printed has a token in it")
        elif name in _FILES:
            file, kind = _FILES[name]
            data = resources.files("manyhands.viewing").joinpath("page", file).read_bytes()
            self._answer(HTTPStatus.OK, data, kind)
        elif name == "news":
            try:
                found = self.watcher.news(address.query)
            except ValueError:
                self._answer(HTTPStatus.BAD_REQUEST, b"at=GENERATION,ROWS,EVENTS;... for each run")
                return
            self._answer(HTTPStatus.OK, json.dumps(found).encode(), "application/json")
        else:
            self._answer(HTTPStatus.NOT_FOUND, b"there is nothing here")

    def _hosts(self) -> tuple[str, ...]:
        return f"{HOST}:{self.watcher.port}", f"localhost:{self.watcher.port}"

    def _answer(self, code: HTTPStatus, data: bytes, kind: str = "text/plain") -> None:
        self.send_response(code)
        for name, value in _HEADERS.items():
            self.send_header(name, value)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, format: str, *args: object) -> None:
        """Nothing: the terminal belongs to whoever started us."""


# -- following a run ------------------------------------------------------------------------------

# A run of a week has a million records. Files are read from the byte where the last look ended, and
# a curve has at most a few hundred points: when it gets longer, neighbours are averaged, and from
# then on every point stands for twice as many records.
POINTS = 400  # at most twice as many are kept
EVENTS = 200
_BYTES = 2 << 20  # of a file in one look: a long run is caught up with in several
_LOOK_SECONDS = 0.4  # several pages may ask at the same time
_ALIVE_SECONDS = 6.0  # live.json is written once a second
_FORGET = ("not_finite",)


class Tail:
    """The lines that were added to a file since the last look."""

    def __init__(self, path: Path) -> None:
        self._path, self._offset, self._mark = path, 0, b""
        self.behind = False  # whether there is more than one look takes

    def read(self) -> tuple[bool, list[bytes]]:
        """(whether the file was cut or replaced: what was read before no longer counts, lines)."""
        try:
            # NONBLOCK: a pipe in its place is no file to follow, and must not be waited for.
            with open(os.open(self._path, os.O_RDONLY | os.O_NONBLOCK), "rb") as file:
                again = not self._is_the_same(file)
                if again:
                    self._offset, self._mark = 0, b""
                file.seek(self._offset)
                data = file.read(_BYTES)
                self.behind = len(data) == _BYTES
        except OSError:
            again, data, self.behind = self._offset > 0, b"", False
            self._offset, self._mark = 0, b""
        whole = data[: data.rfind(b"\n") + 1]  # the last line may still be written
        self._offset += len(whole)
        self._mark = (self._mark + whole)[-64:]
        return again, whole.splitlines()

    def _is_the_same(self, file: Any) -> bool:
        """A resumed run cuts its files back and goes on, maybe beyond where we were."""
        file.seek(self._offset - len(self._mark))
        found: bytes = file.read(len(self._mark))
        return found == self._mark


class Series:
    """Columns of records, each row the mean of `stride` of them."""

    def __init__(self) -> None:
        self.generation = 0  # grows when points that were given out have changed
        self.clear()

    def clear(self) -> None:
        self.generation += 1
        self.stride, self.rows = 1, 0
        self.columns: dict[str, list[float | None]] = {}
        self._sums: dict[str, tuple[float, int]] = {}
        self._waiting = 0  # records in the row that is being filled

    def add(self, record: dict[str, Any]) -> None:
        for name, value in record.items():
            if is_number(value):
                total, count = self._sums.get(name, (0.0, 0))
                self._sums[name] = total + value, count + 1
        self._waiting += 1
        if self._waiting == self.stride:
            self._close_row()
        if self.rows == 2 * POINTS:
            self._halve()

    def _close_row(self) -> None:
        for name in [name for name in self._sums if name not in self.columns]:
            self.columns[name] = [None] * self.rows
            self.generation += self.rows > 0
        for name, column in self.columns.items():
            total, count = self._sums.get(name, (0.0, 0))
            column.append(_short(total / count) if count else None)
        self.rows += 1
        self._sums, self._waiting = {}, 0

    def _halve(self) -> None:
        for column in self.columns.values():
            pairs = zip(column[::2], column[1::2], strict=True)
            column[:] = [_mean([v for v in pair if v is not None]) for pair in pairs]
        self.rows, self.stride = self.rows // 2, 2 * self.stride
        self.generation += 1


def _mean(values: list[float]) -> float | None:
    return _short(sum(values) / len(values)) if values else None


def _short(value: float) -> float | None:
    """Six digits: more than a screen shows, in half the bytes."""
    return float(f"{value:.6g}") if math.isfinite(value) else None


class Followed:
    """One run, as far as it has been read."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)
        self.experiment = read_config(self.path)
        self._lock = threading.Lock()
        self._metrics = Tail(self.path / "metrics.jsonl")
        self._event_lines = Tail(self.path / "events.jsonl")
        self._series = Series()
        self._latest: dict[str, Any] = {}
        self._events: deque[dict[str, Any]] = deque(maxlen=EVENTS)
        self._event_count = 0
        self._summary: dict[str, Any] | None = None
        self._live: dict[str, Any] | None = None
        self._looked = -math.inf

    def about(self) -> dict[str, Any]:
        """What does not change while a run goes on."""
        run = self.experiment.run
        return {
            "path": str(self.path),
            "name": f"{self.experiment.spec.name.upper()} on {short_env(run.env)}",
            "strategy": self.experiment.strategy,
            "engine": run.engine,
            "workers": run.workers,
            "seed": run.seed,
            "steps": run.steps,
            "target": run.target_return,
        }

    def news(self, generation: int, rows: int, events: int) -> dict[str, Any]:
        """What a page has not seen, which has so many rows of that generation, and events."""
        with self._lock:
            self._look()
            series = self._series
            first = rows if generation == series.generation and rows <= series.rows else 0
            new = min(self._event_count - events, len(self._events))
            if events > self._event_count:  # the file was cut back
                new = len(self._events)
            return {
                "generation": series.generation,
                "first": first,
                "rows": series.rows,
                "columns": {name: column[first:] for name, column in series.columns.items()},
                "latest": self._latest,
                "events": list(self._events)[len(self._events) - new :] if new else [],
                "event_count": self._event_count,
                "state": self._state(),
                "exit": self._summary["exit"] if self._summary else "",
                "live": self._live,
                "more": self._metrics.behind,
            }

    def _look(self) -> None:
        now = time.monotonic()
        if now - self._looked < _LOOK_SECONDS and not self._metrics.behind:
            return
        self._looked = now
        again, lines = self._metrics.read()
        if again:
            self._series.clear()
            self._latest = {}
        for record in map(_record, lines):
            if record:
                self._latest = {k: v for k, v in record.items() if k not in _FORGET}
                self._series.add(record)
        again, lines = self._event_lines.read()
        if again:
            self._events.clear()
            self._event_count = 0
        for event in map(_record, lines):
            if event:
                self._events.append(event)
                self._event_count += 1
        self._summary = _file(self.path / "summary.json")
        self._live = _file(self.path / "live.json")

    def _state(self) -> str:
        """running, silent (no sign for a while: stuck or killed), or ended."""
        if self._summary is not None and "exit" in self._summary:
            return "ended"
        seen: list[float] = []
        if self._live and is_number(self._live.get("time")):
            seen = [self._live["time"]]
        for name in ("metrics.jsonl", "events.jsonl"):
            try:
                seen.append((self.path / name).stat().st_mtime)
            except OSError:
                continue
        return "running" if seen and time.time() - max(seen) < _ALIVE_SECONDS else "silent"


def _record(line: bytes) -> dict[str, Any]:
    try:
        found = json.loads(line)
    except (ValueError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}


def _file(path: Path) -> dict[str, Any] | None:
    """A small file that is replaced as a whole; None where there is none."""
    try:
        return _record(files.read(path, _BYTES)) or None
    except files.Unreadable:
        return None

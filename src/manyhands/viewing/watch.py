"""`manyhands watch`: a page about runs while they go on, served to this machine alone.

What keeps others out: it listens on the loopback address; every path begins with a token that only
the printed address has; a request whose Host is not ours is refused, so that no page of the web can
reach it under a name of its own (DNS rebinding). There is a fixed list of things to ask for, none
of them a path of the file system, and nothing can be changed. The page loads only what is here.
"""

from __future__ import annotations

import hmac
import json
import os
import secrets
import threading
import webbrowser
from collections.abc import Sequence
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from importlib import resources
from urllib.parse import parse_qs, urlsplit

from manyhands.errors import ConfigError
from manyhands.viewing.follow import Followed

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
        self.runs = [Followed(path) for path in dirs]
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

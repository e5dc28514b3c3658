"""Ray itself, for the length of one run: started here and taken down again, or joined."""

from __future__ import annotations

import contextlib
import glob
import os
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator, Mapping
from types import FrameType, TracebackType
from typing import Any

import psutil

from manyhands.errors import ConfigError, SupportError, needs

_REACH_SECONDS = 8  # an address that does not answer: Ray itself would try for ten minutes
_LOOK_SECONDS = 60.0  # at a cluster that does: a busy machine takes its time to import Ray
_STORE_BYTES = 512 << 20
_QUIET = {
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_DEDUP_LOGS": "0",
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",  # else Ray hides all GPUs from our actors
    "RAY_DISABLE_IMPORT_WARNING": "1",
}
# WHY: on Linux Ray replaces 127.0.0.1 by the machine's public address and listens on all of them,
# unless told (by this name, on any system) that there will be no cluster.
_LOOPBACK = {"RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0"}
# The first question is whether it lets us in: `ray.init` would ask until its own time is over.
_PROBE = """
import os, signal, sys, ray
from ray._private.services import canonicalize_bootstrap_address_or_die as found
from ray._raylet import GcsClient
signal.alarm(int(sys.argv[2]))
GcsClient(address=found(sys.argv[1])).internal_kv_keys(b"-", b"", timeout=5)
signal.alarm(0)
ray.init(address=sys.argv[1], logging_level="critical", log_to_driver=False)
print("CPUS", ray.cluster_resources().get("CPU", 0), flush=True)
os._exit(0)
"""


class Session:
    """`with Session(...)`: Ray is up inside. `private`: ours alone; `output`: see `_hand_out`."""

    def __init__(self, workers: int, cpus: float, address: str, env: dict[str, str],
                 folder: str = "") -> None:  # fmt: skip
        address = address or os.environ.get("RAY_ADDRESS", "")  # Ray itself would go there, too
        address = "" if address == "local" else address
        # Before the import: Ray reads some of them there. They are taken back in the end: what this
        # process starts later, a cluster perhaps, would read them, too.
        ours = _QUIET if address else _QUIET | _LOOPBACK
        self._set = ours.keys() - os.environ.keys()
        os.environ.update({name: ours[name] for name in self._set})
        try:
            import ray
        except ImportError as fault:
            raise needs("ray", "ray", fault) from None
        self._ray, self._address, self._env = ray, address, env
        self._workers, self._cpus = workers, cpus
        self._ours = not ray.is_initialized()
        self.private = self._ours and not address
        # The folder of the user's script, which Ray brings to all nodes; "" where it does not.
        self.travels = folder if self._ours and address and _may_travel(folder) else ""
        self.output = ""
        self._folder = ""
        self._handlers: dict[int, Any] = {}
        self._door: socket.socket | None = None
        self._watchdog: subprocess.Popen[bytes] | None = None
        self._signal = 0
        self._access: dict[str, str | None] | None = None  # as it was before this session

    def __enter__(self) -> Session:
        self._breakpoint = os.environ.get("PYTHONBREAKPOINT")
        if threading.current_thread() is threading.main_thread():
            self._handlers = {s: signal.getsignal(s) for s in (signal.SIGTERM, signal.SIGINT)}
        try:
            if self.private:
                self._start()
            elif self._ours:
                _check_size(self._workers, self._cpus, self._probe(), self._address)
                along = {"working_dir": self.travels, "excludes": _STAYS} if self.travels else {}
                self._ray.init(
                    address=self._address, logging_level="error", log_to_driver=True,
                    runtime_env=along,
                )  # fmt: skip
            else:
                have = self._ray.cluster_resources().get("CPU", 0)
                _check_size(self._workers, self._cpus, have, "this process's Ray")
            self._answer_signals()
        except BaseException:
            self._stop()
            raise
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None,
                 where: TracebackType | None) -> None:  # fmt: skip
        self._stop()
        # Ray points breakpoint() at a debugger of its own, for good; the user's pdb comes back.
        if self._breakpoint is None:
            os.environ.pop("PYTHONBREAKPOINT", None)
        else:
            os.environ["PYTHONBREAKPOINT"] = self._breakpoint
        if self._signal:  # WHY again: passing through Ray's own code it becomes SystemExit(1)
            raise SystemExit(128 + self._signal) from None

    # -- starting --------------------------------------------------------------------------------

    def _start(self) -> None:
        _sweep()
        base = tempfile.gettempdir()
        # WHY: the path of a unix socket may have 107 characters and Ray needs 70 of them.
        base = base if len(base) <= 20 or not os.path.isdir("/tmp") else "/tmp"
        self._folder = tempfile.mkdtemp(prefix=f"mh-ray-{os.getpid()}-", dir=base)
        # Ray would make one token for all sessions, in the user's home, which may be read-only; and
        # two that start at once would make two. This one is for this session alone.
        if not os.environ.keys() & _ACCESS:
            token = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": secrets.token_hex(32)}
            self._access = _set_access(token)
        local = {**self._env, "MANYHANDS_LOCAL_SIZE": str(self._workers)}
        with _environment(local):  # what the actors' processes begin with
            try:
                self._ray.init(
                    num_cpus=max(int(self._workers * self._cpus + 0.999), os.cpu_count() or 1),
                    object_store_memory=_store_bytes(),
                    include_dashboard=False,
                    log_to_driver=False,  # the actors write to our own output, see `_hand_out`
                    logging_level="error",
                    _node_ip_address="127.0.0.1",
                    _temp_dir=self._folder,
                )
            except Exception as fault:  # on a machine that is too busy it waits 30 s for itself
                _end_those_of(self._folder)
                said = str(fault).split("\n")[0]
                raise SupportError(f"Ray has not started on this machine: {said}") from fault
        self._watchdog = _watch_over(self._folder)
        self.output = os.path.join(self._folder, "output")
        self._door = socket.socket(socket.AF_UNIX)
        self._door.bind(self.output)
        self._door.listen(self._workers)
        threading.Thread(target=self._hand_out, args=(self._door,), daemon=True).start()

    def _hand_out(self, door: socket.socket) -> None:
        """Give each actor our own standard output and error; the folder lets nobody else in."""
        with contextlib.suppress(OSError):  # closed: the run is over
            while True:
                line, _ = door.accept()
                with line:
                    socket.send_fds(line, [b"."], [1, 2])

    def _probe(self) -> float:
        """CPUs of the cluster. A token is shown where one is asked for, and only there: the driver
        of a cluster without would refuse the cluster's own calls."""
        said, errors = self._asked()
        if "AuthToken" in errors and "RAY_AUTH_MODE" not in os.environ and _token_place():
            self._access = _set_access({"RAY_AUTH_MODE": "token"})
            said, errors = self._asked()
        if "AuthToken" in errors:
            raise ConfigError(
                f"the Ray cluster at {self._address} asks for a token and refuses ours "
                f"({_token_place() or 'there is none here'}); copy {_TOKEN} from the machine "
                "on which the cluster was started, or set RAY_AUTH_TOKEN_PATH"
            )
        found = [line.split()[1] for line in said.splitlines() if line.startswith("CPUS ")]
        if not found:
            last = errors.strip().rsplit("\n", 1)[-1]
            raise ConfigError(f"no Ray cluster answers at {self._address} ({last})")
        return float(found[0])

    def _asked(self) -> tuple[str, str]:
        """What a process that can be given up says of the cluster, and its errors."""
        address = self._address
        if address.startswith("ray://"):
            raise ConfigError(f"--address {address}: give the cluster's own address, host:6379")
        host, _, port = address.rpartition(":")
        try:
            if host and port.isdigit():
                socket.create_connection((host, int(port)), 3.0).close()
            answer = subprocess.run(
                [sys.executable, "-c", _PROBE, address, str(_REACH_SECONDS)], capture_output=True,
                text=True, timeout=_LOOK_SECONDS,
            )  # fmt: skip
        except OSError as error:
            raise ConfigError(f"no Ray cluster answers at {address} ({error})") from None
        except subprocess.TimeoutExpired as late:
            raise ConfigError(
                f"no Ray cluster answers at {address} (waited {late.timeout:g} s)"
            ) from None
        if answer.returncode == -signal.SIGALRM:
            raise ConfigError(f"no Ray cluster answers at {address} (waited {_REACH_SECONDS} s)")
        return answer.stdout, answer.stderr

    def _answer_signals(self) -> None:
        """Ctrl-C and SIGTERM unwind the stack, so that everything is taken down."""
        for number, previous in self._handlers.items():
            signal.signal(number, self._leave if previous is signal.SIG_DFL else previous)

    def _leave(self, number: int, frame: FrameType | None) -> None:
        self._signal = number
        raise SystemExit(128 + number)

    # -- stopping --------------------------------------------------------------------------------

    def _stop(self) -> None:
        for number in self._handlers:
            signal.signal(number, signal.SIG_IGN)  # a second Ctrl-C must not leave half of it
        try:
            if self._door is not None:
                # WHY shutdown: close() alone leaves the thread in accept(), and all that it holds.
                with contextlib.suppress(OSError):  # where it listens to nobody, or off Linux
                    self._door.shutdown(socket.SHUT_RDWR)
                self._door.close()
            if self._ours:
                self._ray.shutdown()
            if self._watchdog is not None:
                self._watchdog.kill()
                self._watchdog.communicate()
            if self._folder:
                shutil.rmtree(self._folder, ignore_errors=True)
            if self._access is not None:
                _set_access(self._access)
        finally:
            for name in self._set:
                os.environ.pop(name, None)
            for number, previous in self._handlers.items():
                signal.signal(number, previous)


_TOKEN = "~/.ray/auth_token"
_ACCESS = {"RAY_AUTH_MODE", "RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH"}
_STAYS = [".git/", ".venv/", "venv/", "runs/", "node_modules/", "__pycache__/", "*.pyc"]
_MOST_BYTES = 50 << 20  # of a folder that is brought to all nodes


def _token_place() -> str:
    """Where the token is by which Ray lets somebody in; "" where there is none."""
    if os.environ.get("RAY_AUTH_TOKEN"):
        return "RAY_AUTH_TOKEN"
    path = os.environ.get("RAY_AUTH_TOKEN_PATH") or os.path.expanduser(_TOKEN)
    return path if os.path.isfile(path) else ""


def _set_access(values: Mapping[str, str | None]) -> dict[str, str | None]:
    """Whether Ray shows and asks for a token from now on, and which; what it was before."""
    before = {name: os.environ.get(name) for name in values}
    for name, value in values.items():
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value
    # It has read the variables already. In this order: a thread of a session that is ending may
    # look for its token still.
    with contextlib.suppress(ImportError):
        from ray._raylet import (  # type: ignore[attr-defined]
            AuthenticationTokenLoader,
            Config,
        )

        Config.initialize("")
        AuthenticationTokenLoader.instance().reset_cache()
    return before


def _may_travel(folder: str) -> bool:
    """Whether a folder is small enough to be sent to all nodes."""
    total, stays = 0, {name.rstrip("/") for name in _STAYS}
    for where, folders, files in os.walk(folder) if folder else ():
        folders[:] = [name for name in folders if name not in stays]
        for name in files:
            with contextlib.suppress(OSError):
                total += os.path.getsize(os.path.join(where, name))
        if total > _MOST_BYTES:
            print(
                f"manyhands: {folder} holds more than {_MOST_BYTES >> 20} MB, and is not sent to "
                "the nodes: the script and its modules must be there, at the same path",
                file=sys.stderr,
            )
            return False
    return bool(folder)


def _check_size(workers: int, cpus: float, have: float, where: str) -> None:
    if workers * cpus > have:
        raise ConfigError(
            f"{workers} workers x {cpus:g} CPU = {workers * cpus:g}, the cluster at {where} has "
            f"{have:g}; ask for fewer workers or add nodes"
        )


def _store_bytes() -> int:
    try:
        room = os.statvfs("/dev/shm")
    except OSError:
        return _STORE_BYTES
    return max(80 << 20, min(_STORE_BYTES, int(0.8 * room.f_bavail * room.f_frsize)))


def _watch_over(folder: str) -> subprocess.Popen[bytes]:
    """A shell that outlives a driver killed by SIGKILL and clears up behind it.

    WHY: Ray's reaper ends raylet, gcs and actors then, but the raylet's two agents stay on for half
    a minute and the folder for good. The shell waits for the end of a pipe only the driver holds.
    """
    script = (
        'read _; sleep 2; for p in "$@"; do grep -qa "ray::" /proc/$p/cmdline 2>/dev/null '
        '&& kill -9 $p; done; rm -rf "$0"'
    )
    ours = [child.pid for child in psutil.Process().children(recursive=True)]
    return subprocess.Popen(
        ["sh", "-c", script, folder, *map(str, ours)],
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )


def _end_those_of(folder: str) -> None:
    """What a Ray that has not come up has started already: its own shutdown knows nothing of it."""
    found = []
    for child in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.Error):
            if any(folder in word for word in child.cmdline()):
                child.kill()
                found.append(child)
    psutil.wait_procs(found, timeout=5.0)


def _sweep() -> None:
    """Remove the folders of drivers that were killed and could not do it themselves."""
    for base in {tempfile.gettempdir(), "/tmp"}:
        for folder in glob.glob(os.path.join(base, "mh-ray-*-*")):
            pid = os.path.basename(folder).split("-")[2]
            if pid.isdigit() and not psutil.pid_exists(int(pid)):
                shutil.rmtree(folder, ignore_errors=True)


@contextlib.contextmanager
def _environment(values: dict[str, str]) -> Iterator[None]:
    before = {name: os.environ.get(name) for name in values}
    os.environ.update(values)
    try:
        yield
    finally:
        for name, old in before.items():
            if old is None:
                del os.environ[name]
            else:
                os.environ[name] = old

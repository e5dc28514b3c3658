"""Three hosts on this machine: network namespaces with an address, a name and a hosts file each.

    login ── bridge ──┬── alpha 10.77.0.1
    10.77.0.254       ├── beta  10.77.0.2
                      └── gamma 10.77.0.3

Nothing of it has a name on this machine, and nothing of it is reached from here but through
`Host.start`: a namespace is there for as long as a process is in it. The first process of each
reads from a pipe that only we hold, so that all of it is gone with us, however we end. Files are
shared, as on a cluster. Needs root, or a kernel that lets users make namespaces.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import time
from collections.abc import Mapping
from pathlib import Path

from manyhands.engines.supervisor import die_with_us

NAMES = ("alpha", "beta", "gamma")
_HOLD = ["sh", "-c", 'echo ready; exec cat > "$0"', os.devnull]


class NotPermitted(Exception):
    """Why there can be no hosts here."""


class Host:
    """One namespace: commands run in it, its link can be cut, and it can die."""

    def __init__(self, name: str, address: str, holder: subprocess.Popen[str]) -> None:
        self.name, self.address, self._holder = name, address, holder
        self.pid = holder.pid
        self._net = os.readlink(f"/proc/{self.pid}/ns/net")

    def enter(self, command: list[str]) -> list[str]:
        """The command that runs another in here."""
        return [*_enter(self.pid), *command]

    def start(self, command: list[str], env: Mapping[str, str] | None = None,
              folder: Path | None = None) -> subprocess.Popen[str]:  # fmt: skip
        """Start a program; its output is one text."""
        return subprocess.Popen(
            self.enter(command), env=os.environ | (env or {}), stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT, text=True, start_new_session=True, cwd=folder,
            preexec_fn=die_with_us,
        )  # fmt: skip

    def call(self, *command: str) -> str:
        done = subprocess.run(self.enter(list(command)), capture_output=True, text=True, timeout=60)
        if done.returncode:
            raise RuntimeError(f"{self.name}: {' '.join(command)}: {done.stderr.strip()}")
        return done.stdout

    def processes(self) -> list[int]:
        """All that run in here, but for the one that holds the namespace."""
        found = []
        for entry in os.listdir("/proc"):
            with contextlib.suppress(OSError):
                if entry.isdigit() and os.readlink(f"/proc/{entry}/ns/net") == self._net:
                    found.append(int(entry))
        return [pid for pid in found if pid != self.pid]

    def kill_processes(self, seconds: float = 30.0) -> None:
        """SIGKILL to all, and to what they start meanwhile, until none is left."""
        deadline = time.monotonic() + seconds
        while left := [pid for pid in self.processes() if _runs(pid)]:
            for pid in left:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            assert time.monotonic() < deadline, f"{self.name}: {left} do not end"
            time.sleep(0.02)

    def close(self) -> None:
        self.kill_processes()
        self._holder.communicate()  # the end of its pipe is its end


class Cluster:
    """`with Cluster(folder) as hosts`: hosts.alpha is there inside, and gone after it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._stack = contextlib.ExitStack()
        self.hosts: dict[str, Host] = {}

    def __enter__(self) -> Cluster:
        if self.hosts:
            return self
        for tool in ("ip", "unshare", "nsenter"):
            if shutil.which(tool) is None:
                raise NotPermitted(f"no `{tool}` here; type: apt install iproute2 util-linux")
        try:
            self._make()
        except (RuntimeError, OSError, subprocess.SubprocessError) as error:
            self._stack.close()
            raise NotPermitted(f"network namespaces are not permitted here ({error})") from None
        return self

    def __exit__(self, *exc: object) -> None:
        self._stack.close()

    def __getattr__(self, name: str) -> Host:
        try:
            return self.__dict__["hosts"][name]  # type: ignore[no-any-return]
        except KeyError:
            raise AttributeError(name) from None

    @property
    def three(self) -> list[Host]:
        return [self.hosts[name] for name in NAMES]

    def _make(self) -> None:
        addresses = {name: f"10.77.0.{i + 1}" for i, name in enumerate(NAMES)}
        addresses["login"] = "10.77.0.254"
        lines = ["127.0.0.1 localhost", *(f"{ip} {name}" for name, ip in addresses.items())]
        self.names = self.folder / "hosts"
        self.names.write_text("\n".join(lines) + "\n")
        user = ["-Ur"] if os.getuid() else []
        login = self._hold("login", addresses["login"], ["unshare", *user, "-nmu"])
        login.call("ip", "link", "set", "lo", "up")
        login.call("ip", "link", "add", "bridge", "type", "bridge")
        login.call("ip", "addr", "add", f"{login.address}/24", "dev", "bridge")
        login.call("ip", "link", "set", "bridge", "up")
        self._begin(login, self.names)
        for name in NAMES:
            self.add(name, addresses[name])
        self.rsh = self._shell()

    def add(self, name: str, address: str, names: Path | None = None) -> Host:
        """Another host; `names` is its hosts file, where it differs from that of the others."""
        login = self.hosts["login"]
        host = self._hold(name, address, [*_enter(login.pid), "unshare", "-nmu"])
        veth = ["type", "veth", "peer", "name", "eth0", "netns", str(host.pid)]
        login.call("ip", "link", "add", f"to-{name}", *veth)
        login.call("ip", "link", "set", f"to-{name}", "master", "bridge", "up")
        host.call("ip", "addr", "add", f"{address}/24", "dev", "eth0")
        host.call("ip", "link", "set", "lo", "up")
        host.call("ip", "link", "set", "eth0", "up")
        self._begin(host, names or self.names)
        return host

    def _begin(self, host: Host, names: Path) -> None:
        host.call("hostname", host.name)
        host.call("mount", "--bind", str(names), "/etc/hosts")

    def _hold(self, name: str, address: str, command: list[str]) -> Host:
        # Without the mark of what tests start: it is there for all of them.
        env = {k: v for k, v in os.environ.items() if k != "MANYHANDS_TEST"}
        holder = subprocess.Popen(
            [*command, *_HOLD], env=env, stdin=subprocess.PIPE, stdout=subprocess.PIPE,
            stderr=subprocess.PIPE, text=True, start_new_session=True,
        )  # fmt: skip
        assert holder.stdout is not None
        if not holder.stdout.readline():
            raise RuntimeError(holder.communicate()[1].strip() or f"exit code {holder.wait()}")
        host = self.hosts[name] = Host(name, address, holder)
        self._stack.callback(host.close)
        return host

    def remove(self, host: Host) -> None:
        """The host's death: nothing passes its link any more, and then nothing runs in it."""
        self.cut(host)
        host.kill_processes()

    def cut(self, host: Host) -> None:
        self.hosts["login"].call("ip", "link", "set", f"to-{host.name}", "down")

    def mend(self, host: Host) -> None:
        self.hosts["login"].call("ip", "link", "set", f"to-{host.name}", "up")

    def _shell(self) -> Path:
        """What mpiexec takes for ssh: `rsh [options] HOST COMMAND ...`."""
        path = self.folder / "rsh"
        cases = "\n".join(f"{h.name}) pid={h.pid};;" for h in self.three)
        path.write_text(
            "#!/bin/sh\nwhile [ \"${1#-}\" != \"$1\" ]; do shift; done\n"
            f"case $1 in\n{cases}\nesac\nshift\n"
            "exec nsenter -t $pid -n -m -u -- sh -c \"$*\"\n"
        )  # fmt: skip
        path.chmod(0o755)
        return path


def _enter(pid: int | str) -> list[str]:
    user = ["-U", "--preserve-credentials"] if os.getuid() else []
    return ["nsenter", "-t", str(pid), *user, "-n", "-m", "-u", "--"]


def _runs(pid: int) -> bool:
    with contextlib.suppress(OSError, IndexError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    return False


def ended(process: subprocess.Popen[str], seconds: float = 120.0) -> tuple[int, str]:
    """(exit code, all that was printed) of a program, which is ended where it does not."""
    try:
        said = process.communicate(timeout=seconds)[0]
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        raise AssertionError(f"still running: {process.communicate()[0]}") from None
    return process.returncode, said

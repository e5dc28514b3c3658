"""Where the output of a training goes, and what happens when nobody takes it: the run goes on."""

from __future__ import annotations

import fcntl
import json
import os
import select
import signal
import struct
import subprocess
import sys
import termios
import time
from pathlib import Path

import pytest
from screen import seen

pytestmark = [pytest.mark.usefixtures("nothing_left")]

TESTS = str(Path(__file__).parents[1])  # where the environment `talkative` is found
SECONDS = 150.0  # for what takes five on a quiet machine
TALKATIVE = "training_output:talkative"  # an environment that prints
UPDATES = 12  # enough for a line of each process of a talkative environment
LONG = 30  # enough to be looked at


def command(
    folder: Path, *words: str, workers: int = 2, env: str = "CartPole-v1", updates: int = UPDATES
) -> list[str]:
    sizes = ["--num-envs", "4", "--rollout-length", "64", "--minibatch", "64", "--epochs", "2"]
    where = ["--workers", str(workers), "--engine", "local" if workers > 1 else "inline"]
    steps = ["--steps", str(updates * 256), "--run-dir", str(folder)]
    train = ["-m", "manyhands.cli.main", "train", "ppo", "--env", env]
    return [sys.executable, *train, *where, *sizes, *steps, *words]


def variables(**more: str) -> dict[str, str]:
    """The variables of a person at a terminal, whatever this test is run by."""
    env = {k: v for k, v in os.environ.items() if k not in ("NO_COLOR", "COLUMNS", "LINES")}
    return env | {"PYTHONPATH": TESTS, "TERM": "xterm-256color"} | more


def check_folder(folder: Path, updates: int = UPDATES) -> None:
    """The run went to its end, and its folder is whole."""
    summary = json.loads((folder / "summary.json").read_text())
    assert summary["exit"] == "finished"
    assert summary["updates"] == updates
    records = (folder / "metrics.jsonl").read_text().splitlines()
    assert len(records) == updates
    assert (folder / "policy.safetensors").exists()


# -- a reader that goes away -----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("workers", "env"),
    [pytest.param(1, "CartPole-v1", marks=pytest.mark.slow), (2, TALKATIVE)],
)
def test_a_reader_that_has_seen_enough(workers: int, env: str, tmp_path: Path) -> None:
    """`manyhands train ... | head -1`."""
    child = subprocess.Popen(
        command(tmp_path / "run", workers=workers, env=env),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=variables(),
    )
    assert child.stdout is not None
    assert child.stderr is not None
    assert child.stdout.readline().startswith("training ")
    child.stdout.close()
    said = child.stderr.read()
    child.stderr.close()
    assert child.wait(SECONDS) == 0
    assert said == ""
    check_folder(tmp_path / "run")


def test_nobody_reads_the_errors_either(tmp_path: Path) -> None:
    child = subprocess.Popen(
        command(tmp_path / "run", env=TALKATIVE),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env=variables(),
    )
    assert child.stdout is not None
    assert child.stderr is not None
    child.stderr.close()
    child.stdout.readline()
    child.stdout.close()
    assert child.wait(SECONDS) == 0
    check_folder(tmp_path / "run")


@pytest.mark.parametrize("workers", [pytest.param(1, marks=pytest.mark.slow), 2])
def test_no_output_at_all(workers: int, tmp_path: Path) -> None:
    """Started by something that has closed both: `manyhands train ... >&- 2>&-`."""
    shell = ["sh", "-c", 'exec "$0" "$@" >&- 2>&-']
    words = command(tmp_path / "run", workers=workers, env=TALKATIVE)
    done = subprocess.run([*shell, *words], env=variables(), timeout=SECONDS)
    assert done.returncode == 0
    check_folder(tmp_path / "run")


def test_a_full_device(tmp_path: Path) -> None:
    with open("/dev/full", "w") as full:
        done = subprocess.run(
            command(tmp_path / "run"), stdout=full, stderr=full, env=variables(), timeout=SECONDS
        )
    assert done.returncode == 0
    check_folder(tmp_path / "run")


# -- a bare surrounding ----------------------------------------------------------------------------


def test_with_hardly_any_variables(tmp_path: Path) -> None:
    """As cron and systemd start things: no TERM, no locale, no display."""
    bare = {name: os.environ[name] for name in ("PATH", "HOME", "MANYHANDS_TEST")}
    done = subprocess.run(
        command(tmp_path / "run"),
        capture_output=True,
        stdin=subprocess.DEVNULL,
        text=True,
        env=bare,
        timeout=SECONDS,
    )
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    assert "\x1b" not in done.stdout
    assert done.stdout.startswith("training ")
    assert "\nend " in done.stdout
    check_folder(tmp_path / "run")


# -- a terminal ------------------------------------------------------------------------------------


def in_terminal(words: list[str], env: dict[str, str], columns: int = 100) -> tuple[int, str]:
    """Run a command in a terminal of its own: (exit code, everything that reached it)."""
    ours, theirs = os.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 40, columns, 0, 0))
    child = subprocess.Popen(
        words, stdin=theirs, stdout=theirs, stderr=theirs, env=env, start_new_session=True
    )
    os.close(theirs)
    said, deadline = b"", time.monotonic() + SECONDS
    try:
        while time.monotonic() < deadline:
            if select.select([ours], [], [], 0.1)[0]:
                try:
                    said += os.read(ours, 65536)
                except OSError:  # the last process on the other side has gone
                    break
        return child.wait(5), said.decode()
    finally:
        os.close(ours)
        if child.poll() is None:
            os.killpg(child.pid, signal.SIGKILL)
            child.wait()


@pytest.mark.parametrize("columns", [60, pytest.param(200, marks=pytest.mark.slow)])
def test_a_terminal_is_left_tidy(columns: int, tmp_path: Path) -> None:
    """The view was there, is gone, and all that was printed meanwhile is still there, whole."""
    words = command(tmp_path / "run", env=TALKATIVE, updates=LONG)
    code, said = in_terminal(words, variables(), columns)
    assert code == 0, said
    check_folder(tmp_path / "run", LONG)
    assert "\x1b[?25l" not in said  # the cursor is never hidden: a killed run could not show it
    lines = seen(said)
    assert lines[0].startswith("training ")
    assert "of 7,680   " in said  # the view
    assert not [line for line in lines if line.startswith(("steps ", "workers  2 of"))]
    bars = [line for line in lines if line.startswith("━")]
    assert len(bars) == 1
    assert "100%  7,680 steps" in bars[0]
    after = lines[lines.index(bars[0]) + 1 :]
    assert after[0].startswith("end ")
    printed = [line for line in lines if "said at step" in line]
    # 7,680 steps of 4 environments in 2 processes, a line every 1000 steps of a process
    assert sorted(printed) == sorted(
        [f"{who}said at step {n}" for n in (1000, 2000, 3000) for who in ("", "[worker 1] ")]
    )


def test_a_terminal_without_colours_gets_lines(tmp_path: Path) -> None:
    words = command(tmp_path / "run", workers=1)
    code, said = in_terminal(words, variables(NO_COLOR="1"))
    assert code == 0, said
    assert "\x1b" not in said
    assert "\nend " in said.replace("\r\n", "\n")
    check_folder(tmp_path / "run")


def test_a_failure_is_read_below_the_view_not_across_it(tmp_path: Path) -> None:
    words = command(tmp_path / "run", "--env-kwargs", "fail_at=1500", env=TALKATIVE, updates=LONG)
    code, said = in_terminal(words, variables())
    assert code == 1, said
    lines = seen(said)
    fault = next(i for i, line in enumerate(lines) if line.startswith("manyhands: worker "))
    assert "failed:" in lines[fault]
    assert lines[fault + 1] == "Traceback (most recent call last):"
    assert any(line == "RuntimeError: failed as asked" for line in lines[fault:])
    assert not [line for line in lines[fault:] if "━" in line or "─" in line]

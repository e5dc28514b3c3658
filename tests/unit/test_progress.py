"""What a person sees of a run while it goes on: in a terminal, a notebook, a file."""

from __future__ import annotations

import io
import re
import subprocess
import sys
from typing import Any

import pytest
from screen import Screen, seen

from manyhands.experiment import progress as module
from manyhands.experiment.bottleneck import Phases
from manyhands.experiment.progress import Progress, duration
from manyhands.terminal import can_draw

INFO = {
    "policy_loss": -0.0123,
    "value_loss": 43.2,
    "entropy": 0.523,
    "kl": 0.0062,
    "clip_fraction": 0.11,
    "lag": 1.5,
}
PHASES = {"rollout": 3.0, "synchronisation": 6.0, "starting": 1.0}


class Clock:
    """Time that passes when it is told to."""

    now = 100.0

    def perf_counter(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(module, "time", clock)
    return clock


@pytest.fixture(autouse=True)
def terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("NO_COLOR", "JPY_PARENT_PID", "MANYHANDS_NOTEBOOK", "FORCE_COLOR"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.setenv("COLUMNS", "100")
    monkeypatch.setenv("LINES", "30")


def drawn(progress: Progress, steps: int = 250, **more: Any) -> None:
    progress.update(steps, 12.345, info=INFO, phases=PHASES, **more)


# -- in a terminal ---------------------------------------------------------------------------------


@pytest.mark.parametrize("columns", [60, 100, 200])
def test_the_view_fits_its_terminal(columns: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", str(columns))
    screen = Screen()
    progress = Progress(1000, stream=screen, interval=0, target=475, workers=2)
    progress.say("the start")
    drawn(progress, alive=2)
    lines = screen.lines()
    assert lines[:2] == ["the start", ""]
    assert len(lines) == 8
    assert all(len(line) < columns for line in lines)
    assert len(lines[2]) == columns - 1  # the bar takes what there is
    assert " 25%  " in lines[2]
    assert lines[3].startswith("steps    250 of 1,000   ")
    assert lines[4] == "return   12.35   target 475   best 12.35"
    assert lines[5].startswith("update   policy loss -0.0123   value loss 43.2   ")
    assert lines[6].startswith("time     synchronisation 60%   rollout 30%")
    assert lines[7] == "workers  2 of 2 at work   lag 1.5"
    assert ("clip fraction 0.11" in lines[5]) == (columns >= 100)


def test_the_view_is_drawn_in_its_place() -> None:
    screen = Screen()
    progress = Progress(1000, stream=screen, interval=0)
    progress.say("the start")
    for steps in range(0, 1001, 10):
        drawn(progress, steps)
    lines = screen.lines()
    assert lines[0] == "the start"
    assert len([line for line in lines if line.startswith("steps ")]) == 1
    assert "1,000 of 1,000" in screen.getvalue()
    progress.close()
    progress.say("the end")
    assert screen.lines()[0] == "the start"
    # Seconds by the wall clock: more than none where others are at work.
    assert re.search(r"100%  1,000 steps  return 12\.35  \d+s$", screen.lines()[1])
    assert screen.lines()[2:] == ["the end", ""]


def test_each_drawing_is_one_write() -> None:
    """A terminal that gets a view in pieces shows them: it flickers."""
    writes = []

    class Counting(Screen):
        def write(self, text: str) -> int:
            writes.append(text)
            return super().write(text)

    progress = Progress(1000, stream=Counting(), interval=0)
    drawn(progress)
    drawn(progress)
    assert len(writes) == 2


def test_what_is_said_appears_above_the_view() -> None:
    screen = Screen()
    progress = Progress(1000, stream=screen, interval=0)
    drawn(progress)
    progress.say("a checkpoint was written")
    lines = screen.lines()
    assert lines[:2] == ["a checkpoint was written", ""]
    assert lines[3].startswith("steps    250 of 1,000")


def test_what_the_program_prints_appears_above_the_view(monkeypatch: pytest.MonkeyPatch) -> None:
    screen = Screen()
    monkeypatch.setattr(sys, "stdout", screen)
    progress = Progress(1000, interval=0)
    drawn(progress)
    print("one\ntwo")
    print("half a line", end="", flush=True)
    drawn(progress, 500)
    lines = screen.lines()
    assert lines[:4] == ["one", "two", "half a line", ""]
    assert lines[5].startswith("steps    500 of 1,000")
    print("a line ", end="")
    print("in two parts")
    assert screen.lines()[3] == "a line in two parts"
    print("the rest", end="")
    progress.close()
    assert sys.stdout is screen
    print("after")
    assert screen.lines()[:5] == ["one", "two", "half a line", "a line in two parts", "the rest"]
    assert screen.lines()[6:] == ["after", ""]


def test_a_line_reaches_the_terminal_in_one_piece(monkeypatch: pytest.MonkeyPatch) -> None:
    """print() writes a line and its end separately; another process could get in between."""
    writes = []

    class Counting(Screen):
        def write(self, text: str) -> int:
            writes.append(text)
            return super().write(text)

    monkeypatch.setattr(sys, "stdout", Counting())
    progress = Progress(1000, interval=0)
    drawn(progress)
    print("hello", flush=True)
    progress.close()
    assert "hello\n" in writes


def test_a_print_of_the_users_own_does_not_end_the_run() -> None:
    """`| head -1`, and it is the environment that prints next."""
    code = (
        "import sys\n"
        "from manyhands.experiment.progress import Progress\n"
        "p = Progress(10)\n"
        "p.say('first')\n"
        "sys.stdin.read()\n"  # until the reader has gone
        "for i in range(3): print('hello', flush=True)\n"
        "p.close(); print('alive', file=sys.stderr)"
    )
    assert _after_the_reader_left(code) == "alive\n"


def test_what_another_process_prints_does_not_tear_the_view() -> None:
    screen = Screen()
    progress = Progress(1000, stream=screen, interval=0)
    progress.say("the start")
    drawn(progress)
    screen.write("[worker 1] hello\n")  # behind our back, into the same terminal
    drawn(progress, 500)
    screen.write("\x1b[J[worker 1] two\n\x1b[J[worker 1] three\n")  # as the launcher does
    drawn(progress, 750)
    lines = screen.lines()
    words = ["the start", "[worker 1] hello", "[worker 1] two", "[worker 1] three", ""]
    assert lines[:5] == words
    assert lines[6].startswith("steps    750 of 1,000")
    assert len(lines) == 11
    progress.close()
    assert screen.lines()[:4] == words[:4]
    assert len(screen.lines()) == 6


def test_a_low_terminal_gets_a_low_view(monkeypatch: pytest.MonkeyPatch) -> None:
    """A view higher than the screen would scroll at each drawing."""
    monkeypatch.setenv("LINES", "4")
    screen = Screen()
    progress = Progress(1000, stream=screen, interval=0)
    drawn(progress)
    drawn(progress)
    assert len(screen.lines()) == 3


def test_a_view_without_numbers() -> None:
    screen = Screen()
    progress = Progress(1000, stream=screen, interval=0)
    progress.update(0)
    lines = screen.lines()
    assert lines[1].endswith("0%  ? left")
    assert lines[2:] == ["steps    0 of 1,000   0 steps/s   0s so far",
                         "return   no episode has finished"]  # fmt: skip
    progress.close()


def test_workers_that_are_gone_are_seen() -> None:
    screen = Screen()
    progress = Progress(1000, stream=screen, interval=0, workers=4)
    drawn(progress, alive=3, restarts=2, note="waits for worker 2")
    assert screen.lines()[-1] == (
        "workers  3 of 4 at work   2 restarted   lag 1.5   waits for worker 2"
    )


def test_what_is_known_of_the_workers_stays() -> None:
    """An asynchronous run says it beside its updates; the lag of what it learns from is there."""
    screen = Screen()
    progress = Progress(1000, stream=screen, interval=0, workers=4)
    info = {"policy_loss": 0.5, "lag_min": 0.0, "lag_mean": 1.25, "lag_max": 4.0, "refused": 2.0}
    progress.update(10, info=info)
    assert screen.lines()[-2:] == [
        "update   policy loss 0.5   refused 2", "workers  4 of 4 at work   lag 1.25",
    ]  # fmt: skip
    progress.workers_are(3, 1)
    progress.update(20, info=info)
    assert screen.lines()[-1] == "workers  3 of 4 at work   1 restarted   lag 1.25"
    progress.workers_are(alive=4)
    progress.update(30)
    assert screen.lines()[-1] == "workers  4 of 4 at work   1 restarted"


def test_phases_are_asked_when_they_are_drawn() -> None:
    phases = Phases()
    phases.add("rollout", 1.0)
    phases.add("wait_for_actors", 3.0)
    screen = Screen()
    Progress(1000, stream=screen, interval=0).update(10, phases=phases)
    assert screen.lines()[-1] == "time     wait for actors 75%   rollout 25%"


def test_a_crowd_of_updates_is_drawn_five_times_a_second(clock: Clock) -> None:
    screen = Screen()
    progress = Progress(100_000, stream=screen)
    for step in range(10_000):  # ten seconds
        clock.now += 0.001
        drawn(progress, step)
    drawings = screen.getvalue().count("steps/s")
    assert 45 <= drawings <= 50


def test_a_slow_terminal_is_drawn_less_often(clock: Clock) -> None:
    class Slow(Screen):
        def flush(self) -> None:
            clock.now += 0.02  # a hundred times this between two drawings: 1 % of the time

    screen = Slow()
    progress = Progress(100_000, stream=screen)
    for step in range(10_000):
        clock.now += 0.001
        drawn(progress, step)
    assert 4 <= screen.getvalue().count("steps/s") <= 6


@pytest.mark.parametrize(("name", "value"), [("TERM", "dumb"), ("TERM", ""), ("NO_COLOR", "1")])
def test_plain_lines_for_who_wants_them(
    name: str, value: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(name, value)
    screen = Screen()
    assert not can_draw(screen)
    progress = Progress(1000, stream=screen, interval=0)
    drawn(progress)
    progress.close()
    assert "\x1b" not in screen.getvalue()
    assert "\r" not in screen.getvalue()
    assert screen.getvalue().startswith(" 25%  250 steps  ")


def test_a_terminal_without_these_letters() -> None:
    raw = io.BytesIO()

    class Ascii(io.TextIOWrapper):
        def isatty(self) -> bool:
            return True

    stream = Ascii(raw, encoding="ascii")
    progress = Progress(1000, stream=stream, interval=0)
    drawn(progress, 1000)
    progress.say("4 workers × 8 envs")
    progress.close()
    assert "4 workers ? 8 envs" in seen(raw.getvalue().decode())


# -- how fast, how long ----------------------------------------------------------------------------


def test_the_speed_is_that_of_late(clock: Clock) -> None:
    stream = io.StringIO()
    progress = Progress(100_000, stream=stream, interval=1)
    clock.now += 5  # starting: no part of the speed once there is something better
    for second in range(60):
        clock.now += 1
        speed = 100 if second < 30 else 1000
        steps = min(second, 30) * 100 + max(0, second - 30) * 1000
        progress.update(steps)
        if second in (20, 59):
            line = stream.getvalue().splitlines()[-1]
            assert f"  {speed:,} steps/s  " in line
            left = duration((100_000 - steps) / speed)
            assert line.endswith(f"  {left} left")


def test_what_was_done_before_a_resume_is_no_speed(clock: Clock) -> None:
    stream = io.StringIO()
    progress = Progress(100_000, stream=stream, interval=0)
    clock.now += 2
    progress.update(50_200, resumed_steps=50_000)
    assert stream.getvalue() == " 50%  50,200 steps  100 steps/s  return -  8m18s left\n"


def test_best_is_the_best_of_all_updates_not_of_those_drawn(clock: Clock) -> None:
    screen = Screen()
    progress = Progress(1000, stream=screen, interval=1)
    for mean in (1.0, 9.0, 3.0):
        progress.update(10, mean)
    clock.now += 2
    progress.update(10, 2.0)
    assert "return   2.00   best 9.00" in screen.lines()


# -- elsewhere -------------------------------------------------------------------------------------


def test_progress_in_a_file_is_lines() -> None:
    stream = io.StringIO()
    progress = Progress(1000, stream=stream, interval=0)
    progress.say("start")
    progress.update(250)
    progress.update(500, 12.25, "waits", info={"lag": 2.0}, restarts=1)
    progress.close()
    lines = stream.getvalue().splitlines()
    assert lines[0] == "start"
    assert lines[1].startswith(" 25%  250 steps  ")
    assert "return -" in lines[1]
    assert "  return 12.25  lag 2  1 restarted  waits  " in lines[2]
    assert len(lines) == 3
    assert "\x1b" not in stream.getvalue()


def test_a_file_gets_a_line_early_and_then_one_every_ten_seconds(clock: Clock) -> None:
    stream = io.StringIO()
    progress = Progress(100_000, stream=stream)
    at = []
    for _ in range(400):
        clock.now += 0.1
        before = len(stream.getvalue())
        progress.update(10)
        at += [round(clock.now - 100)] if len(stream.getvalue()) > before else []
    assert at == [2, 12, 22, 32]


def test_a_notebook_gets_one_line_that_is_written_over(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MANYHANDS_NOTEBOOK", "1")
    stream = io.StringIO()
    progress = Progress(100_000, stream=stream, interval=0)
    progress.say("start")
    progress.update(99_999, 1.0, "a long note")
    progress.update(5, 1.0)
    progress.say("said")
    progress.update(10)
    progress.close()
    progress.say("end")
    assert "\x1b" not in stream.getvalue()
    lines = seen(stream.getvalue())
    assert lines[0] == "start"
    assert lines[1].startswith("  0%  5 steps  ")
    assert lines[1].endswith("? left") or lines[1].endswith(" left")
    assert "note" not in lines[1]
    assert lines[2] == "said"
    assert lines[3].startswith("  0%  10 steps  ")
    assert lines[4:] == ["end", ""]


def test_a_cell_that_runs_a_command_gets_one_line_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """`!manyhands train`: a terminal, but one that cannot move its cursor up."""
    monkeypatch.setenv("JPY_PARENT_PID", "1")
    screen = Screen()
    progress = Progress(1000, stream=screen, interval=0)
    drawn(progress)
    drawn(progress)
    assert "\x1b" not in screen.getvalue()
    assert len(screen.lines()) == 1


def test_quiet_is_quiet() -> None:
    screen = Screen()
    progress = Progress(10, quiet=True, stream=screen, interval=0)
    progress.say("x")
    progress.update(5)
    progress.close()
    assert screen.getvalue() == ""


def test_rich_is_imported_for_a_terminal_only() -> None:
    code = (
        "import io, sys\n"
        "from manyhands.experiment.progress import Progress\n"
        "p = Progress(10, stream=io.StringIO(), interval=0)\n"
        "p.say('x'); p.update(5); p.close()\n"
        "assert 'rich' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=200)


def test_a_closed_pipe_is_no_reason_to_stop() -> None:
    code = (
        "import sys, time\n"
        "from manyhands.experiment.progress import Progress\n"
        "p = Progress(10, interval=0)\n"
        "p.say('first')\n"
        "sys.stdin.read()\n"  # until the reader has gone
        "for i in range(3): p.update(i); p.say('x')\n"
        "p.close(); print('alive', file=sys.stderr)"
    )
    assert _after_the_reader_left(code) == "alive\n"


def _after_the_reader_left(code: str) -> str:
    """Run a program whose first line is read and no more; what it says on standard error."""
    child = subprocess.Popen(
        [sys.executable, "-c", code],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert child.stdin is not None
    assert child.stdout is not None
    assert child.stderr is not None
    assert child.stdout.readline() == "first\n"
    child.stdout.close()
    child.stdin.close()
    said = child.stderr.read()
    child.stderr.close()
    assert child.wait(timeout=30) == 0
    return said


@pytest.mark.parametrize("kind", [Screen, io.StringIO])
def test_a_closed_stream_is_no_reason_to_stop(kind: type[io.StringIO]) -> None:
    stream = kind()
    progress = Progress(10, stream=stream, interval=0)
    progress.update(1)
    stream.close()
    progress.update(2)
    progress.say("nobody hears it")
    progress.close()


def test_durations() -> None:
    assert [duration(s) for s in (4.6, 65, 3725)] == ["5s", "1m05s", "1h02m"]

"""Lines of several workers on one terminal say whose they are."""

from __future__ import annotations

import io
import subprocess
import sys
from pathlib import Path

import pytest

from manyhands.terminal import Labelled

SPEAK = """
import sys
from manyhands import Parallel
par = Parallel()
par.barrier()
for turn in range(par.size):
    if turn == par.rank:
        print("I am", par.rank, flush=True)
        print("one\\ntwo", file=sys.stderr)
    par.barrier()
"""


def test_each_line_has_its_label_and_comes_whole() -> None:
    stream = io.StringIO()
    labelled = Labelled(stream, "actor 2")
    print("a", 1, file=labelled)
    labelled.write("no end")
    assert stream.getvalue() == "[actor 2] a 1\n"
    labelled.flush()
    print("\nb\n\nc", file=labelled)
    assert stream.getvalue() == (
        "[actor 2] a 1\n[actor 2] no end\n[actor 2] b\n[actor 2] \n[actor 2] c\n"
    )


@pytest.mark.mpi
def test_workers_of_mpiexec_say_who_they_are(tmp_path: Path) -> None:
    script = tmp_path / "speak.py"
    script.write_text(SPEAK)
    mpiexec = Path(sys.executable).with_name("mpiexec")
    command = [str(mpiexec), "-n", "2", sys.executable, str(script)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr
    assert done.stdout == "I am 0\n[worker 1] I am 1\n"
    assert done.stderr == "one\ntwo\n[worker 1] one\n[worker 1] two\n"

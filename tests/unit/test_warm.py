"""Scripts in copies of a process that is there already are run as `python script.py` runs them."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

from warm import warm

import manyhands

ASKS = """\
import os, sys
print(__name__, sys.argv, os.path.realpath(sys.path[0]) == os.getcwd(), "beside" in sys.modules)
import beside
sys.stdin.read()
print("told", file=sys.stderr)
"""
FORGETS = "print(json.dumps({}))\n"
LEAVES = "import atexit, sys\natexit.register(print, 'left')\nsys.exit(7)\n"


def test_each_script_begins_anew_and_its_end_is_told(tmp_path: Path) -> None:
    (tmp_path / "beside.py").write_text("")
    found = {}
    with warm(dict(os.environ), libraries=("json", "no_such_library")) as process:
        for name, text in (
            ("asks", ASKS),
            ("again", ASKS),
            ("forgets", FORGETS),
            ("leaves", LEAVES),
        ):
            (tmp_path / f"{name}.py").write_text(text)
            found[name] = process.run(tmp_path / f"{name}.py")
    for name in ("asks", "again"):
        assert found[name] == (0, f"__main__ ['{name}.py'] True False\ntold\n")
    assert found["forgets"][0] == 1
    assert "NameError: name 'json' is not defined" in found["forgets"][1]
    assert found["leaves"] == (7, "left\n")
    assert process.process.poll() is not None


SHELL = """\
PYTHONPATH=more python shows.py one 'two words' < input
python -c 'import os; print("MANYHANDS_TEST" in os.environ)'
python waits.py & pid=$!
read line < begun
kill -TERM $pid
wait $pid; echo "ended with $?"
python killed.py; echo "ended with $?"
manyhands --version
"""
SHOWS = (
    "import sys, there\nprint(sys.argv, sys.stdin.read(), there.__file__.endswith('more/there.py'))"
)
WAITS = """\
import signal, sys
signal.signal(signal.SIGTERM, lambda *_: sys.exit(9))
with open("begun", "w") as file:
    file.write("begun\\n")
while True:
    signal.pause()
"""


def test_a_shell_sees_programs(tmp_path: Path) -> None:
    (tmp_path / "more").mkdir()
    (tmp_path / "more" / "there.py").write_text("")
    (tmp_path / "input").write_text("given")
    os.mkfifo(tmp_path / "begun")
    (tmp_path / "shows.py").write_text(SHOWS)
    (tmp_path / "waits.py").write_text(WAITS)
    (tmp_path / "killed.py").write_text("import os\nos.kill(os.getpid(), 9)\n")
    with warm(dict(os.environ), libraries=("json",)) as process:
        done = subprocess.run(
            ["bash", "-c", SHELL], cwd=tmp_path, env=os.environ | process.variables,
            capture_output=True, text=True, timeout=100,
        )  # fmt: skip
    assert done.stdout.splitlines() == [
        "['shows.py', 'one', 'two words'] given True",
        "True",
        "ended with 9",
        "ended with 137",
        f"manyhands {manyhands.__version__}",
    ], done.stderr

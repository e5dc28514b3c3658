"""What tests share is made once, a failure included."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from once import once

COUNTED = """\
import sys
sys.path.insert(0, sys.argv[1])
from once import once

@once
def counted_in_two_processes(name):
    print("made", name)
    return {"name": name}

assert counted_in_two_processes("a") == counted_in_two_processes("a") == {"name": "a"}
"""


def test_two_processes_make_it_once(tmp_path: Path) -> None:
    (tmp_path / "counted.py").write_text(COUNTED)
    command = [sys.executable, str(tmp_path / "counted.py"), str(Path(__file__).parents[1])]
    both = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(2)]
    said = [process.communicate(timeout=100)[0] for process in both]
    assert [process.returncode for process in both] == [0, 0]
    assert sorted(said) == ["", "made a\n"]


def test_a_failure_is_not_tried_again_and_says_what_it_was() -> None:
    tries = []

    @once
    def failing_for_a_test(reason: str) -> None:
        tries.append(reason)
        raise ValueError(reason)

    for _ in range(2):
        with pytest.raises(AssertionError, match="ValueError: no room"):
            failing_for_a_test("no room")
    assert tries == ["no room"]

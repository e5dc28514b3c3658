"""The table of faults names tests that exist, and every file of fault tests looks for leftovers."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
TABLE = (ROOT / "docs/concepts/faults.md").read_text(encoding="utf-8")


def test_every_row_names_tests_that_exist() -> None:
    rows = [line for line in TABLE.splitlines() if line.startswith("| ") and "outcome" not in line]
    assert len(rows) > 30
    for row in rows:
        named = re.findall(r"`(tests/\S+?\.py)::(test_\w+)`", row)
        assert named, f"no test: {row[:80]}"
        for file, name in named:
            text = (ROOT / file).read_text(encoding="utf-8")
            assert re.search(rf"^def {name}\(", text, re.MULTILINE), f"{file} has no {name}"


def test_every_fault_test_ends_with_a_look_at_what_is_left() -> None:
    for file in sorted((ROOT / "tests/faults").glob("test_*.py")):
        assert 'usefixtures("nothing_left")' in file.read_text(encoding="utf-8"), file.name

"""The words about the files of a run: every name that is written has some, and no other."""

from __future__ import annotations

import ast
from pathlib import Path

from file_contents import EVENTS, SUMMARY

from manyhands.config import build
from manyhands.experiment import folder
from manyhands.experiment.records import Records

SOURCE = Path(__file__).parents[2] / "src" / "manyhands"


def test_every_key_of_the_summary_is_explained() -> None:
    assert list(SUMMARY) == list(folder.SUMMARY)


def test_restarts_and_lost_fragments_are_counted(tmp_path: Path) -> None:
    """Once the page said that they are always 0."""
    records = Records(
        build("impala", env="X", workers=2, run_dir=str(tmp_path / "run"), quiet=True), main=True
    )
    records.restarts, records.lost_fragments = 2, 3
    summary = records.finish(100, 1, False, [{"rollout": 1.0}])
    assert (summary["restarts"], summary["lost_fragments"]) == (2, 3)
    for key in ("restarts", "lost_fragments"):
        assert "always" not in SUMMARY[key][1]


def written_events() -> dict[str, tuple[set[str], bool]]:
    """Event -> the facts that the code gives it by name, and whether there may be others."""
    found = {}
    for path in SOURCE.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            match node:
                case ast.Call(
                    func=ast.Attribute(attr="event"), args=[ast.Constant(value=str() as kind)]
                ):
                    names = {word.arg for word in node.keywords if word.arg is not None}
                    found[kind] = names, any(word.arg is None for word in node.keywords)
    return found


def test_every_event_is_explained_with_its_facts() -> None:
    written = written_events()
    assert set(written) == set(EVENTS)
    for kind, (names, more) in written.items():
        told = set(EVENTS[kind][0])
        assert told > names if more else told == names, kind

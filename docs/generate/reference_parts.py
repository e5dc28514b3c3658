"""Parts of the written pages that are filled in from the code.

A part stands between two comments, in a paragraph, a table's cell or on lines of its own:

    <!-- from the code: NAME -->whatever stood here before<!-- end -->

`make docs` fills them in, and a test compares. Where a name or a number is the code's to say, it is
not typed.
"""

from __future__ import annotations

import dataclasses
import os
import re
import typing
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from file_contents import EVENTS, SUMMARY

from manyhands import support
from manyhands.algorithms.registry import SPECS
from manyhands.config import USUAL, default_strategy, help_of, hints_of, in_words, names_of, usual
from manyhands.config.values import Workers
from manyhands.experiment.bottleneck import PHASES

_PART = re.compile(r"<!-- from the code: ([\w ]+) -->(.*?)<!-- end -->", re.DOTALL)


class Place:
    """The page that a part stands in."""

    def __init__(self, page: Path, root: Path) -> None:
        self._page, self._root = page, root
        self.topic = page.stem  # the algorithm, on its page

    def link(self, kind: str, name: str) -> str:
        path = os.path.relpath(self._root / "docs" / kind / f"{name}.md", self._page.parent)
        return f"[{name}]({path})"


def pages_with_parts(root: Path) -> list[Path]:
    """Every page of the repository that has one."""
    pages = [root / "README.md", *sorted((root / "docs").rglob("*.md"))]
    return [page for page in pages if _PART.search(page.read_text(encoding="utf-8"))]


def filled(page: Path, root: Path) -> str:
    """The text of a page with all of its parts as the code has them now."""
    place = Place(page, root)

    def fill(found: re.Match[str]) -> str:
        name = found[1]
        if name not in PARTS:
            raise KeyError(f"{page.name}: there is no part {name!r}; there are {', '.join(PARTS)}")
        text = PARTS[name](place)
        if "\n" in text:
            text = f"\n\n{text}\n\n"
        return f"<!-- from the code: {name} -->{text}<!-- end -->"

    return _PART.sub(fill, page.read_text(encoding="utf-8"))


def in_table(head: list[str], rows: Sequence[Sequence[str]]) -> list[str]:
    return [f"| {' | '.join(row)} |" for row in (head, ["---"] * len(head), *rows)]


def options_table(cls: type[Any], names: Sequence[str], said: dict[str, str]) -> list[str]:
    """`said`: what stands for parts of the help that name algorithms."""
    fields = {f.name: f for f in dataclasses.fields(cls)}
    hints, texts = hints_of(cls), help_of(cls, said)
    rows = [[f"`{n}`", _kind(hints[n]), _default(fields[n]), texts.get(n, "")] for n in names]
    return in_table(["option", "type", "default", "meaning"], rows)


def _kind(hint: Any) -> str:
    """A type in words: `float | str` is a number or a schedule."""
    members = typing.get_args(hint)
    if hint is Workers:
        return "int, or 2..16"
    if typing.get_origin(hint) is typing.Literal:
        return ", ".join(map(str, members))
    if typing.get_origin(hint) is tuple:
        return f"{members[0].__name__}s"
    if typing.get_origin(hint) is dict:
        return "table"
    if members:
        return " or ".join("none" if m is type(None) else _kind(m) for m in members)
    return str(hint.__name__)


def _default(f: dataclasses.Field[Any]) -> str:
    if f.default is dataclasses.MISSING:
        return "needed" if f.default_factory is dataclasses.MISSING else "empty"
    if isinstance(f.default, tuple):
        return " ".join(map(str, f.default))
    if isinstance(f.default, bool):
        return "yes" if f.default else "no"
    return "none" if f.default is None else str(f.default) or "empty"


def _options(place: Place) -> str:
    """On an algorithm's page: all that is set by its own options."""
    cls = SPECS[place.topic].options
    length = (
        "Steps of each environment between updates, unless `rollout_length` says otherwise: "
        f"{cls.ROLLOUT_LENGTH}."
    )
    own = {name: usual(cls, name) for name in ("hidden", "activation")}
    if own != {name: USUAL[name] for name in own}:
        widths = " ".join(map(str, own["hidden"]))
        length += (
            " Hidden layers, unless `hidden` and `activation` say otherwise: "
            f"{widths}, {own['activation']}."
        )
    return "\n".join([length, "", *options_table(cls, names_of(cls), {})])


def _strategies(place: Place) -> str:
    return in_words([place.link("strategies", name) for name in support.STRATEGIES])


def _engines(place: Place) -> str:
    return in_words(support.ENGINES)


def _engines_that_restart(place: Place) -> str:
    return in_words(support.RECOVERY["restart"])


def _algorithms(place: Place) -> str:
    return in_words([place.link("algorithms", name) for name in support.built()])


def _engines_with_blocks(place: Place) -> str:
    return in_words([e for e in support.ENGINES if support.PARTS["Service"][e] == support.OK])


def _where_it_runs(place: Place) -> str:
    """On an algorithm's page: its strategies, those with the same engines together."""
    together: dict[tuple[str, ...], list[str]] = {}
    for strategy in support.strategies_of(place.topic):
        engines = [e for e in support.ENGINES if not support.why_not(place.topic, strategy, e)]
        together.setdefault(tuple(engines), []).append(strategy)
    return ", ".join(
        f"{in_words(names)} on "
        + ("all engines" if engines == support.ENGINES else in_words(engines))
        for engines, names in together.items()
    )


def _which_algorithm(place: Place) -> str:
    rows = []
    for name in support.built():
        runs_with = [place.link("strategies", s) for s in support.strategies_of(name)]
        default = place.link("strategies", default_strategy(name, 2))
        rows.append(
            [place.link("algorithms", name), SPECS[name].about, default, ", ".join(runs_with)]
        )
    head = [
        "`manyhands train`",
        "what it is",
        "default with two or more workers",
        "runs with",
    ]
    return "\n".join(in_table(head, rows))


def _phases(place: Place) -> str:
    rows = [[f"`{name}`", phase.meaning] for name, phase in PHASES.items()]
    return "\n".join(in_table(["phase", "what it is"], rows))


def _seconds(place: Place) -> str:
    rows = [
        [f"`seconds/{name}`", "seconds", "main worker, so far", phase.meaning]
        for name, phase in PHASES.items()
        if name != "everything else"
    ]
    return "\n".join(in_table(["name", "unit", "reduction", "meaning"], rows))


def _summary(place: Place) -> str:
    rows = [[f"`{key}`", *words] for key, words in SUMMARY.items()]
    return "\n".join(in_table(["key", "unit", "meaning"], rows))


def _events(place: Place) -> str:
    rows = [
        [f"`{event}`", ", ".join(f"`{fact}`" for fact in facts), when]
        for event, (facts, when) in EVENTS.items()
    ]
    return "\n".join(in_table(["`event`", "facts", "it says"], rows))


PARTS: dict[str, Callable[[Place], str]] = {
    "options": _options,
    "strategies": _strategies,
    "engines": _engines,
    "engines with blocks": _engines_with_blocks,
    "engines that restart": _engines_that_restart,
    "algorithms": _algorithms,
    "where it runs": _where_it_runs,
    "which algorithm": _which_algorithm,
    "phases": _phases,
    "seconds by phase": _seconds,
    "summary": _summary,
    "events": _events,
}

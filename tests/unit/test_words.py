"""Words: a reader meets the field's own names and idiomatic English, and none of our metaphors.

Sentences are the string literals of the source (errors, help, printed lines, docstrings), the
pages, examples and recipes; not docs/log.md, which is for those who work on the code. Names are
those of modules, classes, functions, arguments, variables and attributes.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SOURCE = ROOT / "src" / "manyhands"
CODE = sorted(
    path
    for folder in ("src/manyhands", "benchmarks", "docs/generate")
    for path in (ROOT / folder).rglob("*.py")
)
TEXTS = sorted(
    path
    for pattern in ("*.md", "docs/**/*.md", "docs/**/*.ipynb", "examples/**/*", "src/**/*.toml")
    for path in ROOT.glob(pattern)
    if path.suffix in (".md", ".py", ".toml", ".ipynb", ".sh") and path.name != "log.md"
)

# word -> what the field says
METAPHORS = {
    "crew": "workers",
    "team": "workers",
    "hand": "worker",
    "lesson": "batch, update",
    "desk": "server, service",
    "parcel": "message, batch",
    "ledger": "progress, counters",
    "life": "restart",
    "farewell": "end",
    "told": "said, reported, given",
}
PHRASES = (
    r"gone on with",
    r"cannot be another",
    r"in the mean",
    r"mend(?:s|ed|ing)?",
)
# Ordinary English, or another field's own word, in which one of them stands.
ORDINARY = (
    r"by hand",
    r"(?:hand|hands|handed|handing) (?:\w+ )?(?:over|on|out|back)",
    r"(?:hand|hands|handed|handing) it (?:over|on|out|back)",
    r"on the other hand",
    r"(?:change|changes|changed) hands",
    r"(?:losing|loses|lose|lost) a life",  # Atari games have lives
    r"a life is lost",
    r"`life`",  # a key of events.jsonl, which other programs read
    r'called them "team" in a synchronous run and "crew"',  # keys of checkpoints of version 0.1.0
)
# As adverbs and pronouns they are English; as the name of a thing they say nothing.
NOT_NAMES = ("again", "ahead", "nothing")
# Names that are not ours to choose, and verbs.
OTHERS_NAMES = ("episodic_life",)  # ale-py's option
VERBS = re.compile(r"^_?hand_(?:on|out|over)$")

FORMS = "|".join(rf"{'li(?:fe|ves)' if word == 'life' else word + '(?:s)?'}" for word in METAPHORS)
BANNED = re.compile(rf"\b(?:{FORMS}|{'|'.join(PHRASES)})\b", re.IGNORECASE)
ALLOWED = re.compile(rf"(?<!\w)(?:{'|'.join(ORDINARY)})(?!\w)", re.IGNORECASE)


@cache
def tree_of(path: Path) -> ast.Module:
    return ast.parse(path.read_text())


def hits(text: str) -> list[str]:
    """Each with the words around it."""
    text = " ".join(text.split())
    ordinary = [found.span() for found in ALLOWED.finditer(text)]
    return [
        text[max(found.start() - 30, 0) : found.end() + 30]
        for found in BANNED.finditer(text)
        if not any(start <= found.start() < end for start, end in ordinary)
    ]


def sentences(tree: ast.AST) -> Iterator[tuple[int, str]]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and " " in node.value:
            yield node.lineno, node.value


def names(tree: ast.AST) -> Iterator[tuple[int, str, bool]]:
    """Line, name, and whether it names a thing: a class, a function, an argument."""
    for node in ast.walk(tree):
        if isinstance(node, (ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)):
            yield node.lineno, node.name, True
        elif isinstance(node, ast.arg):
            yield node.lineno, node.arg, True
        elif isinstance(node, ast.Name):
            yield node.lineno, node.id, False
        elif isinstance(node, ast.Attribute):
            yield node.lineno, node.attr, False


@cache
def parts(name: str) -> list[str]:
    """`RunFolder.left_over` -> run, folder, left, over."""
    return [part.lower() for part in re.findall(r"[A-Z]?[a-z]+|[A-Z]+(?![a-z])", name)]


@pytest.mark.parametrize("path", CODE, ids=lambda path: path.relative_to(ROOT).as_posix())
def test_sentences_of_the_source(path: Path) -> None:
    found = [(line, hit) for line, text in sentences(tree_of(path)) for hit in hits(text)]
    assert not found, "\n".join(f"{path.relative_to(ROOT)}:{line}: {hit}" for line, hit in found)


@pytest.mark.parametrize("path", TEXTS, ids=lambda path: path.relative_to(ROOT).as_posix())
def test_pages_examples_and_recipes(path: Path) -> None:
    found = hits(path.read_text())
    assert not found, "\n".join(f"{path.relative_to(ROOT)}: {hit}" for hit in found)


def test_names_of_the_source() -> None:
    found = []
    for path in CODE:
        where = path.relative_to(ROOT)
        for line, name, thing in {(1, path.stem, True), *names(tree_of(path))}:
            banned = {*METAPHORS, "hands", "lives", "mend", "mended"}
            banned |= set(NOT_NAMES) if thing else set()
            if name in OTHERS_NAMES or VERBS.match(name):
                continue
            if banned & set(parts(name)):
                found.append(f"{where}:{line}: {name}")
    assert not found, "\n".join(sorted(set(found)))


def test_the_words_are_seen() -> None:
    for text in ("the crew was told", "42.0 steps in the mean", "It is Mended.", "a worker's life"):
        assert hits(text), text
    for text in ("many hands", "a lesson"):
        assert hits(text), text
    for text in (
        "written by hand", "hands it over to", "in the meantime", "recommended",
        "manyhands", "ends when a life is lost", "steamed",
    ):  # fmt: skip
        assert not hits(text), text
    assert parts("_WeightDesk2.told_of") == ["weight", "desk", "told", "of"]

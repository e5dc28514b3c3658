"""The inside keeps its order: who asks for rank 0, who knows strategies by name, and that nothing
is there for tests alone.

Which folder may import which is in `pyproject.toml`, and checked by `make lint`.
"""

from __future__ import annotations

import ast
import re
from collections import Counter
from collections.abc import Iterator
from fnmatch import fnmatch
from functools import cache
from pathlib import Path

from manyhands.strategies.registry import SPECS as STRATEGIES

ROOT = Path(__file__).parents[2]
SOURCE = ROOT / "src" / "manyhands"
FILES = sorted(SOURCE.rglob("*.py"))
USERS = [*FILES, *ROOT.glob("docs/generate/*.py"), *ROOT.glob("benchmarks/*.py")]
ORDERS = (ast.Eq, ast.NotEq, ast.Lt, ast.LtE, ast.Gt, ast.GtE)

# Files outside engines/ that still ask for rank 0 themselves, and what is to become of that.
RANK_0: dict[str, str] = {}

# Folders that may tell strategies apart by name: their own, and benchmarks, which name what they
# measure.
BY_STRATEGY = {"strategies", "bench"}

# Looked up by name, in modules that are imported by name: who does.
BY_NAME = {
    "manyhands.bench.*.add_options": "bench/__init__.py",
    "manyhands.bench.*.table": "bench/__init__.py",
    "manyhands.engines.*.attach": "engines/attach.py",
    "manyhands.terminal.Relay.writelines": "whatever the user's program does with sys.stdout",
    "*._repr_html_": "notebooks",
    "manyhands.viewing.watch._Handler.*": "http.server",
}


@cache
def tree_of(path: Path) -> ast.Module:
    return ast.parse(path.read_text())


def module_of(path: Path) -> str:
    parts = ("manyhands", *path.relative_to(SOURCE).with_suffix("").parts)
    return ".".join(parts).removesuffix(".__init__")


# -- rank 0 ----------------------------------------------------------------------------------------


def is_rank(node: ast.AST) -> bool:
    name = node.id if isinstance(node, ast.Name) else getattr(node, "attr", "")
    return name.lstrip("_") in ("rank", "world_rank")


def is_end(node: ast.AST) -> bool:
    """0, or the 1 of `rank < 1`."""
    return isinstance(node, ast.Constant) and node.value in (0, 1)


def asks_for_rank_0(node: ast.AST) -> bool:
    if isinstance(node, ast.Compare) and isinstance(node.ops[0], ORDERS):
        left, right = node.left, node.comparators[0]
        return (is_rank(left) and is_end(right)) or (is_end(left) and is_rank(right))
    if isinstance(node, (ast.If, ast.IfExp, ast.While)):
        return is_rank(node.test)
    if isinstance(node, ast.BoolOp):
        return any(is_rank(value) for value in node.values)
    return isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not) and is_rank(node.operand)


def branches(tree: ast.AST) -> list[int]:
    return [node.lineno for node in ast.walk(tree) if asks_for_rank_0(node)]


def test_who_is_first_is_asked_in_engines_only() -> None:
    """Elsewhere it is `is_main`, of a place or a group: a name that says what for."""
    found = {
        str(path.relative_to(SOURCE)): lines
        for path in FILES
        if "engines" not in path.relative_to(SOURCE).parts and (lines := branches(tree_of(path)))
    }
    new = [f"{name}:{found[name]}" for name in sorted(set(found) - set(RANK_0))]
    assert not new, f"rank 0 is asked for outside engines/, instead of is_main: {new}"
    assert set(RANK_0) <= set(found), "take off the list what no longer needs to be on it"


def test_a_branch_on_rank_0_is_seen_in_every_form() -> None:
    for text in (
        "if rank == 0: f()",
        "x = worker.place.rank == 0",
        "if not group.rank: f()",
        "if self._rank > 0 and y: f()",
        "while 0 != rank: f()",
        "x = a if rank else b",
        "x = rank or y",
        "if rank < 1: f()",
    ):
        assert branches(ast.parse(text)), text
    for text in ("if rank == size: f()", "x = ranks[0] == 0", "f(rank, 0)", "x = -rank"):
        assert not branches(ast.parse(text)), text


# -- names of strategies ---------------------------------------------------------------------------


def strategies_told_apart(tree: ast.AST) -> list[int]:
    """Lines that compare a strategy's name, match it, or look something up by it."""
    found = []
    for node in ast.walk(tree):
        parts: list[ast.AST] = []
        if isinstance(node, ast.Compare):
            parts = [node.left, *node.comparators]
        elif isinstance(node, ast.MatchValue):
            parts = [node.value]
        elif isinstance(node, ast.Subscript):
            parts = [node.slice]
        inside = [e for part in parts for e in getattr(part, "elts", [part])]
        if any(isinstance(e, ast.Constant) and e.value in STRATEGIES for e in inside):
            found.append(node.lineno)
    return found


def test_only_their_rows_know_strategies_by_name() -> None:
    """Elsewhere a property of the row is asked for: a new strategy is one row and one program."""
    found = {
        str(path.relative_to(SOURCE)): lines
        for path in FILES
        if not BY_STRATEGY.intersection(path.relative_to(SOURCE).parts)
        and (lines := strategies_told_apart(tree_of(path)))
    }
    assert not found, f"ask the strategy's row (strategies/registry.py), not for its name: {found}"


def test_a_strategy_told_apart_is_seen_in_every_form() -> None:
    for text in (
        'if run.strategy == "apex": f()',
        'x = strategy not in ("single", "gather")',
        'if "allreduce" != name: f()',
        'x = {"a": 1}["actor_learner"]',
        'match strategy:\n    case "gradient_server": f()',
    ):
        assert strategies_told_apart(ast.parse(text)), text
    for text in ('par.gather("gather")', 'x = {"gather": 1}', 'if name == "worker": f()'):
        assert not strategies_told_apart(ast.parse(text)), text


# -- used by tests alone ---------------------------------------------------------------------------


def definitions(body: list[ast.stmt]) -> Iterator[ast.FunctionDef | ast.ClassDef]:
    for node in body:
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            yield node
        elif isinstance(node, (ast.If, ast.Try)):
            yield from definitions(node.body + node.orelse)


def words_of_people() -> set[str]:
    """Names in the code of README, docs and examples; what is generated from the source is not."""
    found = set()
    for path in [ROOT / "README.md", *ROOT.glob("docs/**/*.md"), *ROOT.glob("docs/**/*.ipynb")]:
        if "reference" not in path.parts and path.name != "log.md":
            for code in re.findall(r"```.*?```|`[^`\n]+`", path.read_text(), re.DOTALL):
                found |= set(re.findall(r"\w+", code))
    for path in ROOT.glob("examples/**/*.py"):
        found |= set(re.findall(r"\w+", path.read_text()))
    return found


@cache
def names_in(tree: ast.AST) -> Counter[str]:
    """Names that are read or called; those in strings too, by which functions travel and lazy
    imports are written, but not those in docstrings."""
    found: Counter[str] = Counter()
    todo = [tree]
    while todo:
        node = todo.pop()
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
            continue
        if isinstance(node, (ast.Name, ast.Attribute)):
            found[node.id if isinstance(node, ast.Name) else node.attr] += 1
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            found.update(re.findall(r"\w+", node.value) if " " not in node.value else ())
        todo += ast.iter_child_nodes(node)
    return found


def taken_from(tree: ast.AST) -> set[tuple[str, str]]:
    """(module, name) for each name of this package that a file imports, or reads off a module."""
    found, modules = set(), {}
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("manyhands"):
            for alias in node.names:
                found.add((node.module, alias.name))
                modules[alias.asname or alias.name] = f"{node.module}.{alias.name}"
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
            found.add((modules.get(node.value.id, ""), node.attr))
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            module, _, name = node.value.partition(":")  # as functions and classes travel
            found.add((module, name))
    return found


def test_nothing_is_there_for_tests_alone() -> None:
    named = {path: names_in(tree_of(path)) for path in FILES}
    public = words_of_people()
    everywhere = sum(named.values(), Counter(public))
    taken = set().union(*(taken_from(tree_of(path)) for path in USERS))
    unused = set()
    for path in FILES:
        module = module_of(path)
        for top in definitions(tree_of(path).body):
            inside = named[path][top.name] > names_in(top)[top.name]
            if not (inside or (module, top.name) in taken or top.name in public):
                unused.add(f"{module}.{top.name}")
            methods = definitions(top.body) if isinstance(top, ast.ClassDef) else ()
            for method in methods:
                if everywhere[method.name] <= names_in(method)[method.name]:
                    unused.add(f"{module}.{top.name}.{method.name}")
    new = {name for name in unused if not any(fnmatch(name, known) for known in BY_NAME)}
    new = {name for name in new if not name.endswith("__")}  # Python itself calls them
    assert not new, f"only tests use these: remove them, or say in BY_NAME who does: {sorted(new)}"
    stale = [known for known in BY_NAME if not any(fnmatch(name, known) for name in unused)]
    assert not stale, f"take off the list what no longer needs to be on it: {stale}"

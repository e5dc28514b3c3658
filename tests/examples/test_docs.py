"""The documentation as a program: every block runs, every output shown is the real one.

Blocks of README.md and docs/ are told apart by their language and by a comment just above:

    ```python                              runs; all such blocks of a page in one process, where
                                           the first of them stands
    <!-- file: NAME --> ```python          becomes a file in the page's folder
    ```bash                                runs in the page's folder and must end well
    ```console                             `$ command` lines run, and their output is compared
    <!-- tested with: NEW for OLD, ... --> runs with other words than the reader's: fewer workers or
                                           steps, where their number is not the point
    <!-- not run: REASON -->               is left alone, for a reason that is written down

`manyhands ...` and `python FILE` run in copies of one process that has torch (`warm.py`), but for
those that mpiexec starts. A page's folder has `examples/`, a small `train.py`, and `term.py`, which
ends a run that has begun. In a console block a line `...` stands for any lines; process ids,
seconds, the host's name and the order of lines are not compared, since workers print when they get
there.
"""

from __future__ import annotations

import difflib
import importlib
import json
import os
import re
import socket
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from warm import Warm, warm

from manyhands import support, train
from manyhands.algorithms.registry import SPECS

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
PAGES = [p for p in PAGES if p.name != "log.md"]
TOP = {"README.md", "CONTRIBUTING.md", "CHANGELOG.md"}
RUNNABLE = ("python", "bash", "console")
LEFT_ALONE = ("diff", "text", "toml")
HOST = "mybox"  # the name that this machine has in the docs
SECONDS = 200  # for what takes twenty on a quiet machine
TRAIN = """\
from manyhands import Parallel

par = Parallel()
mean = par.mean(float(par.rank))
par.print(f"{par.size} workers on the {par.engine} engine; their mean rank is {mean}")
"""
TERM = """\
import pathlib, subprocess, sys, time

process = subprocess.Popen(sys.argv[1:])
records, deadline = pathlib.Path("runs/mine/metrics.jsonl"), time.monotonic() + 150
while not (records.exists() and records.stat().st_size):
    assert process.poll() is None and time.monotonic() < deadline
    time.sleep(0.05)
process.terminate()
sys.exit(process.wait())
"""


@dataclass(frozen=True)
class Block:
    """A fenced block of a page."""

    page: str
    line: int
    language: str
    text: str
    comment: str  # of the line just above, without its marks

    @property
    def file(self) -> str:
        return self.comment.removeprefix("file: ") if self.comment.startswith("file: ") else ""

    @property
    def reason(self) -> str:
        found = re.fullmatch(r"not run: (.+)", self.comment)
        return found.group(1) if found else ""

    @property
    def tested(self) -> str:
        """The text that runs."""
        text = self.text
        changes = re.fullmatch(r"tested with: (.+)", self.comment)
        for change in changes.group(1).split(", ") if changes else ():
            new, old = change.split(" for ")
            assert old in text, f"{self.page}, line {self.line}: there is no {old!r} to replace"
            text = text.replace(old, new)
        return text

    @property
    def runs(self) -> bool:
        return self.language in RUNNABLE and not self.file and not self.reason


def blocks_of(page: Path) -> list[Block]:
    lines = page.read_text(encoding="utf-8").splitlines()
    found, at = [], 0
    while at < len(lines):
        opening = re.fullmatch(r"```(\w*)", lines[at])
        if opening is None:
            at += 1
            continue
        end = lines.index("```", at + 1)
        above = next((line for line in reversed(lines[:at]) if line.strip()), "")
        comment = re.fullmatch(r"<!-- (.+) -->", above.strip())
        text = "\n".join(lines[at + 1 : end]) + "\n"
        said = comment.group(1) if comment else ""
        found.append(Block(name_of(page), at + 1, opening.group(1), text, said))
        at = end + 1
    return found


def name_of(page: Path) -> str:
    return page.relative_to(ROOT).as_posix()


def page_params() -> list[object]:
    params = []
    for page in PAGES:
        running = [b for b in blocks_of(page) if b.runs]
        needs_mpi = any("mpi" in b.text for b in running)
        if running:
            marks = [pytest.mark.mpi] if needs_mpi else []
            params.append(pytest.param(page, id=name_of(page), marks=marks))
    return params


# -- every block runs ------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def python() -> Iterator[Warm]:
    # One thread: BLAS threads that wait for each other crawl on a busy machine.
    with warm(environment() | {"OMP_NUM_THREADS": "1"}) as process:
        yield process


@pytest.mark.parametrize("page", page_params())
def test_blocks_of_a_page_run(page: Path, tmp_path: Path, python: Warm) -> None:
    blocks = blocks_of(page)
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    (tmp_path / "train.py").write_text(TRAIN)
    (tmp_path / "term.py").write_text(TERM)
    for block in blocks:
        if block.file:
            (tmp_path / block.file).write_text(block.text)
    running = [b for b in blocks if b.runs]
    scripts = [b for b in running if b.language == "python"]
    for block in running:
        where = f"{block.page}, line {block.line}"
        if block.language == "bash":
            shell(f"set -e\n{block.tested}", tmp_path, python, expect=0, where=where)
        elif block.language == "console":
            check_console(block.tested, tmp_path, python, where)
        elif block is scripts[0]:
            (tmp_path / "page.py").write_text("\n".join(b.tested for b in scripts))
            code, output = python.run(tmp_path / "page.py")
            assert code == 0, f"{page.name}: exit {code}\n{output}"


def check_console(text: str, folder: Path, python: Warm, where: str) -> None:
    code = 0
    for command, expected in sessions(text):
        code, output = shell(f"(exit {code}); {command}", folder, python, where=where)
        difference = compare(expected, output)
        assert not difference, f"{where}: $ {command}\n{difference}\n-- real output:\n{output}"


def sessions(text: str) -> list[tuple[str, str]]:
    """(command, what it prints) of a console block."""
    parts = re.split(r"(?m)^\$ (.*)\n", text)
    assert not parts[0].strip(), f"a console block starts with `$ command`, not {parts[0]!r}"
    return list(zip(parts[1::2], parts[2::2], strict=True))


def environment() -> dict[str, str]:
    env = {k: v for k, v in os.environ.items() if not k.startswith(("OMP_", "PYTEST_"))}
    path = f"{Path(sys.executable).parent}{os.pathsep}{env['PATH']}"
    return env | {"PATH": path, "COLUMNS": "100"}


def shell(
    command: str, folder: Path, python: Warm, expect: int | None = None, where: str = ""
) -> tuple[int, str]:
    done = subprocess.run(
        ["bash", "-c", command],
        cwd=folder,
        env=environment() | python.variables,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=SECONDS,
    )
    if expect is not None:
        assert done.returncode == expect, f"{where}: exit {done.returncode}\n{done.stdout}"
    return done.returncode, done.stdout


def compare(expected: str, output: str) -> str:
    """What is shown but was not printed, or (without `...`) printed but not shown."""
    shown, printed = Counter(plain(expected)), Counter(plain(output))
    any_more = shown.pop("...", 0)
    missing = [f"shown, not printed: {line}" for line in (shown - printed).elements()]
    surplus = [f"printed, not shown: {line}" for line in (printed - shown).elements()]
    return "\n".join(missing + ([] if any_more else surplus))


def plain(text: str) -> list[str]:
    text = text.replace(f" on {socket.gethostname()}", f" on {HOST}")
    text = re.sub(r"\bpid \d+", "pid 0", text)
    text = re.sub(r"\d+(\.\d+)? s\b", "0 s", text)
    lines = [line.strip() for line in text.splitlines()]
    return [line for line in lines if line.strip("~^")]  # Pythons mark the place in different ways


# -- nothing is left unsaid ------------------------------------------------------------------------


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_every_block_runs_or_says_why_not(page: Path) -> None:
    for block in blocks_of(page):
        where = f"{block.page}, line {block.line}"
        assert block.language in RUNNABLE + LEFT_ALONE, (
            f"{where}: a block of {block.language or 'no language'}; "
            f"use one of {', '.join(RUNNABLE + LEFT_ALONE)}"
        )
        if block.comment.startswith("not run"):
            assert len(block.reason) > 10, f"{where}: say why it is not run"
        assert block.tested == block.text or block.runs, f"{where}: is not run"


@pytest.mark.parametrize("page", [*PAGES, ROOT / "CHANGELOG.md"], ids=name_of)
def test_no_page_speaks_of_our_machines(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    for word in ("/work/", "/home/", "/root/", "/tmp/", f" on {socket.gethostname()} "):
        assert word not in text, f"{name_of(page)} mentions {word!r}"


@pytest.mark.parametrize("page", [*PAGES, ROOT / "CHANGELOG.md"], ids=name_of)
def test_links_resolve(page: Path) -> None:
    text = re.sub(r"(?ms)^```.*?^```$", "", page.read_text(encoding="utf-8"))
    for target in re.findall(r"\]\(([^)\s]+)\)", text):
        if re.match(r"https?:", target):
            continue
        path, _, anchor = target.partition("#")
        there = (page.parent / path).resolve() if path else page
        assert there.exists(), f"{name_of(page)} links to {target}, which does not exist"
        if anchor:
            assert anchor in anchors(there), f"{name_of(page)}: no heading #{anchor} in {path}"


def anchors(page: Path) -> set[str]:
    headings = re.findall(r"(?m)^#+ (.+)$", page.read_text(encoding="utf-8"))
    return {re.sub(r"[^\w\- ]", "", h.lower()).replace(" ", "-") for h in headings}


def test_index_leads_to_every_page() -> None:
    index = ROOT / "docs" / "index.md"
    text = index.read_text(encoding="utf-8")
    for page in PAGES:
        if page != index and page.name not in TOP:
            link = page.relative_to(index.parent).as_posix()
            found = text
            if link.startswith("algorithms/"):  # by way of the one list that names them
                found, link = (
                    (index.parent / "start/train.md").read_text(encoding="utf-8"),
                    f"../{link}",
                )
            assert f"({link})" in found, f"docs/index.md does not lead to {link}"


# -- what is generated, and what is computed -------------------------------------------------------


@pytest.mark.parametrize(("folder", "command"), [("reference", "docs"), ("results", "results")])
def test_generated_pages_are_up_to_date(folder: str, command: str) -> None:
    for name, text in importlib.import_module(folder).pages().items():
        path = ROOT / "docs" / folder / name
        assert path.exists(), f"docs/{folder}/{name} is missing; type: make {command}"
        written = path.read_text(encoding="utf-8")
        difference = "\n".join(
            difflib.unified_diff(written.split("\n"), text.split("\n"), lineterm="")
        )
        assert not difference, (
            f"docs/{folder}/{name} is not up to date; type: make {command}\n{difference}"
        )


@pytest.mark.parametrize(
    ("page", "after"),
    [
        ("README.md", "after_allreduce.py"),
        ("docs/start/your-script-on-n-workers.md", "after_allreduce.py"),
        ("docs/start/your-script-on-n-workers.md", "after_gather.py"),
    ],
)
def test_diff_shown_is_the_diff(page: str, after: str) -> None:
    folder = ROOT / "examples" / "own_loop"
    before, later = [(folder / f).read_text().splitlines() for f in ("before.py", after)]
    real = [
        line
        for line in difflib.unified_diff(before, later, lineterm="", n=0)
        if re.match(r"[+-](?![+-])", line)
    ]
    shown = [b.text for b in blocks_of(ROOT / page) if b.language == "diff"]
    changed = [[x for x in text.splitlines() if x[:1] in "+-"] for text in shown]
    assert real in changed, f"{page} does not show:\n" + "\n".join(real)
    for text in shown:  # the lines around the changes are the script's own, too
        around = [x[1:] for x in text.splitlines() if x[:1] == " " and x.strip() != "..."]
        assert [x for x in around if x not in before] == []


def test_tree_in_readme_is_the_tree() -> None:
    blocks = [b.text for b in blocks_of(ROOT / "README.md") if b.language == "text"]
    (tree,) = [text for text in blocks if text.startswith("src/")]
    package, shown = ROOT / "src" / "manyhands", set()
    for line in tree.splitlines():
        folder = package if line.startswith(" ") else ROOT
        first, _, rest = line.strip().partition(" ")
        more = re.findall(r"[\w.-]+(?:/|\.\w+)(?=[\s:,;]|$)", rest)
        assert (folder / first).exists(), f"README shows {first}"
        for name in more:  # in the folder, where the line is about one
            assert (folder / first / name).exists(), f"README shows {name} in {first}"
        shown |= {folder / first, *(folder / first / name for name in more)}
    for parent in (package, ROOT / "docs", ROOT / "tests"):
        folders = {path.parent for path in parent.glob("*/*") if path.suffix in (".py", ".md")}
        assert {f.name for f in folders - shown} <= {"generate"}, "README does not show all folders"


NAMED = r"(?<![\w/.-])(?:tests|docs|src|benchmarks|examples)/[\w./-]*\.(?:py|md|json|ipynb)\b"


@pytest.mark.parametrize(
    "page",
    [*PAGES, ROOT / "CHANGELOG.md", *sorted((ROOT / "src/manyhands/recipes").glob("*.toml"))],
    ids=name_of,
)
def test_files_that_are_named_are_there(page: Path) -> None:
    for name in re.findall(NAMED, page.read_text(encoding="utf-8")):
        assert (ROOT / name).exists(), f"{name_of(page)} names {name}, which is not there"


# -- what pages say of the code --------------------------------------------------------------------


def rows_of_tables(page: str) -> dict[str, list[str]]:
    """First cell -> the others, of every table of a page; links and code marks are left out."""
    text = (ROOT / page).read_text(encoding="utf-8").replace("\\|", "/")
    text = re.sub(r"\[([^\]]+)\]\([^)]*\)", r"\1", text).replace("`", "")
    tables = [line.strip("|").split("|") for line in text.splitlines() if line.startswith("|")]
    return {cells[0].strip(): [cell.strip() for cell in cells[1:]] for cells in tables}


@pytest.mark.parametrize("algorithm", support.built())
def test_algorithm_page_agrees_with_the_support_table(algorithm: str) -> None:
    shown = rows_of_tables(f"docs/algorithms/{algorithm}.md")
    for strategy, cell in support.ALGORITHMS[algorithm].items():
        assert shown.get(strategy) == [cell], f"docs/algorithms/{algorithm}.md: {strategy}"
        if cell == support.OK:
            assert (ROOT / "docs" / "strategies" / f"{strategy}.md").exists()


@pytest.mark.parametrize("algorithm", support.built())
def test_defaults_in_algorithm_page_are_the_defaults(algorithm: str) -> None:
    shown = rows_of_tables(f"docs/algorithms/{algorithm}.md")
    options = SPECS[algorithm].options
    told = [cells for cells in shown.values() if len(cells) == 2 and hasattr(options, cells[0])]
    assert len(told) >= 4
    for name, default in told:
        assert float(default) == getattr(options, name), f"{algorithm}.md: {name} = {default}"


WAYS = [(a, s, {}) for a in support.built() for s in support.strategies_of(a)] + [
    ("ppo", "gather", {"overlap": True, "workers": 3, "num_envs": 4}),
    ("trpo", "allreduce", {"collect": "episodes", "batch_steps": 64}),
]


@pytest.mark.parametrize(
    ("algorithm", "strategy", "more"), WAYS, ids=["-".join([a, s, *m]) for a, s, m in WAYS]
)
def test_every_number_that_a_run_writes_is_explained(
    algorithm: str, strategy: str, more: dict[str, Any], tmp_path: Path
) -> None:
    small: dict[str, Any] = {
        "env": "CartPole-v1", "steps": 128, "num_envs": 4, "rollout_length": 16,
        "workers": 1 if strategy == "single" else 2, "strategy": strategy, "quiet": True,
    }  # fmt: skip
    spec, own = SPECS[algorithm], {"ppo": {"minibatch": 32, "kl_penalty": True}}
    if spec.learns_from == "replay":
        small |= {"learning_starts": 32, "batch_size": 16, "hidden": (16, 16)}
    if spec.actions == "bounded":
        small |= {"env": "Pendulum-v1"}
    options = small | own.get(algorithm, {}) | more
    result = train(algorithm, engine="inline", run_dir=str(tmp_path / "run"), **options)
    record = json.loads((result.run_dir / "metrics.jsonl").read_text().splitlines()[-1])
    files = rows_of_tables("docs/reference/metrics.md")
    page = rows_of_tables(f"docs/algorithms/{algorithm}.md")
    assert [name for name in record if name not in files and name not in page] == []
    common = {"env_steps", "update", "wall_seconds", "steps_per_second", "episodes", "mean_return"}
    common |= {"lag", "stale_share"}  # of ways to collect, whatever the algorithm
    its_own = [n for n in record if n not in common and not n.startswith("seconds/")]
    assert [name for name in its_own if name not in page] == []
    kinds = {algorithm, "all", {"replay": "a replay"}.get(spec.learns_from, algorithm)}
    for name in its_own:
        if name in files:
            whose = files[name][1]
            assert any(kind in whose for kind in kinds), f"metrics.md: {name} is of {algorithm} too"
    columns = (result.run_dir / "episodes.csv").read_text().splitlines()[0].split(",")
    assert [name for name in [*columns, *result.summary] if name not in files] == []
    written = {path.name for path in result.run_dir.iterdir()}
    assert sorted(written - set(files)) == []
    for name in result.summary["phase_seconds"]:
        assert name in rows_of_tables("docs/start/train.md")
    for line in (result.run_dir / "events.jsonl").read_text().splitlines():
        assert json.loads(line)["event"] in files


def test_nothing_can_be_unpickled() -> None:
    """docs/concepts/security.md promises it."""
    forbidden = (
        r"(?m)^\s*(?:import|from) (?:pickle|cloudpickle|dill|marshal|shelve)\b|torch\.load\("
    )
    for path in (ROOT / "src").rglob("*.py"):
        found = re.search(forbidden, path.read_text(encoding="utf-8"))
        assert found is None, f"{path.name}: {found.group() if found else ''}"

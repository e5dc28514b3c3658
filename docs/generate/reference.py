"""Writes the reference pages from the code: `python docs/generate/reference.py docs/reference`.

Five pages, each from one source of truth: the commands' own --help, the fields of the config
dataclasses, the support table, the signatures and docstrings of the public classes, and errors that
are provoked and caught. In the other pages, marked parts are filled in (`reference_parts.py`).
`make docs` calls it, and a test compares its output with the pages in the repository.
"""

from __future__ import annotations

import os
import re
import socket
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from path_picture import picture
from reference_api import api_page, doc
from reference_parts import filled, in_table, options_table, pages_with_parts

from manyhands import config, errors, support
from manyhands.algorithms.registry import SPECS
from manyhands.cli.main import COMMANDS
from manyhands.engines import inline, launch
from manyhands.parallel import Parallel

_HEAD = "<!-- written by `make docs`; edit the code instead -->\n\n"
_COLUMNS = 100
LIST = "../start/train.md#which-algorithm-which-strategy"  # the one place that names them all


def main(argv: list[str]) -> int:
    if len(argv) != 1 or argv[0].startswith("-"):
        print("usage: python docs/generate/reference.py FOLDER", file=sys.stderr)
        return 2
    folder = Path(argv[0]).absolute()
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in pages().items():
        (folder / name).write_text(text, encoding="utf-8")
        print(f"wrote {folder / name}")
    drawn = folder.parent / "concepts/path-of-a-step.svg"
    drawn.write_text(picture(), encoding="utf-8")
    print(f"wrote {drawn}")
    for path in pages_with_parts(folder.parents[1]):
        text = filled(path, folder.parents[1])
        if text != path.read_text(encoding="utf-8"):
            path.write_text(text, encoding="utf-8")
            print(f"filled in {path}")
    return 0


def pages() -> dict[str, str]:
    """File name -> text of every generated page."""
    return {
        "cli.md": _HEAD + cli_page(),
        "config.md": _HEAD + config_page(),
        "support.md": _HEAD + support_page(),
        "api.md": _HEAD + api_page(),
        "errors.md": _HEAD + errors_page(),
    }


# -- commands --------------------------------------------------------------------------------------


def cli_page() -> str:
    parts = [
        "# Command line\n\nWhat each command says of itself. The names of algorithms are left out: "
        f"[here they are]({LIST}).\n"
    ]
    for command in ["", *COMMANDS]:
        title = f"manyhands {command}".strip()
        parts.append(f"## {title}\n\n```text\n{_help(command)}\n```\n")
    parts.append(
        "## Exit codes\n\n"
        "0: all went well. 1: a worker failed. 2: wrong use, or something is not installed. "
        "130: Ctrl-C. 143: SIGTERM.\nA worker that left with a code of its own, or was killed by "
        "a signal, passes that on: see\n"
        "[what happens on failure](../concepts/what-happens-on-failure.md).\n"
    )
    return "\n".join(parts)


def _help(command: str) -> str:
    words = [command, "--help"] if command else ["--help"]
    plain = {"COLUMNS": str(_COLUMNS), "NO_COLOR": "1", "TERM": "dumb", "PYTHON_COLORS": "0"}
    done = subprocess.run(
        [sys.executable, "-m", "manyhands.cli.main", *words],
        env=os.environ | plain,
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    return _same_everywhere(done.stdout).strip()


def _same_everywhere(text: str) -> str:
    """Help as every machine and every Python would print it."""
    text = re.sub(r"\b\d+ here\b", "N here", text)  # the number of cores
    rows = "\n".join(f"  {spec.name:<10} {spec.about}" for spec in SPECS.values())
    text = text.replace(rows, "  ...")
    text = re.sub(r" \(default of [^)]+\)", "", text)
    # Python 3.13 writes `-n, --workers N` for what was `-n N, --workers N`.
    return re.sub(
        r"(?m)^  (-\w) (\S+), (--[\w-]+) \2( *)",
        lambda m: f"  {m[1]}, {m[3]} {m[2]}" + " " * (len(m[4]) + len(m[2]) + 1 if m[4] else 0),
        text,
    )


# -- options of a run ------------------------------------------------------------------------------


def config_page() -> str:
    lines = [
        "# Options of a run",
        "",
        "Every option of `manyhands train`, of `manyhands.train` and of `config.toml`. On the "
        "command line",
        "`num_envs` is `--num-envs`; a switch such as `quiet` is `--quiet` or `--no-quiet`. In "
        "TOML these",
        "tables are `[run]`, and each algorithm has a table of its own name; its options are on "
        f"[its page]({LIST}).",
        "Every number is for all workers together, unless its meaning says of whom.",
        "",
    ]
    for title, names in config.GROUPS.items():
        lines += [
            f"## {title.capitalize()}",
            "",
            *options_table(config.RunConfig, names, _said()),
            "",
        ]
    lines.append("`workers` is 1 in Python and in TOML; on the command line one for each core.\n")
    return "\n".join(lines)


def _said() -> dict[str, str]:
    """In the place of what the help says of each algorithm by its name."""
    return {
        "lengths": "its page says how many",
        "defaults": f"the default of the algorithm, in [the list]({LIST})",
        "scaled": "all that do not learn from a replay",
    }


# -- support ---------------------------------------------------------------------------------------


def support_page() -> str:
    lines = ["# What runs where", ""]
    lines += [
        "`manyhands support` prints this, and which algorithm runs with which strategy (`--json` "
        "for programs).",
        f"The same is said for each algorithm [in the list]({LIST}) and on its page.",
        "",
    ]
    lines += ["## Parts of an engine", "", *_grid(support.PARTS, support.ENGINES)]
    lines += ["## Strategy and engine", "", *_grid(_together(), support.ENGINES)]
    lines += ["## How a script was started", ""]
    rows = [[f"`{how}`", engine, seen] for how, (engine, seen) in support.LAUNCHERS.items()]
    lines += in_table(["started by", "engine", "known by"], rows)
    return "\n".join(lines) + "\n"


def _together() -> dict[str, dict[str, str]]:
    """strategy -> engine -> OK or the reason."""
    return {
        f"[{s}](../strategies/{s}.md)": {e: support.on_engine(s, e) for e in support.ENGINES}
        for s in support.STRATEGIES
    }


def _grid(cells: dict[str, dict[str, str]], columns: Sequence[str]) -> list[str]:
    """A table of OK and numbers, and below it the reason for each number."""
    said = [row[column] for row in cells.values() for column in columns]
    reasons = list(dict.fromkeys(cell for cell in said if cell != support.OK))
    marks = {reason: f"({i})" for i, reason in enumerate(reasons, 1)}
    rows = [[name, *(marks.get(row[c], row[c]) for c in columns)] for name, row in cells.items()]
    below = [text for reason in reasons for text in (f"{marks[reason]} {reason}", "")]
    return [*in_table(["", *columns], rows), "", *below]


# -- errors ----------------------------------------------------------------------------------------


def errors_page() -> str:
    parts = [
        "# Errors\n\nFour kinds, all of them `manyhands.ManyhandsError`. Each says what was given, "
        "what was expected\nand what to type. The messages below were provoked when this page was "
        "written.\n"
    ]
    for kind, provoke in (
        (errors.ConfigError, _wrong_use),
        (errors.SupportError, _not_built),
        (errors.WorkerError, _worker_fails),
        (errors.CollectiveError, _workers_disagree),
    ):
        message = _message(provoke)
        parts.append(f"## {kind.__name__}\n\n{doc(kind)}\n\n```text\n{message}\n```\n")
    parts.append(
        "`WorkerError` has `rank`, `exit_code` and `what` (the worker's own traceback). What a "
        "process\nleaves behind when it ends by one of these is in\n"
        "[what happens on failure](../concepts/what-happens-on-failure.md).\n"
    )
    return "\n".join(parts)


def _message(provoke: Callable[[], Any]) -> str:
    try:
        provoke()
    except errors.ManyhandsError as error:
        text = str(error).replace(f" on {socket.gethostname()}", " on mybox")
    else:
        raise AssertionError(f"{provoke.__name__} raised nothing")
    text = re.sub(r'File ".*/', 'File "', text)
    text = re.sub(r", line \d+, in", " in", text)
    kept = [line for line in text.splitlines() if not re.fullmatch(r"[\s^~]+", line)]
    return "\n".join(kept).rstrip()


def _wrong_use() -> None:
    launch.launch(lambda: 0, workers=2)


def _not_built() -> None:
    _said_by_worker(_wrap_in_ddp, "SupportError: ", errors.SupportError)


def _wrap_in_ddp() -> None:
    Parallel().data_parallel(None)


def _worker_fails() -> None:
    inline.run(_divide, 2, 5.0)


def _divide() -> float:
    return 1 / (1 - Parallel().rank)


def _workers_disagree() -> None:
    _said_by_worker(_different_shapes, "CollectiveError: ", errors.CollectiveError)


def _different_shapes() -> None:
    par = Parallel()
    par.mean([0.0] * (2 + par.rank))


def _said_by_worker(
    function: Callable[[], Any], mark: str, kind: type[errors.ManyhandsError]
) -> None:
    """Raise again, by itself, what two workers raised."""
    try:
        inline.run(function, 2, 5.0)
    except errors.WorkerError as error:
        raise kind(error.what.partition(mark)[2]) from None


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

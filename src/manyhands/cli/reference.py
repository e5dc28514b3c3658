"""Writes the reference pages from the code: `python -m manyhands.cli.reference docs/reference`.

Five pages, each from one source of truth: the commands' own --help, the fields of the config
dataclasses, the support table, the signatures and docstrings of the public classes, and errors that
are provoked and caught. `make docs` calls it, and a test compares its output with the pages in the
repository.
"""

from __future__ import annotations

import dataclasses
import importlib.util
import inspect
import os
import re
import socket
import subprocess
import sys
import typing
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from manyhands import config, envs, errors, support
from manyhands.cli.main import COMMANDS
from manyhands.engines import inline, launch
from manyhands.engines.base import Channel, Service, WeightStore
from manyhands.engines.group import Group
from manyhands.parallel import Parallel
from manyhands.policy import Policy, load
from manyhands.run import Result, train

_HEAD = "<!-- written by `make docs`; edit the code instead -->\n\n"
_COLUMNS = 100

PARALLEL_PARTS = {
    "Place": ("device", "seed", "make_vec", "share"),
    "Data": ("gather", "all_gather", "broadcast", "mean", "sum", "max", "min", "any", "all",
             "normalize", "barrier"),
    "Models": ("sync", "average_gradients", "average_weights", "check_synced", "data_parallel"),
    "Building blocks": ("channel", "weights", "serve", "service"),
    "Around a run": ("print", "timer", "close"),
}  # fmt: skip


def main(argv: list[str]) -> int:
    if len(argv) != 1 or argv[0].startswith("-"):
        print("usage: python -m manyhands.cli.reference FOLDER", file=sys.stderr)
        return 2
    folder = Path(argv[0])
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in pages().items():
        (folder / name).write_text(text, encoding="utf-8")
        print(f"wrote {folder / name}")
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
    there = [c for c in COMMANDS if importlib.util.find_spec(f"manyhands.cli.{c}") is not None]
    parts = ["# Command line\n\nWhat each command says of itself.\n"]
    unfinished = [f"`manyhands {c}`" for c in COMMANDS if c not in there]
    if unfinished:
        parts.append(f"Named in the list, but not built yet: {', '.join(unfinished)}.\n")
    for command in ["", *there]:
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
        "TOML the",
        "first five tables below are `[run]`, and each algorithm has a table of its own name. "
        "Every number",
        "is for all workers together.",
        "",
    ]
    for title, names in config.GROUPS.items():
        lines += [f"## {title.capitalize()}", "", *_options(config.RunConfig, names), ""]
    lines.append("`workers` is 1 in Python and in TOML; on the command line one for each core.\n")
    for algorithm in support.built():
        cls = config.options_class(algorithm)
        lines += [
            f"## {algorithm}",
            "",
            f"See [{algorithm}](../algorithms/{algorithm}.md). Steps of each environment between "
            f"updates, unless\n`rollout_length` says otherwise: {cls.ROLLOUT_LENGTH}.",
            "",
            *_options(cls, config.names_of(cls)),
            "",
        ]
    return "\n".join(lines)


def _options(cls: type[Any], names: Sequence[str]) -> list[str]:
    fields = {f.name: f for f in dataclasses.fields(cls)}
    hints, texts = config.hints_of(cls), config.help_of(cls)
    rows = [[f"`{n}`", _kind(hints[n]), _default(fields[n]), texts.get(n, "")] for n in names]
    return _table(["option", "type", "default", "meaning"], rows)


def _kind(hint: Any) -> str:
    """A type in words: `float | str` is a number or a schedule."""
    members = typing.get_args(hint)
    if typing.get_origin(hint) is typing.Literal:
        return ", ".join(map(str, members))
    if typing.get_origin(hint) is tuple:
        return f"{members[0].__name__}s"
    if typing.get_origin(hint) is dict:
        return "table"
    if members:
        return " or ".join("none" if m is type(None) else m.__name__ for m in members)
    return str(hint.__name__)


def _default(f: dataclasses.Field[Any]) -> str:
    if f.default is dataclasses.MISSING:
        return "needed" if f.default_factory is dataclasses.MISSING else "empty"
    if isinstance(f.default, tuple):
        return " ".join(map(str, f.default))
    if isinstance(f.default, bool):
        return "yes" if f.default else "no"
    return "none" if f.default is None else str(f.default) or "empty"


# -- support ---------------------------------------------------------------------------------------


def support_page() -> str:
    lines = ["# What runs where", ""]
    lines += ["`manyhands support` prints these tables but the third (`--json` for programs).", ""]
    lines += ["## Parts of an engine", "", *_grid(support.PARTS, support.ENGINES)]
    lines += ["## Algorithm and strategy", "", *_grid(support.ALGORITHMS, support.STRATEGIES)]
    lines += ["## Algorithm, strategy and engine", "", *_grid(_together(), support.ENGINES)]
    lines += ["## How a script was started", ""]
    rows = [[f"`{how}`", engine, seen] for how, (engine, seen) in support.LAUNCHERS.items()]
    lines += _table(["started by", "engine", "known by"], rows)
    return "\n".join(lines) + "\n"


def _together() -> dict[str, dict[str, str]]:
    """algorithm with strategy -> engine -> OK or the reason, for all that is built."""
    return {
        f"[{a}](../algorithms/{a}.md) with [{s}](../strategies/{s}.md)": {
            e: support.why_not(a, s, e) or support.OK for e in support.ENGINES
        }
        for a in support.built()
        for s in support.strategies_of(a)
    }


def _grid(cells: dict[str, dict[str, str]], columns: Sequence[str]) -> list[str]:
    """A table of OK and numbers, and below it the reason for each number."""
    said = [row[column] for row in cells.values() for column in columns]
    reasons = list(dict.fromkeys(cell for cell in said if cell != support.OK))
    marks = {reason: f"({i})" for i, reason in enumerate(reasons, 1)}
    rows = [[name, *(marks.get(row[c], row[c]) for c in columns)] for name, row in cells.items()]
    below = [text for reason in reasons for text in (f"{marks[reason]} {reason}", "")]
    return [*_table(["", *columns], rows), "", *below]


def _table(head: list[str], rows: list[list[str]]) -> list[str]:
    return [f"| {' | '.join(row)} |" for row in (head, ["---"] * len(head), *rows)]


# -- names a program uses --------------------------------------------------------------------------


def api_page() -> str:
    parts = [
        "# Python names\n\n`train`, `load`, `Parallel`, `launch` and the errors come from "
        "`manyhands`; `check_env` and `make_vec`\nfrom `manyhands.envs`. The rest you get from "
        "these; you never make one yourself.\n",
        *_training(),
        f"## Parallel\n\n{_call('manyhands.Parallel', Parallel.__init__)}\n\n{_doc(Parallel)}\n\n"
        "Attributes: `rank`, `size`, `is_main`, `engine`, `role`, `role_rank`, `role_size`, "
        "`group`\n(a `Group` of all workers) and `seconds` (wall time of each `timer` section).\n",
    ]
    for title, names in PARALLEL_PARTS.items():
        parts.append(f"### {title}\n")
        parts += [_member(Parallel, name, "par") for name in names]
    parts.append(
        f"## launch\n\n{_call('manyhands.launch', launch.launch)}\n\n{_doc(launch.launch)}\n"
    )
    for kind, handle in (
        (Group, "group"),
        (Channel, "channel"),
        (WeightStore, "store"),
        (Service, "service"),
    ):
        parts.append(f"## {kind.__name__}\n\n{_doc(kind)}\n")
        parts += [_member(kind, name, handle) for name in _public(kind)]
    return "\n".join(parts)


def _training() -> list[str]:
    """Ready-made training, and what goes around it."""

    def entry(function: Callable[..., Any], home: str) -> str:
        return f"{_call(f'{home}.{function.__name__}', function)}\n\n{_doc(function)}\n"

    return [
        "## Training\n",
        entry(train, "manyhands"),
        entry(load, "manyhands"),
        f"`Result`: {_doc(Result)} It has `run_dir`, `summary` (all of summary.json), `solved` and "
        "`mean_return`.\n",
        f"`Policy`: {_doc(Policy)}\n",
        *(_member(Policy, name, "policy") for name in _public(Policy)),
        "## Environments\n",
        entry(envs.check_env, "manyhands.envs"),
        entry(envs.make_vec, "manyhands.envs"),
    ]


def _public(kind: type) -> list[str]:
    """Methods in the order of the source; those of the machinery have no docstring."""
    return [n for n, f in vars(kind).items() if not n.startswith("_") and inspect.isfunction(f)] + [
        n for n in ("__len__",) if n in vars(kind)
    ]


def _member(kind: type, name: str, handle: str) -> str:
    member = inspect.getattr_static(kind, name)
    if isinstance(member, property):
        return f"`{handle}.{name}`\n\n{_doc(member)}\n"
    if name == "__len__":
        return f"`len({handle})`\n\n{_doc(member)}\n"
    text = _doc(member) or _doc(getattr(Group, name, None)) or _PLAIN.get(name, "")
    return f"{_call(f'{handle}.{name}', member)}\n\n{text}\n"


_PLAIN = {
    "sum": "Element-wise sum over workers.",
    "max": "Element-wise maximum over workers.",
    "min": "Element-wise minimum over workers.",
    "all": "True on all workers if it is true on every one.",
    "close": "Let go of what this group holds.",
}


def _doc(thing: Any) -> str:
    """A docstring as Markdown: its `Args:` become a list."""
    text = inspect.cleandoc(getattr(thing, "__doc__", None) or "")
    body, _, arguments = text.partition("\nArgs:\n")
    if not arguments:
        return text
    items = re.sub(r"\n {8,}", " ", "\n" + arguments).strip("\n")
    return f"{body.rstrip()}\n\n" + re.sub(r"(?m)^ {4}([\w, ]+): ", r"- `\1`: ", items)


def _call(name: str, function: Callable[..., Any]) -> str:
    parameters = [p for p in inspect.signature(function).parameters.values() if p.name != "self"]
    words: list[str] = []
    starred = False
    for p in parameters:
        if p.kind is p.KEYWORD_ONLY and not starred:
            words.append("*")
            starred = True
        starred = starred or p.kind is p.VAR_POSITIONAL
        mark = "*" if p.kind is p.VAR_POSITIONAL else "**" if p.kind is p.VAR_KEYWORD else ""
        words.append(f"{mark}{p.name}" + ("" if p.default is p.empty else f"={p.default!r}"))
    return f"`{name}({', '.join(words)})`"


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
        parts.append(f"## {kind.__name__}\n\n{_doc(kind)}\n\n```text\n{message}\n```\n")
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

"""What is there: `manyhands doctor` on this machine, `support` in the support table, `recipes` and
`examples` in the package, `completion` in the shell."""

from __future__ import annotations

import argparse
import ast
import contextlib
import importlib.metadata
import importlib.util
import io
import json
import os
import platform
import re
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, get_args

from manyhands import __version__, devices
from manyhands.algorithms.registry import SPECS
from manyhands.config import RECIPES, RunConfig, hints_of, names_of, nearest
from manyhands.engines import ENGINES
from manyhands.engines.launch import launch
from manyhands.errors import ConfigError, ManyhandsError, install
from manyhands.support import ALGORITHMS, LAUNCHERS, OK, PARTS, STRATEGIES

# package -> the extra that brings it; "" for what always comes along
PACKAGES = {
    "torch": "",
    "gymnasium": "",
    "ray": "ray",
    "mpi4py": "mpi",
    "envpool": "envpool",
    "ale_py": "atari",
    "mujoco": "mujoco",
    "numba": "compiled",
}
_NEEDS = {"ray": "ray", "mpi": "mpi4py", "torch": "torch"}


def doctor(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(
        prog="manyhands doctor",
        description="Look at this machine and run a two-worker test of each engine found.",
    )
    parser.add_argument("--json", action="store_true", help="for programs")
    parser.add_argument("--engine", choices=ENGINES, help="test this engine only")
    options = parser.parse_args(argv)
    say = (lambda *a: None) if options.json else print
    facts: dict[str, Any] = {"machine": machine(), "packages": packages(), "engines": {}}
    for name, value in facts["machine"].items():
        say(f"{name:<10} {value}")
    say()
    for name, version in facts["packages"].items():
        say(f"{name:<10} {version or missing(name)}")
    say()
    for engine in [options.engine] if options.engine else ENGINES:
        facts["engines"][engine] = result = examine(engine)
        say(f"{engine:<10} {result['words']}")
    if options.json:
        print(json.dumps(facts, indent=2))
    broken = [e for e, r in facts["engines"].items() if r["state"] == "broken"]
    say()
    say(f"broken: {', '.join(broken)}" if broken else "all engines that are installed work")
    return 1 if broken else 0


def machine() -> dict[str, str]:
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    gpus = devices.present()
    return {
        "manyhands": __version__,
        "python": f"{platform.python_version()} on {platform.platform()}",
        "cores": str(os.cpu_count()),
        "memory": f"{memory:.0f} GiB",
        "gpus": str(gpus) if gpus else "none found (workers use the CPU)",
    }


def missing(package: str) -> str:
    extra = PACKAGES[package]
    return f"not installed; type: {install(extra) if extra else f'pip install {package}'}"


def packages() -> dict[str, str]:
    found = {}
    for name in PACKAGES:
        there = importlib.util.find_spec(name) is not None
        found[name] = importlib.metadata.version(name.replace("_", "-")) if there else ""
    return found


def examine(engine: str) -> dict[str, Any]:
    """Start two workers on the engine and let them gather and average."""
    package = _NEEDS.get(engine)
    if package is not None and importlib.util.find_spec(package) is None:
        return {"state": "missing", "words": missing(package)}
    start = time.perf_counter()
    try:
        answers = launch(probe, workers=2, engine=engine, timeout=30)
    except ManyhandsError as error:
        return {"state": "broken", "words": f"does not work: {error}"}
    seconds = time.perf_counter() - start
    if answers[0] != [[0.0, 1.0], 0.5]:
        return {"state": "broken", "words": f"gives wrong answers: {answers[0]}"}
    words = f"works: two workers met, gathered and averaged in {seconds:.1f} s"
    return {"state": "works", "seconds": round(seconds, 2), "words": words}


def probe() -> list[Any]:
    """What each worker of the self-test does."""
    from manyhands.parallel import Parallel

    par = Parallel()
    gathered = par.all_gather([float(par.rank)])[0]
    return [list(map(float, gathered)), par.mean(float(par.rank))]


# -- what runs with what ---------------------------------------------------------------------------


def support(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(
        prog="manyhands support", description="What runs with what, and why not with the rest."
    )
    parser.add_argument("--json", action="store_true", help="the same table for programs")
    options = parser.parse_args(argv)
    if options.json:
        tables = {"algorithms": ALGORITHMS, "parts": PARTS, "launchers": LAUNCHERS}
        print(json.dumps(tables, indent=2))
    else:
        print("\n".join(table()))
    return 0


def table() -> list[str]:
    wide = max(map(len, LAUNCHERS))
    return [
        "algorithm and strategy:",
        *_grid(ALGORITHMS, STRATEGIES),
        "",
        "part and engine:",
        *_grid(PARTS, ENGINES),
        "",
        "how a script was started, and the engine it gets:",
        *(f"  {how:<{wide}}  {engine}" for how, (engine, _) in LAUNCHERS.items()),
    ]


def _grid(rows: dict[str, dict[str, str]], columns: Sequence[str]) -> list[str]:
    """One line a row, OK or the number of a reason in each cell, and the reasons below."""
    width = max(map(len, rows))
    reasons: list[str] = []
    lines = ["  " + "".ljust(width) + "".join(f"  {c:>6}" for c in columns)]
    for name, cells in rows.items():
        row = "  " + name.ljust(width)
        for column in columns:
            cell = cells[column]
            if cell != OK and cell not in reasons:
                reasons.append(cell)
            mark = OK if cell == OK else f"({reasons.index(cell) + 1})"
            row += f"  {mark:>{max(6, len(column))}}"
        lines.append(row)
    return lines + [f"  ({i}) {reason}" for i, reason in enumerate(reasons, 1)]


# -- recipes and examples --------------------------------------------------------------------------


def recipes(argv: list[str]) -> int:
    files = {path.stem: path for path in sorted(RECIPES.glob("*.toml"))}
    return _list_or_show("recipe", files, argv, "manyhands train --recipe NAME")


def examples(argv: list[str]) -> int:
    package = Path(__file__).parents[1]
    folders = package / "examples", package.parents[1] / "examples"  # of a wheel, of a copy
    folder = next((f for f in folders if f.is_dir()), folders[0])
    kinds = ("*.py", "*.ipynb")
    files = {str(p.relative_to(folder)): p for kind in kinds for p in sorted(folder.rglob(kind))}
    return _list_or_show("example", files, argv, "manyhands examples NAME > FILE")


def _list_or_show(kind: str, files: dict[str, Path], argv: list[str], use: str) -> int:
    parser = argparse.ArgumentParser(
        prog=f"manyhands {kind}s",
        description=f"Without a name: which {kind}s come with the package. With one: its text. "
        f"To use it, type: {use}",
    )
    parser.add_argument("name", metavar="NAME", nargs="?", help=f"the {kind} to show")
    name = parser.parse_args(argv).name
    if name is None:
        wide = max(map(len, files), default=0)
        print("\n".join(f"{n:<{wide}}  {_about(path)}" for n, path in files.items()))
        print(f"\nto read one: manyhands {kind}s NAME      to use it: {use}")
        return 0
    if name not in files:
        raise ConfigError(f"there is no {kind} {name!r}; {nearest(name, files)}")
    print(files[name].read_text(encoding="utf-8"), end="")
    return 0


def _about(path: Path) -> str:
    """The first line of a recipe (to its colon), of a program's docstring, or of a notebook."""
    text = path.read_text(encoding="utf-8")
    if path.suffix == ".toml":
        text = text.partition(":")[0]
    elif path.suffix == ".py":
        text = ast.get_docstring(ast.parse(text)) or ""
    elif path.suffix == ".ipynb":
        text = "".join(json.loads(text)["cells"][0]["source"])
    return text.partition("\n")[0].strip("# .:")


# -- completion ------------------------------------------------------------------------------------

_COMPLETION = """\
_manyhands() {{
  local words
  case ${{COMP_WORDS[COMP_CWORD-1]}} in
{values}
    *) case $COMP_CWORD,${{COMP_WORDS[1]}} in
      1,*) words="{commands}" ;;
{options}
    esac ;;
  esac
  COMPREPLY=($(compgen -W "$words" -- "${{COMP_WORDS[COMP_CWORD]}}"))
}}
complete -o default -F _manyhands manyhands"""


def completion(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(
        prog="manyhands completion",
        description="Print what makes the Tab key complete commands, options and some of their "
        "values. Into ~/.bashrc: source <(manyhands completion bash). Into ~/.zshrc, below "
        "compinit: source <(manyhands completion zsh).",
    )
    parser.add_argument("shell", choices=("bash", "zsh"))
    if parser.parse_args(argv).shell == "zsh":
        print("autoload -U +X bashcompinit && bashcompinit")
    from manyhands.cli.main import COMMANDS

    hints = hints_of(RunConfig)
    values = {name: get_args(hints[name]) for name in hints if _is_choice(hints[name])} | {
        "engine": ENGINES,
        "strategy": STRATEGIES,
        "recipe": sorted(path.stem for path in RECIPES.glob("*.toml")),
    }
    options = {name: _options_of(name) for name in COMMANDS}
    print(
        _COMPLETION.format(
            values=_cases({f"--{k.replace('_', '-')}": v for k, v in values.items()}, 4),
            commands=" ".join(COMMANDS),
            options=_cases({f"*,{name}": words for name, words in options.items()}, 6),
        )
    )
    return 0


def _is_choice(hint: Any) -> bool:
    values = get_args(hint)
    return bool(values) and all(isinstance(value, str) for value in values)


def _options_of(command: str) -> Sequence[str]:
    """As its help shows them; `train` and `sweep` have the options of every algorithm."""
    trained: list[str] = []
    if command in ("train", "sweep"):
        parts: list[type[Any]] = [RunConfig, *(spec.options for spec in SPECS.values())]
        flags = {f"--{name.replace('_', '-')}" for part in parts for name in names_of(part)}
        trained = [*SPECS, "--config", "--recipe", *sorted(flags)]
    if command == "train":
        return trained
    from manyhands.cli.main import main

    shown = io.StringIO()
    with contextlib.redirect_stdout(shown), contextlib.suppress(SystemExit):
        main([command, "--help"])
    own = set(re.findall(r"(?m)^ +(?:-\w\b.*?, )?(--[a-z-]+)", shown.getvalue()))
    return [*trained, *sorted(own - set(trained))]


def _cases(words: dict[str, Sequence[str]], indent: int) -> str:
    rows = [f'{" " * indent}{name}) words="{" ".join(w)}" ;;' for name, w in words.items()]
    return "\n".join(rows)

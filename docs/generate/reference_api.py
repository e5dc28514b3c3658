"""The reference page of names that a program uses, from signatures and docstrings."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable
from typing import Any

import manyhands
from manyhands import envs
from manyhands.algorithms.registry import AlgorithmSpec
from manyhands.config import help_of
from manyhands.engines.base import Channel, Service, WeightStore
from manyhands.engines.group import Group
from manyhands.parallel import Parallel
from manyhands.policy import Policy
from manyhands.run import Result
from manyhands.sweeps import Swept

PARALLEL_PARTS = {
    "Place": ("device", "seed", "make_vec", "share"),
    "Data": ("gather", "all_gather", "broadcast", "mean", "sum", "max", "min", "any", "all",
             "normalize", "barrier", "group_of"),
    "Models": ("sync", "average_gradients", "average_weights", "check_synced", "data_parallel"),
    "Building blocks": ("channel", "weights", "serve", "service", "weight_server",
                        "gradient_server", "values"),
    "Around a run": ("print", "timer", "close"),
}  # fmt: skip

# What `Parallel` gives -> the name by which examples call it
_GIVEN: dict[type, str] = {
    Group: "group",
    Channel: "channel",
    WeightStore: "store",
    Service: "service",
    manyhands.WeightServer: "server",
    manyhands.GradientServer: "server",
    manyhands.SharedValues: "values",
}
# What a program makes itself
_MADE = (manyhands.Replay, manyhands.PrioritizedReplay, manyhands.ShardedReplay)


def api_page() -> str:
    parts = [
        "# Python names\n\nAll that `manyhands` offers: " + _names() + ". `check_env` and "
        "`make_vec` come from\n`manyhands.envs`. The errors have [a page of their own](errors.md); "
        "`__version__` is the version.\nWhat has no address here you get from these, and never "
        "make yourself.\n",
        *_training(),
        f"## Parallel\n\n{_call('manyhands.Parallel', Parallel.__init__)}\n\n{doc(Parallel)}\n\n"
        "Attributes: `rank`, `size`, `is_main`, `engine`, `role`, `role_rank`, `role_size`, "
        "`group`\n(a `Group` of all workers) and `seconds` (wall time of each `timer` section).\n",
    ]
    for title, names in PARALLEL_PARTS.items():
        parts.append(f"### {title}\n")
        parts += [_member(Parallel, name, "par") for name in names]
    parts += _class(manyhands.Agent, "agent", _call("manyhands.Agent", manyhands.Agent.__init__))
    parts += _class(manyhands.Run, "run", "")
    parts.append(f"## launch\n\n{_entry(manyhands.launch)}")
    for kind, handle in _GIVEN.items():
        parts += _class(kind, handle, "")
    for kind in _MADE:
        parts += _class(kind, "replay", _call(f"manyhands.{kind.__name__}", kind.__init__))
    parts.append(f"## check_actor\n\n{_entry(manyhands.check_actor)}")
    parts += _algorithm_spec()
    return "\n".join(parts)


def _algorithm_spec() -> list[str]:
    """Its fields, with the words that stand under them."""
    words = help_of(AlgorithmSpec)
    rows = [f"- `{name}`: {text}" for name, text in words.items()]
    return [
        f"## AlgorithmSpec\n\n{doc(AlgorithmSpec)}\n"
        "`manyhands train package.module:SPEC` takes one; `examples/own_algorithm.py` shows it.\n",
        *rows,
        "",
    ]


def _names() -> str:
    return ", ".join(f"`{name}`" for name in manyhands.__all__)


def _training() -> list[str]:
    """Ready-made training, and what goes around it."""
    return [
        "## Training\n",
        _entry(manyhands.train),
        _entry(manyhands.resume),
        _entry(manyhands.sweep),
        f"`Swept`: {doc(Swept)} It has `dir`, `results` (all of results.json), `table` (text), "
        "`best` (the options of the setting that came first) and `failed` (the runs that did).\n",
        _entry(manyhands.load),
        f"`Result`: {doc(Result)} It has `run_dir`, `summary` (all of summary.json), `solved` and "
        "`mean_return`; a notebook shows it with its learning curve.\n",
        _entry(manyhands.evaluate),
        "`Evaluation` has `returns`, `lengths`, `mean_return`, `std_return`, `success_rate`, and "
        "`record()` for JSON.\n",
        _entry(manyhands.plot),
        "`Plot` has `path` and `curves`: by label, a `Curve` with `x`, `mean`, `low` and `high`.\n",
        _entry(manyhands.report),
        "`Report` has `path` and `summary`.\n",
        f"`Policy`: {doc(Policy)}\n",
        *(_member(Policy, name, "policy") for name in _public(Policy)),
        "## Environments\n",
        _entry(envs.check_env, "manyhands.envs"),
        _entry(envs.make_vec, "manyhands.envs"),
    ]


def _entry(function: Callable[..., Any], home: str = "manyhands") -> str:
    return f"{_call(f'{home}.{function.__name__}', function)}\n\n{doc(function)}\n"


def _class(kind: type, handle: str, made_by: str) -> list[str]:
    words = f"{made_by}\n\n{doc(kind)}" if made_by else doc(kind)
    members = [_member(kind, name, handle) for name in _public(kind)]
    return [f"## {kind.__name__}\n\n{words}\n", *members]


def _public(kind: type) -> list[str]:
    """Methods in the order of the source; those of the machinery have no docstring."""
    return [n for n, f in vars(kind).items() if not n.startswith("_") and inspect.isfunction(f)] + [
        n for n in ("__len__",) if n in vars(kind)
    ]


def _member(kind: type, name: str, handle: str) -> str:
    member = inspect.getattr_static(kind, name)
    if isinstance(member, property):
        return f"`{handle}.{name}`\n\n{doc(member)}\n"
    if name == "__len__":
        return f"`len({handle})`\n\n{doc(member)}\n"
    text = doc(member) or doc(getattr(Group, name, None)) or _PLAIN.get(name, "")
    return f"{_call(f'{handle}.{name}', member)}\n\n{text}\n"


_PLAIN = {
    "sum": "Element-wise sum over workers.",
    "max": "Element-wise maximum over workers.",
    "min": "Element-wise minimum over workers.",
    "all": "True on all workers if it is true on every one.",
    "close": "Let go of what this group holds.",
}


def doc(thing: Any) -> str:
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

"""Programs of many tests, all of which go well, in one launch of three workers an engine."""

from __future__ import annotations

import os
from typing import Any
from unittest import mock

import agent_programs
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from once import once
from suite import suite

from manyhands import launch

WORKERS = 3
# Channels, weights and services as between hosts: on mpi here, on torch in `five_workers`.
OVER_THE_NETWORK = {"MANYHANDS_PARTS": "network"}
CALLS = {"local": 600, "inline": 300}  # of the stress; the others take longer a call
DTYPES = ["int8", "uint8", "int32", "int64", "bool", "float16", "float32", "float64"]
DISAGREEMENTS = ["key", "shape", "dtype", "mean shape", "call", "skip", "extra leaf", "deep"]


def answers(engine: str, name: str) -> list[Any]:
    """What each worker of an engine answers to one of the programs, by rank."""
    return [answer[name] for answer in all_answers(engine)]


@once
def all_answers(engine: str) -> list[dict[str, Any]]:
    with mock.patch.dict(os.environ, OVER_THE_NETWORK if engine == "mpi" else {}):
        return launch(suite, plan(engine), workers=WORKERS, engine=engine, timeout=60)


def plan(engine: str) -> list[list[Any]]:
    """(name, module:function, arguments) of each program."""
    plain = ["collectives", "subgroups", "models", "random_streams", "env_seeds"]
    found: list[list[Any]] = [[name, f"programs:{name}"] for name in plain]
    found.append(["stress", "programs:stress", CALLS.get(engine, 150), 11])
    found.append(["gather cases", "programs:gather_cases", gather_cases()])
    found += [[f"disagree: {how}", "programs:disagree", how] for how in DISAGREEMENTS]
    if engine in ("torch", "ray"):
        found.append(["data parallel", "programs:data_parallel", False])
        found.append(["data parallel, around it", "programs:data_parallel", True])
    found += parts(engine)
    if engine == "local":
        found += agents()
        found.append(["seeds alike", "programs:seeds_alike"])
    if engine in ("inline", "local"):
        found.append(["debug", "programs:debug_sites"])  # last: from then on all calls are traced
    return found


def parts(engine: str) -> list[list[Any]]:
    """Channels, weights, services, and what is made of them."""
    found: list[list[Any]] = [
        ["channel", "part_programs:channel", 12],
        ["channel full", "part_programs:channel_full"],
        ["channel empty", "part_programs:channel_empty"],
        ["weights", "part_programs:weights", 40],
        ["service", "part_programs:service"],
        ["weight versions", "async_programs:weight_versions"],
        ["other networks", "async_programs:different_networks", "weights"],
        ["room", "async_programs:put_where_there_is_room"],
        ["values", "async_programs:shared_values"],
    ]
    for way in ("memory", "sent"):
        far = way == "sent"
        found.append([f"replay, {way}", "replay_programs:actors_and_learner", 200, far])
        found.append([f"frames, {way}", "replay_programs:frames_from_afar", far])
    if engine != "inline":  # where a call is a call: nothing to wait for
        # Last, since the call that nobody waits for goes on for a while.
        found.append(["service deadline", "part_programs:service_deadline"])
    return found


def agents() -> list[list[Any]]:
    """Agents in the loops of users."""
    found: list[list[Any]] = [["agents", "agent_programs:in_roles", agent_programs.JOBS]]
    for algorithm, options in agent_programs.LEAVING.items():
        found.append(
            [f"{algorithm} is left", "agent_programs:actors_leave", algorithm, 200, options]
        )
    return found


# -- what is gathered ------------------------------------------------------------------------------


@st.composite
def leaf_specs(draw: st.DrawFn) -> dict[str, object]:
    dims = draw(st.integers(0, 4))
    rest = max(dims - 1, 0)
    return {
        "dims": dims,
        "trailing": draw(st.lists(st.integers(0, 3), min_size=rest, max_size=rest)),
        "rows": draw(st.lists(st.integers(0, 5), min_size=2, max_size=3)),
        "dtype": draw(st.sampled_from(DTYPES)),
        "torch": draw(st.booleans()),
        "seed": draw(st.integers(0, 2**16)),
    }


KEYS = st.sampled_from(["obs", "act", "a", "z9", "ü"])
tree_specs = st.recursive(
    leaf_specs(), lambda inner: st.dictionaries(KEYS, inner, max_size=3), max_leaves=5
)


def gather_cases() -> list[dict[str, Any]]:
    """Trees that hypothesis draws, always the same ones."""
    found: list[dict[str, Any]] = []

    @given(cases=st.lists(tree_specs, min_size=40, max_size=60))
    @settings(
        max_examples=3,
        deadline=None,
        database=None,
        derandomize=True,
        phases=[Phase.generate],  # they all go into one launch: none is made smaller afterwards
        suppress_health_check=list(HealthCheck),
    )
    def draw(cases: list[dict[str, Any]]) -> None:
        found.extend(cases)

    draw()
    return found

"""One contract, every engine: the collectives."""

from __future__ import annotations

import functools
from typing import Any

import programs
import pytest
from conftest import ALL_ENGINES
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from manyhands import launch
from manyhands.errors import WorkerError

pytestmark = [pytest.mark.usefixtures("nothing_left")]


WELL = ["collectives", "subgroups", "models", "random_streams", "env_seeds"]


@functools.cache
def answers(engine: str) -> list[dict[str, Any]]:
    """What three workers of an engine answer to all that is meant to go well: one launch."""
    calls = {"local": 1500, "inline": 300}.get(engine, 150)
    names: list[list[Any]] = [[name] for name in WELL]
    names.append(["stress", calls, 11])
    return launch(programs.suite, names, workers=3, engine=engine, timeout=30)


@pytest.mark.parametrize("engine", ALL_ENGINES)
def test_collectives(engine: str) -> None:
    got = [a["collectives"] for a in answers(engine)]
    assert [a["rank"] for a in got] == [0, 1, 2]
    assert {a["engine"] for a in got} == {engine}
    assert got[0]["gathered"]["rank"].tolist() == [0, 1, 2]
    assert got[1]["gathered"] is None


@pytest.mark.parametrize("engine", ALL_ENGINES)
def test_subgroups(engine: str) -> None:
    got = [a["subgroups"] for a in answers(engine)]
    assert got[0] == [[0, 2], 2, 0, 1]
    assert got[1] == [[1], None, 0, 1]
    assert got[2] == [[0, 2], 2, 1, None]


@pytest.mark.parametrize("engine", ALL_ENGINES)
def test_many_calls_with_jitter(engine: str) -> None:
    """A protocol that reuses its memory one call too early breaks within a few hundred calls."""
    assert all(a["stress"] > 0 for a in answers(engine))


@pytest.mark.parametrize("engine", ALL_ENGINES)
def test_models(engine: str) -> None:
    for answer in answers(engine):
        assert "worker 2 of 3" in answer["models"]
        assert "2.bias" in answer["models"]


@pytest.mark.parametrize("engine", ALL_ENGINES)
def test_no_two_workers_share_a_stream(engine: str) -> None:
    for values in zip(*[a["random_streams"] for a in answers(engine)], strict=True):
        assert len(set(values)) == 3


@pytest.mark.parametrize("engine", ALL_ENGINES)
def test_no_two_environments_share_a_seed(engine: str) -> None:
    starts = [x for a in answers(engine) for x in a["env_seeds"]]
    assert len(set(starts)) == 6


DTYPES = ["int8", "uint8", "int32", "int64", "bool", "float16", "float32", "float64"]


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


@pytest.mark.parametrize("engine", ALL_ENGINES)
@given(cases=st.lists(tree_specs, min_size=40, max_size=60))
@settings(
    max_examples=2,
    deadline=None,
    database=None,
    derandomize=True,
    phases=[Phase.generate],  # an example is a whole launch: look at more cases, not at smaller
    suppress_health_check=list(HealthCheck),
)
def test_gather_properties(engine: str, cases: list[dict[str, object]]) -> None:
    """Nested dicts, all dtypes, 0 to 4 dimensions, unequal and empty parts, numpy and torch."""
    wrong = launch(programs.gather_cases, cases, workers=3, engine=engine, timeout=30)
    assert wrong == [[], [], []], [cases[i] for ws in wrong for i in ws]


HOW = {
    "key": ["gather of {obs: float64[2 rows, 3]}", "gather of {reward: float64[2 rows, 3]}"],
    "shape": ["[2 rows, 3]", "[2 rows, 4]"],
    "dtype": ["float64", "float32"],
    "mean shape": ["float64[3]", "float64[4]"],
    "call": ["is mean", "is barrier"],
    "skip": ["is mean", "is sum"],
    "extra leaf": ["{a: int64[]}", "{a: int64[], b: int64[]}"],
    "deep": ["key0000", "zz: int64"],
}


@pytest.mark.parametrize("engine", ALL_ENGINES)
@pytest.mark.parametrize("how", ["key", "skip"])
def test_disagreement_names_what_each_had(engine: str, how: str) -> None:
    _check_disagreement(engine, how)


@pytest.mark.parametrize("how", sorted(set(HOW) - {"key", "skip"}))
def test_every_disagreement_on_local(how: str) -> None:
    _check_disagreement("local", how)


def _check_disagreement(engine: str, how: str) -> None:
    said = launch(programs.disagree, how, workers=2, engine=engine, timeout=20)
    for text in said:
        assert "workers disagree" in text
        assert "worker 0 of 2" in text
        assert "worker 1 of 2" in text
        for expected in HOW[how]:
            assert expected in text


@pytest.mark.parametrize("engine", ["inline", "local"])
def test_debug_tells_call_sites_apart(engine: str) -> None:
    for text in launch(programs.debug_sites, workers=2, engine=engine, timeout=20):
        assert text.count("programs.py:") == 2


@pytest.mark.parametrize("engine", ALL_ENGINES)
def test_worker_that_left_is_named_at_once(engine: str) -> None:
    with pytest.raises(WorkerError) as caught:
        launch(programs.leave_early, workers=2, engine=engine, timeout=60)
    assert "worker 1 of 2" in str(caught.value)
    assert "finished" in str(caught.value)


@pytest.mark.parametrize(
    "engine", ["torch", pytest.param("ray", marks=[pytest.mark.ray, pytest.mark.slow])]
)
def test_data_parallel_goes_through_forward(engine: str) -> None:
    assert launch(programs.data_parallel, False, workers=2, engine=engine, timeout=30) == ["", ""]
    for text in launch(programs.data_parallel, True, workers=2, engine=engine, timeout=30):
        assert "not the same on all workers" in text

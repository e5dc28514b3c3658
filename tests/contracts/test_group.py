"""One contract, every engine: the collectives."""

from __future__ import annotations

import programs
import pytest
from answers import DISAGREEMENTS, WORKERS, answers, gather_cases
from conftest import ALL_ENGINES, engine_params

from manyhands import launch
from manyhands.errors import WorkerError

pytestmark = [pytest.mark.usefixtures("nothing_left")]


@pytest.mark.parametrize("engine", ALL_ENGINES)
def test_collectives(engine: str) -> None:
    got = answers(engine, "collectives")
    assert [a["rank"] for a in got] == [0, 1, 2]
    assert {a["engine"] for a in got} == {engine}
    assert got[0]["gathered"]["rank"].tolist() == [0, 1, 2]
    assert got[1]["gathered"] is None


@pytest.mark.parametrize("engine", ALL_ENGINES)
def test_subgroups(engine: str) -> None:
    got = answers(engine, "subgroups")
    assert got[0] == [[0, 2], 2, 0, 1]
    assert got[1] == [[1], None, 0, 1]
    assert got[2] == [[0, 2], 2, 1, None]


@pytest.mark.parametrize("engine", ALL_ENGINES)
def test_many_calls_with_jitter(engine: str) -> None:
    """A protocol that reuses its memory one call too early breaks within a few hundred calls."""
    assert all(total > 0 for total in answers(engine, "stress"))


@pytest.mark.parametrize("engine", ALL_ENGINES)
def test_models(engine: str) -> None:
    for said in answers(engine, "models"):
        assert "worker 2 of 3" in said
        assert "2.bias" in said


@pytest.mark.parametrize("engine", ALL_ENGINES)
def test_no_two_workers_share_a_stream(engine: str) -> None:
    for values in zip(*answers(engine, "random_streams"), strict=True):
        assert len(set(values)) == 3


@pytest.mark.parametrize("engine", ALL_ENGINES)
def test_no_two_environments_share_a_seed(engine: str) -> None:
    starts = [x for seeds in answers(engine, "env_seeds") for x in seeds]
    assert len(set(starts)) == 6


@pytest.mark.parametrize("engine", ALL_ENGINES)
def test_gather_properties(engine: str) -> None:
    """Nested dicts, all dtypes, 0 to 4 dimensions, unequal and empty parts, numpy and torch."""
    wrong, cases = answers(engine, "gather cases"), gather_cases()
    assert len(cases) > 100
    assert wrong == [[], [], []], [cases[i] for numbers in wrong for i in numbers]


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
@pytest.mark.parametrize("how", DISAGREEMENTS)
def test_disagreement_names_what_each_had(engine: str, how: str) -> None:
    for text in answers(engine, f"disagree: {how}"):
        assert "workers disagree" in text
        assert f"worker 0 of {WORKERS}" in text
        assert f"worker 1 of {WORKERS}" in text
        for expected in HOW[how]:
            assert expected in text


@pytest.mark.parametrize("engine", ["inline", "local"])
def test_debug_tells_call_sites_apart(engine: str) -> None:
    for text in answers(engine, "debug"):
        assert text.count("programs.py:") == WORKERS


@pytest.mark.parametrize("engine", ALL_ENGINES)
def test_worker_that_left_is_named_at_once(engine: str) -> None:
    with pytest.raises(WorkerError) as caught:
        launch(programs.leave_early, workers=2, engine=engine, timeout=60)
    assert "worker 1 of 2" in str(caught.value)
    assert "finished" in str(caught.value)


@pytest.mark.parametrize("engine", engine_params("torch", "ray"))
def test_data_parallel_goes_through_forward(engine: str) -> None:
    assert answers(engine, "data parallel") == ["", "", ""]
    for text in answers(engine, "data parallel, around it"):
        assert "not the same on all workers" in text

"""One contract for Channel, WeightStore and Service, on every engine that has them."""

from __future__ import annotations

import part_programs
import pytest
from conftest import PART_ENGINES, PART_ENGINES_RAY_LATER

from manyhands import launch

pytestmark = [pytest.mark.usefixtures("nothing_left")]


@pytest.mark.parametrize("engine", PART_ENGINES)
def test_channel_delivers_everything_in_each_writers_order(engine: str) -> None:
    got = launch(part_programs.channel, 12, workers=3, engine=engine, timeout=30)[0]
    assert sorted(got) == [[w, i] for w in (1, 2) for i in range(12)]
    for writer in (1, 2):
        assert [i for w, i in got if w == writer] == list(range(12))


@pytest.mark.parametrize("engine", PART_ENGINES_RAY_LATER)
def test_channel_pushes_back_when_full(engine: str) -> None:
    said = launch(part_programs.channel_full, workers=2, engine=engine, timeout=30)[1]
    number, _, words = said.partition(" ")
    assert number == "3"
    assert "'full'" in words


@pytest.mark.parametrize("engine", PART_ENGINES_RAY_LATER)
def test_empty_channel_has_a_deadline(engine: str) -> None:
    assert "'empty'" in launch(part_programs.channel_empty, workers=2, engine=engine, timeout=30)[0]


@pytest.mark.parametrize("engine", PART_ENGINES)
def test_weights_are_whole_and_only_get_newer(engine: str) -> None:
    answers = launch(part_programs.weights, 40, workers=3, engine=engine, timeout=30)
    for seen in answers[1:]:
        assert seen == sorted(set(seen))
        assert seen[-1] == 40


@pytest.mark.parametrize("engine", PART_ENGINES)
def test_service(engine: str) -> None:
    answers = launch(part_programs.service, workers=3, engine=engine, timeout=30)
    for answer in answers:
        assert answer["total"] == 3 * (5 + 5 * 2)
        assert "the service says no" in answer["said"]["fail"]
        assert "in fail" in answer["said"]["fail"]  # the remote traceback
        assert "no method '_secret'" in answer["said"]["_secret"]
        assert "add" in answer["said"]["missing"]
        assert "cannot travel" in answer["said"]["odd"]


@pytest.mark.parametrize("engine", [e for e in PART_ENGINES if e.id != "inline"])
def test_service_calls_have_deadlines(engine: str) -> None:
    said = launch(part_programs.service_deadline, workers=2, engine=engine, timeout=30)[1]
    assert "no answer within 0.5 s" in said
    assert "'nobody'" in said


@pytest.mark.parametrize("engine", ["torch", pytest.param("mpi", marks=pytest.mark.mpi)])
def test_missing_parts_say_where_they_are(engine: str) -> None:
    for said in launch(part_programs.not_there, workers=2, engine=engine, timeout=30):
        assert len(said) == 4
        assert all("--engine local" in words for words in said)

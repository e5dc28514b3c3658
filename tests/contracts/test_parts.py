"""One contract for Channel, WeightStore and Service, on every engine."""

from __future__ import annotations

import pytest
from answers import answers
from conftest import ALL_ENGINES

pytestmark = [pytest.mark.usefixtures("nothing_left")]


@pytest.mark.parametrize("engine", ALL_ENGINES)
def test_channel_delivers_everything_in_each_writers_order(engine: str) -> None:
    got = answers(engine, "channel")[0]
    assert sorted(got) == [[w, i] for w in (1, 2) for i in range(12)]
    for writer in (1, 2):
        assert [i for w, i in got if w == writer] == list(range(12))


@pytest.mark.parametrize("engine", ALL_ENGINES)
def test_channel_pushes_back_when_full(engine: str) -> None:
    said = answers(engine, "channel full")[1]
    number, _, words = said.partition(" ")
    assert number == "3"
    assert "'full'" in words


@pytest.mark.parametrize("engine", ALL_ENGINES)
def test_empty_channel_has_a_deadline(engine: str) -> None:
    assert "'empty'" in answers(engine, "channel empty")[0]


@pytest.mark.parametrize("engine", ALL_ENGINES)
def test_weights_are_whole_and_only_get_newer(engine: str) -> None:
    for seen in answers(engine, "weights")[1:]:
        assert seen == sorted(set(seen))
        assert seen[-1] == 40


@pytest.mark.parametrize("engine", ALL_ENGINES)
def test_service(engine: str) -> None:
    for answer in answers(engine, "service"):
        assert answer["total"] == 3 * (5 + 5 * 2)
        assert "the service says no" in answer["said"]["fail"]
        assert "in fail" in answer["said"]["fail"]  # the remote traceback
        assert "no method '_secret'" in answer["said"]["_secret"]
        assert "add" in answer["said"]["missing"]
        assert "cannot travel" in answer["said"]["odd"]


@pytest.mark.parametrize("engine", [e for e in ALL_ENGINES if e.id != "inline"])
def test_service_calls_have_deadlines(engine: str) -> None:
    said = answers(engine, "service deadline")[1]
    assert "no answer within 0.5 s" in said
    assert "'nobody'" in said

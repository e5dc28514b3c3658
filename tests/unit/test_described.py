"""Errors in words, whatever an exception's own code does."""

from __future__ import annotations

from manyhands.errors import described


class Speechless(Exception):
    def __str__(self) -> str:
        raise RuntimeError("no words")


def test_its_own_words() -> None:
    assert described(ValueError("here")) == "ValueError: here"


def test_one_that_cannot_be_put_into_words() -> None:
    """It hid itself behind its own RuntimeError, and its environment with it."""
    assert described(Speechless()) == "Speechless: (it cannot be put into words: RuntimeError)"


def test_one_without_end_is_cut() -> None:
    """It would go into events.jsonl, summary.json and onto the screen."""
    said = described(ValueError("a" * 10_000_000 + "z"))
    assert len(said) < 100_000
    assert said.startswith("ValueError: aaa")
    assert said.endswith("az")

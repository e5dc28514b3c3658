"""What was skipped is said in one line, with what to type to have it."""

from __future__ import annotations

from conftest import skipped_in_one_line


def test_reasons_are_counted_the_most_frequent_first() -> None:
    chromium, wandb = "no Chromium; type: apt-get install chromium", "could not import 'wandb'"
    line = skipped_in_one_line([wandb, chromium, chromium])
    assert line == f"3 skipped (2: {chromium} | 1: {wandb})"


def test_nothing_skipped_is_nothing_said() -> None:
    assert skipped_in_one_line([]) == ""

"""`manyhands bench faults`: a real kill is timed, and what cannot be measured says why."""

from __future__ import annotations

from argparse import Namespace

import pytest

from manyhands.bench import _tools, faults
from manyhands.errors import ConfigError

pytestmark = [pytest.mark.usefixtures("nothing_left")]


def test_a_kill_is_timed() -> None:
    facts = faults.measure(Namespace(engines="local", times=1))
    row = facts["engines"]["local"]
    assert 0 < row["median_ms"] == row["worst_ms"] < 60_000  # not by the others' deadline
    assert facts["claims"][0]["measured"] == pytest.approx(100 / row["median_ms"], rel=0.01)
    assert [line.split()[0] for line in faults.table(facts)[1:2]] == ["local"]


def test_what_cannot_be_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(_tools._NEEDS, "ray", "no_such_package")
    facts = faults.measure(Namespace(engines="ray", times=1))
    assert "no_such_package is not installed" in "\n".join(faults.table(facts))
    with pytest.raises(ConfigError, match=r"--engines 'inline': engines are local"):
        faults.measure(Namespace(engines="inline", times=1))
    with pytest.raises(ConfigError, match="--times 0"):
        faults.measure(Namespace(engines="local", times=0))

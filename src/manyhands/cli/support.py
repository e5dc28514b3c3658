"""`manyhands support [--json]`: the support table."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence

from manyhands.support import ALGORITHMS, ENGINES, LAUNCHERS, OK, PARTS, STRATEGIES


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

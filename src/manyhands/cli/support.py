"""`manyhands support [--json]`: the support table."""

from __future__ import annotations

import argparse
import json

from manyhands.support import ENGINES, LAUNCHERS, OK, PARTS


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(
        prog="manyhands support", description="What runs on which engine, and why not elsewhere."
    )
    parser.add_argument("--json", action="store_true", help="the same table for programs")
    options = parser.parse_args(argv)
    if options.json:
        print(json.dumps({"parts": PARTS, "launchers": LAUNCHERS}, indent=2))
    else:
        print("\n".join(table()))
    return 0


def table() -> list[str]:
    width = max(map(len, PARTS))
    lines = ["".ljust(width) + "".join(f"{e:>8}" for e in ENGINES)]
    reasons: list[str] = []
    for part, cells in PARTS.items():
        row = part.ljust(width)
        for engine in ENGINES:
            if cells[engine] == OK:
                row += f"{OK:>8}"
            else:
                if cells[engine] not in reasons:
                    reasons.append(cells[engine])
                row += f"{f'({reasons.index(cells[engine]) + 1})':>8}"
        lines.append(row)
    lines += [f"({i}) {reason}" for i, reason in enumerate(reasons, 1)]
    wide = max(map(len, LAUNCHERS))
    lines += ["", "how a script was started, and the engine it gets:"]
    lines += [f"  {how:<{wide}}  {engine}" for how, (engine, _) in LAUNCHERS.items()]
    return lines

"""Launch a three-worker program that ends well, so many times; say what failed.

python launch_loop.py ENGINE TIMES
"""

from __future__ import annotations

import sys

from manyhands import ManyhandsError, Parallel, launch


def ends_well() -> int:
    par = Parallel()
    return int(par.sum(1))


def main(engine: str, times: int) -> int:
    failures = 0
    for i in range(times):
        try:
            found = launch(ends_well, workers=3, engine=engine)
        except ManyhandsError as error:
            found = [f"{type(error).__name__}: {error}"]
        if found != [3, 3, 3]:
            failures += 1
            print(f"launch {i}: {found}", flush=True)
    return min(failures, 100)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], int(sys.argv[2])))

"""`manyhands resume DIR`: go on with a run that was stopped, exactly where it stood."""

from __future__ import annotations

import argparse
from typing import Any

from manyhands.cli.train import whole_number

_ABOUT = """\
Go on with a run from its newest checkpoint: weights, optimiser, random numbers, normalisers and the
running episodes are as they were, and metrics and curves continue in the same folder. A run that
was stopped and resumed ends with the weights of one that was not.

examples:
  manyhands resume runs/CartPole-v1/ppo-allreduce/1-20250101-120000
  manyhands resume runs/mine --steps 2e6            train on, to two million steps in all
  manyhands resume runs/mine --target-return none   train on although it is solved
"""


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(
        prog="manyhands resume",
        description=_ABOUT,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        argument_default=argparse.SUPPRESS,  # what is not given stays as it was
    )
    add = parser.add_argument
    add("run_dir", metavar="DIR", help="the folder of the run")
    add("--steps", type=whole_number, metavar="N", help="environment steps of the whole run")
    add(
        "--target-return",
        type=_target,
        metavar="X",
        help="end as solved at this mean return; none: not before the last step",
    )
    add("--engine", help="how workers run and talk; their number stays")
    add("--timeout", type=float, metavar="S", help="seconds that a wait for workers may take")
    add("--checkpoint-seconds", type=float, metavar="S", help="seconds between checkpoints")
    add("--quiet", action="store_true", help="print nothing but errors")
    options: dict[str, Any] = vars(parser.parse_args(argv))
    run_dir = options.pop("run_dir")

    from manyhands import run
    from manyhands.engines import joined

    result = run.resume(run_dir, **options)
    if not result.worked:
        with joined.main_speaks():
            _say_finished(run_dir, result.summary)
    return 0


def _say_finished(run_dir: str, summary: dict[str, Any]) -> None:
    done = f"{summary['env_steps']:,} steps"
    if summary["solved"]:
        print(
            f"{run_dir} is solved, after {done}. To train longer, type: manyhands resume {run_dir} "
            "--target-return X (a higher one, or none)"
        )
    else:
        print(
            f"{run_dir} has finished its {done}. To train longer, type: manyhands resume {run_dir} "
            f"--steps {2 * summary['env_steps']}"
        )


def _target(text: str) -> float | None:
    return None if text == "none" else float(text)

"""`manyhands evaluate DIR`: play episodes with a trained policy."""

from __future__ import annotations

import argparse
import json
import sys
import time

from manyhands.errors import ConfigError

DESCRIPTION = """Play episodes with the policy of a run, and say how it did.

Episode i always begins from the same seed, which training has never used: the same command gives
the same answer, and more episodes begin with the same ones. Every episode that is begun is played
to its end, so that short ones count no more than long ones.
"""

EXAMPLES = """examples:
  manyhands evaluate runs/CartPole-v1/ppo-allreduce/1-20250101-120000
  manyhands evaluate RUN --episodes 1000 --seed 7        other episodes, and more of them
  manyhands evaluate RUN --stochastic                    act as in training, by chance
  manyhands evaluate RUN --json | jq .mean_return        for programs
"""


def main(argv: list[str]) -> int:
    options = _parser().parse_args(argv)
    if options.episodes < 1:
        raise ConfigError(f"--episodes {options.episodes}: at least 1 is needed")
    if options.max_length < 0:
        raise ConfigError(f"--max-length {options.max_length}: 0 (no limit) or more is needed")
    from manyhands.viewing.evaluation import evaluate

    progress = _Progress(options.episodes)
    found = evaluate(
        options.dir,
        options.episodes,
        seed=options.seed,
        deterministic=not options.stochastic,
        max_length=options.max_length,
        tell=progress.tell if sys.stderr.isatty() else None,
    )
    progress.close()
    print(json.dumps(found.record()) if options.json else found.table())
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="manyhands evaluate",
        description=DESCRIPTION,
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("dir", metavar="DIR", help="folder of a run")
    parser.add_argument("--episodes", type=int, default=100, metavar="N", help="(default: 100)")
    parser.add_argument(
        "--seed", type=int, metavar="N", help="root of the episodes' seeds (default: the run's)"
    )
    parser.add_argument(
        "--stochastic", action="store_true", help="draw actions from the policy, as in training"
    )
    parser.add_argument(
        "--max-length",
        type=int,
        default=0,
        metavar="N",
        help="cut episodes after N steps, where the environment has no end of its own (default: 0, "
        "never)",
    )
    parser.add_argument("--json", action="store_true", help="one JSON object, and nothing else")
    return parser


class _Progress:
    """One line on standard error, rewritten at most five times a second."""

    def __init__(self, episodes: int) -> None:
        self._episodes, self._last, self._open = episodes, time.perf_counter(), False

    def tell(self, ended: int, mean: float) -> None:
        now = time.perf_counter()
        if now - self._last > 0.2:
            self._last, self._open = now, True
            sys.stderr.write(f"\r\x1b[K{ended} of {self._episodes} episodes  return {mean:.2f}")
            sys.stderr.flush()

    def close(self) -> None:
        if self._open:
            sys.stderr.write("\r\x1b[K")
            sys.stderr.flush()

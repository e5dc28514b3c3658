"""`manyhands video DIR`: film a trained policy."""

from __future__ import annotations

import argparse
from pathlib import Path

from manyhands.errors import ConfigError

DESCRIPTION = """Film the policy of a run. No screen is needed.

The film is an MP4 that every browser plays (H.264), or with --gif a GIF, written into the folder of
the run unless --out says where. Its episodes are neither training's nor those of `evaluate`.
"""

EXAMPLES = """examples:
  manyhands video runs/CartPole-v1/ppo-allreduce/1-20250101-120000
  manyhands video RUN --gif --out cartpole.gif
  manyhands video RUN --episodes 3 --seed 7 --fps 15     three others, at half the speed
"""


def main(argv: list[str]) -> int:
    options = _parser().parse_args(argv)
    _check(options)
    from manyhands.viewing.video import film, go_headless

    go_headless()  # before the environment is made for the first time
    from manyhands.policy import load

    policy = load(options.dir)
    path = Path(options.out or Path(options.dir) / f"video.{'gif' if options.gif else 'mp4'}")
    played = film(
        policy,
        path,
        episodes=options.episodes,
        seed=options.seed,
        fps=options.fps,
        deterministic=not options.stochastic,
        max_length=options.max_length,
    )
    for i, episode in enumerate(played):
        print(f"episode {i}: return {episode.total:.2f}, {len(episode.actions)} steps")
    print(f"written to {path} ({path.stat().st_size / 1e6:.2f} MB)")
    return 0


def _check(options: argparse.Namespace) -> None:
    if options.episodes < 1:
        raise ConfigError(f"--episodes {options.episodes}: at least 1 is needed")
    if options.fps < 0:
        raise ConfigError(f"--fps {options.fps}: a positive number is needed")
    if options.max_length < 0:
        raise ConfigError(f"--max-length {options.max_length}: 0 (no limit) or more is needed")
    if options.gif and options.out and Path(options.out).suffix != ".gif":
        raise ConfigError(f"--gif and --out {options.out}: give a name that ends in .gif")


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="manyhands video",
        description=DESCRIPTION,
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("dir", metavar="DIR", help="folder of a run")
    parser.add_argument("--gif", action="store_true", help="a GIF instead of an MP4")
    parser.add_argument(
        "--out", metavar="FILE", help="FILE.mp4 or FILE.gif (default: video.mp4 in DIR)"
    )
    parser.add_argument(
        "--episodes", type=int, default=1, metavar="N", help="one after the other (default: 1)"
    )
    parser.add_argument(
        "--seed", type=int, metavar="N", help="root of the episodes' seeds (default: the run's)"
    )
    parser.add_argument(
        "--fps",
        type=float,
        default=0.0,
        metavar="N",
        help="pictures a second (default: what the environment says)",
    )
    parser.add_argument(
        "--stochastic", action="store_true", help="draw actions from the policy, as in training"
    )
    parser.add_argument(
        "--max-length",
        type=int,
        default=0,
        metavar="N",
        help="cut episodes after N steps (default: 0, never)",
    )
    return parser

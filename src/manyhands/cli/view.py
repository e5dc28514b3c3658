"""`manyhands evaluate`, `video`, `plot`, `report`, `watch`: look at what a run has left, or at one
that goes on."""

from __future__ import annotations

import argparse
import json
import signal
import sys
import time
from pathlib import Path

from manyhands.errors import ConfigError


def _parser(command: str, description: str, examples: str) -> argparse.ArgumentParser:
    return argparse.ArgumentParser(
        prog=f"manyhands {command}",
        description=description,
        epilog=examples,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )


def _add_policy(parser: argparse.ArgumentParser, episodes: int, words: str) -> None:
    """Which policy, and how it plays."""
    add = parser.add_argument
    add("dir", metavar="DIR", help="folder of a run")
    add("--episodes", type=int, default=episodes, metavar="N", help=words)
    add("--seed", type=int, metavar="N", help="root of the episodes' seeds (default: the run's)")
    add("--stochastic", action="store_true", help="draw actions from the policy, as in training")
    add(
        "--max-length",
        type=int,
        default=0,
        metavar="N",
        help="cut episodes after N steps, where the environment has no end of its own (default: 0, "
        "never)",
    )


def _check_policy(options: argparse.Namespace) -> None:
    if options.episodes < 1:
        raise ConfigError(f"--episodes {options.episodes}: at least 1 is needed")
    if options.max_length < 0:
        raise ConfigError(f"--max-length {options.max_length}: 0 (no limit) or more is needed")


# -- evaluate --------------------------------------------------------------------------------------

_EVALUATE = """Play episodes with the policy of a run, and say how it did.

Episode i always begins from the same seed, which training has never used: the same command gives
the same answer, and more episodes begin with the same ones. Every episode that is begun is played
to its end, so that short ones count no more than long ones.
"""

_EVALUATE_EXAMPLES = """examples:
  manyhands evaluate runs/CartPole-v1/ppo-allreduce/1-20250101-120000
  manyhands evaluate RUN --episodes 1000 --seed 7        other episodes, and more of them
  manyhands evaluate RUN --stochastic                    act as in training, by chance
  manyhands evaluate RUN --json | jq .mean_return        for programs
"""


def evaluate(argv: list[str]) -> int:
    parser = _parser("evaluate", _EVALUATE, _EVALUATE_EXAMPLES)
    _add_policy(parser, 100, "how many (default: 100)")
    parser.add_argument("--json", action="store_true", help="one JSON object, and nothing else")
    options = parser.parse_args(argv)
    _check_policy(options)
    from manyhands.viewing import evaluation

    progress = _Progress(options.episodes)
    found = evaluation.evaluate(
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


# -- video -----------------------------------------------------------------------------------------

_VIDEO = """Film the policy of a run. No screen is needed.

The film is an MP4 that every browser plays (H.264), or with --gif a GIF, written into the folder of
the run unless --out says where. Its episodes are neither training's nor those of `evaluate`.
"""

_VIDEO_EXAMPLES = """examples:
  manyhands video runs/CartPole-v1/ppo-allreduce/1-20250101-120000
  manyhands video RUN --gif --out cartpole.gif
  manyhands video RUN --episodes 3 --seed 7 --fps 15     three others, at half the speed
"""


def video(argv: list[str]) -> int:
    parser = _parser("video", _VIDEO, _VIDEO_EXAMPLES)
    _add_policy(parser, 1, "one after the other (default: 1)")
    parser.add_argument("--gif", action="store_true", help="a GIF instead of an MP4")
    parser.add_argument(
        "--out", metavar="FILE", help="FILE.mp4 or FILE.gif (default: video.mp4 in DIR)"
    )
    parser.add_argument(
        "--fps",
        type=float,
        default=0.0,
        metavar="N",
        help="pictures a second (default: what the environment says)",
    )
    options = parser.parse_args(argv)
    _check_policy(options)
    _check_video(options)
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


def _check_video(options: argparse.Namespace) -> None:
    if options.fps < 0:
        raise ConfigError(f"--fps {options.fps}: a positive number is needed")
    if options.gif and options.out and Path(options.out).suffix != ".gif":
        raise ConfigError(f"--gif and --out {options.out}: give a name that ends in .gif")


# -- plot ------------------------------------------------------------------------------------------

_PLOT = """Draw learning curves: against environment steps, and against time.

Runs that differ in nothing but their seed become one curve: the mean over seeds, a band from the
lowest to the highest, and a thin line for each. A seed that was solved early keeps its last
value. Runs that differ in anything else are curves of their own, and the legend says in what. A
single run's band holds its episodes from the 10th to the 90th percentile.
"""

_PLOT_EXAMPLES = """examples:
  manyhands plot runs/CartPole-v1/ppo-allreduce/*             all seeds as one curve
  manyhands plot runs/CartPole-v1/*/* --out cartpole.pdf      strategies compared, for a paper
  manyhands plot RUN --metric entropy --x steps               any column of metrics.csv
  manyhands plot sweeps/mine                                  all runs of a sweep, by setting
"""


def plot(argv: list[str]) -> int:
    parser = _parser("plot", _PLOT, _PLOT_EXAMPLES)
    parser.add_argument(
        "dirs", metavar="DIR", nargs="+", help="folders of runs or sweeps, finished or not"
    )
    parser.add_argument(
        "--x",
        choices=("steps", "time", "both"),
        default="both",
        help="what to draw against (default: both, side by side)",
    )
    parser.add_argument(
        "--metric",
        default="return",
        metavar="NAME",
        help="return (default), or a name of metrics.jsonl",
    )
    parser.add_argument(
        "--window",
        type=int,
        default=100,
        metavar="N",
        help="episodes in the rolling mean of returns (default: 100)",
    )
    parser.add_argument(
        "--out",
        metavar="FILE",
        help="FILE.png, .svg or .pdf (default: curves.png, in DIR if there is one DIR)",
    )
    options = parser.parse_args(argv)
    from manyhands.viewing import curves

    made = curves.plot(
        options.dirs, options.out, x=options.x, metric=options.metric, window=options.window
    )
    print(f"written to {made.path}")
    return 0


# -- report ----------------------------------------------------------------------------------------

_REPORT = """Write one HTML page about a run: numbers, learning curves, measures, maps of policy
and value over the states, an episode and its film, where the time went, workers, events, how to
repeat it. Or about a sweep: its settings, compared, their curves, and its runs.

Everything is inside the file: it can be sent, and opened without a network. Runs that failed or go
on get a page, too. More folders are compared with the first one: in the curves, and in the table of
times by number of workers.
"""

_REPORT_EXAMPLES = """examples:
  manyhands report runs/CartPole-v1/ppo-allreduce/1-20250101-120000
  manyhands report sweeps/mine                            about a sweep
  manyhands report RUN-WITH-1-WORKER RUN-WITH-2 RUN-WITH-4 --out scaling.html
"""


def report(argv: list[str]) -> int:
    parser = _parser("report", _REPORT, _REPORT_EXAMPLES)
    parser.add_argument(
        "dirs", metavar="DIR", nargs="+", help="folder of the run, and of others to compare"
    )
    parser.add_argument(
        "--out", metavar="FILE.html", help="(default: report.html in the first DIR)"
    )
    parser.add_argument("--no-video", action="store_true", help="no film of an episode")
    options = parser.parse_args(argv)
    from manyhands.viewing import report as page

    path = page.report(options.dirs, options.out, video=not options.no_video).path
    print(f"written to {path} ({path.stat().st_size / 1e6:.2f} MB)")
    return 0


# -- watch -----------------------------------------------------------------------------------------

_WATCH = """Watch runs in a browser while they go on: curves that grow, workers with their heartbeat
and what they spend their time on, lag and replay, events. Finished runs are shown, too.

The page is served to this machine alone, at an address with a secret in it, until you press Ctrl-C.
It needs no network, changes nothing in the folders, and costs the training nothing.
"""

_WATCH_EXAMPLES = """examples:
  manyhands watch runs/CartPole-v1/ppo-allreduce/1-20250101-120000
  manyhands watch runs/CartPole-v1/*/*                        several runs in the same charts
  ssh -L 8123:127.0.0.1:8123 HOST manyhands watch RUN --port 8123 --no-browser
"""


def watch(argv: list[str]) -> int:
    parser = _parser("watch", _WATCH, _WATCH_EXAMPLES)
    parser.add_argument(
        "dirs", metavar="DIR", nargs="+", help="folders of runs or sweeps, finished or not"
    )
    parser.add_argument(
        "--port", type=int, default=0, metavar="N", help="of the page (default: one that is free)"
    )
    parser.add_argument(
        "--no-browser", action="store_true", help="print the address, and open nothing"
    )
    options = parser.parse_args(argv)
    if not 0 <= options.port < 65536:
        raise ConfigError(f"--port {options.port}: a number from 0 (any free one) to 65535")
    from manyhands.viewing.watch import Watcher

    for number in (signal.SIGINT, signal.SIGTERM):  # SIGINT is ignored where a shell put us behind
        signal.signal(number, signal.default_int_handler)
    watcher = Watcher(options.dirs, options.port)
    print(f"{watcher.url}\nCtrl-C ends it", flush=True)
    watcher.serve(browser=not options.no_browser)
    return 0

"""`manyhands COMMAND ...`: find the command, run it, turn errors into one clear line."""

from __future__ import annotations

import contextlib
import difflib
import gc
import importlib
import os
import signal
import sys
import threading
import traceback
from typing import NoReturn

from manyhands import __version__, devices
from manyhands.errors import ConfigError, ManyhandsError, Stopped, WorkerError

_MAY_EXIT = ("manyhands", "argparse", "tyro")  # --help, words that are no options, signals

COMMANDS = {
    "train": "train a policy with a ready-made algorithm, on as many workers as you like",
    "resume": "continue a run or a sweep that was stopped, exactly where it stood",
    "sweep": "train with several settings and seeds, as many runs at once as there are cores",
    "evaluate": "play episodes with a trained policy",
    "video": "film a trained policy",
    "plot": "learning curves of one or many runs",
    "report": "one HTML page about a run: curves, times, pictures, configuration",
    "watch": "a page in the browser about runs that go on: curves, workers, events",
    "launch": "run your own script on N workers",
    "plan": "what N workers on given hosts would do: steps a second, by simulation",
    "recipes": "tuned runs that come with the package, for `manyhands train --recipe NAME`",
    "examples": "programs that come with the package, to read and to copy",
    "doctor": "say what works on this machine, with a two-worker test of each engine",
    "support": "what runs with what: algorithms, strategies, engines",
    "bench": "measure speeds on this machine",
    "completion": "commands and options by the Tab key, in bash and zsh",
}
# Where a command is, if not in a file of its own name in cli/
_FILES = (
    {"bench": "manyhands.bench"}
    | dict.fromkeys(("resume", "sweep"), "manyhands.cli.train")
    | dict.fromkeys(("evaluate", "video", "plot", "report", "watch"), "manyhands.cli.view")
    | dict.fromkeys(("support", "recipes", "examples", "completion"), "manyhands.cli.doctor")
)

HELP = """manyhands: run a reinforcement-learning job on everything you have

usage: manyhands COMMAND [options]        manyhands COMMAND --help explains each

{commands}

first steps:
  manyhands doctor                                    does this machine have what it takes?
  manyhands train ppo --env CartPole-v1 -n 4          ready-made PPO, four workers
  manyhands launch -n 4 train.py --lr 3e-4            your script, four workers
"""


def main(argv: list[str] | None = None) -> int:
    """Exit codes: 0 well, 1 a worker failed, 2 wrong use, 130 Ctrl-C, 138 SIGUSR1, 143 SIGTERM."""
    words = sys.argv[1:] if argv is None else argv
    try:
        return _run_and_explain(words)
    finally:
        _let_go_of_closed_streams()


def start() -> NoReturn:
    """The command itself; under mpiexec or torchrun one worker of several that run it."""
    code = main()
    # WHY: on its way out Python looks through all objects for unreachable ones, a third of a second
    # with torch. What is frozen is not looked at.
    gc.freeze()
    if not _is_worker():
        _leave_threads_behind(code)
        sys.exit(code)
    from manyhands.engines import joined

    joined.leave(code)


def _leave_threads_behind(code: int) -> None:
    """Of an environment in this process: the interpreter would wait for them for ever."""
    if threading.active_count() > 1:
        from manyhands.engines import process

        if not process.wait_for_threads(process.THREAD_SECONDS):
            _let_go_of_closed_streams()
            os._exit(code)


def _let_go_of_closed_streams() -> None:
    """Python flushes at exit, and leaves with 120 if nobody reads any more what is still there."""
    for number, stream in ((1, sys.stdout), (2, sys.stderr)):
        try:
            if stream is not None:  # as it is when the descriptor was closed from the start
                stream.flush()
        except (OSError, ValueError):
            nowhere = os.open(os.devnull, os.O_WRONLY)
            os.dup2(nowhere, number)
            os.close(nowhere)


def _run_and_explain(words: list[str]) -> int:
    try:
        return _answer(words)
    except ManyhandsError as error:
        if _is_worker() and not isinstance(error, ConfigError):
            raise  # of this worker alone: it says who it is, and ends the others too
        _say(f"manyhands: {error}")
        return error.exit_code if isinstance(error, WorkerError) else 2
    except (Stopped, KeyboardInterrupt) as stopped:
        number = stopped.number if isinstance(stopped, Stopped) else signal.SIGINT
        _say(f"\nmanyhands: stopped by {signal.Signals(number).name}{_how_to_go_on(stopped)}")
        return 128 + number
    except SystemExit as left:
        # What an environment does with code 0 would look like success.
        frame, line = list(traceback.walk_tb(left.__traceback__))[-1]
        if frame.f_globals.get("__name__", "").partition(".")[0] in _MAY_EXIT:
            raise
        where = f"{frame.f_code.co_filename}:{line} in {frame.f_code.co_name}"
        _say(f"manyhands: something called sys.exit({left.code!r}), maybe an environment: {where}")
        return 1
    except BrokenPipeError:
        # Whoever read our output has gone (`| head`): nothing to say, and nobody to say it to.
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        return 1


def _is_worker() -> bool:
    """Whether this process has met others, which mpiexec or torchrun has started beside it."""
    process = sys.modules.get("manyhands.engines.process")
    return process is not None and process.current() is not None


def _say(text: str) -> None:
    """On standard error; once, where several workers have come to the same end."""
    from manyhands.engines import joined

    if joined.is_main():
        print(text, file=sys.stderr)
    elif not _is_worker():
        joined.let_main_speak()


def _how_to_go_on(stopped: BaseException) -> str:
    """A training can be resumed; anything else has just ended."""
    words = getattr(stopped, "words", None)
    if words is not None:
        return f"; {words}"
    run_dir = getattr(stopped, "run_dir", None)
    if run_dir is None:
        return "; all workers have ended"
    shown = os.path.relpath(run_dir)
    shown = run_dir if shown.startswith("..") else shown
    step = f"{getattr(stopped, 'env_steps', 0):,}"
    return f"; the run is saved at step {step}. To continue, type: manyhands resume {shown}"


def _answer(words: list[str]) -> int:
    if not words or words[0] in ("-h", "--help", "help"):
        rows = "\n".join(f"  {name:<10} {what}" for name, what in COMMANDS.items())
        print(HELP.format(commands=rows))
        return 0 if words else 2
    if words[0] in ("-V", "--version"):
        print(f"manyhands {__version__}")
        return 0
    if words[0] in ("train", "resume"):
        # Before numpy is imported: the inline engine learns in this very process, and on small
        # networks a second BLAS thread costs more than it brings.
        for name in devices.THREAD_VARIABLES:
            os.environ.setdefault(name, "1")
    return _run(words[0], words[1:])


def _run(command: str, argv: list[str]) -> int:
    if command not in COMMANDS:
        near = difflib.get_close_matches(command, COMMANDS, 1)
        hint = f"did you mean `manyhands {near[0]}`?" if near else "type: manyhands --help"
        raise ConfigError(f"there is no command {command!r}; {hint}")
    with contextlib.suppress(FileNotFoundError):  # of a shell whose folder was removed
        if os.getcwd() not in sys.path:  # for what is one's own, as `python -m` has it
            sys.path.append(os.getcwd())
    module = importlib.import_module(_FILES.get(command, f"manyhands.cli.{command}"))
    code: int = getattr(module, command)(argv)
    return code


if __name__ == "__main__":
    start()

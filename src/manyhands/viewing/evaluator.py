"""Evaluation while a run trains, in a process and in environments of its own: nobody waits for it.

    main worker    writes the policy to a file ──► {"policy": ..., "env_steps": ...}
    evaluator      plays the same episodes each time ──► {"env_steps": ..., "returns": [...], ...}

The episodes have a branch of the seed tree that neither training nor `manyhands evaluate` uses. On
the inline engine they are played in line, at the same update every time.

One evaluation is played and one waits; a newer policy takes the place of the one that waits. The
process ends with the pipe that it reads from, so with the main worker, however that ends.
"""

from __future__ import annotations

import contextlib
import json
import os
import queue
import select
import shutil
import signal
import subprocess
import sys
import threading
import time
import traceback
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from manyhands import seeding, streams
from manyhands.config import Experiment
from manyhands.devices import THREAD_VARIABLES
from manyhands.experiment.folder import RunFolder
from manyhands.experiment.metrics import write_json
from manyhands.experiment.progress import number
from manyhands.experiment.sinks import tell
from manyhands.policy import BEST, FILE, read_policy, write_policy
from manyhands.viewing.evaluation import Evaluation, play

FOLDER = "evaluation"  # of the policies that wait; gone when the run has ended
LAST_SECONDS = 60.0  # that the last evaluation may take, or three times the longest before it
_END_SECONDS = 10.0  # for the kernel to end a process that was killed
_TRIES = 2  # of an evaluation whose process dies
_LONGEST = 100_000  # steps of an episode: one that never ends must not keep an inline run


@dataclass
class _Job:
    env_steps: int
    policy: Path
    tries: int = 0


class Evaluator:
    """What the main worker has of it: hands policies over, and takes the answers in."""

    def __init__(self, experiment: Experiment, folder: RunFolder) -> None:
        run = experiment.run
        assert folder.path is not None
        self._folder, self._path = folder, folder.path
        self._every, self._episodes = run.eval_every, run.eval_episodes
        self._seed = seeding.integer(run.seed, "evaluate while training")
        self._env, self._inline, self._quiet = run.env, run.engine == "inline", run.quiet
        self._process: _Process | None = None
        self._jobs: list[_Job] = []  # the first is played
        self._answers: list[Evaluation] = []
        self._sent = 0.0  # when the one that is played was begun; 0: it was not
        self._longest = self._limit = self._deadline = 0.0
        self._begun = self._done = 0  # environment steps of the newest that was begun, and ended
        self.best: Evaluation | None = None
        self._best_return: float | None = None
        shutil.rmtree(self._path / FOLDER, ignore_errors=True)

    # -- evaluations -----------------------------------------------------------------------------

    def look(self, steps: int, model: Any, normaliser: Any, *, now: bool = False) -> None:
        """Begin an evaluation of this policy if one is due, or `now`."""
        if steps // self._every == self._begun // self._every and not now:
            return
        if steps == self._begun and steps:
            return
        self._begun = steps
        job = _Job(steps, self._path / FOLDER / f"{steps:012d}.safetensors")
        try:
            job.policy.parent.mkdir(exist_ok=True)
            write_policy(job.policy, model, normaliser)
        except OSError as error:  # a full disk does not stop a training
            self._give_up(job, str(error))
            return
        for old in self._jobs[1:]:
            self._folder.event("evaluation_skipped", env_steps=old.env_steps)
            old.policy.unlink(missing_ok=True)
        self._jobs = [*self._jobs[:1], job]
        self._go_on()

    def take(self) -> list[Evaluation]:
        """Those that have ended since the last time."""
        self._hear(0.0)
        answers, self._answers = self._answers, []
        return answers

    def wait(self, seconds: float) -> bool:
        """Whether all have ended, after so many seconds at most; also where they have had their
        time, and are given up."""
        if not self._jobs:
            return True
        if not self._deadline:
            self._limit = max(LAST_SECONDS, 3 * self._longest)
            self._deadline = time.perf_counter() + self._limit
            if not self._quiet:
                tell(f"waiting up to {self._limit:.0f} s for the last evaluation")
        self._hear(min(seconds, max(0.0, self._deadline - time.perf_counter())))
        if self._jobs and time.perf_counter() >= self._deadline:
            late = f"not within {self._limit:.0f} s; type: manyhands evaluate {self._path}"
            for job in self._jobs:
                self._give_up(job, late)
            self._jobs = []
        return not self._jobs

    def close(self) -> None:
        """End the process, whatever it does."""
        if self._process is not None:
            self._process.close()
            self._process = None
        shutil.rmtree(self._path / FOLDER, ignore_errors=True)

    def words(self) -> str:
        """For the table at the end."""
        if self.best is None:
            return ""
        best = self.best
        return (
            f"evaluation: {best.mean_return:.2f} ± {best.std_return:.2f} at best, at step "
            f"{number(best.env_steps or 0)}; that policy is in {BEST}/"
        )

    def state(self) -> dict[str, Any]:
        """Of what has ended: an evaluation under way is begun anew in a resumed run."""
        return {"done": self._done, "best_return": self._best_return}

    def load_state(self, state: dict[str, Any]) -> None:
        self._begun = self._done = int(state["done"])
        self._best_return = state["best_return"]

    def _go_on(self) -> None:
        """Play the first job, unless it is being played."""
        if not self._jobs or self._sent:
            return
        self._sent, job = time.perf_counter(), self._jobs[0]
        job.tries += 1
        if self._inline:
            try:
                self._ended(answer(self._path, job.policy, self._episodes, self._seed))
            except Exception:
                self._ended({"error": traceback.format_exc()})
            return
        if self._process is None:
            self._process = _Process(self._path, self._episodes, self._seed)
        self._process.send({"policy": str(job.policy)})

    def _hear(self, seconds: float) -> None:
        if self._process is None or not self._jobs:
            return
        for found in self._process.answers(seconds):
            self._ended(found)
        if self._process.dead and self._jobs:
            self._died(self._process)

    def _died(self, process: _Process) -> None:
        code = process.close()
        self._process, self._sent = None, 0.0
        self._folder.event("evaluator_died", env_steps=self._jobs[0].env_steps, code=code)
        if self._jobs[0].tries == _TRIES:
            self._give_up(self._jobs.pop(0), f"its process died with code {code}")
        else:
            tell(f"the process that evaluates has died with code {code}, and is started again")
        self._go_on()

    def _ended(self, found: dict[str, Any]) -> None:
        if "error" in found:
            self._give_up(self._jobs.pop(0), str(found["error"]).strip())
        else:
            self._file(self._jobs.pop(0), found)
        self._longest = max(self._longest, time.perf_counter() - self._sent)
        self._sent = 0.0
        self._go_on()

    def _file(self, job: _Job, found: dict[str, Any]) -> None:
        ended = Evaluation(self._env, str(self._path), self._seed, deterministic=True, **found)
        ended.env_steps = self._done = job.env_steps
        ended.is_best = self._best_return is None or ended.mean_return > self._best_return
        self._folder.event("evaluation", is_best=ended.is_best, **ended.columns())
        if ended.is_best:
            self.best, self._best_return = ended, ended.mean_return
            try:
                (self._path / BEST).mkdir(exist_ok=True)
                os.replace(job.policy, self._path / BEST / FILE)
                write_json(self._path / BEST / "evaluation.json", ended.record())
            except OSError as error:
                tell(f"the best policy so far could not be written to {BEST}/: {error}")
        job.policy.unlink(missing_ok=True)
        self._answers.append(ended)

    def _give_up(self, job: _Job, reason: str) -> None:
        job.policy.unlink(missing_ok=True)
        self._folder.event("evaluation_failed", env_steps=job.env_steps, error=reason)
        tell(f"the policy of step {number(job.env_steps)} was not evaluated: {reason}")


def answer(run_dir: Path, policy: Path, episodes: int, seed: int) -> dict[str, Any]:
    """Play, and give the results as plain data."""
    with streams.given_back():
        found = play(
            read_policy(run_dir, policy), episodes, run_dir=run_dir, seed=seed, max_length=_LONGEST
        )
    return {"returns": found.returns, "lengths": found.lengths, "successes": found.successes}


# -- its process -----------------------------------------------------------------------------------


class _Process:
    """Started anew, never forked. One line of JSON to it, one line back."""

    def __init__(self, run_dir: Path, episodes: int, seed: int) -> None:
        mine = {k: v for k, v in os.environ.items() if not k.startswith("MANYHANDS_")}
        path = os.pathsep.join(part or os.getcwd() for part in sys.path)
        self._child = subprocess.Popen(
            [sys.executable, "-m", __name__, str(run_dir), str(episodes), str(seed)],
            env=mine | {"PYTHONPATH": path} | dict.fromkeys(THREAD_VARIABLES, "1"),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            start_new_session=True,  # Ctrl-C is for the run, which then ends this one
        )
        assert self._child.stdout is not None
        self._out = self._child.stdout.fileno()
        os.set_blocking(self._out, False)
        self._text = b""
        self.dead = False  # whether it has closed its side

    def send(self, job: dict[str, Any]) -> None:
        assert self._child.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # seen when the answer is asked for
            self._child.stdin.write(json.dumps(job).encode() + b"\n")
            self._child.stdin.flush()

    def answers(self, seconds: float) -> list[dict[str, Any]]:
        """What has come, after waiting so long at most."""
        if select.select([self._out], [], [], seconds)[0]:
            with contextlib.suppress(BlockingIOError):
                while data := os.read(self._out, 1 << 16):
                    self._text += data
                self.dead = True
        *lines, self._text = self._text.split(b"\n")
        return [json.loads(line) for line in lines]

    def close(self) -> int:
        """End it; its code."""
        self._child.kill()
        code = -signal.SIGKILL
        with contextlib.suppress(subprocess.TimeoutExpired):  # the kernel ends it in its own time
            code = self._child.wait(_END_SECONDS)
        for pipe in (self._child.stdin, self._child.stdout):
            assert pipe is not None
            with contextlib.suppress(OSError):
                pipe.close()
        return code


def main(argv: list[str]) -> None:
    run_dir, episodes, seed = Path(argv[0]), int(argv[1]), int(argv[2])
    with os.fdopen(os.dup(1), "w") as out:
        os.dup2(2, 1)  # what environments print must not be taken for an answer
        jobs: queue.SimpleQueue[str] = queue.SimpleQueue()
        threading.Thread(target=_read, args=(jobs,), daemon=True).start()
        while True:
            job = json.loads(jobs.get())
            try:
                found = answer(run_dir, Path(job["policy"]), episodes, seed)
            except Exception:
                found = {"error": traceback.format_exc()}
            out.write(json.dumps(found) + "\n")
            out.flush()


def _read(jobs: queue.SimpleQueue[str]) -> None:
    """In a thread of its own, so that the end of the run is seen in the middle of an episode."""
    for line in sys.stdin:
        jobs.put(line)
    os._exit(0)


if __name__ == "__main__":
    main(sys.argv[1:])

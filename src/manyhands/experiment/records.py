"""What is written down and shown while a run goes on.

All workers keep the same records, because the end of a run is decided on them; only the main
worker's are written and printed.
"""

from __future__ import annotations

import math
import signal
import sys
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any

from manyhands.config import Experiment, in_words, to_plain
from manyhands.errors import Stopped, WorkerError, described
from manyhands.experiment import checkpoint
from manyhands.experiment.bottleneck import Phases, merged
from manyhands.experiment.folder import RunFolder
from manyhands.experiment.hooks import FinishedEpisode
from manyhands.experiment.metrics import Returns
from manyhands.experiment.progress import Progress, end_table, number, start_table
from manyhands.experiment.sinks import make_sinks
from manyhands.policy import Started, network_line, save_policy

KEEP_SECONDS = 10.0  # between two writings of the policy
EPISODES = 100  # a run is solved by the mean return of so many finished episodes


class Records:
    """One worker's records.

    Args:
        experiment: what runs.
        main: whether this is the worker that writes.
        threads: of each process, for the start table.
        device: who computes where, for the start table.
        emulators: how the environments are stepped, where threads do it, for the start table.
        resumed: the "records" of the checkpoint that the run goes on from.
        peers: what is known of each worker now, for whoever watches.
        notes: what is to be said about that checkpoint.
    """

    def __init__(
        self,
        experiment: Experiment,
        *,
        main: bool,
        threads: int = 1,
        device: str = "cpu",
        emulators: str = "",
        resumed: Mapping[str, Any] | None = None,
        peers: Callable[[], list[dict[str, Any]]] = list,
        notes: Sequence[str] = (),
    ) -> None:
        run = experiment.run
        self._experiment, self._main = experiment, main
        self.returns = Returns(last=EPISODES)
        before = 0.0 if resumed is None else float(resumed["wall_seconds"])
        self._started = time.perf_counter() - before  # of all processes that worked on the run
        self._kept = self._saved = time.perf_counter()
        self._peers = peers
        self._resumed_steps = 0 if resumed is None else int(resumed["env_steps"])
        self._last_steps, self._last_time = self._resumed_steps, time.perf_counter()
        self._speed = 0.0  # environment steps a second, between the last two updates in the records
        self._last_update = (self._resumed_steps, 0, time.time())  # steps, updates, when
        self.purge_step: int | None = None  # the first step that a resumed run writes anew
        self.checkpoint_failures = 0
        # What --log-info asks for, of the last episodes that had it
        self._infos = {key: deque[float](maxlen=EPISODES) for key in run.log_info}
        self._evaluated: list[dict[str, Any]] = []  # evaluations that are in no record yet
        self._eval_note = ""
        self.restarts = 0  # workers that were started again
        self.lost_fragments = 0  # unrolls or gradients that were too old, or died with a worker
        self._not_saved = ""  # why the last checkpoint could not be written
        self.folder = RunFolder(None)
        if resumed is not None:
            self.returns.load_state(resumed["returns"])
            for key, values in resumed.get("infos", {}).items():
                self._infos[key].extend(values)
            self.purge_step = self._resumed_steps + 1
        if main:
            self._open(resumed, list(notes), device)
            self.folder.live(self._now)
        plain = to_plain(experiment)
        self._sinks = make_sinks(run, self.folder.path, plain, self.purge_step)
        self.progress = Progress(
            run.steps,
            quiet=run.quiet or not main,
            target=run.target_return,
            workers=int(run.workers),
        )
        if main:
            facts: dict[str, Any] = {"threads": threads, "device": device}
            if emulators:
                facts["environments"] = emulators
            facts["run_dir"] = self.folder.path
            if run.network and not run.quiet:
                facts["network"] = network_line(experiment)
            if resumed is not None:
                facts["resumed"] = f"at step {number(self._resumed_steps)}"
            self.progress.say(start_table(experiment, facts))

    def _open(self, resumed: Mapping[str, Any] | None, notes: list[str], device: str) -> None:
        run = self._experiment.run
        where: dict[str, Any] = {"workers": run.workers, "engine": run.engine, "device": device}
        if resumed is None:
            self.folder = RunFolder.of(self._experiment)
            self.folder.event("start", **where)
            return
        self.folder = RunFolder(run.run_dir)
        notes += self.folder.reopen(self._experiment, resumed["rows"], resumed["wall_seconds"])
        facts = {"env_steps": self._resumed_steps, "steps": run.steps}
        self.folder.event("resume", **where, **facts)
        self.note(notes)

    def _now(self) -> dict[str, Any]:
        """What live.json says; asked from another thread."""
        steps, updates, when = self._last_update
        return {
            "wall_seconds": round(self.wall_seconds, 2),
            "env_steps": steps,
            "update": updates,
            "update_age": round(time.time() - when, 2),
            "mean_return": self.returns.mean,
            "restarts": self.restarts,
            "workers": self._peers(),
        }

    @property
    def wall_seconds(self) -> float:
        return time.perf_counter() - self._started

    def started_from(self, started: Started) -> None:
        """What was taken over from the run that this one starts from, and what not."""
        run = self._experiment.run.start_from
        self.folder.event("start_from", run=run, taken=started.taken, left=started.left)
        self.progress.say(f"start from {run}: {started.words()}")

    def note(self, notes: Sequence[str]) -> None:
        """What is not as it should be after a resume: in the events, and on standard error."""
        for text in notes if self._main else ():
            self.folder.event("resume_note", text=text)
            _say(text)

    def episodes(self, steps: int, finished: Any) -> None:
        """Finished episodes of all workers: rows of (env, return, length, worker, info...)."""
        episodes = self.finished(finished)
        for episode in episodes:
            self.returns.add(episode.total_return)
            for key, value in episode.info.items():
                self._infos[key].append(value)
        self.folder.episodes(steps, self.wall_seconds, episodes)

    def _infos_of(self, values: list[float]) -> dict[str, float]:
        named = zip(self._infos, values, strict=True)
        return {key: value for key, value in named if not math.isnan(value)}

    def finished(self, rows: Any) -> list[FinishedEpisode]:
        """The same rows by name, as hooks are given them."""
        return [
            FinishedEpisode(total, int(length), int(env), int(worker), self._infos_of(values))
            for env, total, length, worker, *values in rows.tolist()
        ]

    def info_means(self) -> dict[str, float]:
        """Metrics of --log-info."""
        return {
            f"info/{key}": math.fsum(values) / len(values)
            for key, values in self._infos.items()
            if values
        }

    def _never_there(self) -> str:
        """Keys of --log-info that no finished episode had."""
        missing = [key for key, values in self._infos.items() if not values]
        if not missing or not self.returns.episodes:
            return ""
        return (
            f"log_info: no finished episode had {in_words(missing, 'or')} in the info of its last "
            "step; are they spelt as the environment spells them?"
        )

    def keep(self, model: Any, normaliser: Any, *, now: bool = False) -> None:
        """Write the policy, every few seconds: what is on disk is the last that was good."""
        due = time.perf_counter() - self._kept > KEEP_SECONDS
        if self.folder.path is None or not (now or due):
            return
        self._kept = time.perf_counter()
        try:
            save_policy(self.folder.path, model, normaliser)
        except OSError as error:
            if now:
                raise
            self.folder.event("policy_not_written", error=str(error))

    # -- checkpoints ---------------------------------------------------------------------------

    def checkpoint_due(self) -> bool:
        """Whether it is time for one. On the main worker only, so that one clock decides."""
        wait = self._experiment.run.checkpoint_seconds
        return self._main and time.perf_counter() - self._saved >= wait

    def state(self, steps: int) -> dict[str, Any]:
        """What a checkpoint keeps of the records."""
        return {
            "env_steps": steps,
            "wall_seconds": self.wall_seconds,
            "rows": self.folder.rows(),
            "returns": self.returns.state(),
            **({"infos": {k: list(v) for k, v in self._infos.items()}} if self._infos else {}),
        }

    def checkpoint(self, state: dict[str, Any], steps: int, updates: int) -> None:
        """Write a checkpoint. A disk that refuses is reported, and the training goes on."""
        began = time.perf_counter()
        if self.folder.path is None:
            return
        try:
            self.folder.sync()
            path = checkpoint.save(
                self.folder.path,
                state | {"records": self.state(steps)},
                env_steps=steps,
                update=updates,
                mean_return=self.returns.mean,
                score=self.returns.mean if self.returns.full else None,
            )
        except OSError as error:
            self._failed_to_save(steps, error)
            return
        finally:
            self._saved = time.perf_counter()
        self._not_saved = ""
        ms = round(1000 * (self._saved - began), 3)
        self.folder.event("checkpoint", env_steps=steps, name=path.name, milliseconds=ms)

    def _failed_to_save(self, steps: int, error: OSError) -> None:
        self.checkpoint_failures += 1
        self._not_saved = f"{error.strerror or error}"
        self.folder.event(
            "checkpoint_failed",
            env_steps=steps,
            error=str(error),
            checkpoint_failures=self.checkpoint_failures,
        )
        if self.checkpoint_failures.bit_count() == 1:  # 1st, 2nd, 4th, 8th: heard, not drowned in
            _say(
                f"the checkpoint at step {number(steps)} could not be written ({error}); the one "
                f"before is kept and the training goes on ({self.checkpoint_failures} failed so "
                "far)"
            )

    # -- updates and ends ----------------------------------------------------------------------

    def evaluated(self, evaluations: Sequence[Any]) -> None:
        """Evaluations that have ended: in the next record, and in view from then on."""
        for evaluation in evaluations:
            self._evaluated.append(evaluation.columns())
            self._eval_note = f"eval {evaluation.mean_return:.2f}"

    def last_evaluation(self, steps: int, updates: int, info: dict[str, float]) -> None:
        """A record of its own, for what came when the last update had been written."""
        if self._evaluated or info:
            self._write(steps, updates, info)

    def due(self, updates: int) -> bool:
        """Whether the metrics of this update are written."""
        return updates % self._experiment.run.log_every == 0

    def update(self, steps: int, updates: int, info: dict[str, float], phases: Phases) -> None:
        """One update is done."""
        if not self._main:
            return
        self._last_update = (steps, updates, time.time())
        if self.due(updates):
            now = time.perf_counter()
            self._speed = (steps - self._last_steps) / max(now - self._last_time, 1e-9)
            self._last_steps, self._last_time = steps, now
            seconds = {f"seconds/{k}": round(v, 4) for k, v in phases.totals().items()}
            failures = self.checkpoint_failures
            failed = {"checkpoint_failures": failures} if failures else {}
            self._write(steps, updates, info | seconds | failed)
        self.progress.update(
            steps,
            self.returns.mean,
            self._eval_note,
            info=info,
            phases=phases,
            resumed_steps=self._resumed_steps,
        )

    def _write(self, steps: int, updates: int, more: Mapping[str, Any]) -> None:
        """A record; of several evaluations each has one of its own, and the last is in this."""
        *before, last = [*self._evaluated] or [{}]
        self._evaluated = []
        for columns in before:
            self._record(steps, updates, columns)
        self._record(steps, updates, {**more, **last})

    def _record(self, steps: int, updates: int, more: Mapping[str, Any]) -> None:
        record = {
            "env_steps": steps,
            "update": updates,
            "wall_seconds": round(self.wall_seconds, 4),
            "steps_per_second": round(self._speed, 1),
            "episodes": self.returns.episodes,
            "mean_return": self.returns.mean,
            **more,
        }
        self.folder.metrics(record)
        self._sinks.write(record)

    def finish(
        self,
        steps: int,
        updates: int,
        solved: bool,
        phases: list[dict[str, float]],
        stopped: int = 0,
        more: str = "",
        ended: str = "",
    ) -> dict[str, Any]:
        """The run has ended well, or was asked to stop: the summary, written and shown.

        `more` is what else the strategy has to say, under the table; `ended` is why hooks have
        stopped the run.
        """
        ended = f"stopped by hooks: {ended}" if ended else "solved" if solved else "finished"
        if stopped:
            ended = f"stopped: {signal.Signals(stopped).name}"
        summary = self.folder.summary(self._facts(steps, updates) | {
            "solved": solved,
            "phase_seconds": {k: round(v, 4) for k, v in merged(phases).items()},
            "exit": ended,
        })  # fmt: skip
        self.folder.event("end", exit=ended, env_steps=steps)
        self.progress.close()
        if self._main:
            table = end_table(self._experiment, summary)
            self.progress.say("\n".join(t for t in (table, more, self._never_there()) if t))
        if self._not_saved:
            raise WorkerError(
                f"the run has ended ({ended}), but its last checkpoint could not be written: "
                f"{self._not_saved}. The policy is saved; `manyhands resume` would go on from an "
                "earlier step"
            )
        self._close()
        return summary

    def fail(self, steps: int, updates: int, error: BaseException, reason: str = "") -> None:
        """The run has ended badly: say so in the folder, whatever else happens."""
        said = reason or _said(error)
        ended = f"failed: {_condensed(said)}"
        if isinstance(error, Stopped) or said.startswith("stopped by "):
            ended = f"stopped: {(reason or str(error)).removeprefix('stopped by ')}"
        self.folder.event("fault", error=said, env_steps=steps)
        try:
            self.folder.summary(self._facts(steps, updates) | {"exit": ended})
        except OSError as fault:  # it must not hide what went wrong
            _say(f"summary.json could not be written: {fault}")
        self.progress.close()
        self._close()

    def _close(self) -> None:
        self._sinks.close()
        self.folder.close()

    def _facts(self, steps: int, updates: int) -> dict[str, Any]:
        return {
            "env_steps": steps,
            "episodes": self.returns.episodes,
            "updates": updates,
            "wall_seconds": round(self.wall_seconds, 4),
            "mean_return": self.returns.mean,
            "best_return": self.returns.best,
            "restarts": self.restarts,
            "lost_fragments": self.lost_fragments,
        }


def _said(error: BaseException) -> str:
    """The error, and who raised it where it says so: an environment, a hook."""
    notes = getattr(error, "__notes__", [])
    return " ".join([described(error).strip(), *(f"({note})" for note in notes)])


def _condensed(text: str) -> str:
    """A traceback by its first and last line: who, and what."""
    lines = text.strip().splitlines() or [""]
    return (lines[0] if len(lines) == 1 else f"{lines[0]} {lines[-1]}")[:500]


def _say(text: str) -> None:
    with suppress(OSError, ValueError):  # whoever read has gone
        print(f"manyhands: {text}", file=sys.stderr, flush=True)

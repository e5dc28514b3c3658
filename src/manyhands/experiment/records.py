"""What is written down and shown while a run goes on.

All workers keep the same records, because the end of a run is decided on them; only the main
worker's are written and printed.
"""

from __future__ import annotations

import time
from typing import Any

from manyhands.config import Experiment
from manyhands.experiment.folder import RunFolder
from manyhands.experiment.metrics import Returns
from manyhands.experiment.progress import Progress
from manyhands.experiment.report_lines import end_table, start_table
from manyhands.experiment.timing import Phases, merged
from manyhands.policy import save_policy

KEEP_SECONDS = 10.0  # between two writings of the policy
EPISODES = 100  # a run is solved by the mean return of so many finished episodes


class Records:
    def __init__(self, experiment: Experiment, *, main: bool, threads: int = 1) -> None:
        run = experiment.run
        self._experiment, self._main = experiment, main
        self.returns = Returns(last=EPISODES)
        self._started = time.perf_counter()
        self._kept = self._started
        self._last_steps, self._last_time = 0, self._started
        self.folder = RunFolder.of(experiment) if main else RunFolder(None)
        self.progress = Progress(run.steps, quiet=run.quiet or not main)
        if main:
            facts = {"threads": threads, "device": run.device, "run_dir": self.folder.path}
            self.progress.say(start_table(experiment, facts))
            self.folder.event("start", workers=run.workers, engine=run.engine)

    @property
    def wall_seconds(self) -> float:
        return time.perf_counter() - self._started

    def episodes(self, steps: int, told: Any) -> None:
        """Finished episodes of all workers: rows of (env, return, length, worker)."""
        wall = self.wall_seconds
        for env, total, length, worker in told.tolist():
            self.returns.add(total)
            self.folder.episode(steps, int(worker), int(env), total, int(length), wall)

    def keep(self, model: Any, normaliser: Any, *, now: bool = False) -> None:
        """Write the policy, every few seconds: what is on disk is the last that was good."""
        due = time.perf_counter() - self._kept > KEEP_SECONDS
        if self.folder.path is not None and (now or due):
            self._kept = time.perf_counter()
            save_policy(self.folder.path, model, normaliser)

    def update(self, steps: int, updates: int, info: dict[str, float], phases: Phases) -> None:
        """One update is done."""
        if not self._main:
            return
        if updates % self._experiment.run.log_every == 0:
            now = time.perf_counter()
            speed = (steps - self._last_steps) / max(now - self._last_time, 1e-9)
            self._last_steps, self._last_time = steps, now
            self.folder.metrics(
                {
                    "env_steps": steps,
                    "update": updates,
                    "wall_seconds": round(now - self._started, 4),
                    "steps_per_second": round(speed, 1),
                    "episodes": self.returns.episodes,
                    "mean_return": self.returns.mean,
                    **info,
                    **{f"seconds/{k}": round(v, 4) for k, v in phases.totals().items()},
                }
            )
        self.progress.update(steps, self.returns.mean)

    def finish(
        self, steps: int, updates: int, solved: bool, phases: list[dict[str, float]]
    ) -> dict[str, Any]:
        """The run has ended well: the summary, written and shown."""
        summary = self.folder.summary(self._facts(steps, updates) | {
            "solved": solved,
            "phase_seconds": {k: round(v, 4) for k, v in merged(phases).items()},
            "exit": "solved" if solved else "finished",
        })  # fmt: skip
        self.folder.event("end", exit=summary["exit"], env_steps=steps)
        self.progress.close()
        if self._main:
            self.progress.say(end_table(summary))
        self.folder.close()
        return summary

    def fail(self, steps: int, updates: int, error: BaseException) -> None:
        """The run has ended badly: say so in the folder, whatever else happens."""
        said = f"{type(error).__name__}: {error}".strip()
        self.folder.event("fault", error=said, env_steps=steps)
        self.folder.summary(self._facts(steps, updates) | {"exit": f"failed: {said[:500]}"})
        self.folder.close()
        self.progress.close()

    def _facts(self, steps: int, updates: int) -> dict[str, Any]:
        return {
            "env_steps": steps,
            "episodes": self.returns.episodes,
            "updates": updates,
            "wall_seconds": round(self.wall_seconds, 4),
            "mean_return": self.returns.mean,
            "best_return": self.returns.best,
        }

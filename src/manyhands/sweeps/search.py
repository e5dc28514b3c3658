"""Settings that Optuna draws, one after the other, in place of all combinations: `--optuna N`.

    optuna.journal      its study, in the folder of the sweep: Optuna's own tools read it, too

What has been found so far decides what is tried next (TPE), and a setting whose first seed stays
below the median of those before is given up (median pruner). A sweep that goes on takes up the
settings it had; those that come after them may differ from what they would have been.
"""

from __future__ import annotations

import json
import statistics
from pathlib import Path
from typing import Any

from manyhands.errors import needs
from manyhands.sweeps.jobs import DONE, Job
from manyhands.sweeps.plan import Plan
from manyhands.viewing import scores
from manyhands.viewing.runs import read_run

STUDY = "optuna.journal"
_TRIES = 100  # to draw a setting that is new
_FIRST = 4  # settings that are never given up
_PRUNED = "pruned"


class Search:
    """Where the runs of a sweep come from while it goes on."""

    def __init__(self, folder: Path, plan: Plan) -> None:
        optuna = load_optuna()
        optuna.logging.set_verbosity(optuna.logging.WARNING)
        storage = optuna.storages.JournalStorage(
            optuna.storages.journal.JournalFileBackend(str(folder / STUDY))
        )
        self._optuna, self._folder, self._plan = optuna, folder, plan
        self._study = optuna.create_study(
            study_name="sweep",
            storage=storage,
            load_if_exists=True,
            direction="maximize",
            sampler=optuna.samplers.TPESampler(seed=plan.base.run.seed, n_startup_trials=_FIRST),
            pruner=optuna.pruners.MedianPruner(
                n_startup_trials=_FIRST, n_warmup_steps=plan.base.run.steps // 4
            ),
        )
        self._taken: set[str] = set()  # names of folders
        self._jobs: dict[str, list[Job]] = {}  # by setting
        self._trials: dict[str, Any] = {}
        self._reported: dict[str, int] = {}  # steps
        self._over = False

    def earlier(self) -> list[Job]:
        """The runs of the settings that were drawn before the sweep was stopped."""
        found = []
        for frozen in self._study.get_trials(deepcopy=False):
            over = frozen.state.is_finished()
            trial = frozen if over else self._optuna.trial.Trial(self._study, frozen._trial_id)
            new = self._made(self._setting(trial), trial)
            for job in new:
                if frozen.state.name == "PRUNED" and not job.is_done():
                    job.state = _PRUNED
            found += new
        return found

    def more(self) -> list[Job]:
        """The runs of one more setting; none when there are enough, or when none is new."""
        for _ in range(0 if self._over or len(self._jobs) >= self._plan.optuna else _TRIES):
            trial = self._study.ask()
            setting = self._setting(trial)
            if new := self._made(setting, trial):
                return new
            value = self._value(self._jobs[_key(setting)])
            if value is None:  # it is being tried now, or has failed
                self._study.tell(trial, state=self._optuna.trial.TrialState.FAIL)
            else:
                self._study.tell(trial, value)
        self._over = True  # Optuna finds nothing new, and would be asked every second
        return []

    def gives_up(self, job: Job) -> bool:
        """Whether the setting of a run that goes on is given up; then its other runs are, too."""
        key = _key(job.trial.setting)
        trial, runs = self._trials[key], self._jobs[key]
        if job is not runs[0] or job.mean_return is None or job.pruned:
            return False
        if job.env_steps == self._reported.get(key):
            return False
        self._reported[key] = job.env_steps
        trial.report(job.mean_return, job.env_steps)
        if not trial.should_prune():
            return False
        for one in runs:
            one.pruned = True
            if one.state == "waiting":
                one.state = _PRUNED
        return True

    def ended(self, job: Job) -> None:
        """Tell Optuna, once all runs of its setting have ended."""
        key = _key(job.trial.setting)
        runs, states = self._jobs[key], self._optuna.trial.TrialState
        if any(one.state in ("waiting", "running", "stopped") for one in runs):
            return
        value = self._value(runs)
        given_up = any(one.state == _PRUNED for one in runs)
        state = states.PRUNED if given_up else states.FAIL if value is None else states.COMPLETE
        # What had failed is tried again when a sweep goes on; Optuna keeps what it heard first.
        self._study.tell(
            self._trials[key].number,
            value if state == states.COMPLETE else None,
            state=state,
            skip_if_finished=True,
        )

    def _value(self, runs: list[Job]) -> float | None:
        """Mean score of the runs that have finished."""
        done = [read_run(job.folder) for job in runs if job.state in DONE]
        found = [scores.score_of(run, self._plan.metric) for run in done]
        known = [score for score in found if score is not None]
        return statistics.mean(known) if known else None

    def _made(self, setting: dict[str, Any], trial: Any) -> list[Job]:
        """The runs of a setting that is new."""
        key = _key(setting)
        if key in self._jobs:
            return []
        made = self._plan.trials_of(setting, self._taken)
        self._jobs[key] = [Job(one, self._folder / one.name) for one in made]
        self._trials[key] = trial
        return self._jobs[key]

    def _setting(self, trial: Any) -> dict[str, Any]:
        setting = {}
        for name, values in self._plan.grid.items():
            words = [v if isinstance(v, str | int | float) else json.dumps(v) for v in values]
            setting[name] = values[words.index(trial.suggest_categorical(name, words))]
        for name, (low, high, *log) in self._plan.ranges.items():
            if isinstance(low, int) and isinstance(high, int):
                setting[name] = trial.suggest_int(name, low, high, log=bool(log))
            else:  # short enough to be typed, and for the name of a folder
                drawn = trial.suggest_float(name, low, high, log=bool(log))
                setting[name] = min(max(float(f"{drawn:.3g}"), low), high)
        return setting


def _key(setting: dict[str, Any]) -> str:
    return json.dumps(setting, sort_keys=True)


def load_optuna() -> Any:
    """SupportError unless it is installed."""
    try:
        import optuna
    except ImportError as error:
        raise needs("optuna", "optuna", error) from error
    return optuna

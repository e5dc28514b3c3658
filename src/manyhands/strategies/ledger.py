"""What an asynchronous run has done: counted by those that learn, written down by the main worker.

Every parcel is either learned from or refused, and both are counted. Several learners tell each
other after every update what they have seen, so that all decide alike when the run is over; the
main worker's word alone decides about stopping and checkpoints.
"""

from __future__ import annotations

import time
from typing import Any

import numpy as np

from manyhands.engines import stopping
from manyhands.engines.group import Group
from manyhands.experiment.records import Records
from manyhands.experiment.report_lines import number
from manyhands.math.running_stats import Moments
from manyhands.strategies.crew import Crew, Inbox, Parcel

_NUMBERS = 7  # steps, refused, lags: count, sum, min, max; the main worker's word to stop


class Ledger:
    """One learner's or server's books."""

    def __init__(self, crew: Crew, records: Records, group: Group | None = None) -> None:
        self.crew, self.records, self.group = crew, records, group
        self.steps = 0  # environment steps of all actors, refused ones included
        self.updates = 0
        self.refused = 0
        self.solved = False
        self.stopped = 0
        self.lost = 0  # parcels that died with their writer
        self.late = 0  # parcels that came when the run was over
        self.lags = np.array([0.0, 0.0, np.inf, 0.0])  # over the run: count, sum, min, max
        self.lives: dict[int, int] = {}
        self._began = time.perf_counter()
        self._before = (0, 0)  # steps and updates of earlier processes: no part of the speed
        self._clear()

    def _clear(self) -> None:
        self._numbers = np.zeros(_NUMBERS)
        self._numbers[4] = np.inf
        self._episodes: list[Any] = []

    # -- parcels -------------------------------------------------------------------------------

    def lag(self, version: int) -> int:
        return self.crew.algorithm.version - version

    def accept(self, parcel: Parcel) -> bool:
        """Count a parcel; False when it is too old to be learned from."""
        self.arrived(parcel)
        lag = self.lag(int(parcel["version"]))
        if lag > self.crew.experiment.run.max_lag:
            self.turned_away()
            return False
        self.learned(lag)
        return True

    def arrived(self, parcel: Parcel) -> None:
        """Its steps were taken and its episodes played, whatever becomes of it."""
        self.taken(parcel["steps"], parcel["episodes"])
        for name, stats in self.crew.statistics().items():
            stats.pending = stats.pending.merge(Moments.from_state(parcel["seen"][name]))
        self.count_life(parcel)

    def count_life(self, parcel: Parcel) -> None:
        """By its life a worker that was started again is known; its good-bye says it too."""
        actor, life = int(parcel["actor"]), int(parcel["life"])
        if life > self.lives.get(actor, 0):
            self.lives[actor] = life
            self.records.folder.event("restart", worker=actor, life=life)

    def taken(self, steps: int, episodes: Any) -> None:
        """Steps, and finished episodes as rows of (env, return, length, worker)."""
        self._numbers[0] += steps
        self._episodes.append(episodes)

    def turned_away(self, count: int = 1) -> None:
        """Parcels that were too old."""
        self._numbers[1] += count

    def learned(self, lag: int) -> None:
        numbers = self._numbers
        numbers[2] += 1
        numbers[3] += lag
        numbers[4], numbers[5] = min(numbers[4], lag), max(numbers[5], lag)

    # -- updates -------------------------------------------------------------------------------

    @property
    def progress(self) -> float:
        return min(1.0, self.steps / self.crew.experiment.run.steps)

    def goes_on(self) -> bool:
        """The same answer on all learners."""
        unfinished = not self.solved and self.steps < self.crew.experiment.run.steps
        return unfinished and not self.stopped

    @property
    def restarts(self) -> int:
        return sum(self.lives.values())

    def close_update(self, info: dict[str, float], inbox: Inbox | None = None) -> None:
        """Tell the other learners, count, write down; a checkpoint when it is time."""
        crew, records, numbers = self.crew, self.records, self._numbers
        several = self.group is not None and self.group.size > 1
        episodes = np.concatenate([np.zeros((0, 4)), *self._episodes])
        if several:
            assert self.group is not None
            with crew.phases("synchronisation"):
                crew.normaliser.synchronise(self.group.sum)
                numbers[6] = stopping.asked() if self.goes_on() else 0
                told = self.group.all_gather({"n": numbers[None], "e": episodes})
                all_numbers, episodes = told["n"], told["e"]
        else:
            crew.normaliser.synchronise(None)
            numbers[6] = stopping.asked()
            all_numbers = numbers[None]
        with crew.phases("logging"):
            sums = all_numbers.sum(axis=0)
            self.steps += int(sums[0])
            self.refused += int(sums[1])
            self.updates += 1
            crew.counted = (self.steps, self.updates)
            low, high = all_numbers[:, 4].min(), all_numbers[:, 5].max()
            count, total = sums[2], sums[3]
            self.lags[:2] += count, total
            self.lags[2], self.lags[3] = min(self.lags[2], low), max(self.lags[3], high)
            records.episodes(self.steps, episodes)
            self.solved = records.returns.solved(crew.experiment.run.target_return)
            if np.isfinite(low):
                lag = {"lag_min": low, "lag_mean": total / max(count, 1), "lag_max": high}
                info = info | {k: float(v) for k, v in lag.items()}
            info = info | {"refused": float(self.refused)}
            if inbox is not None:
                info = info | {"queue_fill": inbox.fill}
            records.progress.workers_are(crew.alive, self.restarts)
            records.update(self.steps, self.updates, info, crew.phases)
            records.keep(crew.algorithm.model, crew.normaliser)
        if self.goes_on():
            self.stopped = int(all_numbers[0, 6])
        self._clear()
        if records.checkpoint_due() or not self.goes_on():
            self.checkpoint()

    # -- checkpoints -----------------------------------------------------------------------------

    def checkpoint(self) -> None:
        """The main worker writes what it knows; actors begin new episodes when a run goes on."""
        if self.crew.is_main:
            with self.crew.phases("checkpoint"):
                self.records.checkpoint(self.state(), self.steps, self.updates)

    def state(self) -> dict[str, Any]:
        return {
            "algorithm": self.crew.algorithm.state(),
            "crew": {
                "steps": self.steps,
                "updates": self.updates,
                "refused": self.refused,
                "session": self.crew.session,
            },
            "normaliser": self.crew.normaliser.training_state(),
        }

    def restore(self, state: dict[str, Any]) -> None:
        """Go on from a checkpoint: the learner as it was, the actors with fresh episodes."""
        crew, kept = self.crew, state["crew"]
        crew.algorithm.load_state(state["algorithm"])
        crew.normaliser.load_training_state(state["normaliser"])
        self.steps, self.updates = int(kept["steps"]), int(kept["updates"])
        self._before = (self.steps, self.updates)
        self.refused = int(kept["refused"])
        crew.session = int(kept["session"]) + 1
        self.solved = self.records.returns.solved(crew.experiment.run.target_return)

    # -- the end ---------------------------------------------------------------------------------

    def gone(self, inbox: Inbox) -> None:
        """Everybody has said good-bye: what that says of lives, and what died with its writer."""
        self.lost = inbox.lost
        for last in inbox.left.values():
            self.count_life(last)

    def table(self, inbox: Inbox, times: dict[int, dict[str, float]]) -> str:
        """Throughput of both sides, the queue between them, and how long the learner was idle."""
        seconds = max(time.perf_counter() - self._began, 1e-9)
        crew = self.crew
        acting, idle = len(crew.acting), crew.phases.totals().get("waiting for data", 0.0)
        who = "actor" if crew.roles.ranks("actor") else "worker"
        held = [t.get("waiting for room", 0.0) for r, t in times.items() if r in crew.acting]
        blocked = sum(held) / max(1, len(held)) / seconds
        count, total, low, high = self.lags
        steps, updates = self.steps - self._before[0], self.updates - self._before[1]
        rows = [
            f"{who}s: {number(steps / seconds / max(1, acting))} steps/s each of {acting}, "
            f"{blocked:.0%} of the time waiting for room",
            f"{crew.part.role}: {number(updates / seconds)} updates/s, "
            f"{number(steps / seconds)} steps/s, idle {idle / seconds:.0%} of the time, "
            f"queue {inbox.fill:.0%} full",
            f"lag: {low if count else 0:g} at least, {total / max(count, 1):.2f} in the mean, "
            f"{high:g} at most; refused {self.refused:,}, lost {self.lost:,}",
        ]
        return "\n".join(rows)

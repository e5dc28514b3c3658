"""How far a run is: counted by those that learn, written by the main worker, kept in checkpoints.

At the end of an update the workers that count together (`context.group`) tell each other, in one
message, what they have seen, so that all decide alike when the run is over; the main worker's word
alone decides about stopping and checkpoints. What an asynchronous run is sent is either learned
from or refused, and both are counted. A checkpoint holds

    algorithm           weights, optimiser, minibatch generator
    records             returns, rows written, wall seconds
    its counters        steps, updates and so on; version 0.1.0 called them "team" in a synchronous
                        run and "crew" in an asynchronous one
    workers             synchronous, of each: environments, noise, normaliser, global generators,
                        seconds by phase, and what a strategy adds (`EveryWorker.extra`)
    normaliser, and …   asynchronous; and whatever else the strategy's `Keeper` has
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from manyhands import seeding, wire
from manyhands.collect.rollout import Rollout
from manyhands.config.resumed import tensors_stay
from manyhands.engines import stopping
from manyhands.errors import ConfigError, WorkerError
from manyhands.experiment.bottleneck import merged
from manyhands.experiment.checkpoint import difference
from manyhands.experiment.progress import number
from manyhands.experiment.records import Records
from manyhands.math.optimiser import check_weights
from manyhands.math.running_stats import Moments
from manyhands.strategies.context import Context
from manyhands.streams import global_chance, load_global_chance
from manyhands.trees import Array, parts_of

if TYPE_CHECKING:
    from manyhands.experiment.hooks import Hooks
    from manyhands.strategies.messages import Inbox, Message
    from manyhands.viewing.evaluator import Evaluator

# What one worker tells the others after an update: environment steps; rows, and those of them that
# an older policy made; messages refused; lags: how many, sum, least, most; is a checkpoint due, and
# the signal by which the run was asked to stop.
_STEPS, _ROWS, _STALE, _REFUSED, _LAGS, _LAG_SUM, _LAG_MIN, _LAG_MAX, _DUE, _STOP = range(10)


class Keeper(Protocol):
    """What a strategy adds to a checkpoint."""

    def state(self) -> dict[str, Any]: ...

    def load_state(self, state: dict[str, Any]) -> list[str]:
        """Given the whole checkpoint; what could not be restored exactly, in words."""
        ...


class RunProgress:
    """What a run has done so far, on one worker. `resumed` is the checkpoint to go on from."""

    def __init__(
        self, context: Context, records: Records, resumed: dict[str, Any] | None = None
    ) -> None:
        self.context, self.records, self.resumed = context, records, resumed
        self.steps = 0  # environment steps of all workers, those that were refused included
        self.updates = 0
        self.solved = False
        self.stopped = 0  # the signal by which the run was asked to stop
        self.refused = 0  # messages that were too old to be learned from
        self.lost = 0  # messages that died with their writer
        self.late = 0  # messages that came when the run was over
        self.lags = np.array([0.0, 0.0, np.inf, 0.0])  # over the run: count, sum, min, max
        self.restarts_of: dict[int, int] = {}  # by rank
        self._later = context.worker.later()
        self.times: list[dict[str, float]] | None = None  # by phase, of all workers
        self.table = ""  # what the strategy adds to the table at the end
        self.hooks: Hooks | None = None  # the user's own, on the main worker
        self.evaluator: Evaluator | None = None  # with --eval-every, on the main worker
        self.ended = ""  # why they have stopped the run
        self.wanted = context.changes and type(context.changes)()  # what they want changed
        self._keeper: Keeper | None = None
        self._began = time.perf_counter()
        self._before = (0, 0)  # steps and updates of earlier processes: no part of the speed
        self._clear()

    def _clear(self) -> None:
        self._numbers = np.zeros(_STOP + 1)
        self._numbers[_LAG_MIN] = np.inf
        self._episodes: list[Array] = []

    def begin(self, keeper: Keeper | None = None) -> None:
        """From the checkpoint, if there is one; if not, that of step 0 is written, so that the run
        can be resumed from the very beginning."""
        self._keeper = keeper
        if self.resumed is not None:
            with self.context.phases("starting"):
                self.restore(self.resumed)
        if self.context.started is not None:
            self.records.started_from(self.context.started)
        if self.hooks is not None:
            self.hooks.start()
        self._tell_changes()
        if self.resumed is None:
            self.checkpoint()

    # -- what happened ---------------------------------------------------------------------------

    def took(self, steps: int, episodes: Array) -> None:
        """Environment steps, and finished episodes as rows of (env, return, length, worker)."""
        self._numbers[_STEPS] += steps
        self._episodes.append(episodes)

    def lag(self, version: int) -> int:
        return self.context.algorithm.version - version

    def accept(self, message: Message) -> bool:
        """Count a message; False when it is too old to be learned from."""
        self.arrived(message)
        lag = self.lag(int(message["version"]))
        if lag > self.context.experiment.run.max_lag:
            self.refuse()
            return False
        self.learned(lag)
        return True

    def arrived(self, message: Message) -> None:
        """Its steps were taken and its episodes played, whatever becomes of it."""
        self.took(message["steps"], message["episodes"])
        for name, stats in self.context.statistics.items():
            stats.pending = stats.pending.merge(Moments.from_state(message["seen"][name]))
        self.count_restarts(message)

    def count_restarts(self, message: Message) -> None:
        """Every message, a good-bye too, says how often its sender was restarted."""
        actor, restarts = int(message["actor"]), int(message["restarts"])
        if self.is_new(actor, restarts):
            self.restarts_of[actor] = restarts
            self.records.folder.event("restart", worker=actor, life=restarts)

    def is_new(self, actor: int, restarts: int) -> bool:
        """Whether the actor that says so was restarted since it was last heard of. The first time
        that somebody comes later is none."""
        return restarts > self.restarts_of.get(actor, int(actor in self._later))

    def refuse(self, count: int = 1) -> None:
        """Messages that were too old."""
        self._numbers[_REFUSED] += count

    def learned(self, lag: int) -> None:
        numbers = self._numbers
        numbers[_LAGS] += 1
        numbers[_LAG_SUM] += lag
        numbers[_LAG_MIN] = min(numbers[_LAG_MIN], lag)
        numbers[_LAG_MAX] = max(numbers[_LAG_MAX], lag)

    # -- updates ---------------------------------------------------------------------------------

    @property
    def fraction(self) -> float:
        """How much of the run is done, from 0 to 1: what schedules look at."""
        return min(1.0, self.steps / self.context.experiment.run.steps)

    def goes_on(self) -> bool:
        """The same answer on all that count together: it depends on what all have heard alike."""
        unfinished = not self.solved and self.steps < self.context.experiment.run.steps
        return unfinished and not self.stopped and not self.ended

    @property
    def restarts(self) -> int:
        return sum(n - (rank in self._later) for rank, n in self.restarts_of.items())

    def close_update(
        self,
        info: dict[str, float],
        rollout: Rollout | None = None,
        *,
        learned: bool = True,
        inbox: Inbox | None = None,
    ) -> None:
        """Tell the others what was seen, count it, write it down; a checkpoint when it is time.

        Args:
            info: of the update; only the main worker's is written.
            rollout: what this worker has collected; not where `took` was called.
            learned: whether there was an update at all.
            inbox: where messages come from.
        """
        context, records = self.context, self.records
        if learned:
            self._check_losses(info)
        if rollout is not None:
            rows = float(rollout.valid.sum())
            self._numbers[_ROWS] += rows
            self._numbers[_STALE] += rollout.stale_share * rows
            self.took(rollout.steps, episode_rows(context, rollout.episodes))
        numbers, episodes = self._of_all()
        with context.phases("logging"):
            sums = numbers.sum(axis=0)
            self.steps += int(sums[_STEPS])
            self.refused += int(sums[_REFUSED])
            self.updates += learned
            records.episodes(self.steps, episodes)
            self.solved = records.returns.solved(context.experiment.run.target_return)
            info = info | self._facts(numbers, inbox) | records.info_means()
        evaluations = self._evaluations()
        with context.phases("logging"):
            records.evaluated(evaluations)
            if self.hooks is not None:
                self.hooks.happened(records.finished(episodes), evaluations)
                if learned:
                    self.hooks.update(self._metrics(info))
                    info |= self.hooks.recorded() if records.due(self.updates) else {}
            if not context.synchronous:
                records.progress.workers_are(context.worker.alive(), self.restarts)
            if learned:
                records.update(self.steps, self.updates, info, context.phases)
            if context.learns:
                check_weights(context.algorithm)  # the last moment: what follows is written to disk
            records.keep(context.algorithm.model, context.normaliser)
        self._tell_changes()
        # CRUCIAL: the main worker's word alone. Clocks and signals differ from worker to worker.
        if self.goes_on():
            self.stopped = int(numbers[0, _STOP])
        self._clear()
        if numbers[0, _DUE] or not self.goes_on():
            self.checkpoint()

    def _check_losses(self, info: dict[str, float]) -> None:
        """Before anything of this update is written down."""
        version = self.context.algorithm.version
        for name, value in info.items():
            if "loss" in name and not np.isfinite(value):
                raise WorkerError(
                    f"{name} of update {version} is {value}; the checkpoint on "
                    "disk is of an earlier update. A smaller learning rate may help"
                )

    def _evaluations(self, *, last: bool = False) -> list[Any]:
        """Begin an evaluation if one is due; those that have ended."""
        if self.evaluator is None:
            return []
        context = self.context
        with context.phases("evaluation"):
            self.evaluator.look(self.steps, context.algorithm.model, context.normaliser, now=last)
            return self.evaluator.take()

    def _last_evaluation(self) -> None:
        """Of the policy at the end. Workers that count together wait for it together, so that no
        wait of theirs passes its deadline."""
        context, records = self.context, self.records
        if not context.experiment.run.eval_every or self.stopped:
            return
        evaluations, waiting = self._evaluations(last=True), True
        while waiting:
            waiting = self.evaluator is not None and not self.evaluator.wait(1.0)
            if context.group is not None and context.synchronous:
                waiting = bool(context.group.exchange(waiting)[0])
        if self.evaluator is not None:
            evaluations += self.evaluator.take()
            records.evaluated(evaluations)
            if self.hooks is not None:
                self.hooks.happened([], evaluations)
            own = {} if self.hooks is None else self.hooks.recorded()
            records.last_evaluation(self.steps, self.updates, own)
            self.table = "\n".join(text for text in (self.table, self.evaluator.words()) if text)

    def _metrics(self, info: dict[str, float]) -> dict[str, Any]:
        """What hooks are shown of an update."""
        returns = self.records.returns
        return {
            "env_steps": self.steps,
            "update": self.updates,
            "episodes": returns.episodes,
            "mean_return": returns.mean,
            **info,
        }

    def _tell_changes(self) -> None:
        """What hooks have decided, on all that count together; actors hear it with the weights."""
        context = self.context
        if self.wanted is None:
            return
        said: list[Any] = [self.ended, self.wanted.state()]
        if context.group is not None:
            with context.phases("synchronisation"):
                said = context.group.exchange(said)[0]
        self.ended = said[0]
        context.take_changes(said[1])

    def _of_all(self) -> tuple[Array, Array]:
        """The numbers of all that count together, a row each, and their episodes."""
        context, numbers, group = self.context, self._numbers, self.context.group
        episodes = np.concatenate([episode_rows(context, ()), *self._episodes])
        if group is None:
            context.normaliser.synchronise(None)
            numbers[_DUE:] = self.records.checkpoint_due(), stopping.asked()
            return numbers[None], episodes
        with context.phases("synchronisation"):
            context.normaliser.synchronise(group.sum if group.size > 1 else None)
            numbers[_DUE:] = self.records.checkpoint_due(), stopping.asked()
            all_ = group.all_gather({"numbers": numbers[None], "episodes": episodes})
        return all_["numbers"], all_["episodes"]

    def _facts(self, numbers: Array, inbox: Inbox | None) -> dict[str, float]:
        """What is written of an update besides the algorithm's own numbers."""
        run, sums = self.context.experiment.run, numbers.sum(axis=0)
        if self.context.synchronous:
            stale = {"stale_share": float(sums[_STALE] / max(sums[_ROWS], 1))}
            return stale if run.collect == "episodes" else {}
        low, high = float(numbers[:, _LAG_MIN].min()), float(numbers[:, _LAG_MAX].max())
        count, total = float(sums[_LAGS]), float(sums[_LAG_SUM])
        self.lags[:2] += count, total
        self.lags[2], self.lags[3] = min(self.lags[2], low), max(self.lags[3], high)
        facts = {}
        if np.isfinite(low):
            facts = {"lag_min": low, "lag_mean": total / max(count, 1), "lag_max": high}
        facts["refused"] = float(self.refused)
        return facts if inbox is None else facts | {"queue_fill": inbox.fill}

    # -- checkpoints -----------------------------------------------------------------------------

    def checkpoint(self) -> None:
        """The main worker writes it; in a synchronous run with the state of all, who call it too.
        Asynchronous actors begin new episodes when a run is resumed, unless a keeper has theirs."""
        context = self.context
        if not (context.is_main or context.synchronous):
            return
        with context.phases("checkpoint"):
            more = {} if self._keeper is None else self._keeper.state()
            if context.is_main:
                self.records.checkpoint(self._state() | more, self.steps, self.updates)

    def _state(self) -> dict[str, Any]:
        context = self.context
        state: dict[str, Any] = {"algorithm": context.algorithm.state()}
        if self.evaluator is not None:
            state["evaluation"] = self.evaluator.state()
        if self.hooks is not None and context.changes is not None:
            state["hooks"] = {"changes": context.changes.state(), "own": self.hooks.state()}
        counts = {"steps": self.steps, "updates": self.updates}
        if context.synchronous:
            return state | {"team": counts | {"solved": self.solved}}
        counts |= {"refused": self.refused, "session": context.session}
        return state | {"crew": counts, "normaliser": context.normaliser.training_state()}

    def restore(self, state: dict[str, Any]) -> None:
        """All that count together: everything as it was at the checkpoint, but for what only a
        keeper has."""
        context = self.context
        if fault := difference(context.algorithm.state(), state["algorithm"], "algorithm"):
            raise ConfigError(
                f"the checkpoint does not fit this run: {fault}. The network, the environment or "
                "the version of manyhands differs from the one it was made with"
            )
        context.algorithm.load_state(state["algorithm"])
        counts = state["team" if context.synchronous else "crew"]
        self.steps, self.updates = int(counts["steps"]), int(counts["updates"])
        self._before = (self.steps, self.updates)
        self.solved = self.records.returns.solved(context.experiment.run.target_return)
        if not context.synchronous:
            context.normaliser.load_training_state(state["normaliser"])
            self.refused, context.session = int(counts["refused"]), int(counts["session"]) + 1
        if self.evaluator is not None and "evaluation" in state:
            self.evaluator.load_state(state["evaluation"])
        if self.wanted is not None and "hooks" in state:
            self.wanted.take(state["hooks"]["changes"])
            context.take_changes(self.wanted.state())  # before episodes are played again
            if self.hooks is not None:
                self.hooks.load_state(state["hooks"]["own"])
        if self._keeper is not None:
            self.records.note(self._keeper.load_state(state))

    # -- the end ---------------------------------------------------------------------------------

    def all_left(self, inbox: Inbox) -> None:
        """Everybody has said good-bye: where their time went, and what died with its writer."""
        context, group = self.context, self.context.group
        self.lost += inbox.lost
        for last in inbox.left.values():
            self.count_restarts(last)
        times = {rank: dict(last["phases"]) for rank, last in inbox.left.items()}
        mine = [context.phases.totals()]
        if group is not None:
            self.lost = int(group.sum(float(self.lost)))
            mine = group.exchange(mine[0])
        self.times = [*mine, *times.values()]
        self.table = self._speeds(inbox, times)

    def _speeds(self, inbox: Inbox, times: dict[int, dict[str, float]]) -> str:
        """Throughput of both sides, the queue between them, and how long the learner was idle."""
        seconds = max(time.perf_counter() - self._began, 1e-9)
        context = self.context
        # Where workers come and go, those that were there at the end.
        acting = sum(r in context.acting for r in times) or len(context.acting)
        idle = context.phases.totals().get("waiting for data", 0.0)
        who = "actor" if context.roles.ranks("actor") else "worker"
        learner = "learner" if context.part.role == who else context.part.role
        waited = [t.get("waiting for room", 0.0) for r, t in times.items() if r in context.acting]
        blocked = sum(waited) / max(1, len(waited)) / seconds
        count, total, low, high = self.lags
        steps, updates = self.steps - self._before[0], self.updates - self._before[1]
        rows = [
            f"{who}s: {number(steps / seconds / max(1, acting))} steps/s each of {acting}, "
            f"{blocked:.0%} of the time waiting for room",
            f"{learner}: {number(updates / seconds)} updates/s, "
            f"{number(steps / seconds)} steps/s, idle {idle / seconds:.0%} of the time, "
            f"queue {inbox.fill:.0%} full",
            f"lag: {low if count else 0:g} at least, {total / max(count, 1):.2f} on average, "
            f"{high:g} at most; refused {self.refused:,}, lost {self.lost:,}",
        ]
        return "\n".join(rows)

    def finish(self) -> dict[str, Any]:
        """The summary, on all workers of a synchronous run and on the main one of another."""
        context, records = self.context, self.records
        if not (context.is_main or context.synchronous):
            return {}
        records.keep(context.algorithm.model, context.normaliser, now=True)
        times = self.times
        if times is None:
            mine = context.phases.totals()
            times = [mine] if context.group is None else context.group.exchange(mine)
        more = self.table
        self._last_evaluation()
        if self.hooks is not None:
            self.hooks.end()
        records.restarts = self.restarts
        records.lost_fragments = self.refused + self.lost
        if more:
            records.folder.event("asynchronous", late=self.late, lost=self.lost,
                                 refused=self.refused, restarts=self.restarts)  # fmt: skip
        return records.finish(
            self.steps,
            self.updates,
            self.solved,
            times,
            self.stopped,
            more=self.table,
            ended=self.ended,
        )

    def fail(self, error: BaseException) -> None:
        why = stopping.reason() if isinstance(error, SystemExit) else ""
        self.records.fail(self.steps, self.updates, error, why)


class EveryWorker:
    """Keeps the state of each worker of a synchronous run."""

    def __init__(self, context: Context, collector: Any) -> None:
        assert context.group is not None
        self._context, self._group, self._collector = context, context.group, collector
        self.extra: Callable[[], dict[str, Any]] | None = None
        """What a strategy wants kept of this worker (plain data, arrays, tensors); called at the
        end of an update, on every worker."""
        self.loaded: dict[str, Any] | None = None
        """In a resumed run, what `extra` gave on this worker."""

    def state(self) -> dict[str, Any]:
        """All workers together: the state of each, on the main one."""
        mine = {
            "collector": self._collector.state(),
            "normaliser": self._context.normaliser.training_state(),
            **process_state(self._context),
            "extra": None if self.extra is None else self.extra(),
        }
        data = np.frombuffer(wire.encode(mine), np.uint8)
        parts = self._group.gather({"bytes": data, "size": np.array([len(data)])})
        if parts is None:
            return {}
        ends = np.cumsum(parts["size"])[:-1]
        return {"workers": [wire.decode(part.data) for part in np.split(parts["bytes"], ends)]}

    def load_state(self, state: dict[str, Any]) -> list[str]:
        workers, rank = state["workers"], self._group.rank
        same = len(workers) == self._group.size
        mine = workers[rank] if same else self._divided_anew(workers, state["team"]["updates"])
        self._context.normaliser.load_training_state(mine["normaliser"])
        notes = self._collector.load_state(mine["collector"])
        self.loaded = mine["extra"]
        load_process_state(self._context, mine)
        of_all = self._group.exchange(notes)
        return [f"worker {r}: {text}" for r, part in enumerate(of_all) for text in part]

    def _divided_anew(self, workers: list[dict[str, Any]], updates: int) -> dict[str, Any]:
        """This worker's state, where there were more of them or fewer.

        Environments, and the noise of actions in them, are known by their number among all: who has
        one now gets the state of whoever has had it. What belongs to a worker goes on where there
        still is one of its rank; a new one's generators begin anew.
        """
        context, before = self._context, len(workers)
        if context.experiment.run.env_backend == "torch":
            raise ConfigError(tensors_stay(before))
        run, rank = context.experiment.run, self._group.rank
        state = workers[min(rank, before - 1)] | {"phases": merged([w["phases"] for w in workers])}
        if rank >= before:
            seeding.seed_everything(run.seed, "worker", rank, updates)
            state["chance"] = global_chance()
        if not context.acts:
            return state
        acted = workers[run.workers - run.actors :]
        each, here = run.num_envs // len(acted), run.envs_per_worker
        normalisers = [worker["normaliser"] for worker in acted]
        parts = parts_of(normalisers, each, context.first_env, here)
        return state | {
            "normaliser": context.normaliser.training_state_from(parts),
            "collector": self._collector.state_from(
                [worker["collector"] for worker in acted], context.first_env
            ),
        }


def process_state(context: Context) -> dict[str, Any]:
    """Of this process: the generators that all share, and its time by phase."""
    return {"chance": global_chance(), "phases": context.phases.totals()}


def load_process_state(context: Context, state: dict[str, Any]) -> None:
    """Last of all: environments may have drawn from the generators."""
    for name, seconds in state["phases"].items():
        context.phases.add(name, seconds)
    load_global_chance(state["chance"])


def episode_rows(context: Context, episodes: Any) -> Array:
    """Finished episodes of this worker: rows of (env, return, length, worker), and what --log-info
    asks for of the last `info` of each."""
    first, rank, more = context.first_env, context.rank, len(context.experiment.run.log_info)
    rows = [[first + e.env, e.total_return, e.length, rank, *e.info] for e in episodes]
    return np.array(rows, np.float64).reshape(-1, 4 + more)

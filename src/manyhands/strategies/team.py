"""One worker's part of a run: its environments, its policy, its place in the group, its records.

A strategy is a program over a Team. Whether this worker is the one that writes is the records'
own affair.

At the end of an update all workers agree, in the message that they exchange anyway, on the main
worker's word: make a checkpoint, stop. A checkpoint holds

    algorithm   of the main worker: weights, optimiser, minibatch generator
    team        steps, updates, whether it is solved
    records     returns, rows written, wall seconds
    workers     of each: environments, noise, normaliser, global generators, seconds by phase, and
                what a strategy adds (`extra_state`)
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from manyhands import devices, wire
from manyhands.algorithms.base import Across, Algorithm, Alone
from manyhands.collect.episodes import EpisodeCollector
from manyhands.collect.rollout import Collector, Rollout
from manyhands.config import Experiment
from manyhands.engines import stopping
from manyhands.engines.base import Worker
from manyhands.engines.group import Group
from manyhands.envs import make_vec
from manyhands.envs.adapter import VecAdapter
from manyhands.envs.chance import EnvNoise
from manyhands.errors import ConfigError
from manyhands.experiment.records import Records
from manyhands.experiment.state_files import difference
from manyhands.experiment.timing import Phases
from manyhands.policy import build_model, build_normaliser
from manyhands.strategies.across import OverGroup
from manyhands.streams import global_chance, load_global_chance

_EPISODE = 4  # numbers told of an episode: env, return, length, step at which it ended


class Team:
    """Everything that one worker of a synchronous on-policy run needs."""

    def __init__(self, experiment: Experiment, worker: Worker, records: Records) -> None:
        run = experiment.run
        self.experiment, self.records = experiment, records
        self.worker = worker
        self.group: Group = worker.group
        self.phases = Phases()
        rank, size = self.group.rank, self.group.size
        # With overlap the main worker only learns: its one environment, whose number nobody else
        # has, is there for its spaces and is never stepped in training.
        self.acts = not (run.overlap and rank == 0)
        here = run.envs_per_worker if self.acts else 1
        first = here * (rank - size + run.actors) if self.acts else run.num_envs
        self.actors = self.group.subgroup(range(size - run.actors, size)) if run.overlap else None
        envs = make_vec(
            run.env,
            here,
            backend=run.env_backend,  # type: ignore[arg-type]  # validate.py has checked it
            seed=run.seed,
            worker=rank,
            box_actions=run.box_actions,
            **run.env_kwargs,
        )
        envs.number_from(first)
        self.first_env = first
        self.algorithm = self._algorithm(envs)
        self.normaliser = build_normaliser(experiment, envs.observation_space)
        self.collector = self._collector(envs, EnvNoise(run.seed, first, here))
        self.across: Across = OverGroup(self.group, self.phases) if size > 1 else Alone()
        self.steps = 0  # environment steps of all workers
        self.updates = 0
        self.solved = False
        self.stopped = 0  # the signal by which the run was asked to stop
        self.extra_state: Callable[[], dict[str, Any]] | None = None
        """What a strategy wants kept of this worker (plain data, arrays, tensors); called at the
        end of an update, on every worker."""
        self.loaded_extra: dict[str, Any] | None = None
        """In a resumed run, what `extra_state` gave on this worker."""

    def _algorithm(self, envs: Any) -> Algorithm:
        model = build_model(self.experiment, envs.observation_space, envs.action_space)
        kind: type[Algorithm] = self.experiment.spec.load()
        run = self.experiment.run
        device = devices.to_compute_on(devices.seat(run.device, self.worker.place).device)
        return kind(model, self.experiment.options, seed=run.seed, device=device)

    def _collector(self, envs: VecAdapter, noise: EnvNoise) -> Collector | EpisodeCollector:
        run, actor = self.experiment.run, self.algorithm.actor
        actors = self.actors or self.group
        if run.collect == "steps":
            return Collector(envs, actor, run.rollout_length, noise, self.normaliser)
        return EpisodeCollector(
            envs,
            actor,
            run.batch_steps,
            noise,
            self.normaliser,
            rank=actors.rank,
            size=actors.size,
            exchange=self._exchange,
        )

    def _exchange(self, value: Any) -> list[Any]:
        with self.phases("synchronisation"):
            return (self.actors or self.group).exchange(value)

    @property
    def progress(self) -> float:
        """How much of the run is done, from 0 to 1: what schedules look at."""
        return min(1.0, self.steps / self.experiment.run.steps)

    def goes_on(self) -> bool:
        """The same answer on all workers: it depends on what all have been told alike."""
        unfinished = not self.solved and self.steps < self.experiment.run.steps
        return unfinished and not self.stopped

    def share_weights(self) -> None:
        """The main worker's weights, on all."""
        flat = self.algorithm.flat.data
        if self.group.size > 1:
            flat.copy_(self.worker.hand_out(flat))

    def check_replicas(self) -> None:
        if self.group.size > 1:
            with self.phases("synchronisation"):
                self.group.check_equal("replicas", {"weights": self.algorithm.flat.data})

    def close_update(
        self, rollout: Rollout | None, info: dict[str, float], *, learned: bool = True
    ) -> None:
        """Tell all workers what was seen, count it, write it down; a checkpoint when it is time.

        Args:
            rollout: None where this worker has not acted.
            info: of the update; only the main worker's is written.
            learned: whether there was an update at all.
        """
        with self.phases("synchronisation"):
            total = self.group.sum if self.group.size > 1 else None
            self.normaliser.synchronise(total)
            due, stop = self.records.checkpoint_due(), stopping.asked()
            told = self.group.all_gather(
                {
                    "numbers": np.array([[*_seen(rollout), due, stop]]),
                    "episodes": self._told(rollout),
                }
            )
        numbers = told["numbers"]  # [workers, 5]
        with self.phases("logging"):
            self.steps += int(numbers[:, 0].sum())
            self.updates += learned
            self.records.episodes(self.steps, told["episodes"])
            if self.experiment.run.collect == "episodes":
                stale, rows = numbers[:, 1].sum(), numbers[:, 2].sum()
                info = info | {"stale_share": float(stale / max(rows, 1))}
            target = self.experiment.run.target_return
            self.solved = self.records.returns.solved(target)
            if learned:
                self.records.update(self.steps, self.updates, info, self.phases)
            self.records.keep(self.algorithm.model, self.normaliser)
        # CRUCIAL: the main worker's word alone. Clocks and signals differ from worker to worker.
        if self.goes_on():
            self.stopped = int(numbers[0, 4])
        if numbers[0, 3] or not self.goes_on():
            self.checkpoint()

    def checkpoint(self) -> None:
        """All workers together: the state of each to the main worker, which writes it."""
        with self.phases("checkpoint"):
            mine = np.frombuffer(wire.encode(self._worker_state()), np.uint8)
            parts = self.group.gather({"bytes": mine, "size": np.array([len(mine)])})
            if parts is None:
                return
            ends = np.cumsum(parts["size"])[:-1]
            state = {
                "algorithm": self.algorithm.state(),
                "team": {"steps": self.steps, "updates": self.updates, "solved": self.solved},
                "workers": [wire.decode(part.data) for part in np.split(parts["bytes"], ends)],
            }
            self.records.checkpoint(state, self.steps, self.updates)

    def restore(self, state: dict[str, Any]) -> None:
        """All workers together: go on from the state of a checkpoint; before the strategy runs."""
        workers = state["workers"]
        if len(workers) != self.group.size:
            raise ConfigError(
                f"the checkpoint is of {len(workers)} workers and there are {self.group.size}; "
                f"type: --workers {len(workers)}"
            )
        if fault := difference(self.algorithm.state(), state["algorithm"], "algorithm"):
            raise ConfigError(
                f"the checkpoint does not fit this run: {fault}. The network, the environment or "
                "the version of manyhands is another than the one that it was made with"
            )
        self.algorithm.load_state(state["algorithm"])
        team, mine = state["team"], workers[self.group.rank]
        self.steps, self.updates = int(team["steps"]), int(team["updates"])
        self.solved = self.records.returns.solved(self.experiment.run.target_return)
        self.normaliser.load_training_state(mine["normaliser"])
        notes = self.collector.load_state(mine["collector"])
        for name, seconds in mine["phases"].items():
            self.phases.add(name, seconds)
        self.loaded_extra = mine["extra"]
        load_global_chance(mine["chance"])  # last: environments may have drawn from it
        told = self.group.exchange(notes)
        self.records.note([f"worker {r}: {text}" for r, part in enumerate(told) for text in part])

    def _worker_state(self) -> dict[str, Any]:
        return {
            "collector": self.collector.state(),
            "normaliser": self.normaliser.training_state(),
            "chance": global_chance(),
            "phases": self.phases.totals(),
            "extra": None if self.extra_state is None else self.extra_state(),
        }

    def _told(self, rollout: Rollout | None) -> Any:
        rows = [
            [self.first_env + e.env, e.total_return, e.length, self.group.rank]
            for e in (rollout.episodes if rollout is not None else [])
        ]
        return np.array(rows, dtype=np.float64).reshape(-1, _EPISODE)


def _seen(rollout: Rollout | None) -> tuple[float, float, float]:
    """(environment steps, rows that an older policy made, rows) of one worker's rollout."""
    if rollout is None:
        return 0.0, 0.0, 0.0
    rows = float(rollout.valid.sum())
    return rollout.steps, rollout.stale_share * rows, rows

"""One worker's part of a run: its environments, its policy, its place in the group, its records.

A strategy is a program over a Team. Whether this worker is the one that writes is the records'
own affair.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from manyhands.algorithms.base import Across, Algorithm, Alone
from manyhands.algorithms.registry import ALGORITHMS
from manyhands.config import Experiment
from manyhands.data.episodes import EpisodeCollector
from manyhands.data.noise import EnvNoise
from manyhands.data.rollout import Collector, Rollout
from manyhands.engines.base import Worker
from manyhands.engines.group import Group
from manyhands.envs import make_vec
from manyhands.envs.adapter import VecAdapter
from manyhands.experiment.records import Records
from manyhands.experiment.timing import Phases
from manyhands.policy import build_model, build_normaliser
from manyhands.strategies.across import OverGroup

_EPISODE = 4  # numbers told of an episode: env, return, length, step at which it ended


def device_of(choice: str) -> torch.device:
    """Where to learn: auto takes a GPU if there is one."""
    there = choice == "cuda" or (choice == "auto" and torch.cuda.is_available())
    return torch.device("cuda" if there else "cpu")


class Team:
    """Everything that one worker of a synchronous on-policy run needs."""

    def __init__(self, experiment: Experiment, worker: Worker, records: Records) -> None:
        run = experiment.run
        self.experiment, self.records = experiment, records
        self.worker = worker
        self.group: Group = worker.group
        self.phases = Phases()
        rank, size = self.group.rank, self.group.size
        first, here = run.num_envs * rank // size, run.num_envs // size
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

    def _algorithm(self, envs: Any) -> Algorithm:
        model = build_model(self.experiment, envs.observation_space, envs.action_space)
        kind = ALGORITHMS[self.experiment.algorithm]
        run = self.experiment.run
        return kind(model, self.experiment.options, seed=run.seed, device=device_of(run.device))

    def _collector(self, envs: VecAdapter, noise: EnvNoise) -> Collector | EpisodeCollector:
        run, actor = self.experiment.run, self.algorithm.actor
        if run.collect == "steps":
            return Collector(envs, actor, run.rollout_length, noise, self.normaliser)
        return EpisodeCollector(
            envs,
            actor,
            run.batch_steps,
            noise,
            self.normaliser,
            rank=self.group.rank,
            size=self.group.size,
            exchange=self._exchange,
        )

    def _exchange(self, value: Any) -> list[Any]:
        with self.phases("synchronisation"):
            return self.group.exchange(value)

    @property
    def progress(self) -> float:
        """How much of the run is done, from 0 to 1: what schedules look at."""
        return min(1.0, self.steps / self.experiment.run.steps)

    def goes_on(self) -> bool:
        """The same answer on all workers: it depends on what all have been told alike."""
        return not self.solved and self.steps < self.experiment.run.steps

    def share_weights(self) -> None:
        """The main worker's weights, on all."""
        flat = self.algorithm.flat.data
        if self.group.size > 1:
            flat.copy_(self.worker.hand_out(flat))

    def check_replicas(self) -> None:
        if self.group.size > 1:
            with self.phases("synchronisation"):
                self.group.check_equal("replicas", {"weights": self.algorithm.flat.data})

    def close_update(self, rollout: Rollout, info: dict[str, float]) -> None:
        """Tell all workers what was seen, count it, and write it down."""
        with self.phases("synchronisation"):
            total = self.group.sum if self.group.size > 1 else None
            self.normaliser.synchronise(total)
            told = self.group.all_gather(
                {
                    "steps": rollout.steps,
                    "stale": rollout.stale_share,
                    "episodes": self._told(rollout),
                }
            )
        with self.phases("logging"):
            self.steps += int(np.sum(told["steps"]))
            self.updates += 1
            self.records.episodes(self.steps, told["episodes"])
            if self.experiment.run.collect == "episodes":
                info = info | {"stale_share": float(np.mean(told["stale"]))}
            target = self.experiment.run.target_return
            self.solved = self.records.returns.solved(target)
            self.records.update(self.steps, self.updates, info, self.phases)
            self.records.keep(self.algorithm.model, self.normaliser)

    def _told(self, rollout: Rollout) -> Any:
        rows = [
            [self.first_env + e.env, e.total_return, e.length, self.group.rank]
            for e in rollout.episodes
        ]
        return np.array(rows, dtype=np.float64).reshape(-1, _EPISODE)

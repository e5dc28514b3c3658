"""What one worker of an asynchronous run needs, whatever its role; the counterpart of Team.

    those that act    envs, policy, a way to send, the newest weights
    those that learn  the same policy, an inbox, and the ledger: what was done, learned, refused

What travels to a learner is a parcel: a plain dict with who made it (`actor`, `life`, `number`),
with which policy (`version`), what happened on the way (`steps`, `episodes`, `seen`), and the load
itself. A last parcel says `bye`. What travels back is the newest weights, with the word to stop.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from manyhands import devices, roles, seeding
from manyhands.algorithms.base import Algorithm
from manyhands.config import Experiment
from manyhands.engines.base import Channel, WeightStore, Worker, cores
from manyhands.engines.group import Group
from manyhands.envs import make_vec
from manyhands.envs.adapter import VecAdapter
from manyhands.envs.chance import EnvNoise
from manyhands.errors import CollectiveError, WorkerError
from manyhands.experiment.timing import Phases
from manyhands.math.running_stats import Moments, RunningStats
from manyhands.policy import build_model, build_normaliser, spaces_of

Parcel = dict[str, Any]
POLICY, PARCELS = "manyhands: policy", "manyhands: parcels"
_FIRST_TURN, _LONGEST_TURN = 0.005, 0.5  # seconds at one of several channels, before the next
LIVES = 1000  # restarts that one session of a run may have: lives of different sessions differ


class Crew:
    """One worker's place in an asynchronous run."""

    def __init__(self, experiment: Experiment, worker: Worker) -> None:
        run = experiment.run
        self.experiment, self.worker = experiment, worker
        self.roles = roles.of_run(experiment.strategy, run.workers, run.learners, run.reducers)
        self.rank = worker.place.rank
        self.part = self.roles.of(self.rank)
        self.phases = Phases()
        self.life = worker.restarts
        self.session = 0  # how often the run was gone on with
        self.envs: VecAdapter | None = None
        self.algorithm = self._algorithm()
        self.stop = False
        self.group: Group | None = None  # of the learners, where there are several
        self.counted = (0, 0)  # steps and updates so far, for the last words of a run that fails
        # Alone there is nobody to pull, and not every engine has such a store.
        alone = run.workers == 1
        self._store: WeightStore | None = None if alone else worker.weights(POLICY, writer=0)
        self._newest = 0  # of the store's own count
        self._number = 0  # parcels sent

    @property
    def name(self) -> str:
        return self.roles.name(self.rank)

    @property
    def is_main(self) -> bool:
        """Whether this is the worker that publishes and writes: worker 0, of whatever role."""
        return self.rank == 0

    @property
    def alive(self) -> int | None:
        """Workers that are there now; None where that is not known, or a run ends without one."""
        return self.worker.alive()

    @property
    def acting(self) -> list[int]:
        """Ranks of those that step environments."""
        return self.roles.ranks("actor") or self.roles.ranks("worker")

    def _algorithm(self) -> Algorithm:
        run, options = self.experiment.run, self.experiment.options
        self.spaces = spaces_of(run)
        self.normaliser = build_normaliser(self.experiment, self.spaces[0])
        model = build_model(self.experiment, *self.spaces)
        acts = self.part.role in ("actor", "worker")
        learns = (not acts and self.part.role != "reducer") or run.workers == 1
        who = f"{self.part.role} {self.part.rank}"
        self.seat = devices.seat(run.device if learns else "cpu", self.worker.place, who)
        device = devices.to_compute_on(self.seat.device)
        # Learners of images get the cores that are left. WHY not all learners: threads that meet
        # after every small product of an MLP cost more than they bring, and on a machine with other
        # jobs a hundred times more.
        if not acts and run.engine in ("local", "ray") and _convolves(model):
            torch.set_num_threads(max(1, cores() - run.workers + 1))
        kind: type[Algorithm] = self.experiment.spec.load()
        return kind(model, options, seed=run.seed, device=device)

    # -- weights -------------------------------------------------------------------------------

    def publish(self, **news: Any) -> None:
        """The main worker's weights for all, with whatever else they are to know."""
        if self.is_main and self._store is not None:
            tree = {
                "weights": self.algorithm.flat.data.cpu(),
                "version": self.algorithm.version,
                "session": self.session,
                "normaliser": {k: s.agreed.state() for k, s in self.statistics().items()},
                "stop": self.stop,
            }
            self._store.publish(tree | news)

    def pull(self) -> dict[str, Any] | None:
        """Take over the newest weights, if there are newer ones; waits for the very first."""
        wait = self.worker.timeout if self._newest == 0 else None
        assert self._store is not None
        try:
            found = self._store.pull(newer_than=self._newest, timeout=wait)
        except (CollectiveError, FileNotFoundError):  # the weights' memory goes with their writer
            if not self._too_late:
                raise
            self.stop, found = True, None
        if found is None:
            return None
        self._newest, news = found
        self.take(news)
        return dict(news)

    @property
    def _too_late(self) -> bool:
        """Whether this worker was started again when the run was over: nobody waits for it."""
        return self.life > 0 and self.worker.main_has_left()

    def take(self, news: dict[str, Any]) -> None:
        flat, weights = self.algorithm.flat.data, news["weights"]
        if flat.shape != weights.shape:
            raise WorkerError(
                f"{self.name} has a network of {flat.numel():,} parameters, and the weights that "
                f"came from {self.roles.name(0)} are {weights.numel():,}: both must see the same "
                "environment and configuration"
            )
        flat.copy_(weights)
        self.algorithm.version, self.session = int(news["version"]), int(news["session"])
        self.stop = bool(news["stop"])
        for name, stats in self.statistics().items():
            own = {f"pending_{k}": v for k, v in stats.pending.state().items()}
            stats.load_state(news["normaliser"][name] | own)

    def statistics(self) -> dict[str, RunningStats]:
        parts = {"obs": self.normaliser.obs, "returns": self.normaliser.returns}
        return {name: stats for name, stats in parts.items() if stats is not None}

    # -- those that act --------------------------------------------------------------------------

    def make_envs(self) -> tuple[VecAdapter, EnvNoise]:
        """This worker's environments, and the chance in its actions.

        CRUCIAL: a life that follows another, or a session, has a root seed of its own, so that no
        episode is played twice.
        """
        run, here = self.experiment.run, self.experiment.run.envs_per_worker
        first = here * self.acting.index(self.rank)
        life = self.session * LIVES + self.life
        seed = run.seed if life == 0 else seeding.integer(run.seed, "life", life)
        if life:
            seeding.seed_everything(seed, "worker", self.rank)
        self.envs = make_vec(
            run.env,
            here,
            backend=run.env_backend,  # type: ignore[arg-type]  # validate.py has checked it
            seed=seed,
            worker=self.rank,
            box_actions=run.box_actions,
            **run.env_kwargs,
        )
        self.envs.number_from(first)
        self.first_env = first
        return self.envs, EnvNoise(seed, first, here)

    def send(
        self,
        channel: Channel,
        load: Parcel,
        *,
        steps: int,
        episodes: Any = (),
        otherwise: Sequence[Channel] = (),
    ) -> int:
        """Hand a parcel over; its number. Waits while there is no room.

        Where the channel stays full, one of the `otherwise` is tried.
        """
        self._number += 1
        rows = [[self.first_env + e.env, e.total_return, e.length, self.rank] for e in episodes]
        seen = {}
        for name, stats in self.statistics().items():
            seen[name] = stats.delta()
            stats.pending = Moments.empty(stats.shape)  # handed over, once
        parcel = {
            "actor": self.rank,
            "life": self.life,
            "number": self._number,
            "steps": steps,
            "episodes": np.array(rows, np.float64).reshape(-1, 4),
            "seen": seen,
        }
        with self.phases("waiting for room"):
            put_to_any([channel, *otherwise], load | parcel, self.worker.timeout)
        return self._number

    def say_bye(self, *channels: Channel) -> None:
        """The last parcel, to each that reads; with what this worker has to tell."""
        told = {"bye": True, "actor": self.rank, "life": self.life, "sent": self._number}
        for channel in channels:
            channel.put(told | {"phases": self.phases.totals()})

    def close(self) -> None:
        if self.envs is not None:
            self.envs.close()


def put_to_any(channels: Sequence[Channel], parcel: Parcel, timeout: float) -> None:
    """To the first that has room, before the deadline.

    WHY not to one alone: of several learners that step together, one may have refused more than
    the others, and waits for data; the others are full, and wait for it. Whoever waited for room
    at a full one would keep all of them waiting.
    """
    if len(channels) == 1:
        channels[0].put(parcel)
        return
    waited, turn = 0.0, _FIRST_TURN
    while True:
        for channel in channels:
            try:
                channel.put(parcel, timeout=turn)
                return
            except CollectiveError:
                waited += turn  # counted so, a reader that is gone, which fails at once, is not
                if 0 < timeout <= waited:  # asked for ever
                    raise
        turn = min(2 * turn, _LONGEST_TURN)  # every try copies the parcel anew


class Inbox:
    """The parcels that one learner or server gets, in order of arrival."""

    def __init__(self, crew: Crew, channel: Channel, senders: list[int]) -> None:
        self._crew, self._channel = crew, channel
        self._room = max(1, crew.experiment.run.queue * len(senders))
        self._looks, self._waiting = 0, 0.0
        self.left: dict[int, Parcel] = {}  # the last words of those that have gone
        self.senders = senders

    def get(self) -> Parcel | None:
        """The next parcel; None when it was a good-bye."""
        phases = self._crew.phases
        with phases("waiting for data"):
            parcel: Parcel = self._channel.get(timeout=self._crew.worker.timeout)
        if self._looks % 16 == 0:  # a look costs a call on some engines
            self._waiting += len(self._channel)
        self._looks += 1
        if "bye" in parcel:
            self.left[int(parcel["actor"])] = parcel
            return None
        return parcel

    @property
    def lost(self) -> int:
        """Parcels of writers that died before these could be read."""
        return int(getattr(self._channel, "lost", 0))

    @property
    def fill(self) -> float:
        """How full the queue was in the mean, from 0 to 1."""
        looks = -(-self._looks // 16)
        return min(1.0, self._waiting / self._room / looks) if looks else 0.0

    def drain(self) -> list[Parcel]:
        """Until everybody has said good-bye: parcels that came too late to be learned from."""
        late = []
        while len(self.left) < len(self.senders):
            try:
                parcel = self.get()
            except CollectiveError as error:
                missing = [self._crew.roles.name(r) for r in self.senders if r not in self.left]
                raise CollectiveError(
                    f"the run has ended, but {', '.join(missing)} did not say good-bye: {error}"
                ) from None
            if parcel is not None:
                late.append(parcel)
        return late


def _convolves(model: torch.nn.Module) -> bool:
    return any(isinstance(part, torch.nn.Conv2d) for part in model.modules())

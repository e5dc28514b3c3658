"""One worker's place in a run: what it was asked for, its role, its policy, its environments.

Every strategy is a program over a Context and a RunProgress, on every worker, whatever its role:

    synchronous    all workers act and count together: single (on-policy), gather, allreduce
    asynchronous   actors send, learners or a server learn; also one worker that does both in turn

`group` are the workers that learn and count together, `across` is the seam over them.

What a worker does in its role is a Part, a piece at a time:

    with part:
        while part.goes_on():
            part.stepper.fill()      where it acts: until there is enough to make something of
            part.update()            learns from it, sends it, or takes what others have sent

`manyhands train` runs this loop. In a loop of their own (agent.py) users step the environments.
"""

from __future__ import annotations

import dataclasses
from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Any, Self

import numpy as np
import torch

from manyhands import devices, seeding
from manyhands.algorithms.base import Across, Algorithm, Alone
from manyhands.config import Experiment
from manyhands.engines import stopping
from manyhands.engines.base import Worker, cores
from manyhands.engines.group import Group, OverGroup
from manyhands.envs import make_vec
from manyhands.envs.adapter import Stepper, VecAdapter
from manyhands.envs.make import frame_stack, takes_threads, to_look_at
from manyhands.experiment.bottleneck import Phases
from manyhands.math.optimiser import check_weights
from manyhands.math.running_stats import Normaliser
from manyhands.networks.encoders import to_bfloat16
from manyhands.policy import (
    Started,
    arrays_of,
    build_model,
    build_normaliser,
    policy_file,
    start_from,
)
from manyhands.streams import EnvNoise
from manyhands.trees import Array

if TYPE_CHECKING:
    from manyhands.experiment.hooks import Changes

RESTARTS = 1000  # that one session of a run may have: seeds of different sessions differ

_WAITS = ("synchronisation", "waiting for data", "waiting for room")  # phases


class Context:
    """What one worker needs in a run. `build` makes its policy, `make_envs` its environments."""

    algorithm: Algorithm
    normaliser: Normaliser
    spaces: tuple[Any, Any]  # of observations, of actions
    across: Across

    def __init__(self, experiment: Experiment, worker: Worker) -> None:
        run = experiment.run
        self.experiment, self.worker = experiment, worker
        self.rank, self.is_main = worker.place.rank, worker.place.is_main
        self.roles = run.roles
        self.part = self.roles.of(self.rank)
        self.phases = Phases()
        worker.show(self.phases.look)
        worker.moves(self._sign)
        self.learns_from = experiment.spec.learns_from
        together = experiment.strategy_spec.synchronous and not run.elastic
        self.synchronous = together and self.learns_from == "rollout"
        self.learns = self.synchronous or self.is_main or self.part.role == "learner"
        # With overlap the main worker only learns.
        self.acting = (self.roles.ranks("actor") or self.roles.ranks("worker"))[-run.actors :]
        self.acts = self.rank in self.acting
        self.group = self._group()
        who = f"{self.part.role} {self.part.rank}"
        self.seat = devices.seat(run.device if self.learns else "cpu", worker.place, who)
        self.restarts = worker.restarts
        self.start_from = run.start_from  # a folder; "" in a run that is resumed
        self.started: Started | None = None  # what was taken over from there
        self.session = 0  # how often the run was resumed with new episodes
        self.envs: VecAdapter | None = None
        self.first_env = 0  # the number of this worker's first environment among all
        self.sent = 0  # messages
        self.stop = False  # what actors hear with the weights
        self.changes: Changes | None = None  # what hooks have changed, where there are any
        if run.hooks:
            from manyhands.experiment.hooks import Changes

            self.changes = Changes()

    def _group(self) -> Group | None:
        if self.synchronous:
            return self.worker.group
        learners = self.roles.ranks("learner")
        if len(learners) > 1 and self.rank in learners:
            return self.worker.group.among(learners, "learners")
        return None

    def build(self, spaces: tuple[Any, Any]) -> None:
        """The policy, as its seed begins, its normaliser, and the seam."""
        run, options = self.experiment.run, self.experiment.options
        self.spaces = spaces
        self.normaliser = build_normaliser(self.experiment, spaces[0])
        self.statistics = self.normaliser.statistics
        model = build_model(self.experiment, *spaces)
        if self.start_from and self.learns:
            self.started = start_from(self._earlier(), model, self.normaliser)
        # Learners of images get the cores that are left. WHY not all learners: threads that meet
        # after every small product of an MLP cost more than they bring, and on a machine with other
        # jobs a hundred times more.
        acts = self.part.role in ("actor", "worker")
        if run.bfloat16:
            to_bfloat16(model)
        if _convolves(model) or run.env_backend == "torch":
            devices.keep_memory()
        if not acts and run.engine != "inline" and _convolves(model):
            torch.set_num_threads(max(1, cores() - run.workers + 1))
        kind: type[Algorithm] = self.experiment.spec.load()
        device = devices.to_compute_on(self.seat.device)
        self.algorithm = kind(model, options, seed=run.seed, device=device)
        self.across = Alone()
        if self.group is not None and self.group.size > 1:
            self.across = OverGroup(self.group, self.phases)
        self._join_games()

    def _earlier(self) -> dict[str, Array]:
        """The arrays of the policy to start from, on all that learn together; only the main worker
        need see the disk."""
        data = np.zeros(0, np.uint8)
        if self.is_main:
            data = np.fromfile(policy_file(self.start_from)[1], np.uint8)
        if self.group is not None:
            data = self.group.all_gather({"policy": data})["policy"]
        return arrays_of(data.tobytes())

    def make_envs(self, **more: Any) -> tuple[VecAdapter, EnvNoise]:
        """This worker's environments, and the chance in its actions; `more` goes to `make_vec`.

        CRUCIAL: a worker that was restarted, or a session, has a root seed of its own, so that no
        episode is played twice.
        """
        run = self.experiment.run
        # A worker that only learns has one environment, whose number nobody else has, for its
        # spaces; it is never stepped in training.
        here = run.envs_per_worker
        if not self.acts:
            here = to_look_at(run.env, run.env_backend, here)
        first = here * self.acting.index(self.rank) if self.acts else run.num_envs
        start = self.session * RESTARTS + self.restarts
        seed = run.seed if start == 0 else seeding.integer(run.seed, "life", start)
        if start:
            seeding.seed_everything(seed, "worker", self.rank)
        self.envs = make_vec(
            run.env,
            here,
            backend=run.env_backend,  # type: ignore[arg-type]  # validate.py has checked it
            seed=seed,
            worker=self.rank,
            box_actions=run.box_actions,
            **run.env_kwargs | self._threads() | more,
        )
        self.envs.number_from(first)
        self.envs.log_info = run.log_info
        self.first_env = first
        for name, (_, value) in () if self.changes is None else self.changes.attributes.items():
            self.envs.set_attribute(name, value)  # of a worker that was restarted, or comes late
        self._join_games()
        return self.envs, EnvNoise(seed, first, here)

    @property
    def env_threads(self) -> int:
        """That step the environments of a worker here in C++; 0: they have none of their own. Left
        out, the cores of the machine are divided among the workers there that act."""
        run = self.experiment.run
        if not takes_threads(run.env, run.env_backend, run.env_kwargs):
            return 0
        sharing = max(1, min(len(self.acting), self.worker.place.local_size))
        return int(run.env_kwargs.get("num_threads", max(1, cores() // sharing))) or cores()

    @property
    def emulators(self) -> str:
        """How environments with threads of their own are stepped, in words."""
        threads = self.env_threads
        each = " of each worker" if len(self.acting) > 1 else ""
        return f"in C++, {threads} thread{'s' * (threads > 1)}{each}" if threads else ""

    def _threads(self) -> dict[str, int]:
        threads = self.env_threads
        return {"num_threads": threads if self.acts else 1} if threads else {}

    def take_changes(self, state: dict[str, Any]) -> None:
        """What hooks have changed, as the main worker tells it, is changed here too."""
        assert self.changes is not None
        options, attributes = self.changes.take(state)
        if options:
            changed = dataclasses.replace(self.experiment.options, **options)
            self.experiment = dataclasses.replace(self.experiment, options=changed)
            self.algorithm.options = changed
        if self.envs is not None:
            for name, value in attributes.items():
                try:
                    self.envs.set_attribute(name, value)
                except Exception as error:
                    whose = self.experiment.run.hooks
                    error.add_note(f"asked for by {whose}: set_env_attribute({name!r}, {value!r})")
                    raise

    def _join_games(self) -> None:
        """Once there are games of several agents and a policy: it plays the other seats, and agents
        that wait are not counted in statistics."""
        envs: Any = self.envs
        if envs is None or not hasattr(self, "algorithm"):
            return
        self.normaliser.waiting = getattr(envs, "waiting", None)
        if hasattr(envs, "others"):
            from manyhands.strategies.experience import Opponents

            envs.others = Opponents(self)

    def _sign(self) -> object:
        """Another whenever a phase has begun or ended, or an environment was stepped; and all the
        time in phases that wait for other workers, which have deadlines of their own."""
        if self.phases.current in _WAITS:
            return object()
        return self.phases.mark, None if self.envs is None else self.envs.clock

    @property
    def frame_stack(self) -> int:
        """How many frames each observation is a stack of; 0 where it is none."""
        run = self.experiment.run
        return frame_stack(run.env, run.env_backend, run.env_kwargs, self.spaces[0])

    def close(self) -> None:
        if self.envs is not None:
            with stopping.spared(self.experiment.run.timeout, "close() of the environments"):
                self.envs.close()

    # -- the other workers -----------------------------------------------------------------------

    @property
    def name(self) -> str:
        return self.roles.name(self.rank)

    @property
    def run_is_over(self) -> bool:
        """Whether this worker was restarted when the run had ended: nobody waits for it."""
        return self.restarts > 0 and self.worker.main_has_left()

    def share_weights(self) -> None:
        """The main worker's weights, on all."""
        flat = self.algorithm.flat.data
        if self.is_main:
            check_weights(self.algorithm)
        if self.worker.group.size > 1:
            flat.copy_(self.worker.hand_out(flat))

    def check_equal(self, who: str) -> None:
        """Whether all that learn together still have the same weights, to the bit."""
        if self.group is not None and self.group.size > 1:
            with self.phases("synchronisation"):
                self.group.check_equal(who, {"weights": self.algorithm.flat.data})


class Part(ABC):
    """One worker's part in a strategy."""

    context: Context
    stepper: Stepper | None = None  # its policy in its environments; None: it does not act

    @abstractmethod
    def goes_on(self) -> bool:
        """Whether there is more to do, as far as this worker knows."""

    @abstractmethod
    def update(self) -> None:
        """With a stepper, once that is full. Waits for others where the role does."""

    def close(self) -> None:  # noqa: B027 (not every role has anything to say)
        """The end, which the others hear of; waits for them where they wait for this one."""

    def release(self) -> None:  # noqa: B027 (nor to give back)
        """Give back what was taken, however it has ended."""

    def run(self) -> None:
        """All of it, in environments of our own."""
        with self:
            while self.goes_on():
                if self.stepper is not None:
                    with self.context.phases("rollout"):
                        self.stepper.fill()
                self.update()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        try:
            if kind is None:
                self.close()
        finally:
            self.release()


def _convolves(model: torch.nn.Module) -> bool:
    return any(isinstance(part, torch.nn.Conv2d) for part in model.modules())

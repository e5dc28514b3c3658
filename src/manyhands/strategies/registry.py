"""The strategies, as data: what everything asks that runs before torch is loaded.

One row a strategy: the command line, its help, the checks, who plays which part, the batch
arithmetic, the table of what runs with what, the docs and the workers all read it. Nobody else
compares names of strategies (tests/unit/test_house.py).

    kind of algorithm   what it is given (`learns_from` of its own row)
    rollout             T steps of each environment, of the newest policy
    unroll              the same, from a policy some updates old
    replay              transitions of any age, drawn from a replay

To add one: a row here, and the program that it names.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

from manyhands.roles import Roles

if TYPE_CHECKING:
    from manyhands.algorithms.registry import AlgorithmSpec
    from manyhands.config import Experiment, RunConfig

OK = "ok"
Kind = Literal["rollout", "unroll", "replay"]


def all_alike(run: RunConfig) -> Roles:
    """Every worker does the same."""
    return Roles({"worker": run.workers})


def all_environments(run: RunConfig) -> int:
    """One update learns from rollout_length steps of every environment."""
    return run.num_envs * run.rollout_length


def nobody(run: RunConfig) -> int:
    return 0


def no_faults(experiment: Experiment) -> Iterable[str]:
    return ()


@dataclass(frozen=True, kw_only=True)
class StrategySpec:
    """One strategy. Its program is given by name, so that torch is loaded late."""

    name: str
    """As it is typed after --strategy."""
    about: str
    """One line for the help."""
    program: str
    """package.module:function, which every worker calls with its Context and its RunProgress."""
    part: str = ""
    """The same a piece at a time, for loops of the user's own: makes a `Part` (context.py)."""
    model: str = ""
    """package.module:function, which simulates it for `manyhands plan` (simulate.py)."""
    synchronous: bool = True
    """Whether all workers act and count together, so that none is ahead of another."""
    one_worker: bool = False
    """Whether it is for one worker, and so the default of one."""
    default_for: tuple[Kind, ...] = ()
    """The kinds of algorithm whose default it is with several workers."""
    refuses: Mapping[Kind, str] = field(default_factory=dict)
    """Kind of algorithm -> why not; reads on after the algorithm's name."""
    unless: str = ""
    """A switch of an algorithm's row that lifts the refusal."""
    engine_parts: tuple[str, ...] = ()
    """What it needs of an engine besides collectives: rows of `support.PARTS`."""
    options: tuple[str, ...] = ()
    """The fields of RunConfig that are for it, and mean nothing to most others."""
    roles: Callable[[RunConfig], Roles] = all_alike
    """How the workers are divided. Who writes the records is always worker 0."""
    not_acting: Callable[[RunConfig], int] = nobody
    """Workers that step no environment: they learn or serve, and come on top of those that act."""
    restarts: str = ""
    """The role whose workers may fail, where the run asks for it: nobody waits for one of them in
    particular."""
    batch: Callable[[RunConfig], int] = all_environments
    """Steps of one update, of all workers together, where whole episodes are not asked for."""
    all_learn: bool = False
    """Whether every worker takes its part of the learning, so that more workers learn faster."""
    faults: Callable[[Experiment], Iterable[str]] = no_faults
    """What can be wrong with a run of it, in plain words, with what to type."""
    comes_and_goes: Callable[[Experiment], Iterable[str]] = no_faults
    """What can be wrong where workers come and go (--workers 2..16)."""
    on_times: str = ""
    """What a reader of its seconds by phase should know."""

    def load(self) -> Callable[[Any, Any], None]:
        """The program; loads torch."""
        return self._named(self.program)

    def load_part(self) -> Callable[[Any, Any], Any]:
        """What makes one worker's part; loads torch."""
        return self._named(self.part)

    def load_model(self) -> Callable[..., Any]:
        """What simulates it; loads no torch."""
        return self._named(self.model)

    def _named(self, path: str) -> Callable[..., Any]:
        module, _, name = path.partition(":")
        found: Callable[..., Any] = getattr(importlib.import_module(module), name)
        return found

    def cell(self, algorithm: AlgorithmSpec) -> str:
        """OK, or why not with this algorithm; reads on after the algorithm's name."""
        if self.name in algorithm.refuses:
            return algorithm.refuses[self.name]
        if self.unless and getattr(algorithm, self.unless):
            return OK
        return self.refuses.get(algorithm.learns_from, OK)


# -- why not ---------------------------------------------------------------------------------------

_FRESH = "learns from fresh data only, and a replay holds old; use dqn or ddpg"
_LAG = "does not correct for data older than its policy; use impala"
_SEVERAL_STEPS = "takes several steps on one batch, which others' gradients would upset; use a2c"
_REPLAY = "learns from a replay, which apex spreads over workers; use single or apex"
_V_TRACE = "is made for actors that send to a learner; use actor_learner"


# -- single, gather --------------------------------------------------------------------------------


def _single_faults(experiment: Experiment) -> Iterator[str]:
    if experiment.run.workers > 1:
        yield (
            f"strategy single has one worker and {experiment.run.workers} were asked for; type: "
            f"--workers 1, or --strategy {default_of(experiment.spec.learns_from)}"
        )


def _main_only_learns(run: RunConfig) -> int:
    return int(run.overlap or run.elastic)


def _gather_faults(experiment: Experiment) -> Iterator[str]:
    if experiment.run.overlap and experiment.run.workers < 2:
        yield (
            "overlap needs one worker that learns and others that act, and has "
            f"{experiment.run.workers}; type: --workers 2, or more"
        )
    run = experiment.run
    if not 0 < run.wait_for <= 1:
        yield f"wait_for={run.wait_for:g}: a share of the batch, above 0 and up to 1, such as 0.8"
    if not run.elastic:
        return
    asked = "wait_for" if run.wait_for < 1 else "on_worker_failure"
    if run.workers < 2:
        yield (
            f"{asked} needs one worker that learns and others that act, and has {run.workers}; "
            "type: --workers 2, or more"
        )
    if run.overlap:
        yield f"{asked} and overlap do not go together: leave one of them out"
    if run.collect == "episodes":
        yield f"{asked} goes with a fixed number of steps; type: --collect steps"
    if getattr(experiment.options, "lstm", 0):
        yield f"{asked} and lstm do not go together: leave one of them out"
    if run.engine not in ("inline", "local"):
        yield f"{asked} of gather is for inline and local, not {run.engine}; type: --engine local"


# -- gradient_server -------------------------------------------------------------------------------


def _server_roles(run: RunConfig) -> Roles:
    acting = max(0, run.workers - 1 - run.reducers)
    parts = {"server": 1, "reducer": run.reducers, "worker": acting}
    return Roles({role: count for role, count in parts.items() if count or role == "worker"})


def _server_and_reducers(run: RunConfig) -> int:
    return 1 + run.reducers


def _pushes_of_a_step(run: RunConfig) -> int:
    return run.pushes * run.envs_per_worker * run.rollout_length


def _server_faults(experiment: Experiment) -> Iterator[str]:
    run = experiment.run
    if run.workers < 2 + run.reducers:
        yield (
            f"gradient_server needs a server and others that act, and has {run.workers} workers"
            + (f" of which {run.reducers} only add up" if run.reducers else "")
            + f"; type: --workers {2 + run.reducers}, or more"
        )
    if run.pushes < 1:
        yield f"pushes={run.pushes}: at least 1 is needed; type: --pushes 1"
    elif run.reducers and run.pushes % run.reducers:
        up = -(-run.pushes // run.reducers) * run.reducers
        yield (
            f"{run.pushes} pushes do not go evenly into {run.reducers} reducers; type: "
            f"--pushes {up}"
        )
    elif run.reducers and run.reducers > run.actors > 0:
        yield (
            f"{run.reducers} reducers for {run.actors} workers that act; type: --reducers "
            f"{run.actors}, or fewer"
        )
    if run.collect == "episodes":
        yield "gradient_server collects a fixed number of steps; type: --collect steps"
    for name in ("critic_learning_rate", "critic_epochs"):
        if value := getattr(experiment.options, name, 0):
            yield (
                f"{name}={value}: gradient_server has one gradient for policy and critic; leave it "
                "out, or type: --strategy allreduce"
            )
    yield from _queue_faults(run)


def _queue_faults(run: RunConfig) -> Iterator[str]:
    if run.queue < 1:
        yield f"queue={run.queue}: a worker must be able to have one waiting; type: --queue 1"


# -- actors and learners ---------------------------------------------------------------------------


def _actors_and_learners(run: RunConfig) -> Roles:
    return Roles({"learner": run.learners, "actor": max(0, run.workers - run.learners)})


def _learners(run: RunConfig) -> int:
    return run.learners


def _unrolls_of_an_update(run: RunConfig) -> int:
    return run.unrolls_per_update * run.envs_per_worker * run.rollout_length


def _learner_faults(run: RunConfig) -> Iterator[str]:
    if run.learners < 1:
        yield f"learners={run.learners}: at least 1 is needed; type: --learners 1"
    elif run.workers <= run.learners:
        yield (
            f"{run.workers} workers of which {run.learners} learn leave nobody to act; type: "
            f"--workers {run.learners + 1}, or more"
        )


def _actor_learner_faults(experiment: Experiment) -> Iterator[str]:
    run = experiment.run
    yield from (found := list(_learner_faults(run)))
    if not found and run.unrolls_per_update % run.learners:
        up = -(-run.unrolls_per_update // run.learners) * run.learners
        yield (
            f"{run.unrolls_per_update} unrolls an update do not go evenly into {run.learners} "
            f"learners; type: --unrolls {up}"
        )
    yield from _queue_faults(run)


def _apex_faults(experiment: Experiment) -> Iterator[str]:
    run, o = experiment.run, experiment.options
    yield from _learner_faults(run)
    if run.learners > o.batch_size:
        yield (
            f"{run.learners} learners share batches of {o.batch_size}; type: "
            f"--batch-size {run.learners}, or more"
        )
    if run.actors > 0 and o.replay_size // run.actors < 1:
        yield (
            f"a replay of {o.replay_size:,} does not go into {run.actors} shards; type: "
            f"--replay-size {10_000 * run.actors}"
        )


def _reducers_stay(experiment: Experiment) -> Iterator[str]:
    run = experiment.run
    if run.reducers:
        yield (
            f"reducers={run.reducers} wait for the workers that they were given, and with "
            f"--workers {run.workers} these come and go; leave --reducers out"
        )


def _shards_of_the_least(experiment: Experiment) -> Iterator[str]:
    """Each actor has its own shard: of those that are always there, learning must be able to
    start."""
    run, o = experiment.run, experiment.options
    least = run.least_workers - run.learners
    room = o.replay_size // max(1, run.actors) * least
    if o.learning_starts > room:
        yield (
            f"learning starts with {o.learning_starts:,} transitions, and the {least} of "
            f"{run.actors} actors that are always there hold {room:,} of the replay of "
            f"{o.replay_size:,}; type: --learning-starts {room}, or less"
        )


_ALL = (
    StrategySpec(
        name="single",
        about="one worker does everything in turn",
        program="manyhands.strategies.single:run",
        model="manyhands.strategies.simulate:single",
        part="manyhands.strategies.single:part",
        one_worker=True,
        options=("overlap",),
        faults=_single_faults,
    ),
    StrategySpec(
        name="gather",
        about="every worker collects, the main worker learns",
        program="manyhands.strategies.gather:run",
        model="manyhands.strategies.simulate:gather",
        refuses={"unroll": _V_TRACE, "replay": _REPLAY},
        options=("overlap", "wait_for", "max_lag"),
        not_acting=_main_only_learns,
        restarts="worker",
        faults=_gather_faults,
        on_times="With gather only the main worker optimises; that is synchronisation to the "
        "others.",
    ),
    StrategySpec(
        name="allreduce",
        about="all workers collect and learn, gradients are summed",
        program="manyhands.strategies.allreduce:run",
        model="manyhands.strategies.simulate:allreduce",
        part="manyhands.strategies.allreduce:Replica",
        default_for=("rollout",),
        refuses={"unroll": _V_TRACE, "replay": _REPLAY},
        all_learn=True,
    ),
    StrategySpec(
        name="gradient_server",
        about="workers push gradients to a server when they are ready; a2c is A3C then",
        program="manyhands.strategies.gradient_server:run",
        model="manyhands.strategies.simulate:gradient_server",
        part="manyhands.strategies.gradient_server:part",
        synchronous=False,
        refuses={"rollout": _SEVERAL_STEPS, "unroll": _V_TRACE, "replay": _REPLAY},
        unless="pushes_gradients",
        engine_parts=("Channel", "WeightStore"),
        options=("pushes", "reduce", "reducers", "max_lag", "queue"),
        roles=_server_roles,
        not_acting=_server_and_reducers,
        restarts="worker",
        batch=_pushes_of_a_step,
        faults=_server_faults,
        comes_and_goes=_reducers_stay,
    ),
    StrategySpec(
        name="apex",
        about="actors fill a replay that learners draw from",
        program="manyhands.strategies.apex:run",
        model="manyhands.strategies.simulate:apex",
        part="manyhands.strategies.apex:part",
        synchronous=False,
        default_for=("replay",),
        refuses={"rollout": _FRESH, "unroll": _V_TRACE},
        engine_parts=("Service", "WeightStore"),
        options=("learners",),
        roles=_actors_and_learners,
        not_acting=_learners,
        restarts="actor",
        faults=_apex_faults,
        comes_and_goes=_shards_of_the_least,
    ),
    StrategySpec(
        name="actor_learner",
        about="actors send unrolls to one learner or several",
        program="manyhands.strategies.actor_learner:run",
        model="manyhands.strategies.simulate:actor_learner",
        part="manyhands.strategies.actor_learner:part",
        synchronous=False,
        default_for=("unroll",),
        refuses={"rollout": _LAG, "replay": _REPLAY},
        engine_parts=("Channel", "WeightStore"),
        options=("learners", "unrolls", "max_lag", "queue"),
        roles=_actors_and_learners,
        not_acting=_learners,
        restarts="actor",
        batch=_unrolls_of_an_update,
        faults=_actor_learner_faults,
    ),
)
SPECS: dict[str, StrategySpec] = {spec.name: spec for spec in _ALL}

# What stands in until the checks have refused a name that nobody knows: all workers alike.
_UNKNOWN = StrategySpec(name="", about="", program="")


def spec_of(strategy: str) -> StrategySpec:
    """The strategy of that name. One that is not known, or left to us, has all workers alike."""
    return SPECS.get(strategy, _UNKNOWN)


def default_of(kind: str, workers: int = 2) -> str:
    """The strategy of algorithms of a kind, where the user does not name one."""
    fits = (s for s in SPECS.values() if (s.one_worker if workers == 1 else kind in s.default_for))
    return next(fits).name


def with_option(name: str) -> list[str]:
    """The strategies that a field of RunConfig is for; none where it is for all."""
    return [spec.name for spec in SPECS.values() if name in spec.options]

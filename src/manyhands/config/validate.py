"""Everything that can be wrong with a run before it starts, all of it at once.

Each fault gives what was asked, the arithmetic, and what to type instead. No process is started;
an environment is made, to look at its spaces, and closed again.
"""

from __future__ import annotations

import dataclasses
import importlib.util
import inspect
import math
import os
import tempfile
import typing
from collections.abc import Iterator
from pathlib import Path
from typing import Any, get_args

from manyhands import devices, support
from manyhands.algorithms.registry import HOST_ONLY, AlgorithmSpec, spec_of
from manyhands.config import (
    HOOKS,
    Experiment,
    RunConfig,
    hints_of,
    holds_a_run,
    in_words,
    join_faults,
    nearest,
)
from manyhands.engines import calls, joined, stopping, supervisor
from manyhands.engines.base import LONGEST_TIMEOUT
from manyhands.errors import ConfigError, ManyhandsError, described, needs
from manyhands.math.optimiser import make_schedule
from manyhands.strategies import registry as strategies

_AT_LEAST_ONE = (
    "workers",
    "steps",
    "num_envs",
    "rollout_length",
    "log_every",
    "eval_episodes",
    "opponent_every",
    "min_workers",
)
_MAY_BE_NEGATIVE = ("target_return",)
# Arguments of envs.make_vec, which hands all others to the environment
_NOT_KWARGS = (
    "env",
    "num_envs",
    "seed",
    "worker",
    "backend",
    "box_actions",
    "check_finite",
)
_NO_OTHERS = (
    "opponents are for games of PettingZoo that are played in turns (an AECEnv), and {} is none; "
    "leave --opponents out"
)
_PACKAGES = {"mpi": "mpi4py", "ray": "ray"}
# Options that divide the workers, or the batch, and are refused with a strategy that has no use for
# them. WHY not all: an earlier version let the others pass, and its runs can be resumed.
_DIVIDING = ("overlap", "learners", "pushes", "reducers", "wait_for")


def check(experiment: Experiment) -> None:
    """ConfigError with every fault, unless there is none."""
    found = faults(experiment)
    if found:
        raise ConfigError(join_faults(found))


def faults(experiment: Experiment) -> list[str]:
    """Every fault of an experiment, in plain words; empty when it can start."""
    try:
        spec_of(experiment.algorithm)
    except ConfigError as error:
        return [str(error)]  # nothing else can be said of it
    parts = (
        _launcher_faults,
        _names_faults,
        _strategy_faults,
        _replay_faults,
        _overlap_faults,
        _memory_faults,
        _number_faults,
        _batch_faults,
        _package_faults,
        _environment_faults,
        _fit_faults,
        _hooks_faults,
        _run_dir_faults,
    )
    return [fault for part in parts for fault in part(experiment)]


def check_given(experiment: Experiment, observations: Any, actions: Any) -> None:
    """For an Agent: the environments, of these spaces, are there, and no run folder is written."""
    run = experiment.run
    unnamed = dataclasses.replace(experiment, run=dataclasses.replace(run, env=""))
    parts = (
        _names_faults,
        _strategy_faults,
        _replay_faults,
        _memory_faults,
        _number_faults,
        _batch_faults,
        _package_faults,
    )
    found = [fault for part in parts for fault in part(unnamed)]
    found += _space_faults(run, observations, actions)
    found += _action_faults(experiment.spec, actions)
    if run.network_kwargs and not run.network:
        found.append("network_kwargs are for a network of your own; give network=... too")
    if found:
        raise ConfigError(join_faults(found))


def _launcher_faults(experiment: Experiment) -> Iterator[str]:
    yield from joined.faults(experiment.run.engine, experiment.run.workers)


# -- names -----------------------------------------------------------------------------------------


def _names_faults(experiment: Experiment) -> Iterator[str]:
    spec, strategy = experiment.spec, experiment.strategy
    run, unknown = experiment.run, set()
    for what, name, names in (
        ("strategy", strategy, list(strategies.SPECS)),
        ("engine", run.engine, list(support.ENGINES)),
    ):
        if name not in names:
            unknown.add(what)
            yield f"there is no {what} {name!r}; {nearest(name, names)}"
    if spec.separate_networks and run.shared_network:
        yield (
            f"{spec.name} needs separate networks for policy and value: fitting the value would "
            "move a shared policy out of its trust region; type: --no-shared-network"
        )
    if "strategy" not in unknown:
        engine = "local" if "engine" in unknown else run.engine
        reason = support.why_not(experiment.algorithm, strategy, engine)
        if reason:
            fitting = support.strategies_of(experiment.algorithm)
            yield f"{reason}; type: --strategy {' or '.join(fitting)}"
    if run.address and run.engine != "ray":
        yield f"address={run.address!r} is Ray's, and the engine is {run.engine}; add --engine ray"


# -- who acts, who learns --------------------------------------------------------------------------


def _strategy_faults(experiment: Experiment) -> Iterator[str]:
    run, strategy = experiment.run, experiment.strategy
    fitting = support.strategies_of(experiment.algorithm)
    if strategy not in fitting:
        return  # refused already: the parts in it do not matter
    for f in dataclasses.fields(run):
        value, whose = getattr(run, f.name), strategies.with_option(f.name)
        if f.name in _DIVIDING and value != f.default and strategy not in whose:
            given = f.name if value is True else f"{f.name}={value}"
            many = "strategies" if len(whose) > 1 else "strategy"
            others = [name for name in whose if name in fitting]
            yield (
                f"{given} is for {many} {in_words(whose)}, and this is {strategy}; "
                + (f"type: --strategy {in_words(others, 'or')}, or " if others else "")
                + f"leave --{f.name.replace('_', '-')} out"
            )
    yield from experiment.strategy_spec.faults(experiment)
    yield from _recovery_faults(experiment)
    yield from _range_of_workers_faults(experiment)


def _recovery_faults(experiment: Experiment) -> Iterator[str]:
    run, spec = experiment.run, experiment.strategy_spec
    if run.on_worker_failure in ("restart", "continue") and not spec.restarts:
        fitting = support.strategies_of(experiment.algorithm)
        others = [name for name in fitting if strategies.spec_of(name).restarts]
        yield (
            f"on_worker_failure={run.on_worker_failure}: with {spec.name} every worker takes its "
            "part in each update, and none can be missing; "
            + (f"type: --strategy {in_words(others, 'or')}, or " if others else "")
            + "leave --on-worker-failure out"
        )
    able = support.RECOVERY.get(run.on_worker_failure)
    if able is not None and spec.restarts and run.engine not in (*able, "inline"):
        yield (
            f"on_worker_failure={run.on_worker_failure} works on {in_words(able)}, not on "
            f"{run.engine}; type: --engine local"
        )
    if run.on_worker_failure == "continue" and run.min_workers > run.actors > 0:
        yield (
            f"min_workers={run.min_workers}, but only {run.actors} act; type: --min-workers "
            f"{run.actors}, or less"
        )


def _range_of_workers_faults(experiment: Experiment) -> Iterator[str]:
    """--workers 2..16."""
    run, spec = experiment.run, experiment.strategy_spec
    least, most = run.least_workers, int(run.workers)
    if least == most:
        return
    asked = f"workers={least}..{most}"
    fewest = spec.not_acting(run) + 1
    if least > most or least < 1:
        yield f"{asked}: the least comes first, as in --workers 2..16"
    elif spec.synchronous:
        fitting = support.strategies_of(experiment.algorithm)
        others = [name for name in fitting if not strategies.spec_of(name).synchronous]
        yield (
            f"{asked}: with {experiment.strategy} all workers take their part in each update, and "
            "none can come or go; type: "
            + (f"--strategy {in_words(others, 'or')}, or " if others else "")
            + f"--workers {most}"
        )
    elif run.engine != "ray":
        yield (
            f"{asked}: workers come and go on Ray alone, and the engine is {run.engine}; type: "
            f"--workers {most}, or --engine ray --address HOST:6379"
        )
    elif least < fewest:
        yield (
            f"{asked}: {fewest - 1} of them do not act, and one at least has to; type: --workers "
            f"{fewest}..{most}"
        )
    elif run.recovery != "restart":
        yield f"{asked} and on_worker_failure={run.on_worker_failure} do not go together"
    else:
        yield from spec.comes_and_goes(experiment)


# -- replays ---------------------------------------------------------------------------------------


def _replay_faults(experiment: Experiment) -> Iterator[str]:
    share = getattr(experiment.options, "replay_share", 0.0)
    if not 0 <= share < 1:
        yield f"replay_share={share:g} must lie from 0 to less than 1: every update has new data"
    if experiment.spec.learns_from == "replay":
        if experiment.run.collect != "steps":
            yield f"{experiment.spec.name} learns from single transitions; type: --collect steps"
        yield from _replay_size_faults(experiment)
        yield from _replay_range_faults(experiment.options)
    # What only the algorithm knows of its options
    yield from getattr(experiment.options, "faults", list)()


def _replay_size_faults(experiment: Experiment) -> Iterator[str]:
    o, run = experiment.options, experiment.run
    for name in ("batch_size", "replay_size", "n_step"):
        if getattr(o, name) < 1:
            yield f"{name}={getattr(o, name)}: at least 1 is needed"
    if o.replay_size < o.batch_size:
        yield (
            f"a replay of {o.replay_size:,} transitions is smaller than a batch of "
            f"{o.batch_size:,}; type: --replay-size {max(10_000, 10 * o.batch_size)}, or "
            f"--batch-size {max(1, o.replay_size)}"
        )
    elif o.replay_size < o.learning_starts:
        yield (
            f"learning starts with {o.learning_starts:,} transitions, which a replay of "
            f"{o.replay_size:,} never holds; type: --learning-starts {o.replay_size}"
        )
    if o.learning_starts >= run.steps:
        yield (
            f"learning starts with {o.learning_starts:,} transitions, and the run has "
            f"{run.steps:,} steps; type: --learning-starts {run.steps // 10}, or more --steps"
        )


def _replay_range_faults(o: Any) -> Iterator[str]:
    if not o.updates_per_step > 0:
        yield f"updates_per_step={o.updates_per_step:g}: nothing would be learned; type: 0.5"
    if not 0 < o.target_tau <= 1:
        yield f"target_tau={o.target_tau:g} must lie from above 0 to 1, such as 0.005"
    for name in ("epsilon", "epsilon_final"):
        if not 0 <= getattr(o, name, 0.0) <= 1:
            yield f"{name}={getattr(o, name):g} is a probability: from 0 to 1"
    if getattr(o, "noise_spread", 1.0) <= 0:
        yield f"noise_spread={o.noise_spread:g} must be above 0; 1 gives all the same noise"
    if o.pull_every < 1:
        yield f"pull_every={o.pull_every}: at least 1 is needed"
    if o.prefetch < 0:
        yield f"prefetch={o.prefetch}: a number of batches, 0 or more"
    try:
        ends = [make_schedule(o.beta)(p) for p in (0.0, 1.0)]
    except ConfigError:
        return  # said with the other schedules
    if not all(0 <= end <= 1 for end in ends):
        yield f"beta={o.beta!r} must stay from 0 to 1, such as linear:0.4:1"


# -- overlap and memory ----------------------------------------------------------------------------


def _overlap_faults(experiment: Experiment) -> Iterator[str]:
    """On one worker there is something to overlap where emulators are one side, a GPU the other."""
    from manyhands.envs.make import shows_frames

    run, spec, o = experiment.run, experiment.spec, experiment.options
    strategy = strategies.SPECS.get(experiment.strategy)
    if not run.overlap or strategy is None or not strategy.one_worker:
        return
    try:
        frames = shows_frames(run.env, run.env_backend, run.env_kwargs)
    except ConfigError:
        return  # there is no such environment, which is said by itself
    known = spec.name in ("ppo", "a2c") and not any(getattr(o, name, 0) for name in HOST_ONLY)
    gpu = run.device == "cuda" or (run.device == "auto" and devices.present() > 0)
    usual = run.collect == "steps" and not run.normalize_observations
    if not (known and gpu and usual and frames):
        yield (
            "overlap on one worker is for ppo and a2c on ALE's images with a GPU (--device cuda), "
            "without lstm, kl_penalty and a critic of its own; type: --strategy gather, or leave "
            "--overlap out"
        )


def _memory_faults(experiment: Experiment) -> Iterator[str]:
    run, spec, o = experiment.run, experiment.spec, experiment.options
    units = getattr(o, "lstm", 0)
    if units < 1 or spec.learns_from != "rollout":
        return
    if run.collect != "steps":
        yield f"{spec.name} with --lstm learns from rollouts of equal length; type: --collect steps"
    if run.overlap:
        yield "overlap and lstm do not go together: leave one of them out"
    if _cuts_rollouts(experiment):
        minibatch, length = o.minibatch, run.rollout_length
        yield (
            f"with --lstm a minibatch is whole rollouts of {length} steps, and minibatch="
            f"{minibatch} is no multiple of that; type: --minibatch "
            f"{max(1, minibatch // length) * length}, or --rollout-length "
            f"{_largest_divisor(minibatch, length)}"
        )


def _cuts_rollouts(experiment: Experiment) -> bool:
    """Whether a minibatch is no number of whole rollouts, where a memory needs them whole."""
    o, length = experiment.options, experiment.run.rollout_length
    if getattr(o, "lstm", 0) < 1 or length < 1 or experiment.run.collect != "steps":
        return False
    minibatch: int = getattr(o, "minibatch", 0)
    return minibatch > 0 and minibatch % length > 0


# -- numbers ---------------------------------------------------------------------------------------


def _number_faults(experiment: Experiment) -> Iterator[str]:
    for config in (experiment.run, experiment.options):
        for f in dataclasses.fields(config):
            value = getattr(config, f.name)
            if _is_schedule(config, f.name):
                yield from schedule_faults(f.name, value)
            elif isinstance(value, (int, float)) and not isinstance(value, bool):
                yield from _range_faults(f.name, float(value), f.default)
    run = experiment.run
    if run.timeout > LONGEST_TIMEOUT:
        yield f"timeout={run.timeout:g}: {LONGEST_TIMEOUT:g} seconds at the most, or 0 for ever"
    if run.hidden and any(width < 1 for width in run.hidden):
        yield f"hidden={list(run.hidden)}: every layer needs at least 1 unit; type: --hidden 64 64"
    if (
        run.collect == "episodes"
        and run.batch_steps == 0
        and experiment.spec.learns_from != "unroll"
    ):
        yield (
            "collect=episodes needs the steps of a batch; type: --batch-steps "
            f"{max(1, run.num_envs * run.rollout_length)}"
        )
    if run.collect == "steps" and run.batch_steps > 0:
        yield (
            f"batch_steps={run.batch_steps} is for whole episodes; add --collect episodes, or set "
            "the batch by --num-envs and --rollout-length"
        )


def _range_faults(name: str, value: float, default: Any) -> Iterator[str]:
    shown = f"{name}={value:g}"
    if math.isnan(value):
        yield f"{shown}: a number is needed"
    elif name in _AT_LEAST_ONE:
        if value < 1:
            yield f"{shown}: at least 1 is needed"
    elif _is_share(name):
        if not 0 <= value <= 1:
            yield f"{shown} must lie from 0 to 1, such as {name}=0.99"
    elif value < 0 and not _may_be_negative(name, default):
        yield f"{shown} must not be negative"


def _is_share(name: str) -> bool:
    """Discounts and the lambda of advantages; elsewhere lambda may be a weight."""
    return name in ("gamma", "gae_lambda", "vtrace_lambda", "lam", "discount")


def _may_be_negative(name: str, default: Any) -> bool:
    if name in _MAY_BE_NEGATIVE or "log_std" in name:
        return True
    return isinstance(default, (int, float)) and default < 0


def _is_schedule(config: Any, name: str) -> bool:
    members = get_args(hints_of(type(config))[name])
    return float in members and str in members


def schedule_faults(name: str, value: Any) -> Iterator[str]:
    try:
        schedule = make_schedule(value)
    except ConfigError as error:
        yield f"{name}: {error}"
        return
    lowest = min(schedule(0.0), schedule(0.5), schedule(1.0))
    if not lowest >= 0:
        yield f"{name}={value!r} goes down to {lowest:g}; it must not be negative"


# -- batches ---------------------------------------------------------------------------------------


def _batch_faults(experiment: Experiment) -> Iterator[str]:
    run = experiment.run
    if min(run.workers, run.num_envs, run.rollout_length, run.steps) < 1 or run.batch < 1:
        return  # said above, and there is no arithmetic to do
    if run.actors < 1:
        return  # said above: nobody would act
    if run.num_envs % run.actors:
        yield _sharing_fault(run)
    if run.collect == "steps":
        formula = f"{run.num_envs} envs × {run.rollout_length} steps = {run.batch}"
        minibatch = getattr(experiment.options, "minibatch", 0)
        cut = _cuts_rollouts(experiment)  # said with the memory
        if minibatch > 0 and run.batch % minibatch and not cut:
            yield _minibatch_fault(run.batch, minibatch, formula)
    else:
        formula = f"batch_steps = {run.batch}"
    if run.steps < run.batch:
        yield (
            f"steps={run.steps} is less than one batch ({formula}); type: --steps {run.batch} or "
            "more, or a smaller --rollout-length"
        )


def _sharing_fault(run: RunConfig) -> str:
    envs, workers = run.num_envs, run.actors
    more = run.workers - workers  # a main worker that only learns comes on top
    who = f"{workers} acting workers" if more else f"{workers} workers"
    if envs < workers:
        return (
            f"{who} share {envs} environments, and each needs one at least; type: "
            f"--num-envs {workers}, or --workers {envs + more}"
        )
    up, fewer = math.ceil(envs / workers) * workers, _largest_divisor(envs, workers) + more
    return (
        f"{envs} environments do not go evenly into {who} ({envs} = {workers} × "
        f"{envs // workers} + {envs % workers}); type: --num-envs {up}, or --workers {fewer}"
    )


def _minibatch_fault(batch: int, minibatch: int, formula: str) -> str:
    fits = _largest_divisor(batch, minibatch)
    if minibatch > batch:
        return (
            f"minibatch={minibatch} is more than the batch ({formula}); type: --minibatch {fits}, "
            "or a larger --rollout-length"
        )
    return (
        f"the batch ({formula}) does not go evenly into minibatches of {minibatch} ({batch} = "
        f"{batch // minibatch} × {minibatch} + {batch % minibatch}); type: --minibatch {fits}"
    )


def _largest_divisor(number: int, at_most: int) -> int:
    """The largest divisor of a number that does not exceed a limit."""
    small = [d for d in range(1, math.isqrt(number) + 1) if number % d == 0]
    return max(d for d in (*small, *(number // d for d in small)) if d <= at_most)


# -- packages and devices --------------------------------------------------------------------------


def _package_faults(experiment: Experiment) -> Iterator[str]:
    engine = experiment.run.engine
    package = _PACKAGES.get(engine)
    if package is not None and importlib.util.find_spec(package) is None:
        yield f"engine {engine}: {needs(package, engine)}"
    if experiment.run.wandb and importlib.util.find_spec("wandb") is None:
        yield f"wandb={experiment.run.wandb}: {needs('wandb', 'wandb')}"
    if experiment.run.device == "cuda" and not devices.usable():
        yield "device=cuda, but torch finds no GPU here; type: --device cpu"
    asked = os.environ.get("MANYHANDS_GPUS", "")
    if experiment.run.device != "cpu" and asked.isdigit() and int(asked) > devices.present():
        yield (
            f"MANYHANDS_GPUS={asked}, but this machine has {devices.present()}; give as many as "
            "there are, or leave it out"
        )


# -- environment -----------------------------------------------------------------------------------


def _environment_faults(experiment: Experiment) -> Iterator[str]:
    # WHY here: Gymnasium takes its time to import, and names and numbers do not need it.
    from manyhands.envs.make import Backend

    run, backends = experiment.run, typing.get_args(Backend)
    if run.env_backend not in backends:
        yield f"there is no env_backend {run.env_backend!r}; {nearest(run.env_backend, backends)}"
        return
    clash = [k for k in run.env_kwargs if k in _NOT_KWARGS]
    if clash:
        yield f"env_kwargs has {', '.join(clash)}, which the run itself decides"
        return
    try:
        with stopping.within(supervisor.START_SECONDS, f"{run.env} was not made and closed again"):
            yield from _look_at(run)
    except ManyhandsError as error:
        yield str(error)
    except BaseException as error:  # the environment is anybody's code and may raise anything
        if stopping.asked_for(error):
            raise
        with_ = f" with env_kwargs {run.env_kwargs}" if run.env_kwargs else ""
        yield f"{run.env} cannot be made{with_}: {described(error)}"


def _fit_faults(experiment: Experiment) -> Iterator[str]:
    """Whether algorithm and network fit the environment, which takes torch and an environment."""
    run, spec = experiment.run, experiment.spec
    if run.network_kwargs and not run.network:
        yield "network_kwargs are for a network of your own; add --network package.module:build"
    n_step = getattr(experiment.options, "n_step", 1)
    if spec.actions == "any" and n_step <= 1 and not run.network:
        return
    from manyhands import envs
    from manyhands.envs.make import to_look_at

    try:
        here = to_look_at(run.env, run.env_backend, run.envs_per_worker)
        backend = typing.cast(Any, run.env_backend)
        look = envs.make_vec(run.env, here, backend=backend, seed=0, **run.env_kwargs)
    except BaseException as error:  # said with the environment's faults
        if stopping.asked_for(error):
            raise
        return
    try:
        yield from _action_faults(spec, look.action_space)
        yield from _n_step_faults(run, n_step, _longest(look))
        if run.network:
            yield from _network_faults(experiment, look)
    finally:
        look.close()


def _action_faults(spec: AlgorithmSpec, actions: Any) -> Iterator[str]:
    from manyhands.envs.spaces import check_actions

    try:
        check_actions(spec.actions, actions, spec.name)
    except ConfigError as error:
        yield str(error)


def _n_step_faults(run: RunConfig, n: int, longest: int | None) -> Iterator[str]:
    if longest is not None and n > longest:
        yield (
            f"n_step={n} is longer than an episode of {run.env}, which ends after {longest} "
            f"steps at the latest; type: --n-step {max(1, min(3, longest))}"
        )


def _longest(look: Any) -> int | None:
    """The time limit of an episode, where the environment tells it."""
    first = getattr(look, "envs", [None])[0] or getattr(look, "env", None)
    spec = getattr(first, "spec", None)
    of_envpool = getattr(getattr(spec, "config", None), "max_episode_steps", None)
    longest = getattr(spec, "max_episode_steps", None) or of_envpool
    return int(longest) if longest else None


def _network_faults(experiment: Experiment, look: Any) -> Iterator[str]:
    """A network of the user's own is made and tried."""
    try:
        experiment.spec.build_model(experiment, look.observation_space, look.action_space)
    except ManyhandsError as error:
        said = str(error)
        yield said if "network" in said else f"network {experiment.run.network}: {said}"
    except BaseException as error:  # it is anybody's code and may raise anything
        if stopping.asked_for(error):
            raise
        yield f"network {experiment.run.network} failed: {described(error)}"


def _look_at(run: RunConfig) -> Iterator[str]:
    """Make one environment, ask its spaces, close it."""
    import gymnasium
    from gymnasium.vector import VectorEnv

    from manyhands import envs
    from manyhands.envs.make import to_look_at
    from manyhands.envs.registry import env_factory, is_atari, resolve, takes_num_envs
    from manyhands.envs.vector import as_gymnasium

    own_engine = run.env_backend in ("envpool", "atari", "vector", "pettingzoo", "torch")
    if own_engine or (run.env_backend == "auto" and is_atari(resolve(run.env))):
        here = to_look_at(run.env, run.env_backend, run.envs_per_worker)
        # These check the spaces when they are made.
        look = envs.make_vec(
            run.env,
            here,
            backend=typing.cast(Any, run.env_backend),
            box_actions=run.box_actions,
            **run.env_kwargs,
        )
        look.close()
        if run.opponents and not hasattr(look, "others"):
            yield _NO_OTHERS.format(run.env)
        return
    if run.opponents:
        yield _NO_OTHERS.format(run.env)
    source, here = resolve(run.env), run.envs_per_worker
    env = env_factory(source, run.env_kwargs, max(1, here))()
    if not isinstance(env, gymnasium.Env | VectorEnv):
        game = hasattr(env, "possible_agents")
        yield (
            f"{run.env} gives an object of type {type(env).__name__}, and a gymnasium.Env is "
            "expected" + "; for a game of PettingZoo, type: --env-backend pettingzoo" * game
        )
        return
    try:
        if isinstance(env, VectorEnv):
            env = as_gymnasium(env)
            if env.num_envs != here and takes_num_envs(source):
                yield (
                    f"{run.env} was asked for num_envs={here} ({run.num_envs} envs / {run.actors} "
                    f"workers that act) and made {env.num_envs}; if it makes multiples of one "
                    "number, let --num-envs be a multiple of that number and of the workers"
                )
            elif env.num_envs != here:
                yield (
                    f"{run.env} makes {env.num_envs} environments at once, and each worker has "
                    f"{here} ({run.num_envs} envs / {run.actors} workers); type: --num-envs "
                    f"{env.num_envs * run.actors}, or give it an argument num_envs"
                )
            yield from _space_faults(run, env.single_observation_space, env.single_action_space)
        else:
            yield from _space_faults(run, env.observation_space, env.action_space)
    finally:
        env.close()


def _space_faults(run: RunConfig, observations: Any, actions: Any) -> Iterator[str]:
    from manyhands.envs.adapter import ActionMap
    from manyhands.envs.spaces import (
        check_mask,
        check_observation_space,
        flat_space,
        has_pictures,
    )
    from manyhands.math.running_stats import normalised_parts

    for look in (
        lambda: check_observation_space(observations),
        lambda: check_mask(observations, actions),
        lambda: ActionMap(actions, run.box_actions),
    ):
        try:
            look()
        except ConfigError as error:
            yield str(error)
    if run.normalize_observations and not normalised_parts(flat_space(observations)):
        yield (
            "normalize_observations needs a Box of numbers, or a Dict or Tuple with a Box of "
            f"floats in it, and the observation space is {observations}; type: "
            "--no-normalize-observations"
        )
    if run.bfloat16 and not has_pictures(observations):
        yield (
            "bfloat16 is for convolutions over images (a uint8 Box of three dimensions), and the "
            f"observation space is {observations}; type: --no-bfloat16"
        )
    elif run.bfloat16 and run.network:
        yield (
            f"bfloat16 is for our own convolutions, and network is {run.network}; use "
            "torch.autocast in its forward, and type: --no-bfloat16"
        )


# -- hooks -----------------------------------------------------------------------------------------


def _hooks_faults(experiment: Experiment) -> Iterator[str]:
    name = experiment.run.hooks
    if not name:
        return
    try:
        found: Any = calls.find(name)
    except ConfigError as error:
        yield f"hooks: {error}{_how_to_name(name, str(error))}"
        return
    except Exception as error:  # the module is anybody's code and may raise anything
        yield f"hooks {name} cannot be imported: {described(error)}"
        return
    methods = [method for method in dir(found) if method.startswith("on_")]
    if isinstance(found, type) and (needed := _required(found)):
        yield (
            f"hooks {name} cannot be made: its __init__ asks for {in_words(needed)}; give them "
            "defaults"
        )
    if not methods:
        yield f"hooks {name} has none of the methods {in_words(list(HOOKS), 'or')}"
    for method in methods:
        yield from _method_faults(name, found, method)


def _how_to_name(name: str, said: str) -> str:
    """What to type, after why hooks of that name are not there."""
    place, colon, _ = name.rpartition(":")
    if not colon and "." in name:  # as Python itself writes it
        return f"; type: --hooks {':'.join(name.rsplit('.', 1))}"
    if "No module named" in said:
        return f". {calls.where_to_look(place)}"
    return "; type: --hooks package.module:Class"


def _method_faults(name: str, found: Any, method: str) -> Iterator[str]:
    """Of one method of the hooks, by its name."""
    if method not in HOOKS:
        yield f"hooks {name} has a method {method}; hooks have {in_words(list(HOOKS))}"
        return
    given, function = ("run", *HOOKS[method]), getattr(found, method)
    static = isinstance(inspect.getattr_static(found, method), (staticmethod, classmethod))
    takes = (object(), *given) if isinstance(found, type) and not static else given
    try:
        inspect.signature(function).bind(*takes)
    except (TypeError, ValueError):
        yield f"hooks {name}: {method} is called with ({', '.join(given)}); let it take these"
        return
    if inspect.iscoroutinefunction(function) or inspect.isgeneratorfunction(function):
        yield (
            f"hooks {name}: {method} would never run, for it is called as a plain function; write: "
            f"def {method}({', '.join(('self', *given))}), without async and yield"
        )


def _required(cls: type) -> list[str]:
    """What must be given to make one."""
    try:
        parameters = inspect.signature(cls).parameters.values()
    except (TypeError, ValueError):  # written in C, and silent about itself
        return []
    kinds = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    return [p.name for p in parameters if p.default is p.empty and p.kind not in kinds]


# -- run folder ------------------------------------------------------------------------------------


def _run_dir_faults(experiment: Experiment) -> Iterator[str]:
    path = Path(experiment.run.run_dir or "runs").absolute()
    if experiment.run.run_dir and holds_a_run(path):
        yield (
            f"run_dir {path} already holds a run; to continue it, type: manyhands resume {path}; "
            "for a new one: --run-dir with another folder"
        )
        return
    try:
        os.lstat(path)
    except (FileNotFoundError, NotADirectoryError):
        pass
    except (OSError, ValueError) as error:  # too long, a circle of links, a zero byte
        yield f"run_dir {str(path)!r} cannot be a folder: {error}; type: --run-dir with another"
        return
    there = path
    while not there.exists() and there != there.parent:
        there = there.parent
    if not there.is_dir():
        yield f"run_dir {path} cannot be made: {there} is a file; type: --run-dir with another"
        return
    try:
        with tempfile.TemporaryFile(dir=there) as probe:
            probe.write(b"probe")
    except OSError as error:
        yield (
            f"run_dir {path} cannot be written ({os.strerror(error.errno or 0)}); type: --run-dir "
            "with a folder that you may write to"
        )

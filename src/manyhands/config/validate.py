"""Everything that can be wrong with a run before it starts, all of it at once.

Each fault gives what was asked, the arithmetic, and what to type instead. No process is started;
one environment is made, to look at its spaces, and closed again.
"""

from __future__ import annotations

import dataclasses
import importlib.util
import math
import os
import tempfile
import typing
from collections.abc import Iterator
from pathlib import Path
from typing import Any, get_args

from manyhands import devices, support
from manyhands.algorithms.registry import spec_of
from manyhands.config import (
    Experiment,
    RunConfig,
    hints_of,
    holds_a_run,
    join_faults,
    nearest,
    validate_replay,
    validate_roles,
)
from manyhands.engines import joined
from manyhands.errors import ConfigError, ManyhandsError, needs
from manyhands.math.optimiser import make_schedule

_AT_LEAST_ONE = ("workers", "steps", "num_envs", "rollout_length", "log_every")
_MAY_BE_NEGATIVE = ("target_return",)
_PACKAGES = {"mpi": "mpi4py", "ray": "ray"}


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
        validate_roles.faults,
        validate_replay.faults,
        _number_faults,
        _batch_faults,
        _package_faults,
        _environment_faults,
        _network_faults,
        _run_dir_faults,
    )
    return [fault for part in parts for fault in part(experiment)]


def check_given(experiment: Experiment, observations: Any, actions: Any) -> None:
    """For an Agent: the environments, of these spaces, are there, and no run folder is written."""
    from manyhands.networks import action_spaces

    run = experiment.run
    unnamed = dataclasses.replace(experiment, run=dataclasses.replace(run, env=""))
    parts = (
        _names_faults,
        validate_roles.faults,
        validate_replay.faults,
        _number_faults,
        _batch_faults,
        _package_faults,
    )
    found = [fault for part in parts for fault in part(unnamed)]
    found += _space_faults(run, observations, actions)
    try:
        action_spaces.check(experiment.spec.actions, actions)
    except ConfigError as error:
        found.append(str(error))
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
        ("strategy", strategy, list(support.STRATEGIES)),
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
    if strategy == "single" and run.workers > 1:
        yield (
            f"strategy single has one worker and {run.workers} were asked for; type: --workers 1, "
            "or --strategy allreduce"
        )
    if run.overlap and (strategy != "gather" or run.workers < 2):
        yield (
            f"overlap needs one worker that learns and others that act, with strategy gather; it "
            f"has {run.workers} and {strategy}; type: --strategy gather --workers 2, or more"
        )
    if run.address and run.engine != "ray":
        yield f"address={run.address!r} is Ray's, and the engine is {run.engine}; add --engine ray"


# -- numbers ---------------------------------------------------------------------------------------


def _number_faults(experiment: Experiment) -> Iterator[str]:
    for config in (experiment.run, experiment.options):
        for f in dataclasses.fields(config):
            value = getattr(config, f.name)
            if _is_schedule(config, f.name):
                yield from _schedule_faults(f.name, value)
            elif isinstance(value, (int, float)) and not isinstance(value, bool):
                yield from _range_faults(f.name, float(value), f.default)
    run = experiment.run
    if any(width < 1 for width in run.hidden):
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


def _schedule_faults(name: str, value: Any) -> Iterator[str]:
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
        if minibatch > 0 and run.batch % minibatch:
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


# -- environment -----------------------------------------------------------------------------------


def _environment_faults(experiment: Experiment) -> Iterator[str]:
    # WHY here: Gymnasium takes its time to import, and names and numbers do not need it.
    from manyhands.envs.make import Backend

    run, backends = experiment.run, typing.get_args(Backend)
    if run.env_backend not in backends:
        yield f"there is no env_backend {run.env_backend!r}; {nearest(run.env_backend, backends)}"
        return
    clash = [k for k in run.env_kwargs if k in ("num_envs", "seed", "worker", "backend")]
    if clash:
        yield f"env_kwargs has {', '.join(clash)}, which the run itself decides"
        return
    try:
        yield from _look_at(run)
    except ManyhandsError as error:
        yield str(error)
    except Exception as error:  # the environment is anybody's code and may raise anything
        with_ = f" with env_kwargs {run.env_kwargs}" if run.env_kwargs else ""
        yield f"{run.env} cannot be made{with_}: {type(error).__name__}: {error}"


def _network_faults(experiment: Experiment) -> Iterator[str]:
    """A network of the user's own is made and tried, which takes torch and an environment."""
    run = experiment.run
    if not run.network:
        if run.network_kwargs:
            yield "network_kwargs are for a network of your own; add --network package.module:build"
        return
    from manyhands import envs

    try:
        here = run.envs_per_worker if run.env_backend == "vector" else 1
        backend = typing.cast(Any, run.env_backend)
        look = envs.make_vec(run.env, here, backend=backend, seed=0, **run.env_kwargs)
    except Exception:  # said with the environment's faults
        return
    try:
        experiment.spec.build_model(experiment, look.observation_space, look.action_space)
    except ManyhandsError as error:
        yield str(error)
    except Exception as error:  # it is anybody's code and may raise anything
        yield f"network {run.network} failed: {type(error).__name__}: {error}"
    finally:
        look.close()


def _look_at(run: RunConfig) -> Iterator[str]:
    """Make one environment, ask its spaces, close it."""
    from gymnasium.vector import VectorEnv

    from manyhands import envs
    from manyhands.envs.registry import env_factory, is_atari, resolve

    own_engine = run.env_backend in ("envpool", "atari", "vector")
    if own_engine or (run.env_backend == "auto" and is_atari(resolve(run.env))):
        here = 1 if run.env_backend != "vector" else max(1, run.num_envs // max(1, run.workers))
        # These check the spaces when they are made.
        envs.make_vec(
            run.env,
            here,
            backend=typing.cast(Any, run.env_backend),
            box_actions=run.box_actions,
            **run.env_kwargs,
        ).close()
        return
    env = env_factory(resolve(run.env), run.env_kwargs)()
    try:
        if isinstance(env, VectorEnv):
            here = run.num_envs // max(1, run.workers)
            if env.num_envs != here:
                yield (
                    f"{run.env} makes {env.num_envs} environments at once, and each worker has "
                    f"{here} ({run.num_envs} envs / {run.workers} workers); type: --num-envs "
                    f"{env.num_envs * run.workers}"
                )
            yield from _space_faults(run, env.single_observation_space, env.single_action_space)
        else:
            yield from _space_faults(run, env.observation_space, env.action_space)
    finally:
        env.close()


def _space_faults(run: RunConfig, observations: Any, actions: Any) -> Iterator[str]:
    from gymnasium.spaces import Box

    from manyhands.envs.adapter import ActionMap
    from manyhands.envs.spaces import check_observation_space

    for look in (
        lambda: check_observation_space(observations),
        lambda: ActionMap(actions, run.box_actions),
    ):
        try:
            look()
        except ConfigError as error:
            yield str(error)
    if run.normalize_observations and not isinstance(observations, Box):
        yield (
            f"normalize_observations needs a Box of numbers, and the observation space is "
            f"{observations}; type: --no-normalize-observations"
        )


# -- run folder ------------------------------------------------------------------------------------


def _run_dir_faults(experiment: Experiment) -> Iterator[str]:
    path = Path(experiment.run.run_dir or "runs").absolute()
    if experiment.run.run_dir and holds_a_run(path):
        yield (
            f"run_dir {path} already holds a run; to go on with it, type: manyhands resume {path}; "
            "for a new one: --run-dir with another folder"
        )
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

"""What can be wrong with a run that learns from a replay, before it starts."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from manyhands.config import Experiment
from manyhands.errors import ConfigError
from manyhands.math.optimiser import make_schedule


def faults(experiment: Experiment) -> Iterator[str]:
    if experiment.spec.learns_from != "replay":
        return
    yield from _size_faults(experiment)
    yield from _range_faults(experiment.options)
    yield from _run_faults(experiment)
    yield from _environment_faults(experiment)


def _size_faults(experiment: Experiment) -> Iterator[str]:
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
    if experiment.strategy == "apex" and run.actors > 0 and o.replay_size // run.actors < 1:
        yield (
            f"a replay of {o.replay_size:,} does not go into {run.actors} shards; type: "
            f"--replay-size {10_000 * run.actors}"
        )


def _range_faults(o: Any) -> Iterator[str]:
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


def _run_faults(experiment: Experiment) -> Iterator[str]:
    run, strategy = experiment.run, experiment.strategy
    if run.collect != "steps":
        yield f"{experiment.spec.name} learns from single transitions; type: --collect steps"
    if strategy == "apex" and run.workers <= run.learners:
        yield (
            f"{run.workers} workers of which {run.learners} learn leave nobody to act; type: "
            f"--workers {run.learners + 1}, or more"
        )
    if strategy == "apex" and run.learners > experiment.options.batch_size:
        yield (
            f"{run.learners} learners share batches of {experiment.options.batch_size}; type: "
            f"--batch-size {run.learners}, or more"
        )


def _environment_faults(experiment: Experiment) -> Iterator[str]:
    from manyhands import envs  # slow to import: names and numbers do not need it
    from manyhands.envs.spaces import check_actions

    run = experiment.run
    try:
        here = run.envs_per_worker if run.env_backend == "vector" else 1
        look = envs.make_vec(run.env, here, backend=run.env_backend, seed=0, **run.env_kwargs)  # type: ignore[arg-type]
    except Exception:  # anybody's code; validate.py makes it too, and says what is wrong with it
        return
    try:
        try:
            check_actions(experiment.spec.actions, look.action_space)
        except ConfigError as error:
            yield str(error)
        longest = _longest(look)
        n = experiment.options.n_step
        if longest is not None and n > longest:
            yield (
                f"n_step={n} is longer than an episode of {run.env}, which ends after {longest} "
                f"steps at the latest; type: --n-step {max(1, min(3, longest))}"
            )
    finally:
        look.close()


def _longest(look: Any) -> int | None:
    """The time limit of an episode, where the environment tells it."""
    first = getattr(look, "envs", [None])[0] or getattr(look, "env", None)
    spec = getattr(first, "spec", None)
    longest = getattr(spec, "max_episode_steps", None)
    longest = longest or getattr(
        getattr(spec, "config", None), "max_episode_steps", None
    )  # EnvPool
    return int(longest) if longest else None

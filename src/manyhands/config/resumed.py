"""What may change in a resumed run: some options, and how many workers there are."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from manyhands.config import Experiment, RunConfig, default_strategy, from_plain, to_plain
from manyhands.errors import ConfigError

# Nothing here changes what a stored state means, but for `workers`, to which it is adapted.
OPTIONS = (
    "workers", "steps", "target_return", "engine", "timeout", "address", "log_every",
    "checkpoint_seconds", "tensorboard", "wandb", "quiet", "hooks", "eval_every", "eval_episodes",
)  # fmt: skip


def changed(before: Experiment, options: dict[str, Any]) -> Experiment:
    """The run as it goes on; ConfigError says what cannot change, and what to type."""
    wrong = [name for name in options if name not in OPTIONS]
    if wrong:
        raise ConfigError(
            f"{', '.join(wrong)} cannot change in a resumed run; what can: {', '.join(OPTIONS)}. "
            "For a new run with it, type: manyhands train --config DIR/config.toml"
        )
    plain = to_plain(before)
    after = from_plain({**plain, "run": {**plain["run"], **options}})
    if after.run.workers == before.run.workers:
        return after
    return _with_other_workers(before, after)


def _with_other_workers(before: Experiment, after: Experiment) -> Experiment:
    run, kind = after.run, after.spec.learns_from
    if run.env_backend == "torch":
        raise ConfigError(tensors_stay(before.run.workers))
    if before.strategy_spec.one_worker and run.workers > 1:
        if kind != "rollout":
            other = default_strategy(after.algorithm, run.workers)
            raise ConfigError(
                f"{after.algorithm} on one worker keeps its episodes and what it learns from in "
                f"one place, which {run.workers} workers cannot divide; to begin a new run with "
                "its weights, type: manyhands train --config DIR/config.toml --start-from DIR "
                f"--strategy {other} --workers {run.workers}"
            )
        run = replace(run, strategy="")  # that of several workers, who keep the same of each
    if run.actors > 0 and run.num_envs % run.actors:
        raise ConfigError(_uneven(run))
    return replace(after, run=run)


def tensors_stay(workers: int) -> str:
    return (
        "environments that are tensors draw from one generator of their worker, and cannot be "
        f"divided anew; type: --workers {workers}"
    )


def _uneven(run: RunConfig) -> str:
    envs, acting = run.num_envs, run.actors
    idle = run.workers - acting
    fitting = [n for n in range(1, envs + 1) if envs % n == 0]
    near = [max(n for n in fitting if n < acting)]
    near += [n for n in fitting if n > acting][:1]
    arithmetic = f"{envs} = {acting} × {envs // acting} + {envs % acting}"
    who = f"{acting} workers that act" if idle else f"{acting} workers"
    numbers = " or ".join(f"--workers {n + idle}" for n in near)
    return (
        f"{envs} environments, which stay in a resumed run, do not go evenly into {who} "
        f"({arithmetic}); type: {numbers} (under mpiexec, torchrun or srun: let it start so many)"
    )


def _counted(workers: int) -> str:
    return f"{workers} worker" if workers == 1 else f"{workers} workers"


def said_of_workers(before: Experiment, after: Experiment) -> list[str]:
    """In words, what another number of workers changes; nothing where it is the same."""
    was, run = before.run, after.run
    if was.workers == run.workers:
        return []
    text = f"{_counted(run.workers)} in place of {was.workers}: "
    if after.spec.learns_from == "rollout" and after.strategy_spec.synchronous and not run.elastic:
        return [
            f"{text}the {run.num_envs} environments are divided anew, and the run goes on as it "
            f"would have with {was.workers}, but for rounding"
        ]
    text += "weights, optimiser and counters are as they were, and actors begin new episodes"
    if run.batch != was.batch:
        text += f"; one update learns from {run.batch:,} steps now, and not from {was.batch:,}"
    return [text]

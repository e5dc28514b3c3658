"""EnvPool: C++ environments in a thread pool.

EnvPool resets by NEXT_STEP only, so one row per episode is no transition (`valid` is False
there), and its seeds are fixed when it is made: each sub-env gets the seed of its first episode
from the tree and goes on from there. Its environments are its own: the same id need not be the
same dynamics as Gymnasium's to the last bit.
"""

from __future__ import annotations

import secrets
import warnings
from collections.abc import Sequence
from typing import Any

from manyhands import seeding
from manyhands.envs.adapter import BoxActions
from manyhands.envs.registry import unknown_id
from manyhands.envs.vector import VectorAdapter
from manyhands.errors import ConfigError, needs


def make_envpool(
    env: Any,
    num_envs: int,
    *,
    seed: int | None = None,
    worker: int = 0,
    box_actions: BoxActions = "clip",
    check_finite: bool = True,
    num_threads: int = 1,
    reward_clip: float | None = None,
    first_episode: int = 0,
    **env_kwargs: Any,
) -> VectorAdapter:
    """EnvPool's environments behind the adapter.

    Args:
        env: an id of `envpool.list_all_envs()`; the prefix "ALE/" may stand before Atari games.
        num_threads: EnvPool's threads in this worker. 1 fits one worker per core; give more when
            there are fewer workers than cores (0: as many as there are cores).
        reward_clip: give the learner rewards cut to ±reward_clip; returns stay the true ones.
        first_episode: which episode's seed to begin from; after a resume give the number begun
            before, or the first episodes are played again.
        env_kwargs: handed to `envpool.make`.
        seed, worker, box_actions, check_finite: as for `make_vec`.
    """
    if not isinstance(env, str):
        raise ConfigError(f"EnvPool knows environments by id only, not a {type(env).__name__}")
    try:
        import envpool
    except ImportError as error:
        raise needs("envpool", "envpool", error) from error
    task = env.removeprefix("ALE/")
    known = envpool.list_all_envs()
    if task not in known:
        raise unknown_id(env, known, "these are EnvPool's names, see envpool.list_all_envs()")
    root = secrets.randbits(31) if seed is None else seed

    def make(episodes: Sequence[int]) -> Any:
        seeds = [seeding.integer(root, "env", worker, i, n) for i, n in enumerate(episodes)]
        with warnings.catch_warnings():
            # EnvPool builds its spaces in float64 and Gymnasium warns of every one of them.
            warnings.filterwarnings("ignore", message=".*precision lowered by casting.*")
            made = envpool.make(
                task,
                env_type="gymnasium",
                num_envs=num_envs,
                num_threads=num_threads,
                seed=seeds,
                **env_kwargs,
            )
            _ = made.single_observation_space, made.single_action_space  # built when first used
            return made

    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*precision lowered by casting.*")
        adapter = VectorAdapter(
            make([first_episode] * num_envs),
            seed=root,
            worker=worker,
            box_actions=box_actions,
            check_finite=check_finite,
            seed_style="at_creation",
            reward_clip=reward_clip,
            remake=make,
        )
    adapter.continue_from([first_episode] * num_envs)
    return adapter

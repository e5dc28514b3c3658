"""Atari through ale-py: images from its C++ vector env, or the 128 bytes of RAM.

Images ("image"), as most papers have them, with the randomness of Gymnasium's v5 ids:
    84x84 grey, the last 4 frames stacked [4, 84, 84] uint8; each action held for 4 frames, of which
    the last two are max-pooled; 0 to 30 no-ops at the start of an episode, then FIRE where the
    game has it; with probability 0.25 the last action is repeated instead of the new one (sticky
    actions: 0.25 is what ALE/*-v5 ids say; the old *-v4 ids say 0, and are followed); the game's
    reduced action set; an episode is a whole game (losing a life does not end it) and is truncated
    after 108,000 frames.
RAM ("ram"): the id as Gymnasium makes it with obs_type="ram": [128] uint8, sticky actions and frame
    skip as above, no no-op starts and no stack.

The learner's rewards are cut to ±1 (`reward_clip`); recorded returns are the game's own score.
"""

from __future__ import annotations

from typing import Any, Literal

from manyhands.envs.adapter import BoxActions, VecAdapter
from manyhands.envs.loop import EnvLoop
from manyhands.envs.registry import EnvSource, env_factory, is_atari, known_id, register_atari
from manyhands.envs.vector import VectorAdapter
from manyhands.errors import ConfigError


def make_atari(
    env: EnvSource,
    num_envs: int,
    *,
    seed: int | None = None,
    worker: int = 0,
    box_actions: BoxActions = "clip",
    check_finite: bool = True,
    obs_type: Literal["image", "ram"] = "image",
    frame_stack: int = 4,
    frame_skip: int = 4,
    noop_max: int = 30,
    sticky_actions: float | None = None,
    fire_reset: bool = True,
    episodic_life: bool = False,
    reward_clip: float | None = 1.0,
    num_threads: int = 1,
    **env_kwargs: Any,
) -> VecAdapter:
    """Atari games behind the adapter.

    Args:
        env: a registered id of ale-py, such as "ALE/Pong-v5".
        obs_type: "image" or "ram".
        frame_stack, frame_skip, noop_max, fire_reset: preprocessing, see the top of this file;
            of these RAM uses frame_skip only.
        sticky_actions: probability of repeating the last action; None takes the id's own.
        episodic_life: end the episode (as terminated) when a life is lost; images only.
        reward_clip: the learner's rewards are cut to ±reward_clip; None leaves them.
        num_threads: ALE's threads in this worker; 1 fits one worker per core.
        env_kwargs: handed to ale-py.
        seed, worker, box_actions, check_finite: as for `make_vec`.
    """
    register_atari(required=True)
    if not isinstance(env, str) or not is_atari(env):
        raise ConfigError(f"backend='atari' needs an id of ale-py such as 'ALE/Pong-v5', not {env}")
    spec = known_id(env)
    sticky = sticky_actions
    if sticky is None:
        sticky = float(spec.kwargs.get("repeat_action_probability", 0.25))
    common: dict[str, Any] = {
        "seed": seed,
        "worker": worker,
        "box_actions": box_actions,
        "check_finite": check_finite,
        "reward_clip": reward_clip,
    }
    if obs_type == "ram":
        if episodic_life:
            raise ConfigError("episodic_life is built for obs_type='image' only")
        factory = env_factory(
            env,
            {
                "obs_type": "ram",
                "frameskip": frame_skip,
                "repeat_action_probability": sticky,
                **env_kwargs,
            },
        )
        # WHY: seeding an ALE reloads the game (a tenth of a second); its own generator runs on.
        return EnvLoop([factory] * num_envs, episode_seeds=False, **common)
    if obs_type != "image":
        raise ConfigError(f"obs_type={obs_type!r} is not known; choose image or ram")
    from ale_py.vector_env import AtariVectorEnv

    vector = AtariVectorEnv(
        spec.kwargs["game"],
        num_envs,
        num_threads=num_threads,
        repeat_action_probability=sticky,
        frameskip=frame_skip,
        stack_num=frame_stack,
        noop_max=noop_max,
        use_fire_reset=fire_reset,
        episodic_life=episodic_life,
        reward_clipping=False,  # the adapter clips, and keeps the true score for the records
        autoreset_mode="SameStep",  # every row is a transition
        **env_kwargs,
    )
    return VectorAdapter(vector, seed_style="array", episode_seeds=False, **common)

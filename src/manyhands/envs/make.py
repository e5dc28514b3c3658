"""Making environments: `make_vec` for training, `seeded_vector` for a loop of your own.

EnvPool's are C++ environments in a thread pool. It resets by NEXT_STEP only, so one row per episode
is no transition (`valid` is False there), and its seeds are fixed when it is made: each sub-env
gets the seed of its first episode from the tree and goes on from there. Its environments are its
own: the same id need not be the same dynamics as Gymnasium's to the last bit.

Atari through ale-py: images from its C++ vector env, or the 128 bytes of RAM.

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

import secrets
import warnings
from collections.abc import Sequence
from numbers import Integral
from typing import Any, Literal, get_args

import gymnasium
import numpy as np
from gymnasium.vector import SyncVectorEnv, VectorEnv, VectorWrapper

from manyhands import seeding
from manyhands.envs.adapter import BoxActions, VecAdapter
from manyhands.envs.loop import EnvLoop
from manyhands.envs.registry import (
    EnvSource,
    env_factory,
    friendly_errors,
    is_atari,
    known_id,
    register_atari,
    resolve,
    takes_num_envs,
    unknown_id,
)
from manyhands.envs.vector import Groups, VectorAdapter, as_gymnasium
from manyhands.errors import ConfigError, needs

Backend = Literal["auto", "gymnasium", "vector", "envpool", "atari", "pettingzoo", "torch"]


def make_vec(
    env: EnvSource | VectorEnv,
    num_envs: int,
    *,
    backend: Backend = "auto",
    seed: int | None = None,
    worker: int = 0,
    box_actions: BoxActions = "clip",
    check_finite: bool = True,
    **env_kwargs: Any,
) -> VecAdapter:
    """`num_envs` environments that give clean transitions; see `adapter.py`.

    Args:
        env: a Gymnasium id, "package.module:function", a callable returning a `gymnasium.Env`
            (or a `VectorEnv`: it is given `num_envs` if that is an argument of it), or a
            `VectorEnv`.
        num_envs: sub-environments of this worker.
        backend: "gymnasium" steps Python environments in a loop; "vector" uses the environment's
            own vector implementation; "envpool" and "atari" are C++ engines; with "pettingzoo"
            each agent of a game is one of the environments; "torch" has them as tensors
            (envs/tensors.py). "auto" takes "atari" for ALE's games,
            "vector" for a `VectorEnv`, and "gymnasium" for all others.
        seed, worker: root of the seed tree and this worker's branch of it.
        box_actions: "clip", "scale" or "raw"; see `ActionMap`.
        check_finite: refuse NaN and infinity, naming env, episode, step and seed.
        env_kwargs: handed to the environment.
    """
    if backend not in get_args(Backend):
        raise ConfigError(f"backend={backend!r} is not known; choose from {get_args(Backend)}")
    if num_envs < 1:
        raise ConfigError(f"num_envs={num_envs}; at least 1 is needed")
    common: dict[str, Any] = {
        "seed": seed,
        "worker": worker,
        "box_actions": box_actions,
        "check_finite": check_finite,
    }
    if backend == "envpool":
        return make_envpool(env, num_envs, **common, **env_kwargs)
    if isinstance(env, VectorEnv):
        return _adapt(env, num_envs, backend, common)
    if backend == "torch":
        from manyhands.envs.tensors import make_tensors  # torch: not for those who do not ask

        return make_tensors(env, num_envs, **common, **env_kwargs)
    if backend == "pettingzoo":
        from manyhands.envs.multi_agent import make_pettingzoo

        return make_pettingzoo(env, num_envs, env_kwargs=env_kwargs, **common)
    source = resolve(env)
    if backend == "atari" or (backend == "auto" and is_atari(source)):
        return make_atari(source, num_envs, **common, **env_kwargs)
    if backend == "vector" and isinstance(source, str):
        return _adapt(_own_vector(source, num_envs, env_kwargs), num_envs, backend, common)
    factory = env_factory(source, env_kwargs, num_envs)
    if isinstance(source, str):
        # WHY not for ALE: seeding one reloads the game, 0.2 s an episode.
        return EnvLoop([factory] * num_envs, episode_seeds=not is_atari(source), **common)
    first = factory()  # a callable may give either kind: only making one tells
    if isinstance(first, VectorEnv):
        return _adapt(first, num_envs, backend, common)
    if backend == "vector":
        raise ConfigError("backend='vector' needs a VectorEnv; the callable made a single env")
    return EnvLoop([lambda: first, *[factory] * (num_envs - 1)], **common)


def _adapt(env: VectorEnv, num_envs: int, backend: str, common: dict[str, Any]) -> VectorAdapter:
    if backend not in ("auto", "vector"):
        raise ConfigError(f"backend={backend!r} cannot take a VectorEnv; use 'auto' or 'vector'")
    env = as_gymnasium(env)
    if env.num_envs != num_envs:
        raise ConfigError(
            f"num_envs={num_envs}, but the VectorEnv has {env.num_envs} sub-environments"
        )
    return VectorAdapter(env, **common)


def _own_vector(env_id: str, num_envs: int, env_kwargs: dict[str, Any]) -> VectorEnv:
    if gymnasium.spec(env_id).vector_entry_point is None:
        raise ConfigError(
            f"{env_id} has no vector implementation of its own; use backend='gymnasium'"
        )
    with friendly_errors(env_id):
        return gymnasium.make_vec(
            env_id, num_envs, vectorization_mode="vector_entry_point", **env_kwargs
        )


class SeededVector(VectorWrapper):  # type: ignore[misc]
    """An ordinary vector env whose `reset(seed=...)` takes its seeds from the tree.

    Gymnasium gives sub-env i the seed `seed + i`, so neighbouring seeds and workers play the same
    episodes. Here sub-env i of worker w gets the seed at ("env", w, i, 0). Everything else, the
    NEXT_STEP autoreset included, is Gymnasium's own.
    """

    def __init__(self, env: VectorEnv, *, worker: int = 0) -> None:
        super().__init__(env)
        self.worker = worker
        self._pending: int | None = None

    def seeds_from(self, seed: int) -> None:
        """Let the next `reset()` that is given no seed use this one; later ones run on."""
        self._pending = seed
        self._seed_action_spaces(seed)

    def reset(
        self,
        *,
        seed: int | Sequence[int | None] | None = None,
        options: dict[str, Any] | None = None,
    ) -> tuple[Any, dict[str, Any]]:
        if seed is None:
            seed, self._pending = self._pending, None
        if seed is None or not isinstance(seed, Integral):
            return self.env.reset(seed=seed, options=options)  # type: ignore[no-any-return]
        self._pending = None
        seed = int(seed)  # a numpy number, as argument parsers may give, is a seed too
        self._seed_action_spaces(seed)
        seeds = [seeding.integer(seed, "env", self.worker, i, 0) for i in range(self.num_envs)]
        return self.env.reset(seed=seeds, options=options)  # type: ignore[no-any-return]

    def _seed_action_spaces(self, seed: int) -> None:
        self.action_space.seed(seeding.integer(seed, "action", self.worker))
        self.single_action_space.seed(seeding.integer(seed, "action", self.worker, 1))


def seeded_vector(
    env: EnvSource,
    num_envs: int,
    *,
    worker: int = 0,
    root_seed: int | None = None,
    **env_kwargs: Any,
) -> SeededVector:
    """An ordinary Gymnasium vector env for a loop of your own, seeded from the tree.

    Args:
        env: as for `make_vec`.
        num_envs: sub-environments of this worker.
        worker: this worker's number.
        root_seed: what the first `reset()` without a seed uses; None leaves it to `reset(seed=)`.
        env_kwargs: handed to the environment.
    """
    if num_envs < 1:
        raise ConfigError(f"num_envs={num_envs}; at least 1 is needed")
    source = resolve(env)
    if isinstance(source, str):
        with friendly_errors(source):
            # WHY explicit: left to itself Gymnasium takes another implementation where one exists.
            vector = gymnasium.make_vec(source, num_envs, vectorization_mode="sync", **env_kwargs)
    else:
        vector = SyncVectorEnv([env_factory(source, env_kwargs)] * num_envs)
    seeded = SeededVector(vector, worker=worker)
    if root_seed is not None:
        seeded.seeds_from(root_seed)
    return seeded


def to_look_at(env: str, backend: str, num_envs: int) -> int:
    """How many environments to make where one is enough, of the `num_envs` of a worker: one, but
    all where they come together."""
    together = backend in ("vector", "pettingzoo") or (
        backend == "auto" and takes_num_envs(resolve(env))
    )
    return max(1, num_envs) if together else 1


def frame_stack(env: str, backend: str, env_kwargs: dict[str, Any], space: Any) -> int:
    """How many frames each observation is a stack of, the newest last; 0 where it is none.

    Those of ALE and of EnvPool's Atari games are; of other environments' images it is not known.
    """
    shape: Any = getattr(space, "shape", None) or ()
    ale = env.startswith("ALE/") and backend in ("auto", "atari")
    if len(shape) != 3 or space.dtype != np.uint8 or not (ale or backend == "envpool"):
        return 0
    stack = int(env_kwargs.get("frame_stack" if ale else "stack_num", 4))
    return stack if shape[0] == stack and stack >= 2 else 0


def shows_frames(env: str, backend: str, env_kwargs: dict[str, Any]) -> bool:
    """Whether observations are ALE's stacks of grey frames, each moved on by one from the one
    before, and black before an episode's start; actions are choices."""
    ale = backend == "atari" or (backend == "auto" and is_atari(resolve(env)))
    usual = {"obs_type": "image", "continuous": False, "grayscale": True, "episodic_life": False}
    asked = all(env_kwargs.get(name, value) == value for name, value in usual.items())
    return ale and asked and int(env_kwargs.get("frame_stack", 4)) >= 2


def takes_threads(env: str, backend: str, env_kwargs: dict[str, Any]) -> bool:
    """Whether these environments are stepped by threads of their own: `num_threads` of them."""
    if backend == "envpool":
        return True
    ale = backend == "atari" or (backend == "auto" and is_atari(resolve(env)))
    return ale and env_kwargs.get("obs_type", "image") == "image"


# -- EnvPool: C++ environments in a thread pool ----------------------------------------------------


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
        num_threads: EnvPool's threads in this worker. 1 fits one worker per core (0: as many as
            there are cores); `manyhands train` divides the cores among those that act.
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


# -- Atari through ale-py --------------------------------------------------------------------------


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
    groups: int = 0,
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
        num_threads: ALE's threads in this worker, as EnvPool's.
        groups: so many vector envs, each with its threads, that can be stepped by themselves:
            `Groups`; 0: one vector env.
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

    def part(count: int) -> VectorAdapter:
        vector = AtariVectorEnv(
            spec.kwargs["game"],
            count,
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

    if not groups:
        return part(num_envs)
    counts = [len(some) for some in np.array_split(np.arange(num_envs), groups) if len(some)]
    common["seed"] = secrets.randbits(31) if seed is None else seed
    parts = [part(count) for count in counts]
    return Groups(parts, seed=common["seed"], worker=worker, box_actions=box_actions)

"""Watching a policy: one episode at a time, filmed without a screen.

Frames go to ffmpeg (the one that imageio-ffmpeg brings) as they are drawn, so that a long episode
needs no memory. A file is there when it is whole.
"""

from __future__ import annotations

import ctypes.util
import inspect
import os
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from gymnasium.vector import VectorEnv

from manyhands import seeding, streams
from manyhands.config import Experiment
from manyhands.envs import make_vec
from manyhands.envs.registry import env_factory, is_atari, resolve
from manyhands.errors import ConfigError, ManyhandsError, SupportError
from manyhands.policy import Policy

Array = np.ndarray[Any, np.dtype[Any]]

BRANCH = "video"  # of the seed tree: neither training's nor evaluation's episodes
FPS = 30.0  # where an environment does not say
_ATARI_FPS, _ATARI_SKIP = 60.0, 4
_ENCODER_SECONDS = 600.0  # a GIF's palette is worked out when all frames are there


@dataclass
class Played:
    """One episode."""

    observations: list[Any] = field(default_factory=list)  # one more than actions: the last too
    actions: list[Any] = field(default_factory=list)
    rewards: list[float] = field(default_factory=list)

    @property
    def total(self) -> float:
        return float(sum(self.rewards))


class Stage(Protocol):
    """An environment with a camera."""

    fps: float

    def reset(self, seed: int) -> Any: ...

    def step(self, action: Any) -> tuple[Any, float, bool]:
        """(observation, reward, whether the episode is over)."""
        ...

    def frame(self) -> Array:
        """What it looks like now: [height, width, 3] bytes."""
        ...

    def close(self) -> None: ...


def play(
    policy: Policy,
    stage: Stage,
    seed: int,
    *,
    deterministic: bool = True,
    max_length: int = 0,
    watch: Callable[[Stage], None] | None = None,
) -> Played:
    """Play one episode; `watch` is called at every state, the first and last included."""
    played = Played()
    policy.reset()
    observation, over = stage.reset(seed), False
    played.observations.append(observation)
    while not over:
        if watch is not None:
            watch(stage)
        action = policy.act(observation, deterministic)
        observation, reward, over = stage.step(action)
        played.observations.append(observation)
        played.actions.append(action)
        played.rewards.append(reward)
        over = over or len(played.actions) == max_length
    if watch is not None:
        watch(stage)
    return played


def stage_of(experiment: Experiment, *, camera: bool = True) -> Stage:
    """The environment of a run, seen as the policy saw it; SupportError if it cannot be drawn."""
    run = experiment.run
    if camera:
        go_headless()
    if run.env_backend == "pettingzoo":
        raise SupportError(f"{run.env} is a game of several agents, which cannot be shown yet")
    source = resolve(run.env)
    # EnvPool cannot draw: its place is taken by the same id here, which knows no EnvPool options.
    kwargs = {} if run.env_backend == "envpool" else run.env_kwargs
    if is_atari(source):
        if kwargs.get("obs_type", "image") == "image":
            return AtariStage(run.env, kwargs)
        mode: dict[str, Any] = {"render_mode": "rgb_array"} if camera else {}
        loop: Any = make_vec(run.env, 1, backend="atari", seed=0, **kwargs, **mode)
        return PlainStage(loop.envs[0], run.env, _ATARI_FPS / _skip(kwargs))
    if not isinstance(source, str):
        return _own_stage(source, experiment, camera)
    env = env_factory(source, kwargs)()
    if camera:
        modes = env.metadata.get("render_modes") or []
        env.close()
        if "rgb_array" not in modes:
            raise SupportError(
                f"{run.env} cannot be filmed: it has no render mode 'rgb_array' (it has "
                f"{', '.join(map(repr, modes)) or 'none'})"
            )
        env = env_factory(source, {**kwargs, "render_mode": "rgb_array"})()
    return PlainStage(env, run.env)


def _own_stage(source: Any, experiment: Experiment, camera: bool) -> Stage:
    """A user's own environment, which may know nothing of cameras."""
    run = experiment.run
    kwargs = dict(run.env_kwargs)
    if camera and "render_mode" not in kwargs:
        names = inspect.signature(source).parameters.values()
        if any(p.name == "render_mode" or p.kind is p.VAR_KEYWORD for p in names):
            kwargs["render_mode"] = "rgb_array"
    env = env_factory(source, kwargs)()
    if isinstance(env, VectorEnv):
        env.close()
        raise SupportError(f"{run.env} makes a VectorEnv; a single environment is needed here")
    if camera and getattr(env, "render_mode", None) != "rgb_array":
        env.close()
        raise SupportError(
            f"{run.env} cannot be filmed: it must take render_mode='rgb_array', keep it in "
            "self.render_mode, and draw in render()"
        )
    return PlainStage(env, run.env)


class PlainStage:
    """One `gymnasium.Env`."""

    def __init__(self, env: Any, name: str, fps: float = 0.0) -> None:
        self.env, self._name = env, name
        self.fps = fps or float(env.metadata.get("render_fps") or FPS)

    def reset(self, seed: int) -> Any:
        return self.env.reset(seed=seed)[0]

    def step(self, action: Any) -> tuple[Any, float, bool]:
        observation, reward, terminated, truncated, _ = self.env.step(action)
        return observation, float(reward), bool(terminated or truncated)

    def frame(self) -> Array:
        try:
            picture = self.env.render()
        except ManyhandsError:
            raise
        except Exception as error:
            backend = os.environ.get("MUJOCO_GL", "")
            hint = (
                f"; for MuJoCo, MUJOCO_GL={backend} was used: is its library installed (libegl1, "
                "or libosmesa6 with MUJOCO_GL=osmesa)?"
                if "mujoco" in type(self.env.unwrapped).__module__
                else ""
            )
            raise SupportError(
                f"{self._name} cannot be drawn on this machine: {type(error).__name__}: "
                f"{error}{hint}"
            ) from error
        if not isinstance(picture, np.ndarray) or picture.ndim != 3:
            raise SupportError(
                f"{self._name} cannot be filmed: render() gave {type(picture).__name__}, and a "
                "picture [height, width, 3] is expected"
            )
        return picture

    def close(self) -> None:
        self.env.close()


class AtariStage:
    """Two games in step: one as the policy sees it, one in colour.

    ALE's vector env gives what the policy was trained on, and only that. The same seed and the same
    actions give the same game, so a second one with other preprocessing is its picture.
    """

    def __init__(self, env: str, env_kwargs: dict[str, Any]) -> None:
        self._env, self._kwargs = env, dict(env_kwargs)
        self.fps = _ATARI_FPS / _skip(env_kwargs)
        self._games: list[Any] = []
        self._picture: Array = np.zeros((210, 160, 3), np.uint8)

    def reset(self, seed: int) -> Any:
        self.close()
        colour = {"frame_stack": 1, "grayscale": False, "img_height": 210, "img_width": 160}
        self._games = [
            make_vec(
                self._env, 1, backend="atari", seed=seed, box_actions="raw",
                **{**self._kwargs, "reward_clip": None, **preprocessing},
            )
            for preprocessing in ({}, colour)
        ]  # fmt: skip
        seen, shown = (game.reset() for game in self._games)
        self._picture = shown[0, -1].copy()
        return seen[0].copy()

    def step(self, action: Any) -> tuple[Any, float, bool]:
        seen, shown = (game.step(np.asarray(action)[None]) for game in self._games)
        over = bool(seen.terminated[0] or seen.truncated[0])
        if over:  # the next game has begun already: the last picture is the final observation
            self._picture = shown.finals[0].obs[-1]
            return seen.finals[0].obs, float(seen.reward[0]), True
        self._picture = shown.obs[0, -1].copy()
        return seen.obs[0].copy(), float(seen.reward[0]), False

    def frame(self) -> Array:
        return self._picture

    def close(self) -> None:
        for game in self._games:
            game.close()
        self._games = []


def _skip(env_kwargs: dict[str, Any]) -> int:
    return int(env_kwargs.get("frame_skip", _ATARI_SKIP))


def go_headless() -> None:
    """Let pygame and MuJoCo draw without a screen, unless the user has chosen how.

    CRUCIAL: before either is imported for drawing; they look once.
    """
    os.environ.setdefault("SDL_VIDEODRIVER", "dummy")
    os.environ.setdefault("SDL_AUDIODRIVER", "dummy")
    os.environ.setdefault("PYGAME_HIDE_SUPPORT_PROMPT", "1")
    if "MUJOCO_GL" not in os.environ:
        # Asked for beforehand: PyOpenGL cannot change its mind once it has tried one.
        there = ctypes.util.find_library("EGL") or not ctypes.util.find_library("OSMesa")
        os.environ["MUJOCO_GL"] = "egl" if there else "osmesa"


class Film:
    """A file of moving pictures: H.264 in MP4 as every browser plays it, or a GIF.

    Args:
        path: ends in .mp4 or .gif.
        fps: pictures a second.
        width: scale to so many columns; 0 leaves small pictures enlarged to be seen well.
    """

    def __init__(self, path: str | os.PathLike[str], fps: float, *, width: int = 0) -> None:
        self.path = Path(path)
        if self.path.suffix not in (".mp4", ".gif"):
            raise ConfigError(f"{self.path}: give a name that ends in .mp4 or in .gif")
        if not self.path.absolute().parent.is_dir():
            raise ConfigError(f"{self.path}: there is no folder {self.path.absolute().parent}")
        self.frames = 0
        self._beside = self.path.with_name(f".tmp-{os.getpid()}-{self.path.name}")
        # A GIF counts in hundredths of a second, and viewers slow down what is below two.
        self._fps = min(fps, 50.0) if self.path.suffix == ".gif" else fps
        self._width = width
        self._shape: tuple[int, ...] = ()
        self._writer: Any = None

    def add(self, picture: Array) -> None:
        picture = np.ascontiguousarray(picture[..., :3], dtype=np.uint8)
        if self._writer is None:
            self._shape = picture.shape
            self._writer = self._open(picture.shape[1], picture.shape[0])
            self._writer.send(None)
        if picture.shape != self._shape:
            raise SupportError(
                f"the size of the pictures changes from {self._shape} to {picture.shape}"
            )
        self._writer.send(picture)
        self.frames += 1

    def _open(self, width: int, height: int) -> Any:
        try:
            import imageio_ffmpeg
        except ImportError as error:
            raise SupportError(
                "films need imageio-ffmpeg; type: pip install imageio-ffmpeg"
            ) from error
        times = 1 if self._width else max(1, -(-320 // max(width, height)))
        scale = (
            f"scale={self._width or width * times}:-1:flags={'area' if times == 1 else 'neighbor'}"
        )
        if self.path.suffix == ".gif":
            palette = "split[a][b];[a]palettegen=stats_mode=full[p];[b][p]paletteuse=dither=none"
            codec = {"codec": "gif", "pix_fmt_out": "pal8"}
            more = ["-vf", f"{scale},{palette}", "-loop", "0"]
        else:
            # yuv420p has one colour for 2 × 2 pixels: sides are made even by a line of black.
            codec = {"codec": "libx264", "pix_fmt_out": "yuv420p"}
            more = ["-vf", f"{scale},pad=ceil(iw/2)*2:ceil(ih/2)*2", "-movflags", "+faststart"]
        return imageio_ffmpeg.write_frames(
            str(self._beside), (width, height), fps=self._fps, macro_block_size=1,
            ffmpeg_timeout=_ENCODER_SECONDS, ffmpeg_log_level="error", output_params=more, **codec,
        )  # fmt: skip

    def __enter__(self) -> Film:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        try:
            if self._writer is not None:
                self._writer.close()
                if kind is None:
                    os.replace(self._beside, self.path)
        finally:
            self._beside.unlink(missing_ok=True)


@streams.given_back()
def film(
    policy: Policy,
    path: str | os.PathLike[str],
    *,
    episodes: int = 1,
    seed: int | None = None,
    fps: float = 0.0,
    deterministic: bool = True,
    max_length: int = 0,
    width: int = 0,
) -> list[Played]:
    """Film episodes one after the other into one file; what was played."""
    from manyhands.viewing.evaluation import experiment_of, few_threads

    experiment = experiment_of(policy)
    root = experiment.run.seed if seed is None else seed
    policy.seed(root, BRANCH, "actions")
    seeding.seed_everything(root, BRANCH, "worker")  # an environment may draw from these
    stage = stage_of(experiment)
    try:
        with few_threads(policy), Film(path, fps or stage.fps, width=width) as reel:
            return [
                play(
                    policy,
                    stage,
                    seeding.integer(root, BRANCH, i),
                    deterministic=deterministic,
                    max_length=max_length,
                    watch=lambda there: reel.add(there.frame()),
                )
                for i in range(episodes)
            ]
    finally:
        stage.close()

"""Spaces of spaces: a robot with two cameras' worth of numbers, a joint, a mode and a picture.

The same for a Dict in a Dict and for a Tuple, from training to a policy that stands alone.
"""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import pytest
from gymnasium import spaces
from gymnasium.vector import AutoresetMode, SyncVectorEnv

import manyhands as mh
from manyhands import trees
from manyhands.envs import check_env, make_vec
from manyhands.envs.spaces import check_observation_space, flat_space
from manyhands.errors import ConfigError
from manyhands.math.running_stats import Moments, normalised_parts
from manyhands.viewing.evaluation import evaluate

NAMES = ["camera/left", "camera/right", "mode", "position/0", "position/1"]


class Robot(gymnasium.Env):
    """The side that the bright picture is on pays; numbers of very different sizes beside it."""

    def __init__(self, length: int = 12, flat: bool = False) -> None:
        self.length, self.flat = length, flat
        self._nested = spaces.Dict(
            {
                "camera": spaces.Dict(
                    {
                        "left": spaces.Box(0, 255, (4, 4, 1), np.uint8),
                        "right": spaces.Box(-np.inf, np.inf, (2,), np.float32),
                    }
                ),
                "position": spaces.Tuple(
                    [spaces.Box(-1e4, 1e4, (3,), np.float32), spaces.MultiBinary(2)]
                ),
                "mode": spaces.Discrete(3),
            }
        )
        self.observation_space: Any = flat_space(self._nested) if flat else self._nested
        self.action_space = spaces.Discrete(2)

    def _observation(self) -> Any:
        rng = self.np_random
        self._bright = int(rng.integers(2))
        right = np.array([self._bright, rng.normal()], np.float32)
        seen = {
            "camera": {"left": rng.integers(0, 255, (4, 4, 1), np.uint8), "right": right},
            "position": (rng.normal(1000.0, 300.0, 3).astype(np.float32),
                         rng.integers(0, 2, 2).astype(np.int8)),
            "mode": np.int64(rng.integers(3)),
        }  # fmt: skip
        return trees.named(seen) if self.flat else seen

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        super().reset(seed=seed)
        self._steps = 0
        return self._observation(), {}

    def step(self, action: Any) -> Any:
        reward = float(action == self._bright)
        self._steps += 1
        return self._observation(), reward, False, self._steps >= self.length, {}


class Pair(gymnasium.Env):
    """A Tuple of a place and a choice."""

    observation_space = spaces.Tuple([spaces.Box(-1.0, 1.0, (2,), np.float32), spaces.Discrete(2)])
    action_space = spaces.Box(-1.0, 1.0, (1,), np.float32)

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        super().reset(seed=seed)
        self._steps = 0
        return self._observation(), {}

    def step(self, action: Any) -> Any:
        self._steps += 1
        return self._observation(), float(-np.abs(action).sum()), self._steps >= 9, False, {}

    def _observation(self) -> Any:
        place = self.np_random.uniform(-1, 1, 2).astype(np.float32)
        return place, np.int64(self.np_random.integers(2))


class Numbered(Pair):
    """The same two as a Dict whose keys are numbers, as agents or cameras are numbered."""

    observation_space = spaces.Dict(dict(enumerate(Pair.observation_space)))

    def _observation(self) -> Any:
        return dict(enumerate(super()._observation()))


ROBOT, PAIR = f"{__name__}:Robot", f"{__name__}:Pair"
SMALL = {"engine": "inline", "hidden": (8,), "quiet": True, "tensorboard": False, "num_envs": 4}


def learned(folder: Path, algorithm: str = "ppo", env: str = ROBOT, **options: Any) -> Path:
    run = folder / f"{algorithm}{len(list(folder.iterdir()))}"
    asked = SMALL | {"steps": 512, "rollout_length": 32, "env": env, "run_dir": str(run)} | options
    if algorithm == "ppo":
        asked = {"minibatch": 64} | asked
    mh.train(algorithm, **asked)
    return run


def arrays_of(run: Path) -> dict[str, Any]:
    from safetensors.numpy import load_file

    return dict(load_file(run / "policy.safetensors"))


# -- names -----------------------------------------------------------------------------------------


def test_parts_have_names_and_are_checked() -> None:
    space = Robot().observation_space
    assert sorted(flat_space(space).spaces) == NAMES
    assert list(flat_space(Pair.observation_space).spaces) == ["0", "1"]
    flat = spaces.Dict({"a": spaces.Discrete(2)})
    assert flat_space(flat) is flat
    seen = Robot().reset(seed=1)[0]
    assert sorted(trees.named(seen)) == NAMES
    assert trees.named(trees.named(seen)).keys() == trees.named(seen).keys()
    twice = spaces.Dict({"a/b": spaces.Discrete(2), "a": spaces.Dict({"b": spaces.Discrete(2)})})
    with pytest.raises(ConfigError, match="called 'a/b'"):
        check_observation_space(twice)
    deep = spaces.Dict({"a": spaces.Tuple([spaces.Text(3)])})
    with pytest.raises(ConfigError, match=r"key 'a/0' is Text"):
        check_observation_space(deep)
    with pytest.raises(ConfigError, match="empty Tuple"):
        check_observation_space(spaces.Tuple([]))


def test_check_env_takes_them() -> None:
    assert check_env(Robot) == []
    assert check_env(Pair) == []


@pytest.mark.parametrize("mode", [None, *AutoresetMode])
def test_every_way_of_stepping_gives_the_same_transitions(mode: AutoresetMode | None) -> None:
    """Nested against flat, single environments and vector ones in each autoreset mode."""
    found = []
    for flat in (False, True):
        source: Any = [lambda flat=flat: Robot(5, flat)] * 2
        if mode is not None:
            source = SyncVectorEnv(source, autoreset_mode=mode)
        envs = make_vec(source if mode is not None else source[0], 2, seed=3)
        assert sorted(envs.observation_space.spaces) == NAMES
        rows = [trees.map(np.copy, envs.reset())]
        for t in range(14):
            step = envs.step(np.full(2, t % 2))
            rows += [trees.map(np.copy, step.obs), step.reward.copy()]
            rows += [final.obs for final in step.finals]
        envs.close()
        found.append(rows)
    for one, other in zip(*found, strict=True):
        trees.map(np.testing.assert_array_equal, one, other)


# -- training --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("algorithm", "env", "options"),
    [
        ("ppo", ROBOT, {}),
        ("impala", PAIR, {"lstm": 4}),
        ("dqn", ROBOT, {"learning_starts": 64}),
        ("ddpg", PAIR, {"learning_starts": 64}),
        ("trpo", PAIR, {"collect": "episodes", "batch_steps": 64}),
    ],
)
def test_a_nested_environment_trains_as_its_flat_twin(
    algorithm: str, env: str, options: dict[str, Any], tmp_path: Path
) -> None:
    run = learned(tmp_path, algorithm, env, normalize_observations=True, steps=256, **options)
    policy = mh.load(run)
    single = (Robot if env == ROBOT else Pair)()
    seen, _ = single.reset(seed=1)
    assert single.action_space.contains(policy.act(seen))
    assert np.isfinite(policy.value(seen))
    if env == ROBOT:
        flat = {"env_kwargs": {"flat": True}}
        twin = learned(
            tmp_path, algorithm, env, normalize_observations=True, steps=256, **options, **flat
        )
        for name, weights in arrays_of(twin).items():
            np.testing.assert_array_equal(arrays_of(run)[name], weights, err_msg=name)


def test_learns_looks_and_exports(tmp_path: Path) -> None:
    run = learned(tmp_path, steps=4096, learning_rate=3e-3, normalize_observations=True)
    found = evaluate(run, episodes=20)
    assert found.mean_return > 10  # of 12; 6 by chance
    policy = mh.load(run)
    env = Robot()
    seen = [env.reset(seed=i)[0] for i in range(6)]
    batch = trees.map(lambda *x: np.stack(x), *seen)
    actions = policy.act_batch(batch)
    np.testing.assert_array_equal(actions, [policy.act(one) for one in seen])
    onnx = pytest.importorskip("onnxruntime")
    session = onnx.InferenceSession(str(policy.export(tmp_path / "policy.onnx")))
    assert [part.name for part in session.get_inputs()] == NAMES
    (exported,) = session.run(None, trees.named(batch))
    np.testing.assert_array_equal(exported, actions)


def test_keys_may_be_numbers(tmp_path: Path) -> None:
    """They learn what a Tuple of the same parts learns, and are given as the environment gives
    them."""
    runs = [learned(tmp_path, env=env, steps=128) for env in (f"{__name__}:Numbered", PAIR)]
    one, two = map(arrays_of, runs)
    assert one.keys() == two.keys()
    assert all(np.array_equal(one[name], two[name]) for name in one)
    place = np.array([0.5, -0.5], np.float32)
    policies = [mh.load(run) for run in runs]
    assert policies[0].act({0: place, 1: 1}) == policies[1].act((place, 1))


def test_resumes_exactly(tmp_path: Path) -> None:
    options = {"normalize_observations": True, "checkpoint_seconds": 0, "learning_rate": 1e-3}
    whole = learned(tmp_path, steps=512, **options)
    half = learned(tmp_path, steps=256, **options)
    from manyhands.cli.main import main

    assert main(["resume", str(half), "--steps", "512", "--quiet"]) == 0
    for name, weights in arrays_of(whole).items():
        np.testing.assert_array_equal(arrays_of(half)[name], weights, err_msg=name)


@pytest.mark.parametrize("strategy", ["gather", "allreduce"])
def test_statistics_of_parts_are_those_of_one_worker(strategy: str, tmp_path: Path) -> None:
    options = {"normalize_observations": True, "steps": 384}
    alone = arrays_of(learned(tmp_path, **options))
    two = arrays_of(learned(tmp_path, workers=2, strategy=strategy, **options))
    named = {name for name in alone if name.startswith("normaliser/obs")}
    assert named >= {"normaliser/obs/camera/right/mean", "normaliser/obs/position/0/mean"}
    assert not any("left" in name or "position/1" in name or "mode" in name for name in named)
    for name, weights in alone.items():
        np.testing.assert_allclose(two[name], weights, rtol=1e-4, atol=1e-5, err_msg=name)


def test_statistics_are_the_moments_of_what_was_seen(tmp_path: Path) -> None:
    run = learned(tmp_path, steps=128, normalize_observations=True)
    envs = make_vec(ROBOT, 4, seed=1)  # the run's own: actions do not change what is seen
    seen = [envs.reset()["position/0"].copy()]
    for _ in range(31):
        seen.append(envs.step(np.zeros(4, int)).obs["position/0"].copy())
    expected = Moments.of(np.concatenate(seen))
    found = arrays_of(run)
    assert found["normaliser/obs/position/0/count"] == expected.count == 128
    np.testing.assert_allclose(found["normaliser/obs/position/0/mean"], expected.mean, rtol=1e-9)


def test_images_choices_and_masks_are_left_alone() -> None:
    mask = spaces.Box(0.0, 1.0, (3,), np.float32)
    space = spaces.Dict({"action_mask": mask, "x": mask, "n": spaces.Discrete(3)})
    assert normalised_parts(space) == ["x"]
    assert normalised_parts(flat_space(Robot().observation_space)) == ["camera/right", "position/0"]


def test_nothing_to_normalise_is_said_before_anything_starts(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="Box of floats"):
        learned(
            tmp_path, env="manyhands/Identity-v0", env_kwargs={"kind": "discrete"},
            normalize_observations=True,
        )  # fmt: skip


# -- a loop of the user's own ----------------------------------------------------------------------


@pytest.mark.parametrize("vector", [False, True])
def test_an_agent_takes_them(vector: bool, tmp_path: Path) -> None:
    envs: Any = SyncVectorEnv([Robot] * 2) if vector else Robot()
    deadline = time.monotonic() + 60
    with mh.Agent("ppo", envs, steps=128, rollout_length=16, hidden=(8,), minibatch=16) as agent:
        obs, _ = envs.reset(seed=1)
        while not agent.done and time.monotonic() < deadline:
            obs, *rest = envs.step(agent.act(obs))
            agent.observe(obs, *rest)
            agent.update()
            if not vector and (rest[1] or rest[2]):
                obs, _ = envs.reset()
        assert agent.done
        expected = agent.act(obs, explore=False)
        agent.save(tmp_path / "saved")
    policy = mh.load(tmp_path / "saved")
    found = policy.act_batch(obs) if vector else policy.act(obs)
    np.testing.assert_array_equal(found, expected)
    spaces_there = json.loads((tmp_path / "saved" / "spaces.json").read_text())
    assert sorted(spaces_there["observations"]["parts"]) == NAMES

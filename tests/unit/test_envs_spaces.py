"""Spaces: what is refused, how actions are sent, what is found to be not finite."""

from __future__ import annotations

import warnings

import numpy as np
import pytest
from gymnasium import spaces
from hypothesis import given
from hypothesis import strategies as st

from manyhands import seeding
from manyhands.envs import EnvLoop, make_vec, toys
from manyhands.envs.adapter import ActionMap, FiniteCheck
from manyhands.envs.spaces import check_action_space, check_observation_space, shape_fault
from manyhands.errors import ConfigError, WorkerError
from manyhands.streams import EpisodeSeeds


@pytest.mark.parametrize(
    "space",
    [
        spaces.Tuple([spaces.Text(2)]),
        spaces.Text(4),
        spaces.Dict({"a": spaces.Dict({"b": spaces.Sequence(spaces.Discrete(2))})}),
        spaces.Sequence(spaces.Discrete(2)),
    ],
)
def test_refused_spaces_are_named(space: spaces.Space) -> None:
    with pytest.raises(ConfigError, match=r"observation space.*(Tuple|Text|Dict|Sequence)"):
        check_observation_space(space)
    with pytest.raises(ConfigError, match=r"action space.*(Tuple|Text|Dict|Sequence)"):
        check_action_space(space)


def test_whole_number_boxes_and_tables_of_actions_are_refused() -> None:
    with pytest.raises(ConfigError, match="uint8"):
        check_action_space(spaces.Box(0, 5, (2,), np.uint8))
    with pytest.raises(ConfigError, match="2 dimensions"):
        check_action_space(spaces.MultiDiscrete(np.array([[2, 3], [4, 5]])))


def test_actions_reach_the_env_in_its_own_terms() -> None:
    shifted = ActionMap(spaces.Discrete(4, start=3))
    np.testing.assert_array_equal(shifted(np.array([3, 6])), [3, 6])
    many = ActionMap(spaces.MultiDiscrete([3, 4], start=[1, -1]))
    np.testing.assert_array_equal(many(np.array([[1, -1], [3, 2]])), [[1, -1], [3, 2]])
    bits = ActionMap(spaces.MultiBinary(3))(np.array([[0.0, 1.0, 1.0]]))
    assert bits.dtype == np.int8


def test_box_actions_clip_scale_raw_and_leave_the_given_array_alone() -> None:
    box = spaces.Box(np.array([-2.0, 0.0]), np.array([2.0, 1.0]), dtype=np.float32)
    raw = np.array([[-3.0, 0.5], [1.0, 7.0]])
    before = raw.copy()
    np.testing.assert_allclose(ActionMap(box, "clip")(raw), [[-2.0, 0.5], [1.0, 1.0]])
    np.testing.assert_allclose(ActionMap(box, "scale")(raw), [[-2.0, 0.75], [2.0, 1.0]])
    np.testing.assert_allclose(ActionMap(box, "raw")(raw), raw)
    np.testing.assert_array_equal(raw, before)
    with pytest.raises(ConfigError, match="finite bounds"):
        ActionMap(spaces.Box(-np.inf, np.inf, (1,)), "scale")
    with pytest.raises(ConfigError, match="shape"):
        ActionMap(box)(np.zeros(2))


@pytest.mark.parametrize("kind", ["discrete", "shifted", "box", "multidiscrete", "multibinary"])
def test_identity_envs_pay_for_the_right_action(kind: str) -> None:
    envs = make_vec("manyhands/Identity-v0", 3, kind=kind, seed=1)
    obs = envs.reset()
    for _ in range(20):
        step = envs.step(obs)
        np.testing.assert_allclose(step.reward, 0.0 if kind == "box" else 1.0)
        obs = step.obs


@pytest.mark.parametrize("size", [1, 3, 4, 33, 1000])
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_finite_check_is_exact(size: int, bad: float) -> None:
    check = FiniteCheck(spaces.Box(-np.inf, np.inf, (size,), np.float32), 5)
    batch = np.full((5, size), np.finfo(np.float32).max, dtype=np.float32)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert check.holds(batch)  # the largest floats are no false alarm
    batch[3, size // 2] = bad
    with np.errstate(invalid="ignore"):
        assert not check.holds(batch)
    assert check.bad_row(batch) == 3


def test_finite_check_looks_at_every_float_of_a_dict_and_at_no_integer() -> None:
    parts = {"a": spaces.Discrete(3), "b": spaces.Box(-1, 1, (2,)), "c": spaces.Box(-1, 1, ())}
    check = FiniteCheck(spaces.Dict(parts), 2)
    batch = {"a": np.zeros(2, int), "b": np.zeros((2, 2), "f4"), "c": np.zeros(2, "f4")}
    assert check.holds(batch)
    batch["c"][1] = np.nan
    assert not check.holds(batch)
    assert check.bad_row(batch) == 1
    assert FiniteCheck(spaces.Box(0, 255, (2,), np.uint8), 2).holds(np.zeros((2, 2), np.uint8))


@pytest.mark.filterwarnings("ignore:invalid value encountered in dot")
@pytest.mark.parametrize("where", ["observation", "reward"])
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_nan_names_env_step_and_seed(where: str, value: float) -> None:
    envs = make_vec("manyhands/NotANumber-v0", 2, where=where, value=value, seed=1, worker=4)
    envs.reset()
    for _ in range(3):
        envs.step(np.zeros(2, dtype=np.int64))
    seed = seeding.integer(1, "env", 4, 0, 0)
    with pytest.raises(WorkerError, match=rf"env 0 \(episode 0, step 4, seed {seed}\)") as caught:
        envs.step(np.zeros(2, dtype=np.int64))
    assert where in str(caught.value)
    assert caught.value.rank == 4


def test_an_env_that_raises_keeps_its_error_and_says_which_it_was() -> None:
    class Breaks(toys.TimeLimit):
        def step(self, action):
            if self._steps == 2:
                raise ZeroDivisionError("by design")
            return super().step(action)

    envs = EnvLoop([Breaks, Breaks], seed=1)
    envs.reset()
    envs.step(np.zeros(2, dtype=np.int64))
    envs.step(np.zeros(2, dtype=np.int64))
    with pytest.raises(ZeroDivisionError, match="by design") as caught:
        envs.step(np.zeros(2, dtype=np.int64))
    note = caught.value.__notes__[0]
    assert "env 0" in note
    assert f"seed {seeding.integer(1, 'env', 0, 0, 0)}" in note


def test_wrong_shapes_are_told_apart() -> None:
    box = spaces.Box(-1, 1, (2,))
    assert shape_fault(box, np.zeros(2)) == ""
    assert "(3,)" in shape_fault(box, np.zeros(3))
    assert shape_fault(spaces.Discrete(3), 1) == ""
    both = spaces.Dict({"a": box, "b": spaces.Discrete(2)})
    assert "keys" in shape_fault(both, {"a": np.zeros(2)})
    assert "'a'" in shape_fault(both, {"a": np.zeros(1), "b": 0})


@given(
    seed=st.integers(0, 2**140),
    worker=st.integers(0, 2**33),
    env=st.integers(0, 500),
    episode=st.integers(0, 2**33),
)
def test_quick_episode_seeds_are_the_trees(seed: int, worker: int, env: int, episode: int) -> None:
    expected = seeding.integer(seed, "env", worker, env, episode)
    assert EpisodeSeeds(seed, worker, env)(episode) == expected

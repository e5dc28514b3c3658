"""`manyhands/PendulumSwingUp-v0` against its equation, worked by hand and by small steps."""

from __future__ import annotations

import json
import math
import subprocess
import sys
import warnings
from typing import Any

import gymnasium
import numpy as np
import pytest
from gymnasium.utils.env_checker import check_env as gymnasium_check_env

from manyhands import gymnasium_ids
from manyhands.envs import check_env
from manyhands.envs.pendulum_swing_up import PendulumSwingUp, dense_reward, simulate, sparse_reward
from manyhands.errors import ConfigError

ID = "manyhands/PendulumSwingUp-v0"
NO_TORQUE = np.zeros(1, np.float32)


def by_small_steps(theta: float, theta_dot: float, torque: float) -> tuple[float, float]:
    """The equation of the founding exercise, 0.1 s in 2,000 midpoint steps: off by some 1e-9."""

    def slope(x: Any) -> Any:
        return np.array([x[1], (torque - 0.1 * x[1] + 1.0 * 9.8 * 1.0 * np.sin(x[0])) / 1.0**2])

    x, h = np.array([theta, theta_dot]), 0.1 / 2000
    for _ in range(2000):
        x = x + h * slope(x + 0.5 * h * slope(x))
    return float(x[0]), float(x[1])


def started(theta: float, theta_dot: float, sparse: bool = False) -> PendulumSwingUp:
    env = PendulumSwingUp(sparse=sparse)
    env.reset(seed=1, options={"theta": theta, "theta_dot": theta_dot})
    return env


def torque(value: float) -> Any:
    return np.array([value], np.float32)


# -- the equation ----------------------------------------------------------------------------------


@pytest.mark.parametrize(("speed", "error"), [(8.0, 3e-5), (15.0, 2e-4)])
def test_dynamics_follow_the_equation(speed: float, error: float) -> None:
    rng = np.random.default_rng(1)
    for _ in range(15):
        theta, theta_dot, push = rng.uniform([-math.pi, -speed, -5.0], [math.pi, speed, 5.0])
        assert simulate(theta, theta_dot, push) == pytest.approx(
            by_small_steps(theta, theta_dot, push), abs=error, rel=0.0
        )


def test_a_step_is_one_tenth_of_a_second_of_it() -> None:
    env = started(0.5, -1.0)
    seen, *_, info = env.step(torque(2.0))
    theta, theta_dot = by_small_steps(0.5, -1.0, 2.0)
    assert (info["theta"], info["theta_dot"]) == pytest.approx((theta, theta_dot), abs=1e-4)
    assert seen == pytest.approx([math.cos(theta), math.sin(theta), theta_dot], abs=1e-4)
    assert seen.dtype == np.float32


def test_small_swings_are_those_of_a_damped_spring() -> None:
    """Near hanging δ'' = −9.8 δ − 0.1 δ', which has a closed form: decay 0.05, ω² = 9.8 − 0.05²."""
    env = started(-math.pi + 1e-3, 0.0)
    omega = math.sqrt(9.8 - 0.05**2)
    for step in range(1, 101):
        *_, info = env.step(NO_TORQUE)
        t = 0.1 * step
        swing = math.cos(omega * t) + 0.05 / omega * math.sin(omega * t)
        away = info["theta"] + math.pi if info["theta"] < 0 else info["theta"] - math.pi
        assert away == pytest.approx(1e-3 * math.exp(-0.05 * t) * swing, abs=1e-6)


def test_upright_is_a_balance_and_hanging_another() -> None:
    for theta in (0.0, -math.pi):
        env = started(theta, 0.0)
        for _ in range(5):
            *_, info = env.step(NO_TORQUE)
        assert info["theta_dot"] == pytest.approx(0.0, abs=1e-9)


def test_angle_is_wrapped() -> None:
    env = started(3.1, 4.0)
    *_, info = env.step(NO_TORQUE)
    theta, _ = by_small_steps(3.1, 4.0, 0.0)
    assert theta > math.pi
    assert info["theta"] == pytest.approx(theta - 2 * math.pi, abs=1e-4)
    env.reset(options={"theta": 2 * math.pi + 0.1, "theta_dot": 0.0})
    assert env.step(NO_TORQUE)[4]["theta"] < 0.2


def test_torque_is_cut_and_the_cost_is_of_what_was_asked() -> None:
    asked, most = started(0.3, 1.0), started(0.3, 1.0)
    *_, far = asked.step(torque(50.0))
    _, reward, *_, near = most.step(torque(5.0))
    assert far == near
    assert dense_reward(0.3, 1.0, 50.0) == pytest.approx(-0.09 - 0.01 - 25.0)
    again = started(0.3, 1.0)
    assert again.step(torque(50.0))[1] == pytest.approx(reward - 0.01 * (50**2 - 5**2))


# -- rewards ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("theta", "theta_dot", "action", "dense", "sparse"),
    [
        (0.0, 0.0, 0.0, 0.0, 1.0),
        (0.3, 2.0, -4.0, -0.09 - 0.04 - 0.16, 1.0),
        (-0.3, -2.0, 4.0, -0.09 - 0.04 - 0.16, 1.0),
        (0.1 * math.pi, 0.0, 0.0, -0.01 * math.pi**2, 0.0),  # the bound itself is outside
        (2.0, 15.0, 5.0, -4.0 - 2.25 - 0.25, 0.0),  # 15 is not too fast
        (0.0, 15.001, 0.0, -100.0, -100.0),
        (0.0, -15.001, 0.0, -100.0, -100.0),
        (1.0, 0.0, 1000.0, -100.0, 0.0),  # never below -100
    ],
)
def test_rewards_by_hand(
    theta: float, theta_dot: float, action: float, dense: float, sparse: float
) -> None:
    assert dense_reward(theta, theta_dot, action) == pytest.approx(dense)
    assert sparse_reward(theta, theta_dot) == sparse


@pytest.mark.parametrize("sparse", [False, True])
def test_reward_is_of_the_state_that_the_step_leads_to(sparse: bool) -> None:
    env = started(0.31, -1.0, sparse)  # upright now, and more so a step later
    _, reward, *_, info = env.step(torque(1.0))
    theta, theta_dot = by_small_steps(0.31, -1.0, 1.0)
    assert info["upright"]
    wanted = 1.0 if sparse else -(theta**2) - 0.01 * theta_dot**2 - 0.01
    assert reward == pytest.approx(wanted, abs=1e-4)


@pytest.mark.parametrize("sparse", [False, True])
def test_too_fast_costs_and_ends_nothing(sparse: bool) -> None:
    env = started(0.0, 16.0, sparse)
    _, reward, terminated, truncated, _ = env.step(torque(5.0))
    assert (reward, terminated, truncated) == (-100.0, False, False)


def test_observation_stays_in_its_space_under_full_torque() -> None:
    env = started(0.0, 5.0)
    for _ in range(100):
        seen, *_ = env.step(torque(5.0))
        assert env.observation_space.contains(seen)
    assert seen[2] > 15


# -- episodes --------------------------------------------------------------------------------------


def test_truncated_after_100_steps_and_never_terminated() -> None:
    env = gymnasium.make(ID)
    for seed in (1, None):
        env.reset(seed=seed)
        flags = [env.step(env.action_space.sample())[2:4] for _ in range(100)]
        assert flags == [(False, False)] * 99 + [(False, True)]
    with pytest.raises(RuntimeError, match="call reset"):
        env.step(NO_TORQUE)


def test_starts_fill_their_range() -> None:
    env = PendulumSwingUp()
    env.reset(seed=1)
    starts = np.array([[i["theta"], i["theta_dot"]] for i in (env.reset()[1] for _ in range(2000))])
    half = np.array([math.pi, 5.0])
    assert (np.abs(starts) <= half).all()
    quarters, _, _ = np.histogram2d(*starts.T, bins=4, range=[[-math.pi, math.pi], [-5.0, 5.0]])
    assert quarters.min() > 80  # 125 are expected in each; 80 is four deviations below


def test_same_seed_same_episode() -> None:
    def play(seed: int) -> list[float]:
        env = gymnasium.make(ID)
        env.reset(seed=seed)
        rewards = [env.step(torque(2.0 * (-1) ** i))[1] for i in range(100)]
        env.reset()
        return [*rewards, env.step(NO_TORQUE)[1]]

    assert play(3) == play(3)
    assert play(3) != play(4)


def test_success_is_upright_through_the_whole_second_half() -> None:
    held = started(0.0, 0.0)
    infos = [held.step(NO_TORQUE)[4] for _ in range(100)]
    assert all(info["upright"] for info in infos)
    assert [("is_success" in info) for info in infos] == [False] * 99 + [True]
    assert infos[-1]["is_success"] is True


@pytest.mark.parametrize(("fallen_at", "success"), [(1, True), (50, True), (51, False)])
def test_success_depends_on_the_last_fall(fallen_at: int, success: bool) -> None:
    env = started(0.0, 0.0)
    for step in range(1, 101):
        if step in (fallen_at, fallen_at + 1):  # far away for one step, then back
            angle = 1.0 if step == fallen_at else 0.0
            env.set_state(env.get_state() | {"theta": angle, "theta_dot": 0.0})
        *_, info = env.step(NO_TORQUE)
        assert info["upright"] is (step != fallen_at)
    assert info["is_success"] is success


def play_on(env: PendulumSwingUp, push: float) -> tuple[list[float], dict[str, Any]]:
    """To the end of the episode."""
    rewards, truncated, info = [], False, {}
    while not truncated:
        _, reward, _, truncated, info = env.step(torque(push))
        rewards.append(reward)
    return rewards, info


def test_state_is_plain_data_and_goes_on_from_there() -> None:
    env, other = PendulumSwingUp(), PendulumSwingUp()
    env.reset(seed=5)
    for _ in range(30):
        env.step(torque(3.0))
    other.set_state(json.loads(json.dumps(env.get_state())))
    rest = play_on(env, -1.0)
    assert len(rest[0]) == 70
    assert play_on(other, -1.0) == rest
    assert other.reset()[1] == env.reset()[1]  # the next start comes from the same numbers
    assert play_on(other, -1.0) == play_on(env, -1.0)


# -- Gymnasium -------------------------------------------------------------------------------------


@pytest.mark.parametrize("sparse", [False, True])
def test_both_checkers_pass(sparse: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SDL_VIDEODRIVER", "dummy")  # Gymnasium's tries all render modes
    assert check_env(gymnasium.make(ID, sparse=sparse), steps=300) == []
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        # Its advice to scale actions to [-1, 1]: here they are torques, and policies scale them.
        warnings.filterwarnings("ignore", message=".*symmetric and normalized space.*")
        gymnasium_check_env(gymnasium.make(ID, sparse=sparse).unwrapped)


def test_registering_again_changes_nothing() -> None:
    before = gymnasium.spec(ID)
    gymnasium_ids.register()
    assert gymnasium.spec(ID) is before


MAKE = f"env = gymnasium.make({ID!r}, sparse=True); env.reset(seed=1); print(env.unwrapped.sparse)"
LATER = "from manyhands import gymnasium_ids as ids; ids.register_with_gymnasium()"


@pytest.mark.parametrize(
    "code",
    [
        f"import gymnasium, manyhands.envs; {MAKE}",
        f"import gymnasium; {LATER}; {MAKE}",
        f"{LATER}; import gymnasium; {MAKE}",
        f"import gymnasium, manyhands; {MAKE}",
        f"import manyhands, gymnasium; {MAKE}",
        f"import gymnasium; print(gymnasium.make('manyhands:{ID}', sparse=True).unwrapped.sparse)",
    ],
)
def test_id_is_known_in_any_order_and_without_warnings(code: str) -> None:
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", code], capture_output=True, text=True, timeout=200
    )
    assert (done.stdout, done.stderr) == ("True\n", "")


def test_waiting_for_gymnasium_loads_nothing() -> None:
    code = f"{LATER}; import sys; print([m for m in ('gymnasium', 'numpy') if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=200)
    assert done.stdout == "[]\n", done.stderr


# -- pictures --------------------------------------------------------------------------------------


def picture(theta: float, push: float) -> Any:
    env = PendulumSwingUp(render_mode="rgb_array")
    env.reset(seed=1, options={"theta": theta, "theta_dot": 0.0})
    env.step(torque(push))
    return env.render()


def test_picture_shows_angle_and_torque() -> None:
    left = picture(0.5 * math.pi, 0.0)
    assert (left.shape, left.dtype) == ((400, 400, 3), np.uint8)
    red = (left[..., 0] > 180) & (left[..., 1] < 100)
    rows, columns = np.nonzero(red)
    # A positive angle is to the left of upright, and after 0.1 s a little below the level.
    assert 40 < columns.mean() < 75
    assert 195 < rows.mean() < 225
    for other in (picture(-0.5 * math.pi, 0.0), picture(0.5 * math.pi, 5.0)):
        assert (left != other).any()
    assert (picture(0.5 * math.pi, 5.0) != picture(0.5 * math.pi, -5.0)).any()


def test_bob_is_green_while_upright() -> None:
    up, hanging = picture(0.0, 0.0), picture(math.pi, 0.0)
    assert up[56, 200].tolist() == [46, 140, 86]
    assert hanging[344, 200].tolist() == [205, 74, 60]


def test_window(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SDL_VIDEODRIVER", "dummy")
    env = gymnasium.make(ID, render_mode="human")
    env.reset(seed=1)
    env.step(torque(1.0))
    assert env.unwrapped._window._screen.get_size() == (400, 400)
    env.close()
    assert env.unwrapped._window is None


def test_wrong_render_mode_is_refused() -> None:
    with pytest.raises(ConfigError, match="choose from"):
        PendulumSwingUp(render_mode="ansi")

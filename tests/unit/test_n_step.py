"""n-step assembly against a slow reference written from the definition."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from manyhands.errors import ConfigError
from manyhands.replay.n_step import NStep


def reference(steps: list, n: int, gamma: float, env: int) -> list[tuple]:
    """From the definition: for each step, look ahead until n rewards or the episode's end.

    `steps`: (obs, reward, reached, terminated, truncated, valid) of every environment, by time.
    """
    mine = [[column[env] for column in row] for row in steps if row[5][env]]
    found = []
    for i, (obs, *_) in enumerate(mine):
        total = 0.0
        for k, (_, reward, reached, terminated, truncated, _) in enumerate(mine[i:], start=1):
            total += gamma ** (k - 1) * reward
            if terminated or truncated or k == n:
                discount = 0.0 if terminated else gamma**k
                found.append((int(obs), total, int(reached), discount, k))
                break
    return sorted(found)


@settings(max_examples=80, deadline=None)
@given(
    st.integers(1, 6), st.integers(1, 4), st.integers(0, 40), st.floats(0, 1),
    st.integers(0, 2**32 - 1),
)  # fmt: skip
def test_against_the_definition(n: int, envs: int, length: int, gamma: float, seed: int) -> None:
    rng = np.random.default_rng(seed)
    assembler, steps = NStep(n, gamma, envs), []
    found: list[list[tuple]] = [[] for _ in range(envs)]
    for t in range(length):
        obs = np.arange(envs) * 1000 + t
        row = (obs, rng.normal(size=envs), obs + 500, rng.random(envs) < 0.15,
               rng.random(envs) < 0.15, rng.random(envs) < 0.8)  # fmt: skip
        steps.append(row)
        out = assembler.push(
            {"obs": obs, "action": obs * 2}, row[1], row[2], row[3], row[4], row[5]
        )
        assert out["action"].tolist() == (out["obs"] * 2).tolist()
        columns = ("obs", "reward", "next_obs", "discount", "steps")
        for values in zip(*(out[name] for name in columns), strict=True):
            found[int(values[0]) // 1000].append(values)
    for env in range(envs):
        expected = reference(steps, n, gamma, env)
        times = [int(row[0]) for row in found[env]]
        assert times == sorted(times), "oldest first"
        assert len(expected) == len(found[env])
        for got, want in zip(found[env], expected, strict=True):
            assert (int(got[0]), int(got[2]), int(got[4])) == (want[0], want[2], want[4])
            assert float(got[1]) == pytest.approx(want[1], rel=1e-5, abs=1e-6)
            assert float(got[3]) == pytest.approx(want[3], rel=1e-5, abs=1e-7)


def push(assembler: NStep, t: int, terminated: bool = False, truncated: bool = False) -> dict:
    return assembler.push(
        {"obs": np.array([[float(t)]])}, np.array([1.0]), np.array([[t + 0.5]]),
        np.array([terminated]), np.array([truncated]),
    )  # fmt: skip


def test_termination_has_no_bootstrap_and_truncation_has_one_over_the_shorter_tail() -> None:
    for terminated in (True, False):
        assembler = NStep(5, 0.5, 1)
        assert len(push(assembler, 0)["reward"]) == 0
        out = push(assembler, 1, terminated, not terminated)
        assert out["obs"][:, 0].tolist() == [0.0, 1.0]
        assert out["reward"].tolist() == [1.5, 1.0]
        assert out["next_obs"][:, 0].tolist() == [1.5, 1.5]
        assert out["discount"].tolist() == ([0.0, 0.0] if terminated else [0.25, 0.5])
        assert out["steps"].tolist() == [2, 1]
        assert assembler.pending == 0


def test_both_flags_mean_terminated() -> None:
    assert push(NStep(3, 0.9, 1), 0, True, True)["discount"].tolist() == [0.0]


def test_nested_observations() -> None:
    assembler = NStep(1, 0.9, 2)
    obs = {"a": np.arange(2.0), "b": np.ones((2, 3))}
    out = assembler.push({"obs": obs}, np.ones(2), obs, np.zeros(2, bool), np.zeros(2, bool))
    assert out["obs"]["b"].shape == (2, 3)
    assert out["next_obs"]["a"].tolist() == [0.0, 1.0]


def test_state_and_forget() -> None:
    assembler, copy = NStep(3, 0.9, 1), NStep(3, 0.9, 1)
    push(assembler, 0)
    push(assembler, 1)
    copy.load_state(assembler.state())
    one, other = push(assembler, 2), push(copy, 2)
    assert one["reward"].tolist() == other["reward"].tolist() == [pytest.approx(2.71)]
    assert one["obs"].tolist() == other["obs"].tolist()
    copy.forget()
    assert copy.pending == 0
    assert [len(push(copy, t)["reward"]) for t in range(3)] == [0, 0, 1]
    with pytest.raises(ConfigError, match="the state is of"):
        NStep(2, 0.9, 1).load_state(assembler.state())


@pytest.mark.parametrize(
    ("n", "gamma", "envs"), [(0, 0.9, 1), (1, 1.1, 1), (1, -0.1, 1), (1, 1, 0)]
)
def test_nonsense_is_refused(n: int, gamma: float, envs: int) -> None:
    with pytest.raises(ConfigError):
        NStep(n, gamma, envs)


def test_a_name_that_is_added_here_is_refused() -> None:
    with pytest.raises(ConfigError, match="reward"):
        NStep(1, 0.9, 1).push(
            {"reward": np.zeros(1)}, np.zeros(1), np.zeros(1), np.zeros(1), np.zeros(1)
        )

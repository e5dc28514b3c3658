"""Unrolls: what an actor sends is what happened, and nothing that the learner needs is missing."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from async_programs import impala, unrolls_of

from manyhands.collect.unroll import UnrollCollector, joined
from manyhands.envs import make_vec
from manyhands.errors import ConfigError
from manyhands.math.running_stats import Normaliser
from manyhands.streams import EnvNoise
from manyhands.types import Acted


class Still:
    """Always the same action; the observation goes into the log-probability, to be found again."""

    def act(self, obs: Any, noise: Any) -> Acted:
        n = len(obs)
        mark = obs.reshape(n, -1)[:, 0].astype(np.float32)
        return Acted(np.ones(n, np.int64), mark, np.zeros(n, np.float32), np.zeros((n, 2)))

    def value(self, obs: Any) -> Any:
        return np.zeros(len(obs), np.float32)


def collector(env: str, length: int, envs: int = 2, **more: Any) -> UnrollCollector:
    made = make_vec(env, envs, seed=3, **more.pop("kwargs", {}))
    normaliser = Normaliser(made.observation_space, False, False, 0.9)
    return UnrollCollector(made, Still(), length, EnvNoise(1, 0, envs), normaliser, **more)


def test_edges_are_where_the_next_row_does_not_show_what_followed() -> None:
    """A limit of 5 steps and unrolls of 8: one episode is cut off, one goes on."""
    made = collector("manyhands/TimeLimit-v0", 8, kwargs={"limit": 5})
    unroll = made.collect(7)[0]
    assert unroll["version"] == 7
    assert unroll["truncated"][4].all()
    assert unroll["truncated"].sum() == 2
    assert sorted(map(tuple, unroll["edge_at"].tolist())) == [(4, 0), (4, 1), (7, 0), (7, 1)]
    seen = {tuple(at): float(obs[0]) for at, obs in zip(unroll["edge_at"], unroll["edges"],
                                                        strict=True)}  # fmt: skip
    assert seen[(4, 0)] == 1.0  # the final observation: the limit has passed
    assert seen[(7, 0)] == pytest.approx(3 / 5)  # where the next unroll begins
    assert made.collect(8)[0]["obs"][0, 0, 0] == pytest.approx(3 / 5)
    assert made.finished[0].length == 5
    made.envs.close()


def test_a_terminated_step_has_no_edge() -> None:
    made = collector("manyhands/Delayed-v0", 6, envs=1, kwargs={"length": 3})
    unroll = made.collect(0)[0]
    assert np.flatnonzero(unroll["terminated"][:, 0]).tolist() == [2, 5]
    assert len(unroll["edges"]) == 0
    assert unroll["edge_at"].shape == (0, 2)
    made.envs.close()


def test_whole_episodes_are_whole_whatever_the_length_of_a_look() -> None:
    found: dict[int, list[Any]] = {}
    for length in (3, 7, 50):
        made = collector("CartPole-v1", length, envs=1, whole_episodes=True)
        unrolls: list[Any] = []
        while len(unrolls) < 6:
            unrolls += made.collect(len(unrolls))
        steps = [e.length for e in made.finished][:6]
        for unroll, count in zip(unrolls[:6], steps, strict=True):
            rows = len(unroll["reward"])
            assert rows == count == unroll["valid"].sum()
            over = unroll["terminated"][:, 0] | unroll["truncated"][:, 0]
            assert np.flatnonzero(over).tolist() == [rows - 1]
            np.testing.assert_array_equal(unroll["logp"][:, 0], unroll["obs"][:, 0, 0])
        found[length] = sorted(u["obs"].tobytes() for u in unrolls[:6])
        made.envs.close()
    assert found[3] == found[7] == found[50]


def test_joined_pads_with_rows_that_do_not_count() -> None:
    algorithm, envs = impala()
    episodes = unrolls_of(algorithm, envs, 3, whole_episodes=True)
    envs.close()
    one = joined(episodes)
    lengths = [len(e["reward"]) for e in episodes]
    assert one["reward"].shape == (max(lengths), 3)
    assert one["valid"].sum(axis=0).tolist() == lengths
    for b, episode in enumerate(episodes):
        np.testing.assert_array_equal(one["obs"][: lengths[b], b], episode["obs"][:, 0])
    for (t, b), obs in zip(one["edge_at"], one["edges"], strict=True):
        assert t == lengths[b] - 1
        assert one["truncated"][t, b]
        np.testing.assert_array_equal(obs, episodes[b]["edges"][0])


def test_an_unroll_without_log_probabilities_is_refused() -> None:
    algorithm, envs = impala()
    (unroll,) = unrolls_of(algorithm, envs, 1)
    envs.close()
    with pytest.raises(ConfigError, match=r"without the log-probability of its actions \(logp\)"):
        joined([{k: v for k, v in unroll.items() if k != "logp"}])
    with pytest.raises(ConfigError, match="came without reward"):
        joined([{k: v for k, v in unroll.items() if k != "reward"}])

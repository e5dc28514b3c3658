"""What is collected and learned on the device is what the ordinary path makes of it."""

from __future__ import annotations

import copy
from typing import Any

import numpy as np
import pytest
import torch

from manyhands import devices, train
from manyhands.algorithms.a2c import A2C
from manyhands.algorithms.base import Alone
from manyhands.algorithms.on_device import TensorLearner, fits
from manyhands.algorithms.ppo import PPO
from manyhands.algorithms.registry import A2CConfig, PPOConfig
from manyhands.collect.on_device import TensorCollector
from manyhands.collect.rollout import Rollout
from manyhands.envs import make_vec
from manyhands.errors import ConfigError
from manyhands.math.returns import gae, gae_of_tensors
from manyhands.math.running_stats import Normaliser
from manyhands.networks.build import build_actor_critic

LENGTH, ENVS = 24, 16


def collected(env: str, options: Any, kind: Any = PPO, normalise: bool = True) -> tuple[Any, ...]:
    """(an algorithm, a collector that has a rollout, that rollout); the time limit is in it."""
    envs: Any = make_vec(env, ENVS, backend="torch", seed=3, max_episode_steps=10)
    spaces = envs.observation_space, envs.action_space
    algorithm = kind(build_actor_critic(*spaces, seed=1), options, seed=1)
    normaliser = Normaliser(spaces[0], normalise, normalise, options.gamma)
    collector = TensorCollector(
        envs, algorithm.model, LENGTH, normaliser, options.gamma, seed=1, say=pytest.fail
    )
    collector.collect()
    normaliser.synchronise(None)
    return algorithm, collector, collector.collect()


def in_numpy(rollout: Any) -> Rollout:
    columns = {name: column.numpy().copy() for name, column in rollout._asdict().items()}
    nothing = np.zeros((LENGTH, ENVS, 1), np.float32)
    return Rollout(valid=np.ones((LENGTH, ENVS), bool), parameters=nothing, **columns)


def test_advantages_are_those_of_numpy() -> None:
    rng = np.random.default_rng(1)
    numbers = [rng.normal(size=(37, 5)).astype(np.float32) for _ in range(3)]
    flags = [rng.random((37, 5)) < 0.1 for _ in range(2)]
    expected = gae(*numbers, *flags, gamma=0.97, lam=0.9)
    found = gae_of_tensors(*map(torch.as_tensor, [*numbers, *flags]), gamma=0.97, lam=0.9)
    for one, other in zip(found, expected, strict=True):
        np.testing.assert_allclose(one.numpy(), other, atol=1e-5)


@pytest.mark.parametrize("env", ["manyhands/CartPole-v1", "manyhands/Pendulum-v1"])
def test_a_rollout_holds_what_policy_and_environment_said(env: str) -> None:
    algorithm, collector, (rollout, finished) = collected(env, PPOConfig(), normalise=False)
    assert rollout.truncated.any()
    with torch.no_grad():
        parameters, values = algorithm.model(rollout.obs.flatten(0, 1))
        head = algorithm.model.head
        logp = head.log_prob(parameters, rollout.action.flatten(0, 1))
        ahead = algorithm.model.value(collector._obs)
    torch.testing.assert_close(rollout.value.flatten(), values)
    torch.testing.assert_close(rollout.logp.flatten(), logp)
    torch.testing.assert_close(rollout.next_value[-1][~rollout.truncated[-1]],
                               ahead[~rollout.truncated[-1]])  # fmt: skip
    goes_on = ~rollout.truncated[:-1] & ~rollout.terminated[:-1]
    torch.testing.assert_close(rollout.next_value[:-1][goes_on], rollout.value[1:][goes_on])
    # After a cut comes V of the last observation, not of the next episode's first.
    cut = rollout.truncated[:-1]
    assert not torch.isclose(rollout.next_value[:-1][cut], rollout.value[1:][cut]).all()
    ended = rollout.truncated | rollout.terminated
    assert finished.ended == int(ended.sum()) == len(finished.last)
    at = [divmod(int(i), ENVS) for i in np.flatnonzero(ended.numpy())]
    assert finished.last[:, 0].tolist() == [env for _, env in at]
    assert finished.last[:, 2].max() == 10
    if "CartPole" in env:
        assert (finished.last[:, 1] == finished.last[:, 2]).all()
        assert finished.best == finished.last[:, 1].max()


def test_statistics_are_those_of_all_that_was_seen() -> None:
    _, collector, _ = collected("manyhands/Pendulum-v1", PPOConfig())
    stats = collector._normaliser.parts[""]
    raw = collector._raw.numpy().reshape(-1, 3)
    assert stats.pending.count == len(raw)
    np.testing.assert_allclose(stats.pending.mean, raw.mean(0), atol=1e-6)
    np.testing.assert_allclose(stats.pending.m2 / len(raw), raw.var(0), atol=1e-6)
    seen = collector.rollout.obs.numpy().reshape(-1, 3)
    np.testing.assert_allclose(seen, stats.normalise(raw), atol=1e-5)
    assert collector._normaliser.returns.pending.count == len(raw)


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        (PPO, PPOConfig(epochs=3, minibatch=0, entropy_weight=0.01, learning_rate=1e-2)),
        (PPO, PPOConfig(epochs=50, minibatch=0, target_kl=0.003, learning_rate=1e-2)),
        (A2C, A2CConfig(learning_rate=1e-2)),
    ],
)
@pytest.mark.parametrize("env", ["manyhands/CartPole-v1", "manyhands/Pendulum-v1"])
def test_an_update_ends_with_the_weights_of_the_ordinary_one(
    kind: Any, options: Any, env: str
) -> None:
    """All rows in each step, so that the order in which they are drawn does not matter."""
    algorithm, _, (rollout, _) = collected(env, options, kind)
    other = copy.deepcopy(algorithm.model)
    ordinary = kind(other, options, seed=1)
    ordinary.fast = None
    expected = ordinary.update(ordinary.prepare(in_numpy(rollout)), Alone(), 0.25)
    learner = TensorLearner(algorithm, rollout, seed=1, say=pytest.fail)
    found = learner.update(0.25)
    torch.testing.assert_close(algorithm.flat.data, ordinary.flat.data, atol=1e-5, rtol=1e-5)
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        assert found[name] == pytest.approx(value, rel=1e-3, abs=1e-4), name
    if getattr(options, "target_kl", 0):
        assert found["gradient_steps"] < 50
    assert algorithm.version == ordinary.version
    for name, kept in ordinary.adam.state().items():
        torch.testing.assert_close(
            torch.as_tensor(algorithm.adam.state()[name]), torch.as_tensor(kept)
        )


def test_every_row_is_in_one_minibatch_of_an_epoch(monkeypatch: pytest.MonkeyPatch) -> None:
    algorithm, _, (rollout, _) = collected(
        "manyhands/CartPole-v1", PPOConfig(epochs=2, minibatch=100)
    )
    learner = TensorLearner(algorithm, rollout, seed=1, say=pytest.fail)
    drawn: list[int] = []
    step = learner._gradient_step

    def seen(chosen: Any = None) -> None:
        drawn.extend((learner._chosen if chosen is None else chosen).tolist())
        step(chosen)

    monkeypatch.setattr(learner, "_gradient_step", seen)
    learner._step = devices.Captured(seen, algorithm.device, (), "step", pytest.fail)
    assert learner.update(0.0)["gradient_steps"] == 8  # 384 rows: 100, 100, 100, 84, twice
    rows = LENGTH * ENVS
    assert sorted(drawn[:rows]) == sorted(drawn[rows:]) == list(range(rows))


def test_what_the_device_cannot_learn_is_left_to_the_ordinary_path() -> None:
    assert fits(PPO, PPOConfig())
    assert fits(A2C, A2CConfig())
    for options in (PPOConfig(lstm=8), PPOConfig(kl_penalty=True), PPOConfig(critic_epochs=2)):
        assert not fits(PPO, options)


# -- runs ------------------------------------------------------------------------------------------

RUN = {
    "env": "manyhands/CartPole-v1", "env_backend": "torch", "num_envs": 32, "rollout_length": 16,
    "minibatch": 128, "epochs": 4, "learning_rate": 3e-3, "engine": "inline", "workers": 1,
    "quiet": True, "tensorboard": False,
}  # fmt: skip


def weights(folder: Any) -> bytes:
    return (folder / "policy.safetensors").read_bytes()


def test_a_run_learns_repeats_to_the_bit_and_goes_on_exactly(tmp_path: Any) -> None:
    whole = train("ppo", steps=16_384, run_dir=str(tmp_path / "a"), **RUN)
    assert whole.mean_return > 60  # from 22
    assert whole.summary["episodes"] > 100
    half = train("ppo", steps=8_192, run_dir=str(tmp_path / "b"), **RUN)
    from manyhands import resume

    resume(half.run_dir, steps=16_384)
    assert weights(tmp_path / "a") == weights(tmp_path / "b")


def test_other_strategies_step_the_same_environments(tmp_path: Any) -> None:
    run = RUN | {"workers": 2, "strategy": "allreduce", "run_dir": str(tmp_path / "c")}
    result = train("ppo", steps=2_048, **run)
    assert result.summary["env_steps"] == 2_048
    assert result.summary["episodes"] > 20


@pytest.mark.slow
def test_cartpole_is_solved_on_the_device(tmp_path: Any) -> None:
    run = RUN | {"num_envs": 256, "minibatch": 1024, "learning_rate": "linear:3e-3"}
    result = train("ppo", steps=600_000, target_return=475.0, run_dir=str(tmp_path / "d"), **run)
    assert result.solved


# -- graphs and memory -----------------------------------------------------------------------------


def test_a_graph_is_made_after_some_calls_and_then_replayed() -> None:
    calls: list[str] = []

    def capture(function: Any, generators: Any) -> Any:
        return lambda: calls.append("replayed")

    run = devices.Captured(
        lambda: calls.append("called"), torch.device("cpu"), (), "step", pytest.fail, capture
    )
    for _ in range(5):
        run()
    assert calls == ["called"] * devices.Captured.PLAIN + ["replayed"] * 3


def test_what_cannot_be_captured_is_called_as_before_and_said_once() -> None:
    calls: list[str] = []
    said: list[str] = []

    def capture(function: Any, generators: Any) -> Any:
        raise RuntimeError("operation not permitted when stream is capturing\nmore of it")

    run = devices.Captured(
        lambda: calls.append("called"), torch.device("cpu"), (), "rollout", said.append, capture
    )
    for _ in range(5):
        run()
    assert calls == ["called"] * 5
    assert said == [
        "the rollout is no CUDA graph, and slower for it: operation not permitted when stream is "
        "capturing"
    ]


def test_rows_that_fit() -> None:
    assert devices.rows_that_fit(8192, room=1e9, needed=2e9) == 2048
    assert devices.rows_that_fit(8192, room=1e9, needed=1e10) == 256
    assert devices.rows_that_fit(3, room=1.0, needed=1e10) == 1
    assert (
        devices._asked_for("CUDA out of memory. Tried to allocate 2.50 GiB. GPU 0") == 2.5 * 2**30
    )


def test_running_out_of_memory_is_said_with_what_fits(monkeypatch: pytest.MonkeyPatch) -> None:
    """The allocator's numbers are given here; the error is torch's own class."""
    gib = 2**30
    for name, value in (
        ("reset_peak_memory_stats", None), ("memory_allocated", 2 * gib),
        ("mem_get_info", (gib, 16 * gib)), ("memory_reserved", 13 * gib),
        ("max_memory_allocated", 14 * gib),
    ):  # fmt: skip
        monkeypatch.setattr(torch.cuda, name, lambda device, value=value: value)
    with (
        pytest.raises(ConfigError, match=r"8,192 rows .*16.0 GiB, 12.0 .* --minibatch 2048"),
        devices.said_what_fits(torch.device("cuda:0"), 8192, PPOConfig()),
    ):
        raise torch.cuda.OutOfMemoryError("CUDA out of memory. Tried to allocate 6.00 GiB.")

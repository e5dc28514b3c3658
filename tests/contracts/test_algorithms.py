"""One contract, every on-policy algorithm: both gradients, every space, the ends of episodes."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import gymnasium
import numpy as np
import pytest
import torch
from gymnasium.spaces import Box, Dict, Discrete, MultiBinary, MultiDiscrete
from gymnasium.vector import AutoresetMode, SyncVectorEnv

from manyhands.algorithms import base
from manyhands.algorithms.base import Alone
from manyhands.algorithms.registry import SPECS
from manyhands.collect.rollout import Collector
from manyhands.envs import make_vec
from manyhands.envs.toys import Delayed, TimeLimit
from manyhands.errors import ConfigError, WorkerError
from manyhands.math.running_stats import Normaliser
from manyhands.networks.build import build_actor_critic, to_tensor
from manyhands.streams import EnvNoise
from manyhands.types import Acted

pytestmark = [pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning")]

# Others learn from a replay; impala's rows keep their order in time: test_impala.py
NAMES = sorted(name for name, spec in SPECS.items() if spec.learns_from == "rollout")
OBSERVATIONS: dict[str, Any] = {
    "vector": Box(-2.0, 2.0, (5,), np.float32),
    "doubles": Box(-2.0, 2.0, (2, 3), np.float64),
    "bytes": Box(0, 255, (4,), np.uint8),
    "discrete": Discrete(4, start=2),
    "multidiscrete": MultiDiscrete([3, 2]),
    "multibinary": MultiBinary(3),
    "dict": Dict({"a": Box(-1.0, 1.0, (2,), np.float32), "b": Discrete(3), "c": MultiBinary(2)}),
    "image": Box(0, 255, (3, 36, 36), np.uint8),
    "dict of image": Dict({"eye": Box(0, 255, (1, 36, 36), np.uint8), "n": Discrete(3)}),
}
PLAIN = [name for name in OBSERVATIONS if "image" not in name]
ACTIONS: dict[str, Any] = {
    "discrete": Discrete(3),
    "shifted": Discrete(3, start=5),
    "box": Box(-1.0, 2.0, (2,), np.float32),
    "multidiscrete": MultiDiscrete([3, 2]),
    "multibinary": MultiBinary(3),
}


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """As in a worker: for networks this small, threads only wait for each other."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def make(name: str, observations: Any, actions: Any, **options: Any) -> Any:
    """An algorithm with a small network, on the spaces given."""
    model = build_actor_critic(observations, actions, hidden=(16, 16), shared=False, seed=2)
    return SPECS[name].load()(model, SPECS[name].options(**options), seed=1)


def some(space: Any, rows: int) -> Any:
    """[rows, ...] observations of a space."""
    space.seed(3)
    drawn = [space.sample() for _ in range(rows)]
    if isinstance(space, Dict):
        return {key: np.stack([one[key] for one in drawn]) for key in space.spaces}
    return np.stack(drawn)


def batch_of(algorithm: Any, space: Any, rows: int = 96) -> dict[str, Any]:
    """Rows that the algorithm's own actor has played, with advantages that can be raised."""
    rng = np.random.default_rng(4)
    obs = some(space, rows)
    acted = algorithm.actor.act(obs, rng)
    liked = acted.actions.reshape(rows, -1)[:, 0].astype(np.float32)
    return {
        "obs": obs,
        "action": acted.actions.copy(),
        "logp": acted.logp.copy(),
        "value": acted.values.copy(),
        "parameters": acted.parameters.copy(),
        "advantage": (liked - liked.mean() + 0.1 * rng.standard_normal(rows)).astype(np.float32),
        "target": (liked + rng.standard_normal(rows)).astype(np.float32),
    }


def moved(algorithm: Any, by: float = 0.05) -> None:
    """Move the weights, so that old and new policy differ and every part of the loss is at work."""
    noise = torch.Generator().manual_seed(6)
    with torch.no_grad():
        flat = algorithm.flat.data
        flat += by * torch.randn(flat.shape, generator=noise)


def more_of(name: str) -> dict[str, Any]:
    return {} if name == "trpo" else {"entropy_weight": 0.1}


def in_numpy(algorithm: Any) -> Any:
    """Who has the gradient written in numpy: TRPO's is that of the value alone."""
    return algorithm.critic if algorithm.name == "trpo" else algorithm


# -- gradients -------------------------------------------------------------------------------------


@pytest.mark.parametrize("actions", sorted(set(ACTIONS) - {"shifted"}))
@pytest.mark.parametrize("observations", PLAIN)
@pytest.mark.parametrize("name", NAMES)
def test_numpy_gradient_is_that_of_autograd(name: str, observations: str, actions: str) -> None:
    algorithm = make(name, OBSERVATIONS[observations], ACTIONS[actions], **more_of(name))
    rows = batch_of(algorithm, OBSERVATIONS[observations])
    moved(algorithm)
    by_numpy = in_numpy(algorithm)
    assert by_numpy.fast is not None
    told = algorithm.gradient(rows, 96)
    fast = algorithm.flat.grad.clone()
    by_numpy.fast = None
    told_by_torch = algorithm.gradient(rows, 96)
    exact = algorithm.flat.grad
    assert float(exact.abs().max()) > 1e-3
    assert torch.allclose(fast, exact, rtol=1e-4, atol=1e-5 * float(exact.abs().max()))
    assert told == pytest.approx(told_by_torch, rel=1e-4, abs=1e-4)


@pytest.mark.parametrize("name", NAMES)
def test_images_go_through_torch(name: str) -> None:
    algorithm = make(name, OBSERVATIONS["image"], ACTIONS["discrete"])
    assert in_numpy(algorithm).fast is None
    rows = batch_of(algorithm, OBSERVATIONS["image"], rows=16)
    algorithm.gradient(rows, 16)
    assert 0 < float(algorithm.flat.grad.abs().max()) < np.inf


# -- spaces ----------------------------------------------------------------------------------------


class AnySpaces(gymnasium.Env):  # type: ignore[misc]
    """Random observations of one space; takes actions of another, and looks at them."""

    def __init__(self, observations: str, actions: str) -> None:
        self.observation_space = OBSERVATIONS[observations]
        self.action_space = ACTIONS[actions]
        self._steps = 0

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        self._steps = 0
        return self.observation_space.sample(), {}

    def step(self, action: Any) -> Any:
        if not self.action_space.contains(action):
            raise ValueError(f"{action!r} is no action of {self.action_space}")
        self._steps += 1
        reward = float(np.mean(np.asarray(action, np.float64)))
        return self.observation_space.sample(), reward, self._steps == 5, False, {}


PAIRS = [(o, "discrete") for o in OBSERVATIONS] + [("vector", a) for a in ACTIONS]


@pytest.mark.parametrize(("observations", "actions"), PAIRS)
@pytest.mark.parametrize("name", NAMES)
def test_one_update_on_every_space(name: str, observations: str, actions: str) -> None:
    envs = make_vec(lambda: AnySpaces(observations, actions), 2, seed=1)
    algorithm = make(name, envs.observation_space, envs.action_space)
    nothing = Normaliser(envs.observation_space, False, False, 0.99)
    collector = Collector(envs, algorithm.actor, 12, EnvNoise(1, 0, 2), nothing)
    before = algorithm.flat.data.clone()
    batch = algorithm.prepare(collector.collect())
    info = algorithm.update(batch, Alone(), 0.0)
    assert all(np.isfinite(value) for value in info.values()), info
    assert torch.isfinite(algorithm.flat.data).all()
    assert not torch.equal(algorithm.flat.data, before)
    assert algorithm.version == 1
    envs.close()


# -- batches on a device ---------------------------------------------------------------------------


def updated(name: str, observations: str, brings: bool) -> Any:
    algorithm = make(name, OBSERVATIONS[observations], ACTIONS["box"])
    algorithm.brings, in_numpy(algorithm).fast = brings, None
    batch = batch_of(algorithm, OBSERVATIONS[observations], rows=50)
    moved(algorithm)
    algorithm.update(batch, Alone(), 0.0)
    return algorithm


@pytest.mark.parametrize("observations", ["vector", "dict of image"])
@pytest.mark.parametrize("name", NAMES)
def test_a_batch_that_is_brought_to_the_device_teaches_the_same(
    name: str, observations: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Once, and whole; and where there is no room for it, minibatch by minibatch as before."""
    expected = updated(name, observations, brings=False)
    sizes: list[int] = []

    def counted(tree: Any, device: torch.device) -> Any:
        if isinstance(tree, dict) and isinstance(tree.get("target"), np.ndarray):
            sizes.append(len(tree["target"]))
            if full and sizes[-1] == 50:
                raise torch.OutOfMemoryError("no room")
        return to_tensor(tree, device)

    monkeypatch.setattr(base, "to_tensor", counted)
    for full in (False, True):
        sizes.clear()
        found = updated(name, observations, brings=True)
        assert torch.equal(found.flat.data, expected.flat.data)
        assert sizes[0] == 50
        assert found.brings != full
        assert len(sizes) == 1 or full


# -- PPO -------------------------------------------------------------------------------------------


def ppo_update(**options: Any) -> dict[str, float]:
    space = OBSERVATIONS["vector"]
    algorithm = make("ppo", space, ACTIONS["discrete"], minibatch=32, epochs=5, **options)
    info: dict[str, float] = algorithm.update(batch_of(algorithm, space), Alone(), 0.0)
    return info


def test_ppo_stops_at_its_kl() -> None:
    assert ppo_update(learning_rate=0.03)["gradient_steps"] == 15
    assert ppo_update(learning_rate=0.03, target_kl=100.0)["gradient_steps"] == 15
    stopped = ppo_update(learning_rate=0.03, target_kl=1e-4)
    assert stopped["gradient_steps"] == 2  # no KL before the first step, too much after it


def test_ppo_penalty_adapts_to_the_kl() -> None:
    options = {"kl_penalty": True, "target_kl": 0.01}
    far = ppo_update(learning_rate=0.03, **options)
    assert far["kl"] > 0.015
    assert far["kl_weight"] > 1.0
    near = ppo_update(learning_rate=1e-6, **options)
    assert near["kl_weight"] < 1.0
    assert near["gradient_steps"] == 15


def test_ppo_penalty_holds_the_policy_back() -> None:
    space = OBSERVATIONS["vector"]
    kls = []
    for weight in (0.0, 100.0):
        options = {"learning_rate": 0.01, "kl_penalty": True, "minibatch": 0, "epochs": 10}
        algorithm = make("ppo", space, ACTIONS["discrete"], **options)
        algorithm.kl_weight = weight
        kls.append(algorithm.update(batch_of(algorithm, space), Alone(), 0.0)["kl"])
    assert kls[1] < 0.5 * kls[0]


# -- TRPO ------------------------------------------------------------------------------------------


def policy_of(algorithm: Any) -> torch.Tensor:
    parts = [p.detach().reshape(-1) for p in algorithm.model.policy_parameters()]
    return torch.cat(parts).clone()


@pytest.mark.parametrize("max_kl", [0.001, 0.01, 0.1])
@pytest.mark.parametrize("actions", sorted(ACTIONS))
def test_trpo_stays_in_its_trust_region(actions: str, max_kl: float) -> None:
    space = OBSERVATIONS["vector"]
    algorithm = make("trpo", space, ACTIONS[actions], max_kl=max_kl, fisher_every=1)
    batch, before = batch_of(algorithm, space), policy_of(algorithm)
    info = algorithm.update(batch, Alone(), 0.0)
    assert info["improvement"] > 0
    assert not torch.equal(policy_of(algorithm), before)
    with torch.no_grad():
        now = algorithm.model.policy(torch.as_tensor(batch["obs"]))
        kl = float(algorithm.model.head.kl(torch.as_tensor(batch["parameters"]), now).mean())
    assert 0 < kl <= max_kl * 1.001
    assert info["kl"] == pytest.approx(kl, rel=1e-3)


@pytest.mark.parametrize("how", ["tiny region", "no tries", "no advantage"])
def test_trpo_restores_the_policy_to_the_bit(how: str) -> None:
    space = OBSERVATIONS["vector"]
    options: dict[str, Any] = {"normalize_advantages": False}
    options |= {"tiny region": {"max_kl": 1e-25}, "no tries": {"line_search_tries": 0}}.get(how, {})
    algorithm = make("trpo", space, ACTIONS["box"], **options)
    batch = batch_of(algorithm, space)
    if how == "no advantage":
        batch["advantage"][:] = 0.0
    policy, value = policy_of(algorithm), algorithm.flat.data.clone()
    info = algorithm.update(batch, Alone(), 0.0)
    assert torch.equal(policy_of(algorithm), policy)
    assert (info["step_fraction"], info["kl"], info["improvement"]) == (0, 0, 0)
    assert not torch.equal(algorithm.flat.data, value)  # the value function has learned


@pytest.mark.parametrize("how", ["nan", "infinity"])
def test_trpo_does_not_step_along_a_gradient_that_is_not_finite(how: str) -> None:
    space = OBSERVATIONS["vector"]
    algorithm = make("trpo", space, ACTIONS["box"], normalize_advantages=how == "nan")
    batch = batch_of(algorithm, space)
    batch["advantage"][7] = float(how)
    before = algorithm.flat.data.clone()
    with pytest.raises(WorkerError, match="gradient of update 1 is not finite"):
        algorithm.update(batch, Alone(), 0.0)
    assert torch.equal(algorithm.flat.data, before)


def test_trpo_refuses_a_shared_network() -> None:
    model = build_actor_critic(OBSERVATIONS["vector"], ACTIONS["discrete"], shared=True)
    with pytest.raises(ConfigError, match="separate networks"):
        SPECS["trpo"].load()(model, SPECS["trpo"].options(), seed=1)


@pytest.mark.parametrize("name", NAMES)
def test_gradient_that_is_not_finite_changes_nothing(name: str) -> None:
    space = OBSERVATIONS["vector"]
    algorithm = make(name, space, ACTIONS["discrete"])
    batch = batch_of(algorithm, space)
    batch["target"][3] = np.inf
    before = algorithm.model.value_out.weight.detach().clone()
    with pytest.raises(WorkerError, match="not finite"):
        algorithm.update(batch, Alone(), 0.0)
    assert torch.equal(algorithm.model.value_out.weight, before)
    assert torch.isfinite(algorithm.flat.data).all()


# -- the ends of episodes --------------------------------------------------------------------------

LIMIT, LENGTH, GAMMA = 5, 7, 0.9


class KnownCritic:
    """Goes right, and values an observation at 10 + 3 × its place: other at an end than at a start.

    In both probes the place, from 0 to 1, can be read off the observation.
    """

    def act(self, obs: Any, noise: Any) -> Acted:
        n = len(obs)
        return Acted(
            np.ones(n, np.int64), np.zeros(n, np.float32), self.value(obs), np.zeros((n, 2), "f4")
        )

    def value(self, obs: Any) -> Any:
        return np.asarray(10 + 3 * place_of(obs), np.float32)


def place_of(obs: Any) -> Any:
    return obs[:, 0] if obs.shape[1] == 1 else obs.argmax(1) / LIMIT


def by_hand(places: Any, terminal: bool) -> list[float]:
    """r + γ r' + … + γ^m V(end) for the rows of one environment, from the definition."""
    targets = []
    for row, place in enumerate(places):
        left, rows = round(LIMIT * (1 - place)), len(places) - row
        steps = min(left, rows)
        ends = left <= rows
        rewards = [float(ends and k == left - 1) if terminal else 1.0 for k in range(steps)]
        total = sum(GAMMA**k * r for k, r in enumerate(rewards))
        if not (terminal and ends):
            total += GAMMA**steps * (10 + 3 * (place + steps / LIMIT))
        targets.append(total)
    return targets


def probe(kind: Any, mode: str) -> Any:
    if mode == "loop":
        return make_vec(lambda: kind(LIMIT), 2, seed=1)
    vector = SyncVectorEnv([lambda: kind(LIMIT)] * 2, autoreset_mode=AutoresetMode[mode])
    return make_vec(vector, 2, seed=1)


@pytest.mark.parametrize("mode", ["loop", "NEXT_STEP", "SAME_STEP", "DISABLED"])
@pytest.mark.parametrize("kind", [TimeLimit, Delayed], ids=["truncated", "terminated"])
@pytest.mark.parametrize("name", NAMES)
def test_bootstrap_if_and_only_if_not_terminated(name: str, kind: Any, mode: str) -> None:
    """λ = 1, so that a target is the rewards to the end and what is said to come after it.

    Rollouts of 7 steps over episodes of 5: ends fall into the middle and onto the borders.
    """
    envs = probe(kind, mode)
    space = envs.observation_space
    algorithm = make(name, space, envs.action_space, gamma=GAMMA, gae_lambda=1.0)
    nothing = Normaliser(space, False, False, GAMMA)
    collector = Collector(envs, KnownCritic(), LENGTH, EnvNoise(1, 0, 2), nothing)
    for _ in range(6):
        batch = algorithm.prepare(collector.collect())
        places = place_of(batch["obs"]).reshape(2, -1)
        for own, target in zip(places, batch["target"].reshape(2, -1), strict=True):
            assert target == pytest.approx(by_hand(own, kind is Delayed), rel=1e-5)
        assert batch["advantage"] == pytest.approx(batch["target"] - batch["value"], abs=1e-5)
    envs.close()

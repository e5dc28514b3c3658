"""Masks of actions: what is impossible has probability 0, in every head, algorithm and place.

`manyhands/Masked-v0` raises when an impossible action arrives, so that a run which ends well has
never chosen one.
"""

from __future__ import annotations

import importlib.util
import math
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import pytest
import torch
from gymnasium import spaces
from gymnasium.vector import SyncVectorEnv

import manyhands as mh
from manyhands.algorithms.off_policy import epsilon_greedy
from manyhands.config import build
from manyhands.config.validate import faults
from manyhands.envs import make_vec
from manyhands.envs.registry import env_factory
from manyhands.envs.spaces import flat_mask
from manyhands.envs.toys import Masked
from manyhands.errors import ConfigError, WorkerError
from manyhands.networks.build import build_actor_critic
from manyhands.networks.flat import FlatParameters
from manyhands.networks.heads import Categorical, MultiCategorical, masked
from manyhands.networks.numpy_distributions import for_head, sample
from manyhands.networks.numpy_mlp import FastActor, FastGradient
from manyhands.policy import load
from manyhands.viewing.evaluation import evaluate

MASK = "action_mask"
HEADS = {"one choice": Categorical(6, start=2), "two choices": MultiCategorical([4, 3])}
SIZES = {"one choice": [6], "two choices": [4, 3]}


def some_masks(sizes: list[int], rows: int, rng: np.random.Generator) -> Any:
    """At least one alternative of each choice in every row; in the first, exactly one."""
    parts = []
    for n in sizes:
        part = (rng.random((rows, n)) < 0.5).astype(np.int8)
        part[np.arange(rows), rng.integers(n, size=rows)] = 1
        part[0] = np.arange(n) == 1
        parts.append(part)
    return np.concatenate(parts, axis=1)


# -- a slow reference ------------------------------------------------------------------------------


def slow_log_probs(logits: list[float], mask: list[int]) -> list[float]:
    """Of one choice: softmax over what is possible, and no probability elsewhere."""
    top = max(x for x, possible in zip(logits, mask, strict=True) if possible)
    total = sum(math.exp(x - top) for x, m in zip(logits, mask, strict=True) if m)
    return [x - top - math.log(total) if m else -math.inf
            for x, m in zip(logits, mask, strict=True)]  # fmt: skip


def slow_entropy(log_probs: list[float]) -> float:
    return -sum(math.exp(x) * x for x in log_probs if x > -math.inf)  # 0 log 0 = 0


def slow_kl(old: list[float], new: list[float]) -> float:
    return sum(math.exp(p) * (p - q) for p, q in zip(old, new, strict=True) if p > -math.inf)


def by_choice(row: Any, sizes: list[int]) -> list[list[Any]]:
    ends = np.cumsum(sizes)[:-1]
    return [part.tolist() for part in np.split(row, ends)]


@pytest.mark.parametrize("name", HEADS)
def test_log_probability_entropy_and_kl_are_those_of_the_possible_actions(name: str) -> None:
    head: Any = HEADS[name]
    sizes, rng = SIZES[name], np.random.default_rng(1)
    masks = some_masks(sizes, 20, rng)
    raw = [3.0 * rng.standard_normal(masks.shape) for _ in range(2)]
    old, new = (masked(torch.tensor(x), {MASK: torch.tensor(masks)}) for x in raw)
    actions, logp = sample(head, new.numpy().copy(), rng)
    starts = np.array([part.start for part in getattr(head, "parts", [head])])
    for i in range(len(masks)):
        m = by_choice(masks[i], sizes)
        q, p = (
            [slow_log_probs(x, k) for x, k in zip(by_choice(r[i], sizes), m, strict=True)]
            for r in (raw[1], raw[0])
        )
        index = (np.ravel(actions[i]) - starts).tolist()
        chosen = sum(part[k] for part, k in zip(q, index, strict=True))
        assert chosen > -math.inf  # possible
        assert logp[i] == pytest.approx(chosen)
        a = torch.tensor(actions[i : i + 1])
        assert head.log_prob(new[i : i + 1], a).item() == pytest.approx(chosen)
        assert head.entropy(new[i : i + 1]).item() == pytest.approx(
            sum(map(slow_entropy, q)), abs=1e-9
        )
        assert head.kl(old[i : i + 1], new[i : i + 1]).item() == pytest.approx(
            sum(map(slow_kl, p, q)), abs=1e-9
        )
    lp, entropy, _ = for_head(head).log_prob_and_entropy(new.numpy(), actions)
    assert lp == pytest.approx(logp, abs=1e-5)
    assert entropy == pytest.approx(head.entropy(new).numpy(), abs=1e-5)


@pytest.mark.parametrize("name", HEADS)
def test_gradients_in_numpy_are_those_of_autograd(name: str) -> None:
    sizes, rng = SIZES[name], np.random.default_rng(2)
    actions_space: Any = (
        spaces.Discrete(6, start=2) if len(sizes) == 1 else spaces.MultiDiscrete(sizes)
    )
    space = spaces.Dict(
        {
            "observation": spaces.Box(-9, 9, (3,), np.float32),
            MASK: spaces.MultiBinary(sum(sizes)),
        }
    )
    model = build_actor_critic(space, actions_space, hidden=(8,), seed=3)
    with torch.no_grad():
        model.policy_out.weight.mul_(100.0)
    flat = FlatParameters(model)
    fast = FastGradient(model, flat)
    obs = {
        "observation": rng.standard_normal((30, 3)).astype(np.float32),
        MASK: some_masks(sizes, 30, rng),
    }
    acted = FastActor(model).act(obs, rng)
    d_logp, d_entropy = (rng.standard_normal(30).astype(np.float32) for _ in range(2))
    parameters, _ = fast.forward(obs)
    assert parameters == pytest.approx(acted.parameters, rel=1e-5)
    _, _, pull = for_head(model.head).log_prob_and_entropy(parameters, acted.actions)
    fast.backward(pull(d_logp, d_entropy), np.ones(30, np.float32))
    by_hand = flat.grad.clone()

    flat.zero_grad()
    tensors = {k: torch.from_numpy(v) for k, v in obs.items()}
    out, value = model(tensors)
    logp = model.head.log_prob(out, torch.from_numpy(acted.actions))
    entropy = model.head.entropy(out)
    loss = (torch.from_numpy(d_logp) * logp + torch.from_numpy(d_entropy) * entropy).sum()
    (loss + value.sum()).backward()  # type: ignore[no-untyped-call]
    assert torch.isfinite(flat.grad).all()
    assert torch.allclose(by_hand, flat.grad, rtol=1e-3, atol=1e-4)


def test_exploration_draws_from_the_possible_actions_alike() -> None:
    rng = np.random.default_rng(3)
    masks = np.zeros((6000, 5), np.int8)
    masks[:, [1, 2, 4]] = 1
    q = np.where(masks != 0, rng.standard_normal(masks.shape), -1e9)
    chosen = epsilon_greedy(q, np.ones(6000), rng, masks)  # type: ignore[arg-type]
    counts = np.bincount(chosen, minlength=5)
    assert counts[[0, 3]].tolist() == [0, 0]
    assert counts[[1, 2, 4]] == pytest.approx(2000, rel=0.1)
    greedy = epsilon_greedy(q, np.zeros(6000), rng, masks)  # type: ignore[arg-type]
    assert (greedy == q.argmax(axis=1)).all()


@pytest.mark.parametrize("double", [True, False])
@pytest.mark.parametrize("hidden", [(8,), ()])
def test_dqns_target_is_the_best_of_the_possible_next_actions(double: bool, hidden: Any) -> None:
    from manyhands.algorithms.dqn import DQN
    from manyhands.policy import build_model

    space = spaces.Dict(
        {"observation": spaces.Box(-9, 9, (3,), np.float32), MASK: spaces.MultiBinary(5)}
    )
    experiment = build("dqn", env="CartPole-v1", double=double, hidden=hidden or (8,))
    dqn: Any = DQN(build_model(experiment, space, spaces.Discrete(5)), experiment.options, seed=1)
    if not hidden:
        dqn._numpy = dqn._numpy_target = None  # the same in torch
    with torch.no_grad():
        dqn.target_flat.data.add_(0.3 * torch.randn(dqn.target_flat.data.shape))
    rng = np.random.default_rng(4)
    obs = {"observation": rng.standard_normal((9, 3)).astype(np.float32)}
    masks = some_masks([5], 9, rng)
    rows = {
        "next_obs": obs | {MASK: masks},
        "reward": np.ones(9, np.float32),
        "discount": np.full(9, 0.9, np.float32),
    }
    masks[8], rows["discount"][8] = 0, 0.0  # a terminal state: nothing is possible
    tensors = {k: torch.from_numpy(v) for k, v in obs.items()}
    with torch.no_grad():
        own, target = dqn.model(tensors).numpy(), dqn.target(tensors).numpy()
    chooser = own if double else target
    for i, y in enumerate(dqn.targets(rows)):
        possible = np.flatnonzero(masks[i])
        best = max(possible, key=lambda a: chooser[i, a]) if len(possible) else 0
        assert y == pytest.approx(1.0 + rows["discount"][i] * target[i, best], abs=1e-5)


# -- runs ------------------------------------------------------------------------------------------

SMALL: dict[str, Any] = {"engine": "inline", "quiet": True, "tensorboard": False, "hidden": (8,)}
ROLLOUT: dict[str, Any] = {"num_envs": 4, "rollout_length": 16, "steps": 128}
RUNS: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "ppo": ("ppo", {**ROLLOUT, "minibatch": 32}, {}),
    "a2c, a tuple of masks": ("a2c", ROLLOUT, {"choices": 2, "where": "info"}),
    "trpo": ("trpo", ROLLOUT, {"where": "info"}),
    "ppo, lstm": ("ppo", {**ROLLOUT, "minibatch": 32, "lstm": 4}, {"where": "info"}),
    "trpo, lstm": ("trpo", {**ROLLOUT, "lstm": 4}, {"choices": 2}),
    "impala": ("impala", ROLLOUT, {"where": "info"}),
    "impala, lstm": ("impala", {**ROLLOUT, "lstm": 4}, {"choices": 2}),
    "impala, apart": ("impala", {**ROLLOUT, "workers": 3}, {}),
    "a3c": ("a2c", {**ROLLOUT, "workers": 3, "strategy": "gradient_server"}, {}),
    "episodes": ("ppo", {"collect": "episodes", "batch_steps": 64, "steps": 128}, {}),
    "normalised": ("ppo", {**ROLLOUT, "minibatch": 32, "normalize_observations": True}, {}),
    "dqn": ("dqn", {"learning_starts": 128, "steps": 384, "batch_size": 16}, {"where": "info"}),
    "ape-x": (
        "dqn",
        {"learning_starts": 128, "steps": 512, "batch_size": 16, "workers": 3, "num_envs": 4},
        {},
    ),
}


def trained(folder: Path, algorithm: str, options: dict[str, Any], env: dict[str, Any]) -> Path:
    env = {"actions": 12, **env}
    mh.train(
        algorithm,
        env="manyhands/Masked-v0",
        env_kwargs=env,
        run_dir=str(folder),
        **(SMALL | options),
    )
    return folder


def play(policy: Any, act: Any, steps: int, env: dict[str, Any]) -> None:
    """The environment raises where an impossible action arrives."""
    one = env_factory("manyhands/Masked-v0", {"actions": 12, **env})()
    obs, _ = one.reset(seed=1)
    for _ in range(steps):
        obs, _, terminated, truncated, _ = one.step(act(obs))
        if terminated or truncated:
            obs, _ = one.reset()


@pytest.mark.parametrize("name", RUNS)
def test_no_impossible_action_in_training_and_evaluation(name: str, tmp_path: Path) -> None:
    algorithm, options, env = RUNS[name]
    folder = trained(tmp_path / "run", algorithm, options, env)
    for deterministic in (True, False):
        evaluate(folder, 4, deterministic=deterministic)


def through_file(policy: Any, path: Path) -> Any:
    """How an exported policy is asked for one action."""
    policy.export(path)
    if path.suffix == ".pt":
        module = torch.jit.load(str(path))  # type: ignore[no-untyped-call]
        keys = sorted(policy.observation_space)
        return lambda obs: module(*(torch.as_tensor(obs[k])[None] for k in keys))[0].numpy()
    import onnxruntime

    session = onnxruntime.InferenceSession(str(path))
    names = [i.name for i in session.get_inputs()]
    assert names == ["action_mask", "observation"]
    return lambda obs: session.run(None, {k: np.asarray(obs[k])[None] for k in names})[0][0]


def test_a_mask_is_an_input_of_an_exported_policy(tmp_path: Path) -> None:
    env = {"where": "info", "choices": 2}
    options = {**ROLLOUT, "minibatch": 32, "normalize_observations": True}
    policy = load(trained(tmp_path / "run", "ppo", options, env))
    suffixes = [".pt"]
    if importlib.util.find_spec("onnxruntime") and importlib.util.find_spec("onnxscript"):
        suffixes.append(".onnx")
    for suffix in suffixes:
        act = through_file(policy, tmp_path / f"policy{suffix}")
        play(policy, act, 100, env)
        play(policy, lambda obs, act=act: same(act(obs), policy.act(obs)), 20, env)


def same(one: Any, other: Any) -> Any:
    assert np.array_equal(one, other)
    return one


def test_a_policy_is_given_the_mask_beside_the_observation(tmp_path: Path) -> None:
    options = {**ROLLOUT, "minibatch": 32}
    policy = load(trained(tmp_path / "run", "ppo", options, {"where": "info"}))
    observation = np.zeros(1, np.float32)
    for legal in range(12):
        mask = np.arange(12) == legal
        assert policy.act(observation, mask=mask) == legal
        assert policy.act(observation, False, mask=mask) == legal
    with pytest.raises(ConfigError, match=r"mask=info"):
        policy.act(observation)
    assert np.isfinite(policy.value(observation))


@pytest.mark.parametrize("strategy", ["gather", "allreduce"])
def test_workers_with_masks_learn_as_one(strategy: str, tmp_path: Path) -> None:
    weights = []
    for workers in (1, 2):
        options = {**ROLLOUT, "minibatch": 32, "workers": workers, "seed": 3}
        if workers > 1:
            options["strategy"] = strategy
        policy = load(trained(tmp_path / str(workers), "ppo", options, {"where": "info"}))
        weights.append(torch.cat([p.detach().reshape(-1) for p in policy.model.parameters()]))
    assert torch.allclose(*weights, atol=1e-5)


def test_an_interrupted_run_with_masks_continues_exactly(tmp_path: Path) -> None:
    from manyhands.envs.loop import own_state

    envs = make_vec("manyhands/Masked-v0", 2, seed=1, where="info", actions=12)
    twin = make_vec("manyhands/Masked-v0", 2, seed=1, where="info", actions=12)
    obs = envs.reset()
    for _ in range(5):
        obs = envs.step(obs[MASK].argmax(axis=1)).obs
    assert own_state(envs.envs[0]) is None  # type: ignore[attr-defined]
    restored = twin.load_state(envs.state(obs))
    assert restored.restarted == []
    actions = obs[MASK].argmax(axis=1)
    after = [e.step(actions).obs for e in (envs, twin)]
    assert all(np.array_equal(after[0][k], after[1][k]) for k in after[0])


@pytest.mark.parametrize("algorithm", ["ppo", "dqn"])
@pytest.mark.parametrize("mode", ["NextStep", "SameStep", "alone"])
def test_an_agent_and_vector_environments(algorithm: str, mode: str) -> None:
    """Nothing is possible where an episode has ended, and nothing is said against that."""
    options: dict[str, Any] = {"hidden": (8,), "rollout_length": 8, "steps": 96}
    options |= {"minibatch": 8} if algorithm == "ppo" else {"learning_starts": 32, "batch_size": 8}
    envs: Any = Ending()
    if mode != "alone":
        how = gymnasium.vector.AutoresetMode(mode)
        envs = gymnasium.vector.SyncVectorEnv([Ending] * 2, autoreset_mode=how)
    with mh.Agent(algorithm, envs, **options) as agent:
        obs, _ = envs.reset(seed=1)
        while not agent.done:
            obs, *more = envs.step(agent.act(obs))
            agent.observe(obs, *more)
            agent.update()
            if mode == "alone" and (more[1] or more[2]):
                obs, _ = envs.reset()
        assert agent.version > 0


class Ending(gymnasium.Wrapper):  # type: ignore[misc]
    """Terminates, with a mask of zeros."""

    def __init__(self) -> None:
        super().__init__(gymnasium.make("manyhands/Masked-v0", actions=6, possible=2, length=5))

    def step(self, action: Any) -> Any:
        obs, reward, _, over, info = self.env.step(action)
        return {**obs, MASK: obs[MASK] * (not over)}, reward, over, False, info


# -- what is refused -------------------------------------------------------------------------------


class Stuck(gymnasium.Env):  # type: ignore[misc]
    """Nothing can be done any more in step 3."""

    def __init__(self, actions: Any = None, mask: Any = None, terminal: bool = False) -> None:
        self.action_space = actions or spaces.MultiDiscrete([2, 3])
        part = mask or spaces.MultiBinary(5)
        self.observation_space = spaces.Dict({"x": spaces.Box(0, 1, (1,), np.float32), MASK: part})
        self.terminal, self._steps = terminal, 0

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        self._steps = 0
        return self._seen(), {}

    def step(self, action: Any) -> Any:
        self._steps += 1
        return self._seen(), 0.0, self.terminal and self._steps == 3, False, {}

    def _seen(self) -> Any:
        mask = np.array([1, 1, 0, 0, 0 if self._steps == 3 else 1], np.int8)
        return {"x": np.zeros(1, np.float32), MASK: mask}


def test_a_state_without_a_possible_action_is_an_error_that_says_where() -> None:
    envs = make_vec(Stuck, 2, seed=1)
    envs.reset()
    actions = np.zeros((2, 2), np.int64)
    for _ in range(2):
        envs.step(actions)
    with pytest.raises(WorkerError, match=r"env 0 \(episode 0, step 3, seed \d+\) leaves no"):
        envs.step(actions)
    over = make_vec(lambda: Stuck(terminal=True), 1, seed=1)
    over.reset()
    for _ in range(8):
        over.step(actions[:1])  # where an episode has ended nothing need be possible


def stuck_box() -> Stuck:
    return Stuck(actions=spaces.Box(-1, 1, (5,), np.float32))


def stuck_size() -> Stuck:
    return Stuck(mask=spaces.MultiBinary(4))


@pytest.mark.parametrize(
    ("env", "said"),
    [(stuck_box, "masks are for Discrete"), (stuck_size, "write: spaces.MultiBinary(5)")],
)
def test_a_mask_that_does_not_fit_is_refused_before_anything_starts(env: Any, said: str) -> None:
    experiment = build("ppo", env=f"{__name__}:{env.__name__}")
    assert any(said in fault for fault in faults(experiment))


class InInfo(gymnasium.Env):  # type: ignore[misc]
    """Four actions; what `info` says of them is given: at the start, and in step 3 of ten."""

    observation_space = spaces.Box(0, 1, (1,), np.float32)
    action_space = spaces.Discrete(4)

    def __init__(self, first: Any = (1, 0, 1, 0), third: Any = (1, 0, 1, 0)) -> None:
        self.first = None if first == "none" else first  # a configuration has no None
        self.third, self._steps = third, 0

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        self._steps = 0
        return np.zeros(1, np.float32), {MASK: self.first}

    def step(self, action: Any) -> Any:
        assert action in (0, 2)
        self._steps += 1
        info = {MASK: self.third if self._steps == 3 else self.first}
        if self._steps == 3 and self.third == "none":
            info = {}
        return np.zeros(1, np.float32), 0.0, self._steps == 10, False, info


def in_info(num_envs: int, **masks: Any) -> SyncVectorEnv:
    return SyncVectorEnv([lambda: InInfo(**masks)] * num_envs)


WRONG = [
    ((1, 1, 1), "has shape (3,), and the action space Discrete(4) needs 4 numbers"),
    ((0, 0, 0, 0), "leaves no action that is possible"),
    (None, "leaves no action that is possible"),
    # what others add to logits: 0 for what is possible
    ((0.0, float("-inf"), 0.0, -1e9), "has other numbers than 1"),
    ((float("nan"), 1, 0, 0), "has other numbers than 1"),
]


@pytest.mark.parametrize(
    ("make", "mask", "said"),
    # Gymnasium's vectors leave out what is None: there are no masks then.
    [(make, *case) for make in (InInfo, in_info) for case in WRONG if make is InInfo or case[0]],
)
def test_a_first_mask_in_info_that_is_none_is_refused_before_anything_starts(
    make: Any, mask: Any, said: str
) -> None:
    name = f"{__name__}:{make.__name__}"
    (fault,) = faults(build("ppo", env=name, workers=1, env_kwargs={"first": mask or "none"}))
    assert said in fault


@pytest.mark.parametrize(
    ("mask", "said"), [*WRONG[:2], *WRONG[3:], ("none", "info has no action_mask here")]
)
def test_a_later_mask_in_info_that_is_none_says_where(mask: Any, said: str) -> None:
    envs = make_vec(InInfo, 2, seed=1, third=mask)
    envs.reset()
    actions = np.zeros(2, np.int64)
    for _ in range(2):
        envs.step(actions)
    with pytest.raises((ConfigError, WorkerError)) as caught:
        envs.step(actions)
    assert said in str(caught.value)
    notes = getattr(caught.value, "__notes__", [])
    assert "env 0 (episode 0, step 3, seed" in " ".join([str(caught.value), *notes])


class AddedToLogits(Stuck):
    def __init__(self) -> None:
        super().__init__(mask=spaces.Box(-np.inf, 0, (5,), np.float32))

    def _seen(self) -> Any:
        return {"x": np.zeros(1, np.float32), MASK: np.array([0, -1e9, 0, 0, -1e9], np.float32)}


def test_a_mask_of_the_observation_that_is_added_to_logits_is_refused() -> None:
    with pytest.raises(WorkerError, match=r"of env 0 .* has other numbers than 1"):
        make_vec(AddedToLogits, 2, seed=1).reset()


def test_a_policy_refuses_masks_that_are_none(tmp_path: Path) -> None:
    for where in ("info", "observation"):
        env = {"where": where, "actions": 6}
        policy = load(trained(tmp_path / where, "ppo", {**ROLLOUT, "minibatch": 32}, env))
        shown = np.zeros(1, np.float32)

        def act(mask: Any, policy: Any = policy, shown: Any = shown, where: str = where) -> Any:
            if where == "info":
                return policy.act(shown, mask=mask)
            return policy.act({"observation": shown, MASK: mask})

        assert act([0, 0, 0, 0, 1, 0]) == 4
        assert act(np.arange(6) == 2) == 2
        for mask, said in (
            ([1, 1, 1], "needs 6 numbers"),
            ([0] * 6, "leaves no action"),
            ([0, -np.inf] * 3, "has other numbers"),
        ):
            with pytest.raises(ConfigError, match=said):
                act(mask)
    with pytest.raises(ConfigError, match=r"a row for each, \(2, 6\), is expected"):
        policy.act_batch(np.zeros((2, 1), np.float32), mask=np.ones((2, 5)))


def test_masks_and_a_network_of_ones_own(tmp_path: Path) -> None:
    options = {**ROLLOUT, "minibatch": 32, "network": OwnFeatures}
    policy = load(trained(tmp_path / "run", "ppo", options, {"where": "info"}))
    play(policy, policy.act, 50, {"where": "info"})


class OwnFeatures(torch.nn.Linear):
    """Sees the observation itself: no dict, no mask."""

    def __init__(self, observation_space: Any, action_space: Any) -> None:
        assert observation_space.shape == (1,)
        super().__init__(1, 4)


# -- the whole of it -------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("algorithm", ["ppo", "a2c", "trpo", "impala", "dqn"])
def test_none_of_100000_actions_is_one_of_97_impossible_ones(
    algorithm: str, tmp_path: Path
) -> None:
    env = {"actions": 100, "possible": 3, "where": "info"}
    options = {"steps": 100_000, "seed": 1, "hidden": (64, 64)}
    folder = trained(tmp_path / "run", algorithm, options, env)
    drawn = evaluate(folder, 100_000 // 16, deterministic=False)
    assert sum(drawn.lengths) == 100_000
    best = evaluate(folder, 100)
    assert best.mean_return > 14  # of 16; by chance: 16 / 3
    policy = load(folder)
    play(policy, through_file(policy, tmp_path / "policy.onnx"), 100_000, env)


# -- in the info of vector environments ------------------------------------------------------------


class Ends(Masked):
    """With an end of each kind: a terminal state, after which nothing is possible, and a cut."""

    def __init__(self, choices: int = 0) -> None:
        super().__init__(actions=5, possible=2, where="info", choices=choices)

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        obs, info = super().reset(seed=seed)
        self.cut_after = int(self.np_random.integers(1, 6))
        return obs, info

    def step(self, action: Any) -> Any:
        obs, reward, _, _, info = super().step(action)
        over = self._steps == 4
        return obs, reward, over, self._steps == self.cut_after, {} if over else info


def vector_of_ends(num_envs: int, mode: str = "NextStep", choices: int = 0) -> Any:
    how = gymnasium.vector.AutoresetMode(mode)
    return gymnasium.vector.SyncVectorEnv([lambda: Ends(choices)] * num_envs, autoreset_mode=how)


@pytest.mark.parametrize("choices", [0, 2])
@pytest.mark.parametrize("mode", ["NextStep", "SameStep", "Disabled"])
def test_vector_environments_with_masks_in_info(mode: str, choices: int) -> None:
    """The very rows of the same environments stepped one by one, masks and last ones included."""
    envs = make_vec(vector_of_ends, 3, seed=1, mode=mode, choices=choices)
    twins = [Ends(choices) for _ in range(3)]
    for twin in twins:
        twin.reset(seed=0)  # as who looks for a mask does
    obs = envs.reset()
    shown = [twin.reset(seed=seed) for twin, seed in zip(twins, envs._seeds, strict=True)]
    size, ends = 5 * max(1, choices), 0
    rng, again = np.random.default_rng(1), [False] * 3
    for _ in range(20):
        for i, (seen, info) in enumerate(shown):
            assert np.array_equal(obs["observation"][i], seen)
            assert np.array_equal(obs[MASK][i], flat_mask(info.get(MASK, np.zeros(size))))
        possible = obs[MASK].reshape(3, -1, 5).astype(float) + 1e-9
        chosen = (possible + rng.random(possible.shape) / 2).argmax(axis=2)
        row = envs.step(chosen if choices else chosen[:, 0])
        finals = {final.env: final.obs for final in row.finals}
        for i, twin in enumerate(twins):
            if again[i]:
                shown[i], again[i] = twin.reset(), False
                continue
            seen, _, over, cut, info = twin.step(chosen[i] if choices else chosen[i, 0])
            shown[i] = seen, info
            if over or cut:
                ends += 1
                last = flat_mask(info.get(MASK, np.zeros(size)))
                assert np.array_equal(finals[i][MASK], last)
                assert last.any() != over
                if mode == "NextStep":
                    again[i] = True
                else:
                    seed = envs._seeds[i] if mode == "Disabled" else None
                    shown[i] = twin.reset(seed=seed)
        obs = row.obs
    assert ends > 9


@pytest.mark.parametrize("algorithm", ["ppo", "dqn"])
def test_runs_on_vector_environments_with_masks_in_info(algorithm: str, tmp_path: Path) -> None:
    options = RUNS[algorithm][1] | {"steps": 256}
    env = f"{__name__}:vector_of_ends"
    folder = tmp_path / "run"
    mh.train(algorithm, env=env, num_envs=4, run_dir=str(folder),
             **(SMALL | {k: v for k, v in options.items() if k != "num_envs"}))  # fmt: skip
    one, policy = Ends(), load(folder)
    obs, info = one.reset(seed=1)
    for _ in range(2):
        assert info[MASK][policy.act(obs, mask=info[MASK])]
        obs, *_, info = one.step(policy.act(obs, mask=info[MASK]))


def test_a_mask_that_is_not_known_at_a_cut() -> None:
    class Silent(Ends):
        def step(self, action: Any) -> Any:
            obs, reward, over, cut, info = super().step(action)
            return obs, reward, False, cut or over, {} if cut else info

    same = gymnasium.vector.AutoresetMode.SAME_STEP
    made = gymnasium.vector.SyncVectorEnv([Silent] * 2, autoreset_mode=same)
    envs = make_vec(made, 2, seed=1)
    obs = envs.reset()

    def play() -> None:
        shown = obs
        for _ in range(8):
            shown = envs.step(shown[MASK].argmax(axis=1)).obs

    with pytest.raises(ConfigError, match=r"none in info\['final_info'\]"):
        play()

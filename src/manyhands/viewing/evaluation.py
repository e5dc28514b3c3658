"""How good a policy is: episodes played with fresh seeds, away from training.

Episode i has the seed at ("evaluate", i) of the tree, a branch that training never uses, so the
answer does not depend on how many environments play side by side. All episodes that were begun
are waited for: taking the first N that *end* would favour the short ones.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from gymnasium.vector import VectorEnv

from manyhands import seeding, streams, trees
from manyhands.config import Experiment
from manyhands.devices import one_thread
from manyhands.engines import stopping
from manyhands.engines.base import DEFAULT_TIMEOUT
from manyhands.envs import make_vec
from manyhands.envs.adapter import DictRows
from manyhands.envs.registry import env_factory, is_atari, resolve
from manyhands.envs.spaces import zeros
from manyhands.errors import ConfigError
from manyhands.networks.encoders import has_image
from manyhands.policy import Policy, Seat, load
from manyhands.streams import OwnChance
from manyhands.trees import Array
from manyhands.types import Obs

NUM_ENVS = 8  # side by side: the network's cost is shared, and it need not divide the episodes
BRANCH = "evaluate"

Tell = Callable[[int, float], None]  # (episodes ended, mean return so far)


@dataclass(repr=False)
class Evaluation:
    """Returns and lengths, in the order in which the episodes were begun; printed, a table."""

    env: str
    run_dir: str
    seed: int
    deterministic: bool
    returns: list[float] = field(default_factory=list)
    lengths: list[int] = field(default_factory=list)
    successes: list[bool] = field(default_factory=list)  # empty: the environment does not tell
    env_steps: int | None = None  # of the run, when the policy was its newest
    is_best: bool = False  # of all evaluations of the run so far

    @property
    def mean_return(self) -> float:
        return float(np.mean(self.returns))

    @property
    def std_return(self) -> float:
        """Over the episodes, population form."""
        return float(np.std(self.returns))

    @property
    def success_rate(self) -> float | None:
        return float(np.mean(self.successes)) if self.successes else None

    def __repr__(self) -> str:
        return self.table()

    def columns(self) -> dict[str, Any]:
        """What metrics.jsonl has of an evaluation while training."""
        return {
            "eval_env_steps": self.env_steps,
            "eval_return": self.mean_return,
            "eval_return_std": self.std_return,
            "eval_return_min": min(self.returns),
            "eval_return_max": max(self.returns),
            "eval_length": float(np.mean(self.lengths)),
        }

    def record(self) -> dict[str, Any]:
        """Plain data, for JSON."""
        when = {} if self.env_steps is None else {"env_steps": self.env_steps}
        return when | {
            "env": self.env,
            "run_dir": self.run_dir,
            "seed": self.seed,
            "deterministic": self.deterministic,
            "episodes": len(self.returns),
            "mean_return": self.mean_return,
            "std_return": self.std_return,
            "median_return": float(np.median(self.returns)),
            "min_return": min(self.returns),
            "max_return": max(self.returns),
            "mean_length": float(np.mean(self.lengths)),
            "success_rate": self.success_rate,
            "returns": self.returns,
            "lengths": self.lengths,
        }

    def table(self) -> str:
        """What a person reads."""
        how = "deterministic" if self.deterministic else "drawn from the policy"
        lengths = np.array(self.lengths)
        rows = {
            "policy": f"{self.env}, {self.run_dir}",
            "episodes": f"{len(self.returns)}, actions {how}, seed {self.seed}",
            "return": f"{self.mean_return:.2f} ± {self.std_return:.2f} (mean ± std)",
            "": f"median {np.median(self.returns):.2f}, min {min(self.returns):.2f}, "
            f"max {max(self.returns):.2f}",
            "length": f"{lengths.mean():.1f} ± {lengths.std():.1f}, from {lengths.min()} to "
            f"{lengths.max()} steps",
        }
        if self.success_rate is not None:
            rows["success"] = f"{self.success_rate:.1%} of the episodes"
        return "\n".join(f"{name:<10}{text}" for name, text in rows.items())


def evaluate(
    run_dir: str | os.PathLike[str],
    episodes: int = 100,
    *,
    seed: int | None = None,
    deterministic: bool = True,
    num_envs: int = NUM_ENVS,
    max_length: int = 0,
    tell: Tell | None = None,
) -> Evaluation:
    """Play episodes with the policy of a run, as `manyhands evaluate` does, and say how it did.

        evaluate("runs/a", episodes=20).mean_return

    They are the first `episodes` of a branch of the seed tree that training never uses.

    Args:
        run_dir: folder of a run, or what `train` gave back.
        episodes: how many.
        seed: root of the seed tree; None takes the run's own.
        deterministic: the likeliest action, or one drawn from the policy as in training.
        num_envs: how many play side by side.
        max_length: cut episodes after so many steps; 0 leaves the end to the environment.
        tell: is called with (episodes ended, mean return) each time that one ends.
    """
    if episodes < 1:
        raise ConfigError(f"{episodes} episodes; at least 1 is needed")
    return play(
        load(run_dir),
        episodes,
        run_dir=run_dir,
        seed=seed,
        deterministic=deterministic,
        num_envs=num_envs,
        max_length=max_length,
        tell=tell,
    )


def play(
    policy: Policy,
    episodes: int,
    *,
    run_dir: str | os.PathLike[str],
    seed: int | None = None,
    deterministic: bool = True,
    num_envs: int = NUM_ENVS,
    max_length: int = 0,
    tell: Tell | None = None,
) -> Evaluation:
    """`evaluate`, with a policy of that run that has been loaded."""
    experiment = experiment_of(policy)
    root = experiment.run.seed if seed is None else seed
    policy.seed(root, BRANCH, "actions")
    found = Evaluation(experiment.run.env, os.fspath(run_dir), root, deterministic)
    with few_threads(policy), streams.given_back():
        seeding.seed_everything(root, BRANCH, "worker")  # what environments draw in the making
        envs = _single_envs(experiment, min(num_envs, episodes))
        if envs is None:
            _play_vector(policy, experiment, episodes, min(num_envs, episodes), found, tell)
            return found
        try:
            _play(policy, envs, episodes, max_length, found, tell)
        finally:
            for env in envs:
                env.close()
    return found


@contextmanager
def few_threads(policy: Policy) -> Iterator[None]:
    """One thread while a small network acts: on a few rows, others cost more than they bring.

    WHY: measured on a busy machine, 100 episodes of CartPole took 20 s with two threads and 3 s
    with one. Images are left alone.
    """
    with nullcontext() if has_image(policy.model) else one_thread():
        yield


def experiment_of(policy: Policy) -> Experiment:
    if policy.experiment is None:
        raise ConfigError("the policy does not know its environment; load it with manyhands.load")
    return policy.experiment


def episode_seed(seed: int, episode: int) -> int:
    return seeding.integer(seed, BRANCH, episode)


def needs_vector(experiment: Experiment, source: Any) -> bool:
    """Whether only a vector env shows the policy what it saw in training."""
    backend = experiment.run.env_backend
    return backend in ("envpool", "atari", "vector") or (backend == "auto" and is_atari(source))


def _single_envs(experiment: Experiment, count: int) -> list[Any] | None:
    """Plain environments, whose `info` can be asked; None when there are only vector envs."""
    run = experiment.run
    if run.env_backend in ("envpool", "pettingzoo"):
        return None  # these have names of their own
    source = resolve(run.env)
    if needs_vector(experiment, source):
        return None
    factory = env_factory(source, run.env_kwargs, run.envs_per_worker)
    first = factory()
    if isinstance(first, VectorEnv):
        first.close()
        return None
    return [first, *(factory() for _ in range(count - 1))]


@dataclass
class _Slot:
    """One environment and the episode that it plays now."""

    env: Any
    place: int  # of the environment among all
    episode: int
    total: float = 0.0
    length: int = 0


def _play(
    policy: Policy, envs: list[Any], episodes: int, max_length: int, found: Evaluation,
    tell: Tell | None,
) -> None:  # fmt: skip
    """Every environment takes the next episode that nobody has begun, until there is none."""
    ended: dict[int, tuple[float, int, bool | None]] = {}
    slots = [_Slot(env, i, i) for i, env in enumerate(envs)]
    begun = len(slots)
    policy.reset()
    chance = OwnChance(len(envs), lambda _, i: seeding.sequence(found.seed, BRANCH, "chance", i))

    def first_of(slot: _Slot) -> Any:
        chance.begin(slot.place, slot.episode)
        return slot.env.reset(seed=episode_seed(found.seed, slot.episode))[0]

    observations = [first_of(slot) for slot in slots]
    chance.leave()
    while slots:
        actions = policy.act_batch(_stacked(policy, observations), found.deterministic)
        going: list[_Slot] = []
        seen: list[Any] = []
        rows: list[int] = []  # of those that go on
        fresh: list[int] = []  # of those whose episode is a new one
        for row, (slot, action) in enumerate(zip(slots, actions, strict=True)):
            chance.enter(slot.place)
            observation, reward, terminated, truncated, info = slot.env.step(action)
            slot.total += float(reward)
            slot.length += 1
            if terminated or truncated or slot.length == max_length:
                success = info.get("is_success")
                ended[slot.episode] = slot.total, slot.length, success
                if tell is not None:
                    tell(len(ended), float(np.mean([row[0] for row in ended.values()])))
                if begun == episodes:
                    continue
                slot = _Slot(slot.env, slot.place, begun)
                begun += 1
                fresh.append(row)
                observation = first_of(slot)
            going.append(slot)
            seen.append(observation)
            rows.append(row)
        chance.leave()
        chance.tick()
        policy.reset(fresh)  # before rows are left out: these are numbers in the last batch
        policy.keep(rows)
        slots, observations = going, seen
    results = [ended[i] for i in range(episodes)]
    found.returns = [result[0] for result in results]
    found.lengths = [result[1] for result in results]
    known = [bool(result[2]) for result in results if result[2] is not None]
    found.successes = known if len(known) == episodes else []


def _stacked(policy: Policy, observations: list[Any]) -> Any:
    batch = zeros(policy.observation_space, (len(observations),))
    rows = DictRows(batch) if isinstance(batch, dict) else batch
    for i, observation in enumerate(observations):
        rows[i] = trees.named(observation) if isinstance(batch, dict) else observation
    return batch


def _others(policy: Policy, seed: int) -> Callable[[Obs, list[tuple[int, int]]], Array]:
    """The policy in the other seats of games in turns, with a memory for each game."""
    seats: dict[int, tuple[int, Seat]] = {}

    def act(obs: Obs, games: list[tuple[int, int]]) -> Array:
        for row, number in games:
            if row not in seats or seats[row][0] != number:
                chance = seeding.generator(seed, BRANCH, "others", row, number)
                seats[row] = number, Seat(chance)
        return policy.act_in([seats[row][1] for row, _ in games], obs)

    return act


def _play_vector(
    policy: Policy, experiment: Experiment, episodes: int, num_envs: int, found: Evaluation,
    tell: Tell | None,
) -> None:  # fmt: skip
    """The same for environments that are vectorised already: each has its share of episodes.

    A share is fixed beforehand, so that an environment of short episodes gives no more of them.
    """
    run = experiment.run
    # A callable may make a certain number, or multiples of one, and so do games of several agents:
    # training has asked for so many.
    games = run.env_backend == "pettingzoo"
    if games or (run.env_backend != "envpool" and callable(resolve(run.env))):
        num_envs = run.envs_per_worker
    envs = make_vec(
        run.env,
        num_envs,
        backend=run.env_backend,  # type: ignore[arg-type]
        seed=seeding.integer(found.seed, BRANCH),
        box_actions="raw",  # the policy's actions are the environment's already
        **run.env_kwargs,
    )
    if hasattr(envs, "others"):
        envs.others = _others(policy, found.seed)
    share = [episodes // num_envs + (i < episodes % num_envs) for i in range(num_envs)]
    ended: dict[tuple[int, int], tuple[float, int]] = {}
    try:
        policy.reset()
        obs = envs.reset()
        while len(ended) < episodes:
            step = envs.step(policy.act_batch(obs, found.deterministic))
            over = step.terminated | step.truncated | ~step.valid
            policy.reset(np.flatnonzero(over).tolist())
            obs = step.obs
            for e in step.episodes:
                if e.number < share[e.env]:
                    ended[e.number, e.env] = e.total_return, e.length
                    if tell is not None:
                        tell(len(ended), float(np.mean([row[0] for row in ended.values()])))
    finally:
        with stopping.spared(DEFAULT_TIMEOUT, "close() of the environments"):
            envs.close()
    rows = [ended[key] for key in sorted(ended)]
    found.returns, found.lengths = [row[0] for row in rows], [row[1] for row in rows]

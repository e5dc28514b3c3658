"""Loops of users with an Agent, alone and on workers; tests and their workers find them here."""

from __future__ import annotations

import hashlib
import os
import signal
import time
from typing import Any

import gymnasium
import numpy as np
from gymnasium.vector import AutoresetMode, SyncVectorEnv

from manyhands import Agent, Parallel, seeding

SEED = 5
PPO = {"rollout_length": 32, "minibatch": 32, "epochs": 2, "normalize_observations": True}
REPLAY = {"learning_starts": 64, "batch_size": 16, "epsilon_steps": 200}
# Algorithm, environment and options of those that have roles.
JOBS: list[list[Any]] = [
    ["a2c", "CartPole-v1", {"strategy": "gradient_server", "steps": 400}],
    ["impala", "CartPole-v1", {"steps": 600, "rollout_length": 20}],
    ["dqn", "CartPole-v1", {"steps": 600, **REPLAY}],
    ["ddpg", "Pendulum-v1", {"steps": 600, "learning_starts": 64, "batch_size": 16}],
]
SEVERAL_LEARNERS: list[list[Any]] = [
    ["impala", "CartPole-v1", {"steps": 400, "rollout_length": 20, "unrolls": 2}],
    ["dqn", "CartPole-v1", {"steps": 400, **REPLAY}],
]
LEAVING: dict[str, dict[str, Any]] = {
    "impala": {}, "dqn": REPLAY, "a2c": {"strategy": "gradient_server"},
}  # fmt: skip


def vector(
    name: str = "CartPole-v1", count: int = 4, mode: str = "NEXT_STEP", limit: int = 60
) -> SyncVectorEnv:
    """Episodes are short, so that some of them are truncated."""

    def make() -> Any:
        return gymnasium.make(name, max_episode_steps=limit)

    return SyncVectorEnv([make] * count, autoreset_mode=AutoresetMode[mode])


def seeds(first: int, count: int) -> list[int]:
    """What `manyhands train` seeds the first episode of each environment with."""
    return [seeding.integer(SEED, "env", 0, first + i, 0) for i in range(count)]


def play(agent: Agent, envs: Any, first: int = 0, most: int = 100_000) -> list[dict[str, Any]]:
    """The loop, word for word; the reports."""
    reports = []
    obs, info = envs.reset(seed=seeds(first, envs.num_envs))
    while not agent.done and most > 0:
        action = agent.act(obs)
        obs, reward, terminated, truncated, info = envs.step(action)
        agent.observe(obs, reward, terminated, truncated, info)
        report = agent.update()
        reports += [report] if report is not None else []
        most -= 1
    return reports


def play_one(agent: Agent, env: gymnasium.Env[Any, Any]) -> None:
    obs, info = env.reset(seed=seeds(0, 1)[0])
    while not agent.done:
        obs, reward, terminated, truncated, info = env.step(agent.act(obs))
        agent.observe(obs, reward, terminated, truncated, info)
        agent.update()
        if terminated or truncated:
            obs, info = env.reset()


def fingerprint(agent: Agent) -> str:
    weights = agent.policy.model.state_dict().values()
    return hashlib.sha256(b"".join(w.cpu().numpy().tobytes() for w in weights)).hexdigest()


# -- on workers ------------------------------------------------------------------------------------


def together(algorithm: str, count: int, options: dict[str, Any]) -> dict[str, Any]:
    """Allreduce: each worker its part of the environments."""
    par = Parallel()
    envs = vector(count=count)
    with Agent(algorithm, envs, par=par, seed=SEED, **options) as agent:
        reports = play(agent, envs, first=par.rank * count)
        return {"weights": fingerprint(agent), "updates": len(reports), "role": agent.role}


def in_roles(jobs: list[list[Any]]) -> list[dict[str, Any]]:
    """One agent after the other, of all kinds that have roles; all run the same loop."""
    par, found = Parallel(), []
    for algorithm, env, options in jobs:
        envs = vector(env, 2)
        with Agent(algorithm, envs, par=par, seed=SEED, **options) as agent:
            reports = play(agent, envs, first=2 * par.rank)
            found.append({
                "role": agent.role,
                "acts": agent.acts,
                "version": agent.version,
                "reports": len(reports),
                "steps": reports[-1]["env_steps"] if reports else 0,
                "finite": bool(np.isfinite(next(agent.policy.model.parameters()).sum().item())),
            })  # fmt: skip
    return found


def actors_leave(algorithm: str, most: int, options: dict[str, Any]) -> dict[str, Any]:
    """Those that act have loops of a fixed length; the learner goes on until they are gone."""
    par = Parallel()
    envs = vector(count=2)
    began = time.perf_counter()
    with Agent(algorithm, envs, par=par, seed=SEED, **options) as agent:
        if agent.acts:
            play(agent, envs, first=2 * par.rank, most=most)
            return {"version": agent.version}
        while not agent.done:
            agent.update()
        return {"version": agent.version, "seconds": time.perf_counter() - began}


def dies(algorithm: str, role: str, options: dict[str, Any]) -> None:
    """One worker of that role is killed in the middle."""
    par = Parallel()
    envs = vector(count=2)
    agent = Agent(algorithm, envs, par=par, seed=SEED, **options)
    if agent.role == role and par.rank in (0, 2):
        play(agent, envs, most=50)
        os.kill(os.getpid(), signal.SIGKILL)
    play(agent, envs, first=2 * par.rank)


def disagree(what: str) -> None:
    par = Parallel()
    if what == "options":
        Agent("ppo", vector(), par=par, gamma=0.9 + 0.01 * par.rank)
    elif what == "envs":
        Agent("ppo", vector(count=2 + par.rank), par=par)
    elif what == "roles":
        Agent("dqn", vector(), par=par)

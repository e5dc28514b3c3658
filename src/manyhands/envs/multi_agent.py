"""Games of several agents, by PettingZoo, for one policy that all of them share: a row is an agent.

All act at once (`ParallelEnv`):

    row g · A + a     agent a of game g
    an early end      the agent's row ends with its own last observation and reward, and waits: no
                      transitions (`valid` is False) and no rewards until the game is over for all;
                      then every row begins the next game in the same step

One after the other (`AECEnv`):

    row r             one seat in a game of its own, the next seat in each game; whoever sits in the
                      others is asked in between (`others`): see strategies/experience.py
    reward            what came to the agent from its action on until its next turn, or its end
    an early end      the row begins the next game; what the others would still do is not played

A running game is played again on resume, from its seed and all that was done in it.
"""

from __future__ import annotations

import difflib
import importlib
import importlib.util
import pkgutil
import warnings
from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import numpy as np

from manyhands import trees
from manyhands.envs.adapter import (
    DictRows,
    Final,
    Restored,
    Step,
    VecAdapter,
    copy_single,
    take_row,
)
from manyhands.envs.registry import EnvSource, resolve
from manyhands.envs.spaces import zeros
from manyhands.errors import ConfigError, SupportError, WorkerError, needs
from manyhands.trees import Array, Parts
from manyhands.types import MASK, Obs

LONGEST = 100_000  # actions of a game that is played again; a longer one is not resumed
_TRIES = 1000  # games in a row that may end before the agent has had a turn


def make_pettingzoo(
    env: EnvSource, num_envs: int, *, env_kwargs: dict[str, Any], **common: Any
) -> Games:
    """Games for `num_envs` agents.

    Args:
        env: a module of PettingZoo ("pettingzoo.classic.connect_four_v3", or without its first
            word), "package.module:function", or a function, that makes a `ParallelEnv` or an
            `AECEnv`. Of a module that has both the parallel one is taken.
        env_kwargs: handed to it.
        common: as for `make_vec`.
    """
    try:
        from pettingzoo import AECEnv, ParallelEnv
    except ImportError as error:
        raise needs("pettingzoo", "pettingzoo", error) from error
    make = _function(env)
    first = make(**env_kwargs)
    if isinstance(first, AECEnv):
        return Seats([first, *(make(**env_kwargs) for _ in range(num_envs - 1))], **common)
    if not isinstance(first, ParallelEnv):
        raise ConfigError(
            f"{env} made a {type(first).__name__}; backend='pettingzoo' needs a ParallelEnv or an "
            "AECEnv of PettingZoo"
        )
    agents = len(_agents_of(first))
    if num_envs % agents:
        up = -(-num_envs // agents) * agents
        raise ConfigError(
            f"a game of {env} has {agents} agents, each of them a row, and num_envs={num_envs} on "
            f"each worker is no multiple of that; type: --num-envs {up}, or where several workers "
            f"act, {up} times their number"
        )
    return Together([first, *(make(**env_kwargs) for _ in range(num_envs // agents - 1))], **common)


def _function(env: EnvSource) -> Callable[..., Any]:
    if not isinstance(env, str) or ":" in env:
        own = resolve(env)
        assert callable(own)
        return own
    name = env.replace("/", ".")
    name = name if name.startswith("pettingzoo.") else f"pettingzoo.{name}"
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # it speaks of its own future
            module = importlib.import_module(name)
    except ImportError as error:
        missing = error.name or name
        if not f"{name}.".startswith(f"{missing}."):  # the game is there, what it needs is not
            raise SupportError(
                f"{env} needs {missing}, which is not installed; type: pip install "
                f"'pettingzoo[{name.split('.')[1]}]'"
            ) from error
        raise ConfigError(
            f"there is no environment {env!r} of PettingZoo here: {str(error).rstrip('.')}. "
            f"{_near(name)}The form is pettingzoo.classic.connect_four_v3, or "
            "'package.module:function' for one of your own"
        ) from error
    for attribute in ("parallel_env", "env"):
        if callable(found := getattr(module, attribute, None)):
            return found  # type: ignore[no-any-return]
    raise ConfigError(f"{name} has neither parallel_env nor env: is it a game of PettingZoo?")


def _near(name: str) -> str:
    """Games whose names are like that, such as newer versions."""
    family, _, game = name.rpartition(".")
    try:
        package = importlib.util.find_spec(family)
    except ImportError:
        return ""
    places = package.submodule_search_locations if package is not None else None
    there = [module.name for module in pkgutil.iter_modules(places or [])]
    near = difflib.get_close_matches(game, there, 3, 0.6)
    return f"Did you mean {', '.join(f'{family}.{found}' for found in near)}? " if near else ""


def _agents_of(game: Any) -> list[Any]:
    agents = list(getattr(game, "possible_agents", None) or [])
    if not agents:
        raise ConfigError(f"{game} has no possible_agents, and each of them is to be a row")
    return agents


def _shared_spaces(game: Any) -> tuple[Any, Any]:
    agents = _agents_of(game)
    first = game.observation_space(agents[0]), game.action_space(agents[0])
    for agent in agents[1:]:
        theirs = game.observation_space(agent), game.action_space(agent)
        if theirs != first:
            raise ConfigError(
                f"agent {agent!r} has the spaces {theirs[0]} and {theirs[1]}, and {agents[0]!r} "
                f"has {first[0]} and {first[1]}; one policy for all needs equal ones. "
                "supersuit.pad_observations_v0 and pad_action_space_v0 make them equal"
            )
    return first


class Games(VecAdapter):
    """What both kinds have in common: rows, and games that are played again."""

    def __init__(self, games: Sequence[Any], rows: int, **common: Any) -> None:
        observations, actions = _shared_spaces(games[0])
        super().__init__(observations, actions, rows, **common)
        self.games, self.agents = list(games), _agents_of(games[0])
        self._nested = self.observation_space is not observations
        self._shown = zeros(self.observation_space, (rows,))  # what is acted on next
        self._slots: Any = DictRows(self._shown) if isinstance(self._shown, dict) else self._shown
        self._done: list[list[Any]] = [[] for _ in games]  # all that was done in the running games

    def close(self) -> None:
        for game in self.games:
            game.close()
        self._running = False

    def state(self, obs: Obs) -> dict[str, Any]:
        return super().state(obs) | {
            "clock": self._clock,
            "starts": list(self._starts),
            "seeds": list(self._seeds),
            "returns": [float(total) for total in self._returns],
            "obs": obs,
            "done": [done if len(done) <= LONGEST else None for done in self._done],
        }

    def load_state(self, state: dict[str, Any]) -> Restored:
        self.continue_from(state["begun"])
        self._clock = int(state["clock"])
        self._starts = [int(start) for start in state["starts"]]
        self._seeds = list(state["seeds"])
        self._returns = [float(total) for total in state["returns"]]
        self._running = True
        trees.copy_into(self._shown, state["obs"])
        restarted: list[int] = []
        reasons: list[str] = []
        for g in range(len(self.games)):
            rows = self._rows_of(g)
            before = trees.map(np.copy, trees.take(self._shown, rows))
            done, self._done[g] = state["done"][g], []
            fault = "is too long to be played again"
            if done is not None:
                fault = self._repeat(g, done)
                after = trees.take(self._shown, rows)
                equal: list[bool] = []
                trees.map(lambda a, b, e=equal: e.append(np.array_equal(a, b)), before, after)
                if not fault and not all(equal):
                    fault = "does not repeat: the same seed and actions led elsewhere"
            if fault:
                reasons.append(f"{self._where(rows[0])} {fault}; a new game begins")
                restarted += rows
                self._begin_game(g)
        self._settle(restarted)
        return Restored(trees.map(np.copy, self._shown), restarted, reasons)

    def state_from(self, parts: Parts) -> dict[str, Any]:
        (one, _), *_ = parts
        rows = len(one["begun"]) // len(one["done"])  # of one game, which is never divided
        games = [(state, slice(where.start // rows, where.stop // rows)) for state, where in parts]
        names = ("starts", "seeds", "returns", "obs")
        return (
            super().state_from(parts)
            | trees.joined(parts, *names)
            | trees.joined(games, "done")
            | {"clock": one["clock"]}
        )

    def reset(self, out: Obs | None = None) -> Obs:
        self._running = True
        for g in range(len(self.games)):
            self._begin_game(g)
        self._settle(range(len(self.games)))
        obs = self.blank().obs if out is None else out
        trees.copy_into(obs, self._shown)
        self._check_row(obs)
        self._check_masks(obs)
        return obs

    @abstractmethod
    def _rows_of(self, game: int) -> list[int]: ...

    @abstractmethod
    def _begin_game(self, game: int) -> None:
        """With a new seed."""

    @abstractmethod
    def _repeat(self, game: int, done: list[Any]) -> str:
        """Play a game again; why that was not possible, or ""."""

    def _settle(self, games: Sequence[int]) -> None:
        """Bring games that have begun to where somebody is to act."""

    def _show(self, row: int, value: Any) -> None:
        self._slots[row] = trees.named(value) if self._nested else value

    def _file(
        self, i: int, row: Step, terminated: bool, truncated: bool, info: Mapping[str, Any]
    ) -> None:
        """The episode of row i has ended; its last observation is shown."""
        row.terminated[i], row.truncated[i] = terminated, truncated
        row.finals.append(Final(i, copy_single(self.observation_space, take_row(self._shown, i))))
        row.episodes.append(self._end(i, info))

    def _blank(self, row: Step) -> None:
        row.finals, row.episodes = [], []
        row.reward.fill(0.0)
        row.terminated.fill(False)
        row.truncated.fill(False)
        row.valid.fill(True)
        self._clock += 1

    def _give(self, row: Step) -> Step:
        trees.copy_into(row.obs, self._shown)
        self._check_row(row.obs)
        self._check_masks(row.obs)
        if self._finite is not None and not np.isfinite(row.reward).all():
            raise self._not_finite("a reward", int(np.argmin(np.isfinite(row.reward))))
        return row


# -- all act at once -------------------------------------------------------------------------------


class Together(Games):
    """`ParallelEnv`s: a row for each agent of each."""

    def __init__(self, games: Sequence[Any], **common: Any) -> None:
        super().__init__(games, len(games) * len(_agents_of(games[0])), **common)
        self.waiting = np.zeros(self.num_envs, np.bool_)  # for the end of the game; in place

    def step(self, actions: Array, out: Step | None = None) -> Step:
        sent = self._sent(actions)
        row = self.blank() if out is None else out
        self._blank(row)
        np.logical_not(self.waiting, out=row.valid)
        for g, game in enumerate(self.games):
            self._step_game(g, game, sent, row)
            if not game.agents:
                self._begin_game(g)
        return self._give(row)

    def _step_game(self, g: int, game: Any, sent: Array, row: Step | None) -> None:
        rows = self._rows_of(g)
        self._done[g].append(sent[rows[0] : rows[-1] + 1].copy())
        acting = set(game.agents)
        moves = {agent: sent[i] for i, agent in zip(rows, self.agents, strict=True)
                 if agent in acting}  # fmt: skip
        seen, rewards, terminated, truncated, infos = game.step(moves)
        still = set(game.agents)
        for i, agent in zip(rows, self.agents, strict=True):
            if agent in seen and (agent in moves or agent in still):
                self._show(i, seen[agent])
            if agent in moves:
                if row is not None:
                    reward = float(rewards.get(agent, 0.0))
                    row.reward[i] = reward
                    self._returns[i] += reward
                ended = bool(terminated.get(agent)), bool(truncated.get(agent))
                if agent not in still and not any(ended):
                    ended = True, False  # it left without a word
                if any(ended):
                    if row is not None:
                        self._file(i, row, *ended, infos.get(agent, {}))
                    self._wait(i)
            elif agent in still:  # it has joined
                self.waiting[i] = False
                if row is not None:
                    self._begin(i, self._seeds[rows[0]])

    def _rows_of(self, game: int) -> list[int]:
        count = len(self.agents)
        return list(range(game * count, (game + 1) * count))

    def _begin_game(self, game: int) -> None:
        rows = self._rows_of(game)
        seed = self._episode_seed(rows[0])
        self._deal(game, seed)
        for i in rows:
            self._begin(i, seed)

    def _deal(self, game: int, seed: int | None) -> None:
        seen, _ = self.games[game].reset(seed=seed)
        self._done[game] = []
        for i, agent in zip(self._rows_of(game), self.agents, strict=True):
            self.waiting[i] = False
            if agent in seen:
                self._show(i, seen[agent])
            else:
                self._wait(i)  # it may join

    def _wait(self, i: int) -> None:
        self.waiting[i] = True
        if self._legal is not None:
            self._shown[MASK][i] = 1  # whatever is chosen is not played

    def _repeat(self, game: int, done: list[Any]) -> str:
        self._deal(game, self._seeds[self._rows_of(game)[0]])
        sent = np.zeros((self.num_envs, *np.shape(done[0])[1:]), self.action_space.dtype) if done \
            else np.zeros(0)  # fmt: skip
        rows = self._rows_of(game)
        for actions in done:
            if not self.games[game].agents:
                return "does not repeat: it ended sooner"
            sent[rows] = actions
            self._step_game(game, self.games[game], sent, None)
        return ""


# -- one after the other ---------------------------------------------------------------------------


class Others(Protocol):
    """Who sits in the other seats."""

    def __call__(self, obs: Obs, games: list[tuple[int, int]]) -> Array:
        """Actions, as the environment takes them, for observations [N, ...] of these games: (number
        of the row among all workers', number of the game)."""

    def state(self) -> dict[str, Any]: ...

    def load_state(self, state: dict[str, Any]) -> None: ...

    def state_from(self, states: list[dict[str, Any]]) -> dict[str, Any]:
        """The state of one who sits in games of all of these."""
        ...


class Seats(Games):
    """`AECEnv`s: a row is one seat of a game, and `others` play the other seats."""

    others: Others | None = None

    def __init__(self, games: Sequence[Any], **common: Any) -> None:
        super().__init__(games, len(games), **common)
        self._acted = [False] * self.num_envs  # whether the agent has had a turn in its game

    def step(self, actions: Array, out: Step | None = None) -> Step:
        sent = self._sent(actions)
        row = self.blank() if out is None else out
        self._blank(row)
        for i in range(self.num_envs):
            self._acted[i] = True
            self._act(i, sent[i])
        self._advance(range(self.num_envs), row)
        return self._give(row)

    def state(self, obs: Obs) -> dict[str, Any]:
        others = None if self.others is None else self.others.state()
        return super().state(obs) | {"acted": list(self._acted), "others": others}

    def load_state(self, state: dict[str, Any]) -> Restored:
        self._acted = list(state["acted"])
        if self.others is not None and state["others"] is not None:
            self.others.load_state(state["others"])
        return super().load_state(state)

    def state_from(self, parts: Parts) -> dict[str, Any]:
        others = [state["others"] for state, _ in parts]
        return super().state_from(parts) | trees.joined(parts, "acted") | {
            "others": None if self.others is None or None in others
            else self.others.state_from(others)
        }  # fmt: skip

    def _rows_of(self, game: int) -> list[int]:
        return [game]

    def _seat(self, i: int) -> Any:
        return self.agents[(self._first + i + self._begun[i] - 1) % len(self.agents)]

    def _begin_game(self, game: int) -> None:
        seed = self._episode_seed(game)
        self._begin(game, seed)
        self.games[game].reset(seed=seed)
        self._done[game], self._acted[game] = [], False

    def _settle(self, games: Sequence[int]) -> None:
        self._advance(games, None)

    def _repeat(self, game: int, done: list[Any]) -> str:
        self.games[game].reset(seed=self._seeds[game])
        for action in done:
            if not self.games[game].agents:
                return "does not repeat: it ended sooner"
            self._act(game, action)
        if not self.games[game].agents or self.games[game].agent_selection != self._seat(game):
            return "does not repeat: it is another agent's turn"
        self._show(game, self.games[game].last()[0])
        return ""

    def _act(self, i: int, action: Any) -> None:
        self._done[i].append(action)
        self.games[i].step(action)

    def _advance(self, games: Sequence[int], row: Step | None) -> None:
        """Let the others play until it is the turn of each row's agent."""
        asked = list(games)
        while asked:
            asked = [i for i in asked if self._goes_to_others(i, row)]
            if not asked:
                return
            if self.others is None:
                raise ConfigError("nobody sits in the other seats; set `envs.others` first")
            seen = zeros(self.observation_space, (len(asked),))
            slots: Any = DictRows(seen) if isinstance(seen, dict) else seen
            for k, i in enumerate(asked):
                value = self.games[i].observe(self.games[i].agent_selection)
                slots[k] = trees.named(value) if self._nested else value
            chosen = self.others(seen, [(self._first + i, self._begun[i] - 1) for i in asked])
            for i, action in zip(asked, chosen, strict=True):
                self._act(i, action)

    def _goes_to_others(self, i: int, row: Step | None) -> bool:
        """Whether somebody else is to act; otherwise the row's agent is, perhaps in a new game."""
        for _ in range(_TRIES):
            game, seat = self.games[i], self._seat(i)
            while game.agents and game.agent_selection != seat:
                agent = game.agent_selection
                if not (game.terminations[agent] or game.truncations[agent]):
                    if seat not in game.agents:
                        break  # it is gone, with whatever it had; the others need not go on
                    return True
                self._act(i, None)
            if not game.agents or game.agent_selection != seat:
                ended, value, reward, info = (True, False), None, 0.0, {}
            else:
                value, reward, terminated, truncated, info = game.last()
                ended = bool(terminated), bool(truncated)
            if value is not None:
                self._show(i, value)
            if self._acted[i] and row is not None:
                row.reward[i] += float(reward)
                self._returns[i] += float(reward)
            if not any(ended):
                return False
            if self._acted[i] and row is not None:
                self._file(i, row, *ended, info)
            self._begin_game(i)
        raise WorkerError(
            f"{_TRIES:,} games of {self._where(i)} ended before the agent had a turn",
            rank=self.worker,
        )

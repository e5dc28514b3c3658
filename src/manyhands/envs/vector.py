"""Clean transitions from environments that are vectorised already.

CartPole's own vector implementation, EnvPool, ALE's vector env and any `gymnasium.vector.VectorEnv`
of a user come through here, each with its own habit of resetting; see `adapter.py` for what is
made of it.

Seeds: a DISABLED vector env is reset by us, so every episode has its seed from the tree. The two
others reset themselves and go on with their own generators; there only an env's first episode can
be played again on its own, and `Episode.seed` is None for the rest.

Where the library takes a step apart (`send` and `recv`), so do we: `Groups` are several vector envs
as one, of which some can be on their way while a policy acts for the others.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any, Literal

import numpy as np
from gymnasium.vector import AsyncVectorEnv, SyncVectorEnv, VectorEnv, VectorWrapper

from manyhands import streams, trees
from manyhands.envs.adapter import (
    BoxActions,
    Final,
    Restored,
    Step,
    VecAdapter,
    copy_single,
    take_row,
)
from manyhands.envs.spaces import first_mask, has_mask, mask_row, space_with_mask, with_mask
from manyhands.errors import ConfigError
from manyhands.trees import Array
from manyhands.types import MASK, Obs

SeedStyle = Literal["list", "array", "int", "at_creation"]

_MODES = ("NextStep", "SameStep", "Disabled")


def autoreset_mode(env: VectorEnv) -> str:
    """NextStep, SameStep or Disabled; an env that does not say is NextStep (Gymnasium 1.0)."""
    declared = (env.metadata or {}).get("autoreset_mode", "NextStep")
    mode = str(getattr(declared, "value", declared))
    if mode not in _MODES:
        raise ConfigError(f"autoreset mode {declared!r} is not known; known are {_MODES}")
    return mode


def as_gymnasium(env: VectorEnv) -> VectorEnv:
    """A vector env of SuperSuit as Gymnasium's are; one with masks in `info` shows them in the
    observations; any other as it is."""
    if not hasattr(env, "single_observation_space"):
        return SuperSuitVector(env)
    masked = not has_mask(env.single_observation_space) and _mask_in_info(env)
    return MaskedVector(env) if masked else env


@streams.given_back()  # environments may draw in a reset
def _mask_in_info(env: VectorEnv) -> bool:
    """Seen after a reset only. WHY of the env itself: there may be room for one simulator only; the
    reset that begins the run seeds it anew."""
    info: dict[str, Any] = {}
    with suppress(Exception):  # whatever fails here fails again where it is reported
        info = env.reset(seed=0)[1]
    if MASK not in info:
        return False
    for i in range(env.num_envs):
        first_mask(info[MASK][i] if _says(info, MASK, i) else None, env.single_action_space)
    return True


class SuperSuitVector(VectorEnv):  # type: ignore[misc]
    """What `supersuit.concat_vec_envs_v1` and `pettingzoo_env_to_vec_env_v1` make, put right.

    Theirs (3.11) call the spaces of one environment `observation_space` and `action_space`, give
    info as a list of dicts, and begin the next episode in the step that ended the last one, which
    their metadata do not say; the last observation is in info["terminal_observation"].
    """

    def __init__(self, env: Any) -> None:
        self.env, self.num_envs = env, env.num_envs
        self.single_observation_space = env.observation_space
        self.single_action_space = env.action_space
        self.metadata = dict(env.metadata or {}) | {"autoreset_mode": "SameStep"}

    def reset(self, *, seed: Any = None, options: Any = None) -> tuple[Any, dict[str, Any]]:
        return self.env.reset(seed=seed, options=options)[0], {}

    def step(self, actions: Array) -> tuple[Any, Any, Any, Any, dict[str, Any]]:
        obs, reward, terminated, truncated, infos = self.env.step(actions)
        info: dict[str, Any] = {}
        if any("terminal_observation" in one for one in infos):
            info = {name: np.full(self.num_envs, None) for name in ("final_obs", "final_info")}
            for i, one in enumerate(infos):
                info["final_obs"][i], info["final_info"][i] = one.get("terminal_observation"), one
        return obs, reward, terminated, truncated, info

    def close(self, **_: Any) -> None:
        self.env.close()


class MaskedVector(VectorWrapper):  # type: ignore[misc]
    """The masks that a vector env gives in `info`, under the key "action_mask" of the observations.

    A sub-environment's row stands in info["action_mask"], and info["_action_mask"] says who has
    one. Where SAME_STEP has replaced a last observation, its mask is in info["final_info"].
    """

    def __init__(self, env: VectorEnv) -> None:
        super().__init__(env)
        actions = env.single_action_space
        self.single_observation_space = space_with_mask(env.single_observation_space, actions)

    def reset(self, *, seed: Any = None, options: Any = None) -> tuple[Any, dict[str, Any]]:
        obs, info = self.env.reset(seed=seed, options=options)
        return with_mask(obs, self._masks(info)), info

    def step(self, actions: Array) -> tuple[Any, Any, Any, Any, dict[str, Any]]:
        obs, reward, terminated, truncated, info = self.env.step(actions)
        final = info.get("final_obs", info.get("final_observation"))
        if final is not None:
            info = {**info, "final_obs": self._finals(final, info, terminated, truncated)}
        return with_mask(obs, self._masks(info)), reward, terminated, truncated, info

    def _masks(self, info: dict[str, Any]) -> Array:
        actions = self.single_action_space
        rows = [info[MASK][i] if _says(info, MASK, i) else None for i in range(self.num_envs)]
        return np.stack([mask_row(row, actions) for row in rows])

    def _finals(self, final: Any, info: dict[str, Any], terminated: Any, truncated: Any) -> Array:
        last = info.get("final_info", {})
        rows = np.full(self.num_envs, None)
        for i in np.flatnonzero(np.logical_or(terminated, truncated)).tolist():
            if isinstance(last, dict):
                mask = last[MASK][i] if _says(last, MASK, i) else None
            else:
                mask = (last[i] or {}).get(MASK)
            if mask is None and not terminated[i]:
                raise ConfigError(
                    f"the vector env gives an {MASK} in info, but none in info['final_info'] at "
                    "the end of an episode that was cut off: what could still be done there is not "
                    "known. Use NEXT_STEP"
                )
            rows[i] = with_mask(_of(final, i), mask_row(mask, self.single_action_space))
        return rows


def _says(info: dict[str, Any], key: str, i: int) -> bool:
    """Whether sub-env i has that key: Gymnasium's own say so in "_key", others have it for all."""
    return key in info and bool(f"_{key}" not in info or info[f"_{key}"][i])


def _of(batch: Any, i: int) -> Any:
    """Observation i: of an array of them, or of a dict or tuple of arrays."""
    if isinstance(batch, dict):
        return {key: part[i] for key, part in batch.items()}
    return tuple(part[i] for part in batch) if isinstance(batch, tuple) else batch[i]


class VectorAdapter(VecAdapter):
    """Turns one `VectorEnv`, of any autoreset mode, into clean rows.

    Args:
        env: the vector environment; it is closed with this adapter.
        episode_seeds: for DISABLED envs that take a list of seeds: seed every episode from the
            tree (default), or only the first.
        seed_style: how `env.reset` takes seeds: a "list" or an "array" of one per sub-env, or one
            "int", or none at all because they were given "at_creation"; None finds out
            (Gymnasium's own take a list; for others one int is safe).
        reward_clip: give the learner rewards cut to ±reward_clip; returns stay the true ones.
        remake: for seeds given "at_creation": makes the env anew, given how many episodes each
            sub-env has begun, with seeds that were not used before.
    """

    newest_only = False  # rows show the newest frame of each stack; final observations are whole

    def __init__(
        self,
        env: VectorEnv,
        *,
        seed: int | None = None,
        worker: int = 0,
        box_actions: BoxActions = "clip",
        check_finite: bool = True,
        episode_seeds: bool = True,
        seed_style: SeedStyle | None = None,
        reward_clip: float | None = None,
        remake: Callable[[Sequence[int]], VectorEnv] | None = None,
    ) -> None:
        super().__init__(
            env.single_observation_space,
            env.single_action_space,
            env.num_envs,
            seed=seed,
            worker=worker,
            box_actions=box_actions,
            check_finite=check_finite,
        )
        self.env = env
        self.mode = autoreset_mode(env)
        self._seed_style: SeedStyle = seed_style or _seed_style(env)
        self._episode_seeds = episode_seeds
        self._reward_clip = reward_clip
        self._remake = remake
        self._keys = list(getattr(self.observation_space, "spaces", {}))  # of a Dict space
        self._nested = self.observation_space is not env.single_observation_space
        self._ended = np.zeros(env.num_envs, dtype=np.bool_)  # NextStep: the next call resets
        self._totals = np.zeros(env.num_envs)  # float64 [B]: returns of the running episodes

    def reset(self, out: Obs | None = None) -> Obs:
        seeds: list[int | None] = [None] * self.num_envs
        again = self._running
        if not again or (self._episode_seeds and self._seed_style != "at_creation"):
            seeds = [self._episode_seed(i) for i in range(self.num_envs)]
        given, _ = self.env.reset(seed=self._seed_argument(seeds))
        for i in range(self.num_envs):
            self._begin(i, seeds[i] if self._seed_style != "int" else None)
        self._ended[:] = False
        self._totals[:] = 0.0
        self._running = True
        obs = self.blank().obs if out is None else out
        trees.copy_into(obs, self._shown(given))
        self._check_row(obs)
        self._check_masks(obs)
        return obs

    def step(self, actions: Array, out: Step | None = None) -> Step:
        sent = self._sent(actions)
        row = self.blank() if out is None else out
        return self.receive(row, *self.env.step(sent))

    def send(self, actions: Array) -> None:
        """Begin a step, which `recv` ends; meanwhile other things can be done."""
        self.env.send(self._sent(actions))

    def recv(self, out: Step) -> Step:
        return self.receive(out, *self.env.recv())

    def blank(self) -> Step:
        row = super().blank()
        if self.newest_only:
            row.obs = row.obs[:, -1].copy()
        return row

    def receive(
        self,
        row: Step,
        obs: Any,
        reward: Any,
        terminated: Any,
        truncated: Any,
        info: dict[str, Any],
    ) -> Step:
        """Fill a row with what `env.step` gave."""
        row.finals, row.episodes = [], []
        np.logical_not(self._ended, out=row.valid)
        # WHY masked: a reset in disguise is no transition, whatever the library reports for it.
        np.logical_and(terminated, row.valid, out=row.terminated)
        np.logical_and(truncated, row.valid, out=row.truncated)
        reward = np.where(row.valid, reward, 0.0)
        self._count(reward, row.valid)
        trees.copy_into(row.obs, self._shown(obs))
        done = row.terminated | row.truncated
        self._check_row(row.obs)
        row.reward[:] = reward
        if self._reward_clip is not None:
            np.clip(row.reward, -self._reward_clip, self._reward_clip, out=row.reward)
        if done.any():
            self._finish(np.flatnonzero(done), info, row)
        if self._legal is not None:
            # Where an episode has terminated, nothing need be possible; the next one's first
            # observation stands there with SameStep only.
            acted_on = np.ones_like(done) if self.mode == "SameStep" else ~row.terminated
            self._check_masks(trees.take(row.obs, acted_on), np.flatnonzero(acted_on))
        self._ended = done if self.mode == "NextStep" else self._ended
        return row

    def load_state(self, state: dict[str, Any]) -> Restored:
        if self._remake is not None:
            self.env.close()
            self.env = self._remake(state["begun"])
        return super().load_state(state)

    def set_attribute(self, name: str, value: Any) -> None:
        inner = self.env.unwrapped
        if hasattr(inner, "get_attr") and hasattr(inner, "set_attr"):
            try:
                inner.get_attr(name)  # a name that is not there would become a new attribute
            except AttributeError as error:
                raise ConfigError(f"the environments have no attribute {name!r}: {error}") from None
            inner.set_attr(name, [value] * self.num_envs)
        elif hasattr(inner, name):
            setattr(inner, name, value)
        else:
            raise ConfigError(
                f"{type(inner).__name__} has no attribute {name!r} to be set, nor get_attr and "
                "set_attr to reach its environments"
            )

    def close(self) -> None:
        self.env.close()
        # ALE's threads and emulators go with the object. WHY not later: what is left of those in a
        # cycle when Python ends is listed on standard error.
        vars(self.env).pop("ale", None)
        self._running = False

    def _flat(self, obs: Any) -> Obs:
        return trees.named(obs) if self._nested else obs

    def _shown(self, obs: Any) -> Obs:
        return obs[:, -1] if self.newest_only else self._flat(obs)

    def _count(self, reward: Array, valid: Array) -> None:
        """Statistics are our own: Gymnasium's wrapper has lost steps in some modes and versions."""
        self._clock += 1
        if not valid.all():
            for i in np.flatnonzero(~valid).tolist():  # the reset happened in this call
                self._begin(i, None)
                self._totals[i] = 0.0
        self._totals += reward
        if self._finite is not None and not np.isfinite(reward).all():
            raise self._not_finite("a reward", int(np.argmin(np.isfinite(reward))))

    def _finish(self, ended: Array, info: dict[str, Any], row: Step) -> None:
        for i in map(int, ended):
            self._returns[i] = float(self._totals[i])
            row.finals.append(Final(i, self._final_obs(i, info, row)))
            row.episodes.append(self._end(i, self._last_info(i, info)))
        if self.mode == "Disabled":
            self._reset_ended(ended, row)
        elif self.mode == "SameStep":
            for i in map(int, ended):
                self._begin(i, None)
        if self.mode != "NextStep":
            self._totals[ended] = 0.0

    def _last_info(self, i: int, info: dict[str, Any]) -> dict[str, Any]:
        """What is logged of the `info` with which the episode of sub-env i has ended."""
        if not self.log_info:
            return {}
        last = info.get("final_info", info) if self.mode == "SameStep" else info
        if not isinstance(last, dict):  # an array of dicts, one for each sub-env that has ended
            return dict(last[i] or {})
        return {key: last[key][i] for key in self.log_info if _says(last, key, i)}

    def _final_obs(self, i: int, info: dict[str, Any], row: Step) -> Obs:
        if self.mode != "SameStep":
            return take_row(row.obs, i)  # still the true last one
        final = info.get("final_obs", info.get("final_observation"))
        if final is None:
            raise ConfigError(
                "the vector env declares SAME_STEP autoreset but gives no info['final_obs'] at the "
                "end of an episode: truncated episodes cannot be bootstrapped. Use NEXT_STEP"
            )
        # An object array of observations (Dict ones too), one array for all (ALE), or, from
        # other makers, a dict or tuple of arrays.
        if isinstance(final, (dict, tuple)):
            parts = self._flat(final)
            return copy_single(self.observation_space, {k: parts[k][i] for k in self._keys})
        return copy_single(self.observation_space, self._flat(final[i]))

    def _reset_ended(self, ended: Array, row: Step) -> None:
        mask = np.zeros(self.num_envs, dtype=np.bool_)
        mask[ended] = True
        seeds: list[int | None] = [None] * self.num_envs
        if self._episode_seeds and self._seed_style == "list":
            for i in map(int, ended):
                seeds[i] = self._episode_seed(i)
        argument = seeds if any(s is not None for s in seeds) else None
        obs, _ = self.env.reset(seed=argument, options={"reset_mask": mask})
        for i in map(int, ended):
            self._begin(i, seeds[i])
        trees.put(row.obs, ended, trees.take(self._flat(obs), ended))

    def _seed_argument(self, seeds: list[int | None]) -> Any:
        if seeds[0] is None or self._seed_style == "at_creation":
            return None
        if self._seed_style == "list":
            return seeds
        if self._seed_style == "array":
            return np.array(seeds)
        return seeds[0]


class Groups(VecAdapter):
    """Several adapters as one, their sub-environments numbered through; `step` steps all of them.
    Whoever wants some of them on their way while others wait steps `parts` by themselves."""

    def __init__(self, parts: Sequence[VectorAdapter], **common: Any) -> None:
        first, counts = parts[0], [part.num_envs for part in parts]
        super().__init__(first.observation_space, first.action_space, sum(counts), **common)
        self.parts = list(parts)
        ends = np.cumsum(counts).tolist()
        self.slices = [slice(end - n, end) for n, end in zip(counts, ends, strict=True)]
        self._number_parts()

    def number_from(self, first: int) -> None:
        super().number_from(first)
        self._number_parts()

    def _number_parts(self) -> None:
        for part, where in zip(self.parts, self.slices, strict=True):
            part._seed_of, part._first = self._seed_of[where], self._first + where.start

    def reset(self, out: Obs | None = None) -> Obs:
        obs = self.blank().obs if out is None else out
        for part, where in zip(self.parts, self.slices, strict=True):
            part.log_info = self.log_info
            part.reset(trees.take(obs, where))
        self._running = True
        return obs

    def step(self, actions: Array, out: Step | None = None) -> Step:
        row = self.blank() if out is None else out
        if len(actions) != self.num_envs:
            raise ConfigError(f"{len(actions)} actions for {self.num_envs} envs")
        for part, where in zip(self.parts, self.slices, strict=True):
            part.send(actions[where])
        row.finals, row.episodes = [], []
        for part, where in zip(self.parts, self.slices, strict=True):
            got = part.recv(part_of(row, where))
            row.finals += [Final(f.env + where.start, f.obs) for f in got.finals]
            row.episodes += [e._replace(env=e.env + where.start) for e in got.episodes]
        return row

    def blank(self) -> Step:
        row = super().blank()
        row.obs = trees.concat([part.blank().obs for part in self.parts])
        return row

    def set_attribute(self, name: str, value: Any) -> None:
        for part in self.parts:
            part.set_attribute(name, value)

    def close(self) -> None:
        for part in self.parts:
            part.close()
        self._running = False

    @property
    def clock(self) -> int:
        return self.parts[0].clock

    @property
    def episodes_begun(self) -> list[int]:
        return [count for part in self.parts for count in part.episodes_begun]

    def continue_from(self, episodes_begun: Sequence[int]) -> None:
        super().continue_from(episodes_begun)
        for part, where in zip(self.parts, self.slices, strict=True):
            part.continue_from(episodes_begun[where])

    def state(self, obs: Obs) -> dict[str, Any]:
        return {"begun": self.episodes_begun}


def part_of(row: Step, where: slice) -> Step:
    """The row of some of the sub-environments: views."""
    return Step(
        obs=trees.take(row.obs, where), reward=row.reward[where],
        terminated=row.terminated[where], truncated=row.truncated[where], valid=row.valid[where],
    )  # fmt: skip


def _seed_style(env: VectorEnv) -> SeedStyle:
    return "list" if isinstance(env.unwrapped, (SyncVectorEnv, AsyncVectorEnv)) else "int"

"""Which spaces are understood, room for observations of them, and masks of actions.

Observations are stored as the space says: one array [B, ...], or for a Dict space one array per
key. A space of spaces is a Dict of named parts here: `camera/left` of a Dict in a Dict, `0` of a
Tuple (`flat_space`; `trees.named` does the same to its observations).

A mask says which actions are possible now: one number an action, 0 where it is not. It is a key of
the observation from the environment on (`MaskedObservation`), so that it is stored, sent and
learned from with the observation that it belongs to.
"""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
from gymnasium import spaces

from manyhands import files
from manyhands.errors import ConfigError
from manyhands.trees import Array
from manyhands.types import MASK, OBSERVATION, Obs

UNBOUNDED = 1e30  # bounds near the largest float are a way to say "none"
_UNDERSTOOD = "Box, Discrete, MultiDiscrete, MultiBinary, and Dicts and Tuples of these"


def check_observation_space(space: gymnasium.Space[Any]) -> None:
    """Refuse, by name, an observation space that cannot be stored as arrays of numbers."""
    if not isinstance(space, (spaces.Dict, spaces.Tuple)):
        _check_observation_leaf(space, "observation space")
        return
    parts = _named_spaces(space)
    names = [name for name, _ in parts]
    if not parts:
        kind = type(space).__name__
        raise ConfigError(f"the observation space is an empty {kind}: there is nothing to learn")
    if twice := sorted({name for name in names if names.count(name) > 1}):
        raise ConfigError(
            f"two parts of the observation space are called {twice[0]!r}: a part of a part has "
            "both names with a slash between them; rename the key that has a slash of its own"
        )
    for name, part in parts:
        _check_observation_leaf(part, f"observation space, key {name!r}")


def flat_space(space: gymnasium.Space[Any]) -> gymnasium.Space[Any]:
    """A space of spaces as a Dict of named parts; any other, and a flat Dict whose keys are text,
    as it is."""
    inner = space.spaces.items() if isinstance(space, spaces.Dict) else ()
    nested = isinstance(space, spaces.Tuple) or any(
        isinstance(part, (spaces.Dict, spaces.Tuple)) or not isinstance(key, str)
        for key, part in inner
    )
    return spaces.Dict(dict(_named_spaces(space))) if nested else space


def has_pictures(space: gymnasium.Space[Any]) -> bool:
    """Whether there is a part of it that convolutions are for."""
    flat = flat_space(space)
    parts = flat.spaces.values() if isinstance(flat, spaces.Dict) else (flat,)
    return any(
        isinstance(part, spaces.Box) and part.dtype == np.uint8 and len(part.shape) == 3
        for part in parts
    )


def _named_spaces(space: Any, above: str = "") -> list[tuple[str, Any]]:
    """As `trees.named` has it; a name may come twice."""
    inner = space.spaces.items() if isinstance(space, spaces.Dict) else enumerate(space.spaces)
    found: list[tuple[str, Any]] = []
    for key, part in inner:
        name = f"{above}{key}"
        deeper = isinstance(part, (spaces.Dict, spaces.Tuple))
        found += _named_spaces(part, f"{name}/") if deeper else [(name, part)]
    return found


def _check_observation_leaf(space: gymnasium.Space[Any], where: str) -> None:
    if isinstance(space, spaces.Box):
        if space.dtype is None or space.dtype.kind not in "biuf":
            raise ConfigError(f"{where} is a Box of dtype {space.dtype}; numbers are needed")
        return
    if not isinstance(space, (spaces.Discrete, spaces.MultiDiscrete, spaces.MultiBinary)):
        raise ConfigError(
            f"{where} is {space}, which is not understood; understood are {_UNDERSTOOD}. "
            "gymnasium.wrappers.FlattenObservation turns most others into a Box"
        )


def check_action_space(space: gymnasium.Space[Any]) -> None:
    """Refuse, by name, an action space for which there is no policy."""
    if isinstance(space, spaces.Box):
        if space.dtype is None or space.dtype.kind != "f":
            raise ConfigError(
                f"action space {space} is a Box of dtype {space.dtype}; a Box of actions must be "
                "of floats (whole numbers are a Discrete or a MultiDiscrete)"
            )
        return
    if isinstance(space, spaces.MultiDiscrete):
        if space.nvec.ndim != 1:
            raise ConfigError(
                f"action space {space} has {space.nvec.ndim} dimensions; a MultiDiscrete of "
                "actions must have one"
            )
        return
    if not isinstance(space, (spaces.Discrete, spaces.MultiBinary)):
        raise ConfigError(
            f"action space {space} is not understood; understood are Discrete, MultiDiscrete, "
            "MultiBinary and Box of floats"
        )


def check_actions(kind: str, space: Any, algorithm: str) -> None:
    """ConfigError unless an algorithm that learns this kind of actions can learn these."""
    checks = {"discrete": check_discrete, "bounded": check_bounded}
    if kind in checks:
        checks[kind](space, algorithm)


def check_discrete(space: Any, algorithm: str = "dqn") -> None:
    """ConfigError unless a Q value can be given for every action."""
    if type(space).__name__ == "Discrete":
        return
    other = "ddpg" if type(space).__name__ == "Box" else "ppo"
    raise ConfigError(
        f"{algorithm} compares the values of all actions, which needs a Discrete action space, and "
        f"this one is {space}; type: manyhands train {other}"
    )


def check_bounded(space: Any, algorithm: str = "ddpg") -> None:
    """ConfigError unless actions are numbers between bounds."""
    if type(space).__name__ != "Box" or np.dtype(space.dtype).kind != "f":
        raise ConfigError(
            f"{algorithm} moves actions along a gradient, which needs a Box of floats, and the "
            f"action space is {space}; type: manyhands train "
            + ("dqn" if type(space).__name__ == "Discrete" else "ppo")
        )
    if not (np.abs(space.low) < UNBOUNDED).all() or not (np.abs(space.high) < UNBOUNDED).all():
        raise ConfigError(
            f"{algorithm} needs actions with finite bounds, and the action space is {space}; wrap "
            "the environment in gymnasium.wrappers.RescaleAction, or type: manyhands train ppo"
        )


def zeros(space: gymnasium.Space[Any], leading: tuple[int, ...]) -> Obs:
    """Room for observations: shape `leading + space.shape`, the space's own dtype."""
    if isinstance(space, spaces.Dict):
        return {key: zeros(part, leading) for key, part in space.spaces.items()}
    return np.zeros(leading + tuple(space.shape or ()), dtype=space.dtype)


def shape_fault(space: gymnasium.Space[Any], value: Any) -> str:
    """Empty when `value` has the shape the space promises; otherwise what is wrong."""
    if isinstance(space, spaces.Dict):
        if not isinstance(value, dict) or set(value) != set(space.spaces):
            have = sorted(value) if isinstance(value, dict) else type(value).__name__
            return f"keys are {have}, the space says {sorted(space.spaces)}"
        faults = [(k, shape_fault(part, value[k])) for k, part in space.spaces.items()]
        return "; ".join(f"key {k!r}: {fault}" for k, fault in faults if fault)
    # Discrete has shape (); numpy broadcasts a wrong shape silently, so this is worth asking.
    if np.shape(value) != tuple(space.shape or ()):
        return f"shape is {np.shape(value)}, the space says {tuple(space.shape or ())}"
    return ""


# -- masks of actions ------------------------------------------------------------------------------


def has_mask(space: Any) -> bool:
    return isinstance(space, spaces.Dict) and MASK in space.spaces


def space_without_mask(space: Any) -> Any:
    """The space of what types.without_mask gives."""
    if not has_mask(space):
        return space
    rest = {key: part for key, part in space.spaces.items() if key != MASK}
    return rest[OBSERVATION] if list(rest) == [OBSERVATION] else spaces.Dict(rest)


def choices(actions: Any) -> list[int]:
    """The number of alternatives of each choice that an action consists of."""
    match actions:
        case spaces.Discrete():
            return [int(actions.n)]
        case spaces.MultiDiscrete():
            return [int(n) for n in actions.nvec.ravel()]
    raise ConfigError(
        f"the environment gives an {MASK}, which says which of several actions are possible, and "
        f"its action space is {actions}; masks are for Discrete and MultiDiscrete. Give the key "
        "another name if it is something else"
    )


def check_mask(observations: Any, actions: Any) -> None:
    """ConfigError where the observation has a mask that does not fit the actions."""
    if not has_mask(observations):
        return
    part, count = observations[MASK], sum(choices(actions))
    if len(observations.spaces) == 1:
        raise ConfigError(f"the observation is an {MASK} and nothing else: there is nothing to see")
    if isinstance(part, spaces.Box | spaces.MultiBinary) and np.prod(part.shape) == count:
        return
    raise ConfigError(
        f"the observation's {MASK} is {part}, and the action space {actions} needs {count} numbers "
        f"of 0 and 1, one an alternative; write: spaces.MultiBinary({count})"
    )


_NO_MASK = "has other numbers than 1, for an action that is possible, and 0, for one that is not"
_NOTHING_LEFT = (
    "leaves no action that is possible; a state in which nothing can be done has to end its "
    "episode with terminated=True"
)


class LegalCheck:
    """Whether something is possible in every row of a batch of masks."""

    def __init__(self, actions: Any) -> None:
        sizes = choices(actions)
        self._starts, self._size = np.cumsum([0, *sizes[:-1]]), sum(sizes)
        self._single = len(sizes) == 1

    def fault(self, masks: Array) -> tuple[int, str] | None:
        """The first row with something wrong in it, and what; None where all is well."""
        # WHY only floats: what is added to logits, 0 for possible and -inf for not, is one of them.
        # Read as a mask it would forbid all that is possible, and allow the rest.
        if masks.dtype.kind == "f" and not _is_zero_or_one(masks):
            odd = [not _is_zero_or_one(row) for row in masks]
            return odd.index(True), _NO_MASK
        bad = self.bad_rows(masks)
        return (int(bad[0]), _NOTHING_LEFT) if len(bad) else None

    def bad_rows(self, masks: Array) -> Array:
        """Those in which a choice has no alternative left, [k]."""
        flat = masks.reshape(len(masks), self._size) != 0
        possible = flat.any(axis=1)
        if not self._single:
            possible = np.logical_or.reduceat(flat, self._starts, axis=1).all(axis=1)
        return np.flatnonzero(~possible)


class MaskedObservation(gymnasium.Wrapper):  # type: ignore[misc]
    """The mask as one array under the key "action_mask" of the observation.

    For environments that give it in `info`, or in several parts (one a choice of a MultiDiscrete):
    {"observation": ..., "action_mask": ...}, or one key more where the observation is a Dict.
    """

    def __init__(self, env: gymnasium.Env[Any, Any]) -> None:
        super().__init__(env)
        self._in_info = not has_mask(env.observation_space)
        self.observation_space = space_with_mask(env.observation_space, env.action_space)

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[Any, dict[str, Any]]:
        observation, info = self.env.reset(seed=seed, options=options)
        return self._merged(observation, info, over=False), info

    def step(self, action: Any) -> tuple[Any, Any, bool, bool, dict[str, Any]]:
        observation, reward, terminated, truncated, info = self.env.step(action)
        merged = self._merged(observation, info, over=terminated)
        return merged, reward, terminated, truncated, info

    def _merged(self, observation: Any, info: dict[str, Any], *, over: bool) -> dict[str, Any]:
        given = info.get(MASK) if self._in_info else observation[MASK]
        if given is None and not over:
            raise ConfigError(
                f"info has no {MASK} here, and had one after the first reset; give one after every "
                "reset and every step, but for the last step of an episode that has terminated"
            )
        return with_mask(observation, mask_row(given, self.env.action_space))


def space_with_mask(observations: Any, actions: Any) -> spaces.Dict:
    """The space of what `with_mask` gives."""
    parts = observations.spaces if isinstance(observations, spaces.Dict) else None
    parts = {OBSERVATION: observations} if parts is None else dict(parts)
    return spaces.Dict({**parts, MASK: spaces.MultiBinary(sum(choices(actions)))})


def with_mask(observation: Any, mask: Array) -> dict[str, Any]:
    parts = observation if isinstance(observation, dict) else {OBSERVATION: observation}
    return {**parts, MASK: mask}


def mask_row(given: Any, actions: Any) -> Array:
    """One mask as it is kept; None, as at the end of an episode, is zeros."""
    size = sum(choices(actions))
    mask = np.zeros(size, np.int8) if given is None else flat_mask(given)
    if mask.shape != (size,):
        raise ConfigError(
            f"the {MASK} has shape {mask.shape}, and the action space {actions} needs {size} "
            "numbers"
        )
    return mask


def first_mask(given: Any, actions: Any) -> None:
    """ConfigError where the first mask that an environment has given in `info` is none."""
    if (fault := LegalCheck(actions).fault(mask_row(given, actions)[None])) is not None:
        raise ConfigError(f"the {MASK} that the first reset gave in info {fault[1]}")


def flat_mask(mask: Any) -> Array:
    """One row of 0 and 1; a tuple or list of parts end to end."""
    if isinstance(mask, tuple | list) and len(mask) and np.ndim(mask[0]) > 0:
        mask = np.concatenate([np.ravel(part) for part in mask])
    row = np.asarray(mask).reshape(-1)
    if row.dtype != np.bool_ and not _is_zero_or_one(row):
        raise ConfigError(f"the {MASK} {row.tolist()} {_NO_MASK}")
    return row.astype(np.int8)


def _is_zero_or_one(mask: Array) -> bool:
    return bool(((mask == 0) | (mask == 1)).all())


# -- spaces in a file ------------------------------------------------------------------------------

FILE = "spaces.json"
_MOST_BYTES, _MOST_NUMBERS = 64 << 20, 1 << 26  # of the file; of one space


def save_spaces(folder: Path, observations: Any, actions: Any) -> None:
    """Beside a policy whose environment need not be one that can be made by name."""
    text = json.dumps({"observations": _plain(observations), "actions": _plain(actions)}, indent=1)
    (folder / FILE).write_text(text + "\n", encoding="utf-8")


def load_spaces(folder: Path) -> tuple[Any, Any] | None:
    """(observation space, action space) that `save_spaces` wrote; None where there are none."""
    path = folder / FILE
    if not path.is_file():
        return None
    try:
        data = json.loads(files.read(path, _MOST_BYTES))
        return _space(data["observations"]), _space(data["actions"])
    except files.Unreadable as error:
        raise ConfigError(str(error)) from None
    except (ArithmeticError, AssertionError, AttributeError, LookupError, RuntimeError, TypeError,
            ValueError) as error:  # fmt: skip
        raise ConfigError(f"{path} cannot be read: {type(error).__name__}: {error}") from None


def _plain(space: Any) -> dict[str, Any]:
    match space:
        case spaces.Dict():
            return {"kind": "Dict", "parts": {k: _plain(v) for k, v in space.spaces.items()}}
        case spaces.Box():
            low, high = (_one_number_or_all(x) for x in (space.low, space.high))
            shape = list(space.shape)
            return {"kind": "Box", "low": low, "high": high, "shape": shape,
                    "dtype": str(space.dtype)}  # fmt: skip
        case spaces.Discrete():
            return {"kind": "Discrete", "n": int(space.n), "start": int(space.start)}
        case spaces.MultiDiscrete():
            return {"kind": "MultiDiscrete", "nvec": space.nvec.tolist(),
                    "start": space.start.tolist()}  # fmt: skip
        case spaces.MultiBinary():
            n = list(space.n) if isinstance(space.n, tuple | list | np.ndarray) else int(space.n)
            return {"kind": "MultiBinary", "n": n}
    raise ConfigError(f"{space} cannot be written; understood are {_UNDERSTOOD}")


def _one_number_or_all(bound: Any) -> Any:
    numbers = np.unique(bound)
    return numbers[0].item() if len(numbers) == 1 else bound.tolist()


def _space(data: dict[str, Any]) -> Any:
    match data["kind"]:
        case "Dict":
            return spaces.Dict({k: _space(v) for k, v in data["parts"].items()})
        case "Box":
            shape, dtype = tuple(data["shape"]), np.dtype(data["dtype"])
            if math.prod(shape) > _MOST_NUMBERS:
                raise ValueError(f"a Box of {math.prod(shape):,} numbers")
            low, high = (
                np.broadcast_to(np.asarray(data[k], dtype), shape) for k in ("low", "high")
            )
            return spaces.Box(low.copy(), high.copy(), dtype=dtype.type)
        case "Discrete":
            return spaces.Discrete(data["n"], start=data["start"])
        case "MultiDiscrete":
            return spaces.MultiDiscrete(data["nvec"], start=data["start"])
        case "MultiBinary":
            if np.prod(np.asarray(data["n"], float)) > _MOST_NUMBERS:
                raise ValueError(f"a MultiBinary of {data['n']} numbers")
            return spaces.MultiBinary(data["n"])
    raise ValueError(f"there is no space {data['kind']!r}")

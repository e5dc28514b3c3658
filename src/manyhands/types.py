"""The words of the training loop: what an environment shows, a policy gives and a learner takes.

Legend of shapes, time first:

    T   steps of one rollout or unroll          B   environments of one worker
    N   rows: of one call, or of a batch        P   numbers that describe a distribution
    E   environments, or edges of an unroll     S   numbers of an LSTM's state

    [T, B]      a rollout: row t of environment b
    [B, ...]    one step of all environments, each with the shape that its space says
    [N, ...]    rows without an order in time

`terminated` is not `truncated`; `valid` is False where a row is no transition (envs/adapter.py).
"""

from __future__ import annotations

from typing import Any, NamedTuple, Protocol

from manyhands.trees import Array

Obs = Any  # an array [B, ...], or for a Dict space a dict of them
Batch = dict[str, Any]  # rows [N, ...]: obs, action, logp, value, parameters, advantage, target
Info = dict[str, float]  # what an update reports

MASK = "action_mask"  # the key of an observation that says which actions are possible
OBSERVATION = "observation"  # the key of what else there is, where that is one array


def without_mask(obs: Obs) -> Obs:
    """What a network looks at: all but the mask, and not in a dict where it is one array."""
    if not isinstance(obs, dict) or MASK not in obs:
        return obs
    rest = {key: part for key, part in obs.items() if key != MASK}
    return rest[OBSERVATION] if list(rest) == [OBSERVATION] else rest


class Acted(NamedTuple):
    """What a policy gives for N observations."""

    actions: Array  # [N, ...] as sampled; the env gets them clipped or scaled
    logp: Array  # behaviour log-probability [N]
    values: Array  # [N]
    parameters: Array  # of the distribution [N, P]


class Actor(Protocol):
    """How a collector asks for actions; knows nothing of environments."""

    def act(self, obs: Obs, noise: Any) -> Acted: ...

    def value(self, obs: Obs) -> Array: ...

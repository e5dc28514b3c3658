"""Looks at the user's own networks before anything is played."""

from __future__ import annotations

from typing import Any

from manyhands.errors import ConfigError


def check_actor(actor: Any, state: Any) -> None:
    """ConfigError unless `actor(state)` gives an action and its log-probability.

    V-trace weighs each action by how likely it was for the policy that acted; without that number
    an actor's episodes cannot be learned from. Call it before the loop, with any one state.

    Args:
        actor: Callable that gives (action, logp, ...).
        state: A batch of states that it takes, of one row or more.
    """
    import torch

    with torch.no_grad():
        given = actor(state)
    need = "it must give (action, log-probability, ...), so that V-trace can weigh its actions"
    if not isinstance(given, (tuple, list)) or len(given) < 2:
        what = f"{len(given)} thing" if isinstance(given, (tuple, list)) else _words(given)
        raise ConfigError(f"the actor returned {what} and no log-probability; {need}")
    action, logp = given[0], given[1]
    if not torch.is_tensor(logp) or not logp.is_floating_point():
        raise ConfigError(
            f"the actor returned {_words(logp)} where the log-probability should be; {need}"
        )
    rows = len(action) if torch.is_tensor(action) and action.dim() else 1
    if logp.numel() != rows:
        raise ConfigError(
            f"the actor returned {rows} actions and log-probabilities of shape "
            f"{tuple(logp.shape)}; one for each action is needed (sum those of its parts)"
        )
    if not bool(torch.isfinite(logp).all()):
        raise ConfigError("the actor's log-probability is not finite for the state given")


def _words(thing: Any) -> str:
    shape = getattr(thing, "shape", None)
    return type(thing).__name__ + (f" of shape {tuple(shape)}" if shape is not None else "")

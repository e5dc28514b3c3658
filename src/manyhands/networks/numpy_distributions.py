"""Action distributions in numpy: sample and mode, log-probability and entropy with their gradients.

The numpy twins of networks/heads.py, over the same parameters [N, P]: `sample` and `mode` for
whoever acts, `for_head` for learners that write the gradient out instead of asking autograd.
Gradients are given as a pullback: from the gradient of a loss with respect to log-probability and
entropy to that with respect to the parameters.

                      ∂ log p(a) / ∂ parameter        ∂ entropy / ∂ parameter
    Categorical       1[j = a] − p_j                  −p_j (log p_j + H)
    Bernoulli         a − p                           −l p (1 − p)
    Gaussian, mean    z / σ                           0                        z = (a − μ) / σ
    Gaussian, log σ   z² − 1                          1

WHY transposed inside: P is often 2, and numpy is slow along a short last axis. Parameters in
Fortran order ([P, N] in memory, as FastGradient gives them) are used as they are, others copied.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import Any, Protocol

import numpy as np

from manyhands.errors import ConfigError
from manyhands.networks.heads import (
    HALF_LOG_2PI,
    ILLEGAL,
    Bernoulli,
    Categorical,
    DiagonalGaussian,
    MultiCategorical,
    SquashedGaussian,
)
from manyhands.trees import Array
from manyhands.types import MASK


def masked(parameters: Array, observations: Any) -> Array:
    """As that of networks/heads.py; in place."""
    if isinstance(observations, dict) and MASK in observations:
        mask = observations[MASK].reshape(parameters.shape)
        np.copyto(parameters, ILLEGAL, where=mask == 0)
    return parameters


def sample(head: Any, parameters: Array, rng: np.random.Generator) -> tuple[Array, Array]:
    """(actions [N, *action_shape], log-probabilities [N]) of one draw per row."""
    if isinstance(head, Categorical):
        return _sample_categorical(head, parameters, rng)
    if isinstance(head, DiagonalGaussian):
        mean, log_std = parameters[:, : head.size], parameters[:, head.size :]
        noise = rng.standard_normal(mean.shape, dtype=np.float32)
        actions = mean + noise * np.exp(log_std)
        logp = -(0.5 * noise * noise + log_std).sum(axis=1)
        logp -= np.float32(head.size * HALF_LOG_2PI)
        if isinstance(head, SquashedGaussian):
            logp -= (log_slope_of_tanh(actions) + np.log(head.reach)).sum(axis=1)
            actions = (head.middle + head.reach * np.tanh(actions)).astype(np.float32)
        return actions.reshape(-1, *head.action_shape), logp
    if isinstance(head, MultiCategorical):
        columns, total = [], np.zeros(len(parameters), np.float32)
        for part, logits in zip(head.parts, _split(head, parameters), strict=True):
            column, logp = _sample_categorical(part, logits, rng)
            columns.append(column)
            total += logp
        return np.stack(columns, axis=-1).reshape(-1, *head.action_shape), total
    if isinstance(head, Bernoulli):
        # log P(yes) = −log(1 + e^−l), written so that no exponential overflows.
        yes = rng.random(parameters.shape) < 0.5 * (1.0 + np.tanh(0.5 * parameters))
        logp = -np.logaddexp(np.float32(0.0), np.where(yes, -parameters, parameters)).sum(axis=1)
        return yes.astype(np.int8).reshape(-1, *head.action_shape), logp
    raise ConfigError(f"no numpy sampling for {type(head).__name__}")


def mode(head: Any, parameters: Array) -> Array:
    """The likeliest action per row."""
    if isinstance(head, Categorical):
        return np.asarray(parameters.argmax(axis=1) + head.start)
    if isinstance(head, MultiCategorical):
        parts = zip(head.parts, _split(head, parameters), strict=True)
        columns = [logits.argmax(axis=1) + part.start for part, logits in parts]
        return np.stack(columns, axis=-1).reshape(-1, *head.action_shape)
    if isinstance(head, Bernoulli):
        parameters = (parameters > 0).astype(np.int8)
    elif isinstance(head, DiagonalGaussian):
        parameters = parameters[:, : head.size]  # the means
        if isinstance(head, SquashedGaussian):
            parameters = head.middle + head.reach * np.tanh(parameters)
    return parameters.reshape(-1, *head.action_shape)


def log_slope_of_tanh(u: Array) -> Array:
    """As that of networks/heads.py."""
    return np.asarray(2.0 * (np.float32(np.log(2.0)) - u - np.logaddexp(np.float32(0.0), -2.0 * u)))


def _sample_categorical(
    head: Categorical, logits: Array, rng: np.random.Generator
) -> tuple[Array, Array]:
    # Bare ufuncs: on a few rows the array methods spend more time in their wrappers.
    shifted = logits - np.maximum.reduce(logits, axis=1, keepdims=True)
    below = np.add.accumulate(np.exp(shifted), axis=1)  # distribution function times its last
    total = below[:, -1:]  # value
    index = np.add.reduce(below <= rng.random((len(logits), 1)) * total, axis=1)
    rows, choices = shifted.shape
    logp = shifted.take(index + _starts(rows, choices)) - np.log(total[:, 0])
    return (index + head.start if head.start else index), logp


@lru_cache(maxsize=64)
def _starts(rows: int, choices: int) -> Array:
    """Where each row begins in an array of these dimensions."""
    return np.arange(0, rows * choices, choices)


def _split(head: MultiCategorical, parameters: Array) -> list[Array]:
    return np.split(parameters, np.cumsum(head.sizes)[:-1], axis=1)


# -- what a learner needs -----------------------------------------------------------------------

# (d loss / d logp [N], d loss / d entropy [N] or one number) -> d loss / d parameters [N, P]
Pullback = Callable[[Array, Array | float], Array]


class Density(Protocol):
    """Log-probability [N] and entropy [N] of a head, from parameters [N, P] and actions."""

    def log_prob_and_entropy(
        self, parameters: Array, actions: Array
    ) -> tuple[Array, Array, Pullback]: ...


class CategoricalDensity:
    """One choice of n: P = n logits."""

    def __init__(self, head: Categorical) -> None:
        self._start = head.start

    def log_prob_and_entropy(
        self, parameters: Array, actions: Array
    ) -> tuple[Array, Array, Pullback]:
        logits = _columns(parameters)
        logp, entropy, pull = _choice(logits, _indices(actions, self._start))

        def pullback(d_logp: Array, d_entropy: Array | float) -> Array:
            d_logits = np.empty_like(logits)
            pull(_float32(d_logp), _float32(d_entropy), d_logits)
            return d_logits.T

        return logp, entropy, pullback


class MultiCategoricalDensity:
    """Several choices: P = n_1 + n_2 + … logits."""

    def __init__(self, head: MultiCategorical) -> None:
        self._starts = np.array([part.start for part in head.parts])
        ends = np.cumsum(head.sizes).tolist()
        self._slices = [slice(end - n, end) for end, n in zip(ends, head.sizes, strict=True)]

    def log_prob_and_entropy(
        self, parameters: Array, actions: Array
    ) -> tuple[Array, Array, Pullback]:
        logits, indices = _columns(parameters), self._indices(actions)
        parts = [_choice(logits[r], i) for r, i in zip(self._slices, indices, strict=True)]

        def pullback(d_logp: Array, d_entropy: Array | float) -> Array:
            d_logits = np.empty_like(logits)
            d_logp, d_entropy = _float32(d_logp), _float32(d_entropy)
            for rows, (_, _, pull) in zip(self._slices, parts, strict=True):
                pull(d_logp, d_entropy, d_logits[rows])
            return d_logits.T

        logp: Array = np.add.reduce([part[0] for part in parts])
        entropy: Array = np.add.reduce([part[1] for part in parts])
        return logp, entropy, pullback

    def _indices(self, actions: Array) -> Array:
        columns = np.asarray(actions, np.intp).reshape(len(actions), -1)
        return np.asarray((columns - self._starts).T)


class BernoulliDensity:
    """Independent yes or no: P = n logits."""

    def __init__(self, head: Bernoulli) -> None:
        self._size = head.parameter_size

    def log_prob_and_entropy(
        self, parameters: Array, actions: Array
    ) -> tuple[Array, Array, Pullback]:
        logits, yes = _columns(parameters), self._yes(actions)
        distance = np.abs(logits)
        odds = np.exp(-distance)  # of the less likely of the two: no exponential overflows
        log_total = np.log1p(odds)
        unlikely = odds / (1.0 + odds)  # its probability
        logp = _sum(np.minimum(logits * (2.0 * yes - 1.0), 0.0) - log_total)
        entropy = _sum(log_total + distance * unlikely)

        def pullback(d_logp: Array, d_entropy: Array | float) -> Array:
            probability = np.where(logits > 0.0, 1.0 - unlikely, unlikely)
            d_logits = (yes - probability) * _float32(d_logp)
            d_logits -= logits * unlikely * (1.0 - unlikely) * _float32(d_entropy)
            return np.asarray(d_logits.T)

        return logp, entropy, pullback

    def _yes(self, actions: Array) -> Array:
        return np.asarray(actions.reshape(len(actions), self._size).T, np.float32)


class GaussianDensity:
    """Independent normals: P = 2 d, means and then log standard deviations."""

    def __init__(self, head: DiagonalGaussian) -> None:
        self._size = head.size
        self._log_prob_constant = -head.size * HALF_LOG_2PI
        self._entropy_constant = head.size * (0.5 + HALF_LOG_2PI)

    def log_prob_and_entropy(
        self, parameters: Array, actions: Array
    ) -> tuple[Array, Array, Pullback]:
        columns, size = _columns(parameters), self._size
        precision = np.exp(-columns[size:])  # 1 / σ
        z = np.asarray(actions, np.float32).reshape(columns.shape[1], size).T - columns[:size]
        z *= precision
        squares = z * z
        log_volume = _sum(columns[size:])

        def pullback(d_logp: Array, d_entropy: Array | float) -> Array:
            d_logp, d_entropy = _float32(d_logp), _float32(d_entropy)
            d_columns = np.empty_like(columns)
            d_means, d_log_stds = d_columns[:size], d_columns[size:]
            np.multiply(z, precision, out=d_means)
            d_means *= d_logp
            np.subtract(squares, 1.0, out=d_log_stds)
            d_log_stds *= d_logp
            d_log_stds += d_entropy
            return d_columns.T

        logp = _sum(squares)
        logp *= -0.5
        logp -= log_volume
        logp += self._log_prob_constant
        return logp, log_volume + self._entropy_constant, pullback


_DENSITIES: dict[type, Callable[[Any], Density]] = {
    Categorical: CategoricalDensity,
    MultiCategorical: MultiCategoricalDensity,
    Bernoulli: BernoulliDensity,
    DiagonalGaussian: GaussianDensity,
}


def has_density(head: Any) -> bool:
    """Whether `for_head` knows this head. Not by isinstance: a subclass may mean something else."""
    return type(head) in _DENSITIES


def for_head(head: Any) -> Density:
    """The numpy twin of a head of networks/heads.py."""
    if not has_density(head):
        known = ", ".join(kind.__name__ for kind in _DENSITIES)
        raise ConfigError(f"no numpy density for {type(head).__name__}; there are {known}")
    return _DENSITIES[type(head)](head)


# (d logp [N], d entropy [N] or scalar, where to write d logits [n, N])
_Pull = Callable[[Array, Array, Array], None]


def _choice(logits: Array, index: Array) -> tuple[Array, Array, _Pull]:
    """Log-probability and entropy of one choice per column; logits [n, N], index [N]."""
    logp_all = logits - np.maximum.reduce(logits, axis=0)
    probability = np.exp(logp_all)
    total = np.add.reduce(probability, axis=0)
    probability /= total
    logp_all -= np.log(total)
    mean_logp = _sum(probability * logp_all)  # −H
    columns = np.arange(len(index))

    def pull(d_logp: Array, d_entropy: Array, d_logits: Array) -> None:
        np.subtract(mean_logp, logp_all, out=d_logits)
        d_logits *= d_entropy
        d_logits -= d_logp
        d_logits *= probability
        d_logits[index, columns] += d_logp

    return logp_all[index, columns], -mean_logp, pull


def _columns(parameters: Array) -> Array:
    """[N, P] -> [P, N], contiguous float32; free for float32 in Fortran order."""
    return np.ascontiguousarray(parameters.T, np.float32)


def _indices(actions: Array, start: int) -> Array:
    index = np.asarray(actions, np.intp).reshape(-1)
    return index - start if start else index


def _float32(x: Array | float) -> Array:
    return np.asarray(x, np.float32)


def _sum(columns: Array) -> Array:
    total: Array = np.add.reduce(columns, axis=0)
    return total

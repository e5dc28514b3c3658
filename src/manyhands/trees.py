"""Nested dicts, lists and tuples of arrays.

    map, stack, concat, take, put, …        one array or a tree of them (an observation, a batch),
                                           treated alike: `trees.take(obs, 3)`
    parts_of, inner, joined                rows of several states as those of one
    flatten                                taken apart into leaves that travel, and put together

A leaf is a number, a numpy array or a torch tensor. torch is never imported here: a tensor can
only be given by somebody who has already imported it.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeVar

import numpy as np

from manyhands.errors import ConfigError

T = TypeVar("T")
Tree = Any
Array = np.ndarray[Any, np.dtype[Any]]


def map(function: Callable[..., Any], tree: Tree, *others: Tree) -> Tree:
    """The tree with `function` of each leaf, and of those in the same place of the others."""
    if isinstance(tree, dict):
        return {k: map(function, part, *(o[k] for o in others)) for k, part in tree.items()}
    if isinstance(tree, tuple):
        parts = [map(function, *leaves) for leaves in zip(tree, *others, strict=True)]
        return type(tree)(*parts) if hasattr(tree, "_fields") else tuple(parts)
    return function(tree, *others)


def named(tree: Tree, above: str = "") -> dict[str, Any]:
    """The leaves by name: `camera/left` is a part of a part, `0` the first of a tuple. A dict that
    is flat already stays as it is."""
    nodes = tree.items() if isinstance(tree, dict) else enumerate(tree)
    leaves: dict[str, Any] = {}
    for key, node in nodes:
        name = f"{above}{key}"
        leaves |= named(node, f"{name}/") if isinstance(node, (dict, tuple)) else {name: node}
    return leaves


def take(tree: T, where: Any) -> T:
    """What stands at an index, a slice or a list of rows of the first axis: numpy's rules."""
    found: Any = tree
    if type(found) is dict:  # the usual batch, and every minibatch: worth a way of its own
        found = {k: v[where] if type(v) is np.ndarray else take(v, where) for k, v in found.items()}
        return found  # type: ignore[no-any-return]
    if isinstance(found, (dict, tuple)):
        return map(lambda leaf: leaf[where], found)  # type: ignore[no-any-return]
    return found[where]  # type: ignore[no-any-return]


def put(tree: Tree, where: Any, values: Tree) -> None:
    """Write values where `take` would have found them."""
    if isinstance(tree, dict):
        for key, part in tree.items():
            put(part, where, values[key])
    elif isinstance(tree, tuple):
        for part, value in zip(tree, values, strict=True):
            put(part, where, value)
    else:
        tree[where] = values


def copy_into(target: Tree, source: Tree) -> None:
    """Overwrite the target's arrays, where they stand."""
    put(target, ..., source)


def stack(trees: Sequence[Tree]) -> Tree:
    """Single rows as the rows of one tree."""
    return map(lambda *leaves: np.stack(leaves), *trees)


def concat(trees: Sequence[Tree]) -> Tree:
    """Rows one behind the other; a single part is given as it is, not copied."""
    return trees[0] if len(trees) == 1 else map(lambda *leaves: np.concatenate(leaves), *trees)


def rows(tree: Tree) -> int:
    """How many rows there are, by the first leaf."""
    while isinstance(tree, (dict, tuple)):
        tree = next(iter(tree.values() if isinstance(tree, dict) else tree))
    return len(tree)


# States of workers, and which of their rows: what stands there for each environment, in order.
Parts = Sequence[tuple[dict[str, Any], slice]]


def parts_of(states: Sequence[dict[str, Any]], each: int, first: int, count: int) -> Parts:
    """Where `count` rows from the `first` on are, in states of `each` rows."""
    found = []
    for at, state in enumerate(states):
        start, end = max(0, first - at * each), min(each, first + count - at * each)
        if start < end:
            found.append((state, slice(start, end)))
    return found


def inner(parts: Parts, name: str) -> Parts:
    """The same rows of a state inside those states."""
    return [(state[name], where) for state, where in parts]


def joined(parts: Parts, *names: str) -> dict[str, Any]:
    """What stands under these names, one behind the other: lists, or trees of arrays."""
    found = {}
    for name in names:
        pieces = [take(state[name], where) for state, where in parts]
        lists = isinstance(pieces[0], list)
        found[name] = [x for piece in pieces for x in piece] if lists else concat(pieces)
    return found


class Leaf(NamedTuple):
    """One array of a tree in the form that travels, and the way back."""

    path: str
    array: Array  # C-contiguous, native numpy dtype
    dtype: str  # the user's dtype; differs from array.dtype only for bfloat16
    restore: Callable[[Array], Any]  # array of the same dtype -> number, numpy array or tensor


def to_host(x: Any, path: str = "") -> Any:
    """A tensor as plain host memory that numpy can hold; ConfigError where it cannot be."""
    torch = sys.modules["torch"]
    try:
        host = x.detach().to("cpu").resolve_conj().resolve_neg().contiguous()
        (host.view(torch.int16) if host.dtype is torch.bfloat16 else host).numpy()
    except (TypeError, RuntimeError, NotImplementedError):  # float8, sparse, quantised, meta ...
        where = f"{path!r}" if path else "the value"
        raise ConfigError(
            f"{where} is a tensor of {x.dtype}, {x.layout} on {x.device}; only dense tensors of "
            "bool, integer, float or complex dtype can travel between workers"
        ) from None
    return host


def is_tensor(x: object) -> bool:
    torch = sys.modules.get("torch")
    return torch is not None and isinstance(x, torch.Tensor)


def flatten(tree: Tree) -> tuple[list[Leaf], Callable[[list[Any]], Tree]]:
    """Leaves in an order that every worker agrees on (dict keys sorted), and the rebuilder."""
    leaves: list[Leaf] = []
    try:
        rebuild = _walk(tree, "", leaves)
    except RecursionError:
        raise ConfigError("the tree is nested too deep, or is a part of itself") from None

    def put_together(values: list[Any]) -> Tree:
        stream = iter(values)
        return rebuild(stream)

    return leaves, put_together


def _walk(node: Tree, path: str, leaves: list[Leaf]) -> Callable[[Any], Tree]:
    if isinstance(node, dict):
        keys = sorted(node, key=str)
        if len({str(k) for k in keys}) < len(keys):
            raise ConfigError(f"two keys of {path or 'the tree'} read alike: {keys}")
        parts = [(k, _walk(node[k], f"{path}/{k}" if path else str(k), leaves)) for k in keys]
        order = list(node)

        def rebuild_dict(stream: Any) -> Tree:
            values = {k: part(stream) for k, part in parts}
            return {k: values[k] for k in order}

        return rebuild_dict
    if isinstance(node, (list, tuple)):
        items = [_walk(x, f"{path}[{i}]", leaves) for i, x in enumerate(node)]
        kind = type(node)

        def rebuild_sequence(stream: Any) -> Tree:
            values = [item(stream) for item in items]
            return kind(*values) if hasattr(node, "_fields") else kind(values)

        return rebuild_sequence
    leaves.append(_leaf(node, path))
    return lambda stream: next(stream)


def _leaf(x: Any, path: str) -> Leaf:
    if is_tensor(x):
        return _tensor_leaf(x, path)
    if isinstance(x, np.ndarray):
        array = x
        if not x.flags.c_contiguous:
            array = np.ascontiguousarray(x).reshape(x.shape)  # ascontiguousarray makes 0-d into 1-d
        if not array.dtype.isnative:
            array = array.astype(array.dtype.newbyteorder("="))
        return Leaf(path, array, _dtype_name(array, path), _itself)
    array = np.asarray(x)
    return Leaf(path, array, _dtype_name(array, path), _number)


def _itself(array: Array) -> Any:
    return array


def _number(array: Array) -> Any:
    return array.item() if array.ndim == 0 else array


_NAMES: dict[Any, str] = {}  # numpy takes microseconds to spell a dtype


def _dtype_name(array: Array, path: str) -> str:
    name = _NAMES.get(array.dtype)
    if name is None:
        _refuse_objects(array, path)
        name = _NAMES[array.dtype] = str(array.dtype)
    return name


def _tensor_leaf(x: Any, path: str) -> Leaf:
    torch = sys.modules["torch"]
    device, dtype = x.device, x.dtype
    host = to_host(x, path)

    def restore(a: Array) -> Any:
        # WHY copy when read-only: torch tensors over read-only memory are undefined behaviour.
        t = torch.from_numpy(a if a.flags.writeable else a.copy())
        return (t.view(torch.bfloat16) if dtype is torch.bfloat16 else t).to(device)

    if dtype is torch.bfloat16:  # numpy has no bfloat16: the bits travel as int16
        return Leaf(path, host.view(torch.int16).numpy(), "bfloat16", restore)
    return Leaf(path, host.numpy(), str(dtype).removeprefix("torch."), restore)


def _refuse_objects(array: Array, path: str) -> None:
    if array.dtype.kind not in "biufc":
        where = f"{path!r}" if path else "the value"
        raise ConfigError(
            f"{where} has dtype {array.dtype}; only numbers, numpy arrays and torch tensors of "
            "bool, integer, float or complex dtype can travel between workers"
        )


def describe(signature: list[list[Any]]) -> str:
    """`{obs: float32[*, 4], act: int64[*]}` from [[path, dtype, shape], ...]."""
    inner = ", ".join(
        f"{path or 'value'}: {dtype}[{', '.join(str(n) for n in shape)}]"
        for path, dtype, shape in signature
    )
    return "{" + inner + "}"

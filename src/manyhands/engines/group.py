"""Collectives over nested arrays: what a user or a strategy calls, on any engine.

Written once, on top of the engine's Transport. Each call makes a note of what this worker is
doing (which call, which keys, dtypes, shapes); the notes of all workers are compared before any
data is used.
"""

from __future__ import annotations

import json
import math
import os
import sys
import zlib
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any

import numpy as np

from manyhands.engines.base import Roster, Sizes, Transport
from manyhands.errors import CollectiveError, ConfigError
from manyhands.trees import Array, Leaf, Tree, describe, flatten, is_tensor

# Sums of few numbers are exact in these; small floats are added up in float32.
_ACCUMULATE = {"float16": np.float32, "bfloat16": np.float32, "bool": np.int64}


class Group:
    """Some workers that make the same calls in the same order."""

    def __init__(self, transport: Transport, *, debug: bool | None = None) -> None:
        self.transport = transport
        self.rank, self.size = transport.rank, transport.size
        self.debug = os.environ.get("MANYHANDS_DEBUG", "") == "1" if debug is None else debug
        self._calls = 0
        self._last_result = 0  # fingerprint of the last result that all workers share
        self._among: dict[str, Group] = {}  # by name

    # -- moving data ---------------------------------------------------------------------------

    def gather(self, tree: Tree, root: int = 0) -> Tree | None:
        """Join every worker's arrays along axis 0: on `root`, None elsewhere.

        Parts may have any number of rows, zero included. A number or 0-d array counts as one row.
        """
        return self._gather("gather", tree, self._check_root(root))

    def all_gather(self, tree: Tree) -> Tree:
        """Join every worker's arrays along axis 0, on all workers."""
        return self._gather("all_gather", tree, None)

    def broadcast(self, tree: Tree, root: int = 0) -> Tree:
        """The tree of `root`, on all workers; each gives a tree of the same shapes."""
        leaves, rebuild = flatten(tree)
        if self.size == 1:
            return tree
        self._check_root(root)
        note = self._note("broadcast", [[x.path, x.dtype, list(x.array.shape)] for x in leaves])
        # WHY copies: the buffers are filled in place and a caller's own arrays must stay his.
        buffers = [_as_bytes(x.array.copy()) for x in leaves]
        self.transport.broadcast(note, buffers, root, self._agree)
        self._remember(buffers)
        filled = zip(leaves, buffers, strict=True)
        return rebuild([x.restore(b.view(x.array.dtype).reshape(x.array.shape)) for x, b in filled])

    # -- reducing ------------------------------------------------------------------------------

    def sum(self, tree: Tree) -> Tree:
        return self._reduce("sum", tree)

    def mean(self, tree: Tree) -> Tree:
        """Element-wise mean over workers; integers give floats."""
        return self._reduce("mean", tree)

    def max(self, tree: Tree) -> Tree:
        return self._reduce("max", tree)

    def min(self, tree: Tree) -> Tree:
        return self._reduce("min", tree)

    def any(self, flag: Any) -> bool:
        """True on all workers if it is true on one: a branch that every worker takes alike."""
        return bool(self._reduce("max", float(_truth("any", flag))))

    def all(self, flag: Any) -> bool:
        return not self.any(not _truth("all", flag))

    def moments(self, x: Any) -> tuple[float, float, int]:
        """(mean, population standard deviation, count) of all elements on all workers.

        Exact for unequal and empty parts: two passes, as in the definition, so that a large mean
        cannot eat the digits of a small deviation.
        """
        values = _doubles(x)
        total, count = self.sum(np.array([values.sum(), values.size]))
        if count == 0:
            return 0.0, 0.0, 0
        mean = float(total / count)
        square = self.sum(float(np.square(values - mean).sum()))
        return mean, math.sqrt(square / count), int(count)

    def mean_tensor_(self, tensor: Any) -> None:
        """Average one flat torch tensor in place: the gradient path."""
        if self.size == 1:
            return
        if self.transport.takes(tensor):
            signature = [["", str(tensor.dtype), list(tensor.shape)]]
            self._agree(self.transport.exchange(self._note("mean", signature)))
            self.transport.reduce_tensor(tensor)
            tensor.div_(self.size)
        else:
            tensor.copy_(self.mean(tensor))

    # -- agreeing ------------------------------------------------------------------------------

    def barrier(self) -> None:
        """Wait until every worker is here."""
        if self.size > 1:
            self._agree(self.transport.exchange(self._note("barrier", [])))

    def exchange(self, value: Any) -> list[Any]:
        """Every worker's small plain value (JSON), by rank."""
        if self.size == 1:
            return [value]
        notes = self.transport.exchange(self._note("exchange", [], value))
        self._agree(notes)
        return [json.loads(n)[3] for n in notes]

    def check_equal(self, what: str, tree: Tree) -> None:
        """CollectiveError that names who differs, unless all workers hold the same bits."""
        leaves, _ = flatten(tree)
        prints = self.exchange([[x.path, _fingerprint([x.array])] for x in leaves])
        if all(p == prints[0] for p in prints):
            return
        usual = _commonest(prints)
        odd = [r for r, p in enumerate(prints) if p != usual]
        pairs = [pair for r in odd for pair in zip(prints[r], usual, strict=False)]
        paths = {str(a[0]) for a, b in pairs if a != b}
        raise CollectiveError(
            f"{what}: not the same on all workers. "
            f"{', '.join(self.roster.name(r) for r in odd)} differ"
            f"{'s' if len(odd) == 1 else ''} from the rest in {', '.join(sorted(paths)[:5])}"
            f"{' and more' if len(paths) > 5 else ''}"
        )

    def subgroup(self, ranks: Sequence[int]) -> Group | None:
        """A group of some of these workers. All workers call it, each with the set it will be in
        (or any set it is not in: it then gets None)."""
        members = sorted(set(ranks))
        if not members or members[0] < 0 or members[-1] >= self.size:
            raise ConfigError(
                f"subgroup of {list(ranks)}: ranks go from 0 to {self.size - 1} in this group"
            )
        inside = self.rank in members
        mine = members if inside else [self.rank]
        sets = self.exchange(mine)
        for other, theirs in enumerate(sets):
            for r in theirs:
                if sets[r] != theirs:
                    raise CollectiveError(
                        f"subgroups disagree: {self.roster.name(other)} asks for {theirs}, "
                        f"{self.roster.name(r)} for {sets[r]}"
                    )
        transport = self.transport.split(mine)
        return Group(transport, debug=self.debug) if inside else None

    def among(self, ranks: Sequence[int], name: str) -> Group:
        """A group of these ranks, each of which calls it with the same name, and nobody else; the
        same one each time.

        WHY not `subgroup`: that one lets all workers compare their wishes, for which all must come;
        an actor that was started again, or acts already, would have to.
        """
        members = sorted(set(ranks))
        if members == list(range(self.size)):
            return self
        if name not in self._among:
            transport = self.transport.split_off(members, name)
            self._among[name] = Group(transport, debug=self.debug)
        return self._among[name]

    @property
    def is_main(self) -> bool:
        """Whether this worker is the group's first: the one that writes and speaks."""
        return self.rank == 0

    @property
    def roster(self) -> Roster:
        return self.transport.roster

    def close(self) -> None:
        self.transport.close()

    # -- inside --------------------------------------------------------------------------------

    def _check_root(self, root: int) -> int:
        if not 0 <= root < self.size:
            raise ConfigError(f"root {root}: ranks go from 0 to {self.size - 1} in this group")
        return root

    def _gather(self, call: str, tree: Tree, root: int | None) -> Tree | None:
        leaves, rebuild = flatten(tree)
        parts = [x.array if x.array.ndim else x.array.reshape(1) for x in leaves]
        if self.size == 1:
            return rebuild([x.restore(p.copy()) for x, p in zip(leaves, parts, strict=True)])
        signature = [[x.path, x.dtype, list(p.shape)] for x, p in zip(leaves, parts, strict=True)]
        note = self._note(call, signature)
        plan = _GatherPlan(self, call)
        joined = self.transport.gather(note, [_as_bytes(p) for p in parts], root, plan.check)
        if joined is None:
            return None
        whole = []
        for flat, (dtype, trailing), rows in zip(joined, plan.kinds, plan.rows, strict=True):
            whole.append(flat.view(_storage(dtype)).reshape(rows, *trailing))
        return rebuild([x.restore(w) for x, w in zip(leaves, whole, strict=True)])

    def _reduce(self, op: str, tree: Tree) -> Tree:
        leaves, rebuild = flatten(tree)
        if self.size == 1 and op != "mean":
            return rebuild([x.restore(x.array.copy()) for x in leaves])
        arrays = [_accumulator(x, op) for x in leaves]
        if self.size > 1:
            arrays = self._reduce_arrays(op, leaves, arrays)
        else:  # the mean is divided in place and must not touch the caller's array
            arrays = [a.copy() for a in arrays]
        if op == "mean":
            for a in arrays:
                a /= self.size
        return rebuild([_restore_reduced(x, a) for x, a in zip(leaves, arrays, strict=True)])

    def _reduce_arrays(self, op: str, leaves: list[Leaf], arrays: list[Array]) -> list[Array]:
        note = self._note(op, [[x.path, x.dtype, list(x.array.shape)] for x in leaves])
        wire_op = "sum" if op == "mean" else op
        if len(arrays) == 1:  # the gradient path: nothing to pack
            done = self.transport.reduce(note, [arrays[0].reshape(-1)], wire_op, self._agree)
            self._remember(done)
            return [done[0].reshape(arrays[0].shape)]
        kinds = sorted({a.dtype.str for a in arrays})
        packed = []
        for kind in kinds:  # usually one: a single message however many arrays
            same = [a.reshape(-1) for a in arrays if a.dtype.str == kind]
            packed.append(same[0] if len(same) == 1 else np.concatenate(same))
        done = self.transport.reduce(note, packed, wire_op, self._agree)
        self._remember(done)
        offset = dict.fromkeys(kinds, 0)
        out = []
        for a in arrays:
            at = offset[a.dtype.str]
            offset[a.dtype.str] += a.size
            out.append(done[kinds.index(a.dtype.str)][at : at + a.size].reshape(a.shape))
        return out

    def _note(self, call: str, signature: list[list[Any]], value: Any = None) -> bytes:
        self._calls += 1
        if not self.debug and value is None:  # the usual case, on the path of every gradient
            return f'["{call}", {self._calls}, {json.dumps(signature)}, null]'.encode()
        note: list[Any] = [call, self._calls, signature, value]
        if self.debug:
            note += [_call_site(), self._last_result]
        return json.dumps(note).encode()

    def _remember(self, arrays: list[Array]) -> None:
        if self.debug:
            self._last_result = _fingerprint(arrays)

    def _agree(self, notes: list[bytes]) -> Sizes:
        """CollectiveError that says what each worker had, unless all do the same thing."""
        if any(n != notes[0] for n in notes):
            said = [json.loads(n) for n in notes]
            comparable = [[s[0], s[2], *s[4:]] for s in said]
            if any(c != comparable[0] for c in comparable):
                raise self._disagreement(said)
        return []

    def _disagreement(self, said: list[list[Any]]) -> CollectiveError:
        lines = []
        for rank, note in enumerate(said):
            site = f" at {note[4]}" if len(note) > 4 else ""
            signature = f" of {describe(note[2])}" if note[2] else ""
            lines.append(
                f"  {self.roster.name(rank)}: call {note[1]} is {note[0]}{signature}{site}"
            )
            if len(note) > 5 and note[5] != said[0][5]:
                lines.append("    its result of the call before differs from worker 0's")
        hint = "" if self.debug else " (`--debug-collectives` adds the line of each call)"
        return CollectiveError("workers disagree" + hint + ":\n" + "\n".join(lines))


class _GatherPlan:
    """What all the notes of a gather say together: sizes in bytes, dtype and shape per leaf."""

    def __init__(self, group: Group, call: str) -> None:
        self._group, self._call = group, call
        self.kinds: list[tuple[str, list[int]]] = []
        self.rows: list[int] = []

    def check(self, notes: list[bytes]) -> Sizes:
        said = [json.loads(n) for n in notes]
        general = [[s[0], [_general(x) for x in s[2]], *s[4:]] for s in said]
        reference = max(general, key=lambda g: sum(kind is not None for _, kind in g[1]))
        for mine in general:
            same_call = mine[0] == reference[0] and mine[2:] == reference[2:]
            if not same_call or not _compatible(mine[1], reference[1]):
                shown = [[s[0], s[1], [_starred(x) for x in s[2]], *s[3:]] for s in said]
                raise self._group._disagreement(shown)
        leaves = range(len(said[0][2]))
        self.kinds = [_kind_of([s[2][i] for s in said]) for i in leaves]
        self.rows = [sum(s[2][i][2][0] for s in said) for i in leaves]
        return [
            [
                leaf[2][0] * math.prod(trailing) * _storage(dtype).itemsize
                for leaf, (dtype, trailing) in zip(s[2], self.kinds, strict=True)
            ]
            for s in said
        ]


def _general(leaf: list[Any]) -> list[Any]:
    """[path, dtype and trailing shape], or [path, None] for the empty part `np.array([])`."""
    path, dtype, shape = leaf
    unknown = shape == [0] and dtype != "bfloat16"
    return [path, None if unknown else [dtype, shape[1:]]]


def _compatible(mine: list[Any], reference: list[Any]) -> bool:
    return len(mine) == len(reference) and all(
        a[0] == b[0] and (a[1] is None or b[1] is None or a[1] == b[1])
        for a, b in zip(mine, reference, strict=True)
    )


def _kind_of(parts: list[list[Any]]) -> tuple[str, list[int]]:
    """dtype and trailing shape of one leaf, by the first worker that has rows."""
    for _, dtype, shape in parts:
        if shape != [0]:
            return dtype, shape[1:]
    return parts[0][1], []


def _truth(call: str, flag: Any) -> bool:
    try:
        return bool(flag)
    except Exception as error:  # an array of several, say
        raise ConfigError(f"{call}() takes one true or false, not this: {error}") from None


def _doubles(x: Any) -> Array:
    """The numbers of one array or tensor."""
    try:
        (leaf,), _ = flatten(x if is_tensor(x) else np.asarray(x))
    except ValueError as error:  # rows of unequal length
        raise ConfigError(f"one array of numbers is needed: {error}") from None
    if leaf.array.dtype.kind == "c":
        raise ConfigError(f"the value has dtype {leaf.dtype}, and real numbers are needed")
    return _decoded(leaf).astype(np.float64)


def _decoded(leaf: Leaf) -> Array:
    """The array, of bfloat16 as float32."""
    if leaf.dtype != "bfloat16":
        return leaf.array
    bits: Array = leaf.array.astype(np.uint16).astype(np.uint32) << 16
    return bits.view(np.float32)


def _starred(leaf: list[Any]) -> list[Any]:
    path, dtype, shape = leaf
    return [path, dtype, [f"{shape[0]} rows", *shape[1:]]]


def _storage(dtype: str) -> np.dtype[Any]:
    return np.dtype("int16" if dtype == "bfloat16" else dtype)


def _as_bytes(array: Array) -> Array:
    return array.reshape(-1).view(np.uint8)


def _accumulator(leaf: Leaf, op: str) -> Array:
    """The array to add up: a float for means, wide enough not to lose what it adds."""
    array = _decoded(leaf)
    wide = _ACCUMULATE.get(leaf.dtype)
    if wide is not None and not (leaf.dtype == "bool" and op in ("max", "min")):
        array = array.astype(wide)
    if array.dtype == bool:
        array = array.astype(np.uint8)
    return array.astype(np.float64) if op == "mean" and array.dtype.kind in "biu" else array


def _restore_reduced(leaf: Leaf, array: Array) -> Any:
    if leaf.dtype == "bfloat16":
        return leaf.restore(_to_bfloat16_bits(array.astype(np.float32, copy=False)))
    if leaf.dtype == "float16":
        return leaf.restore(array.astype(np.float16))
    if leaf.dtype == "bool" and array.dtype == np.uint8:
        return leaf.restore(array.astype(bool))
    return leaf.restore(array)


def _to_bfloat16_bits(array: Array) -> Array:
    """Round to nearest even, as the hardware does; the bits as int16."""
    bits = np.ascontiguousarray(array).view(np.uint32).astype(np.uint64)
    rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
    rounded = np.where(np.isnan(array), 0x7FC0, rounded)
    return rounded.astype(np.uint16).view(np.int16).reshape(array.shape)


def _fingerprint(arrays: Sequence[Array]) -> int:
    value = 0
    for a in arrays:
        value = zlib.crc32(_as_bytes(np.ascontiguousarray(a)).data, value)
    return value


def _commonest(values: list[Any]) -> Any:
    """The value that most hold; on a tie that of the lowest rank."""
    return max(values, key=lambda v: (values.count(v), -values.index(v)))


def _call_site() -> str:
    """File and line of the user's call: the nearest frame outside this package."""
    frame = sys._getframe(1)
    here = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
    while frame.f_back is not None and frame.f_code.co_filename.startswith(here):
        frame = frame.f_back
    return f"{os.path.basename(frame.f_code.co_filename)}:{frame.f_lineno}"


class OverGroup:
    """Sums and moments over the rows of all members, as an algorithm asks for them. `phases` gets
    the time that they take."""

    def __init__(self, group: Group, phases: Callable[[str], AbstractContextManager[Any]]) -> None:
        self._group, self._phases = group, phases

    def sum(self, x: Any) -> Any:
        with self._phases("synchronisation"):
            return self._group.sum(x)

    def moments(self, x: Any) -> tuple[float, float, int]:
        with self._phases("synchronisation"):
            return self._group.moments(x)

    def place(self, rows: int) -> tuple[int, int]:
        """The number of this member's first row among all, and how many all have."""
        with self._phases("synchronisation"):
            counts = self._group.exchange(rows)
        return sum(counts[: self._group.rank]), sum(counts)

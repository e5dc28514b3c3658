"""A ring of rows in preallocated columns: one process writes, any number read, nobody waits.

    header    begun  written  cleared | dropped  limit
    priority  [capacity]                 as the writer gave them; NaN: none given
    columns   [capacity, ...] each

Every row has a ticket, its number since the ring was made: 0, 1, 2, ... A ticket is a slot
(ticket % capacity) and the generation of that slot (ticket // capacity) in one 64-bit number. It
only ever grows, also over `clear`, so the ticket of a row that is gone never comes back.

There is no lock. The writer raises `begun` before it touches a slot and `written` when the row is
whole. A reader copies a row and then looks at `begun`: if the row's slot has been begun anew
meanwhile, the copy may be torn and is thrown away. A writer that dies between the two leaves rows
that were never written, and nothing that blocks.
"""

from __future__ import annotations

import math
import platform
import secrets
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np

from manyhands.engines.shared import FRESH_BELOW, Pool, Segment, fence
from manyhands.errors import ConfigError
from manyhands.replay import compiled_loops
from manyhands.trees import Array, Tree

_BEGUN, _WRITTEN, _CLEARED = 0, 1, 2  # words of the writer
_DROPPED, _LIMIT = 8, 9  # words of the reader, on a cache line of their own
_TOKEN = 15  # by which a ring that was opened is known to be the one that was meant
_HEADER = 128  # bytes
_NO_LIMIT = 2**62
_KEEP = 4  # batches in use at once whose memory is kept
# x86 keeps writes in order by itself, and reads too; a fence would cost a tenth of an append.
_FENCES = platform.machine() not in ("x86_64", "AMD64")
# Path, dtype, shape of one row. A path has a slash between keys, as JSON pointers do: a slash
# within a key is written ~1, and a tilde ~0 (RFC 6901).
Layout = list[tuple[str, str, list[int]]]


class Ring:
    """Rows of one layout, the newest `capacity` of them.

    Args:
        capacity: how many rows are kept.
        example: one row: a nested dict of numbers and arrays, without the batch dimension.
        shared: lay it in memory that other processes can open by `Ring.open(ring.describe())`.
        priorities: keep a number with each row that says how much it is worth drawing.
    """

    def __init__(
        self, capacity: int, example: Tree, *, shared: bool = False, priorities: bool = False
    ) -> None:
        if capacity < 1 or capacity != int(capacity):
            raise ConfigError(f"ring: capacity {capacity}, but it must be a number, 1 or more")
        capacity = int(capacity)
        self._make(capacity, layout_of(example), priorities, None, shared)
        self._words[_LIMIT], self._words[_TOKEN] = _NO_LIMIT, secrets.randbits(62)

    def _make(
        self, capacity: int, layout: Layout, priorities: bool, segment: Segment | None, shared: bool
    ) -> None:
        self.capacity, self.layout, self._pool = capacity, layout, Pool(_KEEP * len(layout))
        parts: Layout = [("", "<f8", [])] if priorities else []
        sizes = [
            capacity * np.dtype(d).itemsize * math.prod(shape) for _, d, shape in [*parts, *layout]
        ]
        starts = np.cumsum([_HEADER, *(-(-size // 64) * 64 for size in sizes)])
        if shared and segment is None:
            segment = Segment(int(starts[-1]))
        self._segment = segment
        # Not zeros: numpy asks for huge pages only so, and no row is read before it is written
        memory = segment.bytes if segment is not None else np.empty(int(starts[-1]), np.uint8)
        # Not a numpy array, which takes several times as long to read one number.
        header: Any = memory[:_HEADER]
        self._words: Any = memoryview(header).cast("q") if shared else [0] * (_HEADER // 8)
        arrays = [
            memory[start : start + size].view(dtype).reshape(capacity, *shape)
            for start, size, (_, dtype, shape) in zip(
                starts, sizes, [*parts, *layout], strict=False
            )
        ]
        self.priority: Array | None = arrays.pop(0) if priorities else None
        self.columns: list[Any] = arrays
        self._paths = [path for path, _, _ in layout]
        self._wanted = [(a.shape[1:], a.dtype) for a in arrays]
        self._largest_row = max(a[:1].nbytes for a in arrays)
        self._flat = not any("/" in path for path in self._paths)
        self._look, self._put, self._put_one = strokes(self._paths, arrays)
        self._gatherers: list[Any] | None = None

    def describe(self) -> dict[str, Any]:
        """Plain data by which another process of this machine opens the same ring."""
        if self._segment is None:
            raise ConfigError("this ring is private to its process; make it with shared=True")
        return {
            "address": self._segment.address,
            "token": self._words[_TOKEN],
            "capacity": self.capacity,
            "layout": [[path, dtype, list(shape)] for path, dtype, shape in self.layout],
            "priorities": self.priority is not None,
        }

    @classmethod
    def open(cls, description: dict[str, Any]) -> Ring:
        """The ring that another process has described; OSError where its memory is out of reach."""
        ring = cls.__new__(cls)
        layout = [(str(p), str(d), [int(n) for n in s]) for p, d, s in description["layout"]]
        capacity, priorities = int(description["capacity"]), bool(description["priorities"])
        segment = Segment(address=str(description["address"]))
        # A container may have the same host name, and another process behind the same number.
        token = segment.bytes[:_HEADER].view(np.int64)[-1] if segment.size >= _HEADER else -1
        if token != int(description["token"]):
            raise OSError(f"{description['address']} is not the ring that was described")
        ring._make(capacity, layout, priorities, segment, True)
        return ring

    # -- what is in it -------------------------------------------------------------------------

    @property
    def written(self) -> int:
        """Rows ever written: the ticket of the next one."""
        return int(self._words[_WRITTEN])

    @property
    def first(self) -> int:
        """The oldest ticket that can still be read."""
        words = self._words
        return int(max(words[_BEGUN] - self.capacity, words[_CLEARED], words[_DROPPED]))

    @property
    def floor(self) -> int:
        """Tickets below this have been cleared, by the writer or by the reader."""
        return int(max(self._words[_CLEARED], self._words[_DROPPED]))

    @property
    def size(self) -> int:
        return max(self.written - self.first, 0)

    def generation(self, slot: int) -> int:
        """How often that slot has been begun: grows by one with each row that is put there."""
        begun = int(self._words[_BEGUN])
        return (begun - slot - 1) // self.capacity + 1

    # -- the writer ----------------------------------------------------------------------------

    def append(self, rows: Tree, priorities: Any = None) -> int:
        """Write a batch of rows [N, ...] over the oldest; the ticket of the first of them."""
        ticket: int = self._words[_WRITTEN]
        try:
            leaves = self._look(rows)
        except (LookupError, AttributeError, TypeError):
            leaves = None  # not arrays, or something is missing
        if leaves is None:
            leaves = self._leaves(rows)
        count = len(leaves[0])
        given = None if priorities is None else self._checked(priorities, count)
        if count <= self.capacity:
            try:
                self._write(leaves, count, given)
            except ValueError:
                self._leaves(rows)  # says what is wrong: a shape of the right size only
                raise
            return ticket
        for at in range(0, count, self.capacity):
            part = slice(at, min(at + self.capacity, count))
            some = [x[part] for x in leaves]
            self._write(some, len(some[0]), None if given is None else given[part])
        return ticket

    def _checked(self, priorities: Any, count: int) -> Array:
        given = np.asarray(priorities, np.float64).reshape(-1)
        if self.priority is None:
            raise ConfigError("ring: priorities given, but it was made without them")
        if len(given) != count:
            raise ConfigError(f"ring: {len(given)} priorities for {count} rows")
        if not np.isfinite(given).all():
            raise ConfigError("ring: a priority is not a finite number")
        return given

    def _write(self, leaves: Sequence[Array], count: int, priorities: Array | None) -> None:
        words, capacity = self._words, self.capacity
        ticket = words[_WRITTEN]
        end = ticket + count
        if words[_BEGUN] < end:  # it may lie further: a writer died there
            words[_BEGUN] = end
        if _FENCES:
            fence()
        slot = ticket % capacity
        fits = capacity - slot
        if count == 1:
            self._put_one(slot, leaves)
        elif count <= fits:
            self._put(slice(slot, slot + count), leaves)
        else:
            self._put(slice(slot, None), [leaf[:fits] for leaf in leaves])
            self._put(slice(count - fits), [leaf[fits:] for leaf in leaves])
        if self.priority is not None:
            self.priority[slot : slot + count] = np.nan if priorities is None else priorities[:fits]
            if count > fits:
                self.priority[: count - fits] = np.nan if priorities is None else priorities[fits:]
        if _FENCES:
            fence()
        words[_WRITTEN] = end

    def clear(self) -> None:
        """Writer: forget all rows. Their tickets are never used again."""
        self._words[_CLEARED] = self.written

    @property
    def limit(self) -> int:
        """Tickets from here on the reader does not want yet."""
        return int(self._words[_LIMIT])

    # -- the reader ----------------------------------------------------------------------------

    def read(self, tickets: Array, out: list[Array] | None = None) -> tuple[list[Array], Array]:
        """Copies of those rows, and which of them are whole: the others must not be used."""
        slots = tickets % self.capacity
        if out is None and len(tickets) * self._largest_row < FRESH_BELOW:
            out = [column.take(slots, 0, None, "clip") for column in self.columns]
        else:
            out = self.room(len(tickets)) if out is None else out
            if self._gatherers is None:  # not before: a writer needs none
                self._gatherers = [gatherer(column) for column in self.columns]
            for gather, to in zip(self._gatherers, out, strict=True):
                gather(slots, to)
        fence()
        return out, tickets >= self.first

    def given(self, since: int, until: int) -> tuple[Array, Array]:
        """Tickets since .. until-1 that are still there, and the priorities they came with."""
        tickets = np.arange(max(since, self.first), until)
        assert self.priority is not None
        given = self.priority.take(tickets % self.capacity)
        fence()
        alive = tickets >= self.first
        return (tickets, given) if alive.all() else (tickets[alive], given[alive])

    def drop(self) -> None:
        """Reader: forget all rows written so far. Their tickets are never used again."""
        self._words[_DROPPED] = self.written

    def allow(self, limit: int | None) -> None:
        """Reader: the writer shall wait before it writes ticket `limit`."""
        self._words[_LIMIT] = _NO_LIMIT if limit is None else limit

    def room(self, count: int) -> list[Array]:
        """Memory for `count` rows, used again when the last array on it is gone."""
        return [self._pool.take((count, *shape), dtype) for shape, dtype in self._wanted]

    def tree(self, leaves: list[Array]) -> Tree:
        """Columns as the nested dict that they came from."""
        if self._flat:
            return dict(zip(self._paths, leaves, strict=True))
        return build(self._paths, leaves)

    def release(self) -> None:
        """Give the memory back; nothing can be written or read from here on. Safe to call twice.

        Other processes that have opened the ring keep their view of it until they drop it.
        """
        self._words = list(self._words)
        self._words[_CLEARED] = self._words[_WRITTEN]
        self._look = _gone
        self.columns, self.priority, self._put, self._put_one = [], None, _gone, _gone
        self._gatherers = []
        if self._segment is not None:
            self._segment.close()
        self._segment = None

    # -- for checkpoints -----------------------------------------------------------------------

    def state(self) -> dict[str, Any]:
        """All rows, oldest first, and where the tickets stand.

        Rows that a writer takes back meanwhile are left out: they are the oldest.
        """
        written = self.written
        tickets = np.arange(self.first, written)
        rows = [np.empty((len(tickets), *shape), dtype) for shape, dtype in self._wanted]
        given = None if self.priority is None else self.priority.take(tickets % self.capacity)
        _, whole = Ring.read(self, tickets, rows)
        given = None if given is None else given[whole]
        return {"written": written, "columns": [c[whole] for c in rows], "priority": given}

    def load_state(self, state: dict[str, Any]) -> None:
        columns = [np.asarray(c) for c in state["columns"]]
        count, written = len(columns[0]), int(state["written"])
        shapes = [(c.shape[1:], c.dtype) for c in columns]
        if shapes != self._wanted or count > self.capacity:
            raise ConfigError(
                f"ring of {self.capacity} rows of {self.layout} cannot take a state of {count} "
                f"rows of {shapes}"
            )
        self._words[_WRITTEN] = self._words[_BEGUN] = written - count
        self._words[_CLEARED] = self._words[_DROPPED] = written - count
        given = None if self.priority is None else np.asarray(state["priority"])
        self._write(columns, count, given)

    def _leaves(self, rows: Tree) -> Sequence[Array]:
        """The columns of a batch, made into arrays and looked at one by one."""
        leaves = pick(self._paths, rows)
        leaves = [np.asarray(x) for x in leaves]
        count = len(leaves[0]) if leaves[0].ndim else -1
        for path, leaf, (shape, dtype) in zip(self._paths, leaves, self._wanted, strict=True):
            if leaf.shape != (count, *shape):
                wanted = ", ".join(map(str, ("N", *shape)))
                raise ConfigError(
                    f"ring: {path!r} has shape {list(leaf.shape)}, but a batch of rows has "
                    f"[{wanted}], with the same N for all; a single row has N = 1"
                )
            if not np.can_cast(leaf.dtype, dtype, "same_kind"):
                raise ConfigError(f"ring: {path!r} is {leaf.dtype}, which does not fit {dtype}")
        return leaves


def _gone(*_: Any) -> Any:
    raise ConfigError("ring: its memory has been given back")


def layout_of(example: Tree) -> Layout:
    """Path, dtype and shape of each leaf of one row."""
    found: Layout = []

    def walk(node: Tree, path: str) -> None:
        if isinstance(node, dict):
            for key in node:
                if not isinstance(key, str):
                    raise ConfigError(f"ring: key {key!r}: keys are strings")
                walk(node[key], _below(path, key))
            return
        array = np.asarray(node)
        if array.dtype.kind not in "biufc":
            raise ConfigError(f"ring: {path!r} has dtype {array.dtype}; only numbers can be kept")
        found.append((path, array.dtype.str, list(array.shape)))

    walk(example, "")
    if not found or found[0][0] == "":
        raise ConfigError("ring: the example must be a dict with at least one entry")
    return found


def pick(paths: list[str], tree: Tree) -> list[Any]:
    """The leaves at those paths; ConfigError names a missing one, and one too many."""
    flat: dict[str, Any] = {}

    def walk(node: Tree, path: str) -> None:
        if isinstance(node, dict):
            for key in node:
                walk(node[key], _below(path, str(key)))
        else:
            flat[path] = node

    walk(tree, "")
    if set(flat) != set(paths):
        raise ConfigError(f"ring: rows have {sorted(flat)}, but {sorted(paths)} was expected")
    return [flat[path] for path in paths]


def _below(path: str, key: str) -> str:
    written = key.replace("~", "~0").replace("/", "~1")
    return f"{path}/{written}" if path else written


def keys_of(path: str) -> list[str]:
    """The keys on the way to a leaf."""
    return [key.replace("~1", "/").replace("~0", "~") for key in path.split("/")]


def build(paths: list[str], leaves: list[Any]) -> dict[str, Any]:
    tree: dict[str, Any] = {}
    for path, leaf in zip(paths, leaves, strict=True):
        node = tree
        *above, name = keys_of(path)
        for key in above:
            node = node.setdefault(key, {})
        node[name] = leaf
    return tree


# -- columns: rows in and out of memory, in as few strokes as possible -----------------------------


_LARGE_ROW = 4096  # bytes: a page of memory


class Strokes(NamedTuple):
    """What it takes to add rows to certain columns, written out for just these columns.

    WHY: what it costs to add a row is the interpreter, not the copy. Written out, without a loop
    over the columns, it costs half.
    """

    look: Callable[[Any], Sequence[Array] | None]  # a batch of rows -> its arrays, if all is usual
    put: Callable[[slice, Sequence[Array]], None]  # [N, ...] each
    put_one: Callable[[int, Sequence[Array]], None]  # [1, ...] each


def strokes(paths: Sequence[str], columns: Sequence[Array]) -> Strokes:
    """The functions for columns that lie at those paths of a row.

    `look` gives None, or raises a LookupError, TypeError or AttributeError, unless each path holds
    an array of the column's own dtype and there is nothing besides. It compares sizes, not shapes:
    `put` raises a ValueError where these do not fit.
    """
    keys: dict[str, set[str]] = {}  # of each dict in a row
    known: dict[str, Any] = {}
    places, right = [], []
    for k, (path, column) in enumerate(zip(paths, columns, strict=True)):
        place = "rows"
        for key in keys_of(path):
            keys.setdefault(place, set()).add(key)
            place = f"{place}[{key!r}]"
        places.append(place)
        # Columns of numbers as columns of one-number rows: item i then takes a batch of one row.
        single = column if column.ndim > 1 else column[:, None]
        known |= {f"column{k}": column, f"single{k}": single, f"dtype{k}": column.dtype}
        size = math.prod(column.shape[1:])
        right.append(f"a{k}.dtype is dtype{k} and a{k}.size == count * {size}")
    arrays = "".join(f"a{k}, " for k in range(len(places)))
    lengths = [f"len({place}) == {len(names)}" for place, names in keys.items()]
    source = [
        "def look(rows):",
        f"    {arrays}= {', '.join(places)},",
        "    count = len(a0)",
        f"    return ({arrays}) if {' and '.join([*lengths, *right])} else None",
    ]
    for name, column_name in (("put", "column"), ("put_one", "single")):
        source += [f"def {name}(at, arrays):", f"    {arrays}= arrays"]
        source += [f"    {column_name}{k}[at] = a{k}" for k in range(len(places))]
    # Keys stand in it as quoted strings only, so that no name of a column can be code.
    exec("\n".join(source), known)
    # Taken out, or memory and functions would hold each other until the garbage is collected
    return Strokes(*(known.pop(name) for name in Strokes._fields))


def gatherer(column: Array) -> Callable[[Array, Array], Any]:
    """How rows get out of a column: a call (slots, out) with out[i] = column[slots[i]]."""
    nbytes = column.itemsize * math.prod(column.shape[1:])
    compiled = compiled_loops() if nbytes >= _LARGE_ROW else None
    if compiled is None:
        # "clip" writes straight into `out`; the default would go through a copy
        return lambda slots, out: column.take(slots, 0, out, "clip")
    rows = column.view(np.uint8).reshape(len(column), nbytes)
    return lambda slots, out: compiled.gather(
        rows, slots, out.view(np.uint8).reshape(len(out), nbytes)
    )

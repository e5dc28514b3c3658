"""Collectives in shared memory, between processes of one machine.

Every member of a group owns one area of the group's control segment and two slots for data, used
in turn. To meet, a worker writes its data and its note, then its call number; it goes on when all
call numbers have come up to its own.

    worker 0   note, data ─┐                      ┌─ reads all slots, adds them up in rank order
    worker 1   note, data ─┴─ wait for all ───────┴─ the same numbers in the same order

WHY two slots: a worker that is one call ahead writes the other slot, and cannot be two ahead,
because that takes everybody's next call. So no second meeting is needed before a slot is reused.

What is to be added up has, up to a size, rows of its own in the control segment, a matrix [worker,
byte]: one numpy call adds up all workers' numbers. From a size on that falls with the number of
workers each adds up its share alone, and all copy the sums after a second meeting: all reading all
would carry N times the bytes from core to core.

    row 0   ■ ■ ■ ■ ─┐            ┌─ ■ worker 0: first quarter ───┐            ┌─ ■ ■ ■ ■
    row 1   ■ ■ ■ ■ ─┼─ meeting ──┼─   ■ worker 1: second quarter ┼─ meeting ──┼─ ■ ■ ■ ■
    …                ┘            └─     …                        ┘            └─ …
"""

from __future__ import annotations

import os
import weakref
from collections import OrderedDict
from collections.abc import Sequence

import numpy as np

from manyhands.engines.base import (
    Check,
    Patience,
    Roster,
    Sizes,
    Transport,
    add_up,
    doing,
    total,
)
from manyhands.engines.process import BoardRoster
from manyhands.engines.shared import ResultPool, Segment, fence
from manyhands.errors import CollectiveError
from manyhands.trees import Array

_NOTE_ROOM = 4096
_ROW_ROOM = 1 << 18  # bytes; memory that is never written to takes no place
_WORDS = 64
_AREA = _WORDS * 8 + 2 * _NOTE_ROOM
# words of an area: the call number, the process, the last call it has read; then, for each of the
# two slots, where it is and what it holds
_CALL, _PID, _READ, _SLOT = 0, 1, 2, 3
_FD, _GENERATION, _SIZE, _NOTE, _FIELDS = 0, 1, 2, 3, 4
# Bytes that each worker is spared by adding up a share alone, from which on that is worth a second
# meeting. With two workers nothing is spared but half of the additions.
_WORTH_A_MEETING = 100_000


OPEN: weakref.WeakSet[LocalTransport] = weakref.WeakSet()  # this worker's transports


def control_size(members: int) -> int:
    return members * (_AREA + 2 * _ROW_ROOM) + 2 * _ROW_ROOM


class LocalTransport(Transport):
    def __init__(
        self, control: Segment, rank: int, size: int, roster: Roster, timeout: float
    ) -> None:
        self.rank, self.size, self.roster, self.timeout = rank, size, roster, timeout
        self._control = control
        self._words = control.view.cast("Q")
        self._bases = [r * _AREA // 8 for r in range(size)]
        self._others = [r for r in range(size) if r != rank]
        self._call = 0
        self._note_now = b""
        self._own: list[Segment | None] = [None, None]
        self._seen: dict[tuple[int, int], tuple[int, Segment]] = {}
        self._results = ResultPool()
        self._mapped: OrderedDict[str, Segment] = OrderedDict()
        data = control.bytes[size * _AREA : control_size(size)].reshape(2, size + 1, _ROW_ROOM)
        self._rows, self._sums = data[:, :size], data[:, size]  # [slot, worker, byte], [slot, byte]
        self._words[self._bases[rank] + _PID] = os.getpid()
        OPEN.add(self)

    # -- meeting -------------------------------------------------------------------------------

    def exchange(self, note: bytes) -> list[bytes]:
        self._post(note, [])
        self._meet()
        notes = self._notes()
        self._done()
        return notes

    def _done(self) -> None:
        """This worker has read what the others laid down: they may leave."""
        self._words[self._bases[self.rank] + _READ] = self._call

    def linger(self, seconds: float) -> None:
        """Before leaving: let the others read what this worker laid down in its last call.

        WHY: its slots are reached through this process, and go with it.
        """
        patience = Patience(seconds)
        while not patience.over:
            reading = [r for r in self._others if self._words[self._bases[r] + _READ] < self._call]
            if not any(self.roster.is_there(r) for r in reading):
                return
            patience.pause()

    def _post(self, note: bytes, data: list[Array]) -> int:
        """Lay down note and data for the next call; returns where the data starts in the slot."""
        self._call += 1
        self._note_now = note if data or note[:1] == b"[" else self._note_now
        which = self._call & 1
        base = self._bases[self.rank] + _SLOT + which * _FIELDS
        start = 0 if len(note) <= _NOTE_ROOM else _round(len(note))
        need = start + sum(_round(a.nbytes) for a in data)
        if need:
            slot = self._slot(which, need)
            at = start
            for a in data:
                slot.bytes[at : at + a.nbytes].view(a.dtype)[:] = a
                at += _round(a.nbytes)
            if start:
                slot.view[: len(note)] = note
        if not start:
            at = self.rank * _AREA + _WORDS * 8 + which * _NOTE_ROOM
            self._control.view[at : at + len(note)] = note
        self._words[base + _NOTE] = len(note)
        fence()
        self._words[self._bases[self.rank] + _CALL] = self._call
        return start

    def _slot(self, which: int, need: int) -> Segment:
        """This worker's own slot, grown if needed; its address goes on the control segment."""
        slot = self._own[which]
        if slot is None or slot.size < need:
            if slot is not None:
                slot.close()
            slot = self._own[which] = Segment(max(need + need // 4, 1 << 16))
            base = self._bases[self.rank] + _SLOT + which * _FIELDS
            self._words[base + _FD] = slot.number
            self._words[base + _SIZE] = slot.size
            self._words[base + _GENERATION] += 1
        return slot

    def _meet(self) -> None:
        """Wait until all others have come to this call."""
        words, call, bases = self._words, self._call, self._bases
        waiting = [r for r in self._others if words[bases[r] + _CALL] < call]
        if waiting:
            patience = Patience(self.timeout)
            while waiting:
                slept = patience.pause()
                waiting = [r for r in waiting if words[bases[r] + _CALL] < call]
                if slept and waiting:
                    self.roster.raise_if_gone(waiting, doing(self._note_now))
                    if patience.over:
                        raise self.roster.late(waiting, doing(self._note_now), patience.waited)
        fence()

    def _notes(self) -> list[bytes]:
        return [self._note(r) for r in range(self.size)]

    def _note(self, rank: int) -> bytes:
        which = self._call & 1
        length = self._words[self._bases[rank] + _SLOT + which * _FIELDS + _NOTE]
        if length > _NOTE_ROOM:
            return bytes(self._slot_of(rank).view[:length])
        return self._control.read(rank * _AREA + _WORDS * 8 + which * _NOTE_ROOM, length)

    def _slot_of(self, rank: int) -> Segment:
        """The slot in which that worker laid down its data for this call."""
        which = self._call & 1
        if rank == self.rank:
            slot = self._own[which]
            assert slot is not None
            return slot
        base = self._bases[rank] + _SLOT + which * _FIELDS
        generation = self._words[base + _GENERATION]
        known = self._seen.get((rank, which))
        if known is None or known[0] != generation:
            pid = self._words[self._bases[rank] + _PID]
            address = Segment.address_of(pid, self._words[base + _FD])
            known = self._seen[(rank, which)] = (generation, self._reach(address, rank))
        return known[1]

    # -- collectives ---------------------------------------------------------------------------

    def reduce(self, note: bytes, arrays: list[Array], op: str, check: Check) -> list[Array]:
        starts, end = [], 0
        for a in arrays:
            starts.append(end)
            end += _round(a.nbytes)
        if end > _ROW_ROOM or len(note) > _NOTE_ROOM:
            return self._reduce_large(note, arrays, op, check)
        which = (self._call + 1) & 1
        for at, a in zip(starts, arrays, strict=True):
            self._row(which, at, a)[self.rank] = a
        self._post(note, [])
        self._meet()
        check(self._notes())
        results: list[Array] = []
        alone = [self._shared_out(a) for a in arrays]
        for at, a, share in zip(starts, arrays, alone, strict=True):
            parts = self._row(which, at, a)
            if share:
                mine = slice(*_shares(a.size, self.size)[self.rank : self.rank + 2])
                self._sum(which, at, a)[mine] = total(parts[:, mine], op)
                results.append(a)  # its place
            else:
                results.append(total(parts, op))
        if any(alone):
            self._post(b"", [])
            self._meet()
            for i, share in enumerate(alone):
                if share:
                    results[i] = self._sum(which, starts[i], arrays[i]).copy()
        self._done()
        return results

    def _row(self, which: int, at: int, like: Array) -> Array:
        """[worker, number]: where all workers lay down such an array."""
        return self._rows[which, :, at : at + like.nbytes].view(like.dtype)

    def _sum(self, which: int, at: int, like: Array) -> Array:
        """Where all workers lay down their shares of its sum."""
        return self._sums[which, at : at + like.nbytes].view(like.dtype)

    def _shared_out(self, a: Array) -> bool:
        return a.nbytes * max(self.size - 2, 0.5) >= _WORTH_A_MEETING

    def _reduce_large(self, note: bytes, arrays: list[Array], op: str, check: Check) -> list[Array]:
        """What has no room in the rows comes through the slots."""
        start = self._post(note, arrays)
        self._meet()
        check(self._notes())
        results = []
        for a in arrays:
            parts = [self._read(r, start, a) for r in range(self.size)]
            results.append(None if self._shared_out(a) else add_up(parts, op))
            start += _round(a.nbytes)
        big = [i for i, r in enumerate(results) if r is None]
        if big:
            self._reduce_together(arrays, results, big, note, op)
        self._done()
        return results  # type: ignore[return-value]

    def _reduce_together(
        self, arrays: list[Array], results: list[Array | None], big: list[int], note: bytes, op: str
    ) -> None:
        """Each worker adds up its share of the large arrays; then all copy the shares."""
        start = 0 if len(note) <= _NOTE_ROOM else _round(len(note))
        starts = np.cumsum([start] + [_round(a.nbytes) for a in arrays])
        mine = []
        for i in big:
            cut = _shares(arrays[i].size, self.size)
            here = slice(cut[self.rank], cut[self.rank + 1])
            parts = [self._read(r, int(starts[i]), arrays[i])[here] for r in range(self.size)]
            mine.append(add_up(parts, op))
        self._post(b"", mine)
        self._meet()
        for i in big:
            results[i] = self._results.take(arrays[i].nbytes)[1].view(arrays[i].dtype)
        for r in range(self.size):
            at = 0
            for i in big:
                cut = _shares(arrays[i].size, self.size)
                n = cut[r + 1] - cut[r]
                nbytes = n * arrays[i].itemsize
                target = results[i]
                assert target is not None
                target[cut[r] : cut[r + 1]] = (
                    self._slot_of(r).bytes[at : at + nbytes].view(arrays[i].dtype)
                )
                at += _round(nbytes)

    def _read(self, rank: int, start: int, like: Array) -> Array:
        return self._slot_of(rank).bytes[start : start + like.nbytes].view(like.dtype)

    def broadcast(self, note: bytes, arrays: list[Array], root: int, check: Check) -> None:
        start = self._post(note, arrays if self.rank == root else [])
        self._meet()
        check(self._notes())
        if self.rank != root:
            for a in arrays:
                a[:] = self._read(root, start, a)
                start += _round(a.nbytes)
        self._done()

    def gather(
        self, note: bytes, parts: list[Array], root: int | None, check: Check
    ) -> list[Array] | None:
        if root is None:
            return self._all_gather(note, parts, check)
        self._post(note, [])
        self._meet()
        sizes = check(self._notes())
        starts = _starts(sizes)
        total = starts[-1]
        result: Array | None = None
        segment: Segment | None = None
        if self.rank == root:  # say where the parts go; every worker writes its own, once
            segment, result = self._results.take(total)
        self._post(segment.address.encode() if segment is not None else b"", [])
        # CRUCIAL: wait for all, not only for the root: the next post uses the slot of the first
        # note again, which a slower worker may still be reading.
        self._meet()
        target = self._open(self._note(root).decode(), root).bytes if result is None else result
        for leaf, part in enumerate(parts):
            at = starts[leaf] + sum(sizes[r][leaf] for r in range(self.rank))
            target[at : at + part.nbytes] = part
        self._post(b"", [])
        self._done()
        if result is None:
            return None
        self._meet()
        return _leaves(result, sizes, starts)

    def _all_gather(self, note: bytes, parts: list[Array], check: Check) -> list[Array]:
        self._post(note, parts)
        self._meet()
        sizes = check(self._notes())
        starts = _starts(sizes)
        result = self._results.take(starts[-1])[1]
        for rank in range(self.size):
            length = self._words[self._bases[rank] + _SLOT + (self._call & 1) * _FIELDS + _NOTE]
            at = 0 if length <= _NOTE_ROOM else _round(length)
            for leaf, nbytes in enumerate(sizes[rank]):
                to = starts[leaf] + sum(sizes[r][leaf] for r in range(rank))
                if nbytes:
                    result[to : to + nbytes] = self._slot_of(rank).bytes[at : at + nbytes]
                at += _round(nbytes)
        self._done()
        return _leaves(result, sizes, starts)

    def split(self, members: Sequence[int]) -> Transport:
        leads = members[0] == self.rank
        control = Segment(control_size(len(members))) if leads else None
        addresses = self.exchange(control.address.encode() if control is not None else b"")
        if control is None:
            control = self._reach(addresses[members[0]].decode(), members[0])
        self.exchange(b"")  # the leader may not go away before all have opened it
        return self._part(control, members)

    def split_off(self, members: Sequence[int], name: str) -> Transport:
        """The leader writes on its page of the board where the group's memory is."""
        roster, lead, key = self.roster, members[0], f"group/{name}"
        if not isinstance(roster, BoardRoster):
            return self.split(members)
        page = roster.members[lead]
        if lead == self.rank:
            control = Segment(control_size(len(members)))
            roster.board.set_note(page, key, control.address)
        else:
            patience = Patience(self.timeout)
            while not (address := roster.board.note(page, key)):
                if patience.pause():
                    roster.raise_if_gone([lead], f"group {name!r}")
                    if patience.over:
                        raise roster.late([lead], f"group {name!r}", patience.waited)
            control = self._reach(str(address), lead)
        part = self._part(control, members)
        part.exchange(b"")  # the leader may not go away before all have opened it
        return part

    def _part(self, control: Segment, members: Sequence[int]) -> LocalTransport:
        roster: Roster = self.roster
        if isinstance(roster, BoardRoster):
            roster = BoardRoster(
                roster.board,
                [roster.members[m] for m in members],
                [roster.names[m] for m in members],
            )
        return LocalTransport(
            control, list(members).index(self.rank), len(members), roster, self.timeout
        )

    def _reach(self, address: str, rank: int) -> Segment:
        try:
            return Segment(address=address)
        except OSError as error:
            self.roster.raise_if_gone([rank], doing(self._note_now))
            # Killed a moment ago, and nobody has noticed yet: no fault of ours.
            who = self.roster.name(rank)
            raise CollectiveError(f"{doing(self._note_now)}: {who} is gone ({error})") from None

    def _open(self, address: str, rank: int) -> Segment:
        """A result segment of another worker; the last few stay mapped."""
        if address not in self._mapped:
            self._mapped[address] = self._reach(address, rank)
            if len(self._mapped) > 16:
                self._mapped.popitem(last=False)
        self._mapped.move_to_end(address)
        return self._mapped[address]

    def close(self) -> None:
        for slot in self._own:
            if slot is not None:
                slot.close()
        self._own = [None, None]
        self._seen.clear()
        self._mapped.clear()


def _shares(n: int, workers: int) -> list[int]:
    return [n * r // workers for r in range(workers + 1)]


def _starts(sizes: Sizes) -> list[int]:
    """Where each leaf starts in the joined result, and where the last one ends."""
    starts = [0]
    for leaf in range(len(sizes[0])):
        starts.append(starts[-1] + _round(sum(s[leaf] for s in sizes)))
    return starts


def _leaves(result: Array, sizes: Sizes, starts: list[int]) -> list[Array]:
    return [
        result[starts[leaf] : starts[leaf] + sum(s[leaf] for s in sizes)]
        for leaf in range(len(sizes[0]))
    ]


def _round(n: int) -> int:
    return (n + 63) // 64 * 64

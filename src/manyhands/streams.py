"""Python's, numpy's and torch's global generators, each owner with streams of its own.

At any time the streams of one owner are in place; those of the others are set aside. Owners are the
workers of the inline engine, and environments that draw from these generators.
"""

from __future__ import annotations

import ctypes
import random
import sys
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import numpy as np

KINDS = ("python", "numpy", "torch")


@contextmanager
def given_back() -> Iterator[None]:
    """Whatever is drawn or seeded inside, outside it was never there."""
    before = take_all()
    put_all(copy_all(before))
    try:
        yield
    finally:
        put_all(before)


def take_all() -> dict[str, Any]:
    """The streams that are in place; they may be put back once others have been."""
    return {kind: take(kind) for kind in KINDS}


def put_all(streams: dict[str, Any]) -> None:
    for kind, stream in streams.items():
        put(kind, stream)


def copy_all(streams: dict[str, Any]) -> dict[str, Any]:
    """Streams that begin where these stand and then go their own way."""
    numpy = streams["numpy"]
    bits = type(numpy.bits)()
    bits.state = numpy.bits.state
    copy = NumpyStream.of(bits)._replace(has_gauss=numpy.has_gauss, gauss=numpy.gauss)
    return streams | {"numpy": copy}  # the others are values


def seeded(kind: str, word: int) -> Any:
    """A stream of that kind from a number of 63 bits."""
    if kind == "python":
        return random.Random(word).getstate()
    if kind == "numpy":
        return NumpyStream.of(np.random.MT19937(word))
    torch = sys.modules.get("torch")
    return None if torch is None else torch.Generator().manual_seed(word).get_state()


def take(kind: str, *, whole: bool = True) -> Any:
    """The stream of that kind that is in place.

    With `whole` also the half of a pair of normal numbers that numpy has still to give: a look that
    costs as much as all the rest.
    """
    if kind == "python":
        return random.getstate()
    if kind == "numpy":
        return _NUMPY.take(whole)
    torch = sys.modules.get("torch")
    return None if torch is None else torch.default_generator.get_state()


def put(kind: str, stream: Any) -> None:
    if kind == "python":
        random.setstate(stream)
    elif kind == "numpy":
        _NUMPY.put(stream)
    elif stream is not None:
        sys.modules["torch"].default_generator.set_state(stream)


def mark(kind: str, stream: Any) -> int:
    """A number by which one sees later whether anybody has drawn from the stream."""
    if stream is None:
        return 0
    if kind == "python":
        return zlib.crc32(np.array(stream[1], np.uint32).tobytes())
    if kind == "numpy":
        return zlib.crc32(stream.words)
    return zlib.crc32(stream.numpy().tobytes())


# -- plain data, for checkpoints -------------------------------------------------------------------


def global_chance() -> dict[str, Any]:
    """Where the generators stand."""
    return {kind: to_plain(kind, take(kind)) for kind in KINDS}


def load_global_chance(state: dict[str, Any]) -> None:
    for kind in KINDS:
        put(kind, from_plain(kind, state[kind]))


def to_plain(kind: str, stream: Any) -> Any:
    if kind == "python":
        version, words, gauss = stream
        return {"version": version, "words": np.array(words, np.uint64), "gauss": gauss}
    if kind == "numpy":
        return stream.bits.state | {"has_gauss": stream.has_gauss, "gauss": stream.gauss}
    return stream


def from_plain(kind: str, plain: Any) -> Any:
    if kind == "python":
        words = tuple(int(word) for word in plain["words"])
        return int(plain["version"]), words, plain["gauss"]
    if kind == "numpy":
        bits = getattr(np.random, plain["bit_generator"])()
        bits.state = plain
        return NumpyStream.of(bits)._replace(has_gauss=plain["has_gauss"], gauss=plain["gauss"])
    return plain


# -- numpy's ---------------------------------------------------------------------------------------


class NumpyStream(NamedTuple):
    """numpy's changes hands as an object: its state would have to be copied word by word."""

    bits: Any  # np.random.BitGenerator
    address: int  # of its memory; 0 where that is not known
    has_gauss: int = 0
    gauss: float = 0.0

    @classmethod
    def of(cls, bits: Any) -> NumpyStream:
        known = isinstance(bits, np.random.MT19937)  # any other is the user's own choice
        return cls(bits, bits.ctypes.state_address if known else 0)

    @property
    def words(self) -> bytes:
        if not self.address:
            return repr(self.bits.state).encode()
        return ctypes.string_at(self.address, 625 * 4)  # 624 words, and the place among them


class _Numpy:
    def __init__(self) -> None:
        self._last: tuple[NumpyStream, bytes] | None = None  # what was put, and its words then

    def take(self, whole: bool) -> NumpyStream:
        bits = np.random.get_bit_generator()  # type: ignore[attr-defined]
        if self._last is None or self._last[0].bits is not bits:
            here = NumpyStream.of(bits)
        else:
            here, words = self._last
            # With no number in waiting, none can be now unless the generator has moved.
            if not whole or (not here.has_gauss and here.words == words):
                return here._replace(has_gauss=0)
        state = np.random.get_state(legacy=False)
        return here._replace(has_gauss=state["has_gauss"], gauss=state["gauss"])

    def put(self, stream: NumpyStream) -> None:
        # It forgets a number in waiting.
        np.random.set_bit_generator(stream.bits)  # type: ignore[attr-defined]
        if stream.has_gauss:
            state = np.random.get_state(legacy=False)
            np.random.set_state(state | {"has_gauss": stream.has_gauss, "gauss": stream.gauss})
        self._last = stream, stream.words


_NUMPY = _Numpy()

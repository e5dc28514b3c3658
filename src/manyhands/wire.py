"""Trees as bytes, without pickle: a JSON header, then the raw buffers.

    | u32 length of header | header (JSON) | pad to 64 | buffer 0 | pad to 64 | buffer 1 | ...

What can travel: None, bool, int, float, str, bytes, list, tuple, dict with string keys, numpy
arrays and torch tensors. Reading builds arrays and plain data only, so a hostile message can at
worst be refused (`ConfigError`); it can never run code.
"""

from __future__ import annotations

import json
import re
import struct
import sys
from collections.abc import Iterator
from functools import lru_cache
from typing import Any

import numpy as np

from manyhands.errors import ConfigError
from manyhands.trees import Tree, is_tensor, to_host

_ALIGN = 64
_PADDING = bytes(_ALIGN)
_MAX_DEPTH = 64
_SMALL_HEADER = 4096  # bytes, up to which what was read is kept
_MAX_HEADER = 64 << 20  # bytes; what they describe may take twenty times that in memory
_MAX_INT_BITS = 8192  # Python refuses to read numbers of more than 4,300 digits
# WHY a list of our own: numpy's reader takes whole expressions (`f4,,` is a SyntaxError there).
_DTYPE = re.compile(r"[<>|=]?[biufc]\d{1,2}")
Buffer = bytes | bytearray | memoryview


class Packed:
    """An encoded tree: its header and its buffers, not yet copied anywhere."""

    def __init__(self, tree: Tree) -> None:
        self._buffers: list[memoryview] = []
        body = self._encode(tree, 0)
        header = json.dumps([body, [b.nbytes for b in self._buffers]]).encode()
        self._head = struct.pack("<I", len(header)) + header
        self.nbytes = _aligned(len(self._head)) + sum(_aligned(b.nbytes) for b in self._buffers)

    def write_into(self, target: memoryview) -> None:
        """One copy, straight to where it will be read."""
        target[: len(self._head)] = self._head
        at = _aligned(len(self._head))
        for buffer in self._buffers:
            target[at : at + buffer.nbytes] = buffer
            at += _aligned(buffer.nbytes)

    def pieces(self) -> Iterator[Buffer]:
        """The same bytes as they lie, one after the other, none of them copied."""
        yield self._head
        yield _PADDING[: -len(self._head) % _ALIGN]
        for buffer in self._buffers:
            yield buffer
            yield _PADDING[: -buffer.nbytes % _ALIGN]

    def to_bytes(self) -> bytearray:
        out = bytearray(self.nbytes)
        self.write_into(memoryview(out))
        return out

    def _encode(self, x: Any, depth: int) -> Any:
        if depth > _MAX_DEPTH:
            raise ConfigError(f"a message is nested deeper than {_MAX_DEPTH} levels")
        if type(x) is int and x.bit_length() > _MAX_INT_BITS:
            raise ConfigError(f"an integer of {x.bit_length()} bits cannot travel between workers")
        if x is None or isinstance(x, (bool, str)) or type(x) in (int, float):
            return x
        if isinstance(x, dict):
            return self._encode_dict(x, depth)
        if isinstance(x, (list, tuple)):
            items = [self._encode(v, depth + 1) for v in x]
            return items if isinstance(x, list) else {"@tuple": items}
        if isinstance(x, (bytes, bytearray, memoryview)):
            view = memoryview(x)
            self._buffers.append(
                memoryview(
                    view.tobytes() if view.nbytes == 0 or not view.c_contiguous else view
                ).cast("B")
            )
            return {"@bytes": len(self._buffers) - 1}
        return self._encode_array(x)

    def _encode_dict(self, x: dict[Any, Any], depth: int) -> Any:
        for key in x:
            if not isinstance(key, str) or key.startswith("@"):
                raise ConfigError(f"dict key {key!r} cannot travel; use string keys without '@'")
        return {k: self._encode(v, depth + 1) for k, v in x.items()}

    def _encode_array(self, x: Any) -> Any:
        kind = "numpy"
        if is_tensor(x):
            torch = sys.modules["torch"]
            kind = "bfloat16" if x.dtype is torch.bfloat16 else "torch"
            x = to_host(x)
            x = (x.view(torch.int16) if kind == "bfloat16" else x).numpy()
        elif isinstance(x, np.generic):
            x = np.asarray(x)
        if not isinstance(x, np.ndarray) or x.dtype.kind not in "biufc":
            what = f"an array of dtype {x.dtype}" if isinstance(x, np.ndarray) else type(x).__name__
            raise ConfigError(
                f"{what} cannot travel between workers; plain data, numpy arrays and torch "
                "tensors can"
            )
        flat = np.ascontiguousarray(x).reshape(-1).view(np.uint8)
        self._buffers.append(flat.data)
        return {"@array": len(self._buffers) - 1, "t": x.dtype.str, "s": list(x.shape), "k": kind}


def encode(tree: Tree) -> bytearray:
    return Packed(tree).to_bytes()


def decode(data: Buffer, *, copy: bool = True) -> Tree:
    """The tree in `data`. With `copy=False` its arrays and tensors are views on `data`, read-only
    where that is (a tensor cannot be, and is then copied)."""
    view = memoryview(data).cast("B")
    try:
        (length,) = struct.unpack_from("<I", view)
        if 4 + length > view.nbytes:
            raise ValueError("the header is longer than the message")
        if length > _MAX_HEADER:
            raise ValueError(f"a header of {length:,} bytes; at most {_MAX_HEADER:,} are read")
        header = bytes(view[4 : 4 + length])
        body, sizes = _known(header) if length <= _SMALL_HEADER else json.loads(header)
        buffers: list[memoryview | None] = []
        at = _aligned(4 + length)
        for size in sizes:
            if not isinstance(size, int) or size < 0 or at + size > view.nbytes:
                raise ValueError("a buffer lies outside the message")
            buffers.append(view[at : at + size])
            at += _aligned(size)
        return _decode(body, buffers, copy, 0)
    except (LookupError, TypeError, ValueError, ArithmeticError, RuntimeError, MemoryError,
            struct.error) as fault:  # fmt: skip
        raise ConfigError(f"a message could not be read: {fault}") from None


@lru_cache(maxsize=64)
def _known(header: bytes) -> Any:
    """Read once: weights and the like travel again and again under the same header, and reading it
    takes longer than copying a hundred kilobytes."""
    return json.loads(header)


@lru_cache(maxsize=64)
def _dtype(name: str) -> np.dtype[Any]:
    if not _DTYPE.fullmatch(name):
        raise ValueError(f"dtype {name!r} is refused")
    return np.dtype(name)


def _take(buffers: list[memoryview | None], index: Any) -> memoryview:
    """A buffer, once: a header that names it a thousand times would have it copied as often."""
    buffer: memoryview | None = buffers[index]
    if buffer is None:
        raise ValueError(f"buffer {index} is used twice")
    buffers[index] = None
    return buffer


def _decode(x: Any, buffers: list[memoryview | None], copy: bool, depth: int) -> Any:
    if depth > _MAX_DEPTH:
        raise ValueError("nested too deep")
    if isinstance(x, list):
        return [_decode(v, buffers, copy, depth + 1) for v in x]
    if not isinstance(x, dict):
        return x
    if "@tuple" in x:
        return tuple(_decode(v, buffers, copy, depth + 1) for v in x["@tuple"])
    if "@bytes" in x:
        return bytes(_take(buffers, x["@bytes"]))
    if "@array" in x:
        return _decode_array(x, _take(buffers, x["@array"]), copy)
    return {k: _decode(v, buffers, copy, depth + 1) for k, v in x.items()}


def _decode_array(x: dict[str, Any], buffer: memoryview, copy: bool) -> Any:
    array = np.frombuffer(buffer, dtype=_dtype(str(x["t"]))).reshape([int(n) for n in x["s"]])
    if x["k"] == "numpy":
        return array.copy() if copy else array
    torch = sys.modules.get("torch") or __import__("torch")
    # WHY: torch cannot hold read-only memory
    tensor = torch.from_numpy(array.copy() if copy or not array.flags.writeable else array)
    return tensor.view(torch.bfloat16) if x["k"] == "bfloat16" else tensor


def _aligned(n: int) -> int:
    return (n + _ALIGN - 1) // _ALIGN * _ALIGN

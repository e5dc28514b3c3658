"""Messages: everything that may travel comes back the same; hostile bytes are only refused."""

from __future__ import annotations

import contextlib
import copy
import json
import random
import struct
import sys
import threading
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from test_trees import arrays, same, tensors

from manyhands import wire
from manyhands.errors import ConfigError

keys = st.text(max_size=5).filter(lambda k: not k.startswith("@"))
plain = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.floats(),
    st.text(max_size=8),
    st.binary(max_size=80),
)
messages = st.recursive(
    st.one_of(plain, arrays, tensors),
    lambda inner: st.one_of(
        st.lists(inner, max_size=4),
        st.lists(inner, max_size=3).map(tuple),
        st.dictionaries(keys, inner, max_size=3),
    ),
    max_leaves=10,
)


@given(messages)
@settings(max_examples=200, deadline=None)
def test_round_trip(tree: Any) -> None:
    assert same(tree, wire.decode(wire.encode(tree)))


@given(messages)
@settings(max_examples=50, deadline=None)
def test_views_are_read_only_and_equal(tree: Any) -> None:
    data = bytes(wire.encode(tree))
    assert same(tree, wire.decode(data, copy=False))


def test_a_view_cannot_change_the_message() -> None:
    view = wire.decode(bytes(wire.encode(np.arange(4))), copy=False)
    with pytest.raises(ValueError, match="read-only"):
        view[0] = 1
    copy = wire.decode(wire.encode(np.arange(4)))
    copy[0] = 9  # and a copy is the reader's own


def test_packed_writes_straight_to_its_place() -> None:
    tree = {"a": np.arange(100), "b": [b"xyz", (1, 2)]}
    packed = wire.Packed(tree)
    target = bytearray(packed.nbytes + 64)
    packed.write_into(memoryview(target))
    assert bytes(target[: packed.nbytes]) == bytes(wire.encode(tree))
    assert same(tree, wire.decode(target))


def test_numpy_scalars_become_arrays_without_dimensions() -> None:
    got = wire.decode(wire.encode(np.float32(1.5)))
    assert got.shape == ()
    assert got.dtype == np.float32


def test_bytes_of_every_kind_come_back_as_bytes() -> None:
    given = [b"", bytearray(b"ab"), memoryview(b"abcdef")[::2], memoryview(np.zeros((0, 3)))]
    assert wire.decode(wire.encode(given)) == [b"", b"ab", b"ace", b""]


class Sneaky:
    def __reduce__(self) -> Any:
        return (sys.exit, (1,))


@pytest.mark.parametrize(
    "bad",
    [
        np.array([Sneaky()], dtype=object),
        np.array(["text"]),
        Sneaky(),
        threading.Lock(),
        lambda: None,
        {1: 2},
        {"@array": 0},
        {1, 2},
        1j,
        10**5000,
        torch.zeros(3).to(torch.float8_e4m3fn),
        torch.zeros(3, 3).to_sparse(),
        torch.zeros(3, device="meta"),
    ],
    ids=lambda x: type(x).__name__ + str(getattr(x, "dtype", "")),
)
def test_what_may_not_travel_is_refused(bad: Any) -> None:
    with pytest.raises(ConfigError):
        wire.encode({"deep": [bad]})


def test_nesting_has_an_end() -> None:
    tree: Any = 1
    for _ in range(100):
        tree = [tree]
    with pytest.raises(ConfigError, match="64"):
        wire.encode(tree)
    endless: list[Any] = []
    endless.append(endless)
    with pytest.raises(ConfigError, match="64"):
        wire.encode(endless)


# -- hostile bytes ---------------------------------------------------------------------------------


def message(body: Any, sizes: Any, payload: bytes = bytes(64)) -> bytes:
    """A message with any header at all."""
    header = json.dumps([body, sizes]).encode()
    head = struct.pack("<I", len(header)) + header
    return head + bytes(-len(head) % 64) + payload


def refused_or_read(data: bytes) -> None:
    """Reading either works or raises ConfigError; never anything else."""
    for own in (True, False):
        with contextlib.suppress(ConfigError):
            wire.decode(data, copy=own)


def array(dtype: Any = "<f4", shape: Any = (16,), kind: Any = "numpy", index: Any = 0) -> Any:
    return {"@array": index, "t": dtype, "s": shape, "k": kind}


inf = float("inf")
HOSTILE = {
    "nothing": b"",
    "three bytes": b"abc",
    "header longer than message": struct.pack("<I", 2**32 - 1) + b"[1,[]]",
    "not json": struct.pack("<I", 4) + b"\xff\xfe{[",
    "deep lists": struct.pack("<I", 200_000) + b"[" * 200_000,
    "deep dicts": struct.pack("<I", 500_000) + b'{"a":' * 100_000,
    "many digits": struct.pack("<I", 10_002) + b"[" + b"9" * 10_000 + b"]",
    "no list": struct.pack("<I", 1) + b"7",
    "size of 2**63": message(array(), [2**63]),
    "size of -1": message(array(), [-1]),
    "size is a float": message(array(), [64.0]),
    "size is infinite": message(array(), [inf]),
    "sizes is a word": message(array(), "word"),
    "sizes is null": message(array(), None),
    "no such buffer": message(array(index=7), [64]),
    "buffer by name": message(array(index="a"), [64]),
    "bytes nowhere": message({"@bytes": 3}, [64]),
    "bytes by null": message({"@bytes": None}, [64]),
    "tuple of nothing": message({"@tuple": None}, []),
    "shape of 2**63": message(array(shape=[2**63]), [64]),
    "shape of 2**62 and 0": message(array(shape=[2**62, 0]), [0]),
    "shape infinite": message(array(shape=[inf]), [64]),
    "shape nan": message(array(shape=[float("nan")]), [64]),
    "shape of words": message(array(shape=["x"]), [64]),
    "shape null": message(array(shape=None), [64]),
    "100 dimensions": message(array(shape=[1] * 100), [64]),
    "odd length": message(array(), [63]),
    "no kind": message({"@array": 0, "t": "<f4", "s": [16]}, [64]),
    "bfloat16 of a number": message(array(shape=[], kind="bfloat16"), [4]),
    "bfloat16 of odd bytes": message(array("|i1", [3], "bfloat16"), [3]),
    "big-endian tensor": message(array(">f4", kind="torch"), [64]),
    "tensor of long doubles": message(array("<f16", [4], "torch"), [64]),
    **{
        f"dtype {dtype!r}": message(array(dtype), [64])
        for dtype in ("O", "|O8", "f4,,", "f4,O", "(2,)f4", "V8", "S4", "U2", "M8[s]", "", "=",
                      "f4\0", "__import__('os')", {"names": ["a"], "formats": ["O"]}, ["f4"], 7)
    },
}  # fmt: skip


@pytest.mark.parametrize("name", sorted(HOSTILE))
def test_hostile_message_is_refused(name: str) -> None:
    with pytest.raises(ConfigError, match="could not be read"):
        wire.decode(HOSTILE[name])


def test_nested_deeper_than_we_write_is_refused() -> None:
    body: Any = 1
    for _ in range(70):
        body = {"@tuple": [body]}
    with pytest.raises(ConfigError, match="deep"):
        wire.decode(message(body, []))


SEEDS = [
    {"obs": np.arange(6, dtype=np.float32).reshape(2, 3), "n": 3, "s": "text"},
    [torch.arange(3).to(torch.bfloat16), torch.ones(2), b"abc", (1, None, True)],
    {"deep": {"er": [[], {}, np.zeros((0, 4)), -1.5]}},
]


@given(st.sampled_from(SEEDS), st.integers(0, 2**32), st.integers(1, 8))
@settings(max_examples=400, deadline=None)
def test_mutated_bytes(tree: Any, seed: int, changes: int) -> None:
    """Flip, cut, double and insert bytes of valid messages."""
    rng = random.Random(seed)
    data = bytearray(wire.encode(tree))
    for _ in range(changes):
        # The header is where harm could be done: aim there most of the time.
        at = rng.randrange(min(len(data), 200) if rng.random() < 0.8 else len(data)) if data else 0
        how = rng.randrange(4)
        if how == 0 and data:
            data[at] = rng.choice(b'0123456789-"[]{},.:@eE <>|?\x00\xff')
        elif how == 1:
            del data[at : at + rng.randrange(1, 20)]
        elif how == 2:
            data[at:at] = data[at : at + rng.randrange(1, 20)]
        else:
            data[at:at] = rng.randbytes(rng.randrange(1, 6))
    refused_or_read(bytes(data))


VALUES: list[Any] = [
    *(None, True, -1, 0, 1, 2**31, 2**63, 2**64, 1e308, inf),
    *("", "x", "<f8", "|O", "f4,,", "bfloat16", "torch"),
    *([], [0], [-1], {}, {"@tuple": []}, {"@bytes": 0}),
]


@given(st.sampled_from(SEEDS), st.integers(0, 2**32))
@settings(max_examples=400, deadline=None)
def test_mutated_headers(tree: Any, seed: int) -> None:
    """Valid JSON, wrong values: what an attacker who knows the format would send."""
    rng = random.Random(seed)
    data = bytes(wire.encode(tree))
    (length,) = struct.unpack_from("<I", data)
    header = json.loads(data[4 : 4 + length])
    payload = data[(4 + length + 63) // 64 * 64 :]
    for _ in range(rng.randrange(1, 4)):
        node = header
        while True:
            places = list(node) if isinstance(node, dict) else list(range(len(node)))
            if not places:
                break
            at = rng.choice(places)
            if isinstance(node[at], (dict, list)) and node[at] and rng.random() < 0.85:
                node = node[at]
                continue
            node[at] = copy.deepcopy(rng.choice(VALUES))
            break
    if isinstance(header, list) and len(header) == 2:
        refused_or_read(message(header[0], header[1], payload))


def test_random_bytes() -> None:
    rng = random.Random(0)
    for _ in range(2000):
        refused_or_read(rng.randbytes(rng.randrange(0, 120)))


def test_reading_claims_no_memory_for_what_is_not_there() -> None:
    """A few bytes that claim exabytes are refused before anything is allocated."""
    import tracemalloc

    tracemalloc.start()
    for name in ("size of 2**63", "shape of 2**63", "shape of 2**62 and 0"):
        with pytest.raises(ConfigError):
            wire.decode(HOSTILE[name])
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 1_000_000

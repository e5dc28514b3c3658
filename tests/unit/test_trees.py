"""Trees: taken apart and put together again, whatever they hold."""

from __future__ import annotations

from collections import namedtuple
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from manyhands.errors import ConfigError
from manyhands.trees import describe, flatten

Pair = namedtuple("Pair", ["left", "right"])

DTYPES = ["bool", "int8", "uint16", "int64", "float16", "float32", "float64", "complex64", ">i4"]
arrays = st.sampled_from(DTYPES).flatmap(
    lambda dtype: hnp.arrays(dtype, hnp.array_shapes(min_dims=0, max_dims=4, min_side=0))
)
TORCH = [torch.bool, torch.uint8, torch.int64, torch.float16, torch.bfloat16, torch.float64]
tensors = st.builds(
    lambda dtype, shape: (torch.rand(shape) * 9).to(dtype),
    st.sampled_from(TORCH),
    st.lists(st.integers(0, 3), max_size=3),
)
numbers = st.one_of(st.booleans(), st.integers(-(2**62), 2**62), st.floats())
trees = st.recursive(
    st.one_of(numbers, arrays, tensors),
    lambda inner: st.one_of(
        st.lists(inner, max_size=3),
        st.tuples(inner, inner),
        st.builds(Pair, inner, inner),
        st.dictionaries(st.text(max_size=4), inner, max_size=3),
    ),
    max_leaves=8,
)


def same(a: Any, b: Any) -> bool:
    """Equal in structure, type, dtype, shape and every bit (NaN equals NaN)."""
    if type(a) is not type(b):
        return False
    if isinstance(a, dict):
        return list(a) == list(b) and all(same(a[k], b[k]) for k in a)
    if isinstance(a, (list, tuple)):
        return len(a) == len(b) and all(same(x, y) for x, y in zip(a, b, strict=True))
    if isinstance(a, torch.Tensor):
        return a.dtype is b.dtype and a.shape == b.shape and torch.equal(a, b)
    if isinstance(a, np.ndarray):
        native = a.dtype.newbyteorder("=") == b.dtype.newbyteorder("=")
        return native and a.shape == b.shape and bool(np.array_equal(a, b, equal_nan=True))
    return bool(a == b or (a != a and b != b))


@given(trees)
@settings(max_examples=150, deadline=None)
def test_round_trip(tree: Any) -> None:
    leaves, rebuild = flatten(tree)
    assert same(tree, rebuild([leaf.restore(leaf.array) for leaf in leaves]))
    for leaf in leaves:
        assert leaf.array.flags.c_contiguous
        assert leaf.array.dtype.isnative


def test_leaves_come_in_one_order_and_dicts_keep_theirs() -> None:
    first, _ = flatten({"b": 1, "a": [2, {"z": 3, "y": 4}]})
    second, rebuild = flatten({"a": [2, {"y": 4, "z": 3}], "b": 1})
    assert [x.path for x in first] == [x.path for x in second] == ["a[0]", "a[1]/y", "a[1]/z", "b"]
    assert list(rebuild([0, 0, 0, 0])) == ["a", "b"]


def test_strided_and_transposed_arrays_travel_as_what_they_show() -> None:
    x = np.arange(24).reshape(4, 6)
    for view in (x.T, x[::2, ::3], x[::-1], torch.from_numpy(x).T):
        leaf = flatten(view)[0][0]
        assert np.array_equal(np.asarray(leaf.restore(leaf.array)), np.asarray(view))


def test_gradients_stay_behind() -> None:
    x = torch.ones(3, requires_grad=True) * 2
    leaf = flatten(x)[0][0]
    assert not leaf.restore(leaf.array).requires_grad


def test_read_only_memory_never_reaches_torch() -> None:
    leaf = flatten(torch.zeros(2))[0][0]
    frozen = np.zeros(2, np.float32)
    frozen.flags.writeable = False
    leaf.restore(frozen).add_(1)
    assert frozen.tolist() == [0, 0]


@pytest.mark.parametrize(
    "bad",
    [
        np.array([object()], dtype=object),
        np.array(["text"]),
        np.array(["2020-01-01"], dtype="datetime64[D]"),
        np.zeros(2, dtype=[("a", "f4")]),
        "text",
        b"bytes",
        None,
        {1, 2},
        2**70,
        torch.zeros(3).to(torch.float8_e4m3fn),
        torch.zeros(3, 3).to_sparse(),
        torch.zeros(3, device="meta"),
    ],
    ids=lambda x: str(getattr(x, "dtype", x))[:20] + str(getattr(x, "layout", ""))[:12],
)
def test_what_is_not_numbers_is_refused_by_its_path(bad: Any) -> None:
    with pytest.raises(ConfigError, match="obs/deep") as caught:
        flatten({"obs": {"deep": bad}})
    assert "can travel" in str(caught.value)


def test_conjugated_tensors_travel_as_what_they_show() -> None:
    x = torch.tensor([1 + 2j, 3 - 1j]).conj()
    leaf = flatten(x)[0][0]
    assert torch.equal(leaf.restore(leaf.array), x.resolve_conj())


def test_two_keys_that_read_alike_are_told_apart_or_refused() -> None:
    """Otherwise two workers could agree on paths and disagree on which value is which."""
    try:
        one, _ = flatten({1: 10, "1": 20})
        other, _ = flatten({"1": 20, 1: 10})
    except ConfigError:
        return
    assert [int(x.array) for x in one] == [int(x.array) for x in other]


def test_describe() -> None:
    text = describe([["obs", "float32", ["*", 4]], ["", "int64", []]])
    assert text == "{obs: float32[*, 4], value: int64[]}"

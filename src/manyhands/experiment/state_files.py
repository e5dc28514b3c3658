"""A nested state as two pieces of data: plain values as JSON, arrays by name for safetensors.

What a state may hold: None, bool, int, float, str, bytes, lists and dicts with text keys of these,
numpy arrays and torch tensors. Tuples come back as lists. Numbers come back to the bit: Python
writes floats so that they read back exactly, and integers of any length (the 128 bits of a
generator's state). Reading builds arrays and plain data only; nothing is ever unpickled.
"""

from __future__ import annotations

import json
import math
import sys
from typing import Any

import numpy as np

from manyhands.errors import ConfigError
from manyhands.trees import Array, is_tensor, to_host

_MAX_DEPTH = 64
_MARK = "@"  # keys that begin with it are ours


def pack(state: Any) -> tuple[str, dict[str, Array]]:
    """(JSON text, arrays by path)."""
    arrays: dict[str, Array] = {}
    plain = _pack(state, "", arrays, 0)
    return json.dumps(plain, ensure_ascii=False, allow_nan=False, separators=(",", ":")), arrays


def unpack(text: str, arrays: dict[str, Array], *, tensors: bool = True) -> Any:
    """What `pack` was given; ValueError when the two do not belong together.

    Without `tensors` they stay numpy arrays, and torch is not imported.
    """
    try:
        return _unpack(json.loads(text), arrays, 0, tensors)
    except (LookupError, TypeError, ArithmeticError, RecursionError, RuntimeError) as fault:
        raise ValueError(f"{type(fault).__name__}: {fault}") from None


def difference(expected: Any, found: Any, path: str = "") -> str:
    """Where a stored state does not fit the one that is to take its place; "" where it does.

    Compared are keys, lengths of lists, and shapes and dtypes of arrays; of text and numbers under
    a key "shapes" the values too.
    """
    if isinstance(expected, dict) and isinstance(found, dict):
        # "shapes" first: they have names that a person knows
        for key in sorted({*expected, *found}, key=lambda key: (key != "shapes", key)):
            where = f"{path}/{key}" if path else str(key)
            if key not in found:
                return f"{where} is expected, and is not there"
            if key not in expected:
                return f"{where} is there, and is not expected"
            if fault := difference(expected[key], found[key], where):
                return fault
        return ""
    if isinstance(expected, (list, tuple)) and isinstance(found, (list, tuple)):
        if "shapes/" in path and list(expected) != list(found):
            return f"{path} is {list(found)}, and {list(expected)} is expected"
        return ""
    wanted, got = _kind(expected), _kind(found)
    return "" if wanted == got else f"{path} is {got}, and {wanted} is expected"


def _kind(x: Any) -> str:
    if is_tensor(x):
        return f"{str(x.dtype).removeprefix('torch.')}{list(x.shape)}"
    if isinstance(x, np.ndarray):
        return f"{x.dtype}{list(x.shape)}"
    return "a number" if isinstance(x, (int, float)) else type(x).__name__


def _pack(x: Any, path: str, arrays: dict[str, Array], depth: int) -> Any:
    if depth > _MAX_DEPTH:
        raise ConfigError(f"a state is nested deeper than {_MAX_DEPTH} levels at {path}")
    if isinstance(x, np.generic):
        x = x.item()
    if x is None or isinstance(x, (bool, str)) or type(x) is int:
        return x
    if isinstance(x, float):
        return float(x) if math.isfinite(x) else {"@float": str(x)}
    if isinstance(x, dict):
        return {
            _key(k, path): _pack(v, f"{path}/{k}" if path else str(k), arrays, depth + 1)
            for k, v in x.items()
        }
    if isinstance(x, (list, tuple)):
        return [_pack(v, f"{path}/{i}", arrays, depth + 1) for i, v in enumerate(x)]
    return _pack_array(x, path, arrays)


def _key(key: Any, path: str) -> str:
    if not isinstance(key, str) or key.startswith(_MARK):
        raise ConfigError(f"the key {key!r} at {path or 'the top'} cannot be kept; use text keys")
    return key


def _pack_array(x: Any, path: str, arrays: dict[str, Array]) -> dict[str, str]:
    kind = "numpy"
    if is_tensor(x):
        torch = sys.modules["torch"]
        kind = "bfloat16" if x.dtype is torch.bfloat16 else "torch"
        x = to_host(x, path)
        x = (x.view(torch.int16) if kind == "bfloat16" else x).numpy()
    elif isinstance(x, (bytes, bytearray)):
        kind, x = "bytes", np.frombuffer(bytes(x), np.uint8)
    if not isinstance(x, np.ndarray) or x.dtype.kind not in "biuf":
        what = f"an array of dtype {x.dtype}" if isinstance(x, np.ndarray) else type(x).__name__
        raise ConfigError(f"{path} is {what}, which a checkpoint cannot hold")
    name = path or "value"
    while name in arrays:  # keys may have a slash of their own
        name += "'"
    arrays[name] = np.ascontiguousarray(x).reshape(x.shape)  # ascontiguousarray makes 0-d into 1-d
    return {"@array": name, "@kind": kind}


def _unpack(x: Any, arrays: dict[str, Array], depth: int, tensors: bool) -> Any:
    if depth > _MAX_DEPTH:
        raise ValueError(f"nested deeper than {_MAX_DEPTH} levels")
    if isinstance(x, list):
        return [_unpack(v, arrays, depth + 1, tensors) for v in x]
    if not isinstance(x, dict):
        return x
    if "@float" in x:
        return float(x["@float"])
    if "@array" not in x:
        return {k: _unpack(v, arrays, depth + 1, tensors) for k, v in x.items()}
    array, kind = arrays[x["@array"]], x["@kind"]
    if kind == "numpy":
        return array
    if kind == "bytes":
        return array.tobytes()
    if not tensors:
        return array
    torch = sys.modules.get("torch") or __import__("torch")
    tensor = torch.from_numpy(array)
    return tensor.view(torch.bfloat16) if kind == "bfloat16" else tensor

"""Checkpoints: complete or absent, whenever the machine stops.

    checkpoints/000000012288/        the environment step, twelve digits
        state.safetensors            every array, by its path in the state
        state.json                   the plain values, and where the arrays go
        manifest.json                format, version, SHA-256 and size of the two, facts of the run

All files are written into a folder `.tmp-...` and forced to the disk, then the folder is renamed,
then its parent is forced to the disk. Removal goes the other way round. So a folder with digits for
a name is whole; what is called `.tmp-...` is nobody's and is swept when the run is opened again.

Reading trusts nothing: sizes are bounded, every byte is covered by a checksum, and the content is
safetensors and JSON, which cannot run code.

A state (`pack`, `unpack`) may hold None, bool, int, float, str, bytes, lists and dicts with text
keys of these,
numpy arrays and torch tensors. Tuples come back as lists. Numbers come back to the bit: Python
writes floats so that they read back exactly, and integers of any length (the 128 bits of a
generator's state). Reading builds arrays and plain data only; nothing is ever unpickled.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import math
import os
import re
import shutil
import sys
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from manyhands import __version__, files, wire
from manyhands.errors import ConfigError, WorkerError
from manyhands.trees import Array, is_tensor, to_host

FORMAT = 1
FOLDER = "checkpoints"
ARRAYS, STATE, MANIFEST = "state.safetensors", "state.json", "manifest.json"
KEPT = 2  # newest checkpoints that stay, besides the best
MAX_JSON, MAX_MANIFEST = 64 << 20, 64 << 10  # bytes; JSON takes twenty times that in memory

_NAME = re.compile(r"\d{12,}")
_TEMPORARY, _DAMAGED = ".tmp-", "damaged-"


class Damaged(Exception):
    """A checkpoint that cannot be used; the text names the file and the reason."""


@dataclass(frozen=True)
class Checkpoint:
    """A whole checkpoint, read."""

    path: Path
    facts: dict[str, Any]  # env_steps, update, mean_return, score, created, manyhands
    state: Any = field(repr=False)


def save(
    run_dir: str | os.PathLike[str],
    state: Any,
    *,
    env_steps: int,
    update: int = 0,
    mean_return: float | None = None,
    score: float | None = None,
) -> Path:
    """Write a checkpoint and remove those that it makes superfluous.

    The best, by `score`, stays; None is not compared (too few episodes to say).

    OSError when the disk refuses: the earlier checkpoints are then as they were, and nothing of
    this one is left.
    """
    from safetensors.numpy import save as to_safetensors

    text, arrays = pack(state)
    files = {ARRAYS: bytes(to_safetensors(arrays)), STATE: text.encode()}
    manifest = {
        "format": FORMAT,
        "manyhands": __version__,
        "env_steps": env_steps,
        "update": update,
        "mean_return": mean_return,
        "score": score,
        "created": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "files": {name: _print_of(data) for name, data in files.items()},
    }
    files[MANIFEST] = _manifest_text(manifest)
    parent = Path(run_dir, FOLDER)
    parent.mkdir(exist_ok=True)
    target = parent / f"{env_steps:012d}"
    temporary = parent / f"{_TEMPORARY}{os.getpid()}-{env_steps}"
    try:
        shutil.rmtree(temporary, ignore_errors=True)
        temporary.mkdir()
        for name, data in files.items():
            _write(temporary / name, data)
        _force(temporary)
        if target.exists():  # the same step again: the old one makes room, then goes
            os.rename(target, parent / f"{_TEMPORARY}{os.getpid()}-{env_steps}-old")
        os.rename(temporary, target)
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise
    # WHY not retried when it fails: after a failed fsync the kernel calls the pages clean.
    _force(parent)
    _prune(parent)
    return target


def newest(
    run_dir: str | os.PathLike[str], *, tensors: bool = True
) -> tuple[Checkpoint, list[tuple[Path, str]]]:
    """The newest checkpoint that is whole, and (folder, reason) of each newer one that is not.

    ConfigError when there is none: a run never starts from scratch unasked. For `tensors` see
    `state_files.unpack`.
    """
    damaged: list[tuple[Path, str]] = []
    for path in reversed(_folders(Path(run_dir, FOLDER))):
        try:
            return load(path, tensors=tensors), damaged
        except Damaged as fault:
            damaged.append((path, str(fault)))
    if not damaged:
        raise ConfigError(f"{run_dir} holds no checkpoint: there is nothing to resume from")
    reasons = "\n".join(f"  {reason}" for _, reason in damaged)
    raise ConfigError(
        f"no checkpoint of {run_dir} can be used:\n{reasons}\nThe run is not started from scratch; "
        f"to do that, type: manyhands train --config {Path(run_dir, 'config.toml')}"
    )


def load(path: str | os.PathLike[str], *, tensors: bool = True) -> Checkpoint:
    """Read one checkpoint; Damaged names what is wrong, ConfigError another format."""
    from safetensors import SafetensorError
    from safetensors.numpy import load as from_safetensors

    path = Path(path)
    manifest = _manifest(path)
    data = {name: _checked(path / name, manifest) for name in (ARRAYS, STATE)}
    try:
        arrays: dict[str, Array] = from_safetensors(data[ARRAYS])
    except (SafetensorError, ValueError, KeyError) as fault:
        raise Damaged(f"{path / ARRAYS} is not safetensors ({fault})") from None
    try:
        state = unpack(data[STATE].decode(), arrays, tensors=tensors)
    except ValueError as fault:
        raise Damaged(f"{path / STATE} is not a state ({fault})") from None
    return Checkpoint(path, {k: v for k, v in manifest.items() if k != "files"}, state)


def load_on_all(group: Any, path: str) -> dict[str, Any]:
    """The state on all workers of a group (None: this one alone); only the main worker need see
    the disk. All call it together."""
    data = np.zeros(0, np.uint8)
    if group is None or group.is_main:
        try:
            data = np.frombuffer(wire.encode(load(path).state), np.uint8)
        except Damaged as fault:  # it was whole a moment ago
            raise WorkerError(str(fault), rank=0) from None
    if group is not None:
        data = group.all_gather({"state": data})["state"]
    state: dict[str, Any] = wire.decode(data.data)
    return state


def set_aside(path: Path) -> Path:
    """Rename a damaged checkpoint, so that it is kept but never taken for a good one again."""
    aside = path.with_name(f"{_DAMAGED}{path.name}")
    shutil.rmtree(aside, ignore_errors=True)
    os.rename(path, aside)
    return aside


def sweep(run_dir: str | os.PathLike[str]) -> int:
    """Remove what writers that were killed have left; how many folders that were."""
    left = [p for p in _entries(Path(run_dir, FOLDER)) if p.name.startswith(_TEMPORARY)]
    for path in left:
        shutil.rmtree(path, ignore_errors=True)
    return len(left)


def _prune(parent: Path) -> None:
    """Keep the last two and the best; also sweeps what an exchanged folder has left."""
    folders = _folders(parent)
    scores = {path: _score(path) for path in folders}
    known = [path for path in folders if scores[path] is not None]
    best = max(known, key=lambda path: (scores[path], path.name), default=None)
    for path in folders[:-KEPT]:
        if path != best:
            gone = parent / f"{_TEMPORARY}{os.getpid()}-{path.name}-gone"
            os.rename(path, gone)  # first the name: half a removal must not look like a checkpoint
            shutil.rmtree(gone, ignore_errors=True)
    for path in _entries(parent):
        if path.name.startswith(f"{_TEMPORARY}{os.getpid()}-") and path.name.endswith("-old"):
            shutil.rmtree(path, ignore_errors=True)


def _score(path: Path) -> float | None:
    with contextlib.suppress(Damaged, ConfigError):
        score: float | None = _manifest(path)["score"]
        return score
    return None


def _folders(parent: Path) -> list[Path]:
    """Checkpoints by step, whatever the clock said when they were made."""
    found = [p for p in _entries(parent) if _NAME.fullmatch(p.name) and p.is_dir()]
    return sorted(found, key=lambda path: int(path.name))


def _entries(parent: Path) -> Iterator[Path]:
    with contextlib.suppress(FileNotFoundError, NotADirectoryError):
        yield from sorted(parent.iterdir())


# -- reading ---------------------------------------------------------------------------------------


def _manifest(path: Path) -> dict[str, Any]:
    file = path / MANIFEST
    data = _read(file, MAX_MANIFEST)
    try:
        found = json.loads(data)
        if found["format"] != FORMAT:
            raise ConfigError(
                f"{path} is a checkpoint of format {found['format']}, written by manyhands "
                f"{found.get('manyhands')}; this is manyhands {__version__}, which reads format "
                f"{FORMAT}: resume with the version that wrote it"
            )
        for name in (ARRAYS, STATE):
            written = found["files"][name]
            if type(written["size"]) is not int or set(written) != {"sha256", "size"}:
                raise ValueError(f"size of {name}")
        if type(found["env_steps"]) is not int or "score" not in found:
            raise ValueError("facts")
        # Every byte counts: what is not exactly as it was written has been changed.
        whole = data == _manifest_text({k: v for k, v in found.items() if k != "sha256"})
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError) as fault:
        raise Damaged(f"{file} is not a manifest ({type(fault).__name__})") from None
    if not whole:
        raise Damaged(f"{file} has been changed: its checksum does not match")
    return dict(found)


def _checked(file: Path, manifest: Mapping[str, Any]) -> bytes:
    """The bytes of a file, once they are those that were written."""
    written = manifest["files"][file.name]
    data = _read(file, written["size"] if file.name == ARRAYS else min(written["size"], MAX_JSON))
    if len(data) != written["size"]:
        raise Damaged(f"{file} has {len(data):,} bytes, but {written['size']:,} were written")
    if _print_of(data) != written:
        raise Damaged(f"{file} has been changed: its SHA-256 is not the one in the manifest")
    return data


def _read(file: Path, limit: int) -> bytes:
    try:
        return files.read(file, limit, links=False)
    except files.Unreadable as fault:
        raise Damaged(str(fault)) from None


# -- writing ---------------------------------------------------------------------------------------


def _manifest_text(manifest: Mapping[str, Any]) -> bytes:
    """The manifest with its own checksum; the same facts always give the same bytes."""
    facts = json.dumps(manifest, sort_keys=True)
    signed = {**manifest, "sha256": hashlib.sha256(facts.encode()).hexdigest()}
    return (json.dumps(signed, indent=1, sort_keys=True) + "\n").encode()


def _print_of(data: bytes) -> dict[str, Any]:
    return {"sha256": hashlib.sha256(data).hexdigest(), "size": len(data)}


def _write(path: Path, data: bytes) -> None:
    with open(path, "xb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())


def _force(folder: Path) -> None:
    """The names in a folder to the disk."""
    fd = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


# -- a state as JSON and arrays --------------------------------------------------------------------


_MAX_DEPTH = 64
_MARK = "@"  # keys that begin with it are ours


def pack(state: Any) -> tuple[str, dict[str, Array]]:
    """(JSON text, arrays by path)."""
    arrays: dict[str, Array] = {}
    plain = _pack(state, "", arrays, 0)
    return json.dumps(plain, ensure_ascii=False, allow_nan=False, separators=(",", ":")), arrays


def unpack(text: str, arrays: dict[str, Array], *, tensors: bool = True) -> Any:
    """What `pack` was given; ValueError when the two do not belong together. Takes the arrays out.

    Without `tensors` they stay numpy arrays, and torch is not imported.
    """
    try:
        return _unpack(json.loads(text), arrays, 0, tensors)
    except (LookupError, TypeError, ArithmeticError, RuntimeError) as fault:
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
    # Each once, as it was written: a few bytes of text that name a large one as bytes, a million
    # times over, would have it copied as often.
    array, kind = arrays.pop(x["@array"]), x["@kind"]
    if kind == "numpy":
        return array
    if kind == "bytes":
        return array.tobytes()
    if not tensors:
        return array
    torch = sys.modules.get("torch") or __import__("torch")
    tensor = torch.from_numpy(array)
    return tensor.view(torch.bfloat16) if kind == "bfloat16" else tensor

"""A policy as one file for other programs: ONNX, or TorchScript for C++ and bare torch.

    raw observation ── normaliser ── encoder ── hidden layers ── likeliest action ── to the bounds
              state ──────────────────────────────── LSTM ────── next state      (with a memory)

Everything that `Policy.act` does is in the graph, so that nobody has to remember the statistics of
the observations. The number of rows stays free.
"""

from __future__ import annotations

import copy
import importlib.util
import logging
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor, nn

from manyhands.envs.spaces import zeros
from manyhands.errors import ConfigError, needs
from manyhands.networks.build import RecurrentActorCritic

if TYPE_CHECKING:
    from manyhands.policy import Policy

_CLIP = 10.0  # as RunningStats.normalise
_EXAMPLE_ROWS = 2  # 1 would be taken for a constant
_FIXED_ROWS = (
    "the network cannot be exported for any number of rows: it takes the number that it is shown "
    "for a constant; in forward, write -1 or x.shape[0] where it says len(x) or int(...)"
)


def export(policy: Policy, path: Path) -> Path:
    """Write `path`, whole or not at all; its suffix says in which form."""
    writers = {".onnx": _write_onnx, ".pt": _write_torchscript}
    if path.suffix not in writers:
        raise ConfigError(f"export to {path}: give a name that ends in .onnx or in .pt")
    if not path.absolute().parent.is_dir():
        raise ConfigError(f"export to {path}: there is no folder {path.absolute().parent}")
    graph = DeterministicPolicy(policy).eval()
    beside = path.with_name(f".{path.name}.tmp")
    try:
        with _quiet():
            writers[path.suffix](graph, graph.examples(), beside)
        beside.replace(path)
    finally:
        beside.unlink(missing_ok=True)
    return path


@contextmanager
def _quiet() -> Iterator[None]:
    """Both exporters speak of their own future and of packages that are not needed here."""
    logger = logging.getLogger("torch.onnx")
    before = logger.level
    logger.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logger.setLevel(before)


class DeterministicPolicy(nn.Module):
    """`Policy.act_batch` in torch alone: one tensor for each part of the observation."""

    low: Tensor
    high: Tensor
    middle: Tensor
    reach: Tensor

    def __init__(self, policy: Policy) -> None:
        super().__init__()
        self._space = policy.observation_space
        self.model = copy.deepcopy(policy.model).requires_grad_(False)
        self.several = type(self._space).__name__ == "Dict"
        self.keys = sorted(self._space) if self.several else ["observation"]
        self.state_size: int = getattr(self.model, "state_size", 0)
        self.inputs = [*self.keys, "state"] if self.state_size else list(self.keys)
        self.outputs = ["action", "next_state"] if self.state_size else ["action"]
        self.normalised: list[int] = []  # which of the parts
        for name, stats in policy.normaliser.parts.items():
            part = self.keys.index(name) if name else 0
            scale = 1.0 / np.sqrt(stats.variance + stats.epsilon)
            self._keep(f"offset{part}", np.asarray(stats.mean, np.float32))
            self._keep(f"scale{part}", np.asarray(scale, np.float32))
            self.normalised.append(part)
        space = policy.action_space
        self.bounds = policy.box_actions if type(space).__name__ == "Box" else "none"
        self.dtype = torch.from_numpy(np.zeros(1, space.dtype)).dtype
        if self.bounds in ("clip", "scale"):
            low, high = space.low, space.high
            self._keep("low", low)
            self._keep("high", high)
        if self.bounds == "scale":
            self._keep("middle", (high + low) / 2)
            self._keep("reach", (high - low) / 2)

    def forward(self, *parts: Tensor) -> Tensor | tuple[Tensor, Tensor]:
        seen = self._seen(parts[: len(self.keys)])
        if not isinstance(self.model, RecurrentActorCritic):
            return self._bounded(self.model.head.mode(self.model.policy(seen)))
        parameters, _, after = self.model.step(seen, parts[-1])
        return self._bounded(self.model.head.mode(parameters)), after

    def _seen(self, parts: tuple[Tensor, ...]) -> Any:
        shown = list(parts)
        for i in self.normalised:
            offset, scale = getattr(self, f"offset{i}"), getattr(self, f"scale{i}")
            shown[i] = ((parts[i].to(torch.float32) - offset) * scale).clamp(-_CLIP, _CLIP)
        return dict(zip(self.keys, shown, strict=True)) if self.several else shown[0]

    def examples(self, rows: int = _EXAMPLE_ROWS) -> tuple[Tensor, ...]:
        """Observations that show the exporter shapes and dtypes."""
        room = zeros(self._space, (rows,))
        arrays = [room[key] for key in self.keys] if isinstance(room, dict) else [room]
        if self.state_size:
            arrays.append(np.zeros((rows, self.state_size), np.float32))
        return tuple(torch.from_numpy(array) for array in arrays)

    def _bounded(self, actions: Tensor) -> Tensor:
        if self.bounds == "scale":
            actions = self.middle + self.reach * actions.clamp(-1.0, 1.0)
        if self.bounds in ("clip", "scale"):
            actions = torch.minimum(torch.maximum(actions, self.low), self.high)
        return actions.to(self.dtype)

    def _keep(self, name: str, values: Any) -> None:
        self.register_buffer(name, torch.from_numpy(np.array(values)))


def _write_torchscript(graph: DeterministicPolicy, examples: tuple[Tensor, ...], to: Path) -> None:
    with torch.no_grad():
        traced = torch.jit.trace(graph, examples)  # type: ignore[no-untyped-call]
        more = graph.examples(_EXAMPLE_ROWS + 1)
        with suppress(RuntimeError):  # whatever torch has to say of shapes that do not fit
            if _equal(traced(*more), graph(*more)):
                traced.save(str(to))
                return
    raise ConfigError(_FIXED_ROWS)


def _equal(one: Any, other: Any) -> bool:
    pairs = zip(one, other, strict=True) if isinstance(one, tuple) else [(one, other)]
    return all(torch.equal(a, b) for a, b in pairs)


def _write_onnx(graph: DeterministicPolicy, examples: tuple[Tensor, ...], to: Path) -> None:
    for package in ("onnx", "onnxscript"):
        if importlib.util.find_spec(package) is None:
            raise needs(package, "onnx")
    rows = torch.export.Dim("rows")
    shapes = (tuple({0: rows} for _ in examples),)
    try:
        # Not left to torch.onnx.export, which goes on, in silence, with a constant number of rows.
        exported = torch.export.export(graph, examples, dynamic_shapes=shapes, strict=False)
    except Exception as error:  # a network of the user's own may do anything
        what = f"{type(error).__name__}: {error}".splitlines()[0]
        fixed = "Constraints violated" in str(error)
        raise ConfigError(
            _FIXED_ROWS if fixed else f"the network cannot be exported: {what}"
        ) from error
    program = torch.onnx.export(
        exported,
        input_names=graph.inputs,
        output_names=graph.outputs,
        dynamo=True,
        verbose=False,
    )
    assert program is not None  # with dynamo=True it always gives one
    program.save(str(to), external_data=False)  # one file, weights inside

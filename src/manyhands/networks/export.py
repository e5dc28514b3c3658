"""A policy as one file for other programs: ONNX, or TorchScript for C++ and bare torch.

    raw observation ── normaliser ── encoder ── hidden layers ── likeliest action ── to the bounds

Everything that `Policy.act` does is in the graph, so that nobody has to remember the statistics of
the observations. The number of rows stays free.
"""

from __future__ import annotations

import copy
import importlib.util
import logging
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor, nn

from manyhands.envs.spaces import zeros
from manyhands.errors import ConfigError, needs
from manyhands.networks.build import DictEncoder, Encoder, OneHotEncoder, VectorEncoder
from manyhands.networks.own import OwnEncoder

if TYPE_CHECKING:
    from manyhands.policy import Policy

_CLIP = 10.0  # as RunningStats.normalise
_EXAMPLE_ROWS = 2  # 1 would be taken for a constant


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

    offset: Tensor
    scale: Tensor
    low: Tensor
    high: Tensor
    middle: Tensor
    reach: Tensor

    def __init__(self, policy: Policy) -> None:
        super().__init__()
        self._space = policy.observation_space
        model = copy.deepcopy(policy.model).requires_grad_(False)
        self.encoder: Any = model.policy_encoder
        self.trunk, self.out, self.head = model.policy_trunk, model.policy_out, model.head
        self.keys = getattr(self.encoder, "keys", []) or ["observation"]
        stats = policy.normaliser.obs
        self.normalised = stats is not None
        if stats is not None:
            scale = 1.0 / np.sqrt(stats.variance + stats.epsilon)
            self._keep("offset", np.asarray(stats.mean, np.float32))
            self._keep("scale", np.asarray(scale, np.float32))
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

    def forward(self, *parts: Tensor) -> Tensor:
        if self.normalised:
            seen = (parts[0].to(torch.float32) - self.offset) * self.scale
            parts = (seen.clamp(-_CLIP, _CLIP),)
        features = self.trunk(_encoded(self.encoder, parts))
        return self._bounded(self._mode(self.out(features)))

    def examples(self) -> tuple[Tensor, ...]:
        """Observations that show the exporter shapes and dtypes."""
        room = zeros(self._space, (_EXAMPLE_ROWS,))
        arrays = [room[key] for key in self.keys] if isinstance(room, dict) else [room]
        return tuple(torch.from_numpy(array) for array in arrays)

    def _mode(self, outputs: Tensor) -> Tensor:
        if self.bounds == "none":
            return self.head.mode(outputs)
        return outputs.reshape(-1, *self.head.action_shape)  # the means: deviations are not asked

    def _bounded(self, actions: Tensor) -> Tensor:
        if self.bounds == "scale":
            actions = self.middle + self.reach * actions.clamp(-1.0, 1.0)
        if self.bounds in ("clip", "scale"):
            actions = torch.minimum(torch.maximum(actions, self.low), self.high)
        return actions.to(self.dtype)

    def _keep(self, name: str, values: Any) -> None:
        self.register_buffer(name, torch.from_numpy(np.array(values)))


def _encoded(encoder: Encoder | OwnEncoder, parts: tuple[Tensor, ...]) -> Tensor:
    """What `encoder(observation)` gives.

    WHY again: the encoders ask for len(x), which an exporter would write down as a constant; -1
    leaves the number of rows open.
    """
    if isinstance(encoder, DictEncoder):
        pairs = zip(encoder.parts, parts, strict=True)
        return torch.cat([_encoded(part, (x,)) for part, x in pairs], -1)  # type: ignore[arg-type]
    if isinstance(encoder, OwnEncoder) and encoder.keys:
        together: Tensor = encoder(dict(zip(encoder.keys, parts, strict=True)))
        return together
    (x,) = parts
    if isinstance(encoder, VectorEncoder):
        return x.to(torch.float32).reshape(-1, encoder.features)
    if isinstance(encoder, OneHotEncoder):
        columns = x.reshape(-1, len(encoder.sizes)).unbind(-1)
        codes = [
            (column.unsqueeze(-1) - start) == torch.arange(n)
            for column, n, start in zip(columns, encoder.sizes, encoder.starts, strict=True)
        ]
        return torch.cat(codes, -1).to(torch.float32)
    features: Tensor = encoder(x)
    return features


def _write_torchscript(graph: DeterministicPolicy, examples: tuple[Tensor, ...], to: Path) -> None:
    with torch.no_grad():
        torch.jit.trace(graph, examples).save(str(to))  # type: ignore[no-untyped-call]


def _write_onnx(graph: DeterministicPolicy, examples: tuple[Tensor, ...], to: Path) -> None:
    for package in ("onnx", "onnxscript"):
        if importlib.util.find_spec(package) is None:
            raise needs(package, "onnx")
    rows = torch.export.Dim("rows")
    program = torch.onnx.export(
        graph,
        examples,
        input_names=list(graph.keys),
        output_names=["action"],
        dynamic_shapes=(tuple({0: rows} for _ in examples),),
        dynamo=True,
        verbose=False,
    )
    assert program is not None  # with dynamo=True it always gives one
    program.save(str(to), external_data=False)  # one file, weights inside

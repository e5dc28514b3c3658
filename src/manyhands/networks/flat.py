"""All trainable parameters of a module as views on one flat tensor, and their gradients on another.

    data  [ p_1 | p_2 | … ]      parameter.data  is a view, in the order of named_parameters()
    grad  [ g_1 | g_2 | … ]      parameter.grad  is a view, so backward() accumulates into it

WHY: a small network has a dozen tensors, and doing anything to each (clip, average over workers,
broadcast, Adam) costs a dozen dispatches where one does. Frozen parameters are left alone.

Whatever changes parameters in place keeps the views: optimisers, load_state_dict, copy_. What
gives a parameter other memory (`module.to(device)`, `parameter.data = …`, a backward with
create_graph) breaks them; `check()` says so. Move the module first, then make FlatParameters.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from manyhands.errors import ConfigError
from manyhands.trees import Array


class FlatParameters:
    """One flat float32 tensor behind all trainable parameters of `model`, on its device."""

    data: Tensor  # [size]
    grad: Tensor  # [size]

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self._parameters = _trainable(model)
        parameters = list(self._parameters.values())
        self._shapes = [parameter.shape for parameter in parameters]
        self._sizes = [parameter.numel() for parameter in parameters]
        self.data = torch.cat([parameter.detach().reshape(-1) for parameter in parameters])
        self.grad = torch.zeros_like(self.data)
        for parameter, view in zip(parameters, self._split(self.data), strict=True):
            parameter.data = view
        # Kept for good: a parameter's `.grad` is compared with them by identity.
        self._gradients = self._split(self.grad)
        self._attach_gradients()

    @property
    def size(self) -> int:
        """The number of parameters."""
        return self.data.numel()

    def views(self) -> dict[str, Array]:
        """Numpy views of the parameters by name, in flat order; on the CPU only."""
        return self._named(self._split(self.data))

    def grad_views(self) -> dict[str, Array]:
        """Numpy views of the gradients by name, in flat order; on the CPU only."""
        return self._named(self._gradients)

    def gradients(self) -> dict[str, Tensor]:
        """Views of the gradient by name, in flat order."""
        return dict(zip(self._parameters, self._gradients, strict=True))

    def zero_grad(self) -> None:
        """Zero the gradient, and take back a `.grad` that an optimiser has set to None."""
        self.grad.zero_()
        self._attach_gradients()

    def check(self) -> None:
        """Raise ConfigError if any parameter or its gradient no longer lies in the flat tensors."""
        # By name from the model: some moves give it new parameters instead of new memory.
        now = dict(self.model.named_parameters())
        parts = zip(self._parameters, self._split(self.data), self._gradients, strict=True)
        for name, view, gradient in parts:
            parameter = now.get(name)
            if parameter is None or not _same_memory(parameter, view):
                raise ConfigError(
                    f"parameter {name!r} no longer lies in the flat parameters on {view.device} "
                    "(the module was moved, or the parameter or its .data replaced); make "
                    "FlatParameters after that, or change parameters in place"
                )
            if parameter.grad is not gradient:
                raise ConfigError(
                    f"the gradient of {name!r} was replaced (zero_grad of an optimiser, or a "
                    "backward with create_graph); call FlatParameters.zero_grad() instead"
                )

    def _attach_gradients(self) -> None:
        for parameter, gradient in zip(self._parameters.values(), self._gradients, strict=True):
            if parameter.grad is not gradient:
                parameter.grad = gradient

    def _split(self, flat: Tensor) -> list[Tensor]:
        pieces = torch.split_with_sizes(flat, self._sizes)
        return [piece.view(shape) for piece, shape in zip(pieces, self._shapes, strict=True)]

    def _named(self, views: list[Tensor]) -> dict[str, Array]:
        return {name: _numpy(view) for name, view in zip(self._parameters, views, strict=True)}


def _trainable(model: nn.Module) -> dict[str, nn.Parameter]:
    parameters = {name: p for name, p in model.named_parameters() if p.requires_grad}
    if not parameters:
        raise ConfigError(f"{type(model).__name__} has no trainable parameters to lay out flat")
    for name, parameter in parameters.items():
        if parameter.dtype != torch.float32:
            raise ConfigError(
                f"flat parameters are float32, but {name!r} is {parameter.dtype}; "
                "convert the module first: model.float()"
            )
    devices = sorted({str(parameter.device) for parameter in parameters.values()})
    if len(devices) > 1:
        raise ConfigError(
            f"the parameters lie on several devices ({', '.join(devices)}); "
            "move the module to one first: model.to(device)"
        )
    return parameters


def _same_memory(a: Tensor, b: Tensor) -> bool:
    return (
        a.data_ptr() == b.data_ptr()
        and (a.device, a.dtype) == (b.device, b.dtype)
        and (a.shape, a.stride()) == (b.shape, b.stride())
    )


def _numpy(x: Tensor) -> Array:
    if x.device.type != "cpu":
        raise ConfigError(f"no numpy view of memory on {x.device}; use the tensor")
    array: Array = x.numpy()
    return array

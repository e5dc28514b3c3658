"""What every Python that a test starts runs first: `import torch` leaves out what few need.

At its import torch registers, one by one and in Python, kernels for tensors that hold no data. They
are a quarter of what the import costs, and tests start hundreds of processes that import torch.
Only its compiler asks for them: they are registered when that is imported.
"""

import importlib
import sys
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

KERNELS, COMPILER = "torch._meta_registrations", "torch._dynamo"


class Later:
    """Finds an empty module in place of the kernels, until somebody looks for the compiler."""

    @staticmethod
    def find_spec(name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        if name == COMPILER:
            sys.meta_path.remove(Later)  # type: ignore[arg-type]
            sys.modules.pop(KERNELS, None)
            importlib.import_module(KERNELS)
        return ModuleSpec(name, Later) if name == KERNELS else None  # type: ignore[arg-type]

    @staticmethod
    def create_module(spec: ModuleSpec) -> None:
        return None

    @staticmethod
    def exec_module(module: ModuleType) -> None:
        import torch

        if hasattr(torch._C, "_set_generator_metaclass"):  # without it there is no torch.Generator
            torch._C._set_generator_metaclass(torch._opaque_base.OpaqueBaseMeta)


sys.meta_path.insert(0, Later)  # type: ignore[arg-type]

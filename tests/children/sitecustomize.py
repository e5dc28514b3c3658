"""What every Python that a test starts runs first: torch without what only its compiler needs.

At its import torch registers, one by one and in Python, kernels for tensors that hold no data. They
are a quarter of what the import costs, and tests start hundreds of processes that import torch.
Only torch.compile and torch.export ask for them, and those are tested in pytest's own process.
"""

import sys
import types

sys.modules["torch._meta_registrations"] = types.ModuleType("torch._meta_registrations")

"""A three-worker program that ends well, in which the last worker needs a moment after the end."""

import atexit
import os
import time


def leave() -> None:
    """Runs after MPI_Finalize: what is registered before `Parallel()` runs last."""
    time.sleep(0.2 * int(os.environ.get("PMI_RANK", "0")))
    print("left well", flush=True)


atexit.register(leave)

from manyhands import Parallel  # noqa: E402

par = Parallel()
assert par.sum(1) == par.size

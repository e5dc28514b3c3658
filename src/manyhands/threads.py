"""How many threads BLAS, OpenMP and torch may use: one a worker, unless the user has chosen.

A process that is about to start reads it from variables, before it loads numpy and torch. One that
runs already, as on the inline engine from Python, is limited while a run lasts.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

VARIABLES = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS", "NUMEXPR_NUM_THREADS")


def chosen_by_user() -> bool:
    """Whether the user has said how many, for this process and those that it starts."""
    return "OMP_NUM_THREADS" in os.environ


@contextmanager
def one_thread() -> Iterator[None]:
    """One in this process; then everything as it was before.

    WHY: the products of small networks take less time than the threads need to meet; on two busy
    cores 12,288 steps of PPO took ten times the processor time.
    """
    if chosen_by_user():
        yield
        return
    import numpy  # noqa: F401 (its BLAS must be there to be told)
    import torch
    from threadpoolctl import ThreadpoolController

    before, known = torch.get_num_threads(), ThreadpoolController()
    others = {library.filepath for library in known.lib_controllers}
    unset = [name for name in VARIABLES if name not in os.environ]
    os.environ.update(dict.fromkeys(unset, "1"))  # for libraries that an environment loads
    try:
        with known.limit(limits=1):
            torch.set_num_threads(1)
            yield
    finally:
        for name in unset:
            del os.environ[name]
        torch.set_num_threads(before)
        for library in ThreadpoolController().lib_controllers:
            if library.filepath not in others:  # as it would have begun, had we not been there
                library.set_num_threads(before)


def one_thread_here() -> None:
    """OpenMP's number belongs to the thread that asks: for a thread inside `one_thread`."""
    if os.environ.get("OMP_NUM_THREADS") == "1":
        from threadpoolctl import threadpool_limits

        threadpool_limits(limits=1, user_api="openmp")

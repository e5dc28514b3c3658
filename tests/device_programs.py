"""Workers that say where they compute."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from manyhands import Parallel, devices


def devices_of(runs: list[Any]) -> list[str]:
    """On a machine of two GPUs: this worker's device in a script of its own, and what each run
    wrote of all of them."""
    from manyhands.run import train_worker

    par = Parallel()
    os.environ[devices.SIMULATED] = "2"  # inline, of all workers
    told = [str(par.device)]
    for plain in runs:
        train_worker(plain)
        par.barrier()
        with open(Path(plain["run"]["run_dir"], "events.jsonl")) as file:
            told.append(json.loads(file.readline())["device"])
    par.barrier()
    os.environ.pop(devices.SIMULATED, None)
    return told

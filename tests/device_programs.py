"""Workers that say where they compute."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from manyhands import Parallel


def devices_of(runs: list[Any]) -> list[str]:
    """This worker's device in a script of its own, and what each run wrote of all of them."""
    from manyhands.run import train_worker

    par = Parallel()
    told = [str(par.device)]
    for plain in runs:
        train_worker(plain)
        par.barrier()
        with open(Path(plain["run"]["run_dir"], "events.jsonl")) as file:
            told.append(json.loads(file.readline())["device"])
    return told

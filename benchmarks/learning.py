"""What an algorithm reaches on a task, over seeds, for the pages of docs/results (`make results`).

    python benchmarks/learning.py ppo Hopper-v5 --seeds 11..15 --steps 1000000 [options of train]
    python benchmarks/learning.py --recipe ppo-walker2d --seeds 11..15 -n 1 --strategy single

Trains by `manyhands sweep`, which goes on where it was stopped (`--dir`), and writes
benchmarks/results/learning/ALGORITHM-ENV.json. `--of DIR ...` reads runs that are there instead.
Give seeds that have chosen no setting; those that have, if you must, with `--check`: the page says
so beside them. Where other work shared the machine, `--busy`: then minutes say little.
"""

from __future__ import annotations

import argparse
import csv
import json
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np

from manyhands.config import load_toml, to_plain

RESULTS = Path(__file__).parent / "results" / "learning"
POINTS = 40  # of a curve


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
    parser.add_argument("--seeds", default="1..5")
    parser.add_argument("--dir", default="")
    parser.add_argument("--of", nargs="+", type=Path, default=[])
    parser.add_argument("--check", action="store_true")
    parser.add_argument("--busy", action="store_true")
    given, words = parser.parse_known_args()
    folders = given.of or trained(words, given.seeds, given.dir)
    print(written([one(folder) for folder in folders], check=given.check, busy=given.busy))


def trained(words: list[str], seeds: str, folder: str) -> list[Path]:
    """The runs of a sweep over seeds, which is begun or continued."""
    if words and not words[0].startswith("-"):
        words = [words[0], "--env", *words[1:]]
    where = Path(folder or "-".join(["sweeps/results", *words[:3:2]]))
    command = [sys.executable, "-m", "manyhands", "sweep", *words, "--seeds", seeds]
    subprocess.run([*command, "--dir", str(where)], check=True)
    return sorted(path.parent for path in where.glob("**/seed-*/summary.json"))


def one(folder: Path) -> dict[str, Any]:
    """What one run has reached, and its curve at POINTS places of its length."""
    summary = json.loads((folder / "summary.json").read_bytes())
    with open(folder / "metrics.csv", encoding="utf-8", newline="") as file:
        rows = [row for row in csv.DictReader(file) if row["mean_return"]]
    steps = np.array([float(row["env_steps"]) for row in rows])
    returns = np.array([float(row["mean_return"]) for row in rows])
    places = np.linspace(0.0, summary["env_steps"], POINTS + 1)[1:]
    return {
        "options": to_plain(load_toml(folder / "config.toml")),
        "seed": summary["seed"],
        "return": round(summary["mean_return"], 1),
        "minutes": round(summary["wall_seconds"] / 60, 2),
        "steps": summary["env_steps"],
        "curve": [round(float(x), 1) for x in np.interp(places, steps, returns)],
        "machine": summary["cpu"],
        "versions": summary["versions"],
    }


def written(runs: list[dict[str, Any]], *, check: bool, busy: bool) -> Path:
    """The file of runs that differ in nothing but their seeds."""
    if not runs:
        raise SystemExit("no run has finished")
    options = [run.pop("options") for run in runs]
    for each in options:
        each["run"] = {k: v for k, v in each["run"].items() if k not in ("seed", "run_dir")}
    if any(each != options[0] for each in options):
        raise SystemExit("these runs differ in more than their seeds")
    algorithm, env = options[0]["algorithm"], options[0]["run"]["env"]
    facts = {key: runs[0][key] for key in ("machine", "versions", "steps")}
    runs = [{k: v for k, v in run.items() if k not in facts} for run in runs]
    minutes = statistics.median(run["minutes"] for run in runs)
    found = {
        "algorithm": algorithm,
        "env": env,
        **facts,
        "steps_per_second": round(facts["steps"] / minutes / 60),
        "check": check,
        "busy": busy,
        "options": {**changed(options[0])},
        "runs": sorted(runs, key=lambda run: run["seed"]),
    }
    RESULTS.mkdir(parents=True, exist_ok=True)
    path = RESULTS / f"{algorithm}-{env}.json"
    path.write_text(json.dumps(found, separators=(",", ":")).replace('{"seed"', '\n{"seed"') + "\n")
    return path


def changed(options: dict[str, Any]) -> dict[str, Any]:
    """What a run had been asked for beyond what is usual."""
    from manyhands.config import build

    algorithm = options["algorithm"]
    usual = to_plain(build(algorithm, env=options["run"]["env"]))
    mine = {**options["run"], **options[algorithm]}
    theirs = {**usual["run"], **usual[algorithm]}
    unlike = {key: value for key, value in mine.items() if value != theirs.get(key)}
    return {k: v for k, v in unlike.items() if k not in ("seed", "run_dir", "quiet", "steps")}


if __name__ == "__main__":
    main()

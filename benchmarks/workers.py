"""The same curve with 1, 2 and 4 workers that act: one task for each strategy (`make results`).

    python benchmarks/workers.py gather allreduce --seeds 21..23 --steps 40000

Trains by `manyhands sweep`, which goes on where it was stopped (sweeps/workers/STRATEGY), and
writes benchmarks/results/workers/STRATEGY.json. A synchronous strategy should draw one line
whatever the number of workers, but for rounding; of an asynchronous one the bands over seeds should
overlap. Whoever learns or serves and does not act comes on top: two actors of `apex` are three
workers.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from learning import one

from manyhands.cli.train import _seeds as seeds_of
from manyhands.cli.train import whole_number
from manyhands.strategies import registry
from manyhands.sweeps import sweep

RESULTS = Path(__file__).parent / "results" / "workers"
ACTING = (1, 2, 4)
ENV = "CartPole-v1"
# Whose strategy it is, and what the runs have in common.
TASKS: dict[str, tuple[str, dict[str, Any]]] = {
    "gather": ("ppo", {"num_envs": 8}),
    "allreduce": ("ppo", {"num_envs": 8}),
    "gradient_server": ("a2c", {"num_envs": 8}),
    "actor_learner": ("impala", {"num_envs": 8}),
    "apex": ("dqn", {"num_envs": 8, "learning_starts": 1000}),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("strategies", nargs="*", default=list(TASKS), metavar="STRATEGY")
    parser.add_argument("--seeds", default="21..23")
    parser.add_argument("--steps", type=whole_number, default=40_000)
    parser.add_argument("--engine", default="local")
    given = parser.parse_args()
    for strategy in given.strategies:
        print(measured(strategy, given.seeds, given.steps, given.engine))


def measured(strategy: str, seeds: str, steps: int, engine: str) -> Path:
    algorithm, options = TASKS[strategy]
    found = sweep(
        algorithm,
        env=ENV,
        strategy=strategy,
        steps=steps,
        engine=engine,
        seeds=seeds_of(seeds),
        settings=[{"workers": workers(strategy, acting)} for acting in ACTING],
        dir=Path("sweeps", "workers", strategy),
        tensorboard=False,
        **options,
    )
    if found.failed:
        raise SystemExit(f"{strategy}: {found.failed[0]['error']}")
    runs = []
    for row in found.results["runs"]:
        run = one(found.dir / row["run"])
        acting = ACTING[[workers(strategy, n) for n in ACTING].index(row["setting"]["workers"])]
        runs.append({"acting": acting, **{k: run[k] for k in ("seed", "return", "curve", "steps")}})
        facts = {"machine": run["machine"], "versions": run["versions"]}
    text = json.dumps(
        {
            "strategy": strategy,
            "synchronous": registry.spec_of(strategy).synchronous,
            "algorithm": algorithm,
            "env": ENV,
            "engine": engine,
            "asked": steps,
            **facts,
            "runs": sorted(runs, key=lambda run: (run["acting"], run["seed"])),
        },
        separators=(",", ":"),
    )
    RESULTS.mkdir(parents=True, exist_ok=True)
    path = RESULTS / f"{strategy}.json"
    path.write_text(text.replace('{"acting"', '\n{"acting"') + "\n")
    return path


def workers(strategy: str, acting: int) -> int:
    return acting if registry.spec_of(strategy).synchronous else acting + 1


if __name__ == "__main__":
    main()

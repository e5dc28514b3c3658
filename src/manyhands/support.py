"""What runs where, as data. The command line, the docs table and the test matrix read it.

A cell is OK, or the reason why not.
"""

from __future__ import annotations

from manyhands.algorithms.registry import SPECS, AlgorithmSpec, spec_of
from manyhands.engines import ENGINES as ENGINES
from manyhands.strategies import registry as strategies
from manyhands.strategies.registry import OK as OK

# part of an engine -> engine -> OK or the reason
PARTS: dict[str, dict[str, str]] = {
    "Parallel and collectives": dict.fromkeys(ENGINES, OK),
    "subgroups": dict.fromkeys(ENGINES, OK),
    "Channel": dict.fromkeys(ENGINES, OK),
    "WeightStore": dict.fromkeys(ENGINES, OK),
    "Service": dict.fromkeys(ENGINES, OK),
    "DistributedDataParallel": {
        e: OK if e in ("ray", "torch") else "needs torch.distributed; par.average_gradients works"
        for e in ENGINES
    },
}

STRATEGIES = tuple(strategies.SPECS)

# What is done when a worker fails that only acts -> the engines whose launcher can do it
RECOVERY: dict[str, tuple[str, ...]] = {"restart": ("local", "ray"), "continue": ("local",)}


def cells_of(spec: AlgorithmSpec) -> dict[str, str]:
    """Strategy -> OK or the reason, which reads on after the algorithm's name."""
    return {name: strategy.cell(spec) for name, strategy in strategies.SPECS.items()}


ALGORITHMS: dict[str, dict[str, str]] = {name: cells_of(spec) for name, spec in SPECS.items()}


def on_engine(strategy: str, engine: str) -> str:
    """OK, or the reason why a strategy cannot run there."""
    needed = (PARTS[part][engine] for part in strategies.SPECS[strategy].engine_parts)
    return next((cell for cell in needed if cell != OK), OK)


# how a script was started -> the engine it gets, and what tells us so
LAUNCHERS: dict[str, tuple[str, str]] = {
    "python script.py": ("one worker, no engine needed", "no launcher's variables"),
    "manyhands launch -n N script.py": ("local, or what --engine says", "MANYHANDS_ENGINE"),
    "mpiexec -n N python script.py": ("mpi", "PMI_RANK or OMPI_COMM_WORLD_RANK"),
    "torchrun --nproc-per-node N script.py": ("torch", "RANK and WORLD_SIZE"),
    "srun -n N python script.py": ("torch (mpi with --mpi=pmi2)", "SLURM_STEP_NUM_TASKS"),
}


def built() -> list[str]:
    """Our own algorithms."""
    return list(SPECS)


def strategies_of(algorithm: str) -> list[str]:
    """The strategies that an algorithm runs with."""
    return [s for s, cell in cells_of(spec_of(algorithm)).items() if cell == OK]


def why_not(algorithm: str, strategy: str, engine: str) -> str:
    """Empty when the three go together, else the reason; all three names must be known ones."""
    spec = spec_of(algorithm)
    cell = cells_of(spec)[strategy]
    if cell != OK:
        return f"{spec.name} with {strategy}: {spec.name} {cell}"
    there = on_engine(strategy, engine)
    return "" if there == OK else f"{strategy} on {engine}: {there}"

"""What runs where, as data. The command line, the docs table and the test matrix read it.

A cell is OK, or the reason why not.
"""

from __future__ import annotations

OK = "ok"

ENGINES = ("inline", "local", "mpi", "ray", "torch")

_NOT_THERE = "not built on this engine; use inline, local or ray"

# part of an engine -> engine -> OK or the reason
PARTS: dict[str, dict[str, str]] = {
    "Parallel and collectives": dict.fromkeys(ENGINES, OK),
    "subgroups": dict.fromkeys(ENGINES, OK),
    "Channel": {e: _NOT_THERE if e in ("mpi", "torch") else OK for e in ENGINES},
    "WeightStore": {e: _NOT_THERE if e in ("mpi", "torch") else OK for e in ENGINES},
    "Service": {e: _NOT_THERE if e in ("mpi", "torch") else OK for e in ENGINES},
    "DistributedDataParallel": {
        e: OK if e in ("ray", "torch") else "needs torch.distributed; par.average_gradients works"
        for e in ENGINES
    },
}

# how a script was started -> the engine it gets, and what tells us so
LAUNCHERS: dict[str, tuple[str, str]] = {
    "python script.py": ("one worker, no engine needed", "no launcher's variables"),
    "manyhands launch -n N script.py": ("local, or what --engine says", "MANYHANDS_ENGINE"),
    "mpiexec -n N python script.py": ("mpi", "PMI_RANK or OMPI_COMM_WORLD_RANK"),
    "torchrun --nproc-per-node N script.py": ("torch", "RANK and WORLD_SIZE"),
    "srun -n N python script.py": ("torch (mpi with --mpi=pmi2)", "SLURM_STEP_NUM_TASKS"),
}


def parts_of(engine: str) -> list[str]:
    """The parts that work on an engine."""
    return [part for part, cells in PARTS.items() if cells[engine] == OK]

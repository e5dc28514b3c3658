"""What runs where, as data. The command line, the docs table and the test matrix read it.

A cell is OK, or the reason why not.
"""

from __future__ import annotations

from manyhands.algorithms.registry import SPECS, spec_of
from manyhands.algorithms.spec import AlgorithmSpec

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

STRATEGIES = ("single", "gather", "allreduce", "gradient_server", "apex", "actor_learner")

_ON_POLICY = "learns from fresh data only, and a replay holds old; use dqn or ddpg"
_LAG = "does not correct for data older than its policy; use impala"
_SEVERAL_STEPS = "takes several steps on one batch, which others' gradients would upset; use a2c"
_REPLAY = "learns from a replay, which apex spreads over workers; use single or apex"
_V_TRACE = "is made for actors that send to a learner; use actor_learner"

# what an algorithm learns from -> strategy -> the reason why not; the others are OK
_KINDS: dict[str, dict[str, str]] = {
    "rollout": {"apex": _ON_POLICY, "actor_learner": _LAG, "gradient_server": _SEVERAL_STEPS},
    "unroll": {s: _V_TRACE for s in STRATEGIES if s not in ("single", "actor_learner")},
    "replay": {s: _REPLAY for s in STRATEGIES if s not in ("single", "apex")},
}


def cells_of(spec: AlgorithmSpec) -> dict[str, str]:
    """Strategy -> OK or the reason, which reads on after the algorithm's name."""
    cells = dict.fromkeys(STRATEGIES, OK) | _KINDS[spec.learns_from]
    if spec.pushes_gradients:
        cells["gradient_server"] = OK
    return cells | dict(spec.refuses)


ALGORITHMS: dict[str, dict[str, str]] = {name: cells_of(spec) for name, spec in SPECS.items()}

# strategy -> engine -> OK or the reason
ON_ENGINES: dict[str, dict[str, str]] = {
    s: dict.fromkeys(ENGINES, OK) if s in ("single", "gather", "allreduce") else PARTS["Channel"]
    for s in STRATEGIES
}

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
    there = ON_ENGINES[strategy][engine]
    return "" if there == OK else f"{strategy} on {engine}: {there}"

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

STRATEGIES = ("single", "gather", "allreduce", "gradient_server", "apex", "actor_learner")

_NOT_YET = "not built yet"
_ON_POLICY = "learns from fresh data only, and a replay holds old; use dqn or ddpg"
_LAG = "does not correct for data older than its policy; use impala"
_SEVERAL_STEPS = "takes several steps on one batch, which others' gradients would upset; use a2c"
_REPLAY = "learns from a replay, which apex spreads over workers; use single or apex"
_LINE_SEARCH = "makes a search over one whole batch, no gradient that can be pushed; use a2c"
_V_TRACE = "is made for actors that send to a learner; use actor_learner"


def _cells(otherwise: str, **given: str) -> dict[str, str]:
    return {s: given.get(s, otherwise) for s in STRATEGIES}


# algorithm -> strategy -> OK or the reason, which reads on after the algorithm's name
ALGORITHMS: dict[str, dict[str, str]] = {
    "a2c": _cells(OK, apex=_ON_POLICY, actor_learner=_LAG),
    "ppo": _cells(OK, gradient_server=_SEVERAL_STEPS, apex=_ON_POLICY, actor_learner=_LAG),
    "trpo": _cells(OK, gradient_server=_LINE_SEARCH, apex=_ON_POLICY, actor_learner=_LAG),
    "dqn": _cells(_REPLAY, single=OK, apex=OK),
    "ddpg": _cells(_REPLAY, single=OK, apex=OK),
    "impala": _cells(_V_TRACE, single=OK, actor_learner=OK),
}

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
    """The algorithms that run at least one way."""
    return [name for name, cells in ALGORITHMS.items() if OK in cells.values()]


def strategies_of(algorithm: str) -> list[str]:
    """The strategies that an algorithm runs with."""
    return [s for s, cell in ALGORITHMS[algorithm].items() if cell == OK]


def why_not(algorithm: str, strategy: str, engine: str) -> str:
    """Empty when the three go together, else the reason; all three names must be known ones."""
    cell = ALGORITHMS[algorithm][strategy]
    if cell != OK:
        return f"{algorithm} with {strategy}: " + (
            cell if cell == _NOT_YET else f"{algorithm} {cell}"
        )
    there = ON_ENGINES[strategy][engine]
    return "" if there == OK else f"{strategy} on {engine}: {there}"

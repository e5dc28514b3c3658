"""`--slurm FILE` of `manyhands launch` and `manyhands train`: a batch file for SLURM, to submit.

    local   one task on one node, which starts its own workers
    torch   one task a worker; srun starts them, and they meet at the first node
    mpi     the same, by srun --mpi=pmi2
    ray     one task a node: a Ray node; the command runs on the first

A training gets SIGUSR1 two minutes before its time is up, or SIGTERM when the job is preempted.
It then writes a checkpoint and leaves. The job has the same number when it is queued again,
so it finds its run folder by that and resumes.
"""

from __future__ import annotations

import os
import shlex
import sys
from dataclasses import dataclass

from manyhands.errors import ConfigError

ENGINES = ("local", "torch", "mpi", "ray")

_HEAD = """\
#!/bin/bash
# {what}
# Look through it, and type: sbatch {file}
#SBATCH --job-name={name}
#SBATCH --nodes={nodes}
{tasks}
#SBATCH --time=04:00:00
#SBATCH --signal=B:USR1@120         # to this script, two minutes before the time is up
#SBATCH --requeue                   # a job that was preempted may begin again
#SBATCH --open-mode=append          # and goes on in the same file
#SBATCH --output={name}-%j.log
##SBATCH --partition=NAME           # remove one # for what your cluster asks for
##SBATCH --account=NAME
##SBATCH --gpus-per-task=1

PATH={path}:$PATH
cd {folder} || exit 2
export OMP_NUM_THREADS={threads}            # of a worker
"""

_TRAIN = """
run={run_dir}
if [ -n "$(ls -A "$run/checkpoints" 2>/dev/null)" ]; then
    command=(manyhands resume "$run"{quiet})
else
    # A folder without a checkpoint: it ended before its first one.
    [ -e "$run" ] && mv "$run" "$run.before-${{SLURM_RESTART_COUNT:-0}}"
    command=({command} --run-dir "$run")
fi
"""

_LAUNCH = """
# Your script gets SIGUSR1 or SIGTERM, and begins from its first line when the job is queued
# again: what it should remember, it has to save and load.
command=({command})
"""

# WHY not the name of the node: it need not resolve, and on Debian a host's own name is 127.0.1.1.
_ADDRESS = """
first=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
address=$(scontrol show node "$first" | grep -o 'NodeAddr=[^ ]*' | cut -d= -f2)
"""

_START = {
    "local": """
"${command[@]}" &
""",
    "torch": _ADDRESS
    + """export MASTER_ADDR=$address          # where workers meet; the port follows from the job

srun "${command[@]}" &
""",
    "mpi": """
srun --mpi=pmi2 "${command[@]}" &    # for Open MPI: --mpi=pmix
""",
    "ray": _ADDRESS
    + """export RAY_ADDRESS=$address:$((20000 + SLURM_JOB_ID % 10000))
export RAY_AUTH_MODE=token           # who has no token is not let in
export RAY_AUTH_TOKEN=$(python -c 'import secrets; print(secrets.token_hex(32))')
export RAY_USAGE_STATS_ENABLED=0

cpus=(--num-cpus "$SLURM_CPUS_PER_TASK" --block)
srun --overlap --nodes=1 --ntasks=1 --nodelist="$first" \\
    ray start --head --node-ip-address="$address" --port="${RAY_ADDRESS##*:}" \\
    --include-dashboard=false "${cpus[@]}" > "ray-nodes-$SLURM_JOB_ID.log" 2>&1 &
for ((n = 0; n < 60; n++)); do       # until the first is there: the others give up sooner
    ray status > /dev/null 2>&1 && break
    sleep 1
done
if ((SLURM_NNODES > 1)); then
    others=$((SLURM_NNODES - 1))
    srun --overlap --nodes=$others --ntasks=$others --exclude="$first" \\
        ray start --address="$RAY_ADDRESS" "${cpus[@]}" >> "ray-nodes-$SLURM_JOB_ID.log" 2>&1 &
fi
for ((n = 0; n < 60; n++)); do       # until all nodes have joined
    (($(ray status 2>/dev/null | grep -c '^ 1 node_') >= SLURM_NNODES)) && break
    sleep 1
done

"${command[@]}" &
""",
}

_END = """job=$!
again=
trap 'again=1; kill -USR1 $job' USR1   # time is nearly up: save, leave, and be queued again
trap : TERM                           # preempted: SLURM has sent it to every process; wait
while wait $job; code=$?; kill -0 $job 2>/dev/null; do :; done   # a signal ends `wait` early
if [ $code -gt 128 ] && [ -n "$again" ]; then
    scontrol requeue "$SLURM_JOB_ID"
fi
exit $code
"""


@dataclass(frozen=True)
class Batch:
    """What to write, and where."""

    file: str
    engine: str
    workers: int
    nodes: int
    command: tuple[str, ...]  # as it would be typed
    training: bool
    run_dir: str = ""  # of a training; "" makes one from the job's number
    quiet: bool = False
    threads: int = 1  # of a worker


def write(batch: Batch) -> int:
    """Write the file, and say what comes next."""
    _check(batch)
    text = script(batch)
    try:
        with open(batch.file, "x", encoding="utf-8") as file:
            file.write(text)
    except FileExistsError:
        raise ConfigError(
            f"{batch.file} is there already, and may have been edited; remove it, or give another "
            "name: --slurm FILE"
        ) from None
    except OSError as error:
        raise ConfigError(f"{batch.file} cannot be written: {error.strerror}") from error
    print(f"wrote {batch.file}; look through it, and type: sbatch {batch.file}")
    return 0


def script(batch: Batch) -> str:
    """The text of the batch file."""
    command = " ".join(shlex.quote(word) for word in batch.command)
    typed = f"manyhands {'train' if batch.training else 'launch'} --slurm {batch.file}"
    # The job's number is the same after a requeue, and so is the folder.
    run_dir = shlex.quote(batch.run_dir) if batch.run_dir else '"runs/slurm-$SLURM_JOB_ID"'
    head = _HEAD.format(
        what=f"Written by `{typed}`: {batch.workers} workers on the {batch.engine} engine.",
        file=batch.file,
        name=os.path.splitext(os.path.basename(batch.file))[0],
        nodes=batch.nodes,
        tasks=_tasks(batch),
        path=shlex.quote(os.path.dirname(sys.executable)),
        folder=shlex.quote(os.getcwd()),
        threads=batch.threads,
    )
    body = (
        _TRAIN.format(command=command, run_dir=run_dir, quiet=" --quiet" if batch.quiet else "")
        if batch.training
        else _LAUNCH.format(command=command)
    )
    return head + body + _START[batch.engine] + _END


def _tasks(batch: Batch) -> str:
    each = batch.workers // batch.nodes
    if batch.engine in ("local", "ray"):
        return (
            "#SBATCH --ntasks-per-node=1         # which has all processors of its node\n"
            f"#SBATCH --cpus-per-task={each * batch.threads}"
        )
    return (
        f"#SBATCH --ntasks-per-node={each}         # one a worker\n"
        f"#SBATCH --cpus-per-task={batch.threads}"
    )


def _check(batch: Batch) -> None:
    if batch.engine not in ENGINES:
        raise ConfigError(
            f"--slurm with --engine {batch.engine}: choose {', '.join(ENGINES)}; type: "
            "--engine torch"
        )
    if batch.nodes < 1 or batch.workers % batch.nodes:
        near = max(batch.nodes, 1) * max(1, round(batch.workers / max(batch.nodes, 1)))
        raise ConfigError(
            f"{batch.workers} workers do not divide by --nodes {batch.nodes}; type: --nodes "
            f"{max(batch.nodes, 1)} --workers {near}"
        )
    if batch.engine == "local" and batch.nodes > 1:
        raise ConfigError(
            f"--engine local is one machine, and --nodes says {batch.nodes}; type: --engine torch"
        )

"""`manyhands launch -n N [--engine E] SCRIPT [ARGS ...]`"""

from __future__ import annotations

import argparse
import os

from manyhands import roles
from manyhands.engines import ENGINES
from manyhands.engines.base import DEFAULT_TIMEOUT
from manyhands.engines.launch import Job, check, run
from manyhands.errors import ConfigError

EPILOG = """\
In the script, `par = manyhands.Parallel()` finds its place; nothing else changes between engines:

  local    processes on this machine, shared memory: the fastest here (default)
  torch    torch.distributed: gloo, and nccl when each worker has a GPU
  mpi      mpiexec with mpi4py (extra: mpi)
  ray      Ray actors; --address joins a running cluster (extra: ray)
  inline   all workers in one process, one at a time: deterministic, and pdb works

examples:
  manyhands launch -n 4 train.py --lr 3e-4
  manyhands launch --roles actor=2,learner=2 train.py
  manyhands launch -n 2 --engine inline --timeout 0 train.py      step through it with pdb
  manyhands launch -n 16 --engine torch --slurm job.sbatch --nodes 2 train.py      for SLURM
  mpiexec -n 4 python train.py      torchrun --nproc-per-node 4 train.py      (the same script)

When a worker fails, all stop within seconds and the first traceback is shown with its worker.
Ctrl-C stops all; a second Ctrl-C kills them.
"""


def parser() -> argparse.ArgumentParser:
    p = argparse.ArgumentParser(
        prog="manyhands launch",
        description="Run your own script on N workers.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    p.add_argument(
        "-n",
        "--workers",
        type=int,
        metavar="N",
        help=f"number of workers (default: one for each core, {os.cpu_count() or 1} here)",
    )
    p.add_argument(
        "--roles",
        default="",
        metavar="ROLE=N,...",
        help="who plays which part, ranks in that order, such as actor=2,learner=2 (then without "
        "-n); the script finds par.role, par.role_rank and par.role_size",
    )
    p.add_argument(
        "--engine",
        default="local",
        metavar="E",
        help=f"how they run and talk: {', '.join(ENGINES)} (default: local)",
    )
    p.add_argument(
        "--timeout",
        type=float,
        default=DEFAULT_TIMEOUT,
        metavar="SECONDS",
        help="how long any wait for other workers may take, 0 for ever (default: %(default)g)",
    )
    p.add_argument(
        "--threads",
        type=int,
        metavar="T",
        help="torch and BLAS threads for each worker (default: 1; all cores for -n 1)",
    )
    p.add_argument(
        "--gpus",
        type=int,
        metavar="G",
        help="spread the workers over the first G GPUs (default: all there are)",
    )
    p.add_argument(
        "--address",
        default="",
        metavar="HOST:PORT",
        help="with --engine ray: join this cluster instead of starting one here",
    )
    p.add_argument(
        "--slurm",
        default="",
        metavar="FILE",
        help="start nothing, but write a batch file for SLURM, to look through and submit",
    )
    p.add_argument(
        "--nodes", type=int, metavar="M", help="with --slurm: on so many machines (default: 1)"
    )
    p.add_argument(
        "--debug-collectives",
        action="store_true",
        help="compare call sites and fingerprints across workers at each call",
    )
    p.add_argument("script", metavar="SCRIPT", help="a Python file")
    p.add_argument("args", nargs=argparse.REMAINDER, metavar="ARGS", help="passed to the script")
    return p


def launch(argv: list[str]) -> int:
    options = parser().parse_args(argv)
    workers = options.workers
    if workers is None:
        workers = os.cpu_count() or 1
    if options.roles:
        given = roles.parse(options.roles)
        if options.workers is not None and options.workers != given.size:
            raise ConfigError(
                f"--roles {options.roles} makes {given.size} workers, but -n says "
                f"{options.workers}; leave -n out, or type: -n {given.size}"
            )
        workers = given.size
    job = Job(
        workers=workers,
        engine=options.engine,
        script=options.script,
        args=tuple(options.args),
        timeout=options.timeout,
        debug=options.debug_collectives,
        gpus=options.gpus,
        threads=options.threads,
        address=options.address,
        roles=options.roles,
    )
    if options.slurm:
        return _for_slurm(job, options.slurm, options.nodes or 1)
    if options.nodes is not None:
        raise ConfigError(f"--nodes {options.nodes} goes with --slurm FILE")
    run(job)
    return 0


def _for_slurm(job: Job, file: str, nodes: int) -> int:
    from manyhands.cli import slurm

    check(job)
    for name, value in (("--gpus", job.gpus), ("--address", job.address)):
        if value is not None and value != "":
            raise ConfigError(
                f"{name} {value} does not go with --slurm: "
                + ("SLURM gives tasks their GPUs; see --gpus-per-task in the file"
                   if name == "--gpus" else "the batch file starts Ray on its own nodes")
            )  # fmt: skip
    words = ["python", job.script, *job.args]
    if job.engine in ("local", "ray"):
        given = {"--timeout": f"{job.timeout:g}", "--roles": job.roles}
        if job.threads is not None:
            given["--threads"] = str(job.threads)
        options = [word for name, value in given.items() if value for word in (name, value)]
        options += ["--debug-collectives"] if job.debug else []
        words = ["manyhands", "launch", "-n", str(job.workers), "--engine", job.engine]
        words += [*options, job.script, *job.args]
    else:  # srun starts the workers, which read what was asked from their environment
        variables = {
            roles.VARIABLE: job.roles,
            "MANYHANDS_TIMEOUT": "" if job.timeout == DEFAULT_TIMEOUT else f"{job.timeout:g}",
            "MANYHANDS_DEBUG": "1" if job.debug else "",
        }
        found = [f"{name}={value}" for name, value in variables.items() if value]
        words = ["env", *found, *words] if found else words
    threads = job.threads or 1
    return slurm.write(
        slurm.Batch(file, job.engine, job.workers, nodes, tuple(words), False, threads=threads)
    )

"""How was this process started? Read from the variables of every launcher."""

from __future__ import annotations

import pytest

from manyhands.engines.attach import detect, timeout_from
from manyhands.engines.torch import slurm_first_host, slurm_port
from manyhands.errors import ConfigError

OURS = {"MANYHANDS_ENGINE": "local", "MANYHANDS_RANK": "2", "MANYHANDS_SIZE": "4",
        "MANYHANDS_LOCAL_RANK": "2", "MANYHANDS_LOCAL_SIZE": "4"}  # fmt: skip
TORCHRUN = {"RANK": "5", "WORLD_SIZE": "8", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "4",
            "MASTER_ADDR": "node7", "MASTER_PORT": "29500"}  # fmt: skip
MPICH = {"PMI_RANK": "1", "PMI_SIZE": "3", "MPI_LOCALRANKID": "1", "MPI_LOCALNRANKS": "3"}
OPENMPI = {"OMPI_COMM_WORLD_RANK": "6", "OMPI_COMM_WORLD_SIZE": "8",
           "OMPI_COMM_WORLD_LOCAL_RANK": "2", "OMPI_COMM_WORLD_LOCAL_SIZE": "4"}  # fmt: skip
SRUN = {"SLURM_PROCID": "3", "SLURM_STEP_NUM_TASKS": "4", "SLURM_LOCALID": "1",
        "SLURM_NTASKS_PER_NODE": "2", "SLURM_STEP_NODELIST": "gpu[03-04]",
        "SLURM_JOB_ID": "77"}  # fmt: skip


@pytest.mark.parametrize(
    ("env", "engine", "rank", "size", "local_rank", "local_size"),
    [
        ({}, "inline", 0, 1, 0, 1),
        (OURS, "local", 2, 4, 2, 4),
        (OURS | {"MANYHANDS_ENGINE": "torch"}, "torch", 2, 4, 2, 4),
        (OURS | {"MANYHANDS_ENGINE": "ray"}, "ray", 2, 4, 2, 4),
        (OURS | {"MANYHANDS_ENGINE": "mpi"} | MPICH, "mpi", 1, 3, 1, 3),
        (TORCHRUN, "torch", 5, 8, 1, 4),
        (MPICH, "mpi", 1, 3, 1, 3),
        (OPENMPI, "mpi", 6, 8, 2, 4),
        (SRUN, "torch", 3, 4, 1, 2),
        (SRUN | {"PMI_RANK": "3", "PMI_SIZE": "4"}, "mpi", 3, 4, 3, 4),
    ],
    ids=[
        "plain",
        "local",
        "torch",
        "ray",
        "mpi",
        "torchrun",
        "mpich",
        "openmpi",
        "srun",
        "srun-pmi2",
    ],
)
def test_detect(
    env: dict[str, str], engine: str, rank: int, size: int, local_rank: int, local_size: int
) -> None:
    place = detect(env)
    assert (place.engine, place.rank, place.size) == (engine, rank, size)
    assert (place.local_rank, place.local_size) == (local_rank, local_size)


@pytest.mark.parametrize(
    "env",
    [
        {"SLURM_JOB_ID": "7", "SLURM_NTASKS": "8", "SLURM_PROCID": "0", "SLURM_LOCALID": "0"},
        {"SLURM_JOB_ID": "7", "SLURM_NTASKS": "8"},
        {"SLURM_PROCID": "0", "SLURM_STEP_NUM_TASKS": "1", "SLURM_NTASKS": "8"},
        {"SLURM_STEP_NUM_TASKS": "4"},
        {"RANK": "1", "WORLD_SIZE": "2"},
        {"RANK": "1"},
        {"MANYHANDS_ENGINE": ""},
    ],
    ids=["sbatch", "salloc", "srun-n1", "step-only", "no-master", "rank-only", "empty"],
)
def test_one_worker_unless_a_launcher_says_so(env: dict[str, str]) -> None:
    """sbatch and salloc set SLURM_NTASKS for the whole job: a plain python in it is alone."""
    assert detect(env).size == 1


def test_our_launcher_wins_over_an_outer_one() -> None:
    """`manyhands launch` inside an srun or mpiexec job: the inner word counts."""
    assert detect(SRUN | MPICH | TORCHRUN | OURS).engine == "local"


def test_slurm_counts_with_a_repeat() -> None:
    assert detect(SRUN | {"SLURM_NTASKS_PER_NODE": "2(x2)"}).local_size == 2


@pytest.mark.parametrize(
    "env",
    [
        {"MANYHANDS_ENGINE": "carrier-pigeon"},
        OURS | {"MANYHANDS_RANK": "two"},
        OURS | {"MANYHANDS_SIZE": "0"},
        OURS | {"MANYHANDS_RANK": "-1"},
        OURS | {"MANYHANDS_RANK": "4"},
        TORCHRUN | {"RANK": "x"},
        TORCHRUN | {"RANK": "1x"},
        TORCHRUN | {"WORLD_SIZE": "many"},
        MPICH | {"PMI_RANK": "?"},
        OPENMPI | {"OMPI_COMM_WORLD_SIZE": "1e3x"},
        SRUN | {"SLURM_PROCID": "a"},
        SRUN | {"SLURM_STEP_NUM_TASKS": "two"},
    ],
    ids=lambda env: ",".join(f"{k}={v}" for k, v in env.items() if v.strip("0123456789"))[:60],
)
def test_bad_values_are_refused(env: dict[str, str]) -> None:
    with pytest.raises(ConfigError) as caught:
        detect(env)
    assert any(f"{k}=" in str(caught.value) for k in env), "the message names the variable"


@pytest.mark.parametrize(
    ("nodelist", "host"),
    [
        ("gpu03", "gpu03"),
        ("gpu03,gpu04", "gpu03"),
        ("gpu[03-05,9],x1", "gpu03"),
        ("gpu[7]", "gpu7"),
        ("gpu[01,03]-ib,x", "gpu01-ib"),
        ("login,gpu[1-4]", "login"),
        ("rack-a-[001-128]", "rack-a-001"),
        ("rack[1-2]node[3-4]", "rack1node3"),
        ("n1.cluster.org,n2.cluster.org", "n1.cluster.org"),
        ("", "127.0.0.1"),
    ],
)
def test_slurm_first_host(nodelist: str, host: str) -> None:
    assert slurm_first_host(nodelist) == host


def test_slurm_port_is_the_same_for_a_step_and_differs_between_steps() -> None:
    steps = [{"SLURM_JOB_ID": str(j), "SLURM_STEP_ID": str(s)} for j in range(90) for s in range(5)]
    ports = [slurm_port(env) for env in steps]
    assert ports == [slurm_port(env) for env in steps]
    assert all(1024 < p < 65536 for p in ports)
    assert len(set(ports)) == len(ports)


def test_timeout(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("MANYHANDS_TIMEOUT", raising=False)
    assert timeout_from(None) == 60
    assert timeout_from(5) == 5
    monkeypatch.setenv("MANYHANDS_TIMEOUT", "7.5")
    assert timeout_from(None) == 7.5
    monkeypatch.setenv("MANYHANDS_TIMEOUT", "soon")
    with pytest.raises(ConfigError, match="soon"):
        timeout_from(None)

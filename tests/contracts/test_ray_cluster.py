"""A Ray cluster of two nodes on this machine: training on both, and answers where it is too small.

The nodes are real: each has a raylet, an object store and workers of its own.
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from ray_nodes import cluster_of
from training_programs import as_in_a_worker, configuration

from manyhands.engines import calls
from manyhands.engines.launch import Job, run
from manyhands.engines.ray.core import _Actors, spread

pytestmark = pytest.mark.ray
ray = pytest.importorskip("ray")

EPISODES = {"collect": "episodes", "batch_steps": 300, "steps": 900}


@pytest.fixture(scope="module")
def address() -> Iterator[str]:
    with cluster_of(2, 2) as cluster:
        yield str(cluster.address)


def train_and_tell(case: dict[str, Any]) -> dict[str, Any]:
    """One worker's run: on which node it was, and how often it put weights into the store."""
    from manyhands.run import train_worker

    puts: list[int] = []
    put = ray.put

    def counted(value: Any, **options: Any) -> Any:
        puts.append(getattr(value, "nbytes", 0))
        return put(value, **options)

    ray.put = counted
    try:
        summary = train_worker(case)
    finally:
        ray.put = put
    node = ray.get_runtime_context().get_node_id()
    return {"node": node, "puts": len(puts), "updates": summary["updates"]}


def auth() -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if name.startswith("RAY_AUTH")}


def own_token() -> str:
    return os.environ["RAY_AUTH_TOKEN"]


def test_a_ray_of_our_own_has_a_token_of_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No other session, here or elsewhere, has to do with it. It stands before those that join a
    cluster: once Ray had made a token, this process asked every later cluster for it."""
    monkeypatch.setenv("HOME", str(tmp_path))
    before = auth()
    with as_in_a_worker():
        call = calls.pack(own_token, (), {})
    job = Job(workers=1, engine="ray", call=call, timeout=60, results=True)
    first, second = run(job), run(job)
    assert len(first[0]) == len(second[0]) == 64
    assert first != second
    assert auth() == before
    assert not (tmp_path / ".ray").exists()


@pytest.mark.parametrize("workers", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_trpo_gathers_whole_episodes_from_both_nodes(
    address: str, workers: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # The token of another cluster, which this one does not ask for.
    monkeypatch.setenv("RAY_AUTH_TOKEN_PATH", str(tmp_path / "token"))
    (tmp_path / "token").write_text("0" * 64)
    case = configuration(
        "trpo", "gather", "ray", workers, str(tmp_path / "run"), num_envs=8, **EPISODES
    )
    with as_in_a_worker():
        call = calls.pack(train_and_tell, (case,), {})
    told = run(
        Job(workers=workers, engine="ray", call=call, timeout=60, address=address, results=True)
    )
    assert len({t["node"] for t in told}) == 2
    # One more than updates: the weights of the end, for all.
    assert [t["puts"] for t in told] == [told[0]["updates"] + 1, *[0] * (workers - 1)]
    rows = (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()
    assert len(rows) == told[0]["updates"] >= 3
    assert json.loads(rows[-1])["env_steps"] >= 900


@pytest.mark.parametrize(
    ("room", "expected"),
    [
        ({"a": 2, "b": 2}, ["a", "b", "b", "a"]),
        ({"a": 0, "b": 4}, ["b", "b", "b", "b"]),  # a head without CPUs
        ({"a": 4, "b": 8, "c": 4}, ["a", "b", "b", "c"]),
    ],
)
def test_nodes_are_filled_alike(room: dict[str, float], expected: list[str]) -> None:
    assert spread(4, 1, room, driver="a") == expected


def test_a_worker_that_nobody_has_waited_for_is_dead() -> None:
    """Ray does so in its own time; until then a survivor's complaint is not the cause."""
    actors = _Actors.__new__(_Actors)
    with subprocess.Popen(["sleep", "60"]) as child:
        actors._where = [{"host": socket.gethostname(), "pid": child.pid}]
        assert not actors._a_death({"its run": 0})
        child.kill()
        deadline = time.monotonic() + 60
        while not actors._a_death({"its run": 0}):
            assert time.monotonic() < deadline
        assert Path(f"/proc/{child.pid}").exists()


@pytest.mark.parametrize("said", ["--address", "RAY_ADDRESS"])
def test_more_workers_than_cpus_says_so_at_once(address: str, said: str, tmp_path: Path) -> None:
    began = time.monotonic()
    words = ["train", "trpo", "--env", "CartPole-v1", "--engine", "ray"]
    words += ["--workers", "8", "--steps", "20000", "--run-dir", str(tmp_path / "run")]
    words += [said, address] if said == "--address" else []
    known = {said: address} if said == "RAY_ADDRESS" else {}
    done = subprocess.run(
        [sys.executable, "-m", "manyhands.cli.main", *words],
        capture_output=True,
        text=True,
        timeout=60,
        env=os.environ | {"RAY_USAGE_STATS_ENABLED": "0"} | known,
    )
    assert done.returncode == 2
    assert "8 workers x 1 CPU = 8" in done.stderr
    assert "has 4" in done.stderr
    assert time.monotonic() - began < 40  # not the minute that actors may take to start


def test_a_port_where_something_else_listens_is_no_cluster() -> None:
    """Ray itself would try for ten minutes. However busy this machine: to start Python and import
    Ray does not count."""
    with socket.create_server(("127.0.0.1", 0)) as door:
        where = f"127.0.0.1:{door.getsockname()[1]}"
        words = ["--engine", "ray", "--address", where, "--workers", "2", "--steps", "4000"]
        command = [sys.executable, "-m", "manyhands", "train", "ppo", "--env", "CartPole-v1"]
        done = subprocess.run([*command, *words], capture_output=True, text=True, timeout=120)
    assert done.returncode == 2, done.stderr
    assert done.stderr.strip() == f"manyhands: no Ray cluster answers at {where} (waited 8 s)"

"""A sweep on a Ray cluster of two nodes: as many runs at once as it has CPUs, Ctrl-C, a kill, a run
that fails, and the table of runs that nobody stopped."""

from __future__ import annotations

import json
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from ray_nodes import cluster_of
from test_sweeps import ENV, FAILS, OPTIONS, SECONDS, has_checkpoint, started, until, words

import manyhands as mh
from manyhands.errors import ConfigError
from manyhands.sweeps.cluster import Cluster

pytestmark = pytest.mark.ray
pytest.importorskip("ray")


@pytest.fixture(scope="module")
def address() -> Iterator[str]:
    with cluster_of(1, 2) as cluster:
        yield str(cluster.address)


def runs_of(folder: Path) -> list[psutil.Process]:
    """Processes that train in the folder."""
    found = []
    for process in psutil.process_iter(["cmdline"]):
        line = process.info["cmdline"] or []
        if "sweep" not in line and any(word.startswith(f"{folder}/") for word in line):
            found.append(process)
    return found


@pytest.mark.timeout(600)
def test_stopped_killed_and_failed_in_part(
    address: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "sweep_env.py").write_text(ENV)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    sweep = tmp_path / "swept"
    good = [sweep / f"{FAILS}=false" / f"seed-{seed}" for seed in (1, 2, 3)]
    bad = [sweep / f"{FAILS}=true" / f"seed-{seed}" for seed in (1, 2, 3)]

    # Three CPUs, three runs at once; Ctrl-C reaches those of all nodes.
    argv = f"sweep ppo --env sweep_env:Env --grid {FAILS}=false,true --seeds 1..3 --ray {address}"
    with started(tmp_path, *argv.split(), *words(OPTIONS), "--dir", "swept") as process:
        until(lambda: all(map(has_checkpoint, good)), process)
        assert not any(run.exists() for run in bad)
        assert len(runs_of(sweep)) == 3
        process.send_signal(signal.SIGINT)
        said = process.communicate(timeout=SECONDS)[0]
    assert process.returncode == 130, said
    assert "0 of 6 runs have finished. To continue, type: manyhands resume swept" in said
    for run in good:
        assert json.loads((run / "summary.json").read_text())["exit"] == "stopped: SIGTERM"

    # Killed: its runs end with it, on whatever node they are.
    with started(tmp_path, "resume", "swept", "--ray", address) as process:
        until(lambda: len(runs_of(sweep)) == 3, process)
        process.kill()
        until(lambda: not runs_of(sweep))

    # To the end.
    (tmp_path / "go").touch()
    with started(tmp_path, "resume", "swept", "--ray", address) as process:
        said = process.communicate(timeout=SECONDS)[0]
    assert process.returncode == 1, said
    for seed in (1, 2, 3):
        assert f"failed    {FAILS}=true, seed {seed}: RuntimeError: the pole is broken" in said

    # What a node has trained is what this machine trains.
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    mh.train("ppo", env="sweep_env:Env", engine="inline", quiet=True, env_kwargs={"fails": False},
             seed=1, run_dir="whole", **OPTIONS)  # fmt: skip
    whole = Path("whole", "policy.safetensors").read_bytes()
    assert (good[0] / "policy.safetensors").read_bytes() == whole


def test_what_a_cluster_cannot_do_is_said_before_anything_starts(
    address: str, tmp_path: Path
) -> None:
    given: dict[str, Any] = {"env": "CartPole-v1", "seeds": 2, "ray": address, "quiet": True}
    for workers, said in (
        (3, "a run has 3 workers, all on one node, and the largest node has 2 CPUs; type: --w"),
        (4, "4 workers x 1 CPU = 4, the cluster at .* has 3; ask for fewer workers or add nodes"),
    ):
        with pytest.raises(ConfigError, match=said):
            mh.sweep("ppo", num_envs=12, workers=workers, dir=tmp_path / str(workers), **given)
    with pytest.raises(ConfigError, match=r"no Ray cluster answers at 127\.0\.0\.1:1 "):
        mh.sweep("ppo", dir=tmp_path / "none", **given | {"ray": "127.0.0.1:1"})
    assert not list(tmp_path.glob("*/seed-*"))
    ray = pytest.importorskip("ray")
    ray.init(address=address, log_to_driver=False)
    try:
        with pytest.raises(ConfigError, match="is not there as it is on the machine of the sweep"):
            unlike(tmp_path).check(1)
    finally:
        ray.shutdown()


def unlike(folder: Path) -> Cluster:
    """As if the nodes saw another disk."""
    found = Cluster(folder)
    found._witness = "of another plan"
    return found

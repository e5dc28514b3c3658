"""Workers that come and go on a Ray cluster (--workers 2..5): nodes are added and removed under a
run, which goes on with those that are there. The nodes are real, with raylets of their own."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from ray_nodes import cluster_of

import manyhands as mh
from manyhands import wire
from manyhands.config import build, from_plain, load_toml, save_toml, to_plain
from manyhands.config.validate import faults
from manyhands.engines import hosts
from manyhands.engines.process import alive
from manyhands.engines.ray.core import _Actors, _fitting
from manyhands.engines.ray.seat import Seat
from manyhands.errors import ConfigError

pytestmark = pytest.mark.ray
pytest.importorskip("ray")

SECONDS = 200.0  # for what takes a tenth of it on a quiet machine
TESTS = str(Path(__file__).parents[1])
CASES = {
    "actor_learner": ["impala"],
    "gradient_server": ["a2c", "--strategy", "gradient_server"],
    "apex": ["dqn", "--strategy", "apex", "--learning-starts", "200", "--replay-size", "4000",
             "--updates-per-step", "0.05"],
}  # fmt: skip


class Run:
    """`manyhands train` on a cluster, and what it has written so far."""

    def __init__(self, cluster: Any, folder: Path, *words: str) -> None:
        self.folder = folder
        seeds = folder.parent / "seeds"
        seeds.mkdir()
        self.process = subprocess.Popen(
            [sys.executable, "-m", "manyhands", "train", *words, "--num-envs", "12", "--engine",
             "ray", "--address", str(cluster.address), "--run-dir", str(folder), "--env",
             "async_programs:seeded_cartpole", "--env-kwargs", f"folder={seeds}",
             "--no-tensorboard", "--steps", "100000000"],
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
            env=os.environ | {"PYTHONPATH": os.pathsep.join([TESTS, *sys.path]),
                              "RAY_USAGE_STATS_ENABLED": "0"},
        )  # fmt: skip

    def events(self, kind: str) -> list[dict[str, Any]]:
        return [event for event in self._rows("events.jsonl") if event["event"] == kind]

    def acting(self) -> set[int]:
        """Workers whose episodes are in the records."""
        path = self.folder / "episodes.csv"
        rows = path.read_text().splitlines()[1:] if path.exists() else []
        return {int(row.split(",")[1]) for row in rows if row.count(",") == 5}

    def until(self, true: Callable[[], bool], what: str) -> None:
        deadline = time.monotonic() + SECONDS
        while not true():
            assert self.process.poll() is None, self.process.communicate()[0]
            assert time.monotonic() < deadline, what
            time.sleep(0.1)

    def learns_on(self) -> None:
        before = len(self._rows("metrics.jsonl"))
        self.until(lambda: len(self._rows("metrics.jsonl")) > before + 2, "three updates")

    def stopped(self) -> str:
        """What it has said, once it was asked to stop."""
        self.process.send_signal(signal.SIGTERM)
        said, _ = self.process.communicate(timeout=SECONDS)
        assert self.process.returncode == 143, said
        return said

    def _rows(self, name: str) -> list[Any]:
        path = self.folder / name
        lines = path.read_text().splitlines() if path.exists() else []
        return [json.loads(line) for line in lines if line.endswith("}")]


def check_seeds(folder: Path) -> None:
    """No episode of any life of any worker began with the seed of another."""
    seeds = [seed for path in folder.iterdir() for seed in path.read_text().split()]
    seeds = [seed for seed in seeds if seed != "0"]  # of environments that are only looked at
    assert len(seeds) > 50
    assert len(seeds) - len(set(seeds)) <= 2  # numbers of 31 bits: two may be equal by chance


@pytest.mark.usefixtures("nothing_left")
@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    "case",
    [
        "actor_learner",
        pytest.param("gradient_server", marks=pytest.mark.slow),
        pytest.param("apex", marks=pytest.mark.slow),
    ],
)
def test_workers_come_with_a_node_and_go_with_it(case: str, tmp_path: Path) -> None:
    with cluster_of(2) as cluster:
        run = Run(cluster, tmp_path / "run", *CASES[case], "--workers", "2..5")
        run.learns_on()
        assert run.acting() <= {1}
        node = cluster.add_node(num_cpus=2)
        run.until(lambda: {1, 2, 3} <= run.acting(), "episodes of both that have come")
        joined = run.events("worker_joined")
        assert {e["worker"] for e in joined} == {2, 3}  # on a busy machine 3 may be the first
        assert [(e["there"], e["most"]) for e in joined] == [(3, 5), (4, 5)]
        cluster.remove_node(node)
        run.until(lambda: len(run.events("worker_left")) == 2, "both to have left")
        assert run.events("worker_left")[-1]["there"] == 2
        run.learns_on()
        cluster.add_node(num_cpus=8)  # room for more than there may be
        run.until(lambda: run.acting() == {1, 2, 3, 4}, "episodes of all")
        run.learns_on()
        assert [e["there"] for e in run.events("worker_joined")[2:]] == [3, 4, 5]
        said = run.stopped()
    assert "worker 2 of 5" in said
    assert "and has left: 2 of 5 are there" in said
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert (summary["exit"], summary["workers"]) == ("stopped: SIGTERM", 5)
    assert summary["restarts"] == 2  # those that came twice; to come for the first time is none
    assert load_toml(tmp_path / "run" / "config.toml").run.least_workers == 2
    check_seeds(tmp_path / "seeds")


@pytest.mark.slow
@pytest.mark.usefixtures("nothing_left")
@pytest.mark.timeout(600)
def test_the_least_are_there_whatever_happens(tmp_path: Path) -> None:
    """An actor that is killed is started again at once where it is needed; where it is not, it
    leaves, and comes again when there is room."""
    with cluster_of(3) as cluster:
        run = Run(cluster, tmp_path / "run", "impala", "--workers", "3..4")
        run.until(lambda: run.acting() == {1, 2}, "episodes of both")
        os.kill(playing(tmp_path / "seeds").pop(), signal.SIGKILL)
        run.until(lambda: len(run.events("restart")) == 1, "the one that is needed")
        assert not run.events("worker_left")
        before = playing(tmp_path / "seeds")
        cluster.add_node(num_cpus=1)
        run.until(lambda: run.acting() == {1, 2, 3}, "episodes of the one that has come")
        (new,) = playing(tmp_path / "seeds") - before
        os.kill(new, signal.SIGKILL)
        run.until(lambda: len(run.events("worker_joined")) == 2, "that it comes again")
        assert [event["there"] for event in run.events("worker_left")] == [3]
        run.until(lambda: len(run.events("restart")) == 2, "what it sends")
        run.stopped()
    assert [e["action"] for e in run.events("worker_fault")] == ["restart", "continue"]
    check_seeds(tmp_path / "seeds")


@pytest.mark.slow
@pytest.mark.usefixtures("nothing_left")
@pytest.mark.timeout(600)
def test_a_node_with_another_version_has_no_part_in_it(tmp_path: Path) -> None:
    other = tmp_path / "other" / "manyhands"
    shutil.copytree(Path(mh.__file__).parent, other)
    with (other / "types.py").open("a") as file:
        file.write("# of another version\n")
    with cluster_of(2) as cluster:
        run = Run(cluster, tmp_path / "run", "impala", "--workers", "2..3")
        run.learns_on()
        alike = os.pathsep.join(sys.path[1:])
        cluster.add_node(num_cpus=1, env_vars={"PYTHONPATH": str(other.parent)})
        run.until(lambda: len(run.events("node_refused")) == 1, "a look at the node")
        run.learns_on()
        cluster.add_node(num_cpus=1, env_vars={"PYTHONPATH": alike})
        run.until(lambda: run.acting() == {1, 2}, "episodes of the one that is alike")
        assert [event["there"] for event in run.events("worker_joined")] == [3]
        assert len(run.events("node_refused")) == 1
        said = run.stopped()
    assert said.count("has no part in this run: start: workers do not all run the same") == 1
    assert f"{other} (" in said


def test_a_node_that_runs_something_else_is_not_tried_again(
    capsys: pytest.CaptureFixture[str],
) -> None:
    here = hosts.what_runs(script=False)
    found = {"host": "newcomer", "node": "n1", "pid": 7, "runs": here | {"torch": ["0.1"]}}
    killed: list[Any] = []
    events: list[tuple[str, Any]] = []
    actors = _Actors.__new__(_Actors)
    actors._size, actors._absent, actors._unlike = 3, {2}, set()
    actors._where = [{"host": "first", "node": "n0", "pid": 1, "runs": here}, {}, {}]
    actors._coming, actors._seats = {"where": (2, "n1")}, {2: "seat"}
    actors._recovery = SimpleNamespace(event=lambda kind, **facts: events.append((kind, facts)))
    actors._ray = SimpleNamespace(
        get=lambda ref: json.dumps(found),
        kill=killed.append,
        exceptions=SimpleNamespace(RayError=OSError),
        nodes=lambda: [
            {"NodeID": node, "Alive": True, "Resources": {"CPU": 2}} for node in ("n0", "n1")
        ],
    )
    running: dict[Any, int] = {}
    assert set(actors._room()) == {"n0", "n1"}
    actors._joined("where", running)
    assert (killed, running, actors._absent) == (["seat"], {}, {2})
    assert set(actors._room()) == {"n0"}
    ((kind, facts),) = events
    assert (kind, facts["host"]) == ("node_refused", "newcomer")
    assert "torch:" in facts["why"]
    assert "worker 2 of 3 on newcomer: 0.1" in facts["why"]
    assert "newcomer has no part in this run" in capsys.readouterr().err


def test_whoever_is_started_again_runs_what_the_others_run() -> None:
    """Before its first line of the program; the run ends with what differs, and does not try again
    for as long as it may."""
    here = hosts.what_runs(script=False)
    for runs, ok in ((here, True), (here | {"numpy": ["0.1"]}, False), ({}, True)):
        seat = Seat.__new__(Seat)
        seat._rank = 3
        order = {"runs": runs, "travels": "", "env": {}, "path": [], "folder": "", "payload": {},
                 "run": "builtins:len"}  # fmt: skip
        said: Any = wire.decode(seat.run(json.dumps(order)))
        assert said["ok"] is ok
        if not ok:
            assert said["differs"]
            assert "numpy:\n    worker 0: 0.1\n    worker 3 on" in said["summary"]


def playing(folder: Path) -> set[int]:
    """Processes that run and have begun episodes."""
    begun = [path for path in folder.iterdir() if set(path.read_text().split()) - {"0"}]
    pids = {int(path.name.partition("-")[0]) for path in begun}
    return {pid for pid in pids if alive(pid)}


def test_a_cluster_that_is_too_small_says_so(tmp_path: Path) -> None:
    with cluster_of(2) as cluster:
        run = Run(cluster, tmp_path / "run", "impala", "--workers", "3..5")
        said, _ = run.process.communicate(timeout=SECONDS)
    assert run.process.returncode == 2
    assert "3 workers x 1 CPU = 3, the cluster at" in said
    assert "has 2; ask for fewer workers or add nodes" in said


def test_as_many_begin_as_there_is_room_for() -> None:
    assert _fitting(2, 16, 1, {"a": 2, "b": 4.0}) == 6
    assert _fitting(2, 4, 1, {"a": 2, "b": 4.0}) == 4
    assert _fitting(2, 16, 2, {"a": 3, "b": 3.9}) == 2  # a worker is on one node
    with pytest.raises(
        ConfigError, match=r"4 workers x 1 CPU = 4 are the least of --workers 4\.\.9"
    ):
        _fitting(4, 9, 1, {"a": 2, "b": 1.5})


# -- where it is refused ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("algorithm", "options", "said"),
    [
        ("impala", {"engine": "local"}, "type: --workers 5, or --engine ray --address HOST:6379"),
        ("ppo", {}, "none can come or go; type: --workers 5"),
        ("a2c", {}, "type: --strategy gradient_server, or --workers 5"),
        ("impala", {"workers": "1..5"}, "one at least has to; type: --workers 2..5"),
        ("impala", {"workers": "5..2"}, "the least comes first, as in --workers 2..16"),
        ("a2c", {"strategy": "gradient_server", "workers": "3..6", "reducers": 1},
         "leave --reducers out"),
        ("dqn", {"replay_size": 4000, "learning_starts": 3000}, "type: --learning-starts 1000"),
        ("impala", {"on_worker_failure": "stop"}, "do not go together"),
    ],
)  # fmt: skip
def test_a_range_that_cannot_be_is_refused_in_one_sentence(
    algorithm: str, options: dict[str, Any], said: str
) -> None:
    values = {"env": "CartPole-v1", "num_envs": 40, "engine": "ray", "workers": "2..5"} | options
    (found,) = faults(build(algorithm, **values))
    assert said in found


def test_a_range_is_kept_in_files(tmp_path: Path) -> None:
    experiment = build("impala", env="CartPole-v1", workers="2..16", engine="ray")
    save_toml(tmp_path / "config.toml", experiment)
    assert 'workers = "2..16"' in (tmp_path / "config.toml").read_text()
    for again in (load_toml(tmp_path / "config.toml"), from_plain(to_plain(experiment))):
        assert (again.run.workers, again.run.least_workers) == (16, 2)
        assert again == experiment
    one = build("impala", env="CartPole-v1", workers=4).run
    assert (one.workers, one.least_workers) == (4, 4)
    with pytest.raises(ConfigError, match=r"workers='2\.\.': a whole number is expected, or two"):
        build("impala", env="CartPole-v1", workers="2..")

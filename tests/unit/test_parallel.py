"""`Parallel` in a plain process: one worker, and every call means what it says."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import programs
import pytest
import torch
from answers import answers
from torch import nn

import manyhands
from manyhands import ConfigError, Parallel, SupportError, launch
from manyhands.engines.attach import timeout_from
from manyhands.engines.base import DEFAULT_TIMEOUT


def part_of_itself() -> dict[str, Any]:
    tree: dict[str, Any] = {"x": np.ones(2)}
    tree["itself"] = tree
    return tree


@pytest.fixture
def par() -> Parallel:
    return Parallel()


def test_place(par: Parallel) -> None:
    assert (par.rank, par.size, par.is_main) == (0, 1, True)
    assert (par.role, par.role_rank, par.role_size) == ("worker", 0, 1)
    expected = "cuda:0" if torch.cuda.is_available() else "cpu"
    assert str(par.device) == expected


def test_seed_repeats(par: Parallel) -> None:
    par.seed(3)
    first = float(torch.rand(())), float(np.random.rand())
    par.seed(3)
    assert (float(torch.rand(())), float(np.random.rand())) == first
    par.seed(4)
    assert float(torch.rand(())) != first[0]


def test_make_vec(par: Parallel) -> None:
    par.seed(1)
    with_seed = par.make_vec("CartPole-v1", num_envs=3)
    again = par.make_vec("CartPole-v1", num_envs=3)
    one, _ = with_seed.reset()
    two, _ = again.reset()
    assert one.shape == (3, 4)
    assert (one == two).all()
    assert len({tuple(row) for row in one}) == 3
    with_seed.close(), again.close()
    with pytest.raises(ConfigError, match="num_envs=0"):
        par.make_vec("CartPole-v1", num_envs=0)


@pytest.mark.parametrize("total", [0, 1, 7, 4000])
def test_share_of_one_worker_is_all(par: Parallel, total: int) -> None:
    assert par.share(total) == total


def shares(totals: list[int]) -> list[int]:
    par = Parallel()
    return [par.share(t) for t in totals]


def test_shares_sum_to_the_total_and_differ_by_one_at_most(par: Parallel) -> None:
    totals = [0, 1, 2, 3, 7, 100, 4001]
    for workers in (2, 3, 5):
        parts = np.array(launch(shares, totals, workers=workers, engine="inline"))
        assert parts.sum(axis=0).tolist() == totals
        assert (parts.max(axis=0) - parts.min(axis=0) <= 1).all()
    with pytest.raises(ConfigError, match="-3"):
        par.share(-3)


def test_gather_gives_the_same_rows_in_memory_of_its_own(par: Parallel) -> None:
    batch = {"obs": torch.zeros(4, 2), "n": [np.arange(3), 5], "empty": np.zeros((0, 3))}
    for call in (par.gather, par.all_gather):
        got: Any = call(batch)
        assert torch.equal(got["obs"], batch["obs"])
        assert got["n"][0].tolist() == [0, 1, 2]
        assert list(got["n"][1]) == [5]  # a number is one row
        assert got["empty"].shape == (0, 3)
        got["obs"].add_(1)
        assert float(batch["obs"].sum()) == 0


def test_broadcast(par: Parallel) -> None:
    assert par.broadcast({"a": 1, "b": [2.5]}) == {"a": 1, "b": [2.5]}


def test_reductions_keep_kind_and_leave_the_input_alone(par: Parallel) -> None:
    x = np.arange(4.0)
    tree = {"x": x, "t": torch.ones(2, dtype=torch.float16), "k": 3}
    for call in (par.mean, par.sum, par.max, par.min):
        got = call(tree)
        assert got["x"].tolist() == x.tolist()
        assert got["t"].dtype is torch.float16
        assert got["k"] == 3
        got["x"][:] = -1
        assert x.tolist() == [0, 1, 2, 3]
    assert isinstance(par.mean(3), float)
    assert isinstance(par.sum(3), int)


def test_decisions(par: Parallel) -> None:
    assert par.any(np.float32(2.0) > 1) is True
    assert par.any(torch.tensor(False)) is False
    assert par.all(1) is True
    assert par.all(0) is False


def test_normalize(par: Parallel) -> None:
    x = torch.randn(50, dtype=torch.float64) * 3 + 1e6
    z = par.normalize(x)
    assert abs(float(z.mean())) < 1e-6
    assert abs(float(z.std(unbiased=False)) - 1) < 1e-6
    assert par.normalize(np.zeros(0)).shape == (0,)
    assert par.normalize(np.full(5, 7.0)).tolist() == [0.0] * 5
    assert par.normalize(torch.ones(3, dtype=torch.float32)).dtype is torch.float32


def test_models(par: Parallel) -> None:
    model = nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3))
    optimizer = torch.optim.Adam(model.parameters())
    before = {k: v.clone() for k, v in model.state_dict().items()}
    par.sync(model, optimizer)
    model(torch.ones(4, 2)).sum().backward()
    gradient = model[0].weight.grad.clone()
    par.average_gradients(model)
    par.average_gradients(model.parameters(), weight=3)
    par.average_weights(model)
    par.check_synced(model)
    assert torch.equal(model[0].weight.grad, gradient)
    assert torch.equal(model[0].weight, before["0.weight"])
    assert par.data_parallel(model) is model


def test_sync_refuses_what_it_cannot_sync(par: Parallel) -> None:
    with pytest.raises(ConfigError, match=r"ndarray.*par\.broadcast"):
        par.sync(np.zeros(3))


def test_blocks_of_one_worker(par: Parallel) -> None:
    queue = par.channel("own", capacity=2)
    queue.put({"x": np.arange(2)})
    assert len(queue) == 1
    assert queue.get()["x"].tolist() == [0, 1]
    with pytest.raises(manyhands.CollectiveError):
        queue.get(timeout=0.05)
    store = par.weights("own")
    assert store.pull() is None
    assert store.publish({"w": np.ones(2)}) == 1
    version, tree = store.pull()  # type: ignore[misc]
    assert (version, tree["w"].tolist()) == (1, [1.0, 1.0])
    par.serve("own-list", [3, 1, 3])
    assert par.service("own-list").call("count", 3) == 2


def test_print_barrier_close(par: Parallel, capsys: pytest.CaptureFixture[str]) -> None:
    par.print("once", "more", sep="-")
    par.barrier()
    par.close()
    par.close()
    assert capsys.readouterr().out == "once-more\n"


TIMED = """
import time
from manyhands import Parallel
par = Parallel()
for _ in range(3):
    with par.timer("rollout"):
        time.sleep(0.05)
    with par.timer("learn"):
        time.sleep(0.01)
assert 0.14 < par.seconds["rollout"] < 30
print("last line of the script")
"""


def plain(script: str, tmp_path: Path, *args: str) -> subprocess.CompletedProcess[str]:
    (tmp_path / "script.py").write_text(script)
    env = {k: v for k, v in os.environ.items() if not k.startswith("MANYHANDS_R")}
    command = [sys.executable, *args, str(tmp_path / "script.py")]
    return subprocess.run(command, capture_output=True, text=True, timeout=200, env=env)


def test_timer_prints_one_table_at_the_end(tmp_path: Path) -> None:
    text = plain(TIMED, tmp_path).stdout
    after = text.partition("last line of the script")[2]
    rows = [line.split() for line in after.splitlines() if "%" in line]
    assert [row[0] for row in rows] == ["rollout", "learn", "everything"]
    assert float(rows[0][1]) >= 0.15
    assert abs(sum(float(row[-2]) for row in rows) - 100) < 0.5


def test_timer_on_two_workers_prints_once(tmp_path: Path) -> None:
    launcher = ("-m", "manyhands.cli.main", "launch", "-n", "2")
    text = plain(TIMED, tmp_path, *launcher).stdout
    assert text.count("main worker") == 1
    assert text.count("rollout") == 1


def test_plain_script_with_an_unseeded_generator_differs_between_runs(tmp_path: Path) -> None:
    script = "from manyhands import Parallel; Parallel(); import random; print(random.random())"
    assert plain(script, tmp_path).stdout != plain(script, tmp_path).stdout


def test_same_torch_seed_is_warned_of_once() -> None:
    main, *others = answers("local", "seeds alike")
    assert [len(texts) for texts in main] == list(programs.SEEDED.values())
    assert others == [[[], [], []]] * 2
    assert all("par.seed" in text for texts in main for text in texts)


def no_ddp() -> str:
    try:
        Parallel().data_parallel(nn.Linear(1, 1))
    except SupportError as error:
        return str(error)
    return ""


def test_data_parallel_says_where_it_lives() -> None:
    for text in launch(no_ddp, workers=2, engine="inline"):
        assert "torch or ray engine" in text
        assert "average_gradients" in text


def test_timeout_and_debug_are_taken(tmp_path: Path) -> None:
    script = (
        "from manyhands import Parallel\npar = Parallel(timeout=7, debug=True)\n"
        "print(par.worker.timeout, par.group.transport.timeout, par.group.debug)"
    )
    assert plain(script, tmp_path).stdout.split() == ["7.0", "7.0", "True"]


@pytest.mark.parametrize("timeout", [float("nan"), -1, float("inf"), 10**400, "7", True])
def test_a_deadline_is_a_number_of_seconds(timeout: Any, par: Parallel) -> None:
    """NaN is neither more nor less than 0, and so passed for it: for ever."""
    with pytest.raises(ConfigError, match=r"timeout .*seconds, or 0 to wait for ever"):
        Parallel(timeout=timeout)
    with pytest.raises(ConfigError, match="seconds, or 0 to wait for ever"):
        launch(no_ddp, workers=2, timeout=timeout)
    assert par.worker.timeout == par.group.transport.timeout == DEFAULT_TIMEOUT


@pytest.mark.parametrize(
    ("call", "value"),
    [
        *((call, part_of_itself()) for call in ("gather", "broadcast", "mean")),
        ("any", np.array([True, False])),
        ("all", torch.ones(2)),
        ("normalize", None),
        ("normalize", {"x": np.ones(2)}),
        ("normalize", [[1.0], [2.0, 3.0]]),
        ("normalize", np.ones(2, complex)),
        ("normalize", torch.ones(2, dtype=torch.complex64)),
        ("normalize", torch.eye(2).to_sparse()),
        ("share", "4"),
        ("share", 1.5),
        ("share", float("nan")),
        ("share", np.ones(2)),
        ("check_synced", None),
        ("check_synced", {"x": 1}),
    ],
    ids=lambda x: x if isinstance(x, str) else type(x).__name__,
)
def test_what_makes_no_sense_is_said(call: str, value: Any, par: Parallel) -> None:
    with pytest.raises(ConfigError):
        getattr(par, call)(value)


def test_what_normalises(par: Parallel) -> None:
    for x in ([1.0, 3.0], np.array([1, 3]), torch.tensor([1.0, 3.0], dtype=torch.bfloat16)):
        assert [float(v) for v in par.normalize(x)] == pytest.approx([-1.0, 1.0])
    assert par.share(4.0) == 4


@pytest.mark.parametrize("text", ["nan", "-3", "inf", "soon"])
def test_a_deadline_from_outside(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MANYHANDS_TIMEOUT", text)
    with pytest.raises(ConfigError, match=rf"MANYHANDS_TIMEOUT.*{text}.*seconds"):
        timeout_from(None)

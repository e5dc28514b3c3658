"""What workers do in tests. Found by name in worker processes, so it imports no test library."""

from __future__ import annotations

import random
import time
import warnings
from typing import Any

import numpy as np

from manyhands.errors import CollectiveError
from manyhands.parallel import Parallel

# -- collectives -----------------------------------------------------------------------------------


def collectives() -> dict[str, Any]:
    """Each collective once, with known answers; returns what the test looks at."""
    import torch

    par = Parallel()
    r, n = par.rank, par.size
    g = par.group
    ranks = list(range(n))
    # broadcast, in nested trees, numbers and tensors alike
    tree = g.broadcast({"a": np.arange(3) + r, "b": [torch.tensor([1.5 + r]), r]})
    assert tree["a"].tolist() == [0, 1, 2]
    assert tree["b"][0].tolist() == [1.5]
    assert tree["b"][1] == 0
    assert g.broadcast(r, root=n - 1) == n - 1
    # reductions keep the kind; means of integers are floats
    assert par.sum(r) == sum(ranks)
    assert par.mean(r) == sum(ranks) / n
    assert par.max({"x": r})["x"] == n - 1
    assert par.min(np.array([r, -r])).tolist() == [0, -(n - 1)]
    assert par.sum(np.ones(4, np.uint8) * 100).dtype == np.uint8
    assert par.sum(np.array([True, r == 0])).tolist() == [n, 1]
    assert par.max(np.array([False, r == 0])).tolist() == [False, True]
    assert par.mean(torch.full((2,), float(r))).dtype == torch.float32
    assert par.mean(torch.full((2,), float(r), dtype=torch.bfloat16)).dtype == torch.bfloat16
    assert par.mean(np.array([r], np.float16)).dtype == np.float16
    large = par.sum(np.full(1_000_003, r + 1, np.float32))
    assert (large == sum(x + 1 for x in ranks)).all()
    mixed = par.mean({"i": np.int64(r), "f": np.float32([r]), "d": float(r)})
    assert mixed["f"].dtype == np.float32
    # decisions that all take alike
    assert par.any(r == n - 1) is True
    assert par.any(False) is False
    assert par.all(r >= 0) is True
    assert par.all(r == 0) is False
    # moments of unequal parts, one of them empty
    data = np.arange(10.0) if r == 0 else np.zeros(0)
    mean, std, count = g.moments(data)
    assert (mean, count) == (4.5, 10)
    assert abs(std - np.arange(10.0).std()) < 1e-12
    part = torch.arange(3.0) + 3 * r
    whole = torch.arange(3.0 * n)
    expected = (whole - whole.mean()) / (whole.std(unbiased=False) + 1e-8)
    assert torch.allclose(par.normalize(part), expected[3 * r : 3 * r + 3])
    assert par.normalize(np.zeros((0, 2))).shape == (0, 2)
    par.barrier()
    assert sum(par.all_gather(par.share(10 * n + 1))) == 10 * n + 1
    # the caller's own arrays are never touched
    mine = np.arange(3.0) + r
    par.mean(mine), par.sum(mine), g.broadcast(mine), par.all_gather(mine)
    assert mine.tolist() == (np.arange(3.0) + r).tolist()
    gathered = par.gather({"rank": r})
    return {"engine": par.engine, "rank": r, "size": n, "gathered": gathered}


def subgroups() -> list[Any]:
    par = Parallel()
    r, n = par.rank, par.size
    odd_even = par.group.subgroup([x for x in range(n) if x % 2 == r % 2])
    pair = par.group.subgroup([0, n - 1])
    first = odd_even.all_gather(r).tolist()
    second = pair.sum(r) if pair is not None else None
    inner = odd_even.subgroup([0])
    return [first, second, odd_even.rank, inner.size if inner is not None else None]


def one_case(case: dict[str, Any], rank: int) -> Any:
    """This worker's tree of a generated case; the same on every worker that asks for `rank`."""
    import torch

    def leaf(spec: dict[str, Any], path: int) -> Any:
        rows = spec["rows"][rank % len(spec["rows"])]
        shape = (rows, *spec["trailing"]) if spec["dims"] > 0 else ()
        rng = np.random.default_rng([spec["seed"], rank, path])
        values = np.asarray(rng.integers(0, 2 if spec["dtype"] == "bool" else 100, shape))
        array = values.astype(spec["dtype"])
        return torch.from_numpy(array.copy()) if spec["torch"] else array

    def build(node: Any, path: int) -> Any:
        if "dtype" in node:
            return leaf(node, path)
        return {k: build(v, path * 31 + i) for i, (k, v) in enumerate(sorted(node.items()))}

    return build(case, 1)


def joined(parts: list[Any]) -> Any:
    """The slow reference: concatenate by hand, leaf by leaf."""
    if isinstance(parts[0], dict):
        return {k: joined([p[k] for p in parts]) for k in parts[0]}
    arrays = [np.asarray(p) for p in parts]
    return np.concatenate([a.reshape(1) if a.ndim == 0 else a for a in arrays])


def same(result: Any, expected: Any, given: Any) -> bool:
    if isinstance(expected, dict):
        return all(same(result[k], expected[k], given[k]) for k in expected)
    return (
        type(result) is type(given)
        and np.asarray(result).dtype == expected.dtype
        and np.asarray(result).shape == expected.shape
        and bool((np.asarray(result) == expected).all())
    )


def gather_cases(cases: list[dict[str, Any]]) -> list[int]:
    """Run generated cases; the numbers of those that came out wrong."""
    par = Parallel()
    wrong = []
    for number, case in enumerate(cases):
        trees = [one_case(case, rank) for rank in range(par.size)]
        expected = joined(trees)
        everywhere = par.all_gather(trees[par.rank])
        if not same(everywhere, expected, trees[par.rank]):
            wrong.append(number)
        root = number % par.size
        at_root = par.group.gather(trees[par.rank], root=root)
        well = same(at_root, expected, trees[root]) if par.rank == root else at_root is None
        if not well:
            wrong.append(number)
    return wrong


def stress(calls: int, seed: int) -> float:
    """Many collectives of all kinds in a row, with small pauses that differ between workers."""
    par = Parallel()
    plan, own = random.Random(seed), random.Random(seed + 1 + par.rank)
    total = 0.0
    for i in range(calls):
        kind = plan.choice(["gather", "all_gather", "mean", "broadcast", "barrier", "big"])
        rows = [plan.randrange(0, 40) for _ in range(par.size)]
        if own.random() < 0.3:
            time.sleep(own.random() * 2e-4)
        mine = np.full((rows[par.rank], 2), i * 10 + par.rank, np.int64)
        expected = np.concatenate(
            [np.full((n, 2), i * 10 + r, np.int64) for r, n in enumerate(rows)]
        )
        if kind == "gather":
            got = par.gather({"x": mine})
            assert got is None or (got["x"] == expected).all(), (i, kind)
        elif kind == "all_gather":
            assert (par.all_gather(mine) == expected).all(), (i, kind)
        elif kind == "mean":
            assert par.mean(float(i + par.rank)) == i + (par.size - 1) / 2, (i, kind)
        elif kind == "broadcast":
            assert (par.broadcast(np.arange(5) + i + par.rank) == np.arange(5) + i).all(), (i, kind)
        elif kind == "big":
            value = par.sum(np.full(70_001, i + par.rank, np.float64))
            assert (value == sum(i + r for r in range(par.size))).all(), (i, kind)
        else:
            par.barrier()
        total += i
    return total


# -- disagreement ----------------------------------------------------------------------------------


def disagree(how: str) -> str:
    """Worker 1 does something else than the rest; each returns the error it got."""
    par = Parallel()
    odd = par.rank == 1
    try:
        if how == "key":
            par.gather({"reward" if odd else "obs": np.zeros((2, 3))})
        elif how == "shape":
            par.gather({"obs": np.zeros((2, 4 if odd else 3))})
        elif how == "dtype":
            par.all_gather({"obs": np.zeros(2, np.float32 if odd else np.float64)})
        elif how == "mean shape":
            par.mean(np.zeros(4 if odd else 3))
        elif how == "call":
            par.barrier() if odd else par.mean(1.0)
        elif how == "skip":
            if not odd:
                par.mean(1.0)
            par.sum(np.zeros(2))
        elif how == "extra leaf":
            par.broadcast({"a": 1, "b": 2} if odd else {"a": 1})
        elif how == "deep":
            many = {f"key{i:04d}": i for i in range(900)}
            par.gather(many | ({"zz": 1} if odd else {}))
    except CollectiveError as error:
        return str(error)
    return ""


def debug_sites() -> str:
    """Same shapes, other lines: only the debug switch can tell."""
    par = Parallel(debug=True)
    try:
        if par.rank == 1:
            par.mean(1.0)
        else:
            par.mean(1.0)
    except CollectiveError as error:
        return str(error)
    return ""


def leave_early() -> str:
    par = Parallel()
    if par.rank == 1:
        return "left"
    par.barrier()
    return "met"


def late(seconds: float) -> str:
    par = Parallel()
    if par.rank == 1:
        time.sleep(seconds)
    par.barrier()
    return "met"


# -- models ----------------------------------------------------------------------------------------


def train_on_shares(steps: int, rows: int, unequal: bool = False) -> dict[str, Any]:
    """Regression by gradient averaging: this worker has its share of a fixed global batch."""
    import torch
    from torch import nn

    torch.manual_seed(0)
    par = Parallel()
    generator = torch.Generator().manual_seed(7)
    x = torch.randn(steps, rows, 5, generator=generator)
    y = torch.randn(steps, rows, 1, generator=generator)
    if unequal:
        cut = [0, 1, *range(2, par.size), rows]
        mine = slice(cut[par.rank], cut[par.rank + 1])
    else:
        mine = slice(rows * par.rank // par.size, rows * (par.rank + 1) // par.size)
    model = nn.Sequential(nn.Linear(5, 16), nn.Tanh(), nn.Linear(16, 1))
    par.sync(model)
    for step in range(steps):
        loss = (model(x[step, mine]) - y[step, mine]).square().mean()
        loss.backward()
        par.average_gradients(model, weight=len(x[step, mine]) if unequal else None)
        descend(model)
    par.check_synced(model)
    return {k: v.clone() for k, v in model.state_dict().items()}


def descend(model: Any, rate: float = 0.1) -> None:
    """By hand: the first optimiser of a process imports torch's compiler, which takes long."""
    import torch

    with torch.no_grad():
        for parameter in model.parameters():
            parameter -= rate * parameter.grad
            parameter.grad = None


def models() -> str:
    """sync, average_weights, optimiser state, unused parameters, check_synced."""
    import torch
    from torch import nn

    par = Parallel()
    par.seed(5)
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 2))
    before = model[0].weight.detach().clone()
    model(torch.randn(8, 3) + par.rank)  # moves the running statistics apart
    par.sync(model)
    par.check_synced(model)
    assert par.is_main or not torch.equal(before, model[0].weight)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1 if par.is_main else 0.2)
    if par.is_main:
        model(torch.randn(8, 3)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    par.sync(model, optimizer)
    par.check_synced(model)
    state = optimizer.state_dict()
    assert state["param_groups"][0]["lr"] == 0.1
    par.group.check_equal("optimiser", state["state"][0]["exp_avg"])
    with torch.no_grad():
        model[0].weight.fill_(float(par.rank))
    par.average_weights(model)
    assert torch.allclose(model[0].weight, torch.full((4, 3), (par.size - 1) / 2))
    # a parameter that only worker 0 uses, and one that nobody uses
    used, idle = nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(2))
    if par.is_main:
        (used * 4).sum().backward()
    par.average_gradients([used, idle])
    assert used.grad is not None
    assert torch.allclose(used.grad, torch.full((2,), 4.0 / par.size))
    assert idle.grad is None
    with torch.no_grad():
        model[2].bias += par.rank == par.size - 1
    try:
        par.check_synced(model)
    except CollectiveError as error:
        return str(error)
    return ""


def data_parallel(around: bool) -> str:
    """DDP through forward keeps replicas equal; around it, by .module, they part."""
    import torch
    from torch import nn

    torch.manual_seed(0)
    par = Parallel()
    model = nn.Linear(3, 1)
    par.sync(model)
    wrapped = par.data_parallel(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(3):
        x = torch.randn(4, 3) + par.rank
        optimizer.zero_grad()
        (wrapped.module if around else wrapped)(x).square().mean().backward()
        optimizer.step()
    try:
        par.check_synced(model)
    except CollectiveError as error:
        return str(error)
    return ""


def random_streams() -> list[float]:
    import torch

    torch.manual_seed(3)
    Parallel()
    return [random.random(), float(np.random.rand()), float(torch.rand(()))]


def env_seeds() -> list[float]:
    par = Parallel()
    par.seed(1)
    envs = par.make_vec("CartPole-v1", num_envs=2)
    obs, _ = envs.reset(seed=1)
    envs.close()
    return [float(x) for x in obs[:, 0]]


SEEDED = {"before": 0, "par.seed": 0, "after": 1}  # how, and the warnings that it gets


def seeds_alike() -> list[list[str]]:
    """Seed torch at the wrong or the right place; the warnings of each way."""
    import torch

    found = []
    for how in SEEDED:
        if how == "before":
            torch.manual_seed(0)
        par = Parallel()
        if how == "after":
            torch.manual_seed(0)
        if how == "par.seed":
            par.seed(0)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            par.sync(torch.nn.Linear(1, 1))
            par.sync(torch.nn.Linear(1, 1))
        said = [str(warning.message) for warning in caught]
        found.append([text for text in said if "same random numbers" in text])
    return found


# -- equivalence -----------------------------------------------------------------------------------


def train_by_gather(steps: int, rows: int) -> dict[str, Any]:
    """Regression where rows are joined on the main worker, which alone updates and sends back."""
    import torch
    from torch import nn

    torch.manual_seed(0)
    par = Parallel()
    generator = torch.Generator().manual_seed(7)
    x = torch.randn(steps, rows, 5, generator=generator)
    y = torch.randn(steps, rows, 1, generator=generator)
    cut = [0, *(rows * r // par.size + 1 for r in range(1, par.size)), rows]  # unequal parts
    mine = slice(cut[par.rank], cut[par.rank + 1])
    model = nn.Sequential(nn.Linear(5, 16), nn.Tanh(), nn.Linear(16, 1))
    for step in range(steps):
        par.sync(model)
        batch = par.gather({"x": x[step, mine], "y": y[step, mine]})
        if batch is not None:
            loss = (model(batch["x"]) - batch["y"]).square().mean()
            loss.backward()
            descend(model)
    par.sync(model)
    par.check_synced(model)
    return {k: v.clone() for k, v in model.state_dict().items()}


def train_all_ways(steps: int, rows: int) -> dict[str, Any]:
    """Every way of learning together, one after the other in the same workers."""
    return {
        "averaged": train_on_shares(steps, rows),
        "averaged again": train_on_shares(steps, rows),
        "unequal": train_on_shares(steps, rows, True),
        "gathered": train_by_gather(steps, rows),
    }

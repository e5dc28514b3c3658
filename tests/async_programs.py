"""What workers do in the tests of the asynchronous parts."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np

from manyhands import Parallel, roles
from manyhands.engines.attach import detect
from manyhands.engines.shared import DONE
from manyhands.errors import ManyhandsError


def network(inputs: int = 3, outputs: int = 2) -> Any:
    import torch

    torch.manual_seed(0)
    return torch.nn.Linear(inputs, outputs)


# -- gradient server -------------------------------------------------------------------------------


def push_many(
    name: str, each: int, pushes: int, reduce: str, relays: list[int], max_lag: int
) -> Any:
    """Every worker but the owner pushes whole numbers, so that sums are exact in any order."""
    import torch

    par = Parallel()
    model = torch.nn.Linear(2, 1, bias=False)
    with torch.no_grad():
        model.weight.zero_()
    server = par.gradient_server(
        name,
        model,
        lambda p: torch.optim.SGD(p, lr=1.0),
        pushes=pushes,
        reduce=reduce,  # type: ignore[arg-type]
        max_lag=None if max_lag < 0 else max_lag,
        relays=tuple(relays),
    )
    par.barrier()
    for i in range(each if par.rank > 0 else 0):
        if i % 10 == 0:
            server.pull()
        model.weight.grad = torch.tensor([[1.0, float(par.rank)]])
        server.push()
    par.barrier()
    server.flush()
    par.barrier()
    server.pull()
    told = {"taken": server.taken, "refused": server.refused}
    told |= {"weight": model.weight.detach().numpy().ravel().tolist()}
    counters = server.counters()
    par.barrier()  # the server stays until all have asked
    return told | {"counters": counters}


def different_networks(what: str) -> str:
    """The learner's network is wider than the actors': said when the server is made."""
    import torch

    par = Parallel()
    said, own = "", network(outputs=2 if par.rank == 0 else 3)
    try:
        if what == "weights":
            par.weight_server("narrow and wide", own)
        else:
            par.gradient_server("narrow and wide", own, lambda p: torch.optim.SGD(p, lr=1.0))
    except ManyhandsError as error:
        said = str(error)
    par.barrier()
    return said


def served_by_one_that_left() -> str:
    par, own = Parallel(), network()
    if par.rank == 0:
        par.weight_server("policy", own)
        return ""
    while par.worker.board.state(0) != DONE:  # type: ignore[attr-defined]
        time.sleep(0.01)
    try:
        par.weight_server("policy", own)
    except ManyhandsError as error:
        return str(error)
    return "there"


def weight_versions() -> Any:
    par = Parallel()
    model = network()
    server = par.weight_server("policy", model, history=3)
    par.barrier()
    told: dict[str, Any] = {"first": server.version}
    if par.rank == 1:
        told["pushed"] = server.push()
        told["version"] = server.version
        told["nothing newer"] = server.pull()
    par.barrier()
    if par.rank == 2:
        told["too late"] = server.push()
        told["then"] = server.version  # pulled, because the push failed
        told["again"] = server.push()
    par.barrier()
    if par.rank == 0:
        for _ in range(4):
            server.pull()
            server.push()
        told["counters"] = server.counters()
        told["old"] = server.pull(version=server.version - 2)
        try:
            server.pull(version=1)
        except ManyhandsError as error:
            told["gone"] = str(error)
    par.barrier()
    return told


def shared_values() -> Any:
    par = Parallel()
    values = par.values()
    for _ in range(50):
        values.add("count")
    won = values.swap("first", None, par.rank)
    par.barrier()
    found = [values["count"], values["first"], won, values.get("missing", 7)]
    par.barrier()
    return found


def put_where_there_is_room() -> Any:
    """Two readers that go on together: the first one's channel is full while the second waits."""
    from manyhands.strategies.messages import put_to_any

    par = Parallel()
    full, empty = (par.channel(f"to {r}", reader=r, capacity=1) for r in (0, 1))
    found: list[int] = []
    if par.rank == 2:
        full.put({"n": 0})
        for n in (1, 2):
            put_to_any([full, empty], {"n": n}, 60.0)
    elif par.rank == 1:
        found = [int(empty.get()["n"]) for _ in range(2)]
    par.barrier()
    if par.rank == 0:
        found = [int(full.get()["n"])]
    par.barrier()
    return found


# -- roles -----------------------------------------------------------------------------------------


def in_roles() -> Any:
    """Only those of a role make its group; the others do something else meanwhile."""
    par = Parallel()
    mean = par.group_of(par.role).mean(float(par.rank)) if par.role == "learner" else None
    said = ""
    try:
        par.group_of("learner")
    except ManyhandsError as error:
        said = str(error)
    par.barrier()
    return [par.role, par.role_rank, par.role_size, par.worker.place.name, mean, said]


# -- learners --------------------------------------------------------------------------------------


def impala(**options: Any) -> Any:
    from manyhands.algorithms.impala import IMPALA
    from manyhands.algorithms.registry import IMPALAConfig
    from manyhands.envs import make_vec
    from manyhands.networks.build import build_actor_critic, build_recurrent

    envs = make_vec("CartPole-v1", 2, seed=5)
    spaces = envs.observation_space, envs.action_space
    units = int(options.get("lstm", 0))
    model: Any = build_actor_critic(*spaces, hidden=(16, 16), seed=3)
    if units:
        model = build_recurrent(*spaces, units=units, hidden=(16,), seed=3)
    return IMPALA(model, IMPALAConfig(**options), seed=1), envs


def unrolls_of(algorithm: Any, envs: Any, count: int, length: int = 12, **more: Any) -> list[Any]:
    """Unrolls with memory of their own, played by the weights as they are."""
    from manyhands import wire
    from manyhands.collect.unroll import UnrollCollector
    from manyhands.math.running_stats import Normaliser
    from manyhands.streams import EnvNoise

    collector = UnrollCollector(
        envs,
        algorithm.actor,
        length,
        EnvNoise(1, 0, envs.num_envs),
        Normaliser(envs.observation_space, False, False, 0.99),
        state_size=getattr(algorithm.model, "state_size", 0),
        **more,
    )
    found: list[Any] = []
    while len(found) < count:
        found += [wire.decode(wire.encode(u)) for u in collector.collect(algorithm.version)]
    return found[:count]


def learn_from_the_same(updates: int, learners: int) -> Any:
    """Updates from unrolls that all learners know, each learner taking its part of every four."""
    from manyhands.algorithms.base import Alone
    from manyhands.collect.unroll import joined
    from manyhands.engines.attach import attach
    from manyhands.engines.group import OverGroup
    from manyhands.experiment.bottleneck import Phases

    worker = attach()
    algorithm, envs = impala(learning_rate=1e-3, entropy_weight=0.01)
    unrolls = unrolls_of(algorithm, envs, 24)
    envs.close()
    across: Any = Alone() if learners == 1 else OverGroup(worker.group, Phases())
    share, rank = 4 // learners, worker.place.rank
    for update in range(updates):
        four = [unrolls[(4 * update + i) % len(unrolls)] for i in range(4)]
        mine = four[rank * share : (rank + 1) * share]
        algorithm.update(algorithm.prepare_unroll(joined(mine)), across, 0.0)
    return algorithm.flat.data.numpy().copy()


# -- whole runs ------------------------------------------------------------------------------------


class Slow(gymnasium.Wrapper):  # type: ignore[type-arg]
    """One actor is slower than it was, by `times`, once it has seen how long its steps take.

    A step is all that happens from one to the next: acting, sending, the environment.
    """

    SEEN = 64

    def __init__(self, env: Any, times: float) -> None:
        super().__init__(env)
        self._times, self._last = times, 0.0
        self._took: list[float] = []
        self._pause = 0.0

    def step(self, action: Any) -> Any:
        now = time.perf_counter()
        if self._last and not self._pause:
            self._took.append(now - self._last)
            if len(self._took) == self.SEEN:
                self._pause = (self._times - 1) * float(np.mean(self._took))
        self._last = now
        if self._pause and _is_last():
            time.sleep(self._pause)
        return self.env.step(action)


class Wait(gymnasium.Wrapper):  # type: ignore[type-arg]
    """A step takes its time without work for the processor; longer in the last actor."""

    def __init__(self, env: Any, seconds: float, times: float) -> None:
        super().__init__(env)
        self._seconds, self._times = seconds, times

    def step(self, action: Any) -> Any:
        time.sleep(self._seconds * (self._times if _is_last() else 1.0))
        return self.env.step(action)


class Deadly(gymnasium.Wrapper):  # type: ignore[type-arg]
    """The last actor is killed in its first life, after some steps, which take their time: what
    the others do until it is back is no work for the processor."""

    def __init__(self, env: Any, steps: int, seconds: float) -> None:
        super().__init__(env)
        self._left, self._seconds = steps, seconds

    def step(self, action: Any) -> Any:
        time.sleep(self._seconds)
        self._left -= 1
        if self._left == 0 and _is_last() and os.environ.get("MANYHANDS_RESTARTS", "0") == "0":
            os.kill(os.getpid(), signal.SIGKILL)
        return self.env.step(action)


class Seeded(gymnasium.Wrapper):  # type: ignore[type-arg]
    """CartPole of 30 steps, which writes down each seed that an episode begins with."""

    def __init__(self, folder: str) -> None:
        super().__init__(gymnasium.make("CartPole-v1", max_episode_steps=30))
        self._file = Path(folder, f"{os.getpid()}-{id(self)}")

    def reset(self, **kwargs: Any) -> Any:
        with open(self._file, "a") as file:
            file.write(f"{kwargs['seed']}\n")
        return super().reset(**kwargs)


def seeded_cartpole(folder: str) -> Any:
    return Seeded(folder)


def _is_last() -> bool:
    place = detect(os.environ)
    return place.size > 1 and place.rank == place.size - 1


def slow_cartpole(times: float = 100.0) -> Any:
    return Slow(gymnasium.make("CartPole-v1"), times)


def waiting_cartpole(seconds: float, times: float = 1.0) -> Any:
    return Wait(gymnasium.make("CartPole-v1"), seconds, times)


def deadly_cartpole(steps: int = 300, seconds: float = 0.0) -> Any:
    return Deadly(gymnasium.make("CartPole-v1"), steps, seconds)


def role_names(text: str) -> list[str]:
    given = roles.parse(text)
    return [given.name(rank) for rank in range(given.size)]


def exact(values: Any) -> Any:
    return np.asarray(values, np.float64)


# -- environments that fail ------------------------------------------------------------------------


class Faulty(gymnasium.Wrapper):  # type: ignore[misc]
    """CartPole that fails in its `at`-th step, in its worker's first life: `how` says what happens
    on which rank, such as {"1": "raise", "2": "segfault"}; with `always`, in every life."""

    def __init__(self, how: dict[str, str], at: int, seconds: float, always: bool) -> None:
        super().__init__(gymnasium.make("CartPole-v1"))
        life = os.environ.get("MANYHANDS_RESTARTS", "0")
        mine = how.get(os.environ.get("MANYHANDS_RANK", "0"), "")
        self._how = mine if always or life == "0" else ""
        self._left, self._seconds = at, seconds

    def step(self, action: Any) -> Any:
        time.sleep(self._seconds)
        self._left -= 1
        if self._how and self._left == 0:
            fail(self._how)
        return super().step(action)


def fail(how: str) -> None:
    import ctypes
    import sys

    match how:
        case "raise":
            raise RuntimeError("failed on purpose")
        case "leave":
            sys.exit(0)
        case "leave at once":
            os._exit(0)
        case "segfault":
            ctypes.string_at(0)
        case "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        case "freeze":
            os.kill(os.getpid(), signal.SIGSTOP)
        case "sleep":
            time.sleep(1e6)
        case "hold the lock":
            ctypes.PyDLL(None).sleep(1_000_000)


def faulty_cartpole(
    how: dict[str, str], at: int = 200, seconds: float = 0.0005, always: bool = False
) -> Any:
    return Faulty(how, at, seconds, always)


class Killed(gymnasium.Wrapper):  # type: ignore[misc]
    """Its process is killed once in so many steps on average, in every life."""

    def __init__(self, once_in: int) -> None:
        super().__init__(gymnasium.make("CartPole-v1"))
        self._once_in = once_in
        self._chance = np.random.default_rng([os.getpid(), time.time_ns()])

    def step(self, action: Any) -> Any:
        if self._chance.random() < 1 / self._once_in:
            os.kill(os.getpid(), signal.SIGKILL)
        return super().step(action)


def killed_cartpole(once_in: int = 3000) -> Any:
    return Killed(once_in)


class Crashing(gymnasium.Wrapper):  # type: ignore[misc]
    """Raises once in so many steps on average, and now and then takes its time."""

    def __init__(self, once_in: int, stall: float) -> None:
        super().__init__(gymnasium.make("CartPole-v1"))
        self._once_in, self._stall = once_in, stall
        self._chance = np.random.default_rng([os.getpid(), time.time_ns()])

    def step(self, action: Any) -> Any:
        if self._chance.random() < 1 / self._once_in:
            raise RuntimeError("crashed, as it does once in a while")
        if self._chance.random() < 1 / (5 * self._once_in):
            time.sleep(self._stall)
        return super().step(action)


def crashing_cartpole(once_in: int = 2000, stall: float = 2.0) -> Any:
    return Crashing(once_in, stall)

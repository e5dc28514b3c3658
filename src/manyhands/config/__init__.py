"""A run as data: frozen dataclasses, from keyword arguments, from TOML, and back.

Every number is for all workers together unless its name says otherwise, so that adding workers
changes the speed and not what is learned. The line under each field is its help on the command
line; what stands in braces there is filled in from the code (`_from_the_code`). Cross-checks
between the values are in `validate.py`; here only names and types are checked.
"""

from __future__ import annotations

import ast
import dataclasses
import difflib
import inspect
import itertools
import os
import textwrap
import tomllib
import typing
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import MISSING, dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal

import tomli_w

from manyhands import files, support
from manyhands.algorithms.registry import SPECS, AlgorithmSpec, spec_of
from manyhands.config.values import Workers, coerce
from manyhands.errors import ConfigError
from manyhands.roles import Roles
from manyhands.strategies import registry as strategies
from manyhands.strategies.registry import StrategySpec

_MAX_TOML = 1 << 20  # bytes


@dataclass(frozen=True, kw_only=True)
class RunConfig:
    """What to train on, with how many workers, and where the results go."""

    env: str
    """Gymnasium id, such as CartPole-v1, or package.module:function that makes an environment."""
    strategy: str = ""
    """Who acts and who learns: {strategies} (empty: single for one worker, else {defaults})."""
    engine: str = "local"
    """How workers run and talk: {engines}."""
    workers: Workers = Workers(1)  # noqa: RUF009 (a number)
    """Number of workers, those that only learn or serve included. With engine=ray and {recovering}
    also 2..16: begin with as many as the cluster has room for, and let others come and go."""
    steps: int = 100_000
    """Environment steps of all workers together."""
    seed: int = 1
    """Root of every random number of the run; the same seed and workers repeat it."""
    run_dir: str = ""
    """Folder of the results (empty: runs/ENV/ALGORITHM-STRATEGY/SEED-TIME)."""
    start_from: str = ""
    """Folder of an earlier run, or its best/, whose weights this one begins with (fine-tuning); the
    environment and other options may differ. What does not fit is listed, and begins anew."""
    target_return: float | None = None
    """End as solved once the mean return of the last 100 finished episodes is at least this."""
    num_envs: int = 8
    """Environments of all workers together."""
    rollout_length: int = 0
    """Steps of each environment between updates (0: what suits the algorithm: {lengths})."""
    collect: Literal["steps", "episodes"] = "steps"
    """A batch is a fixed number of steps of each environment, or whole episodes."""
    batch_steps: int = 0
    """With collect=episodes: whole episodes until there are so many steps in all."""
    overlap: bool = False
    """With strategy={its}: learn while the next batch is collected, with weights that are exactly
    one update old. With gather the main worker only learns; on one worker it takes a GPU and ALE's
    images."""
    learners: int = 1
    """With strategy={its}: how many of the workers learn; the others act."""
    unrolls: int = 0
    """With strategy={its}: unrolls of one update, of all learners together; with
    collect=episodes each is a whole episode (0: one for each actor)."""
    pushes: int = 1
    """With strategy={its}: gradients that one step of the optimiser takes."""
    reduce: Literal["mean", "sum"] = "mean"
    """With strategy={its}: what becomes of them."""
    reducers: int = 0
    """With strategy={its}: workers that add gradients up on their way to the server; of
    use with very many workers."""
    max_lag: int = 20
    """With strategy={its}: what was made by a policy more than so many updates old is
    refused, and counted."""
    queue: int = 2
    """With strategy={its}: unrolls or gradients that each worker may have waiting before it
    must wait itself."""
    on_worker_failure: Literal["auto", "restart", "continue", "stop"] = "auto"
    """When a worker that acts raises, is killed or goes silent: start it again, go on without it,
    or end the run (auto: restart with {recovering} on {restarting}, else stop)."""
    max_restarts: int = 5
    """Restarts of one worker within a minute; one more is a crash loop, and ends the run."""
    min_workers: int = 1
    """With on_worker_failure=continue: how many of the workers that act must be left."""
    wait_for: float = 1.0
    """With strategy={its}: learn as soon as this share of the batch is there; what comes later is
    in the next batch, with the version of its policy."""
    env_backend: str = "auto"
    """What steps the environments: auto, gymnasium, vector, envpool, atari, pettingzoo (games of
    several agents, who share one policy; each agent counts as one environment) or torch (tensors on
    the device: manyhands/CartPole-v1 and manyhands/Pendulum-v1)."""
    env_kwargs: dict[str, Any] = field(default_factory=dict)
    """Handed to the environment when it is made."""
    opponents: int = 0
    """In games of PettingZoo that are played in turns, the other seats are played by one of so many
    stored versions of the policy, drawn anew for each game (0: by the policy as it is)."""
    opponent_every: int = 10
    """Updates after which a version of the policy is stored for that."""
    normalize_observations: bool = False
    """Bring observations to mean 0 and deviation 1, with statistics of all workers; of a Dict or
    Tuple, each part that is a Box of floats."""
    normalize_rewards: bool | None = None
    """Divide rewards by the deviation of the discounted return (left out: yes for {scaled})."""
    box_actions: Literal["clip", "scale"] = "clip"
    """Continuous actions: cut to the bounds, or scale [-1, 1] to them."""
    hidden: tuple[int, ...] | None = None
    """Width of each hidden layer (left out: what suits the algorithm, usually 64 64)."""
    activation: Literal["tanh", "relu"] | None = None
    """Between the layers (left out: what suits the algorithm, usually tanh)."""
    shared_network: bool = False
    """One trunk for policy and value, instead of two."""
    network: str = ""
    """A network of your own: package.module:build, a function or class (observation_space,
    action_space, **network_kwargs) that gives a torch module. A tensor from its forward is taken
    for features, in place of encoder and hidden layers; a pair for policy and value; with an
    attribute q_values = True a tensor is taken for dqn's Q values."""
    network_kwargs: dict[str, Any] = field(default_factory=dict)
    """Handed to it when it is made."""
    device: Literal["auto", "cpu", "cuda"] = "cpu"
    """Where to learn; auto takes a GPU if there is one."""
    bfloat16: bool = False
    """Let our networks for images act and learn with bfloat16 products: up to three times as fast
    on a GPU of 2020 or later, with features that are right to two or three digits."""
    timeout: float = 60.0
    """Seconds that any wait for other workers may take; 0 waits for ever."""
    hooks: str = ""
    """Code of your own that the run calls on its main worker (callbacks): package.module:Class
    with any of the methods {hooks}; they may record metrics, change options and stop the run."""
    log_info: tuple[str, ...] = ()
    """Keys of the environment's info that become metrics, such as success: means over the last 100
    finished episodes of what their last info had."""
    eval_every: int = 0
    """Evaluate the policy every so many steps, in a process and environments of its own; the best
    is kept in best/ (0: never)."""
    eval_episodes: int = 20
    """Episodes of one evaluation."""
    log_every: int = 1
    """Updates between records of metrics."""
    checkpoint_seconds: float = 30.0
    """Seconds between checkpoints; 0 makes one after every update."""
    tensorboard: bool = True
    """Write the metrics for TensorBoard too."""
    wandb: str = ""
    """Weights & Biases project that gets the metrics too (empty: none)."""
    quiet: bool = False
    """Print nothing but errors."""
    address: str = ""
    """With engine=ray: join this cluster, not start one; by default that of RAY_ADDRESS, if set."""

    @property
    def roles(self) -> Roles:
        """Who plays which part."""
        return strategies.spec_of(self.strategy).roles(self)

    @property
    def least_workers(self) -> int:
        """That must be there; fewer than `workers` where others come and go."""
        return getattr(self.workers, "least", self.workers)

    @property
    def actors(self) -> int:
        """Workers that step environments: all, but for those that only learn or serve."""
        return max(0, self.workers - strategies.spec_of(self.strategy).not_acting(self))

    @property
    def envs_per_worker(self) -> int:
        return self.num_envs // max(1, self.actors)

    @property
    def recovery(self) -> Literal["restart", "continue", "stop"]:
        """What is done when a worker that acts fails."""
        if self.on_worker_failure != "auto":
            return self.on_worker_failure
        waits_for_all = strategies.spec_of(self.strategy).synchronous and self.wait_for == 1.0
        return "stop" if waits_for_all else "restart"

    @property
    def elastic(self) -> bool:
        """Whether the run outlives a worker that fails, and so waits for none in particular."""
        spec = strategies.spec_of(self.strategy)
        return not spec.synchronous or (bool(spec.restarts) and self.recovery != "stop")

    @property
    def unrolls_per_update(self) -> int:
        """With strategy=actor_learner: of all learners together."""
        return self.unrolls or self.actors

    @property
    def batch(self) -> int:
        """Steps of one update, of all workers together (at least so many, for whole episodes)."""
        if self.collect == "episodes":
            return self.batch_steps
        return strategies.spec_of(self.strategy).batch(self)


# What hooks may have, and what each is given besides the run
HOOKS: dict[str, tuple[str, ...]] = {
    "on_start": (),
    "on_update": (),
    "on_episode": ("episode",),
    "on_evaluation": ("evaluation",),
    "on_end": (),
}

# In which part of the help a field stands
GROUPS: dict[str, tuple[str, ...]] = {
    "run": ("env", "steps", "seed", "start_from", "target_return", "run_dir", "hooks", "log_info",
            "eval_every", "eval_episodes", "log_every", "checkpoint_seconds",
            "tensorboard", "wandb", "quiet"),
    "worker": ("workers", "strategy", "engine", "device", "timeout", "address",
               "on_worker_failure", "max_restarts", "min_workers"),
    "batch": ("num_envs", "rollout_length", "collect", "batch_steps", "overlap", "wait_for"),
    "asynchronous": ("learners", "unrolls", "pushes", "reduce", "reducers", "max_lag", "queue"),
    "environment": (
        "env_backend", "env_kwargs", "opponents", "opponent_every", "normalize_observations",
        "normalize_rewards", "box_actions",
    ),
    "network": ("hidden", "activation", "shared_network", "network", "network_kwargs",
                "bfloat16"),
}  # fmt: skip


@dataclass(frozen=True)
class Experiment:
    """Everything that decides a run."""

    algorithm: str
    run: RunConfig
    options: Any  # the algorithm's own frozen config

    @property
    def spec(self) -> AlgorithmSpec:
        """What the algorithm is; `algorithm` may be one of the user's own, package.module:NAME."""
        return spec_of(self.algorithm)

    @property
    def strategy(self) -> str:
        """The strategy by name, also where the user left it to us."""
        return self.run.strategy or default_strategy(self.algorithm, self.run.workers)

    @property
    def strategy_spec(self) -> StrategySpec:
        """What the strategy is."""
        return strategies.spec_of(self.strategy)


def default_strategy(algorithm: str, workers: int) -> str:
    return strategies.default_of(spec_of(algorithm).learns_from, workers)


def build(algorithm: str, **overrides: Any) -> Experiment:
    """An experiment from defaults and overrides; each names a field of the run or the algorithm."""
    spec = spec_of(algorithm)
    options = spec.options
    run_names, option_names = names_of(RunConfig), names_of(options)
    faults = [
        of_others(spec, name)
        or f"there is no option {name!r}; {nearest(name, [*run_names, *option_names])}"
        for name in overrides
        if name not in run_names and name not in option_names
    ]
    run_values = {k: v for k, v in overrides.items() if k in run_names}
    option_values = {k: v for k, v in overrides.items() if k in option_names}
    return _assemble(algorithm, spec, run_values, option_values, faults)


def to_plain(experiment: Experiment) -> dict[str, Any]:
    """Nested plain data: {"algorithm": "ppo", "run": {...}, "ppo": {...}}."""
    return {
        "algorithm": experiment.algorithm,
        "run": _plain_fields(experiment.run),
        experiment.spec.name: _plain_fields(experiment.options),
    }


def from_plain(data: Mapping[str, Any]) -> Experiment:
    """The experiment that `to_plain` was given; ConfigError names each wrong key and value."""
    algorithm = data.get("algorithm")
    if not isinstance(algorithm, str):
        raise ConfigError(f"algorithm={algorithm!r}: a name is needed, such as algorithm = 'ppo'")
    spec = spec_of(algorithm)
    faults = []
    for key in data:
        if key in SPECS and key != spec.name:
            faults.append(f"there is a table [{key}], but the algorithm is {spec.name}")
        elif key not in ("algorithm", "run", spec.name):
            near = nearest(key, ["algorithm", "run", spec.name])
            faults.append(f"there is no table or key {key!r}; {near}")
    parts = []
    for name, cls in (("run", RunConfig), (spec.name, spec.options)):
        part = data.get(name, {})
        if not isinstance(part, Mapping):
            faults.append(f"{name}={part!r}: a table [{name}] is expected")
            part = {}
        known = names_of(cls)
        faults += [
            of_others(spec, key) or f"[{name}] has no option {key!r}; {nearest(key, known)}"
            for key in part
            if key not in known
        ]
        parts.append({k: v for k, v in part.items() if k in known})
    return _assemble(algorithm, spec, parts[0], parts[1], faults)


def save_toml(path: str | os.PathLike[str], experiment: Experiment) -> None:
    """Write the experiment so that `load_toml` gives it back; None is left out."""
    plain = {name: _given(part) for name, part in to_plain(experiment).items()}
    with open(path, "wb") as file:
        tomli_w.dump(plain, file)


def load_toml(path: str | os.PathLike[str]) -> Experiment:
    """The experiment in a file; ConfigError says what is wrong and in which file."""
    data = read_toml(path)
    try:
        return from_plain(data)
    except ConfigError as error:
        raise ConfigError(f"{os.fspath(path)}: {error}") from error


def read_toml(path: str | os.PathLike[str]) -> dict[str, Any]:
    """What a file holds, whatever it is; ConfigError when that cannot be read."""
    try:
        return tomllib.loads(files.read(path, _MAX_TOML).decode())
    except files.Unreadable as error:
        raise ConfigError(str(error)) from None
    except (ValueError, RecursionError) as error:  # of TOML, of UTF-8, of numbers without end
        raise ConfigError(f"{os.fspath(path)} is not TOML: {error}") from error


RECIPES = Path(__file__).parents[1] / "recipes"


def load_recipe(name: str) -> Experiment:
    """One of the tuned runs that come with the package, by the name of its file."""
    names = sorted(path.stem for path in RECIPES.glob("*.toml"))
    if name not in names:
        raise ConfigError(
            f"there is no recipe {name!r}; {nearest(name, names)}\nTo see what they are, type: "
            "manyhands recipes"
        )
    return load_toml(RECIPES / f"{name}.toml")


def holds_a_run(path: str | os.PathLike[str]) -> bool:
    """Whether a run has begun in that folder."""
    files = ("config.toml", "metrics.jsonl")
    return any(os.path.exists(os.path.join(path, name)) for name in files)


def join_faults(faults: list[str]) -> str:
    """One fault as it is; several as a numbered list."""
    if len(faults) == 1:
        return faults[0]
    rows = [f"  {i}. {fault}" for i, fault in enumerate(faults, 1)]
    return "\n".join([f"{len(faults)} things are wrong:", *rows])


def nearest(name: str, known: Iterable[str]) -> str:
    """Words that help whoever mistyped a name."""
    known = list(known)
    by_lower = {k.lower().replace("-", "_"): k for k in known}
    near = difflib.get_close_matches(name.lower().replace("-", "_"), by_lower, 3, 0.6)
    if near:
        return f"did you mean {', '.join(by_lower[n] for n in near)}?"
    return f"there are {', '.join(known)}"


def of_others(spec: AlgorithmSpec, name: str, dashes: str = "") -> str:
    """Whose option it is, where it is one of other algorithms alone; or ""."""
    if name in names_of(RunConfig) or name in names_of(spec.options):
        return ""
    having = [other.name for other in SPECS.values() if name in names_of(other.options)]
    if not having:
        return ""
    shown = dashes + (name.replace("_", "-") if dashes else name)
    return f"{spec.name} has no {shown}: it is an option of {in_words(having)}"


def names_of(cls: type[Any]) -> list[str]:
    return [f.name for f in dataclasses.fields(cls)]


_HINTS: dict[type[Any], Mapping[str, Any]] = {}  # asked for each value of each run that is read
_WRITTEN: dict[type[Any], Mapping[str, str]] = {}  # found by parsing the source, 10 ms a class


def hints_of(cls: type[Any]) -> Mapping[str, Any]:
    """Field -> its type, with names written as text looked up."""
    if cls not in _HINTS:
        hints = typing.get_type_hints(cls)
        _HINTS[cls] = MappingProxyType({name: hints[name] for name in names_of(cls)})
    return _HINTS[cls]


def help_of(cls: type[Any], said: Mapping[str, str] | None = None) -> dict[str, str]:
    """Field -> the string that stands under it in the source; parents' fields included.

    `said`: what stands for parts that follow from the algorithms, in place of their names.
    """
    if cls not in _WRITTEN:
        _WRITTEN[cls] = MappingProxyType(_written(cls))
    found = dict(_WRITTEN[cls])
    if cls is RunConfig:
        for name, text in found.items():
            if "{" in text:
                its = in_words(strategies.with_option(name) or [""], "or")
                found[name] = text.format(its=its, **_from_the_code() | dict(said or {}))
    return found


def _written(cls: type[Any]) -> dict[str, str]:
    found: dict[str, str] = {}
    owners = [owner for owner in reversed(cls.__mro__) if "__dataclass_fields__" in vars(owner)]
    for owner in owners:
        tree = ast.parse(textwrap.dedent(inspect.getsource(owner))).body[0]
        body = tree.body if isinstance(tree, ast.ClassDef) else []
        for one, following in itertools.pairwise(body):
            match one, following:
                case (
                    ast.AnnAssign(target=ast.Name(id=name)),
                    ast.Expr(value=ast.Constant(value=str() as text)),
                ):
                    found[name] = " ".join(text.split())
    return found


def in_words(names: Sequence[str], last: str = "and") -> str:
    """a, b and c"""
    *first, end = names
    return f"{', '.join(first)} {last} {end}" if first else end


def _from_the_code() -> dict[str, str]:
    """Parts of the help that follow from the algorithms' own settings."""
    lengths: dict[int, list[str]] = {}
    defaults: dict[str, list[str]] = {}
    for name, spec in SPECS.items():
        lengths.setdefault(spec.options.ROLLOUT_LENGTH, []).append(name)
        defaults.setdefault(default_strategy(name, 2), []).append(name)
    scaled = [name for name, spec in SPECS.items() if usual(spec.options, "normalize_rewards")]
    return {
        "strategies": in_words(list(strategies.SPECS), "or"),
        "engines": in_words(support.ENGINES, "or"),
        "defaults": ", ".join(f"{s} for {in_words(names)}" for s, names in defaults.items()),
        "lengths": ", ".join(f"{in_words(names)} {n}" for n, names in lengths.items()),
        "scaled": in_words(scaled),
        "hooks": ", ".join(HOOKS),
        "restarting": in_words(support.RECOVERY["restart"]),
        "recovering": in_words([s.name for s in strategies.SPECS.values() if not s.synchronous]),
    }


# Options of the run that follow the algorithm where they are left out; what most algorithms have
USUAL: dict[str, Any] = {"normalize_rewards": False, "hidden": (64, 64), "activation": "tanh"}


def usual(options: type[Any], name: str) -> Any:
    """What an option of the run is set to where it is left out: the algorithm's own setting."""
    return getattr(options, name.upper(), USUAL[name])


def _plain_fields(config: Any) -> dict[str, Any]:
    values = {name: getattr(config, name) for name in names_of(type(config))}
    return {k: _plain(v) for k, v in values.items()}


def _plain(value: Any) -> Any:
    if isinstance(value, Workers):
        return value.plain
    return list(value) if isinstance(value, tuple) else value


def _given(part: Any) -> Any:
    """TOML has no None."""
    given = isinstance(part, Mapping)
    return {k: v for k, v in part.items() if v is not None} if given else part


def _assemble(
    algorithm: str,
    spec: AlgorithmSpec,
    run_values: Mapping[str, Any],
    option_values: Mapping[str, Any],
    faults: list[str],
) -> Experiment:
    parts, options = [], spec.options
    for cls, values in ((RunConfig, run_values), (options, option_values)):
        part = {}
        for name, value in values.items():
            try:
                part[name] = coerce(name, value, hints_of(cls)[name])
            except ConfigError as error:
                faults.append(str(error))
        for f in dataclasses.fields(cls):
            if f.default is MISSING and f.default_factory is MISSING and f.name not in values:
                faults.append(f"{f.name} is missing; {f.name}: {help_of(cls).get(f.name, '')}")
        parts.append(part)
    if faults:
        raise ConfigError(join_faults(faults))
    run = RunConfig(**parts[0])
    if run.rollout_length == 0:
        run = dataclasses.replace(run, rollout_length=getattr(options, "ROLLOUT_LENGTH", 256))
    left_out = [name for name in USUAL if getattr(run, name) is None]
    run = dataclasses.replace(run, **{name: usual(options, name) for name in left_out})
    # Who acts decides what a batch is.
    if spec.learns_from != "rollout" and not run.strategy:
        run = dataclasses.replace(run, strategy=default_strategy(algorithm, run.workers))
    return Experiment(algorithm, run, options(**parts[1]))

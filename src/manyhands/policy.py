"""A trained policy, away from every engine: numpy in, numpy out.

    policy = manyhands.load("runs/CartPole-v1/ppo-allreduce/1-...")
    action = policy.act(observation, deterministic=True)
    policy.export("policy.onnx")

The file is safetensors: weights by name, and the normaliser's numbers. Nothing is unpickled.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
from gymnasium.vector import VectorEnv

from manyhands import files, seeding, streams, trees
from manyhands.config import Experiment, RunConfig, load_toml
from manyhands.envs import make_vec
from manyhands.envs.adapter import ActionMap
from manyhands.envs.make import to_look_at
from manyhands.envs.registry import resolve, takes_num_envs
from manyhands.envs.spaces import LegalCheck, choices, has_mask, load_spaces, mask_row
from manyhands.errors import ConfigError
from manyhands.math.running_stats import Moments, Normaliser
from manyhands.networks.build import ActorCritic, RecurrentActorCritic, to_tensor
from manyhands.networks.numpy_distributions import masked, mode, sample
from manyhands.streams import RowChance
from manyhands.trees import Array
from manyhands.types import MASK, OBSERVATION, Obs

FILE = "policy.safetensors"
BEST = "best"  # folder of the policy that evaluations while training have found best


@streams.given_back()  # environments may draw in the making
def spaces_of(run: RunConfig) -> tuple[Any, Any]:
    """Observation and action space, of an environment that is made to be looked at."""
    count = to_look_at(run.env, run.env_backend, run.envs_per_worker)
    # EnvPool and PettingZoo have names of their own.
    source = None if run.env_backend in ("envpool", "pettingzoo") else resolve(run.env)
    if callable(source) and not takes_num_envs(source):
        first = source(**run.env_kwargs)
        count = first.num_envs if isinstance(first, VectorEnv) else 1  # the callable decides
        first.close()
    look = make_vec(run.env, count, backend=run.env_backend, seed=0, **run.env_kwargs)  # type: ignore[arg-type]
    spaces = look.observation_space, look.action_space
    look.close()
    return spaces


def build_model(experiment: Experiment, observation_space: Any, action_space: Any) -> ActorCritic:
    """The network that a configuration asks for, with the weights its seed begins with."""
    model: ActorCritic = experiment.spec.build_model(experiment, observation_space, action_space)
    return model


def build_normaliser(experiment: Experiment, observation_space: Any) -> Normaliser:
    run = experiment.run
    return Normaliser(
        observation_space,
        run.normalize_observations,
        bool(run.normalize_rewards),
        experiment.options.gamma,
    )


def network_line(experiment: Experiment) -> str:
    """A network of the user's own in one line: its name, what it is taken for, its size."""
    from manyhands.networks.own import described

    return described(experiment, build_model(experiment, *spaces_of(experiment.run)))


def save_policy(folder: Path, model: ActorCritic, normaliser: Normaliser) -> None:
    """To where `load` finds it."""
    write_policy(folder / FILE, model, normaliser)


def write_policy(path: Path, model: ActorCritic, normaliser: Normaliser) -> None:
    """Write the whole file or none of it."""
    from safetensors.numpy import save

    arrays = {f"model/{k}": v.detach().cpu().numpy() for k, v in model.state_dict().items()}
    for part, state in normaliser.state().items():
        arrays |= {f"normaliser/{part}/{k}": np.asarray(v) for k, v in state.items()}
    beside = path.with_name(f"{path.name}.tmp")
    # WHY not its save_file: that writes a file which only its owner may read, whatever the umask.
    beside.write_bytes(save({k: np.asarray(v, order="C") for k, v in arrays.items()}))
    os.replace(beside, path)


@dataclass
class Seat:
    """One game, for whoever plays a seat of it: what it draws from, and what it remembers."""

    chance: np.random.Generator
    memory: torch.Tensor | None = None  # of an LSTM


class Policy:
    """Acts as the policy did in training: observations normalised, actions brought to bounds."""

    def __init__(
        self,
        model: ActorCritic,
        normaliser: Normaliser,
        action_space: Any,
        box_actions: Any,
        *,
        observation_space: Any = None,
        experiment: Experiment | None = None,
    ) -> None:
        self.model, self.normaliser = model.eval(), normaliser
        self.observation_space, self.action_space = observation_space, action_space
        self.box_actions = box_actions
        self.experiment = experiment  # what it was trained by, where that is known
        self._to_env = ActionMap(action_space, box_actions)
        self._rng: Any = np.random.default_rng()
        self._memory: torch.Tensor | None = None  # of an LSTM, from one `act` to the next

    def seed(self, seed: int, *path: str | int) -> None:
        """Make actions that are drawn (`deterministic=False`) repeat, from here on."""
        self.draw_from(seeding.generator(seed, *path))

    def draw_from(self, rng: np.random.Generator) -> None:
        """Share a generator with others, from here on."""
        self._rng = rng

    def act(self, observation: Any, deterministic: bool = True, *, mask: Any = None) -> Any:
        """The action for one observation, as the environment gives it and takes it.

        Args:
            mask: which actions are possible, such as info["action_mask"], where the observation
                does not say so itself.
        """
        masks = None
        if mask is not None:
            masks = self._possible(mask)[None]
        elif isinstance(observation, dict) and MASK in observation:
            observation = {**observation, MASK: self._possible(observation[MASK])}
        return self.act_batch(_as_batch(observation), deterministic, mask=masks)[0]

    def _possible(self, mask: Any) -> Array:
        """A mask that fits the actions and leaves one of them."""
        row = mask_row(mask, self.action_space)
        if (fault := LegalCheck(self.action_space).fault(row[None])) is not None:
            raise ConfigError(f"the {MASK} {fault[1]}")
        return row

    @torch.no_grad()
    def act_batch(
        self, observations: Obs, deterministic: bool = True, *, mask: Any = None
    ) -> Array:
        """Actions for observations [N, ...], with masks [N, actions]."""
        self._check_mask(observations, mask)
        parameters = self._parameters(self._seen(observations)).cpu().numpy()
        if mask is not None:
            parameters = masked(parameters, {MASK: np.asarray(mask)})
        if deterministic:
            chosen = mode(self.model.head, parameters)
        else:
            chosen, _ = sample(self.model.head, parameters, self._rng)
        return self._to_env(chosen)

    def act_in(self, seats: Sequence[Seat], observations: Obs) -> Array:
        """Drawn actions, row k in the game of seats[k]; what `act_batch` remembers stays."""
        mine = self._rng, self._memory
        self._rng, self._memory = RowChance([seat.chance for seat in seats]), None
        if isinstance(self.model, RecurrentActorCritic):
            nothing = torch.zeros(self.model.state_size)
            memories = [nothing if seat.memory is None else seat.memory for seat in seats]
            self._memory = torch.stack(memories).to(self._device)
        try:
            actions = self.act_batch(observations, deterministic=False)
            if self._memory is not None:
                for seat, memory in zip(seats, self._memory.cpu(), strict=True):
                    seat.memory = memory
            return actions
        finally:
            self._rng, self._memory = mine

    def reset(self, rows: Sequence[int] | None = None) -> None:
        """A new episode begins: a policy with an LSTM forgets the one before.

        With `rows`, only these rows of `act_batch` begin anew; the others go on.
        """
        if rows is None:
            self._memory = None
        elif self._memory is not None and len(rows):
            self._memory[list(rows)] = 0.0

    def keep(self, rows: Sequence[int]) -> None:
        """The next `act_batch` has these rows of the last one, in this order, and no others."""
        if self._memory is not None:
            self._memory = self._memory[list(rows)]

    def _parameters(self, seen: Any) -> torch.Tensor:
        if not isinstance(self.model, RecurrentActorCritic):
            return self.model.policy(seen)
        rows = trees.rows(seen)
        if self._memory is None or len(self._memory) != rows:
            self._memory = torch.zeros(rows, self.model.state_size, device=self._device)
        parameters, _, self._memory = self.model.step(seen, self._memory)
        return parameters

    def value(self, observation: Obs) -> float:
        """What the critic expects to come from one observation on, discounted.

        With `normalize_rewards` it is in units of the scaled reward, as it was learned.
        """
        return float(self.value_batch(_as_batch(observation))[0])

    @torch.no_grad()
    def value_batch(self, observations: Obs) -> Array:
        """Values [N] of observations [N, ...]."""
        return self.model.value(self._seen(observations)).cpu().numpy()

    def export(self, path: str | os.PathLike[str]) -> Path:
        """Write the policy as one file that needs no manyhands: `.onnx`, or `.pt` (TorchScript).

        It takes raw observations [N, ...] and gives deterministic actions [N, ...] as the
        environment takes them, for any N: normaliser and bounds are inside. A Dict or Tuple
        observation becomes one input for each part ("camera/left", "0"), names sorted. A policy
        with an LSTM takes its state [N, S] as the last input, zeros at the start of an episode,
        and gives the next one.
        """
        from manyhands.networks.export import export

        return export(self, Path(path))

    def _check_mask(self, observations: Any, mask: Any) -> None:
        """A policy that was trained with masks must not be left without one."""
        there = mask is not None or (isinstance(observations, dict) and MASK in observations)
        if has_mask(self.observation_space) and not there:
            raise ConfigError(
                "this policy was trained with masks of actions; give one with the observation: "
                f'policy.act(observation, mask=info["{MASK}"])'
            )
        if mask is not None:
            expected = trees.rows(observations), sum(choices(self.action_space))
            if np.shape(mask) != expected:
                raise ConfigError(
                    f"masks of shape {np.shape(mask)} were given with {expected[0]} observations; "
                    f"a row for each, {expected}, is expected"
                )

    def _seen(self, observations: Any) -> Any:
        """Named parts of a nested observation, normalised, as tensors; in the form of the space,
        whatever a mask is given in."""
        if has_mask(self.observation_space) and not isinstance(observations, dict):
            observations = {OBSERVATION: observations}
        if type(self.observation_space).__name__ == "Dict":
            observations = trees.named(observations)
        return to_tensor(self.normaliser.apply(observations), self._device)

    @property
    def _device(self) -> torch.device:
        return next(self.model.parameters()).device


def _as_batch(observation: Obs) -> Obs:
    return trees.map(lambda x: np.asarray(x)[None], observation)


def load(run_dir: str | os.PathLike[str], which: Literal["last", "best"] = "last") -> Policy:
    """The policy that a run has left in its folder: the last, or the one that evaluations while
    training (`eval_every`) have found best."""
    return read_policy(*policy_file(run_dir, which))


def policy_file(run_dir: str | os.PathLike[str], which: str = "last") -> tuple[Path, Path]:
    """(folder of the run, file of its policy); the folder may also be a run's best/."""
    if which not in ("last", BEST):
        raise ConfigError(f"there is no policy {which!r}; choose 'last' or 'best'")
    folder = Path(run_dir)
    if folder.name == BEST and not (folder / "config.toml").is_file():
        folder, which = folder.parent, BEST
    if not (folder / "config.toml").is_file():
        raise ConfigError(f"{folder} holds no config.toml: is it the folder of a finished run?")
    file = folder / FILE if which == "last" else folder / BEST / FILE
    if not file.is_file():
        if which == BEST:
            raise ConfigError(
                f"{folder} holds no {BEST}/{FILE}: the best policy is kept where a run evaluates; "
                "train with --eval-every N"
            )
        raise ConfigError(f"{folder} holds no {FILE}: is it the folder of a finished run?")
    return folder, file


class Started(NamedTuple):
    """What a run that starts from another has taken over of its arrays, and what not."""

    taken: list[str]
    left: list[str]  # with the reason

    def words(self) -> str:
        said = f"{len(self.taken)} of {len(self.taken) + len(self.left)} arrays taken over"
        return f"{said}; not: {'; '.join(self.left)}" if self.left else said


def start_from(arrays: dict[str, Array], model: ActorCritic, normaliser: Normaliser) -> Started:
    """Take over what fits: weights of the same name and shape, statistics of the same shape.

    ConfigError where no layer fits, but for biases: the run would be one from scratch.
    """
    taken, left = [], []
    here = model.state_dict()
    there = {k.removeprefix("model/"): v for k, v in arrays.items() if k.startswith("model/")}
    for name in sorted(here.keys() | there.keys()):
        if name not in there:
            left.append(f"{name} is new")
        elif name not in here:
            left.append(f"{name} has no place here")
        elif here[name].shape != there[name].shape:
            shapes = f"{list(there[name].shape)} there and {list(here[name].shape)} here"
            left.append(f"{name} is {shapes}")
        else:
            taken.append(name)
    if not any(here[name].ndim > 1 for name in taken):
        raise ConfigError(
            f"no layer fits this network: {'; '.join(left)}. Give the run the same network "
            "(--hidden, --network) and the same kind of algorithm"
        )
    model.load_state_dict(here | {name: torch.from_numpy(there[name]) for name in taken})
    for part, stats in normaliser.statistics.items():
        if f"normaliser/{part}/mean" not in arrays:
            continue
        found = {k: arrays[f"normaliser/{part}/{k}"] for k in ("count", "mean", "m2")}
        name = f"statistics of {part.replace('obs', 'observations', 1)}"
        if found["mean"].shape != stats.shape:
            shapes = f"{list(found['mean'].shape)} there and {list(stats.shape)} here"
            left.append(f"{name} are {shapes}")
            continue
        nothing = {f"pending_{k}": v for k, v in Moments.empty(stats.shape).state().items()}
        stats.load_state(found | nothing)
        taken.append(name)
    return Started(taken, left)


@streams.given_back()  # models draw in the making
def check_start(experiment: Experiment) -> None:
    """ConfigError unless the run can start from where it is asked to."""
    run = experiment.run
    try:
        arrays = arrays_of(policy_file(run.start_from)[1])
        spaces = spaces_of(run)
        start_from(
            arrays, build_model(experiment, *spaces), build_normaliser(experiment, spaces[0])
        )
    except ConfigError as error:
        raise ConfigError(f"start_from {run.start_from}: {error}") from None


def arrays_of(file: Path | bytes) -> dict[str, Array]:
    """What a file of a policy holds, or the bytes of one."""
    from safetensors import SafetensorError
    from safetensors.numpy import load as from_bytes

    name = "the policy" if isinstance(file, bytes) else str(file)
    try:
        return from_bytes(file if isinstance(file, bytes) else files.read(file))  # type: ignore[no-any-return]
    except files.Unreadable as error:
        raise ConfigError(str(error)) from None
    except (SafetensorError, ValueError, KeyError) as error:
        raise ConfigError(f"{name} cannot be read: {error}") from None


def read_policy(folder: Path, file: Path) -> Policy:
    """The policy in that file, of the run in that folder."""
    experiment = load_toml(folder / "config.toml")
    run = experiment.run
    spaces = load_spaces(folder) or spaces_of(run)
    model = build_model(experiment, *spaces)
    normaliser = build_normaliser(experiment, spaces[0])
    arrays = arrays_of(file)
    weights = {k.removeprefix("model/"): torch.from_numpy(v) for k, v in arrays.items()
               if k.startswith("model/")}  # fmt: skip
    _check_keys(model, weights)
    model.load_state_dict(weights)
    states: dict[str, dict[str, Array]] = {}
    for key, value in arrays.items():
        if key.startswith("normaliser/"):
            part, _, name = key.removeprefix("normaliser/").rpartition("/")
            states.setdefault(part, {})[name] = value
    normaliser.load_state(states)
    return Policy(
        model,
        normaliser,
        spaces[1],
        run.box_actions,
        observation_space=spaces[0],
        experiment=experiment,
    )


def _check_keys(model: ActorCritic, weights: dict[str, torch.Tensor]) -> None:
    """ConfigError that names the key that differs, and how."""
    wanted = {k: tuple(v.shape) for k, v in model.state_dict().items()}
    found = {k: tuple(v.shape) for k, v in weights.items()}
    for key in sorted(wanted.keys() | found.keys()):
        if wanted.get(key) != found.get(key):
            raise ConfigError(
                f"{FILE} does not fit this network: {key} is {found.get(key, 'not there')} in the "
                f"file and {wanted.get(key, 'not there')} in the network"
            )

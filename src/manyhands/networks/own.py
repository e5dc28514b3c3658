"""A network of the user's own, tried before anything starts.

`--network package.module:build` names a function or class (observation_space, action_space,
**network_kwargs) -> torch.nn.Module. What the module gives says what it is taken for:

    one tensor [N, F]                     features: a linear layer for each output comes behind
    a pair ([N, P], [N] or [N, 1])        policy and value, the whole network: the parameters of the
                                          action distribution (networks/heads.py), the values
    [N, n], and it has q_values = True    Q values, one an action: the whole network of dqn

WHY an attribute for Q values: as many features as there are actions look the same.

The module gets what the policy sees: a tensor [N, ...] of the space's dtype (float32 where
observations are normalised), or a dict of them for a Dict space, without its action_mask: that is
applied behind it. With features, policy and value
have a module each, unless `shared_network` asks for one; so have policy and critics.
"""

from __future__ import annotations

import copy
import inspect
import os
import traceback
import weakref
from typing import Any, NoReturn

import numpy as np
import torch
from torch import Tensor, nn

from manyhands import errors, seeding, streams, trees
from manyhands.engines import calls
from manyhands.envs.spaces import space_without_mask, zeros
from manyhands.errors import ConfigError
from manyhands.math.running_stats import normalised_parts
from manyhands.networks.heads import (
    Bernoulli,
    Categorical,
    DiagonalGaussian,
    Head,
    make_head,
    masked,
)
from manyhands.types import without_mask

FEATURES, POLICY_AND_VALUE, Q_VALUES = "features", "policy and value", "Q values"

_ROWS = 3
_OUTPUTS = {
    FEATURES: (FEATURES,),
    POLICY_AND_VALUE: ("distribution parameters", "values"),
    Q_VALUES: (Q_VALUES,),
}
_GIVEN_AS = {
    FEATURES: "features (one tensor [N, F])",
    POLICY_AND_VALUE: "policy and value (a pair: distribution parameters [N, P], values [N])",
    Q_VALUES: "Q values (one tensor [N, actions], from a module with q_values = True)",
}
_seen: weakref.WeakSet[nn.Module] = weakref.WeakSet()


class OwnEncoder(nn.Module):
    """The user's module in the place of encoder and hidden layers."""

    def __init__(self, module: nn.Module, features: int) -> None:
        super().__init__()
        self.module, self.features = module, features

    def forward(self, observations: Any) -> Tensor:
        features: Tensor = self.module(without_mask(observations))
        return features


class OwnActorCritic(nn.Module):
    """The user's module as policy and value: what our ActorCritic is otherwise."""

    def __init__(self, module: nn.Module, head: Head, policy: set[str], value: set[str]) -> None:
        super().__init__()
        self.module, self.head = module, head
        self._of_policy, self._of_value = policy, value - policy
        self.shared = bool(policy & value)

    def forward(self, observations: Any) -> tuple[Tensor, Tensor]:
        parameters, values = self.module(without_mask(observations))
        return masked(parameters, observations), values.reshape(-1)

    def policy(self, observations: Any) -> Tensor:
        """Distribution parameters only, [N, P]."""
        return self(observations)[0]  # type: ignore[no-any-return]

    def value(self, observations: Any) -> Tensor:
        """Values only, [N]."""
        return self(observations)[1]  # type: ignore[no-any-return]

    def policy_parameters(self) -> list[nn.Parameter]:
        """Everything the policy depends on."""
        return [p for name, p in self.module.named_parameters() if name in self._of_policy]

    def value_parameters(self) -> list[nn.Parameter]:
        """What can be changed without changing the policy."""
        return [p for name, p in self.module.named_parameters() if name in self._of_value]


class OwnQNetwork(nn.Module):
    """The user's module as Q(s, ·): what our QNetwork is otherwise."""

    def __init__(self, module: nn.Module, head: Categorical) -> None:
        super().__init__()
        self.module, self.head = module, head

    def forward(self, observations: Any) -> Tensor:
        q: Tensor = self.module(without_mask(observations))
        return masked(q, observations)

    def policy(self, observations: Any) -> Tensor:
        """Q as the parameters of a choice: the likeliest is the best."""
        return self(observations)  # type: ignore[no-any-return]

    def value(self, observations: Any) -> Tensor:
        """max Q, [N]."""
        best: Tensor = self(observations).amax(-1)
        return best


class OwnModules:
    """What the user's function makes for one network, each module tried when it is made.

    Args:
        experiment: which function, its arguments and the seed of the first weights.
        takes: what the algorithm has a use for.
    """

    def __init__(
        self, experiment: Any, observation_space: Any, action_space: Any, *takes: str
    ) -> None:
        self._experiment, self._spaces = experiment, (observation_space, action_space)
        self._takes, self._made = takes, 0
        self._first: _Tried | None = self._make()
        self.kind = self._first.kind

    def encoder(self) -> OwnEncoder:
        """One that gives features: the first, the second, and so on."""
        tried, self._first = self._first or self._make(), None
        return OwnEncoder(tried.module, tried.parts[0].shape[1])

    def actor_critic(self) -> OwnActorCritic:
        run, spec = self._experiment.run, self._experiment.spec
        assert self._first is not None
        module, (policy, value) = self._first.module, self._first.depends_on()
        if run.shared_network:
            raise ConfigError(
                f"network {run.network} gives policy and value, and decides itself what they "
                "share; type: --no-shared-network"
            )
        if spec.separate_networks and policy & value:
            raise ConfigError(
                f"{spec.name} needs separate networks for policy and value: fitting the value "
                "would move a shared policy out of its trust region; in network "
                f"{run.network} both depend on {_few(policy & value)}"
            )
        return OwnActorCritic(module, make_head(self._spaces[1]), policy, value)

    def q_network(self) -> OwnQNetwork:
        assert self._first is not None
        head = make_head(self._spaces[1])
        assert isinstance(head, Categorical)
        return OwnQNetwork(self._first.module, head)

    def _make(self) -> _Tried:
        run = self._experiment.run
        with streams.given_back():  # the user's generators stay where they are
            seeding.seed_everything(run.seed, "own network", self._made)
            self._made += 1
            module = _made(run.network, self._spaces, run.network_kwargs)
            return _Tried(self._experiment, module, *self._spaces, self._takes)


def modules(experiment: Any, observations: Any, actions: Any, *takes: str) -> OwnModules | None:
    """What the run's own function makes, where it names one."""
    if not experiment.run.network:
        return None
    return OwnModules(experiment, space_without_mask(observations), actions, *takes)


def common(experiment: Any, modules: OwnModules | None) -> dict[str, Any]:
    """What every network of ours is built with."""
    run = experiment.run
    return {
        "encoder": modules and modules.encoder,
        "hidden": () if modules else run.hidden,  # what is hidden is the user's own
        "activation": run.activation,
        "seed": seeding.integer(run.seed, "weights"),
    }


def described(experiment: Any, model: nn.Module) -> str:
    """A network of the user's own in one line."""
    kinds = {OwnActorCritic: POLICY_AND_VALUE, OwnQNetwork: Q_VALUES}
    count = sum(p.numel() for p in model.parameters() if p.requires_grad)
    kind = kinds.get(type(model), FEATURES)
    return f"{experiment.run.network} for {kind}, {count:,} parameters"


# -- making it -------------------------------------------------------------------------------------


def _made(name: str, spaces: tuple[Any, Any], kwargs: dict[str, Any]) -> nn.Module:
    build = _found(name)
    try:
        inspect.signature(build).bind(*spaces, **kwargs)
    except TypeError as error:
        given = "".join(f", {key}={value!r}" for key, value in kwargs.items())
        raise ConfigError(
            f"network {name} cannot be called with (observation_space, action_space{given}): "
            f"{error}. It is {build.__name__}{inspect.signature(build)}"
        ) from None
    except ValueError:  # written in C: it has no signature to look at
        pass
    try:
        module = build(*spaces, **kwargs)
    except Exception as error:  # it is anybody's code and may raise anything
        raise ConfigError(f"network {name} failed: {_last_line(error)}") from error
    if not isinstance(module, nn.Module):
        raise ConfigError(
            f"network {name} gave a {type(module).__name__}; a function or class "
            "(observation_space, action_space, **network_kwargs) -> torch.nn.Module is expected"
        )
    if module in _seen:
        raise ConfigError(
            f"network {name} gave the same module twice; make a new one in every call, since "
            "policy and value, and workers in one process, have one each"
        )
    _seen.add(module)
    return module


def _found(name: str) -> Any:
    calls.refuse_python(name)
    try:
        return calls.find(name)
    except ConfigError as error:
        place = name.rpartition(":")[0]
        if not place:
            raise ConfigError(f"network {error}; type: --network package.module:build") from None
        if "has no attribute" in str(error):
            raise
        if place.endswith(".py"):
            raise ConfigError(
                f"{error}; put it back, or write where it is now after network = in the run's "
                "config.toml"
            ) from None
        raise ConfigError(f"{error}. {calls.where_to_look(place)}") from None


# -- trying it -------------------------------------------------------------------------------------


class _Tried:
    """A module that has been called; ConfigError, with what was expected, unless it can be used.

    Nothing else of a run has started by then.
    """

    def __init__(
        self,
        experiment: Any,
        module: nn.Module,
        observation_space: Any,
        action_space: Any,
        takes: tuple[str, ...],
    ) -> None:
        self.module = module
        self._experiment, self._name = experiment, f"network {experiment.run.network}"
        self._space, self._head = observation_space, make_head(action_space)
        self._takes = takes
        self._parameters = {k: p for k, p in module.named_parameters() if p.requires_grad}
        self._check_parameters()
        self.kind, self.parts = self._called()
        self._check_rows_alone()
        idle = set(self._parameters).difference(*self.depends_on())
        if idle:
            raise ConfigError(
                f"{self._name} has parameters without a gradient, on which its {self.kind} do not "
                f"depend: {_few(idle)}. Use them in forward, or freeze them with "
                "requires_grad_(False)"
            )

    def depends_on(self) -> list[set[str]]:
        """The parameters that each output depends on, by autograd."""
        found = []
        for what, part in zip(_OUTPUTS[self.kind], self.parts, strict=True):
            gradients: tuple[Tensor | None, ...] = ()
            if part.requires_grad:
                gradients = torch.autograd.grad(
                    part.sum(), [*self._parameters.values()], retain_graph=True, allow_unused=True
                )
            names = {k for k, g in zip(self._parameters, gradients, strict=False) if g is not None}
            if not names:
                raise ConfigError(
                    f"{self._name} gives {what} that depend on none of its parameters; is there a "
                    "detach() or torch.no_grad() in forward?"
                )
            found.append(names)
        return found

    def _check_parameters(self) -> None:
        if not self._parameters:
            raise ConfigError(f"{self._name} has no parameters that can be trained")
        for name, parameter in self._parameters.items():
            if parameter.dtype != torch.float32:
                raise ConfigError(
                    f"{self._name} has parameters of {parameter.dtype} ({name}), and float32 is "
                    "expected; call .float() on the module"
                )

    def _called(self) -> tuple[str, list[Tensor]]:
        """(what the module is taken for, what it gives), the same from call to call."""
        before = {k: b.clone() for k, b in self.module.named_buffers()}
        kind, parts = self._call(self._observations(_ROWS))
        after = dict(self.module.named_buffers())
        moved = {k for k, b in before.items() if k in after and not torch.equal(b, after[k])}
        if moved:
            raise ConfigError(
                f"{self._name} has buffers that change when it is called: {_few(moved)}. Workers "
                "share its parameters only; take LayerNorm or GroupNorm in the place of BatchNorm"
            )
        for rows in (_ROWS, _ROWS + 1, 1):
            other_kind, others = self._call(self._observations(rows))
            if (other_kind, [p.shape[1:] for p in others]) != (kind, [p.shape[1:] for p in parts]):
                raise ConfigError(
                    f"{self._name} gave {kind} of {_shapes(parts)} for {_ROWS} observations, then "
                    f"{other_kind} of {_shapes(others)} for {rows}; only the number of rows may "
                    "change"
                )
        return kind, parts

    def _check_rows_alone(self) -> None:
        """An observation has to give the same whatever stands beside it in the batch."""
        modes = {part: part.training for part in self.module.modules()}
        self.module.eval()  # dropout draws anew in every call
        together = self._observations(_ROWS)
        alone = trees.map(lambda x: x[-1:], together)
        for what, all_rows, row in zip(
            _OUTPUTS[self.kind], self._call(together)[1], self._call(alone)[1], strict=True
        ):
            if not torch.allclose(all_rows[-1:], row, rtol=1e-2, atol=1e-4):
                raise ConfigError(
                    f"{self._name} gives other {what} for an observation when others are beside "
                    "it; rows must not mix: is there a softmax, a mean or a reshape over the first "
                    "dimension?"
                )
        for part, training in modes.items():
            part.training = training

    def _call(self, observations: Any) -> tuple[str, list[Tensor]]:
        rows = trees.rows(observations)
        given = self._forward(observations)
        kind, parts = FEATURES, [given]
        if getattr(self.module, "q_values", False) is True:
            kind = Q_VALUES
        elif isinstance(given, tuple | list) and len(given) == 2:
            kind, parts = POLICY_AND_VALUE, list(given)
        if kind not in self._takes:
            lstm = " --lstm" if getattr(self._experiment.options, "lstm", 0) else ""
            raise ConfigError(
                f"{self._name} gives {kind}, and {self._experiment.spec.name}{lstm} takes "
                + ", or ".join(_GIVEN_AS[kind] for kind in self._takes)
            )
        for what, part in zip(_OUTPUTS[kind], parts, strict=True):
            self._check_output(what, part, rows)
        return kind, parts

    def _forward(self, observations: Any) -> Any:
        try:
            with torch.enable_grad():
                return self.module(observations)
        except Exception as error:  # it is anybody's code and may raise anything
            shown = trees.map(lambda x: f"{tuple(x.shape)} of {x.dtype}", observations)
            raise ConfigError(
                f"{self._name} failed in forward, given observations {shown}: {_last_line(error)}"
            ) from error

    def _check_output(self, what: str, part: Any, rows: int) -> None:
        if not isinstance(part, Tensor) or part.dtype != torch.float32:
            given = f"a tensor of {part.dtype}" if isinstance(part, Tensor) else _a(part)
            self._wrong(f"{given} as {what}", rows, "a tensor of torch.float32")
        shape, size = tuple(part.shape), self._head.parameter_size
        if what == FEATURES:
            right = part.ndim == 2 and len(part) == rows and part.numel() > 0
            wanted = f"[{rows}, F], one row an observation,"
        elif what == "values":
            right, wanted = shape in ((rows,), (rows, 1)), f"[{rows}] or [{rows}, 1]"
        else:
            right, wanted = shape == (rows, size), f"[{rows}, {size}] ({_meaning(self._head)})"
        if not right:
            self._wrong(f"{what} of shape {shape}", rows, wanted)
        if not torch.isfinite(part).all():
            self._wrong(f"{what} that are not finite", rows, "a finite number")

    def _wrong(self, given: str, rows: int, wanted: str) -> NoReturn:
        many = f"{rows} observation{'' if rows == 1 else 's'}"
        raise ConfigError(f"{self._name} gave {given} for {many}; {wanted} is expected")

    def _observations(self, rows: int) -> Any:
        """Ordinary ones, as the policy sees them."""
        rng = np.random.default_rng(rows)
        room = _filled(self._space, rows, rng)
        if self._experiment.run.normalize_observations:
            for name in normalised_parts(self._space):
                if name:
                    room[name] = np.asarray(room[name], np.float32)
                else:
                    room = np.asarray(room, np.float32)
        return trees.map(torch.from_numpy, room)


def _filled(space: Any, rows: int, rng: np.random.Generator) -> Any:
    """Observations of a space. WHY not its sample(): where bounds are said to be the largest float,
    that is what it draws."""
    if type(space).__name__ == "Dict":
        return {key: _filled(space[key], rows, rng) for key in space}
    room = zeros(space, (rows,))
    if type(space).__name__ == "Box" and room.dtype.kind == "f":
        room[...] = np.clip(rng.uniform(-1.0, 1.0, room.shape), space.low, space.high)
        return room
    space = copy.deepcopy(space)  # its generator is the user's
    space.seed(rows)
    for row in range(rows):
        room[row] = space.sample()
    return room


def _meaning(head: Head) -> str:
    if isinstance(head, DiagonalGaussian):
        return f"{head.size} means, then {head.size} logarithms of standard deviations"
    if isinstance(head, Categorical):
        return "one for each action"
    if isinstance(head, Bernoulli):
        return "one for each yes or no"
    return "one for each alternative of each choice, end to end"


def _last_line(error: Exception) -> str:
    """The error, and the last line of the user's own that led to it."""
    torchs = os.path.dirname(torch.__file__)
    frames = traceback.extract_tb(error.__traceback__)
    own = [f for f in frames if not f.filename.startswith((torchs, os.path.dirname(__file__)))]
    where = f" ({os.path.basename(own[-1].filename)}, line {own[-1].lineno})" if own else ""
    return f"{errors.described(error)}{where}"


def _few(names: set[str]) -> str:
    first = sorted(names)[:5]
    return ", ".join(first) + (f" and {len(names) - 5} more" if len(names) > 5 else "")


def _shapes(parts: list[Tensor]) -> str:
    return " and ".join(str(tuple(part.shape)) for part in parts)


def _a(x: Any) -> str:
    return f"a {type(x).__name__}"

"""A ready-made algorithm in a loop of your own: you step the environments, it acts and learns.

    agent = mh.Agent("dqn", envs, network=MyQ)
    obs, info = envs.reset(seed=1)
    while not agent.done:
        action = agent.act(obs)
        obs, reward, terminated, truncated, info = envs.step(action)
        agent.observe(obs, reward, terminated, truncated, info)
        report = agent.update()

With `par=mh.Parallel()` the same lines are one worker of many. What it does follows from its role:

    strategy          role      act              observe   update
    single            worker    newest weights   keeps     learns
    allreduce         worker    newest weights   keeps     learns, in step with all others
    gradient_server   worker    pulled weights   keeps     pushes a gradient, pulls weights
                      server    -                -         waits for gradients, steps, publishes
    apex              actor     pulled weights   keeps     appends to its shard, pulls weights
                      learner   -                -         draws from all shards, learns, publishes
    actor_learner     actor     pulled weights   keeps     sends unrolls, pulls weights
                      learner   -                -         waits for unrolls, learns, publishes

Underneath are the parts that `manyhands train` runs (strategies/context.py); only who steps the
environments is another.
"""

from __future__ import annotations

import copy
import os
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, ClassVar, Self
from weakref import WeakKeyDictionary

import gymnasium
import numpy as np
from gymnasium.vector import AutoresetMode, VectorEnv

from manyhands import config, devices, trees
from manyhands.algorithms.registry import spec_of
from manyhands.config import Experiment, RunConfig, build, nearest, save_toml, validate
from manyhands.config.values import Workers
from manyhands.engines import calls
from manyhands.engines.attach import timeout_from
from manyhands.engines.inline import World
from manyhands.envs.adapter import Step, VecAdapter
from manyhands.envs.registry import name_of_env
from manyhands.envs.spaces import save_spaces, shape_fault, zeros
from manyhands.envs.vector import VectorAdapter
from manyhands.errors import ConfigError
from manyhands.experiment.bottleneck import Phases
from manyhands.experiment.records import Records
from manyhands.policy import Policy, Started, save_policy
from manyhands.strategies import registry as strategies
from manyhands.strategies.context import Context, Part
from manyhands.strategies.progress import RunProgress
from manyhands.strategies.registry import OK
from manyhands.streams import EnvNoise
from manyhands.types import Obs

if TYPE_CHECKING:
    from manyhands.parallel import Parallel

_SEVERAL = RunConfig(env="", workers=Workers(4))  # to ask a strategy for the names of its roles
# Options of `manyhands train` that are no choice here, and why.
_NOT_HERE = {
    "workers": "the launcher decides it: manyhands launch -n N",
    "engine": "the launcher decides it: manyhands launch --engine E",
    "address": "the launcher decides it: manyhands launch --address A",
    "num_envs": "it follows from the environments that the agent is given",
    "env_backend": "you make the environments yourself",
    "opponents": "games in turns are played by `manyhands train --env-backend pettingzoo`",
    "opponent_every": "games in turns are played by `manyhands train --env-backend pettingzoo`",
    "overlap": "it belongs to strategies single and gather of `manyhands train`",
    "run_dir": "agent.save(DIR) writes the policy",
    "checkpoint_seconds": "agent.save(DIR) writes the policy",
    "timeout": "it is an argument of mh.Parallel(timeout=...)",
    "hooks": "the loop is yours: call what you like in it",
    "log_info": "envs.step gives you every info",
    "eval_every": "act(obs, explore=False) evaluates, whenever you like",
    "eval_episodes": "act(obs, explore=False) evaluates, whenever you like",
    "log_every": "agent.update() gives every report to you",
    "tensorboard": "agent.update() gives every report to you",
    "wandb": "agent.update() gives every report to you",
    "quiet": "an agent prints nothing",
}
_FOR_EVER = 10**15  # steps, where the user has not said how many


class Agent:
    """A ready-made algorithm in your own loop, alone or as one worker of many.

    `done` says when the loop is over, `role` what this worker does, `acts` whether what it plays is
    learned from, `version` how often its weights have been updated; `policy` is the policy as it
    stands, like that of `mh.load`.

    Call `act`, `observe` and `update` in this order, once for each step of the environments. Close
    it at the end (`with mh.Agent(...) as agent:`), so that no other worker waits for this one.
    Alone it computes with one thread while it is open, unless OMP_NUM_THREADS says otherwise.

    Args:
        algorithm: its name, or `package.module:NAME` of one of your own.
        envs: a `gymnasium.Env`, or a `gymnasium.vector.VectorEnv` in any autoreset mode. They stay
            yours: the agent looks at their spaces, and never steps, resets or closes them.
        par: the other workers; without it the agent is alone.
        network: a function or class (observation_space, action_space, **network_kwargs) that gives
            a torch module, or its name; by default a network that suits the spaces.
        steps: environment steps of all workers together, after which `done` is true and schedules
            such as `linear:1e-3` have come to their end. By default there is no end, and schedules
            stay where they begin.
        options: as of `manyhands train ALGORITHM --help`: learning_rate, rollout_length, seed,
            strategy ...; `env` is the name by which `manyhands evaluate` makes the environment,
            where the environment does not know it itself.
    """

    def __init__(
        self,
        algorithm: str,
        envs: gymnasium.Env[Any, Any] | VectorEnv,
        *,
        par: Parallel | None = None,
        network: str | Callable[..., Any] = "",
        steps: int | None = None,
        **options: Any,
    ) -> None:
        if calls.importing_main:
            raise ConfigError(
                "an Agent was made while your script was imported, to find its network. Put what "
                'the script does under a main guard: if __name__ == "__main__":'
            )
        _check_names(algorithm, options)
        self._envs = _TheirEnvs(envs, options.get("box_actions", "clip"))
        self._single = not isinstance(envs, VectorEnv)
        if callable(network):
            network = calls.remember(network)
        asked = options | {"network": network, "steps": _FOR_EVER if steps is None else steps}
        spaces = self._envs.observation_space, self._envs.action_space
        plan = _Plan(algorithm, asked, par, self._envs)
        self.experiment = experiment = plan.experiment(name_of_env(envs))
        validate.check_given(experiment, *spaces)
        with ExitStack() as opened:
            if plan.alone:
                worker: Any = World(1, timeout_from(None)).workers[0]
                opened.enter_context(devices.one_thread())
            else:
                worker = _Named(plan.worker)
            self._context = _Context(experiment, worker, self._envs)
            if not self._context.synchronous:
                self._context.build(spaces)
            self._records = _Reports(experiment)
            self._progress = RunProgress(self._context, self._records)
            load = strategies.spec_of(experiment.strategy).load_part()
            self._part: Part = load(self._context, self._progress)
            self._until_closed = opened.pop_all()
        if self._part.stepper is not None:
            self._part.stepper.begun = True  # the user resets the environments
        self.policy = self._make_policy(spaces)
        self._acted = self._begun = self._closed = self._left = False

    # -- its place -------------------------------------------------------------------------------

    @property
    def role(self) -> str:
        """worker, actor, learner or server."""
        return self._context.part.role

    @property
    def acts(self) -> bool:
        """Whether what this worker plays is learned from. A learner or a server may step its
        environments like everybody else, and need not."""
        return self._part.stepper is not None

    @property
    def started(self) -> Started | None:
        """What `start_from` has brought along (`started.taken`) and what not (`started.left`); None
        without it, and on workers that only act."""
        return self._context.started

    @property
    def done(self) -> bool:
        """Whether all steps have been made, or those that learn have ended."""
        return self._left or not self._part.goes_on()

    @property
    def version(self) -> int:
        """How often the weights that are here have been updated."""
        return self._context.algorithm.version

    # -- the loop --------------------------------------------------------------------------------

    def act(self, obs: Any, explore: bool = True) -> Any:
        """Actions for observations, as `envs.step` takes them.

        With `explore=False` the policy's best action: for evaluation, in environments of its own.
        One observation or a batch of any size will do then, and nothing is remembered.
        """
        if not explore:
            return self._evaluate(obs)
        self._check_open("act")
        if self._acted:
            raise ConfigError(
                "act() was called twice without observe(): give agent.observe(...) what envs.step "
                "returned first, or call act(obs, explore=False) to look without learning"
            )
        batch = self._batch(obs, "act")
        stepper = self._part.stepper
        if stepper is None or self._left:
            actions: Any = self._with_policy(batch, deterministic=False)
        else:
            if stepper.full:
                raise ConfigError("call agent.update() after every agent.observe(...)")
            self._check_follows(batch, stepper.current)
            trees.copy_into(stepper.current, batch)
            actions = self._envs.to_env(stepper.act())
        self._acted = self._begun = True
        self._envs.ended[:] = False
        return actions[0] if self._single else actions

    def observe(
        self,
        obs: Any,
        reward: Any,
        terminated: Any,
        truncated: Any,
        info: Mapping[str, Any] | None = None,
    ) -> None:
        """What `envs.step` returned for the actions of the last `act`.

        A single environment, or a vector env that does not reset itself, is reset by you after the
        end of an episode; the next `act` is given what `reset` returned.
        """
        self._check_open("observe")
        if not self._acted:
            raise ConfigError(
                "observe() without act(): ask agent.act(obs) for the actions, step the "
                "environments with them, and observe what they return"
            )
        batch = self._batch(obs, "observe")
        columns = [
            self._column(name, value)
            for name, value in (
                ("reward", reward), ("terminated", terminated), ("truncated", truncated),
            )
        ]  # fmt: skip
        stepper = self._part.stepper
        row = self._envs.blank() if stepper is None or self._left else stepper.row
        self._envs.receive(row, batch, columns[0], columns[1], columns[2], dict(info or {}))
        if stepper is not None and not self._left:
            stepper.observe()
        self._acted = False

    def update(self) -> dict[str, Any] | None:
        """Whatever this role does with what was observed; the metrics of an update, or None.

        A worker that acts learns, sends or pushes as soon as there is enough; until then, and on
        actors, it is None. One that does not act waits for the others and learns from what they
        send, in every call.
        """
        self._check_open("update")
        if self._acted:
            raise ConfigError(
                "update() between act() and observe(): give agent.observe(...) what envs.step "
                "returned first"
            )
        stepper = self._part.stepper
        if self._left:
            return None
        if stepper is None:
            self._part.update()
        while stepper is not None and stepper.full:
            self._part.update()
        if self._context.stop:  # those that learn have ended: they wait for nothing but this word
            self._leave()
        return self._records.take()

    # -- what remains ----------------------------------------------------------------------------

    def save(self, folder: str | os.PathLike[str]) -> Path:
        """Write the policy so that `mh.load`, `manyhands evaluate` and `manyhands video` take it.

        Of several workers only the main one writes.
        """
        path = Path(folder)
        if self._context.is_main:
            path.mkdir(parents=True, exist_ok=True)
            save_toml(path / "config.toml", self.experiment)
            save_spaces(path, self._envs.observation_space, self._envs.action_space)
            save_policy(path, self._context.algorithm.model, self._context.normaliser)
        return path

    def close(self) -> None:
        """Tell the other workers that this one is done; a learner or server waits for those that
        act to leave, under the deadline of `mh.Parallel`. Safe to call twice."""
        if self._closed:
            return
        self._closed = True
        try:
            self._leave()
        finally:
            self._release()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if kind is None:
            self.close()
        elif not self._closed:  # the launcher tells the others
            self._closed = True
            self._release()

    # -- inside ----------------------------------------------------------------------------------

    def _leave(self) -> None:
        if not self._left:
            self._left = True
            self._part.close()

    def _release(self) -> None:
        self._part.release()
        self._until_closed.close()

    def _check_open(self, what: str) -> None:
        if self._closed:
            raise ConfigError(
                f"{what}() after close(): the agent has left; act(obs, explore=False) and save() "
                "still work"
            )

    def _make_policy(self, spaces: tuple[Any, Any]) -> Policy:
        model, normaliser = self._context.algorithm.model, self._context.normaliser
        training = model.training
        policy = Policy(
            model,
            normaliser,
            spaces[1],
            self.experiment.run.box_actions,
            observation_space=spaces[0],
            experiment=self.experiment,
        )
        model.train(training)
        return policy

    def _evaluate(self, obs: Any) -> Any:
        space = self._envs.observation_space
        obs = _parts(space, obs)
        if not shape_fault(space, obs):  # one observation
            return self._with_policy(_rows_of_one(obs), deterministic=True)[0]
        return self._with_policy(obs, deterministic=True)

    def _with_policy(self, batch: Obs, *, deterministic: bool) -> Any:
        """As in evaluation: layers such as dropout are at rest meanwhile."""
        model = self.policy.model
        training = model.training
        model.eval()
        try:
            return self.policy.act_batch(batch, deterministic)
        finally:
            model.train(training)

    def _batch(self, obs: Any, where: str) -> Obs:
        """[B, ...] in the space's own dtype."""
        space, count = self._envs.observation_space, self._envs.num_envs
        obs = _parts(space, obs)
        given = _rows_of_one(obs) if self._single else obs
        out = zeros(space, (count,))
        for key, room in out.items() if isinstance(out, dict) else [("", out)]:
            part: Any = given
            if isinstance(out, dict):
                part = given.get(key) if isinstance(given, dict) else None
            if np.shape(part) != room.shape:
                what = f"observations[{key!r}]" if key else "observations"
                raise ConfigError(
                    f"{where}(): {what} of shape {room.shape} are expected ({count} "
                    f"environments, {space}), and {np.shape(part)} was given"
                )
        trees.copy_into(out, given)
        return out

    def _column(self, name: str, value: Any) -> Any:
        column = np.asarray(value)[None] if self._single else np.asarray(value)
        if column.shape != (self._envs.num_envs,):
            raise ConfigError(
                f"observe(): {name} of shape {np.shape(value)} was given, and there "
                f"{'is one environment' if self._single else f'are {self._envs.num_envs}'}; "
                "pass on what envs.step returned"
            )
        return column

    def _check_follows(self, batch: Obs, expected: Obs) -> None:
        """What is acted on is what was reached, but for episodes that have ended.

        WHY: the value of where a step led is that of the observation acted on next. An episode cut
        off without a word would be taken for one that went on elsewhere.
        """
        if not self._begun:
            return
        differs = np.zeros(self._envs.num_envs, bool)
        parts = trees.map(_rows_that_differ, batch, expected)
        for part in parts.values() if isinstance(parts, dict) else [parts]:
            differs |= part
        differs &= ~self._envs.ended
        if differs.any():
            raise ConfigError(
                f"act() was given another observation of env {int(differs.argmax())} than the last "
                "observe(), although its episode has not ended. Pass truncated=True to "
                "agent.observe(...) where you cut an episode off, and the same observations to both"
            )


# -- what is asked for -----------------------------------------------------------------------------


def _check_names(algorithm: str, options: dict[str, Any]) -> None:
    """ConfigError with the nearest name for an option that is not known, or not here."""
    known = [*config.names_of(RunConfig), *config.names_of(spec_of(algorithm).options)]
    here = [name for name in known if name not in _NOT_HERE]
    faults = [
        f"an Agent has no option {name!r}; {nearest(name, here)}"
        for name in options
        if name not in known
    ]
    faults += [f"{name}: {_NOT_HERE[name]}" for name in options if name in _NOT_HERE]
    if faults:
        raise ConfigError(config.join_faults(faults))


class _Plan:
    """Who does what: from what was asked for on this worker, and on all others."""

    def __init__(
        self, algorithm: str, asked: dict[str, Any], par: Parallel | None, envs: VecAdapter
    ) -> None:
        self.algorithm, self.asked = algorithm, dict(asked)
        self.alone = par is None or par.size == 1
        self.worker: Any = None if par is None else par.worker
        self.engine, self.workers, self.num_envs = "local", 1, envs.num_envs
        if self.alone:
            self.strategy, self.learners, self.reducers = "single", 1, 0
            return
        assert par is not None
        self.engine, self.workers = par.engine, par.size
        self._agree(par, envs)
        self._take_roles(par)

    def _agree(self, par: Parallel, envs: VecAdapter) -> None:
        """All workers have asked for the same; how many environments those that act have."""
        mine = {
            "algorithm": self.algorithm,
            "observation space": str(envs.observation_space),
            "action space": str(envs.action_space),
            "options": ", ".join(f"{k}={v!r}" for k, v in sorted(self.asked.items())),
        }
        of_all = par.group.exchange(mine | {"envs": envs.num_envs})
        for rank, theirs in enumerate(of_all):
            for what in mine:
                if theirs[what] != of_all[0][what]:
                    raise ConfigError(
                        f"the {what} of worker {rank} of {par.size}: {theirs[what]}; of worker 0: "
                        f"{of_all[0][what]}. All workers must ask for the same agent"
                    )
        self._envs_of_all = [int(theirs["envs"]) for theirs in of_all]

    def _take_roles(self, par: Parallel) -> None:
        given = par.roles.counts
        self.strategy = self.asked.get("strategy") or _strategy_for(self.algorithm, given)
        spec = strategies.spec_of(self.strategy)
        if not spec.part:
            steps = [s.name for s in strategies.SPECS.values() if s.part and not s.one_worker]
            fitting = " or ".join(steps)
            raise ConfigError(
                f"strategy {self.strategy!r} is not one of an Agent's; type: strategy={fitting}"
            )
        self.learners = int(self.asked.get("learners", given.get("learner", 1)))
        self.reducers = int(self.asked.get("reducers", given.get("reducer", 0)))
        parts = spec.roles(
            RunConfig(
                env="", workers=Workers(par.size), learners=self.learners, reducers=self.reducers
            )
        )
        if list(given) != ["worker"] and list(given.items()) != list(parts.counts.items()):
            raise ConfigError(
                f"{self.algorithm} with strategy {self.strategy} needs the roles {parts.text}, in "
                f"this order, and there are {par.roles.text}; type: --roles {parts.text}"
            )
        acting = parts.ranks("actor") or parts.ranks("worker")
        counts = {self._envs_of_all[rank] for rank in acting}
        if len(counts) > 1:
            raise ConfigError(
                f"workers that act must have the same number of environments, and have "
                f"{', '.join(str(self._envs_of_all[rank]) for rank in acting)}"
            )
        self.num_envs = sum(self._envs_of_all[rank] for rank in acting)

    def experiment(self, env: tuple[str, dict[str, Any]]) -> Experiment:
        name, kwargs = env
        asked = {"env": name, "env_kwargs": kwargs} | self.asked
        if asked.get("start_from"):
            asked["start_from"] = os.path.abspath(asked["start_from"])
        return build(
            self.algorithm,
            **asked
            | {
                "strategy": self.strategy,
                "engine": self.engine,
                "workers": self.workers,
                "learners": self.learners,
                "reducers": self.reducers,
                "num_envs": self.num_envs,
                "tensorboard": False,
                "quiet": True,
            },
        )


def _strategy_for(algorithm: str, given: Mapping[str, int]) -> str:
    """Where it was not asked for: what the roles say, or what suits the algorithm."""
    kind = spec_of(algorithm).learns_from
    fits = (s for s in strategies.SPECS.values() if s.part and s.cell(spec_of(algorithm)) == OK)
    named = (s.name for s in fits if given.keys() & (set(s.roles(_SEVERAL).counts) - {"worker"}))
    return next(named, strategies.default_of(kind))


# -- where users step and nothing is written -------------------------------------------------------


class _TheirEnvs(VectorAdapter):
    """The user's environments, as the collectors know environments. The user steps them."""

    def __init__(self, envs: Any, box_actions: Any) -> None:
        if isinstance(envs, gymnasium.Env):
            envs = _OneEnv(envs)
        elif not isinstance(envs, VectorEnv):
            raise ConfigError(
                "an Agent takes a gymnasium.Env or a gymnasium.vector.VectorEnv, such as "
                f"par.make_vec('CartPole-v1', num_envs=8), and was given a {type(envs).__name__}"
            )
        super().__init__(_Spaces(envs), seed=0, box_actions=box_actions)
        self.ended = np.zeros(self.num_envs, bool)  # and the user resets them
        for i in range(self.num_envs):
            self._begin(i, None)

    def _reset_ended(self, ended: Any, row: Step) -> None:
        for i in map(int, ended):
            self._begin(i, None)
        self.ended[ended] = True

    def close(self) -> None:
        """They stay the user's."""


class _OneEnv:
    """A single environment, as a vector of one that does not reset itself."""

    num_envs = 1
    metadata = {"autoreset_mode": AutoresetMode.DISABLED}  # noqa: RUF012

    def __init__(self, env: gymnasium.Env[Any, Any]) -> None:
        self.single_observation_space = env.observation_space
        self.single_action_space = env.action_space
        self.unwrapped = env


class _Spaces:
    """Copies of the spaces: an adapter seeds its own, and the user's keep their streams."""

    def __init__(self, envs: Any) -> None:
        self.single_observation_space = copy.deepcopy(envs.single_observation_space)
        self.single_action_space = copy.deepcopy(envs.single_action_space)
        self.num_envs, self.metadata = envs.num_envs, envs.metadata
        self.unwrapped = envs.unwrapped


class _Named:
    """A worker whose channels, weights and services have names of their own: the next agent of the
    same workers must not hear what the last one has said."""

    _agents: ClassVar[WeakKeyDictionary[Any, int]] = WeakKeyDictionary()

    def __init__(self, worker: Any) -> None:
        number = self._agents.get(worker, 0) + 1  # the same on all: they make the same agents
        self._agents[worker] = number
        self._worker, self._suffix = worker, f" (agent {number})"

    def channel(self, name: str, **options: Any) -> Any:
        return self._worker.channel(name + self._suffix, **options)

    def weights(self, name: str, **options: Any) -> Any:
        return self._worker.weights(name + self._suffix, **options)

    def serve(self, name: str, target: object) -> None:
        self._worker.serve(name + self._suffix, target)

    def service(self, name: str, timeout: float | None = None) -> Any:
        return self._worker.service(name + self._suffix, timeout)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._worker, name)


class _Context(Context):
    """A worker's place where the environments are there already."""

    def __init__(self, experiment: Experiment, worker: Any, envs: VecAdapter) -> None:
        super().__init__(experiment, worker)
        self._given = envs

    def make_envs(self, **_: Any) -> tuple[VecAdapter, EnvNoise]:
        here = self._given.num_envs
        run = self.experiment.run
        first = here * self.acting.index(self.rank) if self.acts else run.num_envs
        self.envs, self.first_env = self._given, first
        self._given.number_from(first)
        return self._given, EnvNoise(run.seed, first, here)

    @property
    def frame_stack(self) -> int:
        return 0  # observations are kept as they come


class _Reports(Records):
    """Records that are given to the user, and not written."""

    def __init__(self, experiment: Experiment) -> None:
        super().__init__(experiment, main=False)
        self._newest: dict[str, Any] | None = None

    def update(self, steps: int, updates: int, info: dict[str, float], phases: Phases) -> None:
        if info.get("gradient_steps") == 0:
            return  # a replay that fills
        self._newest = {
            "env_steps": steps,
            "update": updates,
            "episodes": self.returns.episodes,
            "mean_return": self.returns.mean,
            **info,
        }

    def take(self) -> dict[str, Any] | None:
        newest, self._newest = self._newest, None
        return newest


def _parts(space: Any, obs: Any) -> Any:
    """The named parts of a nested observation."""
    several = type(space).__name__ == "Dict" and isinstance(obs, (dict, tuple))
    return trees.named(obs) if several else obs


def _rows_of_one(obs: Any) -> Obs:
    return trees.map(lambda x: np.asarray(x)[None], obs)


def _rows_that_differ(a: Any, b: Any) -> Any:
    return (a != b).reshape(len(a), -1).any(axis=1)

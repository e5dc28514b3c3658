"""Hooks: methods of the user's own that a run calls on its main worker. Others call them callbacks.

    class Hooks:
        def on_start(self, run): ...                      before the first update
        def on_episode(self, run, episode): ...           each that has finished, of all workers
        def on_evaluation(self, run, evaluation): ...     with --eval-every
        def on_update(self, run): ...                     before its metrics are written
        def on_end(self, run): ...                        the run has ended well, or was stopped

What they decide (`stop`, `set_option`, `set_env_attribute`) reaches all workers at the end of the
update: at once those that learn together, with the next weights the others.

Whatever hooks draw comes from streams of their own, so that hooks that only look change nothing of
the training, to the bit.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from manyhands import seeding, streams
from manyhands.config import hints_of, in_words
from manyhands.config.validate import schedule_faults
from manyhands.config.values import coerce, plain
from manyhands.engines import calls
from manyhands.errors import ConfigError
from manyhands.policy import Policy

if TYPE_CHECKING:
    from manyhands.strategies.context import Context
    from manyhands.strategies.progress import RunProgress

# Options of algorithms that are looked up at every update, and so may change in between.
MAY_CHANGE = (
    "learning_rate", "policy_learning_rate", "value_learning_rate", "entropy_weight",
    "value_weight", "clip", "target_kl", "max_kl", "max_grad_norm",
)  # fmt: skip

# What every record of metrics.jsonl has besides the algorithm's numbers, and how names begin that
# the run gives to its own.
_RECORDS = (
    "env_steps", "update", "wall_seconds", "steps_per_second", "episodes", "mean_return",
    "checkpoint_failures",
)  # fmt: skip
_OWN = ("seconds/", "info/", "eval_")


class FinishedEpisode(NamedTuple):
    """What `on_episode` is given."""

    total_return: float
    length: int
    env: int
    """the environment's number among all workers'"""
    worker: int
    info: dict[str, float]
    """what its last `info` had of the keys of --log-info"""


class Changes:
    """What hooks have changed so far, as one worker knows it: plain data, all of it every time, so
    that a worker which missed some, or was restarted, catches up. Each has a number, which grows,
    so that the same value twice is set twice."""

    def __init__(self) -> None:
        self.options: dict[str, Any] = {}
        self.attributes: dict[str, Any] = {}  # of environments: name -> [number, value]

    def state(self) -> dict[str, Any]:
        return {"options": self.options, "attributes": self.attributes}

    def take(self, state: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
        """Take over what is new: (options, attributes) to be set here."""
        options = {k: v for k, v in state["options"].items() if self.options.get(k) != v}
        known = self.attributes
        new = {k: v for k, v in state["attributes"].items() if known.get(k, [0])[0] < v[0]}
        self.options, self.attributes = dict(state["options"]), dict(state["attributes"])
        return options, {name: value for name, (_, value) in new.items()}


class Run:
    """A run, as hooks see it and may change it.

    It has `steps`, `updates`, `episodes`, `fraction`, `mean_return`, `metrics`, `policy`, `config`,
    `options` and `run_dir`.
    """

    def __init__(self, progress: RunProgress) -> None:
        self._progress = progress
        self._recorded: dict[str, list[float]] = {}
        self.metrics: dict[str, Any] = {}
        """of the last update, by the names of metrics.jsonl"""

    # -- to read ---------------------------------------------------------------------------------

    @property
    def steps(self) -> int:
        """Environment steps of all workers so far."""
        return self._progress.steps

    @property
    def updates(self) -> int:
        return self._progress.updates

    @property
    def episodes(self) -> int:
        """That have finished."""
        return self._progress.records.returns.episodes

    @property
    def mean_return(self) -> float | None:
        """Of the last 100 finished episodes; None before the first."""
        return self._progress.records.returns.mean

    @property
    def fraction(self) -> float:
        """How much of the run is done, from 0 to 1."""
        return self._progress.fraction

    @property
    def run_dir(self) -> Path | None:
        return self._progress.records.folder.path

    @property
    def config(self) -> Any:
        """The options of the run: `run.config.steps`, `run.config.env` and so on."""
        return self._context.experiment.run

    @property
    def options(self) -> Any:
        """The options of the algorithm, as they are now: `run.options.learning_rate`."""
        return self._context.experiment.options

    @property
    def policy(self) -> Policy:
        """The policy as it is now: a copy, which later updates do not change."""
        context = self._context
        observations, actions = context.spaces
        return Policy(
            copy.deepcopy(context.algorithm.model),
            copy.deepcopy(context.normaliser),
            actions,
            context.experiment.run.box_actions,
            observation_space=observations,
            experiment=context.experiment,
        )

    # -- to change -------------------------------------------------------------------------------

    def record(self, name: str, value: float) -> None:
        """A metric of your own: in the next record of metrics.jsonl, and wherever metrics go. Of
        several values between two records it is the mean."""
        if name in _RECORDS or name in self.metrics or name.startswith(_OWN):
            raise ConfigError(
                f"{name!r} is a metric of the run itself; give yours another name, such as "
                f"own/{name.replace('/', '_')}"
            )
        self._recorded.setdefault(name, []).append(float(value))

    def set_option(self, name: str, value: Any) -> None:
        """Change an option of the algorithm from the next update on, on all workers: a number, or a
        schedule such as "linear:1e-3"."""
        options = self.options
        may = [known for known in MAY_CHANGE if hasattr(options, known)]
        if name not in may:
            raise ConfigError(
                f"{name!r} cannot change while a run goes on; what can: {in_words(may)}"
            )
        value = coerce(name, value, hints_of(type(options))[name])
        if fault := next(schedule_faults(name, value), ""):
            raise ConfigError(fault)
        self._changes.options[name] = value

    def set_env_attribute(self, name: str, value: Any) -> None:
        """Set an attribute of all training environments, on all workers, once this update is done:
        for a curriculum. The value is plain data: numbers, text, lists and tables of these."""
        number, _ = self._changes.attributes.get(name, (0, None))
        self._changes.attributes[name] = [number + 1, plain(name, value)]

    def stop(self, reason: str) -> None:
        """End the run after this update; a checkpoint is written, and summary.json says why."""
        self._progress.ended = " ".join(str(reason).split()) or "no reason given"

    @property
    def _context(self) -> Context:
        return self._progress.context

    @property
    def _changes(self) -> Changes:
        assert self._progress.wanted is not None
        return self._progress.wanted


class Hooks:
    """The user's hooks, on the main worker."""

    def __init__(self, name: str, progress: RunProgress) -> None:
        self.name, self.run = name.rpartition(":")[2], Run(progress)
        found = calls.find(name)
        seed = progress.context.experiment.run.seed
        self._streams: dict[str, Any] = {
            kind: streams.seeded(kind, seeding.integer(seed, "hooks", kind))
            for kind in streams.KINDS
        }
        with self._own_streams(), self._blamed("__init__"):
            self._hooks: Any = found() if isinstance(found, type) else found

    def start(self) -> None:
        with self._own_streams():
            self._call("on_start")

    def happened(self, episodes: list[FinishedEpisode], evaluations: list[Any]) -> None:
        """Episodes and evaluations that have finished since the last time."""
        with self._own_streams():
            for episode in episodes if hasattr(self._hooks, "on_episode") else ():
                self._call("on_episode", episode)
            for evaluation in evaluations:
                self._call("on_evaluation", evaluation)

    def update(self, metrics: dict[str, Any]) -> None:
        self.run.metrics = metrics
        with self._own_streams():
            self._call("on_update")

    def recorded(self) -> dict[str, float]:
        """The metrics that hooks have recorded since they were last asked."""
        recorded = self.run._recorded
        means = {name: sum(values) / len(values) for name, values in recorded.items()}
        recorded.clear()
        return means

    def end(self) -> None:
        with self._own_streams():
            self._call("on_end")

    def state(self) -> Any:
        """What hooks want kept in checkpoints: whatever plain data their `state()` gives."""
        if not hasattr(self._hooks, "state"):
            return None
        with self._own_streams(), self._blamed("state"):
            return self._hooks.state()

    def load_state(self, state: Any) -> None:
        if state is not None and hasattr(self._hooks, "load_state"):
            with self._own_streams(), self._blamed("load_state"):
                self._hooks.load_state(state)

    def _call(self, method: str, *args: Any) -> None:
        function = getattr(self._hooks, method, None)
        if function is not None:
            with self._blamed(method):
                function(self.run, *args)

    @contextmanager
    def _blamed(self, method: str) -> Iterator[None]:
        """Say which hook it was; type and traceback stay the user's own."""
        try:
            yield
        except Exception as error:
            error.add_note(f"raised by the hook {self.name}.{method}")
            raise

    @contextmanager
    def _own_streams(self) -> Iterator[None]:
        before = streams.take_all()
        streams.put_all(self._streams)
        try:
            yield
        finally:
            self._streams = streams.take_all()
            streams.put_all(before)

"""Where the time of a run went, and the sentence at its end: what took the most, what to change.

`PHASES` names every phase that a run measures. The sentence, the report and the tables of the docs
are read from it.
"""

from __future__ import annotations

import re
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Literal

from manyhands.config import Experiment
from manyhands.engines.base import cores as usable_cores
from manyhands.strategies import registry as strategies
from manyhands.strategies.registry import OK

Kind = Literal[
    "collecting",
    "learning",
    "meeting",
    "no data",
    "no room",
    "writing",
    "evaluating",
    "saving",
    "starting",
]


@dataclass(frozen=True)
class Phase:
    """What a phase is, in words, and which advice goes with it."""

    kind: Kind
    meaning: str


PHASES: dict[str, Phase] = {
    "starting": Phase("starting", "making environments and networks"),
    "rollout": Phase("collecting", "acting, stepping environments, advantages"),
    "first priorities": Phase(
        "collecting", "apex: an actor computes the TD errors of its new transitions"
    ),
    "gradient": Phase("learning", "gradient_server: a worker computes the gradient of its rows"),
    "optimisation": Phase("learning", "gradients and steps, without the waits inside"),
    "synchronisation": Phase("meeting", "moving data between workers, waiting for each other"),
    "waiting for data": Phase(
        "no data", "gradient_server, actor_learner, apex: the server or learner had nothing to do"
    ),
    "waiting for room": Phase(
        "no room", "gradient_server, actor_learner, apex: whoever acts was too far ahead"
    ),
    "logging": Phase("writing", "writing the files of the run"),
    "evaluation": Phase(
        "evaluating", "with --eval-every: handing the policy over; on the inline engine playing too"
    ),
    "checkpoint": Phase("saving", "collecting and writing checkpoints"),
    "everything else": Phase("starting", "time in no phase; shown, not recorded"),
}

# Gymnasium's own environments of which EnvPool has a copy: where their code lies, but for those
# that it leaves out.
_IN_ENVPOOL = re.compile(r"gymnasium\.envs\.(classic_control|box2d|mujoco|toy_text)\b")
_NOT_IN_ENVPOOL = re.compile(r"Taxi-")

Stepper = Literal["gymnasium", "envpool", "ale", "other"]


def stepper_of(env: str, backend: str) -> Stepper:
    """What steps an environment: "gymnasium" where EnvPool could, too; "other" is nobody's we know.

    Asks nothing but the registry, so that it never fails: a report is also made where the
    environment is not installed.
    """
    import gymnasium

    from manyhands.envs.registry import ATARI_ID

    if backend == "envpool":
        return "envpool"
    found = gymnasium.registry.get(env)
    code = "" if found is None else str(found.entry_point)
    if backend == "atari" or code.startswith("ale_py") or ATARI_ID.search(env):
        return "ale"
    own = env.startswith("manyhands/")  # Gymnasium's code under an id that EnvPool does not know
    copied = _IN_ENVPOOL.match(code) and not (own or _NOT_IN_ENVPOOL.match(env))
    return "gymnasium" if copied and backend in ("auto", "gymnasium") else "other"


def bottleneck(
    phases: Phases | Mapping[str, float],
    experiment: Experiment,
    *,
    cores: int | None = None,
    wall_seconds: float = 0.0,
) -> str:
    """One sentence. With `wall_seconds` the time outside all phases counts, too."""
    totals = phases.totals() if isinstance(phases, Phases) else dict(phases)
    totals = {name: seconds for name, seconds, _ in shares(totals, wall_seconds)}
    whole = sum(totals.values())
    if whole <= 0:
        return "bottleneck: unknown, no time was measured"
    by_kind: dict[str, dict[str, float]] = {}
    for name, seconds in totals.items():
        kind = PHASES[name].kind if name in PHASES else name
        by_kind.setdefault(kind, {})[name] = seconds
    kind, members = max(by_kind.items(), key=lambda item: sum(item[1].values()))
    share = sum(members.values()) / whole
    names = " and ".join(sorted(members, key=lambda name: -members[name]))
    advice = _advice(kind, experiment, cores or usable_cores())
    return f"bottleneck: {names}, {share:.0%} of the time; {advice}"


def _advice(kind: str, experiment: Experiment, cores: int) -> str:
    run = experiment.run
    match kind:
        case "collecting":
            stepper = stepper_of(run.env, run.env_backend)
            faster = _FASTER_ENVIRONMENTS[stepper]
            if stepper == "ale" and run.workers == 1 and run.device != "cpu":
                return f"the games have all {cores} cores already; {faster}"
            return f"{_more_workers(run.workers, cores)}, or {faster}"
        case "learning":
            return ", or ".join(_faster_learning(experiment, cores))
        case "meeting" if run.workers > cores:
            return f"{run.workers} workers share {cores} cores; fewer would wait less (--workers)"
        case "meeting":
            longer = "--batch-steps" if run.collect == "episodes" else "--rollout-length"
            return f"make updates rarer (a larger {longer}) or use fewer workers"
        case "no data":
            return f"whoever learns waits for those that act: {_more_workers(run.workers, cores)}"
        case "no room":
            return "those that act wait for whoever learns: more workers that act will not help"
        case "writing":
            return "write less often (a larger --log-every)"
        case "evaluating":
            return "evaluate less often (a larger --eval-every)"
        case "saving":
            return "save less often (a larger --checkpoint-seconds)"
        case "starting":
            return "the run is too short to say more; use more --steps"
    return "it is no part of training that we know; look there first"


_FASTER_ENVIRONMENTS: dict[Stepper, str] = {
    "gymnasium": "step the environments in C++ (--env-backend envpool)",
    "envpool": "let more environments share each call of the policy (a larger --num-envs)",
    "ale": "let more games share each call of the policy (a larger --num-envs)",
    "other": "profile the environment's own step and reset",
}


def _more_workers(workers: int, cores: int) -> str:
    if workers < cores:
        return f"use more workers (--workers {cores}; {workers} of {cores} cores are busy now)"
    return f"all {cores} cores are busy already; a machine with more would help"


def _faster_learning(experiment: Experiment, cores: int) -> list[str]:
    """Only what this algorithm and strategy have."""
    run, ways = experiment.run, []
    shared = [s for s in strategies.SPECS.values() if s.all_learn and s.cell(experiment.spec) == OK]
    if run.workers < cores and shared:
        ways.append(f"{_more_workers(run.workers, cores)} with --strategy {shared[0].name}")
    elif "learners" in experiment.strategy_spec.options:
        ways.append("let more of the workers learn (a larger --learners)")
    if hasattr(experiment.options, "minibatch"):
        ways.append("take larger minibatches (--minibatch) or fewer epochs (--epochs)")
    if hasattr(experiment.options, "updates_per_step"):
        ways.append("learn less often (a smaller --updates-per-step)")
    return [*ways, "take a smaller network (--hidden)"]


# -- wall time by phase ----------------------------------------------------------------------------


class Phases:
    """Wall time by name: `with phases("rollout"): ...`, about half a microsecond each.

    A phase inside another is taken out of the outer one, so that the totals never count a second
    twice and add up to the time spent in any phase.
    """

    clock = staticmethod(time.perf_counter)
    """`manyhands plan --measure` counts processor time instead, which others cannot lengthen."""

    def __init__(self) -> None:
        self._phases: dict[str, _Phase] = {}
        self._open: list[_Phase] = []
        self._mark = 0.0  # up to here, time has been given to a phase

    def __call__(self, name: str) -> _Phase:
        phase = self._phases.get(name)
        if phase is None:
            phase = self._phases[name] = _Phase(self)
        return phase

    def totals(self) -> dict[str, float]:
        """Seconds by name, the phases that are still open included."""
        if self._open:
            self._give_time(self.clock())
        return {name: phase.seconds for name, phase in self._phases.items()}

    def look(self) -> dict[str, float]:
        """The same for another thread: it changes nothing, and may miss what happens meanwhile."""
        now, mark, open_ = self.clock(), self._mark, self._open[-1:]
        found = {}
        for name, phase in list(self._phases.items()):
            more = max(0.0, now - mark) if phase in open_ else 0.0
            found[name] = round(phase.seconds + more, 3)
        return found

    @property
    def current(self) -> str:
        """The innermost phase that is open now; "" outside of all."""
        open_ = self._open[-1:]
        return next((name for name, phase in list(self._phases.items()) if phase in open_), "")

    @property
    def mark(self) -> float:
        """When a phase last began or ended."""
        return self._mark

    def add(self, name: str, seconds: float) -> None:
        """Count time that was measured elsewhere."""
        self(name).seconds += seconds

    def _give_time(self, now: float) -> None:
        self._open[-1].seconds += now - self._mark
        self._mark = now


class _Phase:
    """One name's total; entered and left any number of times, itself nested included."""

    __slots__ = ("_owner", "seconds")

    def __init__(self, owner: Phases) -> None:
        self._owner = owner
        self.seconds = 0.0

    def __enter__(self) -> None:
        owner = self._owner
        now = owner.clock()
        if owner._open:
            owner._open[-1].seconds += now - owner._mark
        owner._open.append(self)
        owner._mark = now

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        owner = self._owner
        now = owner.clock()
        self.seconds += now - owner._mark
        owner._open.pop()
        owner._mark = now


def shares(totals: Mapping[str, float], wall_seconds: float) -> list[tuple[str, float, float]]:
    """(phase, seconds, share of the wall time), the longest first; what is left comes last."""
    rows: list[tuple[str, float]] = sorted(totals.items(), key=lambda row: -row[1])
    rest = wall_seconds - sum(totals.values())
    if rest > 0.0005 * wall_seconds:
        rows.append(("everything else", rest))
    whole = max(wall_seconds, sum(totals.values())) or 1.0
    return [(name, seconds, seconds / whole) for name, seconds in rows]


def merged(workers: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Mean over workers of each phase: they run side by side, so it compares with wall time."""
    names = dict.fromkeys(name for phases in workers for name in phases)
    return {n: sum(p.get(n, 0.0) for p in workers) / len(workers) for n in names}

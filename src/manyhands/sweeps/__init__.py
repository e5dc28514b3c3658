"""`sweep`: runs that differ in options and seeds, as many at once as the cores can take.

    sweep.toml                       what is tried: a configuration, and a table [sweep]
    SETTING/seed-N/                  an ordinary run, with what it printed in output.txt
    results.json, results.md, curves.png     what came of it

Each run is trained by a process of its own, `manyhands train`, so that whatever reads the folder of
a run reads these; with `ray`, on the nodes of a cluster. One that fails does not stop the others.
All end with this process, however it ends, and a sweep that was stopped or killed goes on where it
stood.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from manyhands import streams
from manyhands.config import build, load_recipe, to_plain
from manyhands.config.values import coerce
from manyhands.engines import calls, joined
from manyhands.errors import ConfigError, Stopped
from manyhands.experiment.folder import RunLock
from manyhands.experiment.metrics import write_json
from manyhands.run import with_names
from manyhands.sweeps import cluster
from manyhands.sweeps.jobs import DONE, OUTPUT, Job, Pool, many
from manyhands.sweeps.plan import (
    Plan,
    Trial,
    check,
    claim,
    default_dir,
    load_file,
    load_plan,
    make_plan,
    without_needless_processes,
)
from manyhands.sweeps.search import Search, load_optuna
from manyhands.sweeps.view import View, counted
from manyhands.viewing import scores

__all__ = [
    "Job",
    "Paused",
    "Plan",
    "Pool",
    "Swept",
    "Trial",
    "View",
    "begin",
    "check",
    "claim",
    "load_file",
    "load_plan",
    "make_plan",
    "resume",
    "sweep",
    "without_needless_processes",
]


class Paused(Stopped):
    """A signal ended the sweep; `words` say how to go on."""

    def __init__(self, number: int, words: str) -> None:
        super().__init__(number)
        self.words = words


@dataclass(frozen=True)
class Swept:
    """What came of a sweep. It can stand for its folder: `plot(swept)`."""

    dir: Path
    results: dict[str, Any] = field(repr=False)  # as in results.json

    def __fspath__(self) -> str:
        return str(self.dir)

    @property
    def best(self) -> dict[str, Any]:
        """The options of the setting that came first."""
        setting: dict[str, Any] = self.results["settings"][0]["setting"]
        return setting

    @property
    def failed(self) -> list[dict[str, Any]]:
        """The runs that failed, each with its error."""
        return [run for run in self.results["runs"] if run["state"] == "failed"]

    @property
    def table(self) -> str:
        return scores.table(self.results)

    def _repr_html_(self) -> str:
        """What a notebook shows."""
        return f"<pre>{self.table}</pre>"


def sweep(
    algorithm: str = "",
    *,
    recipe: str = "",
    grid: Mapping[str, Sequence[Any]] | None = None,
    settings: Sequence[Mapping[str, Any]] = (),
    seeds: int | Sequence[int] = 1,
    dir: str | os.PathLike[str] = "",
    at_once: int = 0,
    ray: str = "",
    metric: str = "",
    optuna: int = 0,
    ranges: Mapping[str, Sequence[Any]] | None = None,
    **options: Any,
) -> Swept:
    """Train with every combination of options and seeds, and compare, as `manyhands sweep` does.

        found = sweep("ppo", env="CartPole-v1", steps=50_000, seeds=5,
                      grid={"learning_rate": [1e-3, 3e-4]}, dir="sweeps/rate")
        print(found.table); found.best

    Where `dir` holds this sweep already, it goes on: runs that have finished are not repeated.
    With `dir` alone, whatever sweep is there goes on.

    Args:
        algorithm, recipe, options: as for `train`; one worker a run unless `workers` says more.
        grid: option -> values; all combinations are tried. `env_kwargs.NAME` is an option, too.
        settings: further options, one dict a setting, each with all of the grid.
        seeds: how many, from `seed` on, or which.
        dir: folder of the sweep; by default sweeps/ENV/ALGORITHM-TIME.
        at_once: runs at the same time; by default as many as the cores can take.
        ray: "HOST:6379" of a Ray cluster, whose nodes then train, as many as its CPUs can take;
            "auto" for the one that runs here. They share the disk that `dir` is on.
        metric: what settings are ranked by: final, area, or a name of metrics.jsonl.
        optuna: settings for Optuna to draw from grid and ranges, in place of all combinations.
        ranges: option -> (low, high) or (low, high, "log").
    """
    if calls.importing_main:
        raise ConfigError(
            "sweep() was reached while a worker imported your script. Put the call under a main "
            'guard: if __name__ == "__main__":'
        )
    if not (algorithm or recipe or grid or ranges or settings or options) and dir:
        return resume(dir, at_once=at_once, ray=ray, metric=metric)
    if bool(algorithm) == bool(recipe):
        raise ConfigError('give an algorithm, sweep("ppo", ...), or a recipe, sweep(recipe=NAME)')
    if "run_dir" in options:
        raise ConfigError("run_dir is for one run; each of a sweep has a folder of its own: dir=")
    for what, table in (("grid", grid), ("ranges", ranges)):
        if table is not None and not isinstance(table, Mapping):
            raise ConfigError(
                f"{what}={table!r}: a table of options is needed, as in "
                f'{what}={{"gamma": [0.9, 0.99]}}'
            )
    optuna, at_once = coerce("optuna", optuna, int), coerce("at_once", at_once, int)
    options = with_names(options, elsewhere=True)
    if callable(hooks := options.get("hooks")):
        options["hooks"] = calls.name_of(hooks)
    asked = "engine" in options
    if recipe:
        base = load_recipe(recipe)
        known = to_plain(base)
        algorithm, options = base.algorithm, known["run"] | known[base.spec.name] | options
    base = build(algorithm, **options)
    if not asked:
        base = without_needless_processes(base, {**(grid or {}), **(ranges or {})})
    plan = make_plan(base, grid or {}, settings, seeds, metric, optuna=optuna, ranges=ranges)
    with streams.given_back():
        return begin(plan, dir, at_once, ray)


def begin(plan: Plan, dir: str | os.PathLike[str] = "", at_once: int = 0, ray: str = "") -> Swept:
    """Check a plan, and go through with it; on with it where the folder holds it already."""
    _alone()
    folder = Path(dir or default_dir(plan.base)).absolute()
    check(plan, folder)
    return _perform(folder, plan, at_once, ray, plan.base.run.quiet)


def resume(
    dir: str | os.PathLike[str],
    *,
    at_once: int = 0,
    ray: str = "",
    metric: str = "",
    quiet: bool = False,
) -> Swept:
    """Go on with the sweep of a folder: what has finished stays, what was interrupted goes on from
    its last checkpoint, what has failed is tried again."""
    _alone()
    folder = Path(dir).absolute()
    plan = load_plan(folder)
    plan = dataclasses.replace(plan, metric=metric or plan.metric)
    return _perform(folder, plan, at_once, ray, quiet)


def _alone() -> None:
    place = joined.place_in(None)
    if place is not None:
        who = joined.launcher(os.environ)
        raise ConfigError(
            f"{who} has started {place.size} processes, and a sweep is one that starts its runs "
            f"itself; start it without {who}"
        )


def _perform(folder: Path, plan: Plan, at_once: int, ray: str, quiet: bool) -> Swept:
    if at_once < 0:
        raise ConfigError(f"--at-once {at_once}: at least 1 is needed")
    if plan.optuna:
        load_optuna()
    tried = plan.looked_at()
    cluster.check_engines(ray, tried)
    with RunLock(folder):
        claim(folder, plan)
        base = dataclasses.replace(plan.base, run=dataclasses.replace(plan.base.run, quiet=False))
        plan = dataclasses.replace(plan, base=base)
        search = Search(folder, plan) if plan.optuna else None
        jobs = [Job(trial, folder / trial.name) for trial in ([] if search else plan.trials())]
        jobs += search.earlier() if search else []
        for job in jobs:
            job.is_done()
        with cluster.joined(ray, folder, tried) as nodes, _view(quiet) as view:
            drawn = [f"{plan.optuna} settings for Optuna to draw"] if plan.optuna else []
            view.say(", ".join([*drawn, *([counted(jobs)] if jobs else []), f"in {_near(folder)}"]))
            stopped = Pool(jobs, at_once, view, search, nodes).run()
        if stopped:
            done = sum(job.state in DONE for job in jobs)
            raise Paused(stopped, f"{done} of {many(len(jobs))} have finished. To continue, type: "
                         f"manyhands resume {_near(folder)}")  # fmt: skip
        results = _results(folder, plan, jobs)
        swept = Swept(folder, results)
        if not quiet:
            print(_ending(swept))
        return swept


@contextlib.contextmanager
def _view(quiet: bool) -> Iterator[View]:
    view = View(quiet)
    try:
        yield view
    finally:
        view.close()


def _results(folder: Path, plan: Plan, jobs: list[Job]) -> dict[str, Any]:
    """Score and rank the runs, and write what came of them into the folder."""
    rows = [
        {
            "run": job.trial.name,
            "setting": job.trial.setting,
            "seed": job.trial.seed,
            "env": job.trial.experiment.run.env,
            "state": job.state,
            "error": job.error,
        }
        for job in jobs
    ]
    try:
        results = scores.rank(folder, rows, plan.metric)
    except ConfigError as error:  # which columns a run has is known once it has run
        raise ConfigError(
            f"{error}; to rank the runs by another, type: manyhands resume {_near(folder)} "
            "--metric final"
        ) from error
    write_json(folder / scores.RESULTS, results)
    (folder / "results.md").write_text(scores.markdown(results), encoding="utf-8")
    scores.draw(folder, results)
    return results


def _ending(swept: Swept) -> str:
    near = _near(swept.dir)
    lines = ["", swept.table, ""]
    if swept.failed:
        lines += [f"failed: {run['run']}: {run['error']}" for run in swept.failed]
        lines += [
            f"What they printed is in {near}/RUN/{OUTPUT}. To try them again, type: manyhands "
            f"resume {near}"
        ]
    lines.append(f"results in {near}: results.json, results.md, curves.png")
    return "\n".join(lines)


def _near(folder: Path) -> str:
    """As short as it can be typed from here."""
    shown = os.path.relpath(folder)
    return str(folder) if shown.startswith("..") else shown

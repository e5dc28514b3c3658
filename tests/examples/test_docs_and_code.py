"""Pages that say what the code has: names, defaults and tables, kept true by comparing the two."""

from __future__ import annotations

import difflib
import inspect
import json
import re
import tomllib
from pathlib import Path
from typing import Any

import pytest
import reference_api
import reference_parts

import manyhands
from manyhands import support
from manyhands.algorithms.registry import SPECS
from manyhands.cli.train import teach
from manyhands.config import RunConfig, default_strategy, help_of, hints_of, names_of, usual
from manyhands.config.resumed import OPTIONS as RESUME_OPTIONS
from manyhands.experiment.bottleneck import PHASES
from manyhands.parallel import Parallel

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"


def text_of(page: str) -> str:
    return (ROOT / page).read_text(encoding="utf-8")


# -- parts that are filled in ----------------------------------------------------------------------


@pytest.mark.parametrize(
    "page",
    reference_parts.pages_with_parts(ROOT),
    ids=lambda page: page.relative_to(ROOT).as_posix(),
)
def test_parts_from_the_code_are_up_to_date(page: Path) -> None:
    written, real = page.read_text(encoding="utf-8"), reference_parts.filled(page, ROOT)
    difference = "\n".join(difflib.unified_diff(written.split("\n"), real.split("\n"), lineterm=""))
    assert not difference, f"type: make docs\n{difference}"


def test_the_pages_that_went_stale_have_their_parts() -> None:
    for page, parts in {
        "docs/concepts/five-ideas.md": ["strategies", "engines"],
        "docs/start/train.md": ["phases", "which algorithm"],
        "docs/reference/metrics.md": ["seconds by phase", "summary", "events"],
        "docs/how-to/building-blocks.md": ["engines with blocks"],
        "README.md": ["algorithms", "engines that restart"],
        "docs/concepts/what-happens-on-failure.md": ["engines that restart"],
        "docs/concepts/scale.md": ["engines that restart"],
        "docs/strategies/actor_learner.md": ["engines that restart"] * 2,
        "docs/strategies/apex.md": ["engines that restart"] * 2,
        "docs/strategies/gradient_server.md": ["engines that restart"] * 2,
        **{f"docs/algorithms/{name}.md": ["options", "where it runs"] for name in support.built()},
    }.items():
        assert re.findall(r"<!-- from the code: ([\w ]+) -->", text_of(page)) == parts


def test_one_list_names_the_algorithms_and_others_lead_there() -> None:
    """So that a new one changes one page besides its own."""
    target = "start/train.md#which-algorithm-which-strategy"
    assert "## Which algorithm, which strategy\n" in text_of("docs/start/train.md")
    for name in support.built():
        assert f"[{name}](../algorithms/{name}.md)" in text_of("docs/start/train.md")
    for page in ("README.md", "docs/index.md", "docs/concepts/five-ideas.md",
                 "docs/how-to/agent-in-your-own-loop.md", "docs/reference/config.md",
                 "docs/reference/cli.md", "docs/reference/support.md"):  # fmt: skip
        assert target in text_of(page), page


def test_a_part_is_filled_in_whatever_stood_there(tmp_path: Path) -> None:
    page = tmp_path / "docs" / "x.md"
    page.parent.mkdir()
    page.write_text("a <!-- from the code: engines -->old\nwords<!-- end --> b")
    assert reference_parts.filled(page, tmp_path) == (
        f"a <!-- from the code: engines -->{', '.join(support.ENGINES[:-1])} and "
        f"{support.ENGINES[-1]}<!-- end --> b"
    )
    page.write_text("<!-- from the code: engine -->x<!-- end -->")
    with pytest.raises(KeyError, match="there is no part 'engine'"):
        reference_parts.filled(page, tmp_path)


# -- names and defaults ----------------------------------------------------------------------------


def test_api_page_has_every_public_name() -> None:
    page = reference_api.api_page()
    for name in manyhands.__all__:
        thing = getattr(manyhands, name)
        if inspect.isclass(thing) and not issubclass(thing, Exception):
            assert f"\n## {name}\n" in page
        elif inspect.isfunction(thing):
            assert f"`manyhands.{name}(" in page
    told = [name for names in reference_api.PARALLEL_PARTS.values() for name in names]
    assert sorted(told) == sorted(name for name in vars(Parallel) if not name.startswith("_"))


def test_no_entry_of_the_api_page_is_without_words() -> None:
    entries = re.findall(r"(?m)^(`[\w.]+\(.*\)`)\n\n(.*)$", reference_api.api_page())
    assert len(entries) > 80
    assert [call for call, words in entries if not words] == []


def test_help_of_the_run_says_what_the_algorithms_have() -> None:
    told = help_of(RunConfig)
    groups = re.findall(r"((?:\w+(?:, | and ))*\w+) (\d+)[,)]", told["rollout_length"])
    lengths = {n: int(length) for names, length in groups for n in re.split(", | and ", names)}
    for algorithm in support.built():
        options = SPECS[algorithm].options
        assert (algorithm in told["normalize_rewards"]) == usual(options, "normalize_rewards")
        assert lengths[algorithm] == options.ROLLOUT_LENGTH
        default = default_strategy(algorithm, 2)
        assert re.search(rf"{default} for [a-z0-9, ]*\b{algorithm}\b", told["strategy"]), algorithm
        assert algorithm in SPECS
    assert all(name in told["strategy"] for name in support.STRATEGIES)
    assert all(name in told["engine"] for name in support.ENGINES)
    assert not [text for text in told.values() if "{" in text]


def test_help_of_train_names_the_strategies_and_whose_default_they_are() -> None:
    rows = dict(re.findall(r"(?m)^  (\w+) +(.+)$", teach().partition("strategies,")[2]))
    for strategy in support.STRATEGIES:
        whose = [a for a in support.built() if default_strategy(a, 2) == strategy]
        told = re.search(r"\(default of ([^)]+)\)", rows[strategy])
        assert sorted(re.split(", | and ", told[1]) if told else []) == sorted(whose)


def test_extras_of_the_install_page_are_those_of_the_package() -> None:
    with open(ROOT / "pyproject.toml", "rb") as file:
        extras = tomllib.load(file)["project"]["optional-dependencies"]
    told = re.findall(r"(?m)^\| `pip install '\.\[(\w+)\]'` \|", text_of("docs/start/install.md"))
    assert sorted(told) == sorted(set(extras) - {"dev", "docs"})
    all_of_these = re.findall(r"\w+", extras["all"][0].partition("[")[2])
    assert sorted(told[: told.index("all")]) == sorted(all_of_these)


def test_gpu_page_has_every_device_and_every_strategy() -> None:
    page = text_of("docs/how-to/gpus.md").partition("## Ready-made training")[2]
    devices = [first for first, *_ in re.findall(r"(?m)^\| `(\w+)`( \(the default\))? \|", page)]
    assert sorted(devices) == sorted(hints_of(RunConfig)["device"].__args__)
    default = re.findall(r"(?m)^\| `(\w+)` \(the default\) \|", page)
    assert default == [RunConfig(env="x").device]
    rows = re.findall(r"(?m)^\| ([a-z_, ]+) \| .* \| .* \|$", page)
    named = [name for row in rows if row != "strategy" for name in row.split(", ")]
    assert sorted(named) == sorted(support.STRATEGIES)


def test_what_a_resumed_run_may_change_is_told() -> None:
    page = text_of("docs/how-to/stop-and-resume.md").partition("## Go on")[2].partition("## ")[0]
    told = re.findall(r"`(?:--)?([a-z][\w-]+)(?: \w)?`", page.partition("From Python:")[0])
    options = {name.replace("-", "_") for name in told} & set(hints_of(RunConfig))
    assert options == set(RESUME_OPTIONS)


# -- phases ----------------------------------------------------------------------------------------


def test_tune_and_scale_advises_on_every_phase() -> None:
    section = text_of("docs/how-to/tune-and-scale.md").partition("| bottleneck | do |")[2]
    table = section.partition("\n\n")[0]
    told = {
        name
        for row in table.splitlines()
        for name in re.findall(r"`([^`]+)`", row.strip("|").partition("|")[0])
    }
    assert told == set(PHASES)


@pytest.mark.parametrize("strategy", ["single", "gather", "allreduce"])
def test_measured_tables_name_phases_of_the_code(strategy: str) -> None:
    page = text_of(f"docs/strategies/{strategy}.md")
    (table,) = re.findall(r"(?m)^\| seconds in rounds.*\n\|-.*\n((?:\|.*\n)+)", page)
    rows = re.findall(r"(?m)^\| ([a-z ]+) \|", table)
    assert len(rows) >= 5
    assert [name for name in rows if name not in PHASES] == []


# -- results ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("algorithm", support.built())
def test_every_algorithm_has_results_over_seeds(algorithm: str) -> None:
    """README says so."""
    results = text_of(f"docs/algorithms/{algorithm}.md").partition("\n## Results\n")[2]
    numbers = {"five": 5}
    counts = [
        numbers[n] if n in numbers else int(n)
        for n in re.findall(r"\b(?:all|of) (\d+|five)\s+seeds", results)
    ]
    counts.append(len(re.findall(r"(?m)^\| \d+ \| [\d,]+ steps", results)))
    assert max(counts) >= 5


def test_figures_of_two_free_cores_are_the_stored_ones() -> None:
    def stored(name: str) -> Any:
        return json.loads((ROOT / "benchmarks" / "results" / name).read_text())["runs"]

    scaling = {run["strategy"]: run["steps_per_second"] for run in stored("scaling.json")}
    train = {name: run["median"] for name, run in stored("train.json").items()}
    ours = [train[f"manyhands, {n}"] for n in (
        "1 worker", "2 workers, gather", "2 workers, allreduce"
    )]  # fmt: skip
    page = text_of("docs/strategies/single.md")
    for start, figures in {
        "PPO on CartPole-v1": ours,
        "TRPO on Walker2d-v5": [scaling[s] for s in ("single", "gather", "allreduce")],
    }.items():
        (row,) = re.findall(rf"(?m)^\| {start}.*\| ([\d,]+) \| ([\d,]+) \| ([\d,]+) \|$", page)
        assert [int(n.replace(",", "")) for n in row] == [round(f) for f in figures]


# -- what pages say in passing ---------------------------------------------------------------------

PAGES = [ROOT / "README.md", *sorted(DOCS.rglob("*.md"))]
NAMES = "|".join(SPECS)
CONFIGS = (RunConfig, *(spec.options for spec in SPECS.values()))
OPTIONS = {name.replace("_", "-") for config in CONFIGS for name in names_of(config)}
OPTIONS |= {f"no-{name}" for name in OPTIONS} | {"mpi"}  # srun's
for file in (ROOT / "src").rglob("*.py"):  # of the other commands
    OPTIONS |= set(re.findall(r'"--([a-z][\w-]*)"', file.read_text(encoding="utf-8")))


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_what_is_said_in_passing_is_true(page: Path) -> None:
    """Measures that exist, whose options are whose, and an installation that can be had."""
    text = page.read_text(encoding="utf-8")
    for name in re.findall(r"--metric ([a-z]\w+)", text):
        assert f"`{name}`" in text_of("docs/reference/metrics.md"), name
    for said, algorithms in re.findall(
        rf"`--([a-z-]+)[^`\n]*` for ((?:{NAMES})(?:(?:, | and )(?:{NAMES}))*)\b", text
    ):
        option = said.replace("-", "_")
        having = {name for name, spec in SPECS.items() if option in names_of(spec.options)}
        assert set(re.findall(NAMES, algorithms)) == having, said
    if not page.name.startswith("coming-from-"):  # where they are options of other programs
        given = {name.replace("_", "-") for name in re.findall(r"`--([a-z][\w-]*)", text)}
        assert sorted(given - OPTIONS) == [], f"{page.name} names options that nobody has"
    if page.name not in ("install.md", "log.md"):  # the one says that this will find nothing
        assert not re.search(r"pip install '?manyhands\b", text)

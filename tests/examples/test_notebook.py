"""The notebook runs as a person would run it, and shows how far its trainings are."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

import pytest
from screen import seen

nbclient = pytest.importorskip("nbclient")
nbformat = pytest.importorskip("nbformat")
pytest.importorskip("ipykernel")

pytestmark = [pytest.mark.usefixtures("nothing_left")]

NOTEBOOK = Path(__file__).parents[2] / "examples" / "notebooks" / "first_run.ipynb"
PROGRESS = re.compile(r"^ *\d+%  [\d,]+ steps  [\d,.]+ steps/s  return .* left$")


# An environment of a cell, and what results show.
CELLS = (
    """
import os
import gymnasium, numpy
import manyhands as mh

os.mkdir("own")
os.chdir("own")

class Walk(gymnasium.Env):
    observation_space = gymnasium.spaces.Box(-1.0, 1.0, (2,), numpy.float32)
    action_space = gymnasium.spaces.Discrete(2)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.steps = 0
        return numpy.zeros(2, numpy.float32), {}

    def step(self, action):
        self.steps += 1
        return numpy.zeros(2, numpy.float32), 1.0, self.steps == 4, False, {}

options = dict(env=Walk, steps=128, num_envs=2, rollout_length=32, minibatch=32, quiet=True)
""",
    "result = mh.train('ppo', engine='inline', **options)\nresult",
    "mh.evaluate(result, episodes=2)",
    "mh.plot(result)",
    """
try:
    mh.train("ppo", engine="local", **options)
except mh.ConfigError as error:
    print(error)
""",
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("notebook")


@pytest.fixture(scope="module")
def executed(folder: Path) -> Any:
    """The notebook, with our own cells at its end: a second kernel would import torch again."""
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    notebook.cells += [nbformat.v4.new_code_cell(text) for text in CELLS]
    # ipykernel does not show what child processes write if it believes to be under test itself.
    env = {k: v for k, v in os.environ.items() if k not in ("PYTEST_CURRENT_TEST", "NO_COLOR")}
    client = nbclient.NotebookClient(
        notebook, timeout=100, resources={"metadata": {"path": str(folder)}}
    )
    client.execute(env=env)  # raises what a cell raises
    return notebook


def printed(notebook: Any, cell: int) -> str:
    """Everything under one of the code cells, as text."""
    outputs = [c for c in notebook.cells if c.cell_type == "code"][cell].outputs
    assert {o.output_type for o in outputs} <= {"stream"}
    assert {o.name for o in outputs} <= {"stdout"}, outputs
    return "".join(o.text for o in outputs)


def test_the_saved_notebook_has_no_outputs() -> None:
    """What was printed on somebody's machine is no part of the example."""
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    nbformat.validate(notebook)
    assert not [c for c in notebook.cells if c.get("outputs") or c.get("execution_count")]


@pytest.mark.parametrize(("cell", "engine", "steps"), [(0, "local", 20_480), (3, "inline", 4_096)])
def test_a_training_shows_its_progress_in_one_line(
    cell: int, engine: str, steps: int, executed: Any
) -> None:
    text = printed(executed, cell)
    assert "\x1b" not in text
    lines = seen(text)
    assert lines[0] == "training     ppo on CartPole-v1, seed 1"
    assert f"2, allreduce on the {engine} engine" in lines[1]
    progress = [line for line in lines if PROGRESS.match(line)]
    assert len(progress) == 1  # rewritten, not one after the other
    assert progress[0].startswith(f"100%  {steps:,} steps  ")
    assert [line for line in lines if line.startswith(f"end     finished after {steps:,} steps")]


def test_what_the_other_cells_print(executed: Any) -> None:
    rows = printed(executed, 1).splitlines()
    assert len(rows) == 5
    assert rows[-1].startswith(" 20,480 steps   mean return ")
    word, _, total = printed(executed, 2).strip().partition(": ")
    assert word == "return of the episode"
    assert float(total) > 20  # a policy that has not learned falls within a dozen steps


# -- an environment of a cell ----------------------------------------------------------------------


def test_an_environment_of_a_cell_and_what_results_show(executed: Any, folder: Path) -> None:
    own = executed.cells[-len(CELLS) :]
    _, trained, evaluated, plotted, refused = (cell.outputs for cell in own)
    shown = trained[-1].data["text/html"]
    assert "PPO on Walk" in shown
    assert "data:image/png" in shown
    assert trained[-1].data["text/plain"].startswith("Result('")
    assert [path.name for path in (folder / "own" / "runs").iterdir()] == ["Walk"]
    assert "4.00 ± 0.00" in evaluated[-1].data["text/plain"]
    assert plotted[-1].data["text/html"].startswith("<img ")
    assert "put it into a file and import it, or use engine='inline'" in refused[-1].text

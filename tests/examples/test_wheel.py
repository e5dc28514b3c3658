"""What `pip install` of the wheel gives: types, recipes and examples, in an empty environment."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tomllib
import venv
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
DATA = {"recipes": "src/manyhands/recipes", "examples": "examples"}
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
EXTRAS = sorted({*PROJECT["optional-dependencies"]} - {"dev", "docs"})
SECONDS = 600  # for what takes sixty on a quiet machine: torch is unpacked

USERS_FILE = """\
import manyhands as mh

result = mh.train("ppo", env="CartPole-v1", steps=64)
reveal_type(result.mean_return)
mh.Parallel().mean("a", times=3)
"""


def built(folder: Path) -> Path:
    """The wheel, by the backend that pip itself would use."""
    wheel = pytest.importorskip("hatchling.builders.wheel", reason="hatchling is not installed")
    return Path(next(wheel.WheelBuilder(str(ROOT)).build(directory=str(folder))))


def test_a_wheel_has_the_package_its_types_recipes_and_examples(tmp_path: Path) -> None:
    names = set(zipfile.ZipFile(built(tmp_path)).namelist())
    source = ROOT / "src"
    package = {p.relative_to(source).as_posix() for p in source.rglob("*.py")}
    assert package | {"manyhands/py.typed"} <= names
    for inside, outside in DATA.items():
        files = [p for p in (ROOT / outside).rglob("*") if p.suffix in (".py", ".toml", ".ipynb")]
        there = [p.relative_to(ROOT / outside).as_posix() for p in files if p.name != "ruff.toml"]
        assert len(there) > 10
        assert {f"manyhands/{inside}/{name}" for name in there} <= names
    rest = {n for n in names - package if not n.startswith(("manyhands/recipes/", "manyhands/ex"))}
    page = {f"manyhands/viewing/page/watch.{kind}" for kind in ("html", "js", "css")}
    assert {n for n in rest if ".dist-info/" not in n} == {"manyhands/py.typed"} | page


PIP_INSTALL = ["-m", "pip", "install", "--quiet", "-c", str(ROOT / "constraints.txt")]


@pytest.fixture(scope="session")
def only_torch(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A virtual environment with nothing but torch: what is unpacked once need not be once an
    extra."""
    home = tmp_path_factory.mktemp("torch") / "empty"
    venv.create(home, with_pip=True)
    subprocess.run([home / "bin" / "python", *PIP_INSTALL, "torch"], check=True, timeout=SECONDS)
    return home


class Empty:
    """A virtual environment with the wheel and nothing else, or with one of its extras.

    `make dist` gives the wheel that it has built.
    """

    def __init__(self, folder: Path, torch: Path, extra: str = "") -> None:
        self.folder, self.home = folder, folder / "empty"
        self.wheel = Path(os.environ.get("MANYHANDS_WHEEL") or built(folder)).resolve()
        shutil.copytree(torch, self.home, symlinks=True, copy_function=os.link)
        self.python = str(self.home / "bin" / "python")
        self.command = str(self.home / "bin" / "manyhands")
        what = f"manyhands{extra and f'[{extra}]'} @ file://{self.wheel}"
        self.run(self.python, *PIP_INSTALL, what)
        here = self.run(self.python, "-c", "import manyhands; print(manyhands.__file__)")
        assert here.startswith(str(self.home))

    def run(self, *words: str, expect: int = 0) -> str:
        hidden = ("PYTHONPATH", "PYTEST_CURRENT_TEST", "PYTEST_XDIST_WORKER")
        env = {k: v for k, v in os.environ.items() if k not in hidden}
        done = subprocess.run(
            words, cwd=self.folder, env=env, capture_output=True, text=True, timeout=SECONDS
        )
        output = done.stdout + done.stderr
        assert done.returncode == expect, f"{' '.join(words)}: exit {done.returncode}\n{output}"
        return output


@pytest.mark.slow
@pytest.mark.timeout(3 * SECONDS)
@pytest.mark.parametrize("extra", EXTRAS)
def test_the_wheel_works_with_each_extra(extra: str, tmp_path: Path, only_torch: Path) -> None:
    empty = Empty(tmp_path, only_torch, extra)
    assert "all engines that are installed work" in empty.run(empty.command, "doctor")
    assert "first steps:" in empty.run(empty.python, "-m", "manyhands", "--help")
    assert "ppo-cartpole" in empty.run(empty.command, "recipes")
    engine = extra if extra in ("mpi", "ray") else "local"
    words = ["train", "ppo", "--env", "CartPole-v1", "--steps", "2048", "-n", "2"]
    assert f"on the {engine} engine" in empty.run(empty.command, *words, "--engine", engine)


@pytest.mark.slow
@pytest.mark.timeout(3 * SECONDS)
def test_the_wheel_works_in_an_empty_environment(tmp_path: Path, only_torch: Path) -> None:
    empty = Empty(tmp_path, only_torch)
    wheel, python, command, run = empty.wheel, empty.python, empty.command, empty.run
    assert "all engines that are installed work" in run(command, "doctor")
    assert "first steps:" in run(python, "-m", "manyhands", "--help")
    assert "ppo-cartpole" in run(command, "recipes")
    assert "own_loop/before.py" in run(command, "examples")
    (tmp_path / "own_env.py").write_text(run(command, "examples", "own_env.py"))
    run(python, "own_env.py")
    few = ["--steps", "2048", "--target-return", "none"]
    assert "2,048 steps" in run(command, "train", "--recipe", "ppo-cartpole", *few[:2])

    missing = run(command, "train", "ppo", "--env", "CartPole-v1", "--engine", "mpi", expect=2)
    assert f"pip install 'manyhands[mpi] @ file://{wheel}'" in missing

    (tmp_path / "user.py").write_text(USERS_FILE)
    mypy = [sys.executable, "-m", "mypy", "--python-executable", python]
    seen = run(*mypy, "--cache-dir", str(tmp_path / "cache"), "user.py", expect=1)
    assert 'Revealed type is "float | None"' in seen
    assert re.search(r'user\.py:5: error: Unexpected keyword argument "times"', seen)
    assert "site-packages" not in seen  # no errors inside the package

"""`import manyhands` costs nothing, and what is not installed is one clear line."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from manyhands.errors import install

HEAVY = ["torch", "ray", "mpi4py", "gymnasium", "matplotlib", "envpool"]

# Runs before anything else in an interpreter: it makes packages look as if they were not there.
HIDE = """
import sys

HIDDEN = {hidden!r}

class Hiding:
    def __init__(self, finder):
        self.finder = finder
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in HIDDEN:
            return None
        return self.finder.find_spec(name, path, target)
    def __getattr__(self, name):
        return getattr(self.finder, name)

sys.meta_path[:] = [Hiding(finder) for finder in sys.meta_path]
"""


def python(*args: str, env: dict[str, str] | None = None) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *args],
        capture_output=True,
        text=True,
        timeout=200,
        env=os.environ | (env or {}),
    )


def manyhands(*args: str, env: dict[str, str] | None = None) -> subprocess.CompletedProcess[str]:
    return python("-m", "manyhands.cli.main", *args, env=env)


@pytest.fixture
def hidden(tmp_path: Path) -> dict[str, str]:
    """Environment variables for an interpreter in which no optional package can be found."""
    names = ["mpi4py", "ray", "envpool", "ale_py", "matplotlib"]
    (tmp_path / "sitecustomize.py").write_text(HIDE.format(hidden=names))
    return {"PYTHONPATH": str(tmp_path)}


def test_a_configuration_is_read_and_checked_without_torch() -> None:
    code = (
        "import sys\nfrom manyhands.config import build\n"
        "from manyhands.config.validate import check\n"
        "check(build('ppo', env='CartPole-v1', workers=2))\nprint('torch' in sys.modules)"
    )
    assert python("-c", code).stdout == "False\n"


def test_import_is_quick() -> None:
    """Processor time, the best of five, in a fresh interpreter each: others may be at work here,
    and the file system may be cold at first."""
    code = "import time; t = time.process_time(); import manyhands; print(time.process_time() - t)"
    seconds = [float(python("-c", code).stdout) for _ in range(5)]
    assert min(seconds) < 0.3


@pytest.mark.parametrize(
    "code",
    [
        "import manyhands",
        "import manyhands; manyhands.launch, manyhands.Parallel, manyhands.ConfigError",
        "from manyhands.cli.main import main; main(['--help'])",
        "from manyhands.cli.main import main; main(['support'])",
    ],
)
def test_nothing_heavy_is_loaded(code: str) -> None:
    look = f"{code}; import sys; print([m for m in {HEAVY} if m in sys.modules])"
    result = python("-c", look)
    assert result.stdout.splitlines()[-1:] == ["[]"], result.stdout + result.stderr


def test_every_public_name_is_there() -> None:
    import manyhands

    for name in manyhands.__all__:
        assert getattr(manyhands, name) is not None
        assert name in dir(manyhands)
    with pytest.raises(AttributeError, match="no attribute 'Paralel'"):
        manyhands.Paralel  # noqa: B018


def test_hiding_hides(hidden: dict[str, str]) -> None:
    """The test's own tool: hidden packages are gone, the others are not."""
    code = "import importlib.util as u; print([u.find_spec(n) is None for n in ('ray', 'numpy')])"
    assert python("-c", code, env=hidden).stdout.strip() == "[True, False]"


@pytest.mark.parametrize(("engine", "extra"), [("mpi", "mpi"), ("ray", "ray")])
def test_missing_engine_package_is_one_line(
    hidden: dict[str, str], tmp_path: Path, engine: str, extra: str
) -> None:
    script = tmp_path / "script.py"
    script.write_text("import manyhands; manyhands.Parallel()")
    result = manyhands("launch", "-n", "2", "--engine", engine, str(script), env=hidden)
    assert result.returncode == 2, result.stderr
    assert len(result.stderr.strip().splitlines()) == 1, result.stderr
    assert install(extra) in result.stderr


@pytest.mark.parametrize("engine", ["mpi", "ray"])
def test_missing_engine_package_in_python(hidden: dict[str, str], engine: str) -> None:
    code = (
        "import manyhands, os\n"
        f"try: manyhands.launch(os.getpid, workers=2, engine={engine!r})\n"
        "except manyhands.SupportError as error: print(error)"
    )
    result = python("-c", code, env=hidden)
    assert result.stdout.count("\n") == 1, result.stdout + result.stderr
    assert install(engine) in result.stdout


def test_missing_envpool_is_one_line(hidden: dict[str, str]) -> None:
    code = (
        "from manyhands.envs import make_vec\n"
        "from manyhands.errors import SupportError\n"
        "try: make_vec('CartPole-v1', 2, backend='envpool')\n"
        "except SupportError as error: print(error)"
    )
    result = python("-c", code, env=hidden)
    assert result.stdout.count("\n") == 1, result.stdout + result.stderr
    assert install("envpool") in result.stdout


def test_doctor_says_what_is_missing(hidden: dict[str, str]) -> None:
    result = manyhands("doctor", "--engine", "mpi", env=hidden)
    assert result.returncode == 0, result.stdout + result.stderr
    assert f"mpi        not installed; type: {install('mpi')}" in result.stdout
    assert "Traceback" not in result.stderr


def test_all_that_needs_no_extra_works_without_extras(
    hidden: dict[str, str], tmp_path: Path
) -> None:
    script = tmp_path / "script.py"
    script.write_text(
        "import manyhands\npar = manyhands.Parallel()\n"
        "par.print(par.sum(1), par.make_vec('CartPole-v1', num_envs=2).num_envs)"
    )
    for engine in ("local", "torch", "inline"):
        result = manyhands("launch", "-n", "2", "--engine", engine, str(script), env=hidden)
        assert result.returncode == 0, result.stderr
        assert result.stdout.strip() == "2 2"

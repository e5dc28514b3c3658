"""Functions travel by name: what can be sent, and clear words for what cannot."""

from __future__ import annotations

import functools
import operator
import os
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from manyhands import ConfigError, WorkerError, launch
from manyhands.cli.main import main
from manyhands.engines import calls


def add(a: int, b: int = 10, *, scale: int = 1) -> int:
    return (a + b) * scale


class Shelf:
    @staticmethod
    def double(x: int) -> int:
        return 2 * x


not_a_function = 7


def test_name_and_back() -> None:
    for function in (add, Shelf.double, operator.add, os.getpid):
        assert calls.find(calls.name_of(function)) is function


def test_pack_and_perform() -> None:
    assert calls.perform(calls.pack(add, (1,), {"scale": 3})) == 33
    part = functools.partial(add, 1, scale=2)
    assert calls.perform(calls.pack(part, (4,), {})) == 10
    got = calls.perform(calls.pack(operator.getitem, ({"k": np.arange(3)}, "k"), {}))
    assert got.tolist() == [0, 1, 2]


def test_lambda_is_refused_with_what_to_do() -> None:
    with pytest.raises(ConfigError, match=r"a lambda cannot be sent.*top level.*inline"):
        launch(lambda: 1, workers=2)


def test_closure_is_refused_by_name() -> None:
    def inner() -> int:
        return 1

    with pytest.raises(ConfigError, match=r"'inner', a closure,.*pass what it closes over"):
        launch(inner, workers=2)


@pytest.mark.parametrize("engine", ["local", "torch", "mpi", "ray"])
@pytest.mark.parametrize("bad", [threading.Lock(), lambda: 1, {1, 2}, {1: 2}, object()],
                         ids=["lock", "lambda", "set", "int key", "object"])  # fmt: skip
def test_argument_that_cannot_travel_is_refused_before_anything_starts(
    engine: str, bad: Any
) -> None:
    with pytest.raises(ConfigError, match=r"an argument of .*test_calls:add cannot be sent"):
        launch(add, bad, workers=2, engine=engine)


def test_too_large_an_argument_says_what_to_do() -> None:
    with pytest.raises(ConfigError, match="write them to a file"):
        launch(add, np.zeros(1_000_000), workers=2)


def test_callable_without_a_name_is_refused() -> None:
    class Callable:
        def __call__(self) -> int:
            return 1

    with pytest.raises(ConfigError, match="no name"):
        launch(Callable(), workers=2)


def test_inline_takes_them_all() -> None:
    """Everything is in this process: nothing has to travel."""
    lock = threading.Lock()
    assert launch(lambda x: x is lock, lock, workers=2, engine="inline") == [True, True]


@pytest.mark.parametrize(
    "name",
    ["no.such.module:f", "operator:no_such", "test_calls:not_a_function", "nothing", "/no/x.py:f"],
)
def test_find_refuses_by_name(name: str) -> None:
    with pytest.raises(ConfigError, match=r"cannot be found|is not a function"):
        calls.find(name)


@pytest.mark.parametrize(
    ("text", "error"),
    [
        ("import no_such_dependency", ModuleNotFoundError),
        ("import os; os.no_such_name", AttributeError),
        ("raise ValueError('at import')", ValueError),
    ],
)
def test_trouble_inside_the_users_module_stays_what_it_is(
    text: str, error: type[Exception], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """His own traceback says more than "cannot be found"; and a second look finds no half."""
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "troubled.py").write_text(text)
    for name in ("troubled:f", f"{tmp_path / 'troubled.py'}:f"):
        for _ in range(2):
            with pytest.raises(error):
                calls.find(name)


def test_a_module_that_ends_the_program_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Whatever asks for it: a script without a main guard would end the command without a word."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "unguarded.py").write_text("import sys\nsys.exit(3)\n")
    words = ["train", "ppo", "--env", "CartPole-v1", "--run-dir", "run"]
    for given in (
        [*words, "--hooks", "unguarded:Hooks"],
        [*words, "--network", "unguarded:build"],
        [*words, "--env", "unguarded:make"],
        ["train", "unguarded:SPEC", "--env", "CartPole-v1"],
    ):
        assert main(given) == 2
        said = capsys.readouterr().err
        assert "unguarded called sys.exit(3) while it was imported" in said
        assert 'if __name__ == "__main__":' in said
    assert not (tmp_path / "run").exists()


def returns_a_lock() -> Any:
    return threading.Lock()


@pytest.mark.parametrize("engine", ["local"])
def test_result_that_cannot_travel_names_the_worker(engine: str) -> None:
    with pytest.raises(WorkerError, match=r"(?s)worker [01] of 2.*lock cannot travel"):
        launch(returns_a_lock, workers=2, engine=engine, timeout=20)


# -- the user's own script -------------------------------------------------------------------------

GUARDED = """
import manyhands

def work(x):
    return x + manyhands.Parallel().rank

if __name__ == "__main__":
    print(manyhands.launch(work, 10, workers=2, timeout=20))
"""
UNGUARDED = GUARDED.replace('if __name__ == "__main__":\n    ', "")


def run(tmp_path: Path, text: str) -> subprocess.CompletedProcess[str]:
    (tmp_path / "script.py").write_text(text)
    return subprocess.run(
        [sys.executable, "script.py"], cwd=tmp_path, capture_output=True, text=True, timeout=200
    )


@pytest.mark.usefixtures("nothing_left")
def test_function_of_the_script_itself(tmp_path: Path) -> None:
    result = run(tmp_path, GUARDED)
    assert result.stdout.strip() == "[10, 11]", result.stderr


@pytest.mark.usefixtures("nothing_left")
def test_script_without_a_main_guard_is_told_so(tmp_path: Path) -> None:
    """The workers import the script and reach launch() again: an error, and no recursion."""
    result = run(tmp_path, UNGUARDED)
    assert result.returncode == 1
    assert 'if __name__ == "__main__":' in result.stderr
    assert result.stderr.count("Put the call under a main guard") <= 2, result.stderr


def test_prompt_is_told_to_use_a_file() -> None:
    code = "import manyhands\ndef f(): pass\nmanyhands.launch(f, workers=2)"
    result = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=200
    )
    assert result.returncode == 1
    assert "ConfigError: f was typed at a prompt" in result.stderr


def test_scripts_of_one_process_are_kept_apart(tmp_path: Path) -> None:
    for name in ("first", "second"):
        (tmp_path / f"{name}.py").write_text(f"def build():\n    return {name!r}\n")
    found = [calls.find(f"{tmp_path / name}.py:build")() for name in ("first", "second", "first")]
    assert found == ["first", "second", "first"]
    name = f"{tmp_path / 'second.py'}:build"
    assert calls.name_of(calls.find(name)) == name

"""Environments that change what belongs to their process, cannot be made or cannot begin again: the
run takes no notice, or says which environment it was."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
from resume_programs import check_same, left_in
from rude_env import ENDS, MANNERS

from manyhands.cli.main import main
from manyhands.engines import supervisor
from manyhands.errors import ConfigError, WorkerError
from manyhands.run import train

pytestmark = [pytest.mark.usefixtures("nothing_left")]

TESTS = str(Path(__file__).parent.parent)


@pytest.fixture(autouse=True)
def programs_can_be_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([TESTS, os.environ.get("PYTHONPATH", "")]))


def run(folder: Path, env: str, **options: Any) -> dict[str, Any]:
    more = {"env": env, "workers": 2, "num_envs": 4, "rollout_length": 16, "hidden": (16,)}
    more |= {"quiet": True, "tensorboard": False, "timeout": 60.0, "checkpoint_seconds": 0.0}
    return train("a2c", run_dir=str(folder), **(more | options)).summary


@pytest.fixture(scope="module")
def left_by_a_polite_one(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("polite") / "run"
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", os.pathsep.join([TESTS, os.environ.get("PYTHONPATH", "")]))
        run(folder, "rude_env:Rude", steps=1280, env_kwargs={"manners": []})
    return left_in(folder)


AT_ONCE = [name for name in MANNERS if name != "starts a thread"]  # which is waited for


@pytest.mark.parametrize(
    "manners",
    [AT_ONCE, *(pytest.param([name], marks=pytest.mark.slow) for name in MANNERS)],
    ids=lambda names: names[0] if len(names) == 1 else "all of them",
)
def test_what_belongs_to_the_process_is_changed(
    manners: list[str], left_by_a_polite_one: dict[str, Any], tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """The same is left as by an environment that does nothing of the kind, to the bit."""
    monkeypatch.chdir(tmp_path)
    kwargs = {"manners": manners}
    ended = run(Path("run"), "rude_env:Rude", steps=1280, env_kwargs=kwargs)
    assert ended["exit"] == "finished"
    check_same(
        *({k: v for k, v in left.items() if k != "config"}
          for left in (left_by_a_polite_one, left_in(tmp_path / "run")))
    )  # fmt: skip


@pytest.mark.parametrize("engine", ["inline", "local"])
def test_making_one_takes_for_ever(
    engine: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In the launcher, which looks at one before anything starts; nothing is left of the run."""
    monkeypatch.setattr(supervisor, "START_SECONDS", 0.5)
    with pytest.raises(ConfigError, match=r"within 0\.5 s.*(.|\n)*in late") as error:
        run(tmp_path / "run", "rude_env:late", steps=64, engine=engine)
    assert "rude_env:late" in str(error.value)
    assert not (tmp_path / "run").exists()


def test_making_one_takes_for_ever_in_a_worker(tmp_path: Path) -> None:
    with pytest.raises(WorkerError, match=r"worker 1 of 2(.|\n)*in late"):
        run(tmp_path / "run", "rude_env:late", steps=64, env_kwargs={"rank": 1}, timeout=3.0)


@pytest.mark.parametrize("count", [1, 3])
def test_it_cannot_begin_again(count: int, tmp_path: Path) -> None:
    with pytest.raises(WorkerError, match=r"RuntimeError: cannot begin again(.|\n)*env \d") as told:
        run(tmp_path / "run", "rude_env:Fails", steps=6400, engine="inline",
            env_kwargs={"count": count})  # fmt: skip
    assert "rude_env.py" in str(told.value)


@pytest.mark.parametrize("how", ["sys.exit(0)", "an odd exception"])
def test_it_ends_in_a_way_that_is_no_exception(how: str, tmp_path: Path) -> None:
    where = r"raised by env \d \(episode 0, step 20, seed \d+\), action"
    with pytest.raises(BaseException, match=where):
        run(tmp_path / "run", "rude_env:Ends", steps=640, workers=1, engine="inline",
            env_kwargs={"how": how, "where": "step"})  # fmt: skip


@pytest.mark.parametrize("how", ["sys.exit(0)", "an odd exception"])
def test_making_one_ends_in_a_way_that_is_no_exception(how: str, tmp_path: Path) -> None:
    """sys.exit(0) there ended the whole command, without a word and as if all were well."""
    kwargs = {"how": how, "where": "making"}
    with pytest.raises(ConfigError, match="rude_env:Ends cannot be made"):
        run(tmp_path / "run", "rude_env:Ends", steps=64, engine="inline", env_kwargs=kwargs)


CLOSED = [
    pytest.param(how, engine, marks=[pytest.mark.slow] if engine == "local" else [])
    for how in ENDS
    for engine in ("inline", "local")
]


@pytest.mark.parametrize(("how", "engine"), CLOSED)
def test_it_cannot_be_closed(how: str, engine: str, tmp_path: Path, capfd: Any) -> None:
    """All else is done: the run has ended well, and says where it was."""
    kwargs = {"how": how, "where": "close"}
    ended = run(tmp_path / "run", "rude_env:Ends", steps=64, num_envs=2, workers=1, engine=engine,
                env_kwargs=kwargs, timeout=2.0)  # fmt: skip
    assert ended["exit"] == "finished"
    said = capfd.readouterr().err
    assert "close() of the environments failed when all else was done" in said
    assert "rude_env.py" in said


def test_a_command_that_an_environment_ends(tmp_path: Path, capsys: Any) -> None:
    """Where no run is there to say it: `manyhands evaluate` of a policy."""
    run(tmp_path / "run", "rude_env:Ends", steps=64, num_envs=2, workers=1, engine="inline",
        env_kwargs={"how": "sys.exit(0)", "where": "nowhere"})  # fmt: skip
    config = tmp_path / "run" / "config.toml"
    config.write_text(config.read_text().replace('"nowhere"', '"step"'))
    assert main(["evaluate", str(tmp_path / "run"), "--episodes", "20"]) == 1
    said = capsys.readouterr().err
    assert "something called sys.exit(0), maybe an environment" in said
    assert "rude_env.py" in said

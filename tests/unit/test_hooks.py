"""Hooks see the run, record, change and stop it; those that only look change nothing."""

from __future__ import annotations

import csv
import json
from contextlib import suppress
from pathlib import Path
from typing import Any

import gymnasium
import hook_programs
import numpy as np
import pytest
from gymnasium.vector import AutoresetMode, SyncVectorEnv

import manyhands as mh
from manyhands.cli.main import main
from manyhands.envs import make_vec
from manyhands.errors import ConfigError, WorkerError

STAGED = "hook_programs:Staged"
SMALL: dict[str, Any] = {
    "env": STAGED, "engine": "inline", "num_envs": 6, "rollout_length": 16, "hidden": (8,),
    "steps": 10_000, "seed": 3, "quiet": True, "tensorboard": False,
}  # fmt: skip
PPO = {"epochs": 1, "minibatch": 0}


def records(run_dir: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]


@pytest.mark.parametrize(
    ("algorithm", "more"),
    [
        ("ppo", {"workers": 2, "strategy": "allreduce", **PPO}),
        ("ppo", {"workers": 3, "strategy": "gather", "overlap": True, **PPO}),
        ("a2c", {"workers": 3, "strategy": "gradient_server"}),
        ("impala", {"workers": 4, "learners": 2, "unrolls": 2}),
        ("dqn", {"workers": 3, "learning_starts": 64, "batch_size": 8}),
    ],
    ids=["allreduce", "overlap", "gradient_server", "actor_learner", "apex"],
)
def test_a_curriculum_reaches_all_workers(
    algorithm: str, more: dict[str, Any], tmp_path: Path
) -> None:
    last = 4 if algorithm == "ppo" else 20  # the others' actors hear of it with the next weights
    hooks = hook_programs.Curriculum(last)
    settings = SMALL | more | {"log_info": ["stage", "success", "sometimes", "never"]}
    result = mh.train(algorithm, hooks=hooks, run_dir=str(tmp_path / "run"), **settings)

    assert hooks.calls[0] == "start"
    assert hooks.calls[-1] == "end"
    assert result.summary["exit"] == "stopped by hooks: the last stage is reached"
    assert result.summary["updates"] in (last, last + 1)  # one that waited is still learned from
    rows = records(result.run_dir)
    assert [row["own/updates"] for row in rows][:4] == [1, 2, 3, 4]
    assert rows[0]["info/stage"] == 0
    assert rows[0]["info/success"] == 0
    assert rows[0]["info/sometimes"] == 1  # of those that had it
    assert "info/never" not in rows[0]
    assert rows[0]["own/length"] == 6
    with open(result.run_dir / "episodes.csv", encoding="utf-8") as file:
        episodes = list(csv.DictReader(file))
    stages = {row["worker"]: float(row["info/stage"]) for row in episodes}
    assert len(stages) == 2  # workers that act
    assert set(stages.values()) == {3.0}, "a worker has not heard of it"
    assert rows[-1]["learning_rate"] == pytest.approx(1e-5)
    with open(result.run_dir / "metrics.csv", encoding="utf-8") as file:
        assert "own/updates" in next(csv.reader(file))


def test_a_resumed_run_goes_on_as_hooks_have_left_it(tmp_path: Path) -> None:
    settings = SMALL | PPO | {"log_info": ["stage"]}
    whole = hook_programs.Curriculum()
    first = mh.train("ppo", hooks=whole, run_dir=str(tmp_path / "run"), **settings)
    again = hook_programs.Curriculum()
    result = mh.resume(first.run_dir, hooks=again, steps=first.summary["env_steps"] + 96)
    assert again.calls == ["start", "update", "end"]
    assert again.seen > whole.seen
    last = records(result.run_dir)[-1]
    assert last["info/stage"] == pytest.approx(3, abs=2)
    assert last["learning_rate"] == 1e-5
    assert result.mean_return is not None
    assert result.mean_return > first.mean_return


@pytest.mark.parametrize(
    ("algorithm", "more"),
    [("ppo", {"workers": 2, **PPO}), ("impala", {"workers": 3}), ("dqn", {"workers": 1})],
)
def test_hooks_that_look_change_nothing(
    algorithm: str, more: dict[str, Any], tmp_path: Path
) -> None:
    settings = SMALL | more | {"steps": 1_200}
    if algorithm == "dqn":
        settings |= {"learning_starts": 64, "batch_size": 8}
    one = mh.train(algorithm, run_dir=str(tmp_path / "one"), **settings)
    two = mh.train(
        algorithm, hooks=hook_programs.Looks, log_info=["stage"], run_dir=str(tmp_path / "two"),
        log_every=3, **settings,
    )  # fmt: skip
    policies = [(r.run_dir / "policy.safetensors").read_bytes() for r in (one, two)]
    assert policies[0] == policies[1]
    luck = [row["luck"] for row in records(two.run_dir)]
    assert len(set(luck)) == len(luck) > 1, "hooks draw from streams that go on"


def test_what_is_wrong_with_hooks_is_said_before_anything_starts(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["train", "ppo", "--env", "CartPole-v1", "--run-dir", str(tmp_path / "run"), "--hooks"]
    assert main([*words, "hook_programs:Mistyped"]) == 2
    said = capsys.readouterr().err
    assert "hooks hook_programs:Mistyped has a method on_step; hooks have on_start, " in said
    assert "its __init__ asks for size" in said
    assert "on_update is called with (run)" in said
    for name, words_of_it in (
        ("hook_programs:Staged", "has none of the methods"),
        ("hook_programs:Nobody", "cannot be found"),
        ("hook_programs:", "type: --hooks package.module:Class"),
        ("hook_programs.Looks", "type: --hooks hook_programs:Looks"),
        ("no_such_module:Hooks", "type before your command: PYTHONPATH=THAT_FOLDER"),
        ("hook_programs:Awaited", "write: def on_update(self, run), without async and yield"),
    ):
        assert main([*words, name]) == 2
        assert words_of_it in capsys.readouterr().err
    assert not (tmp_path / "run").exists()
    with pytest.raises(ConfigError, match="give the class, hooks=Looks, or engine='inline'"):
        mh.train("ppo", env="CartPole-v1", hooks=hook_programs.Looks())


def test_methods_that_need_no_object(tmp_path: Path) -> None:
    result = mh.train(
        "ppo", hooks=hook_programs.Unbound, run_dir=str(tmp_path / "run"), **SMALL, **PPO
    )
    assert records(result.run_dir)[-1]["static"] == 1


def test_none_is_no_hooks(tmp_path: Path) -> None:
    settings = SMALL | {"steps": 192, "run_dir": tmp_path / "run"}
    assert mh.train("ppo", hooks=None, **settings, **PPO).summary["exit"] == "finished"


def test_an_error_in_a_hook_names_it(tmp_path: Path) -> None:
    with pytest.raises(WorkerError) as caught:
        mh.train("ppo", hooks=hook_programs.Fails, run_dir=str(tmp_path / "run"), **SMALL, **PPO)
    assert "no such shelf" in str(caught.value)
    assert "raised by the hook Fails.on_episode" in str(caught.value)
    assert 'raise LookupError("no such shelf")' in str(caught.value), "the user's own traceback"
    summary = json.loads((tmp_path / "run/summary.json").read_text())
    assert "raised by the hook Fails.on_episode" in summary["exit"]


def test_metrics_of_the_run_itself_stay_what_they_are(tmp_path: Path) -> None:
    """Curves are drawn over env_steps, and read from names that algorithms give."""
    refused, told = set(), set()

    class Takes:
        def on_update(self, run: Any) -> None:
            written = records(run.run_dir)[-1] if run.updates > 1 else {}
            told.update(set(written) | set(run.metrics))
            for name in told - {"own/mine"}:
                with suppress(ConfigError):
                    run.record(name, -1)
                    continue
                refused.add(name)
            run.record("own/mine", 1)
            if run.updates == 3:
                run.record("env_steps", 0)

    with pytest.raises(WorkerError, match="such as own/env_steps") as caught:
        mh.train(
            "ppo", hooks=Takes, log_info=["stage"], eval_every=64, eval_episodes=1,
            run_dir=str(tmp_path / "run"), **SMALL, **PPO,
        )  # fmt: skip
    assert "raised by the hook" in str(caught.value)
    assert {"env_steps", "policy_loss", "info/stage", "seconds/rollout", "eval_return"} <= refused
    assert refused == told - {"own/mine"}


def test_an_attribute_nobody_has_names_the_hooks(tmp_path: Path) -> None:
    with pytest.raises(WorkerError) as caught:
        mh.train(
            "ppo", hooks=hook_programs.SetsNothing, run_dir=str(tmp_path / "run"), **SMALL, **PPO
        )
    assert "has no attribute 'stagee'" in str(caught.value)
    assert "asked for by hook_programs:SetsNothing: set_env_attribute('stagee', 1)" in str(
        caught.value
    )


@pytest.mark.parametrize(
    ("name", "value", "words"),
    [
        ("gamma", 0.5, "cannot change while a run goes on; what can: learning_rate"),
        ("clip", "wide", "a number is expected"),
        ("learning_rate", -1.0, "must not be negative"),
        ("learning_rate", "quadratic:3", "learning_rate"),
    ],
)
def test_only_some_options_may_change(name: str, value: Any, words: str, tmp_path: Path) -> None:
    class Changes:
        def on_start(self, run: Any) -> None:
            run.set_option(name, value)

    with pytest.raises(WorkerError, match=words):
        mh.train("ppo", hooks=Changes, run_dir=str(tmp_path / "run"), **SMALL, **PPO)


def test_an_attribute_that_is_not_there_is_an_error() -> None:
    envs = make_vec(hook_programs.Staged, 2, seed=1)
    envs.set_attribute("stage", 4)
    with pytest.raises(ConfigError, match="has no attribute 'stagee'"):
        envs.set_attribute("stagee", 4)
    assert [env.unwrapped.stage for env in envs.envs] == [4, 4]  # type: ignore[attr-defined]


@pytest.mark.parametrize("mode", list(AutoresetMode)[:2])
def test_the_last_info_of_an_episode_in_vector_envs(mode: AutoresetMode) -> None:
    vector = SyncVectorEnv([hook_programs.Staged] * 3, autoreset_mode=mode)
    envs = make_vec(vector, 3, seed=1)
    envs.log_info = ("stage", "sometimes", "never")
    envs.set_attribute("stage", 2)
    with pytest.raises(ConfigError, match="no attribute 'stagee'"):
        envs.set_attribute("stagee", 4)
    envs.reset()
    rows = [envs.step(np.zeros(3, np.int64)) for _ in range(30)]
    ended = [episode.info for row in rows for episode in row.episodes]
    assert len(ended) >= 12
    assert {info[0] for info in ended} == {2.0}
    assert all(np.isnan(info[2]) for info in ended)
    some = np.isnan([info[1] for info in ended])
    assert some.any()
    assert not some.all()
    envs.close()


def test_a_key_that_no_info_has_is_said_at_the_end(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    settings = SMALL | {"quiet": False, "steps": 192}
    mh.train("ppo", log_info=["stage", "stagee"], run_dir=str(tmp_path / "run"), **settings, **PPO)
    said = "no finished episode had stagee in the info of its last step"
    assert said in " ".join(capsys.readouterr().out.split())


def test_an_info_that_is_no_number_is_an_error() -> None:
    counted = gymnasium.wrappers.RecordEpisodeStatistics(hook_programs.Staged())
    envs = make_vec(lambda: counted, 1, seed=1)
    envs.log_info = ("episode",)
    envs.reset()
    for _ in range(5):
        envs.step(np.zeros(1, np.int64))
    with pytest.raises(WorkerError, match="--log-info takes keys whose values are numbers"):
        envs.step(np.zeros(1, np.int64))

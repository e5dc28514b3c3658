"""One door: ids, import paths, callables; seeds from the tree; words that help."""

from __future__ import annotations

import re
import subprocess
import sys
import tempfile
from typing import Any

import gymnasium
import numpy as np
import pytest
from gymnasium.vector import SyncVectorEnv, VectorEnv

from manyhands import seeding
from manyhands.envs import EnvLoop, make_vec, registry, seeded_vector, toys
from manyhands.envs.make import takes_threads
from manyhands.errors import ConfigError, SupportError, install


def test_import_manyhands_stays_light() -> None:
    code = "import manyhands, sys; assert not {'torch', 'gymnasium'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=200)


def test_seeded_vector_is_an_ordinary_vector_env_with_seeds_from_the_tree() -> None:
    envs = seeded_vector("CartPole-v1", num_envs=3, worker=2)
    assert isinstance(envs, VectorEnv)
    assert isinstance(envs.unwrapped, SyncVectorEnv)
    assert envs.metadata["autoreset_mode"].value == "NextStep"
    obs, info = envs.reset(seed=7)
    single = gymnasium.make("CartPole-v1")
    for i in range(3):
        expected, _ = single.reset(seed=seeding.integer(7, "env", 2, i, 0))
        np.testing.assert_array_equal(obs[i], expected)
    assert isinstance(info, dict)
    wrapped = gymnasium.wrappers.vector.RecordEpisodeStatistics(envs)
    wrapped.reset(seed=1)
    assert len(wrapped.step(wrapped.action_space.sample())) == 5
    envs.close()


def test_workers_and_neighbouring_seeds_never_share_an_episode() -> None:
    seen = set()
    for seed in (1, 2):
        for worker in (0, 1):
            envs = seeded_vector("CartPole-v1", num_envs=4, worker=worker)
            seen |= {tuple(row) for row in envs.reset(seed=seed)[0].tolist()}
            envs.close()
    assert len(seen) == 16


def test_a_root_seed_is_used_once_and_action_spaces_are_seeded_too() -> None:
    a = seeded_vector("CartPole-v1", 2, root_seed=5)
    b = seeded_vector("CartPole-v1", 2)
    b.seeds_from(5)
    first = a.reset()[0]
    np.testing.assert_array_equal(first, b.reset()[0])
    np.testing.assert_array_equal(a.action_space.sample(), b.action_space.sample())
    assert not np.array_equal(first, a.reset()[0])  # later resets run on
    np.testing.assert_array_equal(first, a.reset(seed=np.int64(5))[0])
    np.testing.assert_array_equal(a.reset(seed=[3, 4])[0], b.reset(seed=[3, 4])[0])


def test_callables_and_import_paths() -> None:
    for env in (
        toys.TimeLimit,
        "manyhands.envs.toys:TimeLimit",
        lambda limit: toys.TimeLimit(limit),
    ):
        envs = make_vec(env, 2, seed=1, limit=3)
        assert isinstance(envs, EnvLoop)
        assert envs.envs[0] is not envs.envs[1]
        envs.reset()
        lengths = [e.length for _ in range(3) for e in envs.step(np.zeros(2, int)).episodes]
        assert lengths == [3, 3]
        assert seeded_vector(env, 2, limit=3).reset(seed=1)[0].shape == (2, 1)
    assert registry.resolve("manyhands.envs:manyhands/Sleep-v0") == "manyhands/Sleep-v0"


@pytest.mark.parametrize(
    ("env", "words"),
    [
        ("Cartpole-v1", "CartPole-v1"),
        ("CartPole-v9", "CartPole-v1"),
        ("manyhands/Conter-v0", "manyhands/Counter-v0"),
        ("Zzz", "package.module:Class"),
        ("LunarLander-v2", "LunarLander-v3"),
        ("Hopper-v3", "Hopper-v5"),
        ("no_such_module:Env", "no_such_module"),
        ("manyhands.envs.toys:TimeLimt", "TimeLimit"),
        (42, "int"),
    ],
)
def test_wrong_names_get_the_nearest_ones(env: object, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        make_vec(env, 1)
    with pytest.raises(ConfigError, match=words):
        seeded_vector(env, 1)


@pytest.mark.parametrize(
    ("env", "module", "extra"),
    [
        ("ALE/Pong-v5", "ale_py", "atari"),
        ("HalfCheetah-v5", "mujoco", "mujoco"),
        ("LunarLander-v3", "Box2D", "box2d"),
    ],
)
def test_missing_packages_get_the_pip_line(env: str, module: str, extra: str) -> None:
    # In a process of its own: what was imported before would hide that it is missing.
    code = (
        f"import sys; sys.modules[{module!r}] = None\n"
        "from manyhands.envs import make_vec\n"
        f"make_vec({env!r}, 1)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=200)
    assert done.returncode != 0
    last = done.stderr.strip().splitlines()[-1]
    assert "SupportError" in last
    assert install(extra) in last


def test_missing_envpool_gets_the_pip_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "envpool", None)
    with pytest.raises(SupportError, match=re.escape(install("envpool"))):
        make_vec("CartPole-v1", 1, backend="envpool")


def test_other_refusals() -> None:
    with pytest.raises(ConfigError, match="backend='gpu'"):
        make_vec("CartPole-v1", 1, backend="gpu")  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="num_envs=0"):
        make_vec("CartPole-v1", 0)
    with pytest.raises(ConfigError, match="no vector implementation"):
        make_vec("Pendulum-v1", 1, backend="vector")
    with pytest.raises(ConfigError, match="not a gymnasium"):
        make_vec(lambda: 3, 1)
    with pytest.raises(ConfigError, match="has 2 sub-environments"):
        make_vec(gymnasium.make_vec("CartPole-v1", 2), 3)
    envs = make_vec("CartPole-v1", 2)
    with pytest.raises(ConfigError, match="before reset"):
        envs.step(np.zeros(2, int))
    envs.reset()
    with pytest.raises(ConfigError, match="3 actions for 2 envs"):
        envs.step(np.zeros(3, int))


def test_episode_count_goes_on_from_a_checkpoint() -> None:
    envs = make_vec("manyhands/TimeLimit-v0", 2, seed=1, limit=2)
    envs.reset()
    for _ in range(5):
        envs.step(np.zeros(2, int))
    assert envs.episodes_begun == [3, 3]
    later = make_vec("manyhands/TimeLimit-v0", 2, seed=1, limit=2)
    later.continue_from(envs.episodes_begun)
    later.reset()
    later.step(np.zeros(2, int))
    episode = later.step(np.zeros(2, int)).episodes[0]
    assert (episode.number, episode.seed) == (3, seeding.integer(1, "env", 0, 0, 3))


def test_reward_clip_leaves_the_recorded_return_alone() -> None:
    envs = EnvLoop([lambda: toys.Counter(longest=1)], seed=1, reward_clip=1.0)
    envs.reset()
    step = envs.step(np.array([2]))
    assert step.reward[0] == 1.0
    assert step.episodes[0].total_return == 3.0


def test_sleep_and_delayed_toys() -> None:
    envs = make_vec("manyhands/Delayed-v0", 1, length=3)
    envs.reset()
    rows = [envs.step(np.array([1])) for _ in range(3)]
    assert [float(r.reward[0]) for r in rows] == [0, 0, 1]
    assert rows[-1].terminated[0]
    assert envs.step(np.array([0])).episodes[0].total_return == 0
    slow = make_vec("manyhands/Sleep-v0", 2, seconds=0.0, limit=4)
    slow.reset()
    assert sum(len(slow.step(np.zeros(2, int)).episodes) for _ in range(8)) == 4


@pytest.mark.parametrize(
    ("old", "today"),
    [
        ("Pong-ram-v0", "--env ALE/Pong-v5 --env-kwargs obs_type=ram,"),
        ("Pong-ramNoFrameskip-v4", "obs_type=ram sticky_actions=0.0 frame_skip=1, or in Python"),
        ("SpaceInvadersDeterministic-v4", "ALE/SpaceInvaders-v5 --env-kwargs sticky_actions=0.0"),
        ("PongDeterministic-v0", "type: --env ALE/Pong-v5"),
        ("ALE/Pong-ram-v5", "type: --env ALE/Pong-v5 --env-kwargs obs_type=ram,"),
        ("ALE/Pong-v4", "type: --env ALE/Pong-v5"),
        ("Pendulum-v0", "type: --env Pendulum-v1"),
        ("Taxi-v2", "type: --env Taxi-v4"),
        ("Blackjack-v0", "type: --env Blackjack-v1"),  # of cards; ALE's came later
        ("Walker2d-v1", "type: --env Walker2d-v5"),
    ],
)
def test_old_ids_say_what_to_type_today(old: str, today: str) -> None:
    with pytest.raises(ConfigError) as error:
        registry.resolve(old)
    assert f"there is no environment {old!r} any more" in str(error.value)
    assert today in str(error.value)


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ("CartPole", "there is no environment 'CartPole'; type: --env CartPole-v1"),
        ("CartPole-v7", "there is no environment 'CartPole-v7'; type: --env CartPole-v1"),
        ("manyhands/Go9x9", "type: --env manyhands/Go9x9-v0"),
        ("Walker2DBulletEnv-v0", "did you mean Walker2d-v5?"),  # and no version that is gone
    ],
)
def test_of_a_name_the_version_that_works_is_meant(wrong: str, said: str) -> None:
    with pytest.raises(ConfigError) as error:
        registry.resolve(wrong)
    assert said in str(error.value)


def test_what_was_built_on_mujoco_py_says_what_to_type() -> None:
    with pytest.raises(ConfigError, match=r"no longer exists; type: --env Walker2d-v5$"):
        make_vec("Walker2d-v2", 1)


def test_of_mujoco_only_what_matters_is_heard() -> None:
    # In a process of its own: MuJoCo keeps one hearer a process, and its log in the working folder.
    code = (
        "import mujoco, os\n"
        "from manyhands.envs import make_vec\n"
        "envs = make_vec('HalfCheetah-v5', 2)\n"
        "envs.reset()\n"
        "old = '<mujoco><compiler settotalmass=\"1\"/><worldbody/></mujoco>'\n"
        "mujoco.MjModel.from_xml_string(old)\n"
        "cheetah = envs.envs[0].unwrapped\n"
        "cheetah.data.qvel[:] = 1e12\n"
        "mujoco.mj_step(cheetah.model, cheetah.data)\n"
        "assert not os.path.exists('MUJOCO_LOG.TXT')\n"
    )
    with tempfile.TemporaryDirectory() as folder:
        done = subprocess.run(
            [sys.executable, "-c", code], capture_output=True, text=True, timeout=200, cwd=folder
        )
    assert done.returncode == 0, done.stderr
    said = (done.stdout + done.stderr).strip().splitlines()
    assert len(said) == 1, said
    assert "MuJoCo: " in said[0]
    assert "unstable" in said[0]


@pytest.mark.parametrize(
    ("env", "backend", "kwargs", "takes"),
    [
        ("ALE/Pong-v5", "auto", {}, True),
        ("ALE/Pong-v5", "atari", {}, True),
        ("ALE/Pong-v5", "auto", {"obs_type": "ram"}, False),
        ("Pong-v5", "envpool", {}, True),
        ("CartPole-v1", "auto", {}, False),
    ],
)
def test_who_is_stepped_by_threads(env: str, backend: str, kwargs: Any, takes: bool) -> None:
    assert takes_threads(env, backend, kwargs) is takes

"""Films: what ffmpeg says of them, and the words when there is nothing to see."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import pytest
from test_evaluation import counting

import manyhands as mh
from manyhands.cli.main import main
from manyhands.errors import ConfigError, SupportError
from manyhands.viewing import video
from manyhands.viewing.video import Film, film, play, stage_of

TINY = {"steps": 64, "num_envs": 2, "rollout_length": 32, "engine": "inline", "quiet": True}


class Dot(gymnasium.Env[Any, Any]):
    """Ten steps; drawn 5 × 7 pixels, odd on purpose, where it is asked to."""

    metadata: dict[str, Any] = {"render_modes": ["rgb_array"], "render_fps": 10}  # noqa: RUF012

    def __init__(self, render_mode: str | None = None) -> None:
        self.observation_space = gymnasium.spaces.Box(0.0, 10.0, (1,), np.float32)
        self.action_space = gymnasium.spaces.Discrete(2)
        self.render_mode, self.steps = render_mode, 0

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        super().reset(seed=seed)
        self.steps = 0
        return np.zeros(1, np.float32), {}

    def step(self, action: Any) -> Any:
        self.steps += 1
        return np.full(1, self.steps, np.float32), 1.0, False, self.steps == 10, {}

    def render(self) -> Any:
        picture = np.zeros((7, 5, 3), np.uint8)
        picture[:, self.steps % 5] = 255
        return picture


def blind() -> gymnasium.Env[Any, Any]:
    return Dot()


@pytest.fixture(scope="module", autouse=True)
def importable() -> Any:
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(Path(__file__).parent))
        yield


def trained(folder: Path, env: str, **more: Any) -> Path:
    mh.train("ppo", env=env, run_dir=str(folder), minibatch=32, **TINY, **more)
    return folder


@pytest.fixture(scope="module")
def cartpole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return trained(tmp_path_factory.mktemp("video") / "run", "CartPole-v1")


def probe(path: Path) -> str:
    """What ffmpeg says of a file; every frame of it is decoded."""
    import imageio_ffmpeg

    command = [imageio_ffmpeg.get_ffmpeg_exe(), "-hide_banner", "-i", str(path), "-f", "null", "-"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr
    return done.stderr


def frames(said: str) -> int:
    return int(re.findall(r"frame=\s*(\d+)", said)[-1])


def test_mp4_plays_in_browsers(cartpole: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["video", str(cartpole)]) == 0
    out = capsys.readouterr().out
    steps = int(re.search(r"(\d+) steps", out).group(1))  # type: ignore[union-attr]
    path = cartpole / "video.mp4"
    assert f"written to {path}" in out
    said = probe(path)
    assert re.search(r"Video: h264 .*yuv420p.* 600x400.* 50 fps", said), said
    assert frames(said) == steps + 1  # a picture of every state
    assert path.read_bytes().find(b"moov") < path.read_bytes().find(b"mdat")  # plays as it loads


def test_gif(cartpole: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "cart.gif"
    words = ["--gif", "--out", str(out), "--max-length", "12", "--episodes", "2", "--fps", "20"]
    assert main(["video", str(cartpole), *words]) == 0
    assert out.read_bytes()[:6] == b"GIF89a"
    said = probe(out)
    assert frames(said) >= 20
    assert "20 fps" in said
    assert "episode 1: return" in capsys.readouterr().out


def test_odd_sides_become_even(tmp_path: Path) -> None:
    policy = mh.load(trained(tmp_path / "run", "test_video:Dot"))
    (played,) = film(policy, tmp_path / "dot.mp4")
    assert len(played.actions) == 10
    width, height = re.search(r"yuv420p.* (\d+)x(\d+)", probe(tmp_path / "dot.mp4")).groups()  # type: ignore[union-attr]
    assert int(width) % 2 == int(height) % 2 == 0
    assert int(height) >= 320  # a picture of seven pixels is made to be seen


def test_same_seed_same_episode(cartpole: Path) -> None:
    policy = mh.load(cartpole)
    stage = stage_of(policy.experiment, camera=False)  # type: ignore[arg-type]
    first, again, other = (play(policy, stage, seed) for seed in (5, 5, 6))
    stage.close()
    assert np.array_equal(first.observations, again.observations)
    assert not np.array_equal(first.observations[0], other.observations[0])
    assert len(first.observations) == len(first.actions) + 1 == len(first.rewards) + 1


def test_memory_begins_with_the_episode(tmp_path: Path) -> None:
    """An LSTM that counts to five and then acts: in every episode anew."""
    policy = mh.load(counting("test_video:Dot", tmp_path / "run"))
    played = film(policy, tmp_path / "two.gif", episodes=2)
    assert [list(map(int, episode.actions)) for episode in played] == [[0] * 5 + [1] * 5] * 2


def test_environment_without_a_camera_says_so(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = trained(tmp_path / "run", "test_video:blind")
    assert main(["video", str(folder)]) == 2
    err = capsys.readouterr().err
    assert "test_video:blind cannot be filmed" in err
    assert "rgb_array" in err
    assert not list(folder.glob("*video*"))


def test_id_without_rgb_array_says_so(tmp_path: Path) -> None:
    gymnasium.register("NoCamera-v0", entry_point=lambda **_: Mute(), max_episode_steps=10)
    try:
        policy = mh.load(trained(tmp_path / "run", "NoCamera-v0"))
        with pytest.raises(SupportError, match=r"no render mode 'rgb_array' \(it has 'ansi'\)"):
            film(policy, tmp_path / "x.mp4")
    finally:
        del gymnasium.registry["NoCamera-v0"]


class Mute(Dot):
    metadata: dict[str, Any] = {"render_modes": ["ansi"]}  # noqa: RUF012


def test_a_film_that_fails_leaves_nothing(tmp_path: Path) -> None:
    reel = Film(tmp_path / "a.mp4", 10)
    reel.add(np.zeros((16, 16, 3), np.uint8))
    with pytest.raises(SupportError, match="pictures change"), reel:
        reel.add(np.zeros((16, 18, 3), np.uint8))
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("name", ["a.avi", "no/such/folder/a.mp4"])
def test_names_that_cannot_be(tmp_path: Path, name: str) -> None:
    with pytest.raises(ConfigError, match=r"mp4|folder"):
        Film(tmp_path / name, 10)


def test_gif_and_out_must_agree(cartpole: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["video", str(cartpole), "--gif", "--out", "a.mp4"]) == 2
    assert "ends in .gif" in capsys.readouterr().err


def test_headless_respects_what_the_user_has_set(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SDL_VIDEODRIVER", "x11")
    monkeypatch.setenv("MUJOCO_GL", "glfw")
    video.go_headless()
    assert (os.environ["SDL_VIDEODRIVER"], os.environ["MUJOCO_GL"]) == ("x11", "glfw")


def test_mujoco(tmp_path: Path) -> None:
    """In a process of its own: MuJoCo looks once for a way to draw."""
    pytest.importorskip("mujoco")
    folder = trained(tmp_path / "run", "InvertedPendulum-v5")
    command = [sys.executable, "-m", "manyhands.cli.main", "video", str(folder)]
    done = subprocess.run(
        [*command, "--max-length", "3"], capture_output=True, text=True, timeout=100
    )
    if done.returncode == 2 and "cannot be drawn on this machine" in done.stderr:
        assert "MUJOCO_GL=" in done.stderr
        pytest.skip("MuJoCo finds no OpenGL here")
    assert done.returncode == 0, done.stderr
    assert frames(probe(folder / "video.mp4")) >= 2


def test_atari_is_filmed_in_colour_as_it_is_played(tmp_path: Path) -> None:
    """Two games in step: the score of the film is the score of the game that the policy saw."""
    pytest.importorskip("ale_py")
    from manyhands.envs import make_vec

    stage = video.AtariStage("ALE/Pong-v5", {})
    alone = make_vec("ALE/Pong-v5", 1, backend="atari", seed=7)
    seen, reference = stage.reset(7), alone.reset()[0].copy()
    assert np.array_equal(seen, reference)
    for t in range(60):
        seen, reward, over = stage.step(t % 6)
        step = alone.step(np.array([t % 6]))
        assert np.array_equal(seen, step.obs[0])
        assert reward == step.reward[0]
        assert not over
    picture = stage.frame()
    assert picture.shape == (210, 160, 3)
    assert len(np.unique(picture.reshape(-1, 3), axis=0)) > 2
    assert (picture[..., 0] != picture[..., 2]).any()  # colour
    assert stage.fps == 15
    stage.close()
    alone.close()

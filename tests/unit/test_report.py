"""The report: what it says, that a browser shows it at every width, and its pictures."""

from __future__ import annotations

import base64
import html
import json
import re
import shutil
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import pytest
from browser import needs_browser, open_page

import manyhands as mh
from manyhands.cli.main import main
from manyhands.config import build
from manyhands.experiment.folder import RunFolder
from manyhands.viewing import pictures
from manyhands.viewing.curves import LIGHT, pyplot
from manyhands.viewing.report_page import Picture, page, table
from manyhands.viewing.video import Played, play, stage_of

TINY = {"num_envs": 4, "rollout_length": 64, "minibatch": 64, "engine": "inline", "quiet": True}


class Silent(gymnasium.Env[Any, Any]):
    """Two numbers in a dict, and nothing to see."""

    broken = False

    def __init__(self) -> None:
        self.observation_space = gymnasium.spaces.Dict(
            {"a": gymnasium.spaces.Box(-1.0, 1.0, (2,), np.float32)}
        )
        self.action_space = gymnasium.spaces.Discrete(2)
        self.steps = 0

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        super().reset(seed=seed)
        self.steps = 0
        return {"a": np.zeros(2, np.float32)}, {}

    def step(self, action: Any) -> Any:
        if self.broken:
            raise RuntimeError("the arm came off")
        self.steps += 1
        return {"a": np.zeros(2, np.float32)}, 1.0, False, self.steps == 5, {}


@pytest.fixture(scope="module", autouse=True)
def importable() -> Any:
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(Path(__file__).parent))
        yield


def trained(folder: Path, env: str, steps: int = 1024, **more: Any) -> Path:
    mh.train("ppo", env=env, steps=steps, run_dir=str(folder), **TINY, **more)
    return folder


@pytest.fixture(scope="module")
def pendulum(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("report") / "run"
    return trained(folder, "Pendulum-v1", normalize_rewards=True, seed=4)


@pytest.fixture(scope="module")
def report(pendulum: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The page of a run with all that there is, compared with one of two workers."""
    folder = tmp_path_factory.mktemp("report") / "two"
    trained(folder, "Pendulum-v1", workers=2, strategy="gather", normalize_rewards=True, seed=4)
    assert main(["report", str(pendulum), str(folder)]) == 0
    return pendulum / "report.html"


@pytest.fixture(scope="module")
def unfinished(pendulum: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The page of a run that has not ended, and in which a worker has failed."""
    folder = tmp_path_factory.mktemp("report") / "unfinished"
    shutil.copytree(pendulum, folder, ignore=shutil.ignore_patterns("summary.json"))
    with open(folder / "events.jsonl", "a") as file:
        for kind in ("fault", "restart", "restart"):
            file.write(json.dumps({"event": kind, "wall_seconds": 1.0, "worker": 0}) + "\n")
    assert main(["report", str(folder), "--no-video"]) == 0
    return folder / "report.html"


def text_of(path: Path) -> str:
    """What a reader reads, without style and markup."""
    found = re.sub(r"(?s)<style>.*?</style>|<[^>]+>", " ", path.read_text(encoding="utf-8"))
    return " ".join(html.unescape(found).split())


# -- what it says ----------------------------------------------------------------------------------


def test_headline_is_the_summary(report: Path, pendulum: Path) -> None:
    text = text_of(report)
    summary = json.loads((pendulum / "summary.json").read_text())
    assert "PPO on Pendulum-v1" in text
    assert "Finished" in text
    assert f"{summary['env_steps']:,}" in text
    assert f"{summary['mean_return']:,.1f}".replace("-", "−") in text


def test_every_part_is_there(report: Path) -> None:
    text = text_of(report)
    for words in (
        "Learning", "Measures", "Behaviour", "Where the time went", "By number of workers",
        "Workers", "Events", "How to repeat it", "The whole configuration", "normalize_rewards",
        "What it ran on", "gymnasium", "Bottleneck:", "Policy: ", "Value: ",
        "units of the scaled reward", "Film: ",
    ):  # fmt: skip
        assert words in text, words
    assert "No film" not in text
    assert "manyhands train ppo --env Pendulum-v1 --workers 1" in text


def test_times_by_number_of_workers(report: Path, pendulum: Path) -> None:
    """One row a run: rollout, optimisation, synchronisation and logging of one update."""
    markup = report.read_text(encoding="utf-8")
    (times,) = [t for t in re.findall(r"(?s)<table.*?</table>", markup) if "optimisation" in t]
    head = re.findall(r"<th>(.*?)</th>", times)
    assert head[:4] == ["run", "steps/s", "speed-up", "wall"]
    assert head[-5:-1] == ["rollout", "optimisation", "synchronisation", "logging"]
    rows = [re.findall(r"<td>(.*?)</td>", row) for row in re.findall(r"(?s)<tr>(.*?)</tr>", times)]
    one, two = rows[1:]
    assert one[0].startswith("1 worker<small>single, inline, seed 4")
    assert two[0].startswith("2 workers<small>gather, inline, seed 4")
    assert one[2] == "1.00×"
    summary = json.loads((pendulum / "summary.json").read_text())
    seconds = summary["phase_seconds"]["rollout"] / summary["updates"]
    shown = float(re.match(r"([\d.]+) ms", one[head.index("rollout")]).group(1))  # type: ignore[union-attr]
    assert shown == pytest.approx(1000 * seconds, rel=0.01)


def test_all_is_inside_the_file(report: Path) -> None:
    markup = report.read_text(encoding="utf-8")
    links = re.findall(r'(?:src|srcset|href)="([^"]{0,30})', markup)
    assert len(links) > 20
    assert [link for link in links if not link.startswith("data:image/")] == []
    assert "<script" not in markup
    assert "url(" not in markup
    assert report.stat().st_size < 8e6
    assert sorted(p.name for p in report.parent.glob(".*")) == []


def test_names_cannot_break_out(tmp_path: Path) -> None:
    evil = '<script>alert("x")</script>'
    made = [
        page(evil, evil, [table([evil], [[evil, (evil, evil)]])], evil),
        Picture(b"", None, "png", '"><script>', evil).html(),
    ]
    assert all("<script" not in text for text in made)


# -- runs that are not whole -----------------------------------------------------------------------


def test_failed_run(tmp_path: Path) -> None:
    """A run that fell over before its first update: no metrics, no policy."""
    with RunFolder(tmp_path / "run") as folder:
        folder.open(build("ppo", env="CartPole-v1"))
        folder.event("start", workers=1)
        folder.event("fault", error="ValueError: <boom>", worker=0)
        folder.summary({"exit": "failed: ValueError: <boom>"})
    assert main(["report", str(tmp_path / "run")]) == 0
    text = text_of(tmp_path / "run" / "report.html")
    assert "Failed" in text
    assert "failed: ValueError: <boom>" in text
    assert "No pictures of the policy" in text
    assert "No episode has finished" in text
    assert "No update has been recorded" in text


def test_a_signal_keeps_its_name(tmp_path: Path) -> None:
    with RunFolder(tmp_path / "run") as folder:
        folder.open(build("ppo", env="CartPole-v1"))
        folder.summary({"exit": "stopped: SIGINT"})
    assert main(["report", str(tmp_path / "run")]) == 0
    assert "Stopped: SIGINT" in text_of(tmp_path / "run" / "report.html")


def test_run_that_goes_on(unfinished: Path) -> None:
    text = text_of(unfinished)
    assert "Not finished" in text
    assert "the run is still running, or it was killed" in text
    assert "No film was asked for" in text
    assert "Value: " in text  # its policy is there already


def test_no_camera_and_no_plane_are_sentences(tmp_path: Path) -> None:
    folder = trained(tmp_path / "run", "test_report:Silent", steps=256)
    assert main(["report", str(folder)]) == 0
    text = text_of(folder / "report.html")
    assert "No film: test_report:Silent cannot be filmed" in text
    assert "No maps of policy and value: the observation is a Dict" in text
    assert "One episode with the likeliest actions: return 5.00 in 5 steps" in text


def test_an_environment_that_fails_is_a_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import test_report  # the module that the run itself has imported

    folder = trained(tmp_path / "run", "test_report:Silent", steps=256)
    monkeypatch.setattr(test_report.Silent, "broken", True)
    assert main(["report", str(folder)]) == 0
    text = text_of(folder / "report.html")
    assert "No episode could be played: RuntimeError: the arm came off." in text
    assert "How to repeat it" in text


def test_restarts_and_faults_of_a_worker(unfinished: Path) -> None:
    markup = unfinished.read_text(encoding="utf-8")
    (workers,) = [t for t in re.findall(r"(?s)<table.*?</table>", markup) if "restarts</th>" in t]
    assert re.findall(r"<td>(.*?)</td>", workers)[-2:] == ["2", "1"]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["/no/such/folder"], "there is no folder /no/such/folder"),
        (["RUN", "--out", "a.pdf"], "ends in .html"),
        (["RUN", "--out", "/no/such/folder/a.html"], "there is no folder /no/such/folder"),
    ],
)
def test_wrong_use_is_one_line(
    pendulum: Path, words: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["report", *(str(pendulum) if w == "RUN" else w for w in words)]) == 2
    err = capsys.readouterr().err
    assert said in err
    assert err.count("\n") == 1


# -- in a browser ----------------------------------------------------------------------------------

# The page itself is not touched: it sits in a frame of the wanted width, and we look from outside.
LOOK = """<!doctype html><body style="margin:0"><iframe src="{page}" width="{width}" height="900">
</iframe><script>
const frame = document.querySelector("iframe");
frame.onload = () => setTimeout(() => {{
  const inside = frame.contentDocument, root = inside.documentElement;
  const images = [...inside.images];
  const found = {{
    images: images.length,
    broken: images.filter(i => !(i.complete && i.naturalWidth > 0)).map(i => i.alt),
    outside: images.filter(i => i.getBoundingClientRect().width > root.clientWidth).length,
    width: root.scrollWidth, room: frame.contentWindow.innerWidth,
    background: getComputedStyle(inside.body).backgroundColor,
  }};
  document.body.innerHTML = "<pre id=found>" + btoa(JSON.stringify(found)) + "</pre>";
}}, 500);
</script>"""


def look(path: Path, width: int, folder: Path, *, dark: bool = False) -> tuple[Any, list[str]]:
    """(what is seen inside the page, lines of the browser's console)."""
    outer = folder / "look.html"
    outer.write_text(LOOK.format(page=path.as_uri(), width=width))
    more = ["--blink-settings=preferredColorScheme=0"] if dark else []
    page_, console = open_page(
        outer.as_uri(), folder, "--allow-file-access-from-files", *more, width=width + 100
    )
    answer = re.search(r'<pre id="found">([^<]*)</pre>', page_)
    assert answer, f"the page did not load:\n{page_[:2000]}"
    return json.loads(base64.b64decode(answer.group(1))), console


@needs_browser
@pytest.mark.parametrize(("width", "dark"), [(375, False), (1400, False), (1400, True)])
def test_browser_shows_all_of_it(report: Path, tmp_path: Path, width: int, dark: bool) -> None:
    seen, console = look(report, width, tmp_path, dark=dark)
    assert seen["images"] >= 12
    assert seen["broken"] == []
    assert seen["room"] == width
    assert seen["width"] <= seen["room"], "the page scrolls sideways"
    assert seen["outside"] == 0
    assert console == []
    bright = sum(map(int, re.findall(r"\d+", seen["background"])[:3])) > 380
    assert bright is not dark


@needs_browser
def test_browser_test_sees_faults(tmp_path: Path) -> None:
    """The test's own tool: a broken picture, a wide page and an error are seen."""
    bad = tmp_path / "bad.html"
    bad.write_text(
        "<!doctype html><img alt=gone src='data:image/png;base64,AAAA'><div style='width:900px'>x"
        "</div><script>throw new Error('boom')</script>"
    )
    seen, console = look(bad, 375, tmp_path)
    assert seen["broken"] == ["gone"]
    assert seen["width"] > seen["room"]
    assert any("boom" in line for line in console)


# -- pictures --------------------------------------------------------------------------------------


def played_of(run: Path) -> tuple[Any, Played]:
    policy = mh.load(run)
    assert policy.experiment is not None
    stage = stage_of(policy.experiment, camera=False)
    try:
        return policy, play(policy, stage, 1, max_length=100)
    finally:
        stage.close()


def test_a_pendulum_has_its_angle_and_speed(pendulum: Path) -> None:
    policy, played = played_of(pendulum)
    plane = pictures.plane_of(policy, "Pendulum-v1", played)
    assert isinstance(plane, pictures.Plane)
    assert plane.wraps
    assert plane.note == ""
    assert "θ" in plane.names[0]
    assert (plane.x[0], plane.x[-1]) == pytest.approx((-np.pi, np.pi))
    assert plane.y[-1] == pytest.approx(8.0)
    points = np.array([[0.0, 1.0], [np.pi / 2, -2.0], [-3.0, 0.5]])
    seen = plane.observe(points)
    np.testing.assert_allclose(seen[0], [1.0, 0.0, 1.0], atol=1e-6)  # upright: cos θ = 1
    np.testing.assert_allclose(seen[1], [0.0, 1.0, -2.0], atol=1e-6)
    np.testing.assert_allclose(plane.project(seen), points, atol=1e-6)


def test_maps_show_the_policys_own_numbers(pendulum: Path) -> None:
    policy, played = played_of(pendulum)
    plane = pictures.plane_of(policy, "Pendulum-v1", played)
    assert isinstance(plane, pictures.Plane)
    figure = pyplot().figure()
    left, right = figure.subplots(1, 2)
    pictures.draw_policy(left, policy, plane, played, LIGHT)
    pictures.draw_value(right, policy, plane, played, LIGHT)
    row, column = 30, 90  # speed, angle
    theta, speed = plane.x[column], plane.y[row]
    here = np.array([np.cos(theta), np.sin(theta), speed], np.float32)
    action = left.images[0].get_array()[row, column]
    value = right.images[0].get_array()[row, column]
    pyplot().close(figure)
    assert action == pytest.approx(policy.act(here).item(), abs=1e-4)
    assert value == pytest.approx(policy.value(here), rel=1e-4)


def test_cartpole_is_a_cut_and_says_so(tmp_path: Path) -> None:
    policy, played = played_of(trained(tmp_path / "run", "CartPole-v1", steps=256))
    plane = pictures.plane_of(policy, "CartPole-v1", played)
    assert isinstance(plane, pictures.Plane)
    assert "components 2 and 3 of 4" in plane.note
    assert plane.observe(np.array([[0.1, 0.5]])).tolist() == [[0, 0, pytest.approx(0.1), 0.5]]
    played.observations[-1] = np.array([0.0, 0.0, -0.9, 0.1], np.float32)  # farther than the map
    wider = pictures.plane_of(policy, "CartPole-v1", played)
    assert isinstance(wider, pictures.Plane)
    assert wider.x[0] == pytest.approx(-0.945)
    assert wider.x[-1] >= 0.12
    own = pictures.plane_of(policy, "mine:Cart", played)  # nothing known: the two that tell most
    assert isinstance(own, pictures.Plane)
    assert "at their mean over the episode" in own.note
    mean = np.mean(played.observations, axis=0)
    seen = own.observe(np.array([[7.0, 8.0]]))[0]
    moved = np.flatnonzero((seen == 7.0) | (seen == 8.0))
    assert len(moved) == 2
    np.testing.assert_allclose(np.delete(seen, moved), np.delete(mean, moved), atol=1e-5)


def test_mountain_car_has_its_bounds(tmp_path: Path) -> None:
    policy, played = played_of(trained(tmp_path / "run", "MountainCar-v0", steps=256))
    plane = pictures.plane_of(policy, "MountainCar-v0", played)
    assert isinstance(plane, pictures.Plane)
    assert plane.names == ("position", "speed")
    assert plane.note == ""
    assert not plane.wraps
    figure = pyplot().figure()
    assert "action" in pictures.draw_policy(
        figure.subplots(), policy, plane, played, pictures.LIGHT
    )
    labels = [text.get_text() for text in figure.axes[0].get_legend().get_texts()]
    pyplot().close(figure)
    assert set(labels) <= {"push left", "do nothing", "push right"}


def test_swing_up_pendulum_has_maps_over_angle_and_speed(tmp_path: Path) -> None:
    pytest.importorskip("manyhands.envs.pendulum_swing_up")
    env = "manyhands/PendulumSwingUp-v0"
    policy, played = played_of(trained(tmp_path / "run", env, steps=256))
    plane = pictures.plane_of(policy, env, played)
    assert isinstance(plane, pictures.Plane)
    assert plane.wraps
    assert plane.names == ("angle θ from upright (rad)", "angular speed θ̇ (rad/s)")
    assert 1.0 < plane.y[-1] < 30.0  # what is seen, not the bound of 148

"""`manyhands watch`: what is read, who may ask, and what a browser shows."""

from __future__ import annotations

import json
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from http.client import HTTPConnection
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from browser import needs_browser, open_page

from manyhands.cli.main import main
from manyhands.config import build
from manyhands.experiment.folder import RunFolder
from manyhands.viewing import watch as follow
from manyhands.viewing.watch import POINTS, Followed, Series, Tail, Watcher


def record(i: int, slope: float = 1.0) -> dict[str, Any]:
    return {"env_steps": 100 * i, "update": i, "wall_seconds": 0.1 * i, "steps_per_second": 1000.0,
            "episodes": i, "mean_return": slope * i, "entropy": 1.0 / i}  # fmt: skip


def made(path: Path, records: int, slope: float = 1.0, **options: Any) -> Path:
    with RunFolder(path) as folder:
        folder.open(build("ppo", env="CartPole-v1", target_return=475.0, **options))
        folder.event("start", workers=1)
        for i in range(1, records + 1):
            folder.metrics(record(i, slope))
    return path


def append(path: Path, name: str, rows: list[dict[str, Any]]) -> None:
    with open(path / name, "a") as file:
        file.writelines(json.dumps(row) + "\n" for row in rows)


@contextmanager
def served(*folders: Path) -> Iterator[Watcher]:
    watcher = Watcher(folders)
    thread = threading.Thread(target=watcher.serve, kwargs={"browser": False}, daemon=True)
    thread.start()
    try:
        yield watcher
    finally:
        watcher._server.shutdown()
        thread.join(10)


def ask(watcher: Watcher, path: str, method: str = "GET", **headers: str) -> tuple[Any, bytes]:
    connection = HTTPConnection("127.0.0.1", watcher.port, timeout=100)
    try:
        connection.request(method, path, headers=headers)
        answer = connection.getresponse()
        return answer, answer.read()
    finally:
        connection.close()


# -- reading ---------------------------------------------------------------------------------------


def test_a_curve_stays_short_and_keeps_its_mean() -> None:
    series = Series()
    values = np.random.default_rng(0).normal(size=8 * POINTS)
    for i, value in enumerate(values):
        series.add({"env_steps": i, "x": value, "words": "no", "yes": True})
    assert set(series.columns) == {"env_steps", "x"}
    assert POINTS <= series.rows < 2 * POINTS
    assert series.rows * series.stride == len(values)
    assert np.mean(np.array(series.columns["x"], float)) == pytest.approx(values.mean(), abs=1e-4)
    rows = values.reshape(-1, series.stride).mean(axis=1)
    assert np.array(series.columns["x"], float) == pytest.approx(rows, abs=1e-4)


def test_only_what_is_new_is_sent(tmp_path: Path) -> None:
    run = Followed(made(tmp_path / "run", 10))
    first = run.news(-1, 0, 0)
    assert (first["first"], first["rows"], first["event_count"]) == (0, 10, 1)
    assert first["columns"]["mean_return"] == list(range(1, 11))
    append(run.path, "metrics.jsonl", [record(11), record(12) | {"late_one": 5.0}])
    append(run.path, "events.jsonl", [{"event": "fault", "error": "boom"}])
    run._looked = 0.0
    generation = first["generation"]
    then = run.news(generation, 10, 1)
    assert then["events"] == [{"event": "fault", "error": "boom"}]
    assert then["generation"] > generation  # a column more: all rows come again
    assert then["columns"]["late_one"] == [None] * 11 + [5.0]
    append(run.path, "metrics.jsonl", [record(13)])
    run._looked = 0.0
    last = run.news(then["generation"], 12, 2)
    assert last["columns"]["env_steps"] == [1300.0]
    assert last["events"] == []
    assert last["latest"]["update"] == 13


def test_half_a_line_waits_and_a_cut_file_is_read_anew(tmp_path: Path) -> None:
    path = tmp_path / "a"
    tail = Tail(path)
    assert tail.read() == (False, [])
    path.write_bytes(b"one\ntw")
    assert tail.read() == (False, [b"one"])
    path.write_bytes(b"one\ntwo\n")
    assert tail.read() == (False, [b"two"])
    path.write_bytes(b"one\nTWO\nthree\n")  # resumed from the first line, and longer again
    assert tail.read() == (True, [b"one", b"TWO", b"three"])


def test_a_long_file_is_read_in_several_looks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(follow, "_BYTES", 4096)
    run = Followed(made(tmp_path / "run", 100))
    looks = 1
    while run.news(-1, 0, 0)["more"]:
        looks += 1
    assert looks > 2
    assert run.news(-1, 0, 0)["rows"] == 100


def test_states(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = Followed(made(tmp_path / "run", 3))
    assert run.news(-1, 0, 0)["state"] == "running"
    monkeypatch.setattr(follow, "_ALIVE_SECONDS", -1.0)
    assert run.news(-1, 0, 0)["state"] == "silent"
    (run.path / "summary.json").write_text(json.dumps({"exit": "solved"}))
    run._looked = 0.0
    found = run.news(-1, 0, 0)
    assert (found["state"], found["exit"]) == ("ended", "solved")


# -- who may ask -----------------------------------------------------------------------------------


def test_only_its_own_address_with_the_token_is_answered(tmp_path: Path) -> None:
    secret = tmp_path / "secret.txt"
    secret.write_text("nobody may read this")
    with served(made(tmp_path / "run", 3)) as watcher:
        token = watcher.token
        assert watcher.url == f"http://127.0.0.1:{watcher.port}/{token}/"
        for path in ("", "watch.js", "watch.css", "news"):
            answer, _ = ask(watcher, f"/{token}/{path}")
            assert answer.status == 200
            policy = answer.headers["Content-Security-Policy"]
            assert policy.startswith("default-src 'none'; script-src 'self';")
            assert "unsafe" not in policy
            assert answer.headers["X-Content-Type-Options"] == "nosniff"
        own = {"Host": f"localhost:{watcher.port}"}
        assert ask(watcher, f"/{token}/", **own)[0].status == 200
        for path in (
            "/",
            "/x/",
            f"/{token[:-1]}/news",
            f"/{token}x/news",
            "//",
            "/%2e%2e/",
            "/%C3%A9/",
        ):
            assert ask(watcher, path)[0].status == 403, path
        for host in (
            "evil.example",
            f"evil.example:{watcher.port}",
            "127.0.0.1",
            "",
            "127.0.0.1:1",
        ):
            assert ask(watcher, f"/{token}/", Host=host)[0].status == 403, host
        for path in (
            "../secret.txt", "..%2fsecret.txt", "../run/config.toml", "/etc/passwd", "watch.py",
            "page/watch.js", str(secret), "watch.js/../../watch.py", "%00",
        ):  # fmt: skip
            answer, data = ask(watcher, f"/{token}/{path}")
            assert answer.status == 404, path
            assert b"nobody" not in data
        for query in ("at=1", "at=1,2", "at=a,b,c", "at=1,2,3;4,5,6"):
            assert ask(watcher, f"/{token}/news?{query}")[0].status == 400, query
        for method in ("POST", "PUT", "DELETE"):
            assert ask(watcher, f"/{token}/news", method)[0].status == 501


def test_the_command_prints_its_address_and_ends_with_ctrl_c(tmp_path: Path) -> None:
    folder = made(tmp_path / "run", 3)
    before = sorted((p, p.stat().st_mtime_ns) for p in folder.rglob("*"))
    process = subprocess.Popen(
        [sys.executable, "-m", "manyhands", "watch", str(folder), "--no-browser"],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    try:
        assert process.stdout is not None
        address = process.stdout.readline().strip()
        found = re.fullmatch(r"http://127\.0\.0\.1:(\d+)(/[\w-]{32}/)", address)
        assert found, address
        connection = HTTPConnection("127.0.0.1", int(found.group(1)), timeout=100)
        connection.request("GET", f"{found.group(2)}news")
        assert json.loads(connection.getresponse().read())["runs"][0]["rows"] == 3
        with pytest.raises(ConfigErrorLine, match="leave it out for a free one"):
            wrong(["watch", str(folder), "--no-browser", "--port", found.group(1)])
        process.send_signal(signal.SIGINT)  # with a connection that is still open
        _, err = process.communicate(timeout=100)
    finally:
        process.kill()
    assert (process.returncode, err) == (0, "")
    assert sorted((p, p.stat().st_mtime_ns) for p in folder.rglob("*")) == before


class ConfigErrorLine(Exception):
    """What stood on standard error of a command that was used wrongly."""


def wrong(words: list[str]) -> None:
    from contextlib import redirect_stderr
    from io import StringIO

    with redirect_stderr(StringIO()) as err:
        assert main(words) == 2
    raise ConfigErrorLine(err.getvalue())


@pytest.mark.parametrize(
    ("words", "said"),
    [(["/no/such/folder"], "there is no folder"), (["/tmp", "--port", "70000"], "to 65535")],
)
def test_wrong_use_is_one_line(words: list[str], said: str) -> None:
    with pytest.raises(ConfigErrorLine, match=said):
        wrong(["watch", *words])


# -- in a browser ----------------------------------------------------------------------------------


def points(page: str) -> list[int]:
    """Of each run's line in the chart of returns."""
    chart = page.partition('id="return"')[2].partition("</figure>")[0]
    return [int(n) for n in re.findall(r'data-points="(\d+)"', chart)]


def colours(path: Path) -> int:
    from PIL import Image

    image = Image.open(path).convert("RGB")
    return len(image.getcolors(maxcolors=1 << 24) or [])


@needs_browser
def test_the_curve_grows_while_one_looks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = made(tmp_path / "run", 20)
    asked = 0
    news = Watcher.news

    def then_train(self: Watcher, query: str) -> Any:
        """Every request finds five updates more: the browser's clock is not ours."""
        nonlocal asked
        asked += 1
        append(folder, "metrics.jsonl", [record(20 + 5 * asked + i) for i in range(-4, 1)])
        return news(self, query)

    monkeypatch.setattr(Watcher, "news", then_train)
    monkeypatch.setattr(follow, "_LOOK_SECONDS", 0.0)
    append(folder, "events.jsonl", [{"event": "fault", "error": "<b id=evil>boom</b>"}])
    with served(folder) as watcher:
        shot = tmp_path / "page.png"
        page, console = open_page(watcher.url, tmp_path, f"--screenshot={shot}", milliseconds=5500)
    assert console == []
    assert asked >= 4
    polls = int(re.findall(r'data-polls="(\d+)"', page)[0])
    assert points(page) == [20 + 5 * polls]
    for words in ("PPO on CartPole-v1", "target 475", "environment steps", "entropy", "up to date"):
        assert words in page, words
    assert "&lt;b id=evil&gt;boom" in page  # text, not markup
    assert "<b id=" not in page
    assert shot.exists()
    assert colours(shot) > 50


@needs_browser
def test_ten_runs_side_by_side(tmp_path: Path) -> None:
    folders = [made(tmp_path / f"r{i}", 1, slope=1 + i, seed=i) for i in range(10)]
    for i, folder in enumerate(folders):
        append(folder, "metrics.jsonl", [record(n, slope=1 + i) for n in range(2, 3001)])
    with served(*folders) as watcher:
        began = time.process_time()
        size = len(ask(watcher, f"/{watcher.token}/news")[1])
        cold = time.process_time() - began
        began = time.process_time()
        ask(watcher, f"/{watcher.token}/news")
        warm = time.process_time() - began
        shot = tmp_path / "page.png"
        page, console = open_page(watcher.url, tmp_path, f"--screenshot={shot}", milliseconds=4000)
    assert size < 2_000_000
    assert (cold < 20, warm < 2) == (True, True), (cold, warm)
    assert console == []
    found = points(page)
    assert len(found) == 10
    assert all(POINTS <= n <= 2 * POINTS for n in found)
    assert "10 runs side by side" in page
    assert colours(shot) > 100


@needs_browser
@pytest.mark.usefixtures("nothing_left")
def test_a_run_that_goes_on(tmp_path: Path) -> None:
    """Two workers of the local engine: their heartbeats and phases are on the page."""
    folder = tmp_path / "run"
    words = (
        "train ppo --env CartPole-v1 -n 2 --strategy gather --steps 100000000 --hidden 8 --quiet "
        "--num-envs 2 --rollout-length 64 --minibatch 64 --no-tensorboard"
    )
    process = subprocess.Popen(
        [sys.executable, "-m", "manyhands", *words.split(), "--run-dir", str(folder)]
    )
    try:
        wait_for(folder / "live.json", process)
        live = json.loads((folder / "live.json").read_text())
        assert [(w["rank"], w["role"]) for w in live["workers"]] == [(0, "worker"), (1, "worker")]
        with served(folder) as watcher:
            page, console = open_page(watcher.url, tmp_path, milliseconds=3000)
        process.send_signal(signal.SIGINT)
        process.wait(60)
    finally:
        process.kill()
    assert console == []
    text = re.sub(r"<[^>]+>", " ", page)
    assert "2 of 2 workers at work" in text
    assert text.count(" s ago") >= 2
    assert "synchronisation" in text
    assert points(page)[0] > 1
    assert not (folder / "live.json").exists()  # only while it runs
    assert json.loads((folder / "summary.json").read_text())["exit"] == "stopped: SIGINT"


def wait_for(path: Path, process: subprocess.Popen[Any]) -> None:
    """Until the run is under way: both workers have told what they do."""
    deadline = time.monotonic() + 90
    while time.monotonic() < deadline and process.poll() is None:
        if path.exists():
            live = json.loads(path.read_text())
            told = all("synchronisation" in w["phases"] for w in live["workers"])
            if told and live["update"] > 2 and live["mean_return"] is not None:
                return
        time.sleep(0.2)
    raise AssertionError(f"no sign of the run; it ended with {process.poll()}")

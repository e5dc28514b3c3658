"""The commands: exit codes, and one clear line for every wrong use."""

from __future__ import annotations

import json
import os
import pty
import re
import select
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest

from manyhands import __version__, bench, errors
from manyhands.cli.main import COMMANDS, main
from manyhands.engines import ENGINES
from manyhands.support import OK, PARTS, STRATEGIES, on_engine

ROOT = Path(__file__).parents[2]


def run(*args: str, env: dict[str, str] | None = None) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "manyhands.cli.main", *args],
        capture_output=True,
        text=True,
        timeout=100,
        env=os.environ | (env or {}),
    )


@pytest.fixture
def script(tmp_path: Path) -> str:
    path = tmp_path / "script.py"
    path.write_text(
        "import sys, manyhands\npar = manyhands.Parallel()\n"
        "par.print(par.size, sys.argv[1:])\n"
        "par.barrier()  # the first to leave ends the others: let the main worker print before\n"
        "sys.exit(int(sys.argv[1]))"
    )
    return str(path)


def test_help_lists_every_command(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--help"]) == 0
    text = capsys.readouterr().out
    assert all(f"\n  {name} " in text for name in COMMANDS)
    assert main([]) == 2  # nothing asked for: help, and not a success


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--version"]) == 0
    assert capsys.readouterr().out == f"manyhands {__version__}\n"


@pytest.mark.parametrize("command", sorted(COMMANDS))
def test_each_command_teaches_itself(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    try:
        code = main([command, "--help"])
    except SystemExit as leave:  # argparse's way
        code = int(leave.code or 0)
    assert code == 0
    assert f"usage: manyhands {command}" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["lanch"], "did you mean `manyhands launch`?"),
        (["doktor"], "did you mean `manyhands doctor`?"),
        (["xyzzy"], "type: manyhands --help"),
        (["launch", "--engine", "locale", "SCRIPT"], "engine 'locale': engines are inline, local"),
        (["launch", "-n", "0", "SCRIPT"], "at least 1 worker is needed; type: -n 1"),
        (["launch", "-n", "-3", "SCRIPT"], "at least 1 worker is needed"),
        (["launch", "--gpus", "999", "SCRIPT"], "--gpus 999: this machine has"),
        (["launch", "--timeout", "-1", "SCRIPT"], "--timeout -1: seconds, or 0 to wait for ever"),
        (["launch", "-n", "2", "no_such.py"], "script 'no_such.py' does not exist (looked from "),
        (["launch", "-n", "2", "."], "is a folder, not a script"),
        (["train", "impala", "--roles", "actor=2,learner=1"], "--workers N --learners M"),
    ],
    ids=lambda x: " ".join(x) if isinstance(x, list) else "",
)
def test_wrong_use_is_one_line_and_exit_code_2(
    words: list[str], said: str, script: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([script if w == "SCRIPT" else w for w in words]) == 2
    text = capsys.readouterr().err
    assert text.startswith("manyhands: ")
    assert text.count("\n") == 1, text
    assert said in text


def test_not_a_number_is_argparse_s_word(script: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as leave:
        main(["launch", "-n", "two", script])
    assert leave.value.code == 2
    assert "invalid int value: 'two'" in capsys.readouterr().err


@pytest.mark.usefixtures("nothing_left")
@pytest.mark.parametrize("code", [0, 1, 7])
def test_exit_code_of_the_script(script: str, code: int) -> None:
    result = run("launch", "-n", "2", script, str(code), "--flag", "-n")
    assert result.returncode == code, result.stderr
    assert f"2 ['{code}', '--flag', '-n']" in result.stdout
    assert "Traceback" not in result.stderr
    if code:
        assert f"exit code {code}" in result.stderr


@pytest.mark.usefixtures("nothing_left")
def test_syntax_error_in_the_script_is_shown_once(tmp_path: Path) -> None:
    bad = tmp_path / "bad.py"
    bad.write_text("def broken(:\n")
    result = run("launch", "-n", "2", str(bad))
    assert result.returncode == 1
    assert "SyntaxError" in result.stderr
    assert result.stderr.count("def broken(:") == 1, result.stderr


@pytest.mark.usefixtures("nothing_left")
def test_one_worker_runs_like_python(script: str) -> None:
    assert run("launch", "-n", "1", script, "0").stdout.strip() == "1 ['0']"


def test_support_json() -> None:
    result = run("support", "--json")
    table = json.loads(result.stdout)
    assert table["parts"] == PARTS
    assert "torchrun --nproc-per-node N script.py" in table["launchers"]


def test_support_table_gives_a_reason_for_every_gap() -> None:
    text = run("support").stdout
    assert all(part in text for part in PARTS)
    for part, cells in PARTS.items():
        assert set(cells) == set(ENGINES), part
        assert all(cell == OK or cell in text for cell in cells.values())
    gaps = [part for part, cells in PARTS.items() if set(cells.values()) != {OK}]
    assert gaps == ["DistributedDataParallel"]
    assert {on_engine(s, e) for s in STRATEGIES for e in ENGINES} == {OK}


def test_doctor_json_parses_and_tests_engines() -> None:
    result = run("doctor", "--json", "--engine", "local")
    facts = json.loads(result.stdout)
    assert result.returncode == 0
    assert facts["engines"]["local"]["state"] == "works"
    assert facts["machine"]["cores"] == str(os.cpu_count())
    assert facts["packages"]["torch"]


def test_doctor_in_words() -> None:
    result = run("doctor", "--engine", "inline")
    assert "inline     works: two workers met" in result.stdout
    assert result.stdout.strip().endswith("all engines that are installed work")


def test_bench_lists_its_benchmarks_with_a_line_each(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "--help"]) == 0
    text = capsys.readouterr().out
    for name in bench.names():
        assert len(bench.summary(name)) > 20
        assert bench.summary(name) in text
    assert "collectives" in bench.names()
    assert main(["bench"]) == 2  # nothing asked for


def test_unknown_benchmark_gives_the_nearest(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "colectives"]) == 2
    assert "did you mean `manyhands bench collectives`?" in capsys.readouterr().err
    assert main(["bench", "xyzzy"]) == 2
    assert "manyhands bench --help" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--engines", "locale"], "--engines 'locale': engines are inline"),
        (["--rounds", "0"], "--rounds 0: at least 1"),
        (["--json", "/no/such/folder/x.json"], "there is no folder /no/such/folder"),
    ],
)
def test_wrong_options_of_a_benchmark(
    words: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["bench", "collectives", *words]) == 2
    assert said in capsys.readouterr().err


@pytest.mark.usefixtures("nothing_left")
def test_lines_of_workers_are_whole_also_unbuffered(tmp_path: Path) -> None:
    path = tmp_path / "script.py"
    path.write_text(
        "from manyhands import Parallel\npar = Parallel()\npar.barrier()\n"
        "for i in range(300):\n    print('line', i)\npar.barrier()"
    )
    result = run("launch", "-n", "2", str(path), env={"PYTHONUNBUFFERED": "1"})
    expected = [f"line {i}" for i in range(300)]
    lines = result.stdout.splitlines()
    assert [line for line in lines if line.startswith("line")] == expected, result.stdout
    assert [line for line in lines if line.startswith("[")] == [f"[worker 1] {x}" for x in expected]
    assert len(lines) == 600


@pytest.mark.usefixtures("nothing_left")
def test_bench_collectives_writes_what_it_prints(tmp_path: Path) -> None:
    path = tmp_path / "collectives.json"
    words = ["--engines", "local,inline", "--rounds", "1", "--json", str(path)]
    result = run("bench", "collectives", *words)
    assert result.returncode == 0, result.stderr
    facts = json.loads(path.read_text())
    assert list(facts["engines"]) == ["local", "inline"]
    assert facts["engines"]["local"]["gloo_mean_us"] > 0
    assert all(facts["machine"][name] for name in ("cores", "cpu", "python", "torch", "numpy"))
    assert len(facts["claims"]) == 2
    for claim in facts["claims"]:
        verdict = "HOLDS" if claim["holds"] else "FAILS"
        assert f"{verdict}  {claim['claim']}" in result.stdout


def test_reader_that_goes_away_is_no_error(tmp_path: Path) -> None:
    command = f"{sys.executable} -m manyhands.cli.main --help | head -n 1"
    result = subprocess.run(command, shell=True, capture_output=True, text=True, timeout=200)
    assert "Traceback" not in result.stderr


def test_a_shell_whose_folder_was_removed(tmp_path: Path) -> None:
    gone = tmp_path / "gone"
    gone.mkdir()
    script = f"cd {gone} && rmdir {gone} && exec {sys.executable} -m manyhands.cli.main support"
    ended = subprocess.run(["sh", "-c", script], capture_output=True, text=True, timeout=100)
    assert ended.returncode == 0, ended.stderr


def test_examples_are_listed_and_each_can_be_copied(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["examples"]) == 0
    listed = capsys.readouterr().out
    assert "\nown_loop/before.py " in listed
    assert re.search(r"(?m)^own_env.py +An environment of your own: write it", listed)
    assert re.search(r"(?m)^notebooks/first_run.ipynb +A first run$", listed)
    assert main(["examples", "own_env.py"]) == 0
    assert capsys.readouterr().out == (ROOT / "examples" / "own_env.py").read_text()
    assert main(["examples", "own_evn.py"]) == 2
    assert "did you mean own_env.py" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("line", "completed"),
    [
        ("re", "resume report recipes"),
        ("train ppo --learning-r", "--learning-rate"),
        ("train --recipe ppo-p", "ppo-pendulum ppo-pong"),
        ("launch --engine in", "inline"),
        ("evaluate --js", "--json"),
        ("plot runs/", ""),  # the shell's own: files
    ],
)
def test_bash_completes(line: str, completed: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["completion", "bash"]) == 0
    words = ["manyhands", *line.split()]
    ask = (
        f"COMP_WORDS=({' '.join(words)}); COMP_CWORD={len(words) - 1}\n_manyhands\n"
        'echo "${COMPREPLY[@]}"'
    )
    script = f"{capsys.readouterr().out}\n{ask}"
    done = subprocess.run(["bash", "-c", script], capture_output=True, text=True, timeout=200)
    assert (done.stdout.strip(), done.stderr) == (completed, "")


@pytest.mark.parametrize("algorithm", ["dqn", "ddpg", "sac", "td3"])
def test_an_option_of_other_algorithms(algorithm: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train", algorithm, "--env", "CartPole-v1", "--lstm", "8"]) == 2
    said = capsys.readouterr().err
    assert f"{algorithm} has no --lstm: it is an option of a2c, ppo, trpo and impala" in said


def test_zsh_completes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """With the Tab key, in a terminal; Ctrl-T shows what the line has become."""
    zsh = shutil.which("zsh") or pytest.skip("zsh is not here: apt-get install zsh")
    assert main(["completion", "zsh"]) == 0
    (tmp_path / ".zshrc").write_text(
        f"autoload -U compinit && compinit -u -D\n{capsys.readouterr().out}\n"
        "show() { print -r \"<$BUFFER>\" }; zle -N show; bindkey '^T' show; print now\n"
    )
    (tmp_path / "README.md").touch()
    completed = {
        "res": "resume ",
        "train ppo --learning-r": "train ppo --learning-rate ",
        "train --recipe ppo-pe": "train --recipe ppo-pendulum ",
        "launch --engine in": "launch --engine inline ",
        "plot READ": "plot README.md ",  # the shell's own: files
    }
    ours, theirs = pty.openpty()
    env = os.environ | {"ZDOTDIR": str(tmp_path), "TERM": "dumb"}
    shell = subprocess.Popen(
        [zsh, "-i"], stdin=theirs, stdout=theirs, stderr=theirs, cwd=tmp_path, env=env,
        start_new_session=True,
    )  # fmt: skip
    os.close(theirs)
    try:
        _read_until(ours, "now")
        for line, whole in completed.items():
            os.write(ours, f"manyhands {line}\t\x14".encode())
            said = _read_until(ours, ">")
            assert f"<manyhands {whole}>" in said
            os.write(ours, b"\x15")  # forget the line
    finally:
        os.close(ours)  # the terminal is gone, and so is its shell
        shell.wait(60)


def _read_until(terminal: int, mark: str) -> str:
    said, end = "", time.monotonic() + 60
    while mark not in said:
        assert select.select([terminal], [], [], max(0.0, end - time.monotonic()))[0], repr(said)
        said += os.read(terminal, 4096).decode(errors="replace")
    return said


# -- what is missing -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("origin", "command"),
    [
        ("", "pip install 'manyhands[mpi]'"),  # from an index
        ('{"url": "file:///a/copy", "dir_info": {}}', "'manyhands[mpi] @ file:///a/copy'"),
        (
            '{"url": "https://a.host/m", "vcs_info": {"vcs": "git", "commit_id": "1"}}',
            "'manyhands[mpi] @ git+https://a.host/m'",
        ),
    ],
)
def test_extras_come_from_where_the_package_came(
    origin: str, command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    info = tmp_path / "manyhands-9.9.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: manyhands\nVersion: 9.9\n")
    if origin:
        (info / "direct_url.json").write_text(origin)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(errors, "__file__", str(tmp_path / "manyhands" / "errors.py"))
    assert command in errors.install("mpi")


def test_extras_of_a_copy_are_installed_into_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(ROOT)
    assert errors.install("mpi") == "pip install -e '.[mpi]'"
    monkeypatch.chdir(tmp_path)
    assert errors.install("mpi") == f"pip install -e '{ROOT}[mpi]'"

"""`manyhands/Go9x9-v0`: its rules against positions made by hand, a slow version, and GNU Go."""

from __future__ import annotations

import os
import shutil
import time
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import pytest
from resume_programs import check_same

from manyhands.envs import check_env, make_vec
from manyhands.envs.go import (
    ACTION,
    BIT,
    BLACK,
    COLORS,
    MAX_MOVES,
    PASS,
    WHITE,
    Board,
    Go9x9,
    each,
    random_move,
)
from manyhands.envs.gtp import GtpEngine, to_action, to_vertex
from manyhands.errors import ConfigError, SupportError, WorkerError
from manyhands.experiment.checkpoint import pack, unpack

ID = "manyhands/Go9x9-v0"
GNUGO = "gnugo --mode gtp --level 1 --chinese-rules --positional-superko"
Point = tuple[int, int]


# -- the rules once more, slowly -------------------------------------------------------------------


class Slow:
    """Points in a dict, groups by looking, every position so far in a list."""

    def __init__(self) -> None:
        self.at: dict[Point, int] = {}
        self.seen: list[dict[Point, int]] = [{}]

    def around(self, point: Point) -> list[Point]:
        near = [(point[0] + dr, point[1] + dc) for dr, dc in ((0, 1), (1, 0), (0, -1), (-1, 0))]
        return [(r, c) for r, c in near if 0 <= r < 9 and 0 <= c < 9]

    def group(self, at: dict[Point, int], point: Point) -> tuple[set[Point], set[Point]]:
        """The points of that colour, or emptiness, that are joined to it; and what is around."""
        inside, border, open_ = {point}, set(), [point]
        while open_:
            for near in self.around(open_.pop()):
                if at.get(near) != at.get(point):
                    border.add(near)
                elif near not in inside:
                    inside.add(near)
                    open_.append(near)
        return inside, border

    def after(self, point: Point, color: int) -> dict[Point, int] | None:
        """The position after a move; None where it is forbidden."""
        if point in self.at:
            return None
        at = {**self.at, point: color}
        for near in self.around(point):
            if at.get(near) == 1 - color:
                inside, border = self.group(at, near)
                if all(b in at for b in border):
                    at = {p: c for p, c in at.items() if p not in inside}
        if all(b in at for b in self.group(at, point)[1]) or at in self.seen:
            return None
        return at

    def play(self, action: int, color: int) -> None:
        if action != PASS:
            at = self.after(divmod(action, 9), color)
            assert at is not None
            self.at = at
            self.seen.append(at)

    def legal(self, color: int) -> set[int]:
        return {a for a in range(PASS) if self.after(divmod(a, 9), color) is not None}

    def area(self) -> int:
        total = 0
        for action in range(PASS):
            point = divmod(action, 9)
            owners = {self.at[point]} if point in self.at else {
                self.at[b] for b in self.group(self.at, point)[1]}  # fmt: skip
            total += {(BLACK,): 1, (WHITE,): -1}.get(tuple(owners), 0)
        return total


def legal(board: Board) -> set[int]:
    return {ACTION[bit] for bit in each(board.legal())}


def position(text: str, turn: int = BLACK) -> Board:
    """From a picture of the upper left corner; the rest is empty."""
    board, slow = Board(), Slow()
    for row, line in enumerate(text.split("\n")):
        for column, sign in enumerate(line.split()):
            if sign in "XO":
                slow.at[row, column] = "XO".index(sign)
                board.stones["XO".index(sign)] |= BIT[9 * row + column]
    left = set(slow.at)
    while left:
        point = left.pop()
        inside, border = slow.group(slow.at, point)
        left -= inside
        parts = (inside, border - slow.at.keys())
        stones, liberties = (sum(BIT[9 * r + c] for r, c in part) for part in parts)
        assert liberties, "a picture with a group that has no liberty"
        board.groups[slow.at[point]].append((stones, liberties))
    board._seen.add(board.stones[BLACK] | board.stones[WHITE] << 90)
    board._counts.add((board.stones[BLACK].bit_count(), board.stones[WHITE].bit_count()))
    board.turn = turn
    return board


def test_random_games_by_the_slow_rules() -> None:
    for seed in range(3):
        board, slow, rng = Board(), Slow(), np.random.default_rng(seed)
        while not board.over:
            assert legal(board) == slow.legal(board.turn)
            # Not `random_move`: who fills eyes is captured, and plays there again.
            action = int(rng.choice([*legal(board), PASS])) if rng.random() < 0.97 else PASS
            slow.play(action, board.turn)
            board.play(action)
            assert board.area() == slow.area()
            if len(board.moves) > 150:
                break


# -- positions made by hand ------------------------------------------------------------------------


def test_the_last_liberty_captures() -> None:
    board = position(". X\nX O X")
    board.play(9 * 2 + 1)
    assert str(board).splitlines()[:3] == [
        "9 . X . . . . . . .", "8 X . X . . . . . .", "7 . X . . . . . . ."]  # fmt: skip
    both = position("O . O X\nX O X\n. X")
    both.play(1)  # three groups at once
    assert [both.stones[c].bit_count() for c in (BLACK, WHITE)] == [5, 0]
    assert both.area() == 81


@pytest.mark.parametrize(
    ("picture", "turn", "point", "possible"),
    [
        ("O O X\n. O X\nX X", BLACK, 9, True),  # it has no liberty of its own, but takes three
        (". X\nX", WHITE, 0, False),  # alone in the corner
        ("O . X\nX X", WHITE, 1, False),  # two stones without a liberty
        ("O . X\n. X", WHITE, 1, True),  # the group keeps one
    ],
)
def test_suicide(picture: str, turn: int, point: int, possible: bool) -> None:
    board = position(picture, turn)
    assert board.is_legal(point) is possible
    if not possible:
        with pytest.raises(ConfigError, match=f"white cannot play {to_vertex(point)}"):
            board.play(point)


def test_ko() -> None:
    board = position(". X O\nX O . O\n. X O")
    board.play(9 + 2)  # takes (1, 1)
    assert not board.is_legal(9 + 1)  # White may not take back at once
    board.play(80)
    board.play(79)
    assert board.is_legal(9 + 1)  # another position by now


def test_positional_superko_is_more_than_ko() -> None:
    """Send two, return one: simple ko allows the third move, which repeats the position."""
    board = position(". X . X\nO O X\n")
    board.play(0)
    board.play(2)  # takes both
    assert board.stones[BLACK].bit_count() == 2
    assert not board.is_legal(1)
    assert board.is_legal(0)
    board.play(80)
    board.play(70)
    assert board.is_legal(1)


def test_a_position_may_not_come_back_without_a_capture_either() -> None:
    board, earlier = position("X O"), position("X O X")
    assert board.is_legal(2)
    board._seen |= earlier._seen
    board._counts |= earlier._counts
    board._legal = None
    assert not board.is_legal(2)
    assert board.is_legal(3)


@pytest.mark.parametrize(
    ("picture", "area"),
    [
        ("", 0),
        ("X", 81),
        ("X . O", 0),  # all that is empty reaches both
        (". X O\nX X O\nO O O", 4 - 77),  # an eye each
        ("\n".join(["X X X X . O O O O"] * 9), 0),  # a line of dame
        ("\n".join(["X . X X X O O . O"] * 9), 45 - 36),
    ],
)
def test_area(picture: str, area: int) -> None:
    assert position(picture).area() == area


def test_eyes_are_not_filled() -> None:
    eye = position(". X .\nX X O\nO O O")
    assert eye.is_legal(0)
    assert not BIT[0] & eye.sensible()
    false = position(". X .\nX O\nO")
    assert BIT[0] & false.sensible()  # its corner is the other's
    middle = ". . . .\n. O X .\n. X . X\n. . X ."
    assert not BIT[2 * 9 + 2] & position(middle).sensible()  # one corner of four is the other's
    two = middle.replace("O X .", "O X O", 1)
    assert BIT[2 * 9 + 2] & position(two).sensible()


def test_two_passes_end_the_game() -> None:
    board = Board()
    board.play(PASS)
    board.play(40)
    board.play(PASS)
    assert not board.over
    board.play(PASS)
    assert board.over
    with pytest.raises(ConfigError, match="the game is over"):
        board.play(0)


# -- GNU Go ----------------------------------------------------------------------------------------


def needs_gnugo() -> None:
    if not shutil.which("gnugo") and not os.path.exists("/usr/games/gnugo"):
        pytest.skip("GNU Go is not here: apt-get install gnugo")


@pytest.mark.parametrize("games", [3, pytest.param(200, marks=pytest.mark.slow)])
def test_legality_and_score_are_those_of_gnu_go(games: int) -> None:
    needs_gnugo()
    engine, rng, forbidden = GtpEngine(GNUGO), np.random.default_rng(1), 0
    for _ in range(games):
        board = Board()
        engine.begin(9, 7.5, 1)
        while not board.over:
            color = COLORS[board.turn]
            theirs = engine.ask(f"all_legal {color}").split()
            assert legal(board) == {to_action(name) for name in theirs}, f"\n{board}"
            repeats, board._seen, board._legal = board._seen, set(), None
            forbidden += bool(legal(board) - {to_action(name) for name in theirs})
            board._seen, board._legal = repeats, None
            action = random_move(board, rng)
            board.play(action)
            engine.play(color, action)
        ours = board.area() - 7.5
        assert engine.ask("final_score") == f"{'B' if ours > 0 else 'W'}+{abs(ours):.1f}"
    engine.close()
    assert forbidden >= games / 10  # positions in which a ko forbade something


def test_a_game_against_gnu_go_and_its_end() -> None:
    needs_gnugo()
    env = gymnasium.make(ID, opponent="gnugo", color="white").unwrapped
    env.reset(seed=1)
    pid, over, reward = env._engine._process.pid, False, 0.0
    while not over:
        _, reward, over, _, _ = env.step(PASS)
    assert reward == -1.0  # it passes too, with the whole board
    env.reset(seed=2)
    kept = env.get_state()
    assert env._engine._process.pid == pid  # one engine for all games
    env.set_state(kept)
    stones = env._engine.ask("list_stones black").split()
    assert [to_action(name) for name in stones] == kept["moves"]
    env.close()
    assert not Path(f"/proc/{pid}").exists()


# -- engines that misbehave ------------------------------------------------------------------------


def engine_that(tmp_path: Path, answer: str) -> str:
    """A GTP engine in shell; `answer` is what it does when it is asked for a move."""
    script = tmp_path / "engine"
    script.write_text(
        "#!/bin/sh\nwhile read -r word rest; do case $word in\n"
        f"genmove) {answer};;\nquit) printf '= \\n\\n'; exit;;\n"
        "known_command) printf '= false\\n\\n';;\n*) printf '= \\n\\n';; esac; done\n"
    )
    script.chmod(0o755)
    return str(script)


@pytest.mark.usefixtures("nothing_left")
@pytest.mark.parametrize(
    ("answer", "said"),
    [
        ("echo no memory left >&2; exit 3", r"has ended \(exit code 3\).*genmove.*no memory left"),
        ("printf '? no idea\\n\\n'", "refused 'genmove black': no idea"),
        ("sleep 30 </dev/null >/dev/null & wait", "did not answer 'genmove black' within 0.5 s"),
        ("printf '= Z99\\n\\n'", "answered genmove with 'Z99' is no point"),
    ],
)
def test_engines_that_fail_are_named(answer: str, said: str, tmp_path: Path) -> None:
    began = time.monotonic()
    env = Go9x9(opponent=engine_that(tmp_path, answer), color="white", timeout=0.5)
    with pytest.raises(WorkerError, match=f"(?s)the Go engine '.*engine'.*{said}"):
        env.reset(seed=1)
    pid = env._engine._process.pid
    env.close()
    assert not Path(f"/proc/{pid}").exists()
    assert time.monotonic() - began < 20


def test_an_engine_that_breaks_the_rules_and_one_that_resigns(tmp_path: Path) -> None:
    env = Go9x9(opponent=engine_that(tmp_path, "printf '= A9\\n\\n'"), color="black")
    env.reset(seed=1)
    with pytest.raises(WorkerError, match="played A9 as white, which the rules forbid"):
        env.step(0)
    env.close()
    env = Go9x9(opponent=engine_that(tmp_path, "printf '= resign\\n\\n'"), color="black")
    env.reset(seed=1)
    _, reward, over, _, info = env.step(0)
    assert (reward, over, info["is_success"]) == (1.0, True, True)
    env.close()


def test_an_engine_that_is_not_here() -> None:
    with pytest.raises(SupportError, match="'no-such-engine' is not here; install it, or give"):
        Go9x9(opponent="no-such-engine --mode gtp")
    with pytest.raises(ConfigError, match="'random', 'gnugo' or the command line"):
        Go9x9(opponent="")


def test_gnu_go_that_is_not_here(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "")
    monkeypatch.setattr("manyhands.envs.gtp._GAMES", "/nowhere")
    with pytest.raises(SupportError, match="type: apt-get install gnugo"):
        Go9x9(opponent="gnugo")


def test_names_of_points() -> None:
    assert [to_vertex(a) for a in (0, 8, 9, 80, PASS)] == ["A9", "J9", "A8", "J1", "pass"]
    assert [to_action(to_vertex(a)) for a in range(82)] == list(range(82))
    for wrong in ("I5", "A10", "A0", "", "K1"):
        with pytest.raises(ConfigError, match="no point of a board"):
            to_action(wrong)


# -- the environment -------------------------------------------------------------------------------


def played(env: Any, seed: int) -> tuple[list[Any], float]:
    obs, _ = env.reset(seed=seed)
    rng, seen, over, reward = np.random.default_rng(seed), [obs], False, 0.0
    while not over:
        action = rng.choice(np.flatnonzero(obs["action_mask"]))
        obs, reward, over, _, _ = env.step(action)
        seen.append(obs)
    return seen, reward


def test_it_is_a_gymnasium_environment() -> None:
    check_env(ID)
    env = gymnasium.make(ID).unwrapped
    seen, reward = played(env, 3)
    check_same(played(env, 3)[0], seen)
    assert reward == np.sign(env.score())
    assert (env.board.area() - 7.5 > 0) == ((reward > 0) == (env.agent == BLACK))
    with pytest.raises(RuntimeError, match="the game is over"):
        env.step(PASS)


def test_what_the_agent_sees() -> None:
    env = Go9x9(color="white")
    obs, _ = env.reset(seed=1)
    mine, other, free, passed, black = obs["observation"]
    first = env.board.moves[0]
    assert mine.sum() == 0
    assert np.flatnonzero(other).tolist() == [first]
    assert free.ravel().tolist() == obs["action_mask"][:81].tolist()
    assert (obs["action_mask"][first], obs["action_mask"].sum()) == (0, 81)
    assert passed.max() == black.max() == 0
    env.board.passes = 1
    assert env._observation()["observation"][3].min() == 1
    env = Go9x9(color="black", render_mode="rgb_array")
    obs, _ = env.reset(seed=1)
    assert obs["observation"][4].min() == 1
    obs, *_ = env.step(40)
    assert obs["observation"][0, 4, 4] == 1
    assert env.render().shape == (288, 288, 3)
    assert len(np.unique(env.render().reshape(-1, 3), axis=0)) == 4
    with pytest.raises(ConfigError, match=r"black cannot play E5 \(action 40\)"):
        env.step(40)


def test_both_colors_are_drawn_and_games_end() -> None:
    env = Go9x9(max_moves=7)
    colors = set()
    for seed in range(12):
        _, reward = played(env, seed)
        assert len(env.board.moves) in (7, 8) or env.board.over
        assert reward in (-1.0, 1.0)
        colors.add(env.agent)
    assert colors == {BLACK, WHITE}
    assert MAX_MOVES == 324


def test_wrong_options() -> None:
    for wrong in ({"color": "red"}, {"max_moves": 0}, {"render_mode": "human"}):
        with pytest.raises(ConfigError, match=next(iter(wrong))):
            Go9x9(**wrong)


def test_games_go_on_after_a_resume() -> None:
    envs, again = (make_vec(ID, 3, seed=4) for _ in range(2))

    def play(env: Any, obs: Any, steps: int) -> list[Any]:
        rng, seen = np.random.default_rng(steps), []
        for _ in range(steps):
            choices = [rng.choice(np.flatnonzero(mask)) for mask in obs["action_mask"]]
            step = env.step(np.array(choices))
            obs = {name: part.copy() for name, part in step.obs.items()}
            seen.append([obs, step.reward.copy(), step.terminated.copy()])
        return seen

    obs = play(envs, envs.reset(), 30)[-1][0]
    restored = again.load_state(unpack(*pack(envs.state(obs))))
    assert restored.restarted == []
    check_same(restored.obs, obs)
    check_same(play(again, obs, 90), play(envs, obs, 90))

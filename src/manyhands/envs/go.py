"""`manyhands/Go9x9-v0`: Go on nine lines, against random play or any engine that speaks GTP.

    rules     no suicide; positional superko: no move may bring back a position that was there
              before, whoever had made it; passing is always allowed, and two passes end the game
    score     by area (Chinese): stones, and empty points that reach stones of one colour only.
              What stands on the board is alive; White gets `komi`, 7.5 points unless said otherwise
    actions   9 * row + column of the point, row 0 on top, column 0 left; 81 passes
    observed  "observation" [5, 9, 9], seen by the agent: its stones; the other's stones; points
              where it may play; all ones if the other has just passed; all ones if it is Black.
              "action_mask" [82]: what is possible
    reward    1 for a game won, -1 for one lost, 0 in between (and for a draw: whole komi only)

The board is two whole numbers, ten bits a row: nine points and one that is never set, so that a
shift by one does not run into the next row. A group is a pair (its stones, its liberties). All
moves that are possible are then found at once:

    a point may be played if it is empty and  has an empty neighbour,
                                          or  is a liberty of an own group that has another one,
                                          or  is the last liberty of a group of the other's,

less those that would repeat a position. That takes a few microseconds, without numpy or numba.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, ClassVar, Literal

import gymnasium
import numpy as np
from gymnasium import spaces

from manyhands.envs.gtp import GtpEngine, to_vertex
from manyhands.errors import ConfigError, WorkerError

SIZE = 9
POINTS = SIZE * SIZE
PASS = POINTS
KOMI = 7.5
MAX_MOVES = 4 * POINTS
BLACK, WHITE = 0, 1
COLORS = ("black", "white")

_ROW = SIZE + 1
_BITS = SIZE * _ROW
_BOARD = sum(((1 << SIZE) - 1) << row * _ROW for row in range(SIZE))
_INNER = sum(((1 << SIZE - 2) - 1) << row * _ROW + 1 for row in range(1, SIZE - 1))
_EDGE = _BOARD & ~_INNER

BIT = tuple(1 << action // SIZE * _ROW + action % SIZE for action in range(POINTS))
ACTION = {bit: action for action, bit in enumerate(BIT)} | {0: PASS}

Group = tuple[int, int]  # (stones, liberties)


def neighbours(x: int) -> int:
    """All points next to one of `x`."""
    return (x << 1 | x >> 1 | x << _ROW | x >> _ROW) & _BOARD


def each(x: int) -> Iterator[int]:
    """The single points of `x`."""
    while x:
        yield x & -x
        x &= x - 1


class Board:
    """A position, whose turn it is, and what was there before."""

    __slots__ = ("_counts", "_legal", "_seen", "groups", "moves", "passes", "stones", "turn")

    def __init__(self) -> None:
        self.stones = [0, 0]  # of Black and of White
        self.groups: list[list[Group]] = [[], []]
        self.turn = BLACK
        self.passes = 0  # one after the other
        self.moves: list[int] = []  # as actions
        self._seen = {0}  # positions, that of the empty board included
        self._counts = {(0, 0)}  # stones of each colour in them
        self._legal: int | None = None  # once it is known for this position

    @property
    def over(self) -> bool:
        return self.passes >= 2

    def play(self, action: int) -> None:
        """A move of whoever's turn it is, which must be a possible one."""
        if not self.is_legal(action):
            raise ConfigError(
                f"{COLORS[self.turn]} cannot play {to_vertex(action)} (action {action}) now"
                + ("; the game is over" if self.over else "")
            )
        self.moves.append(action)
        self._legal = None
        if action == PASS:
            self.passes += 1
        else:
            self.passes = 0
            self._place(BIT[action])
        self.turn = 1 - self.turn

    def is_legal(self, action: int) -> bool:
        if self.over or not 0 <= action <= PASS:
            return False
        return action == PASS or bool(BIT[action] & self.legal())

    def legal(self) -> int:
        """The points where whoever's turn it is may play."""
        if self._legal is None:
            self._legal = self._find_legal()
        return self._legal

    def _find_legal(self) -> int:
        empty = _BOARD & ~(self.stones[BLACK] | self.stones[WHITE])
        open_ = neighbours(empty)
        for _, liberties in self.groups[self.turn]:
            if liberties & (liberties - 1):
                open_ |= liberties
        captures = 0
        for _, liberties in self.groups[1 - self.turn]:
            if not liberties & (liberties - 1):
                captures |= liberties
        return self._without_repeats(empty & (open_ | captures), captures)

    def _without_repeats(self, possible: int, captures: int) -> int:
        # A stone more and none captured repeats nothing while no position had so many of each.
        counts = [stones.bit_count() for stones in self.stones]
        counts[self.turn] += 1
        looked_at = possible if (counts[BLACK], counts[WHITE]) in self._counts else captures
        own, other = self.stones[self.turn], self.stones[1 - self.turn]
        for bit in each(looked_at):
            left = other & ~self._captured(bit) if bit & captures else other
            pair = (own | bit, left) if self.turn == BLACK else (left, own | bit)
            if pair[BLACK] | pair[WHITE] << _BITS in self._seen:
                possible ^= bit
        return possible

    def _captured(self, bit: int) -> int:
        """The other's stones that a move there takes."""
        taken = 0
        for stones, liberties in self.groups[1 - self.turn]:
            if liberties == bit:
                taken |= stones
        return taken

    def _place(self, bit: int) -> None:
        me, you = self.turn, 1 - self.turn
        captured = self._captured(bit)
        self.stones[me] |= bit
        self.stones[you] &= ~captured
        empty = _BOARD & ~(self.stones[BLACK] | self.stones[WHITE])
        joined, kept = bit, []
        for group in self.groups[me]:
            if group[1] & bit:
                joined |= group[0]
            elif captured:
                kept.append((group[0], neighbours(group[0]) & empty))
            else:
                kept.append(group)
        self.groups[me] = [*kept, (joined, neighbours(joined) & empty)]
        self.groups[you] = [(s, lib & ~bit) for s, lib in self.groups[you] if lib != bit]
        self._seen.add(self.stones[BLACK] | self.stones[WHITE] << _BITS)
        self._counts.add((self.stones[BLACK].bit_count(), self.stones[WHITE].bit_count()))

    def area(self) -> int:
        """Black's points less White's, without komi."""
        empty = _BOARD & ~(self.stones[BLACK] | self.stones[WHITE])
        black, white = (_reach(stones, empty) for stones in self.stones)
        return (black & ~white).bit_count() - (white & ~black).bit_count()

    def sensible(self) -> int:
        """Where whoever's turn it is may play without filling an eye of their own.

        An eye is an empty point whose neighbours are all own stones, and of whose corners the other
        has one at most, at the edge none.
        """
        possible = self.legal()
        own, other = self.stones[self.turn], self.stones[1 - self.turn]
        eyes = possible & ~neighbours(_BOARD & ~own)
        if not eyes:
            return possible
        one = two = 0  # points with at least so many corners of the other's
        for corner in (other << _ROW + 1, other << _ROW - 1, other >> _ROW + 1, other >> _ROW - 1):
            two |= one & corner
            one |= corner
        return possible & ~(eyes & ~(two | one & _EDGE))

    def __str__(self) -> str:
        signs = {0: ".", 1: "X", 2: "O"}
        rows = planes(*self.stones).astype(int).reshape(2, SIZE, SIZE)
        lines = [" ".join(signs[x] for x in row) for row in rows[0] + 2 * rows[1]]
        return "\n".join(f"{SIZE - n} {line}" for n, line in enumerate(lines)) + (
            "\n  " + " ".join("ABCDEFGHJ")
        )


def _reach(stones: int, empty: int) -> int:
    """Stones, and the empty points from which they are reached over empty points."""
    reached = 0
    grown = stones
    while grown != reached:
        reached = grown
        grown = reached | neighbours(reached) & empty
    return reached


def planes(*sets: int) -> np.ndarray[Any, Any]:
    """Sets of points as bytes of 0 and 1, [sets, 81]."""
    length = (_BITS + 7) // 8
    raw = b"".join(points.to_bytes(length, "little") for points in sets)
    bits = np.unpackbits(
        np.frombuffer(raw, np.uint8).reshape(-1, length), axis=1, bitorder="little"
    )
    return bits[:, :_BITS].reshape(-1, SIZE, _ROW)[:, :, :SIZE].reshape(-1, POINTS)


def random_move(board: Board, rng: np.random.Generator) -> int:
    """A sensible move, all alike; a pass where there is none."""
    points = board.sensible()
    if not points:
        return PASS
    for _ in range(int(rng.integers(points.bit_count()))):
        points &= points - 1
    return ACTION[points & -points]


class Go9x9(gymnasium.Env):  # type: ignore[misc]
    """One side of a game of Go, on a board of 9 × 9.

    At the end of a game `info` has `score` (the agent's points less the other's, komi included) and
    `is_success` (whether it was won).

    Args:
        opponent: "random" (possible moves, but its own eyes are not filled), "gnugo", or the
            command line of another engine that speaks GTP, such as "gnugo --mode gtp --level 10".
        color: the agent's: "black", "white", or "both": drawn anew for each game.
        komi: White's points for moving second.
        max_moves: of both sides; after so many the game is over, and counted as it stands.
        timeout: seconds that an engine may take for an answer.
        render_mode: None, "ansi" or "rgb_array".
    """

    metadata: ClassVar[dict[str, Any]] = {"render_modes": ["ansi", "rgb_array"], "render_fps": 2}

    def __init__(
        self,
        opponent: str = "random",
        color: Literal["black", "white", "both"] = "both",
        komi: float = KOMI,
        max_moves: int = MAX_MOVES,
        timeout: float = 60.0,
        render_mode: str | None = None,
    ) -> None:
        if color not in (*COLORS, "both"):
            raise ConfigError(f"color={color!r} is not known; choose black, white or both")
        if not max_moves > 0:
            raise ConfigError(f"max_moves={max_moves} is too few; a game has one move at least")
        if render_mode is not None and render_mode not in self.metadata["render_modes"]:
            raise ConfigError(
                f"render_mode={render_mode!r} is not known; choose from "
                f"{self.metadata['render_modes']} or None"
            )
        self.color, self.komi, self.max_moves = color, float(komi), max_moves
        self.render_mode = render_mode
        self.observation_space = spaces.Dict(
            {
                "observation": spaces.Box(0.0, 1.0, (5, SIZE, SIZE), np.float32),
                "action_mask": spaces.MultiBinary(POINTS + 1),
            }
        )
        self.action_space = spaces.Discrete(POINTS + 1)
        self.board, self.agent = Board(), BLACK
        self._resigned = False
        # It is started by the first reset: environments are also made to look at their spaces.
        self._engine = None if opponent == "random" else GtpEngine(opponent, timeout)

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        drawn = int(self.np_random.integers(2))
        self._begin(COLORS.index(self.color) if self.color in COLORS else drawn)
        if self.agent == WHITE:
            self._answer()
        return self._observation(), {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        if self._is_over():
            raise RuntimeError("the game is over: call reset()")
        self._play(int(action))
        if not self._is_over():
            self._answer()
        if not self._is_over():
            return self._observation(), 0.0, False, False, {}
        score = self.score()
        reward = float(np.sign(score))
        return self._observation(), reward, True, False, {"score": score, "is_success": score > 0}

    def _is_over(self) -> bool:
        return self.board.over or self._resigned or len(self.board.moves) >= self.max_moves

    def score(self) -> float:
        """The agent's points less the other's; the whole board where the other has resigned."""
        if self._resigned:
            return float(POINTS)
        black = self.board.area() - self.komi
        return black if self.agent == BLACK else -black

    def get_state(self) -> dict[str, Any]:
        """The moves so far: they lead to the same position, what is forbidden included."""
        return {"agent": self.agent, "moves": list(self.board.moves), "resigned": self._resigned}

    def set_state(self, state: Mapping[str, Any]) -> None:
        self._begin(int(state["agent"]))
        for action in state["moves"]:
            self._play(int(action))
        self._resigned = bool(state["resigned"])

    def render(self) -> Any:
        """The board as text for "ansi", as a picture [288, 288, 3] for "rgb_array"."""
        if self.render_mode is None:
            gymnasium.logger.warn('render() without a render_mode: make it with "rgb_array"')
            return None
        return str(self.board) if self.render_mode == "ansi" else draw(self.board)

    def close(self) -> None:
        if self._engine is not None:
            self._engine.close()

    def _begin(self, agent: int) -> None:
        self.board, self.agent, self._resigned = Board(), agent, False
        if self._engine is not None:
            self._engine.begin(SIZE, self.komi, int(self.np_random.integers(2**31)))

    def _play(self, action: int) -> None:
        color = self.board.turn
        self.board.play(action)
        if self._engine is not None:
            self._engine.play(COLORS[color], action)

    def _answer(self) -> None:
        """The other's move."""
        if self._engine is None:
            self.board.play(random_move(self.board, self.np_random))
            return
        action = self._engine.move(COLORS[self.board.turn])
        if action is None:
            self._resigned = True
        elif not self.board.is_legal(action):
            raise WorkerError(
                f"{self._engine} played {to_vertex(action)} as {COLORS[self.board.turn]}, which "
                "the rules forbid (no suicide, positional superko); is it set to other rules?\n"
                f"{self.board}"
            )
        else:
            self.board.play(action)

    def _observation(self) -> dict[str, Any]:
        board, me = self.board, self.agent
        legal = 0 if self._is_over() else board.legal()
        points = planes(board.stones[me], board.stones[1 - me], legal)
        seen = np.zeros((5, POINTS), np.float32)
        seen[:3] = points
        seen[3] = board.passes == 1
        seen[4] = me == BLACK
        mask = np.ones(POINTS + 1, np.int8)
        mask[:POINTS] = points[2]
        return {"observation": seen.reshape(5, SIZE, SIZE), "action_mask": mask}


_WOOD, _LINE = (222, 184, 120), (90, 70, 40)
_STONES = ((25, 25, 28), (245, 245, 240))
_CELL = 32  # pixels


def draw(board: Board) -> np.ndarray[Any, Any]:
    """The position as a picture; the last move has a dot."""
    side = SIZE * _CELL
    picture = np.full((side, side, 3), _WOOD, np.uint8)
    first, last = _CELL // 2, side - _CELL // 2
    picture[first:last:_CELL, first:last] = _LINE
    picture[first:last, first:last:_CELL] = _LINE
    picture[last - 1, first:last] = picture[first:last, last - 1] = _LINE
    y, x = np.mgrid[:_CELL, :_CELL] - (_CELL - 1) / 2
    distance = np.hypot(y, x)
    cells = picture.reshape(SIZE, _CELL, SIZE, _CELL, 3)
    for color, stones in enumerate(board.stones):
        for bit in each(stones):
            row, column = divmod(ACTION[bit], SIZE)
            cell = cells[row, :, column]
            cell[distance < 0.46 * _CELL] = _STONES[color]
            if board.moves and board.moves[-1] == ACTION[bit]:
                cell[distance < 0.14 * _CELL] = _STONES[1 - color]
    return picture

"""Tic-tac-toe against a seeded opponent.

A board is nine characters in reading order: `X`, `O`, or `.` for a free cell. The model plays X,
the opponent O. Everything here is a function of the scenario and the moves, so that a game can be
replayed from them alone.
"""

import hashlib
import random
from collections.abc import Mapping
from functools import cache
from typing import Literal

Result = Literal["win", "draw", "loss"]

EMPTY = "." * 9
LINES = ((0, 1, 2), (3, 4, 5), (6, 7, 8), (0, 3, 6), (1, 4, 7), (2, 5, 8), (0, 4, 8), (2, 4, 6))
ERRORS_MAX = 3
VERDICTS: dict[Result, str] = {"win": "You win.", "draw": "Draw.", "loss": "You lose."}


def legal_moves(board: str) -> tuple[int, ...]:
    """The free cells, ascending."""
    return tuple(cell for cell, mark in enumerate(board) if mark == ".")


def winner(board: str) -> str | None:
    """The mark that has three in a row, if any."""
    for a, b, c in LINES:
        if board[a] != "." and board[a] == board[b] == board[c]:
            return board[a]
    return None


def place(board: str, cell: int, mark: str) -> str:
    """The board after `mark` took `cell`."""
    return board[:cell] + mark + board[cell + 1 :]


def show(board: str) -> str:
    """The board as three lines; a free cell shows its number."""
    cells = "".join(str(cell) if mark == "." else mark for cell, mark in enumerate(board))
    return "\n".join((cells[:3], cells[3:6], cells[6:]))


@cache
def value(board: str, mark: str) -> int:
    """What perfect play gives `mark`, who is to move: 1 win, 0 draw, -1 loss."""
    if winner(board):
        return -1
    best: int | None = None
    for cell in legal_moves(board):
        best = max(move_value(board, cell, mark), -1 if best is None else best)
        if best == 1:
            break
    return 0 if best is None else best


def move_value(board: str, cell: int, mark: str) -> int:
    """What perfect play gives `mark` after it takes `cell`."""
    return -value(place(board, cell, mark), "O" if mark == "X" else "X")


@cache
def best_moves(board: str, mark: str) -> tuple[int, ...]:
    """The minimax moves of `mark`, all equally good, ascending."""
    if board == EMPTY:
        return legal_moves(board)  # each of them draws; searching for that takes longer than a game
    best = value(board, mark)
    return tuple(cell for cell in legal_moves(board) if move_value(board, cell, mark) == best)


def opponent_move(board: str, seed: int, p: float) -> int:
    """O's move: with probability `p` any legal one, else a minimax one.

    A deterministic function of its arguments: games of one scenario meet the same reply wherever
    they reach the same board.
    """
    rng = random.Random(hashlib.sha256(f"{seed}:{board}".encode()).digest())
    return rng.choice(legal_moves(board) if rng.random() < p else best_moves(board, "O"))


def well_formed(name: str, arguments: object) -> bool:
    """Whether a tool call is `play` with one integer argument `cell`, legal on the board or not."""
    if name != "play" or not isinstance(arguments, Mapping) or set(arguments) != {"cell"}:
        return False
    return type(arguments["cell"]) is int


class Game:
    """One game. `errors` counts rejected calls and replies without a call; the third one loses."""

    def __init__(self, *, seed: int, p: float, x_starts: bool) -> None:
        self.seed = seed
        self.p = p
        self.board = EMPTY
        self.errors = 0
        self.result: Result | None = None
        if not x_starts:
            self._opponent_moves()

    def call(self, name: str, arguments: object) -> str:
        """Carry out a tool call with its decoded arguments and return the tool's answer."""
        if self.result:
            return "The game is over."
        if name != "play":
            return self.error("Unknown tool.")
        if not isinstance(arguments, Mapping) or not well_formed(name, arguments):
            return self.error("Malformed call.")
        return self.play(arguments["cell"])

    def play(self, cell: int) -> str:
        """X takes `cell` and O answers, or the move is rejected. Returns what the model is told."""
        if self.result:
            return "The game is over."
        if cell not in legal_moves(self.board):
            return self.error("Illegal move.")
        self.board = place(self.board, cell, "X")
        self._settle()
        if not self.result:
            self._opponent_moves()
        return self.view()

    def error(self, message: str) -> str:
        """Count an error while the game runs. Returns what the model is told."""
        self.errors += 1
        if self.errors == ERRORS_MAX:
            self.result = "loss"
        return f"{message}\n{self.view()}"

    def view(self) -> str:
        """The board, and the verdict once there is one."""
        verdict = f"\n{VERDICTS[self.result]}" if self.result else ""
        return show(self.board) + verdict

    def _opponent_moves(self) -> None:
        self.board = place(self.board, opponent_move(self.board, self.seed, self.p), "O")
        self._settle()

    def _settle(self) -> None:
        mark = winner(self.board)
        if mark:
            self.result = "win" if mark == "X" else "loss"
        elif "." not in self.board:
            self.result = "draw"

"""The reward: replays the game from the model's own calls and believes nobody's account of it."""

from collections.abc import Iterator
from typing import Any

from game import Game, well_formed

WEIGHTS = {"outcome": 1.0, "format": 0.2, "invalid": -0.1, "win": 0.0, "draw": 0.0, "loss": 0.0}
OUTCOMES = {"win": 1.0, "draw": 0.5, "loss": 0.0}


def reward(trace: dict[str, Any]) -> dict[str, float]:
    """Named scores, to be summed by `WEIGHTS`; those of weight 0 are metrics.

    `format` is the share of well-formed tool calls; a reply without any while the game runs counts
    as one that is not. An unfinished game is lost.
    """
    scenario = trace["scenario"]
    game = Game(seed=scenario["seed"], p=scenario["p"], x_starts=scenario["x_starts"])
    calls = list(replay(game, trace["turns"]))
    result = game.result or "loss"
    return {
        "outcome": OUTCOMES[result],
        "format": sum(calls) / len(calls) if calls else 0.0,
        "invalid": float(game.errors > 0),
        **{name: float(name == result) for name in OUTCOMES},
    }


def replay(game: Game, turns: list[dict[str, Any]]) -> Iterator[bool]:
    """Play the assistant's turns; for each call, made or missing, whether it was well-formed."""
    for turn in turns:
        if turn["role"] != "assistant":
            continue
        calls = turn.get("tool_calls") or []
        for call in calls:
            game.call(call["name"], call["arguments"])
            yield well_formed(call["name"], call["arguments"])
        if not calls and not game.result:
            game.error("")
            yield False

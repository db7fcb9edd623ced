"""Write the scenario files: `train.jsonl`, `eval_random.jsonl`, `eval_optimal.jsonl`.

    python scenarios.py [--train 1024] [--random 400] [--optimal 200] [--band 0.1 0.9]

One scenario per line: `seed` decides the opponent's replies, `p` is its share of random moves.
Every seed occurs once over all files.
"""

import argparse
import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TypedDict

HERE = Path(__file__).parent
GOLDEN = 0.6180339887498949
Band = tuple[float, float]  # least and largest share of random moves
BANDS: list[Band] = [(0.1, 0.9)]  # strong opponents teach to block, weak ones to win


class Tags(TypedDict):
    opponent: str


class Scenario(TypedDict):
    id: str
    seed: int
    p: float
    x_starts: bool
    tags: Tags


def train_set(count: int, bands: Sequence[Band]) -> list[Scenario]:
    """Opponents of mixed strength: any run of scenarios covers every band evenly."""
    return [
        {
            "id": f"train-{index:04}",
            "seed": index,
            # Pairs share p, so that each strength is met both as first and as second player.
            "p": strength(index // 2, bands),
            "x_starts": index % 2 == 0,
            "tags": {"opponent": "mixed"},
        }
        for index in range(count)
    ]


def strength(pair: int, bands: Sequence[Band]) -> float:
    """The share of random moves of a pair: bands take turns, each walked through in golden steps."""
    least, most = bands[pair % len(bands)]
    return round(least + (most - least) * (pair // len(bands) * GOLDEN % 1), 4)


def eval_set(opponent: str, p: float, count: int, first_seed: int) -> list[Scenario]:
    """Opponents of one strength; the model starts half of the games."""
    return [
        {
            "id": f"{opponent}-{index:04}",
            "seed": first_seed + index,
            "p": p,
            "x_starts": index % 2 == 0,
            "tags": {"opponent": opponent},
        }
        for index in range(count)
    ]


def write(name: str, scenarios: Iterable[Scenario]) -> None:
    """Write one scenario set beside this file."""
    lines = (json.dumps(scenario) + "\n" for scenario in scenarios)
    (HERE / f"{name}.jsonl").write_text("".join(lines))


def main() -> None:
    parser = argparse.ArgumentParser(description="Write the scenario files.")
    parser.add_argument("--train", type=int, default=1024, help="training scenarios")
    parser.add_argument("--random", type=int, default=400, help="evaluation scenarios with p = 1")
    parser.add_argument("--optimal", type=int, default=200, help="evaluation scenarios with p = 0")
    parser.add_argument(
        "--band",
        type=float,
        nargs=2,
        action="append",
        metavar=("MIN", "MAX"),
        help="least and largest share of random moves in training; bands share the scenarios",
    )
    options = parser.parse_args()
    write("train", train_set(options.train, options.band or BANDS))
    write("eval_random", eval_set("random", 1.0, options.random, options.train))
    write("eval_optimal", eval_set("optimal", 0.0, options.optimal, options.train + options.random))


if __name__ == "__main__":
    main()

"""Write the scenario files: `train.jsonl`, `eval_random.jsonl`, `eval_optimal.jsonl`.

    python scenarios.py [--train 1024] [--random 400] [--optimal 200] [--p-min 0.1] [--p-max 0.9]

One scenario per line: `seed` decides the opponent's replies, `p` is its share of random moves.
Every seed occurs once over all files.
"""

import argparse
import json
from collections.abc import Iterable
from pathlib import Path
from typing import TypedDict

HERE = Path(__file__).parent
GOLDEN = 0.6180339887498949


class Tags(TypedDict):
    opponent: str


class Scenario(TypedDict):
    id: str
    seed: int
    p: float
    x_starts: bool
    tags: Tags


def train_set(count: int, p_min: float, p_max: float) -> list[Scenario]:
    """Opponents of mixed strength: any run of scenarios covers `p_min`..`p_max` evenly."""
    return [
        {
            "id": f"train-{index:04}",
            "seed": index,
            # Pairs share p, so that each strength is met both as first and as second player.
            "p": round(p_min + (p_max - p_min) * (index // 2 * GOLDEN % 1), 4),
            "x_starts": index % 2 == 0,
            "tags": {"opponent": "mixed"},
        }
        for index in range(count)
    ]


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
    parser.add_argument("--p-min", type=float, default=0.1, help="least share of random moves")
    parser.add_argument("--p-max", type=float, default=0.9, help="largest share of random moves")
    options = parser.parse_args()
    write("train", train_set(options.train, options.p_min, options.p_max))
    write("eval_random", eval_set("random", 1.0, options.random, options.train))
    write("eval_optimal", eval_set("optimal", 0.0, options.optimal, options.train + options.random))


if __name__ == "__main__":
    main()

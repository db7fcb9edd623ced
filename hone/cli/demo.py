"""`hone demo`: the tic-tac-toe agent learns, and the figures that show it."""

import argparse
import asyncio
import os
from pathlib import Path
from typing import TYPE_CHECKING

from hone.cli.common import add_json, on_signals, open_store, print_json
from hone.config import Config, load

if TYPE_CHECKING:
    from hone.demo import Demo

CONFIG = Path("examples/tictactoe/hone.toml")
SMOKE_STEPS, SMOKE_GAMES, SMOKE_GROUPS = 6, 20, 4


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of the verb."""
    parser.add_argument("-c", "--config", default=str(CONFIG), metavar="FILE", help=f"default: {CONFIG}")
    parser.add_argument("--out", default="runs/demo", metavar="DIR", help="default: runs/demo")
    parser.add_argument("--summary", action="store_true", help="recompute the summary from the store")
    parser.add_argument("--steps", type=int, metavar="N", help="optimizer steps")
    parser.add_argument("--lr", type=float, help="learning rate; 0: a control that learns nothing")
    parser.add_argument("--seed", type=int, help="of the order of scenarios and of the adapter")
    parser.add_argument("--games", type=int, metavar="N", help="evaluation games against each opponent")
    parser.add_argument(
        "--smoke", action="store_true", help="a few steps and games; only exactness is required"
    )
    add_json(parser)


def run(arguments: argparse.Namespace) -> int:
    """Exit status 0 iff every threshold is met."""
    from hone.demo import Demo, Plan, clear, report
    from hone.summary import exactness_misses, flat, misses, table

    out = Path(arguments.out).resolve()
    env = environment(arguments, out)
    config = load(Path(arguments.config), {**os.environ, **env})
    games = arguments.games or (SMOKE_GAMES if arguments.smoke else None)
    if not arguments.summary:
        clear(out)
        prepare(config)
    store = open_store(config, create=not arguments.summary)
    try:
        if not arguments.summary:
            asyncio.run(perform(Demo(config, store, Plan(out=out, games=games), env)))
        summary = report(store, out)
    finally:
        store.close()
    missed = exactness_misses(summary) if arguments.smoke else misses(summary)
    if arguments.json:
        print_json(flat(summary))
    else:
        print(table(summary))
    for miss in missed:
        print(f"missed: {miss}")
    return 1 if missed else 0


def environment(arguments: argparse.Namespace, out: Path) -> dict[str, str]:
    """The options as overrides that every part understands."""
    steps = arguments.steps or (SMOKE_STEPS if arguments.smoke else None)
    groups = SMOKE_GROUPS if arguments.smoke else None
    given = {
        "HONE_TRAIN__GROUPS_PER_BATCH": groups,
        "HONE_TRAIN__STEPS_MAX": steps,
        "HONE_TRAIN__LR": arguments.lr,
        "HONE_TRAIN__SEED": arguments.seed,
    }
    return {"HONE_RUN__DIR": str(out)} | {
        name: str(value) for name, value in given.items() if value is not None
    }


def prepare(config: Config) -> None:
    """Check what can be checked before anything starts."""
    from hone.doctor import require

    require(config, training=True)


async def perform(demo: "Demo") -> None:
    """Run it so that Ctrl-C stops all processes."""
    on_signals(demo.stop)
    await demo.run()

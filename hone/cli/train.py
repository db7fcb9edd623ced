"""`hone train`: learner and runner beside a running `hone up`, or everything."""

import argparse
import asyncio
import sys
from pathlib import Path

from hone.cli.common import (
    add_config,
    announce,
    load_config,
    on_signals,
    open_store,
    refuse_second,
    supervise,
)
from hone.config import Config
from hone.state import State
from hone.training import Ending


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of the verb."""
    add_config(parser)
    parser.add_argument("--run", help="name of the run (default: go on with the newest, or a new one)")
    parser.add_argument(
        "--from",
        dest="origin",
        metavar="VERSION|DIR",
        help="a new run from this version (the run before it ends), or from this adapter as version 0",
    )


def run(arguments: argparse.Namespace) -> int:
    """Train to the end of the run, or until Ctrl-C; a stopped run goes on where it was."""
    ending = asyncio.run(train(load_config(arguments), arguments.run, arguments.origin))
    if ending is None:
        print("Stopped; `hone train` goes on with this run.")
        return 130
    print(f"The run has ended ({ending.reason}).")
    return 0


async def train(config: Config, wanted: str | None, origin: str | None = None) -> Ending | None:
    """One run under a supervisor; None: stopped before its end."""
    from hone.doctor import require
    from hone.parts import serving, training
    from hone.progress import Progress
    from hone.start import begin
    from hone.state import running
    from hone.training import conduct

    directory = Path(config.run.dir)
    refuse_second(directory, ("train",))
    attached = running(directory, "up")
    if attached is None:
        require(config, training=True)
    store = open_store(config, create=True)
    run_id = begin(config, store, wanted, origin)
    parts = [] if attached else serving(config, sys.executable)
    parts += training(config, sys.executable, run_id, after=[part.name for part in parts])
    supervisor = supervise(config, "train", parts)
    on_signals(supervisor.stop)

    def supervisors() -> list[State]:
        return [state for state in (attached, supervisor.state()) if state is not None]

    conducting = asyncio.create_task(
        conduct(store, run_id, supervisor, steps_max=config.learner.steps_max, wall_s=config.train.wall_s)
    )
    watching = [
        asyncio.create_task(announce(supervisor, f"Training run {run_id}")),
        asyncio.create_task(Progress(store, run_id, supervisors).run()),
    ]
    conducting.add_done_callback(lambda _: supervisor.stop())
    try:
        await supervisor.run()
    finally:
        for task in (*watching, conducting):
            task.cancel()
        await asyncio.gather(*watching, conducting, return_exceptions=True)
        store.close()
    return None if conducting.cancelled() else conducting.result()

"""`hone runner`: launches agents on the scenarios of a run."""

import argparse
import asyncio
import os
import time
from pathlib import Path

from hone.cli.common import add_config, load_config, log_to_stderr, on_signals, open_store
from hone.config import Config

LOOK_S = 0.5


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of the verb."""
    add_config(parser)
    parser.add_argument("--run", help="run to play for (default: the newest that has not ended)")


def run(arguments: argparse.Namespace) -> int:
    """Play until the epochs are through, the run needs no more, SIGTERM or Ctrl-C."""
    log_to_stderr()
    asyncio.run(play(load_config(arguments), arguments.run))
    return 0


async def play(config: Config, wanted: str | None) -> None:
    """One runner for one run."""
    from hone.environment import for_agents, proxy_url
    from hone.start import start_run
    from hone.training import choose_run, groups_needed
    from rollouts.scenarios import read_scenarios
    from rollouts.schedule import train

    scenarios = read_scenarios(Path(config.train.scenarios))
    stop = asyncio.Event()
    on_signals(stop.set)
    store = open_store(config, create=True)
    run_id = choose_run(store, config.policy.name, wanted)
    start_run(config, store, run_id)
    looked: float = 0.0
    groups: int | None = None

    def needed() -> int | None:
        nonlocal looked, groups
        if time.monotonic() - looked > LOOK_S:
            groups = groups_needed(store, run_id, config.learner)
            looked = time.monotonic()
        return groups

    try:
        outcome = await train(
            config.rollouts,
            scenarios,
            store_path=Path(config.store.path),
            proxy_url=proxy_url(config),
            key=os.environ.get(config.train.key_env),
            run_id=run_id,
            environ=for_agents(os.environ),
            stop=stop,
            needed=needed,
        )
    finally:
        store.close()
    print(f"runner: {outcome.ending}, {outcome.groups} groups, {outcome.rollouts} rollouts", flush=True)

"""`hone control`: ingest, seal, score, group."""

import argparse
import asyncio
from pathlib import Path

from hone.cli.common import add_config, load_config, log_to_stderr


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of the verb."""
    add_config(parser)


def run(arguments: argparse.Namespace) -> int:
    """Work until SIGTERM or Ctrl-C."""
    from hone.control import serve

    log_to_stderr()
    config = load_config(arguments)
    path = Path(config.store.path)
    path.parent.mkdir(parents=True, exist_ok=True)
    asyncio.run(serve(path, config.rewards, config.control, policy=config.policy.name))
    return 0

"""`hone proxy`: the request path alone."""

import argparse
import asyncio
import os
from pathlib import Path

from hone.cli.common import add_config, load_config, log_to_stderr


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of the verb."""
    add_config(parser)


def run(arguments: argparse.Namespace) -> int:
    """Serve until SIGTERM or Ctrl-C."""
    from hone.environment import route_secrets
    from proxy.app import serve

    log_to_stderr()
    config = load_config(arguments)
    path = Path(config.store.path)
    path.parent.mkdir(parents=True, exist_ok=True)
    secrets = route_secrets(config, os.environ)
    asyncio.run(serve(config.proxy, path, capture=config.capture, secrets=secrets))
    return 0

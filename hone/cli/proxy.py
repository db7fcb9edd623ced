"""`hone proxy`: the request path alone."""

import argparse
import asyncio
import os
from collections.abc import Mapping
from pathlib import Path

from hone.cli.common import add_config, load_config, log_to_stderr, open_store


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of the verb."""
    add_config(parser)


def run(arguments: argparse.Namespace) -> int:
    """Serve until SIGTERM or Ctrl-C; SIGHUP reads the settings again."""
    from hone.environment import route_secrets
    from hone.start import start_policy
    from proxy.app import serve
    from proxy.reload import Source
    from proxy.settings import Settings

    def read() -> tuple[Settings, Mapping[str, str]]:
        config = load_config(arguments)
        return config.proxy, route_secrets(config, os.environ)

    log_to_stderr()
    config = load_config(arguments)
    path = Path(config.store.path)
    store = open_store(config, create=True)
    if config.train.init_adapter is not None:
        start_policy(config, store)
    store.close()
    secrets = route_secrets(config, os.environ)
    source = Source(config.path, read)
    asyncio.run(serve(config.proxy, path, capture=config.capture, secrets=secrets, source=source))
    return 0

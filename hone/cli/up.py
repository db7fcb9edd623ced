"""`hone up`: serve, without training."""

import argparse
import asyncio
import sys

from hone.cli.common import add_config, announce, load_config, on_signals, open_store, supervise
from hone.config import Config


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of the verb."""
    add_config(parser)


def run(arguments: argparse.Namespace) -> int:
    """Serve until Ctrl-C or SIGTERM."""
    asyncio.run(up(load_config(arguments)))
    return 0


async def up(config: Config) -> None:
    """Engine, proxy and control under one supervisor."""
    from hone.doctor import require
    from hone.environment import proxy_url
    from hone.parts import serving
    from hone.start import start_policy

    supervisor = supervise(config, "up", serving(config, sys.executable))
    require(config, training=False)
    if config.train.init_adapter is not None:  # the proxy does it too; here an error is seen
        store = open_store(config, create=True)
        start_policy(config, store)
        store.close()
    on_signals(supervisor.stop)
    what = "Capturing calls (no policy.base_model, so nothing is trained)"
    if not config.capture_only:
        what = f"Serving {config.policy.name}"
    telling = asyncio.create_task(announce(supervisor, f"{what} at {proxy_url(config)}/v1"))
    try:
        await supervisor.run()
    finally:
        telling.cancel()

"""`hone status`: one screen, and one sentence on what training waits for."""

import argparse
from pathlib import Path

from hone.cli.common import add_config, add_json, load_config, open_store, print_json


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of the verb."""
    add_config(parser)
    add_json(parser)


def run(arguments: argparse.Namespace) -> int:
    """Print it; exit status 0 also when nothing runs."""
    from hone.state import Kind, running
    from hone.status import look, render

    config = load_config(arguments)
    kinds: tuple[Kind, ...] = ("up", "train")
    supervisors = [state for kind in kinds if (state := running(Path(config.run.dir), kind))]
    store = open_store(config) if Path(config.store.path).exists() else None
    try:
        status = look(store, config.policy.name, supervisors)
    finally:
        if store is not None:
            store.close()
    if arguments.json:
        print_json(status)
    else:
        print(render(status))
    return 0

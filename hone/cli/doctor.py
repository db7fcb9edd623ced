"""`hone doctor`: the machine, the resolved settings, and whether they fit."""

import argparse
import sys

from hone.cli.common import add_config, add_json, load_config, print_json


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of the verb."""
    add_config(parser)
    add_json(parser)


def run(arguments: argparse.Namespace) -> int:
    """Print everything; exit status 1 if a check fails."""
    from hone.doctor import checks, machine
    from hone.printing import redacted, to_toml

    config = load_config(arguments)
    found = checks(config, training=True)
    settings = redacted(config.sections())
    if arguments.json:
        print_json({"machine": machine(), "checks": found, "settings": settings})
    else:
        for name, value in machine().items():
            print(f"{name:<14}{value}")
        print()
        for check in found:
            print(f"{'ok  ' if check.ok else 'FAIL'}  {check.name}: {check.detail}")
        sys.stdout.write("\n" + to_toml(settings))
    return 0 if all(check.ok for check in found) else 1

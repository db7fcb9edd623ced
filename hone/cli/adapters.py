"""`hone adapters`: the versions of the policy."""

import argparse

from hone.cli.common import add_config, add_json, load_config, open_store, print_json


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of the verb."""
    verbs = parser.add_subparsers(dest="what", required=True, metavar="ls")
    listing = verbs.add_parser("ls", help="one line a version, with what each engine says of it")
    add_config(listing)
    add_json(listing)


def run(arguments: argparse.Namespace) -> int:
    """List the versions."""
    config = load_config(arguments)
    store = open_store(config)
    try:
        versions = store.versions(config.policy.name)
        engines = store.engine_versions(config.policy.name)
        promoted = store.promoted_version(config.policy.name)
    finally:
        store.close()
    if arguments.json:
        print_json({"versions": versions, "engines": engines, "promoted": promoted})
        return 0
    for version in versions:
        states = ", ".join(f"{row.engine} {row.state}" for row in engines if row.version == version.version)
        mark = " promoted" if promoted and promoted.version == version.version else ""
        print(f"v{version.version:<6}step {version.step:<6}{version.state:<11}{states}{mark}")
    return 0

"""`hone scenarios`: scenario sets made of what agents were asked."""

import argparse
import sys

from hone.cli.common import (
    add_config,
    add_json,
    add_out,
    load_config,
    open_store,
    positive,
    print_json,
    progress,
)
from hone.cli.selection import add_filters, filters

FROM_ROLLOUTS = """\
one scenario for each distinct first request (system prompt, tools, first user messages) of the rollouts

A line holds `id` (a fingerprint that spelling does not change), `messages`, `tools`, `count` (rollouts that
began so) and `rollouts` (the newest of them). The most frequent come first, of equals the newest. The file
can be trained on (train.scenarios) and evaluated on (`hone eval FILE`); the agent finds these fields in the
file that $SCENARIO_FILE names.
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of the verb."""
    verbs = parser.add_subparsers(dest="what", required=True, metavar="from-rollouts")
    making = verbs.add_parser(
        "from-rollouts",
        help="captured first requests as a scenario set",
        description=FROM_ROLLOUTS,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add_config(making)
    add_json(making)
    add_out(making)
    making.add_argument("--limit", type=positive, metavar="N", help="only the N most frequent")
    add_filters(making)


def run(arguments: argparse.Namespace) -> int:
    """Write the scenario set."""
    from hone.traffic.scenarios import from_rollouts, reasons

    store = open_store(load_config(arguments))
    try:
        with progress("rollouts read") as seen:
            summary = from_rollouts(
                store,
                filters(arguments),
                arguments.out,
                limit=arguments.limit,
                force=arguments.force,
                seen=seen,
            )
    finally:
        store.close()
    if arguments.json:
        print_json(summary)
    of = "" if summary.scenarios == summary.distinct else f" of {summary.distinct}"
    told = [f"{summary.scenarios}{of} scenarios from {summary.rollouts} rollouts: {summary.out}"]
    if summary.under_way:
        told.append(
            f"{summary.under_way} rollouts began with answers in their first request; what came before counts"
        )
    if summary.left_out:
        told.append(f"left out: {reasons(summary.left_out)}")
    print("\n".join(told), file=sys.stderr)
    return 0

"""`hone reward`: a script on stored rollouts: what it would give, and giving it."""

import argparse
import asyncio
import sys
from pathlib import Path

import msgspec

from capture.errors import ConfigError
from capture.store import Store
from hone.cli.common import (
    add_config,
    add_json,
    load_config,
    open_store,
    positive,
    print_json,
    progress,
)
from hone.cli.selection import add_filters, filters
from hone.config import Config

LIMIT = 1_000

TEST = "what a script would give stored rollouts; stores nothing"
TEST_HELP = """\
what a script would give stored rollouts, and what that means for training; nothing is stored

Distribution, spread in each scenario, groups that would have a signal, seconds a rollout, failures with their
tracebacks, and advice. Exit status 1 if the script failed on some rollout.

--json prints {script, script_hash, left_out, report, advice, rows}: `report` has {rollouts, scored, failed,
reward, histogram, scores, weights, scenarios, signal, latency, failures}; a row is a rollout's {rollout_id,
scenario_id, group_id, status, untrained, reward, stored_reward, scores, error, took_s}.
"""
RESCORE = "give stored rollouts the score of rewards.script"
RESCORE_HELP = """\
give stored rollouts the score that rewards.script gives them now, without running their agents again

Groups are scored whole or not at all, so that no group compares the rewards of two scripts. Left alone, and
counted: what a batch has taken (its reward is frozen), what is unfinished or failed, what this script has
scored already, and what it fails on. A training rollout that a broken script cost its reward comes back if
its group is still open. Interrupted, it goes on where it was. Exit status 1 if the script failed on some
rollout.

--json prints {script, script_hash, dry_run, control_runs, result}: `result` has {rollouts, groups,
left_alone, changed, revived, mean_before, mean_after, failures}.
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of the verb."""
    verbs = parser.add_subparsers(dest="what", required=True, metavar="test|rescore")
    raw = argparse.RawDescriptionHelpFormatter
    test = verbs.add_parser("test", help=TEST, description=TEST_HELP, formatter_class=raw)
    test.add_argument("script", nargs="?", metavar="SCRIPT", help="default: rewards.script")
    test.add_argument(
        "--limit", type=positive, default=LIMIT, metavar="N", help=f"only the newest N (default: {LIMIT})"
    )
    test.add_argument("--plot", type=Path, metavar="PNG", help="draw distribution and spread as well")
    rescore = verbs.add_parser("rescore", help=RESCORE, description=RESCORE_HELP, formatter_class=raw)
    rescore.add_argument("--dry-run", action="store_true", help="say what would be scored; run nothing")
    rescore.add_argument("--again", action="store_true", help="also what this script has scored already")
    for sub in (test, rescore):
        add_config(sub)
        add_json(sub)
        add_filters(sub)


def run(arguments: argparse.Namespace) -> int:
    """Test a script, or rescore with it."""
    config = load_config(arguments)
    store = open_store(config)
    try:
        return (_test if arguments.what == "test" else _rescore)(config, store, arguments)
    finally:
        store.close()


def _test(config: Config, store: Store, arguments: argparse.Namespace) -> int:
    from hone.trial import test
    from hone.trial_screen import lines

    settings = config.rewards
    if arguments.script is not None:
        settings = msgspec.structs.replace(settings, script=arguments.script)
    if not settings.script:
        raise ConfigError("rewards.script is not set, and no script was named")
    with progress("rollouts scored") as seen:
        tested = asyncio.run(
            test(
                store,
                settings,
                filters(arguments),
                limit=arguments.limit,
                group_size=config.rollouts.group_size,
                seen=seen,
            )
        )
    if arguments.plot is not None:
        from hone.trial_picture import draw

        draw(tested.report, tested.rows, arguments.plot)
    if arguments.json:
        print_json(tested)
    else:
        print("\n".join(lines(tested)))
    if arguments.plot is not None:
        print(f"drawn: {arguments.plot}", file=sys.stderr)
    return 1 if tested.report.failed else 0


def _rescore(config: Config, store: Store, arguments: argparse.Namespace) -> int:
    from hone.rescoring import lines, rescore

    if not config.rewards.script:
        raise ConfigError("rewards.script is not set: there is nothing to score with")
    with progress("rollouts looked at") as looked, progress("rollouts scored") as scored:
        done = rescore(
            store,
            config.rewards,
            filters(arguments),
            again=arguments.again,
            dry_run=arguments.dry_run,
            looked=looked,
            scored=scored,
        )
    if arguments.json:
        print_json(done)
    else:
        print("\n".join(lines(done)))
    return 1 if done.result.failures else 0

"""`hone adapters`: the versions of the policy, and which one is served."""

import argparse
import sys
import time

from capture.store import Store
from hone.cli.common import add_config, add_json, load_config, open_store, print_json
from hone.promotion import answer, listing

ACTIVATOR = "activator"  # the lease of the proxy that brings versions to engines
WAIT_S = 60.0
LOOK_EVERY_S = 0.1


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of the verb."""
    verbs = parser.add_subparsers(dest="what", required=True, metavar="ls|promote|rollback")
    listed = verbs.add_parser("ls", help="one line a version, with what each engine says of it")
    add_config(listed)
    add_json(listed)
    _add_promotion(
        verbs.add_parser("promote", help="serve a version to everyone but training and evaluation"),
        "the active one",
    )
    _add_promotion(
        verbs.add_parser("rollback", help="serve an older version again"),
        "the one promoted before the present one",
    )


def _add_promotion(parser: argparse.ArgumentParser, default: str) -> None:
    parser.add_argument(
        "version", nargs="?", type=_version, metavar="VERSION", help=f"17 or v17 (default: {default})"
    )
    parser.add_argument(
        "--wait-s",
        type=float,
        default=WAIT_S,
        metavar="S",
        help=f"how long to wait for a running proxy to serve it (default: {WAIT_S:g})",
    )
    add_config(parser)
    add_json(parser)


def _version(text: str) -> int:
    number = text.rpartition("@")[2].removeprefix("v")
    if not number.isdecimal():
        raise argparse.ArgumentTypeError(f"{text!r} is no version: 17 or v17")
    return int(number)


def run(arguments: argparse.Namespace) -> int:
    """List the versions, or change which one is served."""
    config = load_config(arguments)
    store = open_store(config)
    try:
        if arguments.what == "ls":
            return _list(store, config.policy.name, as_json=arguments.json)
        return _change(store, config.policy.name, arguments)
    finally:
        store.close()


def _list(store: Store, policy: str, *, as_json: bool) -> int:
    versions, engines = store.versions(policy), store.engine_versions(policy)
    active, promoted = store.active_version(policy), store.promoted_version(policy)
    history = store.promotions(policy)
    if as_json:
        named = {"active": active, "promoted": promoted, "promotions": history}
        print_json({"versions": versions, "engines": engines, **named})
        return 0
    print("\n".join(listing(versions, engines, active, promoted, history)))
    return 0


def _change(store: Store, policy: str, arguments: argparse.Namespace) -> int:
    """Exit status 0: it is served, or will be by the next proxy; 1: refused, or not served in time."""
    asked = store.ask_promotion(policy, arguments.version, arguments.what)
    proxy = bool(store.live_leases(ACTIVATOR))
    began = time.monotonic()
    while proxy and asked is not None and asked.is_open and time.monotonic() - began < arguments.wait_s:
        time.sleep(LOOK_EVERY_S)
        asked = next(one for one in store.promotions(policy) if one.n == asked.n)
    promoted = store.promoted_version(policy)
    served = promoted.version if promoted else 0
    good = asked is None or asked.served_at is not None or (asked.is_open and not proxy)
    if arguments.json:
        print_json({"promoted": served, "promotion": asked})
    else:
        text = answer(policy, asked, served, proxy=proxy, waited_s=arguments.wait_s)
        print(text if good else f"hone adapters: {text}", file=sys.stdout if good else sys.stderr)
    return 0 if good else 1

"""`hone adapters`: the versions of the policy, which one is served, and taking one elsewhere."""

import argparse
import sys
import time

import msgspec

from capture.store import Store
from hone.cli.common import add_config, add_json, load_config, open_store, print_json
from hone.config import Config
from hone.promotion import answer, listing

ACTIVATOR = "activator"  # the lease of the proxy that brings versions to engines
WAIT_S = 60.0
LOOK_EVERY_S = 0.1


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of the verb."""
    verbs = parser.add_subparsers(dest="what", required=True, metavar="ls|promote|rollback|export")
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
    _add_export(verbs.add_parser("export", help="write a version's adapter, or the merged model, elsewhere"))


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


def _add_export(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("version", type=_version, metavar="VERSION", help="17 or v17")
    parser.add_argument(
        "--to", required=True, metavar="DIR|URL", help="a directory, or a prefix at s3://, gs:// or az://"
    )
    parser.add_argument("--merge", action="store_true", help="a whole model: the base with the adapter in it")
    parser.add_argument(
        "--dtype",
        choices=("auto", "float32", "bfloat16", "float16"),
        default="auto",
        help="of the merged weights (default: the base's own)",
    )
    add_config(parser)
    add_json(parser)


def _version(text: str) -> int:
    number = text.rpartition("@")[2].removeprefix("v")
    if not number.isdecimal():
        raise argparse.ArgumentTypeError(f"{text!r} is no version: 17 or v17")
    return int(number)


def run(arguments: argparse.Namespace) -> int:
    """List the versions, change which one is served, or export one."""
    config = load_config(arguments)
    store = open_store(config)
    try:
        if arguments.what == "ls":
            return _list(store, config.policy.name, as_json=arguments.json)
        if arguments.what == "export":
            return _export(store, config, arguments)
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


def _export(store: Store, config: Config, arguments: argparse.Namespace) -> int:
    from hone.export import export, exported_version
    from hone.target import target

    to = target(arguments.to)
    version = exported_version(store, config.policy.name, arguments.version)
    base = config.policy.base_model
    made = export(version, base, to, merged=arguments.merge, dtype=arguments.dtype)
    if arguments.json:
        print_json({"to": str(to), **msgspec.to_builtins(made)})
    else:
        what = "merged into its base" if made.merged else "the adapter"
        print(f"{made.policy}@v{made.version}, {what}: {to}")
    return 0

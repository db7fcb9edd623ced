"""`hone keys`: make API keys for the proxy, and list those that are configured."""

import argparse
import hashlib
import re
import secrets
import sys
from datetime import UTC, datetime, timedelta
from typing import Any, get_args

from capture.errors import ConfigError, NotFound
from capture.types import Scope
from hone.cli.common import add_config, add_json, load_config, open_store, positive, print_json
from hone.config import Config
from hone.printing import to_toml_array
from proxy.settings import Key, KeyLimits

SECRET_BYTES = 32  # 256 random bits
PREFIX = "hone_"  # by which people, and scanners for lost secrets, recognise one
SCOPES: tuple[str, ...] = get_args(Scope)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of the verb."""
    verbs = parser.add_subparsers(dest="what", required=True, metavar="new|ls")
    new = verbs.add_parser("new", help="print a secret, once, and what to put into hone.toml for it")
    new.add_argument("id", help="the namespace of its rollouts, sessions and calls")
    new.add_argument(
        "--scopes",
        type=_scopes,
        default=("infer",),
        metavar="A,B",
        help=f"of {', '.join(SCOPES)} (default: infer)",
    )
    new.add_argument("--days", type=positive, metavar="N", help="it expires after that many")
    add_json(new)
    listed = verbs.add_parser("ls", help="the configured keys, and the tokens that were charged to them")
    add_config(listed)
    add_json(listed)


def _scopes(text: str) -> tuple[str, ...]:
    names = tuple(name.strip() for name in text.split(","))
    if unknown := [name for name in names if name not in SCOPES]:
        raise argparse.ArgumentTypeError(f"there is no scope {unknown[0]!r}: {', '.join(SCOPES)}")
    return names


def run(arguments: argparse.Namespace) -> int:
    """Make a key, or list them."""
    return _new(arguments) if arguments.what == "new" else _list(arguments)


def _new(arguments: argparse.Namespace) -> int:
    if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]{0,62}", arguments.id):
        raise ConfigError(f"{arguments.id!r} is no id of a key: letters, digits, dots, dashes, underscores")
    secret = PREFIX + secrets.token_urlsafe(SECRET_BYTES)
    entry: dict[str, Any] = {
        "id": arguments.id,
        "sha256": hashlib.sha256(secret.encode()).hexdigest(),
        "scopes": list(arguments.scopes),
    }
    if arguments.days is not None:
        end = datetime.now(UTC) + timedelta(days=arguments.days)
        entry["expires"] = end.isoformat(timespec="seconds")
    if arguments.json:
        print_json({"secret": secret, "key": entry})
        return 0
    print(f"{secret}\n")
    print(to_toml_array("proxy.keys", entry))
    sys.stdout.flush()
    sys.stderr.write(
        "The first line is the secret: it is shown this once. The rest goes into hone.toml, and a running "
        "proxy reads it there. To rotate a key, give it both hashes for a while: sha256 = [old, new].\n"
    )
    return 0


def _list(arguments: argparse.Namespace) -> int:
    config = load_config(arguments)
    used = _used(config)
    default = config.proxy.key_limits
    rows = [_row(key, key.limits or default, used.get(key.id, 0)) for key in config.proxy.keys]
    if arguments.json:
        print_json(rows)
        return 0
    if not rows:
        print("No key is configured: everybody who reaches the proxy may use it, and it stays on loopback.")
    for row in rows:
        expires = f", expires {row['expires']}" if row["expires"] else ""
        limits = ", ".join(f"{name} {value:g}" for name, value in row["limits"].items())
        charged = f", charged {row['charged_tokens']} tokens" if row["charged_tokens"] else ""
        print(
            f"{row['id']}: {', '.join(row['scopes'])}; {row['hashes']} secret(s){expires}; "
            f"{limits or 'no limits'}{charged}"
        )
    return 0


def _used(config: Config) -> dict[str, int]:
    """Tokens by key; nothing where nothing was ever stored."""
    try:
        store = open_store(config)
    except NotFound:
        return {}
    try:
        return store.key_tokens([key.id for key in config.proxy.keys])
    finally:
        store.close()


def _row(key: Key, limits: KeyLimits, used: int) -> dict[str, Any]:
    set_ones = ((name, getattr(limits, name)) for name in limits.__struct_fields__)
    return {
        "id": key.id,
        "scopes": list(key.scopes),
        "hashes": len(key.hashes),
        "expires": None if key.expires is None else key.expires.isoformat(timespec="seconds"),
        "limits": {name: value for name, value in set_ones if value is not None},
        "charged_tokens": used,
    }

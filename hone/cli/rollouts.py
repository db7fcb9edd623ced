"""`hone rollouts`: what is stored of the agents' attempts."""

import argparse

import msgspec

from capture.store import Store
from capture.types import Rollout
from hone.cli.common import add_config, add_json, load_config, open_store, print_json

TEXT_MAX = 2_000


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of the verb."""
    verbs = parser.add_subparsers(dest="what", required=True, metavar="ls|show")
    listing = verbs.add_parser("ls", help="one line a rollout, newest last")
    listing.add_argument("--run", help="of this run only")
    listing.add_argument("--mode", choices=("train", "eval", "observe"))
    listing.add_argument("--state", action="append", default=[], help="may be given several times")
    listing.add_argument("--limit", type=int, default=50)
    listing.add_argument("--after", help="page: only ids after this one")
    show = verbs.add_parser("show", help="one rollout with its conversation")
    show.add_argument("id")
    for sub in (listing, show):
        add_config(sub)
        add_json(sub)


def run(arguments: argparse.Namespace) -> int:
    """List rollouts, or show one."""
    store = open_store(load_config(arguments))
    try:
        return _list(store, arguments) if arguments.what == "ls" else _show(store, arguments)
    finally:
        store.close()


def _list(store: Store, arguments: argparse.Namespace) -> int:
    found = store.rollouts(
        run_id=arguments.run,
        mode=arguments.mode,
        states=arguments.state,
        limit=arguments.limit,
        after=arguments.after,
    )
    if arguments.json:
        print_json([_public(rollout) for rollout in found])
        return 0
    for rollout in found:
        reward = "" if rollout.reward is None else f"{rollout.reward:.3f}"
        reason = rollout.drop_reason or rollout.status or ""
        print(
            f"{rollout.id}  {rollout.mode:<8}{rollout.state:<13}{_version(rollout):<5}"
            f"  {rollout.call_count:>3} calls  {reward:>7}  {rollout.scenario_id or ''}  {reason}"
        )
    return 0


def _show(store: Store, arguments: argparse.Namespace) -> int:
    rollout, calls = store.rollout(arguments.id), store.calls(arguments.id)
    if arguments.json:
        print_json({"rollout": _public(rollout), "calls": calls})
        return 0
    print(f"{rollout.id}: {rollout.mode}, {rollout.state}, {_version(rollout)}, reward {rollout.reward}")
    for name, value in rollout.scores.items():
        print(f"  {name} = {value:g}")
    if rollout.reward_error:
        print(rollout.reward_error)
    if calls:
        last = calls[-1]
        for message in [*last.messages, *([last.response] if last.response else [])]:
            text = message.get("content") or message.get("tool_calls") or ""
            print(f"[{message.get('role')}] {str(text)[:TEXT_MAX]}")
    return 0


def _public(rollout: Rollout) -> Rollout:
    return msgspec.structs.replace(rollout, secret_hash=None)


def _version(rollout: Rollout) -> str:
    return "-" if rollout.policy_version is None else f"v{rollout.policy_version}"

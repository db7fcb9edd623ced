"""The options that choose stored rollouts; several verbs have them."""

import argparse
import re
import time
from datetime import datetime
from typing import Any, get_args

from capture.types import FinishStatus, Mode, RolloutState
from hone.cli.common import positive
from hone.traffic.filters import Filters

_UNITS = {"s": 1, "m": 60, "h": 3600, "d": 86400, "w": 604800}


def add_filters(parser: argparse.ArgumentParser) -> None:
    """The options that `filters` reads."""
    group = parser.add_argument_group("which rollouts")
    group.add_argument("--run", help="of this run only")
    group.add_argument("--mode", choices=get_args(Mode))
    group.add_argument("--policy", help="of the policy of this name")
    group.add_argument("--model", help="with a call that asked for this model")
    group.add_argument("--since", type=moment, metavar="WHEN", help="opened since: 90m, 2d, 2026-01-31T12:00")
    group.add_argument("--min-reward", type=float, metavar="R")
    group.add_argument("--max-reward", type=float, metavar="R")
    several: dict[str, Any] = {"action": "append", "default": [], "help": "may be given several times"}
    group.add_argument("--scenario", metavar="ID", **several)
    group.add_argument("--status", choices=get_args(FinishStatus), metavar="STATUS", **several)
    group.add_argument("--state", choices=get_args(RolloutState), metavar="STATE", **several)


def add_best_of(parser: argparse.ArgumentParser) -> None:
    """`--best-of`."""
    text = "of each scenario only the N rollouts with the highest reward"
    parser.add_argument("--best-of", type=positive, metavar="N", help=text)


def filters(arguments: argparse.Namespace) -> Filters:
    """What the options say."""
    return Filters(
        run=arguments.run,
        mode=arguments.mode,
        states=arguments.state,
        scenarios=arguments.scenario,
        statuses=arguments.status,
        min_reward=arguments.min_reward,
        max_reward=arguments.max_reward,
        policy=arguments.policy,
        model=arguments.model,
        since=arguments.since,
    )


def moment(text: str) -> float:
    """`90m`, `2d` (so long ago), or a date with or without a time, as Unix seconds."""
    ago = re.fullmatch(r"(\d+(?:\.\d+)?)([smhdw])", text)
    if ago is not None:
        return time.time() - float(ago[1]) * _UNITS[ago[2]]
    try:
        return datetime.fromisoformat(text).timestamp()
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not like 90m, 2d or 2026-01-31T12:00") from None

"""Which stored rollouts are meant; what the store has no index for is asked of one page at a time."""

import argparse
import re
import time
from collections.abc import Callable, Iterator
from datetime import datetime
from typing import get_args

import msgspec

from capture.errors import NotFound
from capture.store import Store
from capture.types import FinishStatus, Mode, Rollout, RolloutState

PAGE = 500
_UNITS = {"s": 1, "m": 60, "h": 3600, "d": 86400, "w": 604800}

Seen = Callable[[int], object]  # told how many rollouts were looked at so far


class Filters(msgspec.Struct, frozen=True, kw_only=True):
    """Rollouts that fit all of them; what is empty lets everything through."""

    run: str | None = None
    mode: str | None = None
    states: list[str] = []
    scenarios: list[str] = []
    statuses: list[str] = []
    min_reward: float | None = None  # a bound on rewards leaves out rollouts without one
    max_reward: float | None = None
    policy: str | None = None
    model: str | None = None  # name that one of its calls asked for: reads the calls
    since: float | None = None  # Unix seconds, of its opening

    def __str__(self) -> str:
        """As it was said on the command line; empty if nothing was."""
        values: dict[str, list[object]] = {
            "run": [self.run],
            "mode": [self.mode],
            "state": [*self.states],
            "scenario": [*self.scenarios],
            "status": [*self.statuses],
            "min-reward": [self.min_reward],
            "max-reward": [self.max_reward],
            "policy": [self.policy],
            "model": [self.model],
            "since": [None if self.since is None else _date(self.since)],
        }
        said = [(name, value) for name, given in values.items() for value in given if value is not None]
        return " ".join(f"--{name} {value}" for name, value in said)

    def nothing(self) -> NotFound:
        """The error that no rollout fits."""
        said = str(self)
        return NotFound(f"no rollout fits {said}" if said else "the store has no rollouts")

    def fits(self, rollout: Rollout) -> bool:
        """Whether its row fits; its calls are not looked at."""
        reward = rollout.reward
        return (
            (not self.scenarios or rollout.scenario_id in self.scenarios)
            and (not self.statuses or rollout.status in self.statuses)
            and (self.min_reward is None or (reward is not None and reward >= self.min_reward))
            and (self.max_reward is None or (reward is not None and reward <= self.max_reward))
            and (self.policy is None or rollout.policy == self.policy)
            and (self.since is None or rollout.created_at >= self.since)
        )


def matching(
    store: Store, filters: Filters, *, after: str | None = None, seen: Seen | None = None
) -> Iterator[Rollout]:
    """The rollouts that fit, in the order of their ids; at most `PAGE` of them are held at once."""
    looked_at = 0
    while True:
        page = store.rollouts(
            run_id=filters.run, mode=filters.mode, states=filters.states, limit=PAGE, after=after
        )
        for rollout in page:
            if filters.fits(rollout) and _asked(store, rollout, filters.model):
                yield rollout
        looked_at += len(page)
        if seen is not None:
            seen(looked_at)
        if len(page) < PAGE:
            return
        after = page[-1].id


def _asked(store: Store, rollout: Rollout, model: str | None) -> bool:
    return model is None or any(call.model == model for call in store.calls(rollout.id))


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
    several = {"action": "append", "default": [], "help": "may be given several times"}
    group.add_argument("--scenario", metavar="ID", **several)  # type: ignore[arg-type]
    group.add_argument("--status", choices=get_args(FinishStatus), metavar="STATUS", **several)  # type: ignore[arg-type]
    group.add_argument("--state", choices=get_args(RolloutState), metavar="STATE", **several)  # type: ignore[arg-type]


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


def _date(seconds: float) -> str:
    return datetime.fromtimestamp(seconds).isoformat(timespec="seconds")

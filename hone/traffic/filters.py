"""Which stored rollouts are meant; what the store has no index for is asked of one page at a time."""

from collections.abc import Callable, Iterator
from datetime import datetime

import msgspec

from capture.errors import NotFound
from capture.store import Store
from capture.types import Rollout
from rewards.judge import SCENARIO

PAGE = 500

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


def of_a_judge(rollout: Rollout, filters: Filters) -> bool:
    """Whether a reward script's judge asked it, and nobody asked for such rollouts by their scenario."""
    return rollout.scenario_id == SCENARIO and SCENARIO not in filters.scenarios


def _asked(store: Store, rollout: Rollout, model: str | None) -> bool:
    return model is None or any(call.model == model for call in store.calls(rollout.id))


def _date(seconds: float) -> str:
    return datetime.fromtimestamp(seconds).isoformat(timespec="seconds")

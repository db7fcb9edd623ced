"""Scoring stored rollouts again: which ones may be, and whole groups at a time."""

import math
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from typing import Final

import msgspec

from capture.errors import Conflict, RewardFrozen
from capture.reasons import JUDGE
from capture.store import Rescored, Store
from capture.types import Rollout
from rewards.groups import MEMBERS_MAX
from rewards.report import Failure, failures
from rewards.trial import Attempt, Trial, bounded, row_of

TRIES = 3  # where something happens to a rollout while it is scored
FAILURES_KEPT = 1_000

TAKEN: Final = "taken"
BROKEN: Final = "broken"
MOVED: Final = "moved"
LEFT_ALONE: Final[dict[str, str]] = {
    TAKEN: "a batch took it: its reward is frozen",
    "unfinished": "it is not through yet: control scores it",
    "failed": "the infrastructure failed; there is nothing to score",
    "unscored": "it was dropped before it was scored",
    "judge": "it is a judge's own",
    "current": "this script has scored it already; --again does it again",
    BROKEN: "the script failed on it, or on another member of its group, which keeps its scores",
    MOVED: "something happened to it meanwhile; run this again",
}
"""Why a rollout keeps the score that it has -> what that means."""


class Rescoring(msgspec.Struct, frozen=True, kw_only=True):
    """What was done, or (in a dry run) would be."""

    rollouts: int
    groups: int  # of them that are in the pipeline
    left_alone: dict[str, int]
    changed: int = 0  # rollouts whose reward is another one now
    revived: int = 0  # that a script had failed on, back in the pipeline
    mean_before: float | None = None  # over those that had a reward before
    mean_after: float | None = None  # over all; None: nothing was scored
    failures: list[Failure] = []


class Unit(msgspec.Struct, frozen=True):
    """What is scored together: a group in the pipeline, or one rollout outside of any."""

    rollout_ids: list[str]
    group_id: str | None = None


def settled(rollout: Rollout) -> str | None:
    """Why the rollout's score cannot be replaced, by its own row; None: it can. Taking freezes a reward, and
    what had no turn yet gets its score from control."""
    if rollout.batch_id is not None or rollout.state in ("taken", "trained"):
        return TAKEN
    if rollout.state == "failed" or rollout.status == "failed":
        return "failed"
    if rollout.drop_reason == JUDGE:
        return "judge"
    if rollout.state in ("open", "sealed", "ingested"):
        return "unfinished"
    return "unscored" if rollout.reward is None and rollout.reward_error is None else None


class Plan:
    """The units of the rollouts that fit. One member that fits brings in its whole group."""

    def __init__(self, store: Store, script_hash: str, *, again: bool) -> None:
        self.left_alone = Counter[str]()
        self._store = store
        self._script_hash = script_hash
        self._again = again

    def units(self, rollouts: Iterable[Rollout]) -> list[Unit]:
        """Ids only, so that many may fit."""
        groups: dict[str, None] = {}
        singles: list[str] = []
        for rollout in rollouts:
            reason = settled(rollout)
            if reason is not None:
                self.left_alone[reason] += 1
            elif rollout.group_id is not None and self._in_pipeline(rollout):
                groups[rollout.group_id] = None
            elif self._current([rollout]):
                self.left_alone["current"] += 1
            else:
                singles.append(rollout.id)
        found = [unit for group_id in groups if (unit := self.group(group_id)).rollout_ids]
        return [*found, *(Unit([rollout_id]) for rollout_id in singles)]

    def group(self, group_id: str) -> Unit:
        """The members that are compared or may come back; none if this script scored them all."""
        every = self._store.rollouts(group_id=group_id, limit=MEMBERS_MAX)
        members = [one for one in every if self._in_pipeline(one) and settled(one) is None]
        if self._current(members):
            self.left_alone["current"] += len(members)
            return Unit([], group_id)
        return Unit([member.id for member in members], group_id)

    def _in_pipeline(self, rollout: Rollout) -> bool:
        if not rollout.for_training:
            return False
        if rollout.state == "reward_error" and rollout.group_id is not None:
            return self._store.group(rollout.group_id).state == "open"
        return rollout.drop_reason is None

    def _current(self, rollouts: list[Rollout]) -> bool:
        return not self._again and all(
            one.script_hash == self._script_hash and one.reward_error is None for one in rollouts
        )


class Rescorer:
    """One pass over the units, and its sums."""

    def __init__(self, trial: Trial, store: Store, plan: Plan, *, group_size: int) -> None:
        self._trial = trial
        self._store = store
        self._plan = plan
        self._group_size = group_size
        self._broken: list[Attempt] = []
        self._saved = Sums()

    async def run(self, units: Iterable[Unit], seen: Callable[[int], object]) -> Rescoring:
        """Score the units and store what comes out; `seen` is told how many rollouts are through."""
        done = 0
        async for count in bounded(self._score, units, self._trial.settings.workers):
            done += count
            seen(done)
        return self._saved.result(self._plan.left_alone, failures([row_of(one) for one in self._broken]))

    async def _score(self, unit: Unit) -> int:
        """One unit; how many rollouts it had."""
        count, reason = len(unit.rollout_ids), None
        for _ in range(TRIES):
            reason = await self._try(unit)
            if reason != MOVED:
                break
            if unit.group_id is not None:  # another member may have its score by now
                unit = self._plan.group(unit.group_id)
        if reason is not None:
            self._plan.left_alone[reason] += len(unit.rollout_ids)
        return count

    async def _try(self, unit: Unit) -> str | None:
        """Why the unit keeps its scores; None: it has new ones."""
        rollouts = [self._store.rollout(rollout_id) for rollout_id in unit.rollout_ids]
        for reason in filter(None, map(settled, rollouts)):
            return reason
        attempts = [attempt async for attempt in self._trial.over(rollouts)]
        failed = [one for one in attempts if not one.scored]
        self._broken += failed[: FAILURES_KEPT - len(self._broken)]
        if any(one.rollout.state != "reward_error" for one in failed):
            return BROKEN
        scored = [one for one in attempts if one.scored]
        try:
            self._store.rescore([_rescored(one) for one in scored], group_size=self._group_size)
        except RewardFrozen:
            return TAKEN
        except Conflict:
            return MOVED
        self._plan.left_alone[BROKEN] += len(failed)
        after = [self._store.rollout(one.rollout.id) for one in scored]
        self._saved.add([one.rollout for one in scored], after, unit)
        return None


def _rescored(attempt: Attempt) -> Rescored:
    return Rescored(
        rollout_id=attempt.rollout.id,
        reward=attempt.reward,
        scores=attempt.scores,
        script_hash=attempt.outcome.script_hash,
        posted=attempt.posted,
    )


class Sums:
    """What was replaced by what."""

    def __init__(self) -> None:
        self._before: list[float] = []
        self._after: list[float] = []
        self._changed = self._revived = self._groups = 0

    def add(self, before: Sequence[Rollout], after: Sequence[Rollout], unit: Unit) -> None:
        """The rollouts of one unit, before and after."""
        self._groups += unit.group_id is not None and bool(after)
        for old, new in zip(before, after, strict=True):
            self._changed += old.reward != new.reward
            self._revived += old.drop_reason == "reward_error" and new.drop_reason is None
            self._before += [] if old.reward is None else [old.reward]
            self._after += [] if new.reward is None else [new.reward]

    def result(self, left_alone: Counter[str], broken: list[Failure]) -> Rescoring:
        """All of it."""
        return Rescoring(
            rollouts=len(self._after),
            groups=self._groups,
            changed=self._changed,
            revived=self._revived,
            mean_before=_mean(self._before),
            mean_after=_mean(self._after),
            left_alone=dict(+left_alone),
            failures=broken,
        )


def _mean(values: list[float]) -> float | None:
    return math.fsum(values) / len(values) if values else None

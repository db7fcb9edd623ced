"""`hone reward test`: a script over the newest stored rollouts, before anything trains on it."""

from collections import Counter, deque
from collections.abc import Callable
from pathlib import Path
from typing import Final

import msgspec

from capture.errors import NotFound
from capture.reasons import JUDGE
from capture.store import Store
from capture.types import Rollout
from hone.traffic.filters import Filters, matching
from rewards.advice import advise
from rewards.report import Report, Row, report
from rewards.script import digest
from rewards.settings import Settings
from rewards.trial import Trial, row_of

Seen = Callable[[int], object]

LEFT_OUT: Final[dict[str, str]] = {
    "unfinished": "open, or some of their calls are not read yet",
    "failed": "the infrastructure failed; there is nothing to score",
    "judge": "they are a judge's own calls",
    "older": "--limit takes the newest",
}
"""Why rollouts that fit the filters are left out -> what that means."""


class Tested(msgspec.Struct, frozen=True, kw_only=True):
    """What a script makes of stored rollouts."""

    script: str
    script_hash: str
    left_out: dict[str, int]
    report: Report
    advice: list[str]
    rows: list[Row]


def left_out(rollout: Rollout) -> str | None:
    """Why the script is not run on a rollout; None: it is."""
    if rollout.status == "failed" or rollout.state == "failed":
        return "failed"
    if rollout.state in ("open", "sealed") or rollout.sealed_at is None:
        return "unfinished"
    return "judge" if rollout.drop_reason == JUDGE else None


async def test(
    store: Store, settings: Settings, filters: Filters, *, limit: int, group_size: int, seen: Seen
) -> Tested:
    """Run `settings.script` over the newest `limit` rollouts that fit. `ConfigError` if it does not load,
    `NotFound` if no rollout can be scored. Nothing is stored."""
    script_hash = digest(Path(settings.script))
    out = Counter[str]()
    newest: deque[str] = deque(maxlen=limit)
    for rollout in matching(store, filters):
        reason = left_out(rollout)
        if reason is None:
            out["older"] += len(newest) == limit
            newest.append(rollout.id)
        else:
            out[reason] += 1
    if not newest:
        left = "; ".join(f"{count} left out ({LEFT_OUT[reason]})" for reason, count in (+out).items())
        raise NotFound(f"no rollout can be scored: {left}") if left else filters.nothing()
    rows: list[Row] = []
    weights: dict[str, float] = {}
    async with Trial(store, settings, script_hash) as trial:
        async for attempt in trial.over(store.rollout(id) for id in newest):
            rows.append(row_of(attempt))
            weights = weights or getattr(attempt.outcome, "weights", {})
            seen(len(rows))
    rows.sort(key=lambda row: row.rollout_id)
    found = report(rows, weights=weights, group_size=group_size)
    return Tested(
        script=settings.script,
        script_hash=script_hash,
        left_out=dict(+out),
        report=found,
        advice=advise(found, rows, settings),
        rows=rows,
    )

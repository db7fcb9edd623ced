"""`hone reward rescore`: the script of the settings over stored rollouts."""

import asyncio
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec

from capture.store import Store
from hone.traffic.filters import Filters, matching
from hone.trial_screen import failure_lines
from rewards.rescore import LEFT_ALONE, Plan, Rescorer, Rescoring
from rewards.script import digest
from rewards.settings import Settings
from rewards.steps import LEASE
from rewards.trial import Trial

Seen = Callable[[int], object]


class Rescored(msgspec.Struct, frozen=True, kw_only=True):
    """What `hone reward rescore` did, or in a dry run would do."""

    script: str
    script_hash: str
    dry_run: bool
    control_runs: bool  # another process scores new rollouts meanwhile
    result: Rescoring


def rescore(
    store: Store,
    settings: Settings,
    filters: Filters,
    *,
    again: bool = False,
    dry_run: bool = False,
    looked: Seen,
    scored: Seen,
) -> Rescored:
    """Give what fits and may be scored again the score of `settings.script`. `ConfigError` if that does not
    load, `NotFound` if no rollout fits."""
    script_hash = digest(Path(settings.script))
    plan = Plan(store, script_hash, again=again)
    units = plan.units(matching(store, filters, seen=looked))
    if not units and not plan.left_alone.total():
        raise filters.nothing()
    if dry_run:
        groups = sum(unit.group_id is not None for unit in units)
        count = sum(len(unit.rollout_ids) for unit in units)
        result = Rescoring(rollouts=count, groups=groups, left_alone=dict(plan.left_alone))
    else:

        async def run() -> Rescoring:
            async with Trial(store, settings, script_hash) as trial:
                rescorer = Rescorer(trial, store, plan, group_size=settings.passive.group_size)
                return await rescorer.run(units, scored)

        result = asyncio.run(run())
    return Rescored(
        script=settings.script,
        script_hash=script_hash,
        dry_run=dry_run,
        control_runs=bool(store.live_leases(LEASE)),
        result=result,
    )


def lines(done: Rescored) -> Iterator[str]:
    """As text."""
    result = done.result
    groups = f", {result.groups} groups among them" if result.groups else ""
    did = "would score" if done.dry_run else "scored"
    yield f"{did} {result.rollouts} rollouts with {done.script}{groups}"
    if not done.dry_run and result.mean_after is not None:
        before = "none" if result.mean_before is None else f"{result.mean_before:.3f}"
        yield f"{result.changed} rewards changed; mean {before} before, {result.mean_after:.3f} now"
    if result.revived:
        yield f"{result.revived} that the script had failed on are to be trained again"
    for reason, count in sorted(result.left_alone.items()):
        yield f"left alone: {count} ({LEFT_ALONE[reason]})"
    for failure in result.failures:
        yield from ("", *failure_lines(failure))
    if done.control_runs and result.rollouts:
        yield (
            "control runs: it scores new rollouts with the script as it was until it replaces its workers "
            "(rewards.traces_per_worker) or is started anew"
        )

"""How a run begins and ends, seen from the process that supervises it.

The learner ends at `steps_max`; the runner opens no group that it could not use, and ends when what
it plays has ended, so no call is cut off. The end itself is one store transaction: `end_run`.
A run that is to end early gets a mark in the store (`drain`), which both processes look for.
"""

import asyncio
import math
import time
from collections.abc import Callable

import msgspec

from capture.errors import ConfigError
from capture.store import Store
from hone.supervisor import Supervisor
from learner.settings import Settings

DRAIN = "drain"  # kind of the metrics row that asks a run to end
ENDED = "run_ended"  # why what was not trained by then is dropped
POLL_S = 0.5
SETTLE_S = 60.0


class Ending(msgspec.Struct, frozen=True, kw_only=True):
    """How a run ended."""

    reason: str  # "steps", "epochs" or "wall"
    dropped: int  # rollouts that no batch had
    settled: bool  # nothing was left to read, and every version was on its way


def choose_run(store: Store, policy: str, wanted: str | None) -> str:
    """The run to work on: the wanted one, else the newest that has not ended, else a new name."""
    latest = store.latest_run()
    if wanted is None and latest is not None:
        lineage = store.lineage(latest)
        if not lineage.ended and lineage.policy == policy:
            return latest
    if wanted is not None:
        return wanted
    return time.strftime("%Y%m%d-%H%M%S")


def refuse_ended(store: Store, run_id: str) -> None:
    """`ConfigError` for a run that is over: its name cannot be used again."""
    if store.lineage(run_id).ended:
        raise ConfigError(f"run {run_id} has ended; name another one with --run")


def drained(store: Store, run_id: str) -> bool:
    """Whether the run has been asked to end."""
    return bool(store.get_metrics(run_id, DRAIN))


def groups_needed(store: Store, run_id: str, learner: Settings) -> int | None:
    """How many groups the run can still use, outstanding ones included; None: any number.

    A batch without an advantage somewhere makes fewer steps than it could; then more groups are needed later.
    """
    if drained(store, run_id):
        return 0
    if learner.steps_max is None:
        return None
    steps = max(0, learner.steps_max - store.lineage(run_id).step)
    return math.ceil(steps / learner.steps_per_batch) * learner.groups_per_batch


def learner_should_stop(store: Store, run_id: str) -> bool:
    """Whether the run has ended or was asked to."""
    return store.lineage(run_id).ended or drained(store, run_id)


async def conduct(
    store: Store, run_id: str, supervisor: Supervisor, *, steps_max: int | None, wall_s: float | None
) -> Ending:
    """Watch a run until both its processes are through, then end it and let everything settle."""
    deadline = None if wall_s is None else time.monotonic() + wall_s
    while not _through(store, run_id, supervisor):
        if deadline is not None and time.monotonic() > deadline and not drained(store, run_id):
            store.put_metrics(run_id, DRAIN, {"reason": "wall", "at": time.time()})
        await asyncio.sleep(POLL_S)
    enough = steps_max is not None and store.lineage(run_id).step >= steps_max
    reason = "steps" if enough else "wall" if drained(store, run_id) else "epochs"
    dropped = store.end_run(run_id, ENDED)
    return Ending(reason=reason, dropped=dropped, settled=await settle(store, run_id))


def _through(store: Store, run_id: str, supervisor: Supervisor) -> bool:
    """Whether the runner has ended and the learner has, or has nothing left to wait for."""
    if supervisor.status("runner").state != "done":
        return False
    return supervisor.status("learn").state == "done" or not store.outstanding_groups(run_id)


async def settle(store: Store, run_id: str) -> bool:
    """Wait until every call was read, no token is pending and no version is half way."""
    policy = store.lineage(run_id).policy

    def settled() -> bool:
        on_the_way = any(version.state in ("committed", "published") for version in store.versions(policy))
        counts = store.counts(run_id)
        return not on_the_way and not counts.calls_not_ingested and not store.balance(policy).pending

    return await until(settled, SETTLE_S)


async def until(condition: Callable[[], bool], timeout_s: float) -> bool:
    """Whether the condition came true in time."""
    deadline = time.monotonic() + timeout_s
    while not condition():
        if time.monotonic() > deadline:
            return False
        await asyncio.sleep(POLL_S)
    return True

"""Pure decisions of the runner: how many groups may open, and what a dead runner left undone."""

from collections.abc import Sequence

import msgspec

from capture.types import Group, Rollout
from rollouts.settings import Settings


class Load(msgspec.Struct, frozen=True, kw_only=True):
    """What counts for admission at one moment."""

    outstanding: int  # groups open, closed or taken in the store: dropped and trained ones free their slot
    rollouts: int  # of this runner, playing or waiting for a free agent slot
    remaining: int  # groups that the epochs still hold
    needed: int | None = None  # groups that the run can still use, outstanding ones included; None: any


def groups_to_open(settings: Settings, load: Load) -> int:
    """Groups that may open now.

    At most `batches_outstanding_max` batches of groups are out at once, and none is opened before
    at least one of its rollouts can run. Versions do not count: nothing waits for a publish.
    """
    ahead = int(settings.batches_outstanding_max * settings.groups_per_batch)
    room = (ahead if load.needed is None else min(ahead, load.needed)) - load.outstanding
    free = settings.concurrency - load.rollouts
    startable = -(-free // settings.group_size)  # rounded up
    return max(0, min(room, startable, load.remaining))


class Slot(msgspec.Struct, frozen=True):
    """A rollout that a group still needs."""

    attempt: int
    replaces: str | None


class Repair(msgspec.Struct, frozen=True):
    """What brings an open group of a dead runner back to its declared size."""

    slots: list[Slot]  # to open, first
    abandoned: list[str]  # open rollouts whose agents are gone: to finish as failed, after that


def repair(group: Group, rollouts: Sequence[Rollout], retries: int) -> Repair:
    """Plan for an open group with these rollouts (all attempts) of which no agent runs any more.

    A rollout that died with its runner is always attempted again; one that failed before that only
    while it has retries left; places that were never opened are opened.
    """
    replaced = {rollout.replaces for rollout in rollouts}
    heads = [rollout for rollout in rollouts if rollout.id not in replaced]
    slots = [
        Slot(head.attempt + 1, head.id)
        for head in heads
        if head.state == "open" or (head.state == "failed" and head.attempt < retries)
    ]
    slots += [Slot(0, None)] * max(0, group.size - len(heads))
    return Repair(slots, [rollout.id for rollout in rollouts if rollout.state == "open"])

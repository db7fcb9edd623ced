"""When a group closes, and on which of its members."""

from collections.abc import Collection, Sequence

import msgspec

from capture.errors import Conflict
from capture.store import Store
from capture.types import Group, Rollout
from rewards.settings import Settings

MEMBERS_MAX = 10_000
AGENT_FAILURES = frozenset({"agent_error", "timeout", "max_calls", "context_overflow"})
RUNNING = frozenset({"open", "sealed", "ingested"})


class Wait(msgspec.Struct, frozen=True):
    """Not yet."""


class Close(msgspec.Struct, frozen=True):
    """Close on these scored members; the others leave with a reason."""

    members: list[str]
    drops: dict[str, str]  # rollout id -> reason


def decide(group: Group, rollouts: Sequence[Rollout], now: float, settings: Settings) -> Wait | Close:
    """What to do with an open group whose rollouts (all attempts) are these. Pure.

    A declared group (``size > 0``) closes when that many members are terminal, a replaced attempt being
    represented by its replacement. Past its deadline any group closes on the scored members if they are
    enough to compare (`Group.members_min`), else as soon as nothing of it runs any more (the store then
    drops it as too small).
    """
    members = current(rollouts)
    complete = 0 < group.size <= len(members) and all(terminal(member, settings) for member in members)
    if not complete and not overdue(group, members, now, settings):
        return Wait()
    kept = [member.id for member in members if drop_reason(member, settings) is None]
    drops = {each.id: drop_reason(each, settings) or "replaced" for each in rollouts if each.id not in kept}
    return Close(kept, drops)


def current(rollouts: Sequence[Rollout]) -> list[Rollout]:
    """Without the attempts that a later one replaces."""
    replaced = {rollout.replaces for rollout in rollouts}
    return [rollout for rollout in rollouts if rollout.id not in replaced]


def terminal(member: Rollout, settings: Settings) -> bool:
    """Nothing that happens to this member can change the group any more."""
    if member.state == "failed":
        return member.attempt >= settings.infrastructure_retries
    return member.state not in RUNNING


def overdue(group: Group, members: Sequence[Rollout], now: float, settings: Settings) -> bool:
    """Past the deadline, with enough members or with no hope for more."""
    if now - group.created_at < settings.group_deadline_s:
        return False
    scored = sum(drop_reason(member, settings) is None for member in members)
    return scored >= group.members_min or not any(member.state in RUNNING for member in members)


def drop_reason(member: Rollout, settings: Settings) -> str | None:
    """Why the member is not compared; None: it is."""
    if member.state == "scored":
        failed = settings.on_agent_failure == "drop" and member.status in AGENT_FAILURES
        return "agent_failure" if failed else None
    return "group_deadline" if member.state in RUNNING else member.drop_reason or member.state


class Grouper:
    """Closes the groups that `decide` says are due."""

    def __init__(self, store: Store, settings: Settings) -> None:
        self._store = store
        self._settings = settings

    def step(self, only: Collection[str] | None = None) -> int:
        """Look at the declared groups (of these ids) and those of observed rollouts that may be due, and
        close what is; how many closed."""
        closed = 0
        declared = [one for one in self._store.open_groups() if only is None or one.id in only]
        for group in [*declared, *self._store.gathered_groups(self._settings.group_deadline_s)]:
            rollouts = self._store.rollouts(group_id=group.id, limit=MEMBERS_MAX)
            decision = decide(group, rollouts, self._store.now(), self._settings)
            if isinstance(decision, Close):
                closed += self._close(group.id, decision)
        return closed

    def _close(self, group_id: str, decision: Close) -> bool:
        try:
            self._store.close_group(group_id, decision.members, decision.drops)
        except Conflict:  # a member left meanwhile (expired, run ended): look again next time
            return False
        return True

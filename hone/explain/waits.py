"""The sentences about rollouts that are still on their way to a batch. Pure."""

from collections import Counter

from hone.explain.drops import ungrouped
from hone.explain.facts import Facts, alive_members
from hone.explain.words import Verdict, ago, are, count, duration, named, no_control, no_learner, number


def opened(facts: Facts) -> Verdict:
    """Its agent is at work."""
    rollout, history = facts.rollout, facts.history
    calls = count(rollout.call_count, "call") if rollout.call_count else "no call"
    last = ""
    if history.calls_in_flight:
        last = f", {history.calls_in_flight} of them not answered yet"
        calls = count(rollout.call_count + history.calls_in_flight, "call")
    elif rollout.last_call_at is not None:
        last = f", the last {ago(facts, rollout.last_call_at)}"
    idle = facts.setting("rewards.seal.idle_s")
    after = f" after {number(idle)} s" if idle else " some time"
    return Verdict(
        kind="open",
        sentence=f"Not yet: it is still open, with {calls} so far{last}; it ends when its agent is finished "
        f"or{after} without a call (rewards.seal.idle_s){no_control(facts)}.",
        setting="rewards.seal.idle_s",
    )


def sealed(facts: Facts) -> Verdict:
    """It is finished, and its call graph is not settled."""
    waiting = sum(not call.late for call in facts.history.waiting)
    total = waiting + sum(not call.late for call in facts.calls)
    what = "its call graph is not settled yet"
    if waiting:
        what = f"{waiting} of its {count(total, 'call')} {are(waiting)} not read yet"
    return Verdict(kind="sealed", sentence=f"Not yet: it is finished, but {what}{no_control(facts)}.")


def ingested(facts: Facts) -> Verdict:
    """It has no reward yet."""
    required = facts.setting("rewards.require") or []
    missing = [name for name in required if name not in facts.history.posted]
    if missing:
        wait_s = facts.setting("rewards.wait_s")
        most = f" for at most {number(wait_s)} s" if wait_s else ""
        scores = " and ".join(repr(name) for name in missing)
        return Verdict(
            kind="requires_score",
            sentence=f"Not yet: it waits{most} for the score {scores} to be posted (rewards.require)"
            f"{no_control(facts)}.",
            setting="rewards.require",
        )
    return Verdict(
        kind="ingested",
        sentence=f"Not yet: it waits for its reward from the script{no_control(facts)}.",
        setting="rewards.script",
    )


def scored(facts: Facts) -> Verdict:
    """Its group is open."""
    group, deadline = facts.history.group, facts.setting("rewards.group_deadline_s")
    if group is None:
        return ungrouped(facts)
    overdue = deadline is not None and facts.now - group.created_at >= deadline
    late = f"past its deadline ({named(facts, 'rewards.group_deadline_s')})"
    have = sum(member.state == "scored" for member in facts.history.members)
    if overdue and have >= group.members_min:
        return _group_open(facts, f"is {late} and closes next, on the {have} members that are scored")
    if not group.size:
        then = f" {number(deadline)} s after it was opened" if deadline else " in time"
        return _group_open(facts, f"has no declared size and closes{then} (rewards.group_deadline_s)")
    missing = _missing(facts, group.size)
    if not missing:
        return _group_open(facts, f"has all its {count(group.size, 'member')} and closes next")
    total = sum(missing.values())
    parts = ", ".join(f"{amount} {what}" for what, amount in missing.items())
    limit = f"at most until its deadline ({named(facts, 'rewards.group_deadline_s')})"
    if overdue:
        limit = f"{late} only until {group.members_min} {are(group.members_min)} scored"
    more = "more rollout" if total == 1 else "more rollouts"
    return _group_open(
        facts, f"waits for {total} {more} of {group.size} ({parts}), {limit}", kind="group_waits"
    )


def _group_open(facts: Facts, what: str, *, kind: str = "group_open") -> Verdict:
    return Verdict(
        kind=kind,
        sentence=f"Not yet: its group {facts.rollout.group_id} {what}{no_control(facts)}.",
        setting="rewards.group_deadline_s",
    )


def _missing(facts: Facts, size: int) -> dict[str, int]:
    """What the group's other places are waiting for."""
    members = alive_members(facts.history)
    retries = facts.setting("train.infrastructure_retries") or 0
    found = Counter[str]()
    for member in members:
        if member.state == "open":
            found["running"] += 1
        elif member.state in ("sealed", "ingested"):
            found["without a score"] += 1
        elif member.state == "failed" and member.attempt < retries:
            found["to be repeated"] += 1
    if size > len(members):
        found["still to come" if facts.rollout.passive else "not started"] = size - len(members)
    return dict(found)


def grouped(facts: Facts) -> Verdict:
    """Its group is closed, and no batch has it."""
    group, wanted = facts.history.group, facts.setting("train.groups_per_batch")
    name = "its group" if group is None else f"its group {group.id}"
    takes = ""
    if wanted:
        takes = (
            f", which takes {wanted} at once (train.groups_per_batch; {facts.history.groups_ready} "
            f"{are(facts.history.groups_ready)} ready)"
        )
        wait_s = facts.setting("train.batch_wait_s")
        takes += f", or fewer after {number(wait_s)} s (train.batch_wait_s)" if wait_s else ""
    return Verdict(
        kind="grouped",
        sentence=f"Not yet: {name} is closed and waits for the learner{takes}{no_learner(facts)}.",
        setting="train.groups_per_batch",
    )


def taken(facts: Facts) -> Verdict:
    """The learner has it."""
    batch = facts.history.batch
    since = "" if batch is None else f", for {duration(facts.now - batch.taken_at)} now"
    nobody = no_learner(facts).removesuffix(" starts one")
    nobody += " takes the batch up again" if nobody else ""
    return Verdict(
        kind="taken",
        sentence=f"Not yet: the learner has it in batch {facts.rollout.batch_id}{since}{nobody}.",
    )

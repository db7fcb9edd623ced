"""The sentences about rollouts that left before they were trained. Pure."""

from collections import Counter
from collections.abc import Callable

from capture.reasons import DROPPED
from capture.types import Rollout
from hone.explain.facts import Facts, alive_members, behind, head_at
from hone.explain.passive import alone, lonely
from hone.explain.words import (
    SETTINGS,
    Verdict,
    count,
    error_line,
    named,
    number,
    sentence_of,
    shortened,
    version_of,
)

_RETRIES = "train.infrastructure_retries"


def dropped(facts: Facts) -> Verdict:
    """The sentence for a rollout whose state is `dropped`, `failed` or `reward_error`."""
    rollout = facts.rollout
    return _DROPS.get(rollout.drop_reason or rollout.state, _plain)(facts)


def _plain(facts: Facts) -> Verdict:
    """For reasons that need no figures, and those that nobody told us of."""
    rollout = facts.rollout
    reason = rollout.drop_reason or rollout.state
    if reason == facts.history.run_end_reason:
        return _run_ended(facts, reason)
    why = f"{sentence_of(reason)} ({reason})" if reason in DROPPED else f"it was dropped ({reason})"
    return Verdict(kind=reason, sentence=f"Not trained: {why}.", setting=SETTINGS.get(reason))


def _run_ended(facts: Facts, reason: str) -> Verdict:
    """A run that ends with its scenarios trains what it has: `steps_max` or `wall_s` cut this off."""
    lineage, steps_max = facts.history.lineage, facts.setting("train.steps_max")
    setting = "train.wall_s" if facts.setting("train.wall_s") is not None else None
    if lineage is not None and steps_max is not None and lineage.step >= steps_max:
        setting = "train.steps_max"
    at = f" at step {lineage.step}" if lineage is not None else ""
    limit = f" ({named(facts, setting)})" if setting else ""
    return Verdict(
        kind=reason,
        sentence=f"Not trained: run {facts.rollout.run_id} ended{at}{limit} before a batch with it was "
        "committed.",
        setting=setting,
    )


def _failed(facts: Facts) -> Verdict:
    rollout, history = facts.rollout, facts.history
    again = next((member.id for member in history.members if member.replaces == rollout.id), None)
    broken = next((call for call in reversed(facts.calls) if call.error or call.status >= 500), None)
    why = "its runner could not run it to its end: see logs/runner.log"
    if broken is not None:
        why = f"call {broken.number}: {shortened(broken.error or f'status {broken.status}')}"
    retries = facts.setting("train.infrastructure_retries")
    then = f"; {again} repeats it" if again is not None else ""
    if again is None and retries is not None:
        over = history.run_end_reason is not None or (history.group and history.group.state != "open")
        left = "the last one" if rollout.attempt >= retries else f"not repeated{'' if over else ' yet'}"
        then = f"; it was attempt {rollout.attempt + 1} of {retries + 1}, {left} ({_RETRIES} = {retries})"
    return Verdict(
        kind="failed",
        sentence=f"Not trained: the infrastructure failed, not the agent ({why}){then}.",
        setting=_RETRIES,
    )


def _reward_error(facts: Facts) -> Verdict:
    if facts.rollout.reward is not None and not facts.rollout.reward_error:
        return Verdict(
            kind="reward_error",
            sentence="Not trained: the reward script failed at first, and it was scored again only when its "
            f"group had closed without it (its reward is {number(facts.rollout.reward)}).",
            setting="rewards.script",
        )
    text = facts.rollout.reward_error or "no error was kept"
    if text.startswith("no score"):  # nothing ran: the sentence says what was missing
        setting = "rewards.require" if "was posted within" in text else "rewards.script"
        return Verdict(kind="reward_error", sentence=f"Not trained: {shortened(text)}.", setting=setting)
    if text.startswith("no result after"):  # and then comes where it was at the deadline
        said = text.splitlines()[0].partition(";")[0]
        return Verdict(
            kind="reward_error",
            sentence=f"Not trained: the reward script gave {said} (rewards.timeout_s).",
            setting="rewards.timeout_s",
        )
    return Verdict(
        kind="reward_error",
        sentence=f"Not trained: the reward script failed: {error_line(text)}.",
        setting="rewards.script",
    )


def _stale(facts: Facts) -> Verdict:
    drop, group, rollout = facts.history.drop, facts.history.group, facts.rollout
    if drop is None or group is None or group.closed_at is None or drop.at < group.closed_at:
        return Verdict(
            kind="pin_expired",
            sentence=f"Not trained: it took so long that its version {version_of(rollout)} had to make "
            "room for newer ones on the engine before it was finished (stale; "
            f"{named(facts, 'engine.versions_max')}).",
            setting="engine.versions_max",
        )
    head = head_at(facts, drop.at)
    others = [m for m in facts.history.members if m.drop_reason == "stale" and m.id != rollout.id]
    ages = [(_age(facts, member, head), member) for member in [rollout, *others]]
    steps, oldest = max(ages, key=lambda one: one[0])  # its own where others are as old
    whose = "its tokens" if oldest.id == rollout.id else f"the tokens of its member {oldest.id}"
    how = f"were {count(steps, 'version')} behind v{head}, more than {named(facts, 'train.staleness_max')}"
    if behind(facts, oldest.policy_version, head) is None:
        how = f"are not of the lineage of v{head}"
    if rollout.passive:
        how += "; what is observed is served the promoted version, which may be far behind"
    return Verdict(
        kind="stale",
        sentence=f"Not trained: its group {group.id} was dropped as stale: {whose} ({version_of(oldest)}) "
        f"{how}.",
        setting="train.staleness_max",
    )


def _age(facts: Facts, member: Rollout, head: int | None) -> int:
    """Versions behind the head; those of another lineage are older than any."""
    found = behind(facts, member.policy_version, head)
    return len(facts.versions) + 1 if found is None else found


def _group_too_small(facts: Facts) -> Verdict:
    if facts.rollout.passive:
        return lonely(facts)
    members = alive_members(facts.history)
    without = Counter(
        member.drop_reason or member.state for member in members if member.drop_reason != "group_too_small"
    )
    scored = len(members) - without.total()
    group = facts.history.group
    declared = max(len(members), group.size if group else 0)
    others = f" ({', '.join(f'{n} {why}' for why, n in without.most_common())})" if without else ""
    have = "has a reward" if scored == 1 else "have a reward"
    return Verdict(
        kind="group_too_small",
        sentence=f"Not trained: only {scored} of the {count(declared, 'member')} of its group {have}"
        f"{others}, and it takes {group.members_min if group else 2} to compare.",
        setting="train.group_size",
    )


def _agent_failure(facts: Facts) -> Verdict:
    return Verdict(
        kind="agent_failure",
        sentence=f"Not trained: its agent ended with `{facts.rollout.status}`, and rewards.on_agent_failure "
        "is `drop`.",
        setting="rewards.on_agent_failure",
    )


def _group_deadline(facts: Facts) -> Verdict:
    return Verdict(
        kind="group_deadline",
        sentence="Not trained: its group closed at its deadline "
        f"({named(facts, 'rewards.group_deadline_s')}) before this rollout had a reward.",
        setting="rewards.group_deadline_s",
    )


def _replaced(facts: Facts) -> Verdict:
    again = next((m.id for m in facts.history.members if m.replaces == facts.rollout.id), "another attempt")
    return Verdict(kind="replaced", sentence=f"Not trained: {again} took its place in the group.")


def _nonfinite(facts: Facts) -> Verdict:
    return Verdict(
        kind="nonfinite",
        sentence=f"Not trained: batch {facts.rollout.batch_id} gave a gradient that is not finite, twice, "
        f"and was dropped; a lower learning rate helps ({named(facts, 'train.lr')}).",
        setting="train.lr",
    )


def _out_of_memory(facts: Facts) -> Verdict:
    return Verdict(
        kind="out_of_memory",
        sentence=f"Not trained: a sample of batch {facts.rollout.batch_id} did not fit into memory by "
        f"itself, and the batch was dropped; shorter contexts help ({named(facts, 'engine.max_model_len')}).",
        setting="engine.max_model_len",
    )


def ungrouped(facts: Facts) -> Verdict:
    """For a rollout without a group."""
    if facts.rollout.passive:
        return alone(facts)
    return Verdict(
        kind="ungrouped",
        sentence="Not trained: it belongs to no group, so there is nothing to compare its reward with; give "
        "`group_id` and `group_size` when opening it.",
    )


_DROPS: dict[str, Callable[[Facts], Verdict]] = {
    "failed": _failed,
    "reward_error": _reward_error,
    "stale": _stale,
    "group_too_small": _group_too_small,
    "agent_failure": _agent_failure,
    "group_deadline": _group_deadline,
    "replaced": _replaced,
    "nonfinite": _nonfinite,
    "out_of_memory": _out_of_memory,
    "ungrouped": ungrouped,
}

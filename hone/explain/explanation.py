"""Why a rollout did or did not train: the sentence, and the facts that it rests on. Pure."""

from collections.abc import Iterator
from typing import Any

import msgspec

from capture.graph import FORKS
from capture.store import BatchRow, History, WaitingCall
from hone.explain.facts import CallView, Facts, TokenCount, behind, count_tokens, head_at, member_advantages
from hone.explain.verdict import verdict
from hone.explain.words import count, error_line, number, sentence_of, version_of


class Moment(msgspec.Struct, frozen=True):
    """Something that happened to the rollout, or is still to happen (`at` None)."""

    at: float | None  # Unix seconds
    what: str


class MemberView(msgspec.Struct, frozen=True, kw_only=True):
    """One attempt within the group."""

    id: str
    attempt: int
    state: str
    status: str | None
    policy_version: int | None
    reward: float | None
    advantage: float | None  # the ledger's, or what the learner will give it; None: neither is known
    drop_reason: str | None
    this: bool  # it is the rollout that is explained


class GroupView(msgspec.Struct, frozen=True, kw_only=True):
    """The rollouts that it is compared with."""

    id: str
    state: str
    size: int  # declared; 0: none was
    members: list[MemberView]


class Explanation(msgspec.Struct, frozen=True, kw_only=True):
    """The answer to "why did this rollout (not) train?", and what it rests on."""

    rollout_id: str
    kind: str  # what decided: see `hone.explain.verdict`
    sentence: str
    setting: str | None  # the setting that would change it
    setting_value: Any  # its value at the time; None where it is not known
    mode: str
    passive: bool  # observed, and for training all the same
    state: str
    status: str | None
    policy: str | None
    versions: list[int]  # that sampled its calls
    run_id: str | None
    scenario_id: str | None
    headless: bool
    reward: float | None
    scores: dict[str, float]
    reward_error: str | None
    advantage: float | None
    staleness: int | None  # lineage versions between sampling and training, or now
    tokens: TokenCount
    timeline: list[Moment]
    group: GroupView | None
    batch: BatchRow | None
    calls: list[CallView]
    waiting: list[WaitingCall]  # committed calls that are not read yet
    reasons: dict[str, str]  # every fork and fate that the calls name -> sentence


def explain(facts: Facts) -> Explanation:
    """Choose the sentence and lay out what it rests on."""
    rollout, history = facts.rollout, facts.history
    chosen = verdict(facts)
    advantages = member_advantages(facts)
    return Explanation(
        rollout_id=rollout.id,
        kind=chosen.kind,
        sentence=chosen.sentence,
        setting=chosen.setting,
        setting_value=None if chosen.setting is None else facts.setting(chosen.setting),
        mode=rollout.mode,
        passive=rollout.passive,
        state=rollout.state,
        status=rollout.status,
        policy=rollout.policy,
        versions=_versions(facts),
        run_id=rollout.run_id,
        scenario_id=rollout.scenario_id,
        headless=rollout.headless,
        reward=rollout.reward,
        scores=rollout.scores,
        reward_error=rollout.reward_error,
        advantage=advantages.get(rollout.id),
        staleness=_staleness(facts),
        tokens=count_tokens(facts.calls),
        timeline=[moment for _, moment in sorted(_timeline(facts), key=lambda one: one[0])],
        group=_group(facts, advantages),
        batch=history.batch,
        calls=facts.calls,
        waiting=history.waiting,
        reasons=_sentences(facts.calls),
    )


def _versions(facts: Facts) -> list[int]:
    sampled = {call.policy_version for call in facts.calls} - {None}
    pinned = {facts.rollout.policy_version} - {None}
    return sorted(version for version in sampled or pinned if version is not None)


def _staleness(facts: Facts) -> int | None:
    """Of its pinned version, at the moment the batch was taken, it was dropped, or now."""
    history = facts.history
    if not facts.rollout.for_training or history.lineage is None:
        return None
    ended = history.drop.at if history.drop else facts.now
    at = history.batch.taken_at if history.batch else ended
    return behind(facts, facts.rollout.policy_version, head_at(facts, at))


def _group(facts: Facts, advantages: dict[str, float]) -> GroupView | None:
    group = facts.history.group
    if group is None:
        return None
    members = [
        MemberView(
            id=member.id,
            attempt=member.attempt,
            state=member.state,
            status=member.status,
            policy_version=member.policy_version,
            reward=member.reward,
            advantage=advantages.get(member.id),
            drop_reason=member.drop_reason,
            this=member.id == facts.rollout.id,
        )
        for member in facts.history.members
    ]
    return GroupView(id=group.id, state=group.state, size=group.size, members=members)


def _timeline(facts: Facts) -> Iterator[tuple[float, Moment]]:
    """What happened, each with its place in time: scoring is not dated, but it follows sealing."""
    rollout, history = facts.rollout, facts.history
    pinned = "" if rollout.policy_version is None else f", pinned to {version_of(rollout)}"
    yield _dated(rollout.created_at, f"opened in mode {rollout.mode}{pinned}")
    calls: list[CallView | WaitingCall] = [*facts.calls, *history.waiting]
    if calls:
        newest = "newest" if rollout.state == "open" else "last"
        yield _dated(min(call.started_at for call in calls), "first call began")
        yield _dated(max(call.ended_at for call in calls), f"{newest} call ended")
    sealed_at = rollout.sealed_at or rollout.created_at
    if rollout.sealed_at is not None:
        yield _dated(sealed_at, f"sealed as {rollout.status}")
    if rollout.passive:
        yield sealed_at, Moment(None, f"for training from then on, in run {rollout.run_id} (passive.train)")
    if rollout.reward is not None:
        yield sealed_at, Moment(None, f"scored: reward {number(rollout.reward)}")
    if rollout.reward_error:
        yield sealed_at, Moment(None, f"not scored: {error_line(rollout.reward_error)}")
    yield from _ending(history)


def _ending(history: History) -> Iterator[tuple[float, Moment]]:
    group, batch, drop = history.group, history.batch, history.drop
    if group is not None and group.closed_at is not None:
        kept = sum(member.batch_id is not None or member.state == "grouped" for member in history.members)
        on = f" on {count(kept, 'member')}" if kept else ""
        yield _dated(group.closed_at, f"group closed{on}")
    if batch is not None:
        yield _dated(batch.taken_at, f"taken in batch {batch.id} with {count(batch.groups, 'group')}")
        if batch.committed_at is not None:
            made = "no new version" if batch.version is None else f"v{batch.version} made"
            yield _dated(batch.committed_at, f"batch committed at step {batch.step}, {made}")
    if drop is not None:
        yield _dated(drop.at, f"dropped ({drop.reason}) with {count(drop.tokens, 'trainable token')}")


def _dated(at: float, what: str) -> tuple[float, Moment]:
    return at, Moment(at, what)


def _sentences(calls: list[CallView]) -> dict[str, str]:
    forks = {call.fork: FORKS.get(call.fork, call.fork) for call in calls if call.fork}
    fates = {call.fate for call in calls} | {call.excluded for call in calls if call.excluded}
    told = {fate: sentence_of(fate) for fate in sorted(fates) if sentence_of(fate) != fate}
    return forks | {fate: text[:1].upper() + text[1:] + "." for fate, text in told.items()}

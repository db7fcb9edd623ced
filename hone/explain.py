"""Why a rollout did or did not train: the sentence, and the facts that it rests on. Pure."""

from collections.abc import Iterator

import msgspec

from capture.graph import FORKS
from capture.store import BatchRow, WaitingCall
from hone.facts import CallView, Facts, TokenCount, behind, count_tokens, head_at, member_advantages
from hone.verdict import verdict
from hone.words import error_line, number, sentence_of, version_of


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
    kind: str  # what decided: see `hone.verdict`
    sentence: str
    setting: str | None  # the setting that would change it
    setting_value: object  # its value at the time; None where it is not known
    mode: str
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
        timeline=sorted(_timeline(facts), key=lambda one: (one.at is None, one.at or 0.0)),
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
    if facts.rollout.mode != "train" or history.lineage is None:
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


def _timeline(facts: Facts) -> Iterator[Moment]:
    rollout, history = facts.rollout, facts.history
    group, batch, drop = history.group, history.batch, history.drop
    pinned = "" if rollout.policy_version is None else f", pinned to {version_of(rollout)}"
    yield Moment(rollout.created_at, f"opened in mode {rollout.mode}{pinned}")
    calls: list[CallView | WaitingCall] = [*facts.calls, *history.waiting]
    if calls:
        yield Moment(min(call.started_at for call in calls), "first call began")
        yield Moment(max(call.ended_at for call in calls), f"call {len(calls)} ended, the last so far")
    if rollout.sealed_at is not None:
        yield Moment(rollout.sealed_at, f"sealed as {rollout.status}")
    if rollout.reward is not None:
        yield Moment(None, f"scored: reward {number(rollout.reward)}")
    if rollout.reward_error:
        yield Moment(None, f"not scored: {error_line(rollout.reward_error)}")
    if group is not None and group.closed_at is not None:
        yield Moment(group.closed_at, f"group closed, the {len(history.members)} attempts in it compared")
    if batch is not None:
        yield Moment(batch.taken_at, f"taken in batch {batch.id} with {batch.groups} groups")
        if batch.committed_at is not None:
            made = "no new version" if batch.version is None else f"v{batch.version} made"
            yield Moment(batch.committed_at, f"batch committed at step {batch.step}, {made}")
    if drop is not None:
        yield Moment(drop.at, f"dropped ({drop.reason}), with {drop.tokens} trainable tokens")


def _sentences(calls: list[CallView]) -> dict[str, str]:
    forks = {call.fork: FORKS.get(call.fork, call.fork) for call in calls if call.fork}
    fates = {call.fate for call in calls} | {call.excluded for call in calls if call.excluded}
    told = {fate: sentence_of(fate) for fate in sorted(fates) if sentence_of(fate) != fate}
    return forks | {fate: text[:1].upper() + text[1:] + "." for fate, text in told.items()}

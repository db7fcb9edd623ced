"""Why a rollout did or did not train, in one sentence. Pure: chosen from `Facts`.

Every sentence begins with `Trained`, `Not trained`, `Not yet` or `Not for training`, and names the
setting to change where there is one.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Sequence

from capture.reasons import GRAMMAR
from capture.types import Rollout
from hone.drops import dropped, ungrouped
from hone.facts import CallView, Facts, alive_members, count_tokens, is_call_reason
from hone.words import Verdict, ago, are, count, error_line, leads, nobody_does, number, sentence_of

CALLS_NAMED_MAX = 4


def verdict(facts: Facts) -> Verdict:
    """The sentence for this rollout."""
    rollout = facts.rollout
    if rollout.mode == "eval":
        return _evaluation(facts)
    if rollout.mode == "observe":
        return _observed(facts)
    if rollout.state in ("dropped", "failed", "reward_error"):
        return dropped(facts)
    return _STATES[rollout.state](facts)


# -- not meant for it ------------------------------------------------------------------------------


def _evaluation(facts: Facts) -> Verdict:
    rollout = facts.rollout
    of = "" if rollout.policy_version is None else f" of version v{rollout.policy_version}"
    return Verdict(kind="eval", sentence=f"Not for training: it is an evaluation{of}{_outcome(rollout)}.")


def _observed(facts: Facts) -> Verdict:
    how = "nobody opened it for training, so it was only observed"
    if facts.rollout.headless:
        how = "nobody said whose call it was (headless), so it was only observed"
    hint = "open rollouts with `POST /rollouts` in mode `train` to train on them"
    return Verdict(kind="observe", sentence=f"Not for training: {how}; {hint}.")


def _outcome(rollout: Rollout) -> str:
    """What is known of its score, as the end of a sentence."""
    if rollout.reward is not None:
        return f", and its reward is {number(rollout.reward)}"
    if rollout.reward_error:
        return f", and the reward script failed: {error_line(rollout.reward_error)}"
    return f", and it is {rollout.state}"


# -- not yet ---------------------------------------------------------------------------------------


def _open(facts: Facts) -> Verdict:
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
        f"or{after} without a call (rewards.seal.idle_s).",
        setting="rewards.seal.idle_s",
    )


def _sealed(facts: Facts) -> Verdict:
    waiting = sum(not call.late for call in facts.history.waiting)
    total = waiting + sum(not call.late for call in facts.calls)
    what = "its call graph is not settled yet"
    if waiting:
        what = f"{waiting} of its {count(total, 'call')} {are(waiting)} not read yet"
    return Verdict(
        kind="sealed", sentence=f"Not yet: it is finished, but {what}{nobody_does(facts, 'control')}."
    )


def _ingested(facts: Facts) -> Verdict:
    required = facts.setting("rewards.require") or []
    missing = [name for name in required if name not in facts.history.posted]
    if missing:
        wait_s = facts.setting("rewards.wait_s")
        most = f" for at most {number(wait_s)} s" if wait_s else ""
        named = " and ".join(repr(name) for name in missing)
        return Verdict(
            kind="requires_score",
            sentence=f"Not yet: it waits{most} for the score {named} to be posted (rewards.require).",
            setting="rewards.require",
        )
    return Verdict(
        kind="ingested",
        sentence=f"Not yet: it waits for its reward from the script{nobody_does(facts, 'control')}.",
        setting="rewards.script",
    )


def _scored(facts: Facts) -> Verdict:
    group = facts.history.group
    if group is None:
        return ungrouped(facts)
    name, deadline = f"its group {group.id}", facts.setting("rewards.group_deadline_s")
    late = f"{number(deadline)} s after it was opened " if deadline else ""
    if not group.size:
        sentence = f"{name} has no declared size and closes {late}(rewards.group_deadline_s)"
        return Verdict(
            kind="group_open", sentence=f"Not yet: {sentence}.", setting="rewards.group_deadline_s"
        )
    missing = _missing(facts, group.size)
    if not missing:
        sentence = f"{name} has all its {group.size} members and closes next{nobody_does(facts, 'control')}"
        return Verdict(kind="group_open", sentence=f"Not yet: {sentence}.")
    total = sum(missing.values())
    parts = ", ".join(f"{n} {what}" for what, n in missing.items())
    more = "more rollout" if total == 1 else "more rollouts"
    return Verdict(
        kind="group_waits",
        sentence=f"Not yet: {name} waits for {total} {more} of {group.size} ({parts}).",
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
        found["not started"] = size - len(members)
    return dict(found)


def _grouped(facts: Facts) -> Verdict:
    group = facts.history.group
    name = "its group" if group is None else f"its group {group.id}"
    wanted = facts.setting("train.groups_per_batch")
    many = f", which takes {wanted} groups at once and finds {facts.history.groups_ready}" if wanted else ""
    nobody = "" if leads(facts, "learner:") else "; no learner runs now: `hone train` starts one"
    return Verdict(
        kind="grouped",
        sentence=f"Not yet: {name} is closed and waits for the learner{many}{nobody}.",
        setting="train.groups_per_batch",
    )


def _taken(facts: Facts) -> Verdict:
    batch = facts.history.batch
    since = "" if batch is None else f", since {ago(facts, batch.taken_at)}".removesuffix(" ago")
    nobody = "" if leads(facts, "learner:") else "; no learner runs now: the next one takes it up again"
    return Verdict(
        kind="taken",
        sentence=f"Not yet: the learner has it in batch {facts.rollout.batch_id}{since}{nobody}.",
    )


# -- in a committed batch --------------------------------------------------------------------------


def _trained(facts: Facts) -> Verdict:
    row, tokens = facts.row, count_tokens(facts.calls)
    if row is None or not row.trained_tokens + row.zero_advantage_tokens:
        return _nothing_to_train(facts)
    if not row.trained_tokens:
        return _no_advantage(facts)
    share = f"{row.trained_tokens} of {tokens.sampled} sampled tokens"
    if row.trained_tokens == tokens.sampled:
        share = f"all {tokens.sampled} sampled tokens" if tokens.sampled > 1 else "its only sampled token"
    rest = _untrained(facts)
    return Verdict(
        kind="trained",
        sentence=f"Trained: {share} in {_batch(facts)}, advantage {row.advantage:+.4g}"
        f"{'; ' + rest if rest else ''}.",
        setting=_call_setting(facts) if rest else None,
    )


def _nothing_to_train(facts: Facts) -> Verdict:
    own = [call for call in facts.calls if call.policy is not None]
    where = f"it was in {_batch(facts)}, but "
    if not facts.calls:
        what = "its agent made no call"
    elif not own:
        models = ", ".join(sorted({call.model or "?" for call in facts.calls}))
        what = f"all its calls went to models that are not being trained ({models})"
    elif not sum(call.sampled_tokens for call in own):
        what = f"its {count(len(own), 'call')} sampled no token ({_reasons(own)})"
    else:
        what = f"none of its sampled tokens may be trained: {_untrained(facts)}"
    return Verdict(kind="no_tokens", sentence=f"Not trained: {where}{what}.", setting=_call_setting(facts))


def _no_advantage(facts: Facts) -> Verdict:
    rewards = [m.reward for m in facts.history.members if m.id in facts.history.ledger]
    own = facts.rollout.reward
    reward = "" if own is None else f" {number(own)}"
    if len(set(rewards)) > 1:
        sentence = f"its reward{reward} is its group's mean, so its advantage is 0 ({_batch(facts)})"
        return Verdict(kind="zero_advantage", sentence=f"Not trained: {sentence}.")
    sentence = (
        f"all {len(rewards)} rewards of its group are{reward}, so there is nothing to prefer and the "
        f"advantage is 0 ({_batch(facts)}); scenarios that sometimes succeed, or a larger "
        "train.group_size, help"
    )
    return Verdict(kind="zero_variance", sentence=f"Not trained: {sentence}.", setting="train.group_size")


def _batch(facts: Facts) -> str:
    batch = facts.history.batch
    if batch is None:
        return f"batch {facts.rollout.batch_id}"
    step = "" if batch.step is None else f"step {batch.step}, "
    made = "no new version" if batch.version is None else f"which made v{batch.version}"
    return f"batch {batch.id} ({step}{made})"


def _untrained(facts: Facts) -> str:
    """Which tokens of the policy were not trained for reasons of their calls; empty: none."""
    lost: dict[str, list[CallView]] = {}
    for call in facts.calls:
        if call.policy is not None and is_call_reason(call.fate) and call.sampled_tokens:
            lost.setdefault(call.fate, []).append(call)
    parts = []
    for reason, calls in lost.items():
        tokens = sum(call.sampled_tokens for call in calls)
        parts.append(f"{count(tokens, 'token')} of {_calls(calls)} ({reason})")
    if not parts:
        return ""
    were = "was" if len(parts) == 1 and parts[0].startswith("1 token ") else "were"
    why = f": {sentence_of(next(iter(lost)))}" if len(lost) == 1 else ""
    return f"{', '.join(parts)} {were} not{why}"


def _calls(calls: Sequence[CallView]) -> str:
    """`call 3`, `calls 3, 4 and 7`, `19 calls`."""
    numbers = [str(call.number) for call in calls]
    if len(numbers) > CALLS_NAMED_MAX:
        return f"{len(numbers)} calls"
    return f"call {numbers[0]}" if len(numbers) == 1 else f"calls {', '.join(numbers[:-1])} and {numbers[-1]}"


def _reasons(calls: Iterable[CallView]) -> str:
    return ", ".join(f"{n} {reason}" for reason, n in Counter(call.fate for call in calls).most_common())


def _call_setting(facts: Facts) -> str | None:
    return "sampling.grammar" if any(call.fate == GRAMMAR for call in facts.calls) else None


_STATES: dict[str, Callable[[Facts], Verdict]] = {
    "open": _open,
    "sealed": _sealed,
    "ingested": _ingested,
    "scored": _scored,
    "grouped": _grouped,
    "taken": _taken,
    "trained": _trained,
}

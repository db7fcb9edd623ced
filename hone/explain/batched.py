"""The sentences about rollouts in a committed batch, and about tokens that no batch could train. Pure."""

from collections import Counter
from collections.abc import Iterable, Sequence

from capture.reasons import LATE, PARTIAL, PROVIDER, UNDELIVERED
from hone.explain.facts import CallView, Facts, count_tokens
from hone.explain.words import SETTINGS, Verdict, count, named, number, sentence_of, shortened

CALLS_NAMED_MAX = 4


def committed(facts: Facts) -> Verdict:
    """It has its row in the ledger."""
    row, tokens = facts.row, count_tokens(facts.calls)
    if row is None or not row.trained_tokens + row.zero_advantage_tokens:
        return nothing_to_train(facts)
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
        setting=_setting(facts),
    )


def nothing_to_train(facts: Facts) -> Verdict:
    """None of its tokens may be trained: it was in a batch in vain, or it will be."""
    own = [call for call in facts.calls if call.policy is not None]
    where = f"it was in {_batch(facts)}, but " if facts.row is not None else ""
    if not facts.calls:
        status = facts.rollout.status
        ended = "" if status in (None, "completed") else f" and ended with `{status}`"
        what = f"its agent made no call{ended}"
    elif not own:
        models = shortened(", ".join(sorted({call.model or "?" for call in facts.calls})))
        what = (
            f"all its calls went to models that are not being trained ({models}); "
            f"[routes] says which names lead to {facts.rollout.policy or 'the policy'}"
        )
    elif not sum(call.sampled_tokens for call in own):
        what = f"its {count(len(own), 'call')} sampled no token ({_reasons(own)})"
    else:
        what = f"none of its sampled tokens may be trained: {_untrained(facts)}"
    return Verdict(kind="no_tokens", sentence=f"Not trained: {where}{what}.", setting=_setting(facts))


def _no_advantage(facts: Facts) -> Verdict:
    rewards = [member.reward for member in facts.history.members if member.id in facts.history.ledger]
    own = facts.rollout.reward
    reward = "" if own is None else f" {number(own)}"
    if len(set(rewards)) > 1:
        sentence = f"in {_batch(facts)} its reward{reward} was its group's mean, so its advantage was 0"
        return Verdict(kind="zero_advantage", sentence=f"Not trained: {sentence}.")
    if len(rewards) == 1:
        sentence = (
            f"it is a group of one, and in {_batch(facts)} its reward{reward} was the first of its scenario "
            "or the mean of those before, so its advantage was 0; later attempts are compared with it"
        )
        return Verdict(kind="zero_advantage", sentence=f"Not trained: {sentence}.")
    sentence = (
        f"in {_batch(facts)} all {len(rewards)} rewards of its group were{reward}, so there was nothing to "
        "prefer and the advantage was 0; scenarios that sometimes succeed help, or a larger group "
        f"({named(facts, 'train.group_size')})"
    )
    return Verdict(kind="zero_variance", sentence=f"Not trained: {sentence}.", setting="train.group_size")


def _batch(facts: Facts) -> str:
    batch = facts.history.batch
    if batch is None:
        return f"batch {facts.rollout.batch_id}"
    step = "" if batch.step is None else f"step {batch.step}, "
    made = "no new version" if batch.version is None else f"which made v{batch.version}"
    return f"batch {batch.id} ({step}{made})"


def _lost(facts: Facts) -> dict[str, list[CallView]]:
    """Calls of the policy that sampled tokens which are not trained for reasons of their own, by reason."""
    found: dict[str, list[CallView]] = {}
    for call in facts.calls:
        if call.policy is not None and call.lost and call.sampled_tokens:
            found.setdefault(call.fate, []).append(call)
    return found


def _untrained(facts: Facts) -> str:
    """Which tokens of the policy were not trained for reasons of their calls; empty: none."""
    lost = _lost(facts)
    parts = [
        f"{count(sum(call.sampled_tokens for call in calls), 'token')} of {_calls(calls)} ({reason})"
        for reason, calls in lost.items()
    ]
    if not parts:
        return ""
    were = "was" if len(parts) == 1 and parts[0].startswith("1 token ") else "were"
    why = f": {sentence_of(next(iter(lost)))}" if len(lost) == 1 else ""
    setting = _setting(facts)
    return f"{', '.join(parts)} {were} not{why}{f' ({named(facts, setting)})' if setting else ''}"


def _calls(calls: Sequence[CallView]) -> str:
    """`call 3`, `calls 3, 4 and 7`, `19 calls`."""
    numbers = [str(call.number) for call in calls]
    if len(numbers) > CALLS_NAMED_MAX:
        return f"{len(numbers)} calls"
    return f"call {numbers[0]}" if len(numbers) == 1 else f"calls {', '.join(numbers[:-1])} and {numbers[-1]}"


def _reasons(calls: Iterable[CallView]) -> str:
    return ", ".join(f"{n} {reason}" for reason, n in Counter(call.fate for call in calls).most_common())


def _setting(facts: Facts) -> str | None:
    """What would have let more tokens be trained: said of the reason that cost the most."""
    lost = _lost(facts)
    if not lost:
        elsewhere = facts.calls and all(call.policy is None for call in facts.calls)
        return SETTINGS[PROVIDER] if elsewhere else None
    worst = max(lost, key=lambda reason: sum(call.sampled_tokens for call in lost[reason]))
    cut_off = facts.rollout.status == "timeout"
    if cut_off and worst in (LATE, PARTIAL, UNDELIVERED):
        return _deadline(facts)
    return SETTINGS.get(worst)


def _deadline(facts: Facts) -> str:
    """The setting that ended a rollout whose status is `timeout`."""
    rollout, idle_s = facts.rollout, facts.setting("rewards.seal.idle_s")
    answered = [call.ended_at for call in facts.calls if not call.late]
    quiet_since = max([rollout.created_at, *answered])
    idle = idle_s is not None and (rollout.sealed_at or 0.0) - quiet_since >= idle_s
    return "rewards.seal.idle_s" if idle else "train.timeout_s"

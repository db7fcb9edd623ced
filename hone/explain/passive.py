"""The sentences about rollouts that nobody opened for training: observed, and perhaps trained. Pure."""

from capture.reasons import JUDGE
from hone.explain.batched import nothing_to_train
from hone.explain.facts import Facts, count_tokens
from hone.explain.words import Verdict, named, sentence_of

SETTING = "passive.train"
_OPEN_IT = "open a rollout with `POST /rollouts` in mode `train` and give its agent that base_url"


def undecided(facts: Facts) -> bool:
    """Whether an observed rollout may still turn out to be for training: that is settled at its end."""
    rollout = facts.rollout
    comes = rollout.state in ("open", "sealed") and not rollout.headless
    return comes and rollout.mode == "observe" and _may_be_asked(facts) and bool(facts.setting(SETTING))


def observed(facts: Facts) -> Verdict:
    """It is not for training."""
    if facts.rollout.drop_reason == JUDGE:
        return Verdict(
            kind="observe", sentence=f"Not for training: {sentence_of(JUDGE)}, so nothing scores it."
        )
    how = "nobody opened it for training, so it was only observed"
    hint = f"to train on it, {_OPEN_IT}"
    if facts.rollout.headless:
        how = "nobody said whose call it was (headless), so it was only observed"
    elif _may_be_asked(facts) and _has_tokens(facts):
        if facts.setting(SETTING):
            hint = f"{SETTING} was off when it ended, or no run was on: `hone train` starts one"
        else:
            hint = f"`{SETTING} = true` trains on rollouts like it while a run is on; or {_OPEN_IT}"
        return Verdict(kind="observe", sentence=f"Not for training: {how}; {hint}.", setting=SETTING)
    return Verdict(kind="observe", sentence=f"Not for training: {how}; {hint}.")


def alone(facts: Facts) -> Verdict:
    """It was for training and joined no group."""
    if not count_tokens(facts.calls).dropped:
        return nothing_to_train(facts)
    return Verdict(
        kind="ungrouped",
        sentence="Not trained: nobody said whose call it was (headless), and such a rollout is compared with "
        "no other; an `X-Session-ID` header, or a base_url of its own, says it.",
    )


def lonely(facts: Facts) -> Verdict:
    """Its group gathered too few others."""
    return Verdict(
        kind="group_too_small",
        sentence=f"Not trained: nobody attempted its scenario {facts.rollout.scenario_id} again under the "
        f"same key and with a reward in time ({named(facts, 'rewards.group_deadline_s')}), and it takes "
        "2 to compare.",
        setting="rewards.group_deadline_s",
    )


def _may_be_asked(facts: Facts) -> bool:
    """One that names a group or a run belongs to whoever opened it."""
    return facts.rollout.group_id is None and facts.rollout.run_id is None


def _has_tokens(facts: Facts) -> bool:
    """Whether the policy sampled tokens for it that may be trained."""
    return any(call.policy is not None and not call.excluded and call.sampled_tokens for call in facts.calls)

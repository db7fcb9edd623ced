"""Why a rollout did or did not train, in one sentence. Pure: chosen from `Facts`.

Every sentence begins with `Trained`, `Not trained`, `Not yet` or `Not for training`, and names the
setting to change where there is one. What decided is the verdict's `kind`:

* not for training: `eval`, `observe` (`hone.explain.passive`);
* not yet (`hone.explain.waits`): `open`, `sealed`, `ingested`, `requires_score`, `group_open`,
  `group_waits`, `grouped`, `taken`;
* left before it was trained (`hone.explain.drops`): a drop reason, or `pin_expired`;
* in a committed batch (`hone.explain.batched`): `trained`, `zero_advantage`, `zero_variance`;
* whatever becomes of its group: `no_tokens` (none of its tokens may be trained), `no_run` (no learner
  takes the group).
"""

from collections.abc import Callable

import msgspec

from capture.types import Rollout
from hone.explain.batched import committed, nothing_to_train
from hone.explain.drops import dropped
from hone.explain.facts import Facts, count_tokens
from hone.explain.passive import observed, undecided
from hone.explain.waits import grouped, ingested, opened, scored, sealed, taken
from hone.explain.words import Verdict, error_line, number


def verdict(facts: Facts) -> Verdict:
    """The sentence for this rollout, on one line whatever an error in it says."""
    chosen = _choose(facts)
    return msgspec.structs.replace(chosen, sentence=" ".join(chosen.sentence.split()))


def _choose(facts: Facts) -> Verdict:
    rollout = facts.rollout
    if rollout.mode == "eval":
        return _evaluation(facts)
    if not rollout.for_training and not undecided(facts):
        return observed(facts)
    if rollout.state in ("dropped", "failed", "reward_error"):
        return dropped(facts)
    if rollout.group_id is not None and rollout.run_id is None:
        return _without_run(facts)
    if rollout.state in _SETTLED and not count_tokens(facts.calls).pending:
        return nothing_to_train(facts)
    return _STATES[rollout.state](facts)


def _without_run(facts: Facts) -> Verdict:
    return Verdict(
        kind="no_run",
        sentence="Not trained: no run was on when it was opened, so no learner takes its group "
        f"{facts.rollout.group_id}; open rollouts for training while `hone train` runs.",
    )


def _evaluation(facts: Facts) -> Verdict:
    rollout = facts.rollout
    of = "" if rollout.policy_version is None else f" of version v{rollout.policy_version}"
    return Verdict(kind="eval", sentence=f"Not for training: it is an evaluation{of}{_outcome(rollout)}.")


def _outcome(rollout: Rollout) -> str:
    """What is known of its score, as the end of a sentence."""
    if rollout.reward is not None:
        return f", and its reward is {number(rollout.reward)}"
    if rollout.reward_error:
        return f", and the reward script failed: {error_line(rollout.reward_error)}"
    return f", and it is {rollout.state}"


_STATES: dict[str, Callable[[Facts], Verdict]] = {
    "open": opened,
    "sealed": sealed,
    "ingested": ingested,
    "scored": scored,
    "grouped": grouped,
    "taken": taken,
    "trained": committed,
}
_SETTLED = ("ingested", "scored", "grouped", "taken")  # what its calls sampled is known, and not yet trained

"""The groups of a batch as the learner reads them: samples, owned tokens, advantages."""

import math
import statistics
from collections.abc import Sequence

import msgspec

from capture import graph
from capture.errors import Corrupt
from capture.store import Store
from capture.types import Batch, LedgerRow, ModelCall, Rollout, Sample
from learner import advantage
from learner.baseline import Attempted, running_mean
from learner.settings import Settings

OVERLONG = "overlong"  # of `capture.reasons.DROPPED`
CUT_OFF = "length"  # finish_reason of a reply that reached its max_tokens


class Member(msgspec.Struct, frozen=True, kw_only=True):
    """A rollout of a group, read from the store."""

    rollout: Rollout
    samples: list[Sample]  # those with owned tokens
    owned: int  # tokens
    advantage: float
    dropped: str | None = None  # why it is left out, its reward apart

    @property
    def signal(self) -> float:
        """Its advantage; 0 if it is left out."""
        return 0.0 if self.dropped else self.advantage

    def ledger_row(self) -> LedgerRow:
        """What becomes of the owned tokens when the batch commits."""
        trained = self.owned if self.advantage else 0
        return LedgerRow(self.rollout.id, trained, self.owned - trained, self.advantage)


def read(store: Store, batch: Batch, settings: Settings) -> list[list[Member]]:
    """Every group of the batch, in its order. `Corrupt` if a member has no reward."""
    given = advantages(store, batch, settings)
    return [
        [
            read_member(store, rollout, one, settings.overlong_filter)
            for rollout, one in zip(group, ones, strict=True)
        ]
        for group, ones in zip(batch.groups, given, strict=True)
    ]


def advantages(store: Store, batch: Batch, settings: Settings) -> list[list[float]]:
    """One for each rollout: within its group, and for groups of one from what its scenario has brought."""
    rewards = [[reward(rollout) for rollout in group] for group in batch.groups]
    given = advantage.of_batch(rewards, settings.advantage, settings.advantage_std)
    alone = [place for place, group in enumerate(batch.groups) if len(group) == 1]
    brought = [(attempted(batch.groups[place][0]), rewards[place][0]) for place in alone]
    before = store.reward_means(batch.run_id, {what for what, _ in brought})
    for place, one in zip(alone, running_mean(brought, before), strict=True):
        given[place] = [one]
    return given


def attempted(rollout: Rollout) -> Attempted:
    """What its reward is compared by if it is a group of one."""
    return rollout.key_id, rollout.scenario_id


def reward(rollout: Rollout) -> float:
    """Its reward; `Corrupt` if it has none."""
    if rollout.reward is None or not math.isfinite(rollout.reward):
        raise Corrupt(f"rollout {rollout.id} is in a batch with reward {rollout.reward}")
    return rollout.reward


def read_member(store: Store, rollout: Rollout, advantage: float, overlong_filter: bool) -> Member:
    """One rollout with the samples of its calls."""
    calls = store.calls(rollout.id)
    found = member(rollout, graph.samples(graph.build(calls)), advantage)
    if overlong_filter and overlong(rollout, calls):
        return msgspec.structs.replace(found, dropped=OVERLONG)
    return found


def overlong(rollout: Rollout, calls: Sequence[ModelCall]) -> bool:
    """Whether it did not end by itself: a reply of the policy was cut off, or the context was full."""
    cut_off = any(call.finish_reason == CUT_OFF and call.policy == rollout.policy for call in calls)
    return cut_off or rollout.status == "context_overflow"


def member(rollout: Rollout, samples: Sequence[Sample], advantage: float) -> Member:
    """A member of these samples; a sample that owns nothing adds nothing."""
    kept = [sample for sample in samples if True in sample.loss_mask]
    owned = sum(sum(sample.loss_mask) for sample in kept)
    return Member(rollout=rollout, samples=kept, owned=owned, advantage=advantage)


def describe(groups: Sequence[Sequence[Member]]) -> dict[str, float]:
    """Numbers of a batch before any update: rewards, scores, advantages, tokens."""
    members = [one for group in groups for one in group]
    rewards = [one.rollout.reward or 0.0 for one in members]
    rows = [one.ledger_row() for one in members if one.dropped is None]
    numbers = {
        "groups": float(len(groups)),
        "zero_variance_groups": float(sum(1 for group in groups if not any(m.advantage for m in group))),
        "rollouts": float(len(members)),
        "overlong_rollouts": float(sum(1 for one in members if one.dropped == OVERLONG)),
        "reward_mean": statistics.fmean(rewards),
        "reward_std": statistics.pstdev(rewards),
        "advantage_abs_mean": statistics.fmean(abs(one.advantage) for one in members),
        "advantage_abs_max": max(abs(one.advantage) for one in members),
        "trained_tokens": float(sum(row.trained_tokens for row in rows)),
        "zero_advantage_tokens": float(sum(row.zero_advantage_tokens for row in rows)),
    }
    for name in sorted({name for one in members for name in one.rollout.scores}):
        values = [one.rollout.scores[name] for one in members if name in one.rollout.scores]
        numbers[f"score_{name}"] = statistics.fmean(values)
    return numbers

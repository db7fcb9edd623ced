"""The groups of a batch as the learner reads them: samples, owned tokens, advantages."""

import math
import statistics
from collections.abc import Sequence

import msgspec

from capture import graph
from capture.errors import Corrupt
from capture.store import Store
from capture.types import Batch, LedgerRow, Rollout, Sample
from learner.advantage import Kind, advantages


class Member(msgspec.Struct, frozen=True, kw_only=True):
    """A rollout of a group, read from the store."""

    rollout: Rollout
    samples: list[Sample]  # those with owned tokens
    owned: int  # tokens
    advantage: float

    def ledger_row(self) -> LedgerRow:
        """What becomes of the owned tokens when the batch commits."""
        trained = self.owned if self.advantage else 0
        return LedgerRow(self.rollout.id, trained, self.owned - trained, self.advantage)


def read(store: Store, batch: Batch, kind: Kind) -> list[list[Member]]:
    """Every group of the batch, in its order. `Corrupt` if a member has no reward."""
    return [read_group(store, rollouts, kind) for rollouts in batch.groups]


def read_group(store: Store, rollouts: Sequence[Rollout], kind: Kind) -> list[Member]:
    """One group's members with their advantages."""
    rewards = []
    for rollout in rollouts:
        if rollout.reward is None or not math.isfinite(rollout.reward):
            raise Corrupt(f"rollout {rollout.id} is in a batch with reward {rollout.reward}")
        rewards.append(rollout.reward)
    return [
        member(rollout, graph.samples(graph.build(store.calls(rollout.id))), advantage)
        for rollout, advantage in zip(rollouts, advantages(rewards, kind), strict=True)
    ]


def member(rollout: Rollout, samples: Sequence[Sample], advantage: float) -> Member:
    """A member of these samples; a sample that owns nothing adds nothing."""
    kept = [sample for sample in samples if True in sample.loss_mask]
    owned = sum(sum(sample.loss_mask) for sample in kept)
    return Member(rollout=rollout, samples=kept, owned=owned, advantage=advantage)


def describe(groups: Sequence[Sequence[Member]]) -> dict[str, float]:
    """Numbers of a batch before any update: rewards, scores, advantages, tokens."""
    members = [one for group in groups for one in group]
    rewards = [one.rollout.reward or 0.0 for one in members]
    rows = [one.ledger_row() for one in members]
    numbers = {
        "groups": float(len(groups)),
        "zero_variance_groups": float(sum(1 for group in groups if not any(m.advantage for m in group))),
        "rollouts": float(len(members)),
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

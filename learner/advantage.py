"""Advantages: how much better than its group a rollout was. One scalar a rollout.

R are the rewards of a group of G rollouts of one scenario:

* centred: R - mean
* grpo: (R - mean) / (std + 1e-4); std of the group with divisor G - 1 ("sample") or G ("population"), or of
  all rewards of the batch with divisor one less than their number ("batch")
* leave_one_out: R - mean of the others = (R - mean) G / (G - 1); unbiased
* maxrl: (R - mean) / mean, and 0 where the mean is not above 0; for rewards that are chances of success
"""

import math
import statistics
from collections.abc import Sequence
from typing import Literal

Kind = Literal["centred", "grpo", "leave_one_out", "maxrl"]
Std = Literal["sample", "population", "batch"]
EPSILON = 1e-4


def advantages(
    rewards: Sequence[float], kind: Kind = "centred", std: Std = "sample", batch_std: float | None = None
) -> list[float]:
    """One advantage for each of at least two rewards; exactly 0 for all where all are equal.

    `batch_std`: what `of_batch` found, for `std` "batch".
    """
    if min(rewards) == max(rewards):  # the mean of equal floats may round away from them
        return [0.0] * len(rewards)
    mean = math.fsum(rewards) / len(rewards)
    scale = _scale(rewards, mean, kind, std, batch_std)
    centred = [reward - mean for reward in rewards]
    return centred if scale is None else [scale * one for one in centred]


def of_batch(
    groups: Sequence[Sequence[float]], kind: Kind = "centred", std: Std = "sample"
) -> list[list[float]]:
    """The advantages of every group of a batch; 0 for a group of one (see `learner.baseline`)."""
    rewards = [reward for group in groups for reward in group]
    deviation = statistics.stdev(rewards) if std == "batch" and len(rewards) > 1 else None
    return [advantages(group, kind, std, deviation) for group in groups]


def _scale(
    rewards: Sequence[float], mean: float, kind: Kind, std: Std, batch_std: float | None
) -> float | None:
    """What the distance to the mean is multiplied by; None: nothing."""
    size = len(rewards)
    if kind == "leave_one_out":
        return size / (size - 1)
    if kind == "maxrl":
        return 1 / mean if mean > 0 else 0.0
    if kind != "grpo":
        return None
    deviation = statistics.stdev(rewards) if std == "sample" else statistics.pstdev(rewards)
    return 1 / ((batch_std if std == "batch" and batch_std is not None else deviation) + EPSILON)

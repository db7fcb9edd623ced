"""Advantages: how much better than its group a rollout was. One scalar a rollout.

R are the rewards of a group of G rollouts of one scenario:

* centred: R - mean
* grpo: (R - mean) / (std + 1e-4), with the sample standard deviation (divisor G - 1)
* leave_one_out: R - mean of the others = (R - mean) G / (G - 1); unbiased
"""

import math
import statistics
from collections.abc import Sequence
from typing import Literal

Kind = Literal["centred", "grpo", "leave_one_out"]
EPSILON = 1e-4


def advantages(rewards: Sequence[float], kind: Kind = "centred") -> list[float]:
    """One advantage for each of at least two rewards; exactly 0 for all where all are equal."""
    if min(rewards) == max(rewards):  # the mean of equal floats may round away from them
        return [0.0] * len(rewards)
    size = len(rewards)
    mean = math.fsum(rewards) / size
    centred = [reward - mean for reward in rewards]
    if kind == "grpo":
        scale = 1 / (statistics.stdev(rewards) + EPSILON)
    elif kind == "leave_one_out":
        scale = size / (size - 1)
    else:
        return centred
    return [scale * one for one in centred]

"""PPO-clip (Schulman et al., 2017) with a bound for each side, and dual clip (Ye et al., 2020).

    -min(r A, clip(r, 1 - low, 1 + high) A)        r = exp(log π - log old)

With dual clip c and A < 0 the term is at most -c A, so that a large ratio cannot blow it up.
"""

import torch
from torch import Tensor

from learner.losses.terms import Terms


def loss(
    logprobs: Tensor, old_logprobs: Tensor, weights: Tensor, low: float, high: float, dual: float | None
) -> Terms:
    """`logprobs` log π [M], `old_logprobs` [M], `weights` A / d [M]."""
    return clipped(torch.exp(logprobs - old_logprobs), weights, low, high, dual)


def clipped(ratios: Tensor, weights: Tensor, low: float, high: float, dual: float | None = None) -> Terms:
    """The same for ratios [M] that carry the gradient. A term that is bounded has none.

    The minimum and the maximum of the formula bound r alone: from above for A > 0, from below for A < 0.
    """
    r = ratios.detach()
    bounded = torch.where(weights < 0, r.clamp(1 - low, dual), r.clamp(max=1 + high))
    outside = bounded != r
    return Terms(-torch.where(outside, bounded, ratios) * weights, r, outside)

"""Importance sampling: unbiased whatever the old policy was, and unbounded.

-r A        r = exp(log π - log old)
"""

import torch
from torch import Tensor

from learner.losses.terms import Terms


def loss(logprobs: Tensor, old_logprobs: Tensor, weights: Tensor) -> Terms:
    """`logprobs` log π [M], `old_logprobs` [M], `weights` A / d [M]."""
    ratios = torch.exp(logprobs - old_logprobs)
    constant = ratios.detach()
    return Terms(-ratios * weights, constant, torch.zeros_like(constant, dtype=torch.bool))

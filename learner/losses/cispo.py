"""CISPO (MiniMax-M1, 2025): REINFORCE with a capped, constant importance weight.

    -sg(min(r, c)) · A · log π        r = exp(log π - log old)

A token past the cap keeps a gradient: nothing is masked.
"""

import torch
from torch import Tensor

from learner.losses.terms import Terms


def loss(logprobs: Tensor, old_logprobs: Tensor, weights: Tensor, cap: float) -> Terms:
    """`logprobs` log π [M], `old_logprobs` [M], `weights` A / d [M]."""
    ratios = torch.exp(logprobs.detach() - old_logprobs)
    return Terms(-(ratios.clamp(max=cap) * weights * logprobs), ratios, ratios > cap)

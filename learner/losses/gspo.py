"""GSPO (Zheng et al., 2025): PPO-clip on one ratio for a sequence, which is a rollout's owned tokens.

    -min(s A, clip(s, 1 - low, 1 + high) A)        s = exp(mean over the rollout of log π - log old)

Written for each token with the ratio sg(s) · π / sg(π), as the paper's GSPO-token is: its value is s, and
where A is one for the whole rollout the gradients of its tokens add up to that of s A. A rollout's tokens may
lie in several micro-batches; all they need of each other is the number s.
"""

import torch
from torch import Tensor

from learner.losses import ppo
from learner.losses.terms import Terms


def loss(logprobs: Tensor, log_ratios: Tensor, weights: Tensor, low: float, high: float) -> Terms:
    """`logprobs` log π [M], `log_ratios` log s of each token's rollout [M], `weights` A / d [M]."""
    ratios = torch.exp(log_ratios + logprobs - logprobs.detach())
    return ppo.clipped(ratios, weights, low, high)

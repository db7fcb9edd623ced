"""DPPO: importance sampling with a trust region in probabilities instead of ratios.

    -r A  if A > 0 and π - old <= high, or A < 0 and π - old >= -low;  else 0        r = π / old

A rare token may change its ratio a lot and its probability hardly: PPO stops it, this does not.
"""

import torch
from torch import Tensor

from learner.losses.terms import Terms


def loss(logprobs: Tensor, old_logprobs: Tensor, weights: Tensor, low: float, high: float) -> Terms:
    """`logprobs` log π [M], `old_logprobs` [M], `weights` A / d [M]."""
    moved = torch.exp(logprobs.detach()) - torch.exp(old_logprobs)
    masked = torch.where(weights < 0, moved < -low, moved > high)
    ratios = torch.exp(logprobs - old_logprobs)
    return Terms(-torch.where(masked, 0.0, ratios) * weights, ratios.detach(), masked)

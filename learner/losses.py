"""The policy loss: CISPO (MiniMax-M1, 2025): REINFORCE with a capped, constant importance weight.

With π the learner now, μ the engine at sampling, r = exp(log π - log μ), sg = stop gradient:

    loss = Σ over owned tokens of  -sg(min(r, c)) · A / N · log π

N counts the owned tokens of all rollouts of the optimizer step, also of those that add nothing, so
that micro-batches only sum. A token past the cap keeps a gradient: nothing is masked.
"""

import torch
from torch import Tensor


def cispo(logprobs: Tensor, sampled_logprobs: Tensor, weights: Tensor, clip: float) -> tuple[Tensor, Tensor]:
    """The loss summed over M tokens, and the unclipped ratios [M] without gradient.

    `logprobs` log π [M], `sampled_logprobs` log μ [M], `weights` A / N [M].
    """
    ratios = torch.exp(logprobs.detach() - sampled_logprobs)
    return -(ratios.clamp(max=clip) * weights * logprobs).sum(), ratios

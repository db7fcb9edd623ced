"""The policy loss: CISPO (MiniMax-M1, 2025): REINFORCE with a capped, constant importance weight.

With π the learner now, μ the engine at sampling, r = exp(log π - log μ), sg = stop gradient:

    loss = Σ over owned tokens of  -sg(min(r, c)) · A / N · log π

N counts the owned tokens of all rollouts of the optimizer step, also of those that add nothing, so
that micro-batches only sum. A token past the cap keeps a gradient: nothing is masked.

With a KL penalty of coefficient b to the reference ref, version 0, a token's A becomes

    A - b · sg(log π - log ref)

whose expected gradient is that of -b · KL(π | ref). (The same difference added to the loss would have a
gradient of zero on average: Tang and Munos, 2025.)
"""

import torch
from torch import Tensor


def cispo(logprobs: Tensor, sampled_logprobs: Tensor, weights: Tensor, clip: float) -> tuple[Tensor, Tensor]:
    """The loss summed over M tokens, and the unclipped ratios [M] without gradient.

    `logprobs` log π [M], `sampled_logprobs` log μ [M], `weights` A / N [M].
    """
    ratios = torch.exp(logprobs.detach() - sampled_logprobs)
    return -(ratios.clamp(max=clip) * weights * logprobs).sum(), ratios


def penalised(weights: Tensor, logprobs: Tensor, ref_logprobs: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    """`weights` A / N [M] less the penalty, `scale` = b / N; and estimates of the KL [M], never negative.

    The estimate is k3 = exp(-k1) + k1 - 1 with k1 = log π - log ref (Schulman, 2020).
    """
    k1 = logprobs.detach() - ref_logprobs
    return weights - scale * k1, torch.expm1(-k1) + k1

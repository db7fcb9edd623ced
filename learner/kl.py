"""The KL penalty to the reference, which is version 0 or a later policy (`train.ref_refresh_steps`).

With k1 = log π - log ref and b the coefficient, three forms whose expected gradient is that of
b · KL(π | ref), where the tokens were sampled from π:

* advantage: a token's A becomes A - b · sg(k1), so the policy loss weighs it as it weighs the reward
* k2: b · k1² / 2 is added to the loss
* r_k3: b · r · (exp(-k1) + k1 - 1) with r = π / μ is added, its gradient through r as well; also where the
  tokens were sampled from another μ

Left out: k3 without r, which pulls towards another policy, and k1 as a loss, whose gradient is zero on
average (Tang and Munos, 2025).
"""

import torch
from torch import Tensor

from learner.settings import KlForm


def in_advantage(weights: Tensor, logprobs: Tensor, ref_logprobs: Tensor, penalties: Tensor) -> Tensor:
    """`weights` A / d [M] less the penalty; `penalties` b / d [M]."""
    return weights - penalties * (logprobs.detach() - ref_logprobs)


def in_loss(
    form: KlForm, logprobs: Tensor, sampled_logprobs: Tensor, ref_logprobs: Tensor, penalties: Tensor
) -> Tensor:
    """What is added to the loss for each token [M]; nothing for the form that is in the advantage."""
    if form == "k2":
        return penalties * (logprobs - ref_logprobs) ** 2 / 2
    if form == "r_k3":
        return penalties * torch.exp(logprobs - sampled_logprobs) * k3(logprobs, ref_logprobs)
    return torch.zeros_like(logprobs)


def k3(logprobs: Tensor, ref_logprobs: Tensor) -> Tensor:
    """An estimate of KL(π | ref) for each token [M], never negative (Schulman, 2020)."""
    k1 = logprobs - ref_logprobs
    return torch.expm1(-k1) + k1

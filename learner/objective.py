"""The whole loss of a micro-batch: policy, KL to the reference, entropy.

    Σ over owned tokens of  policy_loss(w · (A - b · k1) / d) + b · KL / d - e · H / d

with d from `learner.aggregate`, w from `learner.correction`, H the entropy of the distribution that the token
was sampled from, and either b · k1 or b · KL, as `train.kl_form` says. Pure.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from learner import correction, kl
from learner.losses import policy_loss
from learner.settings import Settings


@dataclass(frozen=True)
class Known:
    """What is known of M owned tokens apart from the learner's own logprobs; all [M], without gradient."""

    sampled: Tensor  # log μ: the engine at sampling
    weights: Tensor  # A / d
    penalties: Tensor | None = None  # b / d, with `ref`
    ref: Tensor | None = None  # log ref; absent: no KL penalty
    start: Tensor | None = None  # log π₀, the learner when the batch began; absent: no correction
    bonuses: Tensor | None = None  # e / d, for the entropies
    log_ratios: Tensor | None = None  # log s of the token's rollout, for GSPO

    @property
    def old(self) -> Tensor:
        """log old: what the loss compares the learner with."""
        return self.sampled if self.start is None else self.start


@dataclass(frozen=True)
class Objective:
    """The loss, and per token what the metrics sum; all but the loss without gradient."""

    loss: Tensor  # scalar
    ratios: Tensor  # [M]
    clipped: Tensor  # [M] bool
    kl: Tensor | None  # [M] estimated KL to the reference
    corrected: Tensor | None  # [M] bool: the engine's correction was bounded


def objective(
    settings: Settings, logprobs: Tensor, known: Known, entropies: Tensor | None = None
) -> Objective:
    """`logprobs` log π [M] and `entropies` H [M] carry the gradient."""
    weights, estimate, corrected = known.weights, None, None
    if known.ref is not None and known.penalties is not None:
        estimate = kl.k3(logprobs.detach(), known.ref)
        if settings.kl_form == "advantage":
            weights = kl.in_advantage(weights, logprobs, known.ref, known.penalties)
    if known.start is not None:
        factors, corrected = correction.factors(settings, known.start, known.sampled)
        weights = weights * factors
    terms = policy_loss(settings, logprobs, known.old, weights, known.log_ratios)
    loss = terms.losses.sum()
    if estimate is not None and known.penalties is not None and settings.kl_form != "advantage":
        added = kl.in_loss(settings.kl_form, logprobs, known.sampled, known.ref, known.penalties)
        loss = loss + added.sum()
    if entropies is not None and known.bonuses is not None:
        loss = loss - (known.bonuses * entropies).sum()
    return Objective(loss, terms.ratios, terms.clipped, estimate, corrected)


def log_sequence_ratios(differences: Tensor, rollouts: Tensor, lengths: Tensor) -> Tensor:
    """Σ of log π - log old over each of R rollouts, by its length: log s [R] where all its tokens are here.

    `differences` log π - log old [M], `rollouts` int [M] into R, `lengths` owned tokens [R].
    """
    sums = torch.zeros_like(lengths, dtype=differences.dtype)
    return sums.index_add(0, rollouts, differences) / lengths

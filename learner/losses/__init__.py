"""The policy losses, a file for each family.

With π the learner now, old the policy that the ratio compares it with, sg = stop gradient, every loss is a
sum of terms, one for each owned token, whose weight A / d has the normaliser in it (`learner.aggregate`): so
micro-batches only sum. `old` is μ, the engine at sampling, unless `learner.correction` is asked to tell the
engine's part of the difference from the learner's.
"""

from torch import Tensor

from learner.losses import cispo, dppo, gspo, importance, ppo
from learner.losses.terms import Terms
from learner.settings import Settings


def policy_loss(
    settings: Settings, logprobs: Tensor, old_logprobs: Tensor, weights: Tensor, log_ratios: Tensor | None
) -> Terms:
    """The loss that `train.loss` names. All tensors [M]; `log_ratios`: log s of each token's rollout."""
    low, high = settings.clip_range
    match settings.loss:
        case "ppo":
            return ppo.loss(logprobs, old_logprobs, weights, low, high, settings.dual_clip)
        case "gspo":
            if log_ratios is None:
                raise ValueError("gspo needs the ratios of its rollouts")
            return gspo.loss(logprobs, log_ratios, weights, low, high)
        case "dppo":
            return dppo.loss(logprobs, old_logprobs, weights, low, high)
        case "importance":
            return importance.loss(logprobs, old_logprobs, weights)
    return cispo.loss(logprobs, old_logprobs, weights, settings.cispo_clip)

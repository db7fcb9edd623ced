"""The engine's part of the difference between learner and engine, as a weight of its own.

With π₀ the learner when the batch began and μ the engine at sampling, π / μ = (π / π₀) · (π₀ / μ). The loss
bounds the first factor, which is how far the learner moved. The second, mismatch and staleness, becomes a
constant weight of the token (Yao et al., 2025):

* truncated: π₀ / μ within [least, most]
* masked: π₀ / μ, and 0 where that is outside
"""

import torch
from torch import Tensor

from learner.settings import Settings


def factors(settings: Settings, start_logprobs: Tensor, sampled_logprobs: Tensor) -> tuple[Tensor, Tensor]:
    """The weight of each token [M], and where it is not the plain ratio, bool [M].

    `start_logprobs` log π₀ [M], `sampled_logprobs` log μ [M]; neither has a gradient.
    """
    ratios = torch.exp(start_logprobs - sampled_logprobs)
    bounded = ratios.clamp(settings.engine_correction_min, settings.engine_correction_max)
    outside = bounded != ratios
    if settings.engine_correction == "truncated":
        return bounded, outside
    return torch.where(outside, 0.0, ratios), outside

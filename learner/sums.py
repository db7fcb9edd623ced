"""What adds up over the trained tokens of a batch's micro-batches and steps."""

import msgspec
from torch import Tensor

from learner.objective import Known, Objective


class Sums(msgspec.Struct):
    """Sums; `numbers` makes means of them."""

    steps: int = 0
    tokens: int = 0  # owned, of the samples that have a gradient, once a pass
    sample_tokens: int = 0  # of the trained samples, with their context
    loss: float = 0.0  # summed over steps
    grad_norm: float = 0.0  # before clipping, summed over steps
    lr: float = 0.0  # of the steps, summed
    ratio: float = 0.0
    ratio_max: float = 0.0
    clipped: int = 0
    corrected: int = 0  # tokens whose engine correction was bounded
    surprise: float = 0.0  # Σ -log π
    drift: float = 0.0  # Σ |log π - log μ|
    kl: float = 0.0  # Σ of the estimated KL to the reference; 0 without a penalty

    def add(self, logprobs: Tensor, known: Known, found: Objective) -> None:
        """One micro-batch's tokens; `logprobs` log π [M]."""
        logprobs = logprobs.detach()
        self.tokens += len(logprobs)
        self.ratio += float(found.ratios.sum())
        self.ratio_max = max(self.ratio_max, float(found.ratios.max()))
        self.clipped += int(found.clipped.sum())
        self.surprise -= float(logprobs.sum())
        self.drift += float((logprobs - known.sampled).abs().sum())
        if found.kl is not None:
            self.kl += float(found.kl.sum())
        if found.corrected is not None:
            self.corrected += int(found.corrected.sum())

    def numbers(self) -> dict[str, float]:
        """Means over tokens or steps, for the step's row."""
        tokens, steps = max(self.tokens, 1), max(self.steps, 1)
        return {
            "loss": self.loss / steps,
            "grad_norm": self.grad_norm / steps,
            "lr": self.lr / steps,
            "ratio_mean": self.ratio / tokens,
            "ratio_max": self.ratio_max,
            "clip_fraction": self.clipped / tokens,
            "correction_fraction": self.corrected / tokens,
            "entropy": self.surprise / tokens,
            "policy_drift": self.drift / tokens,
            "kl": self.kl / tokens,
        }

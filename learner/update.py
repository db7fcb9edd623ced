"""One optimizer step: micro-batches, loss, gradients, AdamW."""

import math
from collections.abc import Callable, Sequence
from itertools import pairwise

import msgspec
import torch

from capture.errors import HoneError
from learner.batch import MicroBatch, Scored, micro_batches
from learner.groups import Member
from learner.losses import cispo, penalised
from learner.model import Model, Tensors
from learner.settings import Settings


class NonFinite(HoneError):
    """Loss or gradient of a step is not finite; the step was not made."""


class Abandoned(HoneError):
    """The learner was told to stop within a batch; nothing of it was committed."""


class Sums(msgspec.Struct):
    """What adds up over the trained tokens of micro-batches and steps."""

    steps: int = 0
    tokens: int = 0  # owned, of the samples that have a gradient, once a pass
    sample_tokens: int = 0  # of the trained samples, with their context
    loss: float = 0.0  # summed over steps
    grad_norm: float = 0.0  # before clipping, summed over steps
    lr: float = 0.0  # of the steps, summed
    ratio: float = 0.0
    ratio_max: float = 0.0
    clipped: int = 0
    surprise: float = 0.0  # Σ -log π
    drift: float = 0.0  # Σ |log π - log μ|
    kl: float = 0.0  # Σ of the estimated KL to version 0; 0 without a penalty

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
            "entropy": self.surprise / tokens,
            "policy_drift": self.drift / tokens,
            "kl": self.kl / tokens,
        }


def update(
    settings: Settings,
    model: Model,
    optimizer: torch.optim.Optimizer,
    groups: Sequence[Sequence[Member]],
    should_stop: Callable[[], bool],
    done: int,
    reference: Tensors | None = None,
) -> Sums:
    """All passes and minibatches of one batch. A minibatch in which nothing has an advantage is no step.

    `done` steps of the lineage came before; the learning rate follows from them alone. `reference`: version
    0's adapter, None where that is the bare base.
    """
    sums = Sums()
    parts = [Part(members, reference) for members in split(groups, settings.minibatches)]
    for _ in range(settings.passes):
        for part in parts:
            for group in optimizer.param_groups:
                group["lr"] = settings.lr_at(done + sums.steps)
            step(settings, model, optimizer, part, should_stop, sums)
    return sums


class Part:
    """A minibatch, and what stays the same over its passes."""

    def __init__(self, members: Sequence[Member], reference: Tensors | None) -> None:
        self.members = members
        self._reference = reference
        self._refs: list[torch.Tensor] = []

    def reference(self, model: Model, index: int, micro: MicroBatch) -> torch.Tensor:
        """log ref of the owned tokens [M] of micro-batch `index`, under version 0. Computed once: the
        micro-batches of each pass are the same."""
        if index == len(self._refs):
            with model.under(self._reference):
                self._refs.append(model.logprobs(micro))
        return self._refs[index]


def split(groups: Sequence[Sequence[Member]], parts: int) -> list[list[Member]]:
    """At most `parts` minibatches of whole groups, sizes differing by at most one group."""
    count = min(parts, len(groups))
    bounds = [round(part * len(groups) / count) for part in range(count + 1)]
    return [[member for group in groups[start:end] for member in group] for start, end in pairwise(bounds)]


def weigh(members: Sequence[Member], kl_coef: float = 0.0) -> tuple[list[Scored], float]:
    """The samples that have a gradient, each with A / N, and kl_coef / N; N counts all members' owned tokens.

    Without an advantage somewhere none has one; else a KL penalty gives every sample one.
    """
    total = sum(one.owned for one in members)
    if not any(one.advantage for one in members):
        return [], 0.0
    chosen = [one for one in members if one.advantage or kl_coef]
    scored = [Scored(sample, one.advantage / total) for one in chosen for sample in one.samples]
    return scored, kl_coef / total


def step(
    settings: Settings,
    model: Model,
    optimizer: torch.optim.Optimizer,
    part: Part,
    should_stop: Callable[[], bool],
    sums: Sums,
) -> None:
    """One optimizer step over a minibatch. `NonFinite`, `Abandoned`: this step moved no weight."""
    scored, kl_scale = weigh(part.members, settings.kl_coef)
    if not scored:
        return
    optimizer.zero_grad(set_to_none=True)
    loss = backward(settings, model, part, scored, kl_scale, should_stop, sums)
    norm = float(torch.nn.utils.clip_grad_norm_(model.parameters.values(), settings.clip_grad))
    if not (math.isfinite(loss) and math.isfinite(norm)):
        raise NonFinite(f"loss {loss}, gradient norm {norm}")
    optimizer.step()
    sums.steps += 1
    sums.loss += loss
    sums.grad_norm += norm
    sums.lr += optimizer.param_groups[0]["lr"]


def backward(
    settings: Settings,
    model: Model,
    part: Part,
    scored: Sequence[Scored],
    kl_scale: float,
    should_stop: Callable[[], bool],
    sums: Sums,
) -> float:
    """Add the gradient of the loss over `scored` to the adapter's; the loss."""
    total = 0.0
    for index, micro in enumerate(micro_batches(scored, settings.micro_batch_tokens)):
        if should_stop():
            raise Abandoned("told to stop in the middle of a step")
        ref = part.reference(model, index, micro) if kl_scale else None
        logprobs = model.logprobs(micro)
        sampled, weights = micro.sampled_logprobs.to(model.device), micro.weights.to(model.device)
        if ref is not None:
            weights, kl = penalised(weights, logprobs, ref, kl_scale)
            sums.kl += float(kl.sum())
        loss, ratios = cispo(logprobs, sampled, weights, settings.cispo_clip)
        loss.backward()
        total += float(loss.detach())
        count(sums, logprobs.detach(), sampled, ratios, settings.cispo_clip)
    sums.sample_tokens += sum(len(one.sample.token_ids) for one in scored)
    return total


def count(
    sums: Sums, logprobs: torch.Tensor, sampled: torch.Tensor, ratios: torch.Tensor, clip: float
) -> None:
    """Add one micro-batch's tokens to the sums."""
    sums.tokens += len(logprobs)
    sums.ratio += float(ratios.sum())
    sums.ratio_max = max(sums.ratio_max, float(ratios.max()))
    sums.clipped += int((ratios > clip).sum())
    sums.surprise -= float(logprobs.sum())
    sums.drift += float((logprobs - sampled).abs().sum())

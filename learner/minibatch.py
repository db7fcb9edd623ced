"""A minibatch: the rollouts of one optimizer step, and what stays the same over the passes."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor

from learner import batch
from learner.aggregate import divisors
from learner.batch import MicroBatch, Scored
from learner.frozen import Frozen
from learner.groups import Member
from learner.model import Model, Tensors
from learner.objective import Known, log_sequence_ratios
from learner.settings import Settings


class Whole(NamedTuple):
    """What GSPO needs of the rollouts whose tokens lie in several micro-batches."""

    scattered: Tensor  # bool [R]: which these are
    log_ratios: Tensor  # log s [R]; of the others nothing


class Minibatch:
    """The rollouts of one optimizer step."""

    def __init__(
        self,
        settings: Settings,
        model: Model,
        members: Sequence[Member],
        reference: Tensors | None,
        start: Tensors | None,
    ) -> None:
        """`reference` of the KL, None: the bare base; `start`: the adapter as the batch began, for
        `engine_correction`."""
        self._settings, self._model = settings, model
        self.scored = weigh(settings, members)
        self._lengths = torch.tensor([max(one.owned, 1) for one in members], device=model.device)
        self._reference = Frozen(model, reference) if settings.kl_coef else None
        self._start = Frozen(model, start) if settings.engine_correction != "none" else None

    def known(self, index: int, micro: MicroBatch, *, moved: bool) -> Known:
        """What is known of micro-batch `index` before the learner scores it.

        Until the batch has `moved` the weights, what the learner says now is what it said at the start.
        """
        device = self._model.device
        return Known(
            sampled=micro.sampled_logprobs.to(device),
            weights=micro.weights.to(device),
            penalties=micro.penalties.to(device),
            ref=None if self._reference is None else self._reference.logprobs(index, micro),
            start=self._start.logprobs(index, micro) if self._start is not None and moved else None,
            bonuses=micro.bonuses.to(device) if self._settings.entropy_coef else None,
        )

    def scored_as(
        self, known: Known, index: int, micro: MicroBatch, logprobs: Tensor, whole: Whole | None
    ) -> Known:
        """`known`, and what follows from the learner's `logprobs` [M]; `whole` for GSPO."""
        if self._start is not None and known.start is None:
            self._start.remember(index, logprobs)
            known = replace(known, start=logprobs.detach())
        if whole is None:
            return known
        here = self._log_ratios(logprobs.detach(), known.old, micro)
        chosen = torch.where(whole.scattered, whole.log_ratios, here)[micro.rollouts.to(here.device)]
        return replace(known, log_ratios=chosen.to(logprobs.dtype))

    def whole(self, proceed: Callable[[], None]) -> Whole:
        """Score the rollouts that lie in several micro-batches once more, for the sake of one number each.

        `proceed` is called before each micro-batch; it raises where that is not to be done.
        """
        limit = self._settings.micro_batch_tokens
        far = scattered(self.scored, limit)
        found = torch.zeros_like(self._lengths, dtype=torch.float64)
        for index, part in enumerate(batch.split(self.scored, limit)):
            if far.isdisjoint(one.rollout for one in part[0]):
                continue
            proceed()
            micro = batch.pack(*part)
            old = micro.sampled_logprobs.to(found.device)
            if self._start is not None:
                old = self._start.logprobs(index, micro)
            with torch.no_grad():
                found += self._log_ratios(self._model.logprobs(micro), old, micro)
        where = torch.zeros_like(self._lengths, dtype=torch.bool)
        where[sorted(far)] = True
        return Whole(where, found)

    def _log_ratios(self, logprobs: Tensor, old: Tensor, micro: MicroBatch) -> Tensor:
        rollouts = micro.rollouts.to(logprobs.device)
        return log_sequence_ratios((logprobs - old).double(), rollouts, self._lengths)


def weigh(settings: Settings, members: Sequence[Member]) -> list[Scored]:
    """The samples that have a gradient. Without an advantage somewhere none has one; else a KL penalty or an
    entropy bonus gives every sample one."""
    if not any(one.signal for one in members):
        return []
    everywhere = bool(settings.kl_coef or settings.entropy_coef)
    owned = [one.owned for one in members]
    found = divisors(owned, settings.aggregation, settings.aggregation_tokens)
    return [
        Scored(
            sample,
            one.advantage / divisor,
            settings.kl_coef / divisor,
            settings.entropy_coef / divisor,
            index,
        )
        for index, (one, divisor) in enumerate(zip(members, found, strict=True))
        if one.signal or (everywhere and one.dropped is None)
        for sample in one.samples
    ]


def scattered(scored: Sequence[Scored], tokens_max: int) -> set[int]:
    """The rollouts whose samples lie in several micro-batches."""
    seen: set[int] = set()
    found: set[int] = set()
    for samples, _ in batch.split(scored, tokens_max):
        here = {one.rollout for one in samples}
        found |= seen & here
        seen |= here
    return found


def split(groups: Sequence[Sequence[Member]], parts: int) -> list[list[Member]]:
    """At most `parts` minibatches of whole groups, sizes differing by at most one group."""
    count = min(parts, len(groups))
    bounds = [round(part * len(groups) / count) for part in range(count + 1)]
    return [[member for group in groups[start:end] for member in group] for start, end in pairwise(bounds)]

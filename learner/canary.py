"""The canary of a version: a short sequence on which an engine proves what it serves."""

from collections.abc import Iterator, Sequence

import msgspec

from capture.types import Sample, Span
from learner.batch import MicroBatch, Scored, micro_batches
from learner.model import Model, Tensors

CANDIDATES = 4


class Canary(msgspec.Struct, frozen=True, kw_only=True):
    """Token ids, and the logprobs of positions 1 and on at temperature 1 under three adapters."""

    ids: list[int]
    logprobs: list[float]
    parent_logprobs: list[float]
    base_logprobs: list[float]


def choose(
    model: Model, samples: Sequence[Sample], new: Tensors, parent: Tensors | None, tokens_max: int
) -> Canary:
    """Of the first few samples, cut to `tokens_max`, the one that `new` moved most from `parent`."""
    best: Canary | None = None
    for sample in samples[:CANDIDATES]:
        ids = window(sample, tokens_max)
        canary = Canary(
            ids=ids,
            logprobs=score(model, ids, new),
            parent_logprobs=score(model, ids, parent),
            base_logprobs=score(model, ids, None),
        )
        if best is None or movement(canary) > movement(best):
            best = canary
    if best is None:
        raise ValueError("a canary needs at least one sample")
    return best


def window(sample: Sample, tokens_max: int) -> list[int]:
    """At most `tokens_max` ids that end with the sample's last owned token."""
    end = len(sample.loss_mask) - sample.loss_mask[::-1].index(True)
    return sample.token_ids[max(0, end - tokens_max) : end]


def movement(canary: Canary) -> float:
    """Sum over positions of how far the version is from its parent, in nats."""
    return sum(abs(a - b) for a, b in zip(canary.logprobs, canary.parent_logprobs, strict=True))


def score(model: Model, ids: list[int], adapter: Tensors | None) -> list[float]:
    """The logprob of every token but the first, at temperature 1."""
    with model.under(adapter):
        return [logprob for micro in whole(ids) for logprob in model.logprobs(micro).tolist()]


def whole(ids: list[int]) -> Iterator[MicroBatch]:
    """One micro-batch that scores every token of `ids` but the first."""
    span = Span(1, len(ids), "", 0, 1.0)
    mask = [False] + [True] * (len(ids) - 1)
    sample = Sample(
        rollout_id="", token_ids=ids, loss_mask=mask, sampled_logprobs=[0.0] * len(ids), spans=[span]
    )
    return micro_batches([Scored(sample, 0.0)], len(ids))

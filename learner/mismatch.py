"""Engine against learner: the same tokens, under the version that sampled them.

Every sampled token carries the engine's logprob. The learner computes it again under the frozen
adapter of the version that sampled, at the request's temperature; the two must agree to rounding.
"""

import math
import random
from collections.abc import Mapping, Sequence

import msgspec

from capture.types import Sample
from learner.batch import Scored, micro_batches
from learner.model import Model, Tensors


class Difference(msgspec.Struct, frozen=True):
    """|learner - engine| over the compared tokens, in nats."""

    tokens: int = 0
    total: float = 0.0
    largest: float = 0.0

    def __add__(self, other: "Difference") -> "Difference":
        largest = max(self.largest, other.largest)
        return Difference(self.tokens + other.tokens, self.total + other.total, largest)


def sampled_tokens(sample: Sample) -> dict[int, int]:
    """Version -> how many of the sample's owned tokens it sampled."""
    counts: dict[int, int] = {}
    for span in sample.spans:
        owned = sum(sample.loss_mask[span.start : span.end])
        counts[span.policy_version] = counts.get(span.policy_version, 0) + owned
    return counts


def choose(samples: Sequence[Sample], fraction: float, seed: str) -> dict[int, list[Sample]]:
    """For every version that sampled, random samples with at least `fraction` of its tokens."""
    by_version: dict[int, list[tuple[Sample, int]]] = {}
    for sample in samples:
        for version, tokens in sampled_tokens(sample).items():
            by_version.setdefault(version, []).append((sample, tokens))
    chosen: dict[int, list[Sample]] = {}
    rng = random.Random(seed)
    for version, candidates in sorted(by_version.items()):
        wanted = fraction * sum(tokens for _, tokens in candidates)
        rng.shuffle(candidates)
        taken: list[Sample] = []
        have = 0
        while not taken or have < wanted:
            sample, tokens = candidates[len(taken)]
            taken.append(sample)
            have += tokens
        chosen[version] = taken
    return chosen


def measure(
    model: Model, samples: Sequence[Sample], version: int, adapter: Tensors | None, tokens_max: int
) -> Difference:
    """Compare the tokens that `version` sampled with what the learner says under `adapter`."""
    found = Difference()
    with model.under(adapter):
        for micro in micro_batches([Scored(sample, 0.0) for sample in samples], tokens_max):
            mine = micro.versions == version
            gaps = (model.logprobs(micro).cpu() - micro.sampled_logprobs).abs()[mine].nan_to_num(nan=math.inf)
            if len(gaps):
                found += Difference(len(gaps), float(gaps.sum()), float(gaps.max()))
    return found


def report(found: Mapping[int, Difference], wrong: Difference | None) -> dict[str, float]:
    """The numbers of one batch; `wrong`: the same comparison under an adapter that did not sample."""
    total = sum(found.values(), Difference())
    numbers = {
        "mismatch_max": total.largest,
        "mismatch_mean": total.total / total.tokens if total.tokens else 0.0,
        "mismatch_tokens": float(total.tokens),
        "mismatch_versions": float(sum(1 for one in found.values() if one.tokens)),
    }
    if wrong is not None:
        numbers["mismatch_wrong_adapter_max"] = wrong.largest
    return numbers

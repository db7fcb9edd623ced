"""Engine against learner: the same tokens, under the version that sampled them.

Every sampled token carries the engine's logprob. The learner computes it again under the frozen
adapter of the version that sampled, at the request's temperature; the two must agree to rounding.
"""

import logging
import math
import random
from collections.abc import Mapping, Sequence

import msgspec

from capture.types import Batch, Sample
from learner.batch import Scored, micro_batches
from learner.groups import Member
from learner.model import Model, Tensors
from learner.versions import Versions

WRONG_ADAPTER_EVERY = 10  # batches between negative controls

log = logging.getLogger(__name__)


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


class Watch:
    """Compares some tokens of every version that sampled, batch after batch."""

    def __init__(self, model: Model, versions: Versions, fraction: float) -> None:
        self._model = model
        self._versions = versions
        self._fraction = fraction  # of the trained tokens
        self._batches = 0
        self._controlled = False  # whether a wrong adapter was measured yet

    def compare(self, batch: Batch, groups: Sequence[Sequence[Member]], tokens_max: int) -> dict[str, float]:
        """The numbers of one batch; every so often with a wrong adapter's, which must be larger."""
        members = [member for group in groups for member in group]
        trained = [member for member in members if member.advantage] or members
        samples = [sample for member in trained for sample in member.samples]
        chosen = choose(samples, self._fraction, batch.id)
        found = {}
        for version, some in chosen.items():
            try:
                adapter = self._versions.adapter(version)
            except OSError as error:
                log.warning("version %d sampled, but its adapter is gone: %s", version, error)
                continue
            found[version] = measure(self._model, some, version, adapter, tokens_max)
        newest, wrong = max(chosen, default=0), None
        if newest and (not self._controlled or self._batches % WRONG_ADAPTER_EVERY == 0):
            wrong = measure(self._model, chosen[newest], newest, None, tokens_max)
            self._controlled = True
        self._batches += 1
        return report(found, wrong) | {"mismatch_missing": float(len(chosen) - len(found))}

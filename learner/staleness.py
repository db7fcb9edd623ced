"""How far behind the learner the tokens of a batch were sampled."""

from collections.abc import Sequence

from capture.types import Lineage
from learner.groups import Member
from learner.mismatch import sampled_tokens
from learner.versions import Versions


def staleness(groups: Sequence[Sequence[Member]], versions: Versions, lineage: Lineage) -> dict[str, float]:
    """Of the batch's owned tokens, in lineage versions behind the head."""
    head = versions.distance(lineage.head_version)
    tokens: dict[int, int] = {}
    for sample in (sample for group in groups for member in group for sample in member.samples):
        for version, count in sampled_tokens(sample).items():
            tokens[version] = tokens.get(version, 0) + count
    behind = {version: head - versions.distance(version) for version in tokens}
    total = sum(tokens.values())
    return {
        "staleness_mean": sum(behind[v] * n for v, n in tokens.items()) / total if total else 0.0,
        "staleness_max": float(max(behind.values(), default=0)),
        "sampling_versions": float(len(tokens)),
    }

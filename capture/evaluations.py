"""Evaluations of versions as a run's history keeps them, and which version did best. Reading is pure."""

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

import msgspec

if TYPE_CHECKING:
    from capture.store import Store

KIND = "evaluation"  # of the metrics rows


class Evaluation(msgspec.Struct, frozen=True, kw_only=True):
    """One version on one scenario set."""

    version: int
    scenarios: str  # the file
    reward: float  # its mean over the scored rollouts
    rollouts: list[str]  # ids, the unscored ones included
    at: float


def record(store: "Store", run_id: str, evaluation: Evaluation) -> None:
    """Append it to the run's history."""
    store.put_metrics(run_id, KIND, msgspec.to_builtins(evaluation))


def recorded(store: "Store", run_id: str) -> list[Evaluation]:
    """All of a run, oldest first."""
    return msgspec.convert(store.get_metrics(run_id, KIND), list[Evaluation])


def newest(evaluations: Iterable[Evaluation], version: int) -> dict[str, Evaluation]:
    """The version's last one on each scenario set."""
    return {one.scenarios: one for one in evaluations if one.version == version}


def best(evaluations: Sequence[Evaluation]) -> int | None:
    """The version with the highest mean over the sets on which the last evaluated version was evaluated, the
    newer one of equals; versions that miss one of them do not compare. None without evaluations."""
    if not evaluations:
        return None
    sets = newest(evaluations, evaluations[-1].version).keys()
    means = {
        version: sum(found[name].reward for name in sets) / len(sets)
        for version in {one.version for one in evaluations}
        if (found := newest(evaluations, version)).keys() >= sets
    }
    return max(means, key=lambda version: (means[version], version))

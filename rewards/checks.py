"""Assertions with partial credit, for reward scripts: `from rewards.checks import Checks`. Standard library
alone.

::

    def reward(trace):
        checks = Checks({"replied": 0.4, "valid": 0.6})
        checks.add("replied", bool(reply(trace)))
        with checks.that("valid"):
            assert json.loads(reply(trace))["total"] == trace["scenario"]["total"]
        return checks.score

"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager


class Checks:
    """Named checks, each worth its weight; a check that was never made is worth nothing.

    `weights` may be the script's `WEIGHTS`: then `scores` can be returned as it is. A name without a weight
    weighs 1, weight 0 is a metric; negative weights are refused (`ValueError`).
    """

    def __init__(self, weights: Mapping[str, float] | None = None) -> None:
        self.weights = dict(weights or {})
        self.credits: dict[str, float] = {}
        self.failures: dict[str, str] = {}
        """Name -> what the assertion that failed said."""
        for name, weight in self.weights.items():
            if not (math.isfinite(weight) and weight >= 0):
                raise ValueError(f"the weight of {name!r} is {weight}; it must be 0 or more")

    def add(self, name: str, credit: float | bool, note: str = "") -> None:
        """A check with its credit from 0 to 1; True and False are 1 and 0. `ValueError` outside of that, or
        where the name was used."""
        if not 0 <= credit <= 1:
            raise ValueError(f"the credit of {name!r} is {credit}; it must be from 0 to 1")
        if name in self.credits:
            raise ValueError(f"{name!r} was checked already")
        self.credits[name] = float(credit)
        if note and credit < 1:
            self.failures[name] = note

    @contextmanager
    def that(self, name: str, *also: type[Exception]) -> Iterator[None]:
        """The block has full credit unless an `assert` in it fails, or it raises one of `also`.

        Any other exception is not the agent's fault: it goes on and makes a reward error.
        """
        try:
            yield
        except (AssertionError, *also) as error:  # type: ignore[misc]
            self.add(name, 0.0, f"{type(error).__name__}: {error}" if str(error) else type(error).__name__)
        else:
            self.add(name, 1.0)

    @property
    def score(self) -> float:
        """The weighted share of what could be had, from 0 to 1. `ValueError` if nothing has weight."""
        names = {**self.weights, **self.credits}
        weights = {name: self.weights.get(name, 1.0) for name in names}
        total = math.fsum(weights.values())
        if not total:
            raise ValueError("no check has weight")
        return math.fsum(weights[name] * credit for name, credit in self.credits.items()) / total

    @property
    def scores(self) -> dict[str, float]:
        """Name -> credit, those with a weight that were not made included: named scores for the script to
        return."""
        return {name: self.credits.get(name, 0.0) for name in {**self.weights, **self.credits}}

"""Statistics of evaluations: means with 95 % intervals. Pure; no dependency on scipy."""

import math
from collections.abc import Sequence

import msgspec

Z95 = 1.959963984540054  # the 97.5 % quantile of the standard normal

# 97.5 % quantiles of Student's t for 1 to 30 degrees of freedom.
T95 = (
    12.7062, 4.3027, 3.1824, 2.7764, 2.5706, 2.4469, 2.3646, 2.3060, 2.2622, 2.2281,
    2.2010, 2.1788, 2.1604, 2.1448, 2.1314, 2.1199, 2.1098, 2.1009, 2.0930, 2.0860,
    2.0796, 2.0739, 2.0687, 2.0639, 2.0595, 2.0555, 2.0518, 2.0484, 2.0452, 2.0423,
)  # fmt: skip


class Interval(msgspec.Struct, frozen=True):
    """A mean of `n` values with its 95 % confidence interval [low, high]."""

    mean: float
    low: float
    high: float
    n: int


def t95(freedom: int) -> float:
    """97.5 % quantile of Student's t; past the table the Cornish-Fisher series (error < 1e-4)."""
    if freedom < 1:
        raise ValueError(f"{freedom} degrees of freedom")
    if freedom <= len(T95):
        return T95[freedom - 1]
    z = Z95
    return z + (z**3 + z) / (4 * freedom) + (5 * z**5 + 16 * z**3 + 3 * z) / (96 * freedom**2)


def wilson(successes: float, n: int) -> Interval:
    """Wilson's score interval of a proportion: (p + z²/2n ± z √(p(1-p)/n + z²/4n²)) / (1 + z²/n)."""
    if n < 1 or not 0 <= successes <= n:
        raise ValueError(f"{successes} successes of {n}")
    p = successes / n
    z2 = Z95 * Z95
    centre = (p + z2 / (2 * n)) / (1 + z2 / n)
    half = Z95 * math.sqrt(p * (1 - p) / n + z2 / (4 * n * n)) / (1 + z2 / n)
    return Interval(mean=p, low=max(0.0, centre - half), high=min(1.0, centre + half), n=n)


def student(values: Sequence[float]) -> Interval:
    """mean ± t·s/√n with the sample deviation s; one value has an unbounded interval."""
    n = len(values)
    if n < 1:
        raise ValueError("no values")
    mean = math.fsum(values) / n
    if n == 1:
        return Interval(mean=mean, low=-math.inf, high=math.inf, n=1)
    variance = math.fsum((value - mean) ** 2 for value in values) / (n - 1)
    half = t95(n - 1) * math.sqrt(variance / n)
    return Interval(mean=mean, low=mean - half, high=mean + half, n=n)


def interval(values: Sequence[float]) -> Interval:
    """Wilson's where every value is 0 or 1, else Student's."""
    if values and all(value in (0.0, 1.0) for value in values):
        return wilson(math.fsum(values), len(values))
    return student(values)


def clustered(values: Sequence[tuple[str, float]]) -> Interval:
    """Interval of values that belong to named clusters (the rollouts of a scenario).

    Repeats of one scenario are not independent, so where there are any the interval is Student's
    over the clusters' means (and its `mean` the mean of those); else, as for a single cluster, that of
    `interval`.
    """
    clusters: dict[str, list[float]] = {}
    for name, value in values:
        clusters.setdefault(name, []).append(value)
    if len(clusters) in (1, len(values)):
        return interval([value for _, value in values])
    return student([math.fsum(members) / len(members) for members in clusters.values()])


class Difference(msgspec.Struct, frozen=True):
    """`after` minus `before`, with its 95 % interval; `significant` iff that excludes 0."""

    delta: float
    low: float
    high: float

    @property
    def significant(self) -> bool:
        return self.low > 0 or self.high < 0


def difference(before: Sequence[float], after: Sequence[float]) -> Difference:
    """Difference of two independent means (Welch: variances and degrees of freedom apart)."""
    if len(before) < 2 or len(after) < 2:
        raise ValueError("two values on each side are needed")
    (m0, v0), (m1, v1) = _mean_and_error(before), _mean_and_error(after)
    error = v0 + v1
    if error == 0:
        return Difference(m1 - m0, m1 - m0, m1 - m0)
    freedom = error**2 / (v0**2 / (len(before) - 1) + v1**2 / (len(after) - 1))
    half = t95(max(1, int(freedom))) * math.sqrt(error)
    return Difference(m1 - m0, m1 - m0 - half, m1 - m0 + half)


def _mean_and_error(values: Sequence[float]) -> tuple[float, float]:
    """Mean and squared standard error."""
    n = len(values)
    mean = math.fsum(values) / n
    return mean, math.fsum((value - mean) ** 2 for value in values) / (n - 1) / n

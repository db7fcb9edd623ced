"""What a script's scores look like over many rollouts, and which groups they could train. Pure.

Groups are those that were declared; rollouts without one are compared as a run would: those of one scenario,
`group_size` at a time, in the order of their ids.
"""

import math
import statistics
from bisect import bisect_right
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence

import msgspec

from capture.types import RewardMean

BINS = 10
VALUES_MAX = 12  # so many different rewards get a bar each
NAMED_MAX = 5  # rollouts that are named with a failure


class Row(msgspec.Struct, frozen=True, kw_only=True):
    """One rollout under the script."""

    rollout_id: str
    scenario_id: str | None
    group_id: str | None
    status: str | None
    untrained: bool  # version 0 of its policy did it
    reward: float | None
    stored_reward: float | None  # what it has had so far
    scores: dict[str, float] = {}
    error: str | None = None
    took_s: float = 0.0


class Numbers(msgspec.Struct, frozen=True, kw_only=True):
    """A sample of numbers; `std` with divisor n, 0 for one."""

    count: int
    mean: float
    std: float
    min: float
    p25: float
    median: float
    p75: float
    max: float


class Bar(msgspec.Struct, frozen=True):
    """How many rewards are at least `low` and less than `high`; of the last bar, at most."""

    low: float
    high: float
    count: int


class ScenarioRow(msgspec.Struct, frozen=True, kw_only=True):
    """One scenario's attempts."""

    scenario_id: str
    attempts: int  # with a reward
    mean: float
    std: float
    min: float
    max: float


class Signal(msgspec.Struct, frozen=True, kw_only=True):
    """Groups of at least two rewards, and how many of them have two different ones.

    With `group_size` 1 every reward is a group, and it has signal if it is not the mean of those before it of
    its scenario.
    """

    groups: int
    with_signal: int
    declared: int  # of the groups; the others are made of attempts at one scenario
    group_size: int  # of those
    std_mean: float  # mean over groups (of one: scenarios) of the standard deviation within


class Latency(msgspec.Struct, frozen=True, kw_only=True):
    """Seconds from handing over a trace to its outcome, failures included."""

    mean_s: float
    median_s: float
    p95_s: float
    max_s: float


class Failure(msgspec.Struct, frozen=True, kw_only=True):
    """The same error, however often."""

    error: str  # of the first
    count: int
    rollout_ids: list[str]  # at most `NAMED_MAX`


class Report(msgspec.Struct, frozen=True, kw_only=True):
    """What `hone reward test` found."""

    rollouts: int
    scored: int
    failed: int
    reward: Numbers | None  # None: nothing was scored
    histogram: list[Bar]
    scores: dict[str, Numbers]
    weights: dict[str, float]  # of the script; 1 where it names none
    scenarios: list[ScenarioRow]  # the widest spread first
    signal: Signal
    latency: Latency | None
    failures: list[Failure]  # the most frequent first


def report(rows: Sequence[Row], *, weights: dict[str, float], group_size: int) -> Report:
    """Everything of these rows, which are in the order of their ids."""
    rewards = [row.reward for row in rows if row.reward is not None]
    return Report(
        rollouts=len(rows),
        scored=len(rewards),
        failed=len(rows) - len(rewards),
        reward=numbers(rewards) if rewards else None,
        histogram=histogram(rewards),
        scores={name: numbers(values) for name, values in sorted(_by_score(rows).items())},
        weights=weights,
        scenarios=scenarios(rows),
        signal=signal(rows, group_size),
        latency=latency([row.took_s for row in rows]) if rows else None,
        failures=failures(rows),
    )


def numbers(values: Sequence[float]) -> Numbers:
    """The sample's figures; at least one value."""
    ordered = sorted(values)
    same = ordered[0] == ordered[-1]  # the mean of equal floats may round away from them
    return Numbers(
        count=len(ordered),
        mean=ordered[0] if same else math.fsum(ordered) / len(ordered),
        std=0.0 if same else statistics.pstdev(ordered),
        min=ordered[0],
        p25=quantile(ordered, 0.25),
        median=quantile(ordered, 0.5),
        p75=quantile(ordered, 0.75),
        max=ordered[-1],
    )


def quantile(ordered: Sequence[float], share: float) -> float:
    """The value below which that share of an ordered sample lies, between neighbours by interpolation."""
    place = share * (len(ordered) - 1)
    low = math.floor(place)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (place - low) * (ordered[high] - ordered[low])


def histogram(values: Sequence[float]) -> list[Bar]:
    """A bar for each value where there are few, else `BINS` of equal width."""
    counts = Counter(values)
    if len(counts) <= VALUES_MAX:
        return [Bar(value, value, count) for value, count in sorted(counts.items())]
    low, width = min(values), (max(values) - min(values)) / BINS
    edges = [*(low + n * width for n in range(BINS)), max(values)]
    places = Counter(min(bisect_right(edges, value), BINS) - 1 for value in values)
    return [Bar(edges[n], edges[n + 1], places[n]) for n in range(BINS)]


def scenarios(rows: Sequence[Row]) -> list[ScenarioRow]:
    """One row for each scenario with a reward."""
    rewards: dict[str, list[float]] = defaultdict(list)
    for row in rows:
        if row.scenario_id is not None and row.reward is not None:
            rewards[row.scenario_id].append(row.reward)
    found = [(scenario_id, numbers(values)) for scenario_id, values in rewards.items()]
    made = [
        ScenarioRow(scenario_id=one, attempts=of.count, mean=of.mean, std=of.std, min=of.min, max=of.max)
        for one, of in found
    ]
    return sorted(made, key=lambda one: (-one.std, one.scenario_id))


def groups(rows: Sequence[Row], group_size: int) -> Iterator[tuple[bool, list[float]]]:
    """Whether it was declared, and the rewards, of each group of at least two."""
    declared: dict[str, list[float]] = defaultdict(list)
    loose: dict[str, list[float]] = defaultdict(list)
    for row in rows:
        if row.reward is None:
            continue
        if row.group_id is not None:
            declared[row.group_id].append(row.reward)
        elif row.scenario_id is not None:
            loose[row.scenario_id].append(row.reward)
    yield from ((True, rewards) for rewards in declared.values() if len(rewards) > 1)
    for rewards in loose.values():
        parts = (rewards[at : at + group_size] for at in range(0, len(rewards), group_size))
        yield from ((False, part) for part in parts if len(part) > 1)


def signal(rows: Sequence[Row], group_size: int) -> Signal:
    """How many groups would move the policy: those whose advantages are not all zero."""
    if group_size == 1:
        return _signal_alone(rows)
    found = list(groups(rows, group_size))
    spreads = [numbers(rewards).std for _, rewards in found]
    return Signal(
        groups=len(found),
        with_signal=sum(min(rewards) != max(rewards) for _, rewards in found),
        declared=sum(was_declared for was_declared, _ in found),
        group_size=group_size,
        std_mean=math.fsum(spreads) / len(spreads) if spreads else 0.0,
    )


def _signal_alone(rows: Sequence[Row]) -> Signal:
    by_scenario: dict[str | None, list[float]] = defaultdict(list)
    for row in rows:
        if row.reward is not None:
            by_scenario[row.scenario_id].append(row.reward)
    moved = 0
    for rewards in by_scenario.values():
        mean = RewardMean().after(rewards[0])
        for reward in rewards[1:]:
            moved += reward != mean.value
            mean = mean.after(reward)
    spreads = [numbers(rewards).std for rewards in by_scenario.values() if len(rewards) > 1]
    return Signal(
        groups=sum(map(len, by_scenario.values())),
        with_signal=moved,
        declared=0,
        group_size=1,
        std_mean=math.fsum(spreads) / len(spreads) if spreads else 0.0,
    )


def latency(seconds: Sequence[float]) -> Latency:
    """Of at least one."""
    ordered = sorted(seconds)
    return Latency(
        mean_s=math.fsum(ordered) / len(ordered),
        median_s=quantile(ordered, 0.5),
        p95_s=quantile(ordered, 0.95),
        max_s=ordered[-1],
    )


def failures(rows: Sequence[Row]) -> list[Failure]:
    """Errors that are the same but for what the script printed; the most frequent first."""
    alike: dict[str, list[Row]] = defaultdict(list)
    for row in rows:
        if row.error is not None:
            alike[row.error.partition("\nend of what the script printed:")[0]].append(row)
    made = [
        Failure(
            error=same[0].error or "",
            count=len(same),
            rollout_ids=[row.rollout_id for row in same[:NAMED_MAX]],
        )
        for same in alike.values()
    ]
    return sorted(made, key=lambda one: -one.count)


def _by_score(rows: Sequence[Row]) -> dict[str, list[float]]:
    values: dict[str, list[float]] = defaultdict(list)
    for row in rows:
        for name, value in row.scores.items():
            values[name].append(value)
    return values

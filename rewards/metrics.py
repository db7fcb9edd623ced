"""What control exports to Prometheus. The only source of gauges of rollout states."""

from collections.abc import Iterator
from typing import Any, Literal, NamedTuple

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from capture.store import Counts
from capture.types import Balance

SCORE_BUCKETS = (0.001, 0.005, 0.025, 0.1, 0.5, 1.0, 5.0, 10.0, 60.0)


class Row(NamedTuple):
    """One row of the catalogue in the docs."""

    name: str
    kind: Literal["gauge", "counter", "histogram"]
    labels: tuple[str, ...]
    meaning: str


CATALOGUE = (
    Row("hone_rollouts", "gauge", ("state",), "Rollouts in each state."),
    Row("hone_groups", "gauge", ("state",), "Groups in each state."),
    Row("hone_batches", "gauge", ("state",), "Batches in each state."),
    Row(
        "hone_tokens",
        "gauge",
        ("fate", "reason"),
        "Owned sampled tokens of the policy; fate `sampled` is the sum of the others.",
    ),
    Row("hone_rollouts_dropped", "gauge", ("reason",), "Rollouts that left before training."),
    Row("hone_calls_untrainable", "gauge", ("reason",), "Calls whose tokens cannot be trained."),
    Row("hone_ingest_backlog_calls", "gauge", (), "Committed calls that are not parsed yet."),
    Row("hone_scoring_rollouts", "gauge", (), "Rollouts with a reward worker or waiting for one."),
    Row("hone_control_leader", "gauge", (), "1 while this process holds the lease of control."),
    Row("hone_reward_script_ok", "gauge", (), "0 while the reward script does not load."),
    Row("hone_score_seconds", "histogram", (), "From handing a trace out to its outcome, waiting included."),
    Row("hone_rewards_total", "counter", ("outcome",), "Outcomes of scoring: `scored`, `reward_error`."),
    Row("hone_reward_worker_restarts_total", "counter", (), "Reward workers that were replaced."),
    Row("hone_calls_ingested_total", "counter", (), "Calls that were parsed."),
    Row("hone_rollouts_sealed_idle_total", "counter", (), "Rollouts that were sealed for being idle."),
    Row("hone_rollouts_settled_total", "counter", (), "Rollouts whose call graph was settled."),
    Row("hone_groups_closed_total", "counter", (), "Groups that closed, too small ones included."),
    Row("hone_frames_pruned_total", "counter", (), "Journal frames deleted after their retention."),
    Row("hone_store_busy_total", "counter", (), "Steps repeated because the store was busy."),
)


class Metrics:
    """The metrics of `CATALOGUE`, in a registry of their own."""

    def __init__(self) -> None:
        self._registry = CollectorRegistry()
        self._named: dict[str, Any] = {row.name: self._make(row) for row in CATALOGUE}

    def _make(self, row: Row) -> Gauge | Counter | Histogram:
        if row.kind == "histogram":
            return Histogram(
                row.name, row.meaning, row.labels, registry=self._registry, buckets=SCORE_BUCKETS
            )
        kind = Gauge if row.kind == "gauge" else Counter
        return kind(row.name, row.meaning, row.labels, registry=self._registry)

    def add(self, name: str, amount: float, **labels: str) -> None:
        """Raise a counter."""
        (self._named[name].labels(**labels) if labels else self._named[name]).inc(amount)

    def observe(self, name: str, value: float) -> None:
        """One observation of a histogram."""
        self._named[name].observe(value)

    def set(self, name: str, value: float) -> None:
        """Set a gauge that has no labels."""
        self._named[name].set(value)

    def show(self, counts: Counts, balance: Balance) -> None:
        """Set the gauges that come from the store."""
        self._fill("hone_rollouts", counts.rollouts)
        self._fill("hone_groups", counts.groups)
        self._fill("hone_batches", counts.batches)
        self._fill("hone_rollouts_dropped", counts.drops)
        self._fill("hone_calls_untrainable", counts.untrainable)
        self.set("hone_ingest_backlog_calls", counts.calls_not_ingested)
        tokens = self._named["hone_tokens"]
        tokens.clear()
        for (fate, reason), value in fates(balance).items():
            tokens.labels(fate, reason).set(value)

    def _fill(self, name: str, values: dict[str, int]) -> None:
        gauge = self._named[name]
        gauge.clear()
        for label, value in values.items():
            gauge.labels(label).set(value)

    def text(self) -> bytes:
        """The exposition text."""
        families = CollectorRegistry()
        families.register(_WithoutCreated(self._registry))
        return generate_latest(families)


class _WithoutCreated(Collector):
    """A registry without the `_created` series, which nobody asked for and no catalogue names."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._registry = registry

    def collect(self) -> Iterator[Metric]:
        for family in self._registry.collect():
            family.samples = [sample for sample in family.samples if not sample.name.endswith("_created")]
            yield family


def fates(balance: Balance) -> dict[tuple[str, str], int]:
    """The terms of the balance by (fate, reason); a term without reasons has reason ''."""
    split = {
        "dropped": balance.dropped,
        "untrainable": balance.untrainable,
        "not_for_training": balance.not_for_training,
    }
    return {
        ("sampled", ""): balance.sampled,
        ("trained", ""): balance.trained,
        ("zero_advantage", ""): balance.zero_advantage,
        ("pending", ""): balance.pending,
    } | {(fate, reason): count for fate, counts in split.items() for reason, count in counts.items()}

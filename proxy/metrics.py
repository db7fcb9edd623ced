"""The one catalogue of what the proxy measures; `docs/metrics.md` has the same rows, tested.

Names start with `hone_`, units are base units, and no label grows with rollouts or versions.
"""

import logging
from typing import Literal

import msgspec
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from capture.parameters import DISTORTING, FORWARDED, WITHHELD

log = logging.getLogger("hone.proxy")

_DURATION = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300)
_COMMIT = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10)


class Metric(msgspec.Struct, frozen=True):
    """One row of the catalogue."""

    name: str  # as exported; counters end in _total
    type: Literal["counter", "gauge", "histogram"]
    labels: tuple[str, ...]
    meaning: str
    buckets: tuple[float, ...] = ()


CATALOGUE = (
    Metric("hone_requests_total", "counter", ("route", "code"), "Model calls answered, by route and status."),
    Metric(
        "hone_request_duration_seconds",
        "histogram",
        ("route",),
        "From the arrival of a model call to its last byte.",
        _DURATION,
    ),
    Metric(
        "hone_time_to_first_token_seconds",
        "histogram",
        ("route",),
        "From the arrival of a streamed model call to the first chunk sent on.",
        _DURATION,
    ),
    Metric("hone_requests_in_flight", "gauge", (), "Model calls being answered now."),
    Metric(
        "hone_tokens_total",
        "counter",
        ("route", "kind"),
        "Tokens as upstreams counted them; kind is prompt or completion.",
    ),
    Metric(
        "hone_upstream_attempts_total",
        "counter",
        ("route", "outcome"),
        "Requests to upstreams: ok, client_error, connect, unavailable (502, 503, 504), timeout, broken, "
        "too_long, lost_adapter, stale (an idle connection was dead) or hung_up.",
    ),
    Metric(
        "hone_failed_attempts_total",
        "counter",
        ("route",),
        "Requests to upstreams that did not bring a whole answer, client errors, hang-ups and stale "
        "connections aside.",
    ),
    Metric("hone_retries_total", "counter", ("route",), "Requests that were sent to an upstream again."),
    Metric(
        "hone_fallbacks_total",
        "counter",
        ("route",),
        "Calls that went on to a fallback, by its route.",
    ),
    Metric(
        "hone_upstream_share",
        "gauge",
        ("upstream",),
        "What an engine or upstream may get of its calls: 0 while it is down or left alone, then rising "
        "to 1.",
    ),
    Metric(
        "hone_upstream_pauses_total",
        "counter",
        ("route",),
        "Times that an engine or upstream had failed so often that it was left alone for a while.",
    ),
    Metric(
        "hone_limited_calls_total",
        "counter",
        ("limit",),
        "Model calls refused because of a limit of their key, by the limit's name.",
    ),
    Metric(
        "hone_reloads_total",
        "counter",
        ("outcome",),
        "Times that hone.toml was read again: applied or invalid.",
    ),
    Metric(
        "hone_untrainable_calls_total",
        "counter",
        ("reason",),
        "Calls of training rollouts that the proxy already knows cannot be trained.",
    ),
    Metric(
        "hone_parameters_removed_total",
        "counter",
        ("parameter",),
        "Request parameters changed in training rollouts; parameters without a name here count as other.",
    ),
    Metric(
        "hone_continuity_total",
        "counter",
        ("outcome",),
        "Training calls that go on from an answer: faithful, exact (prompt made of the sampled ids), drifted "
        "(not looked at), or why nothing could be proven: unknown, unended, rewritten, stripped, too_long, "
        "unsupported, unrendered, ignored.",
    ),
    Metric("hone_commit_seconds", "histogram", (), "From handing a call over until it is durable.", _COMMIT),
    Metric("hone_commit_failures_total", "counter", (), "Calls that were not durable in commit_timeout_s."),
    Metric("hone_uncaptured_calls_total", "counter", (), "Observed calls that were served without capture."),
    Metric("hone_undelivered_calls_total", "counter", (), "Durable calls whose agent left before their end."),
    Metric("hone_journal_queue_bytes", "gauge", (), "Calls that wait for the journal."),
    Metric(
        "hone_rollouts_opened_total",
        "counter",
        ("attribution",),
        "Rollouts opened: api, or how the call was attributed that opened it.",
    ),
    Metric(
        "hone_attributed_calls_total",
        "counter",
        ("attribution", "reason"),
        "Model calls by how their rollout was found: path, key, header (reason named), stitched "
        "(tool_call, prefix) or headless (no_history, unknown, ambiguous, unreadable, store).",
    ),
    Metric("hone_engines_healthy", "gauge", (), "Engines that answered their last health check."),
    Metric("hone_active_version", "gauge", (), "Version that new training rollouts use."),
    Metric("hone_promoted_version", "gauge", (), "Version that everyone else is served."),
    Metric(
        "hone_swap_seconds",
        "histogram",
        ("stage",),
        "Load and verify of one version on one engine; activate is from published to active, promote from "
        "asked for to served.",
        _DURATION,
    ),
    Metric(
        "hone_swap_failures_total",
        "counter",
        ("stage",),
        "Loads and verifications that failed, and promotions that were refused because of that.",
    ),
    Metric("hone_pins_expired_total", "counter", (), "Training rollouts dropped to make room for a version."),
    Metric("hone_background_errors_total", "counter", ("task",), "Errors that a background task survived."),
)

# Parameters with a label of their own: agents choose names, and labels must stay few.
NAMED = FORWARDED | DISTORTING.keys() | WITHHELD.keys()


class OfRoute:
    """The children of one route, looked up once: `labels()` costs microseconds on the hot path."""

    def __init__(self, metrics: "Metrics", route: str) -> None:
        self.duration = metrics.duration.labels(route)
        self.first_token = metrics.first_token.labels(route)
        self.prompt_tokens = metrics.tokens.labels(route, "prompt")
        self.completion_tokens = metrics.tokens.labels(route, "completion")
        self.failed_attempts = metrics.failed_attempts.labels(route)


class Metrics:
    """The collectors of one proxy process, in a registry of their own."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self._rows = {row.name: row for row in CATALOGUE}
        self._routes: dict[str, OfRoute] = {}
        self._children: dict[tuple[Counter, tuple[str, ...]], Counter] = {}
        self.requests = self._counter("hone_requests_total")
        self.duration = self._histogram("hone_request_duration_seconds")
        self.first_token = self._histogram("hone_time_to_first_token_seconds")
        self.in_flight = self._gauge("hone_requests_in_flight")
        self.tokens = self._counter("hone_tokens_total")
        self.attempts = self._counter("hone_upstream_attempts_total")
        self.failed_attempts = self._counter("hone_failed_attempts_total")
        self.retries = self._counter("hone_retries_total")
        self.fallbacks = self._counter("hone_fallbacks_total")
        self.pauses = self._counter("hone_upstream_pauses_total")
        self.upstream_share = self._gauge("hone_upstream_share")
        self.limited = self._counter("hone_limited_calls_total")
        self.reloads = self._counter("hone_reloads_total")
        self.untrainable = self._counter("hone_untrainable_calls_total")
        self.removed = self._counter("hone_parameters_removed_total")
        self.continuity = self._counter("hone_continuity_total")
        self.commit_seconds = self._histogram("hone_commit_seconds")
        self.commit_failures = self._counter("hone_commit_failures_total")
        self.uncaptured = self._counter("hone_uncaptured_calls_total")
        self.undelivered = self._counter("hone_undelivered_calls_total")
        self.queue_bytes = self._gauge("hone_journal_queue_bytes")
        self.opened = self._counter("hone_rollouts_opened_total")
        self.attributed = self._counter("hone_attributed_calls_total")
        self.engines_healthy = self._gauge("hone_engines_healthy")
        self.active_version = self._gauge("hone_active_version")
        self.promoted_version = self._gauge("hone_promoted_version")
        self.swap_seconds = self._histogram("hone_swap_seconds")
        self.swap_failures = self._counter("hone_swap_failures_total")
        self.pins_expired = self._counter("hone_pins_expired_total")
        self.errors = self._counter("hone_background_errors_total")

    def route(self, name: str) -> OfRoute:
        """The children of a configured route, or of `none`."""
        found = self._routes.get(name)
        if found is None:
            found = self._routes[name] = OfRoute(self, name)
        return found

    def count(self, counter: Counter, *labels: str) -> None:
        """Add one to a child; its labels come from small closed sets."""
        child = self._children.get((counter, labels))
        if child is None:
            child = self._children[counter, labels] = counter.labels(*labels)
        child.inc()

    def count_removed(self, parameter: str) -> None:
        """A parameter that was changed in a training request."""
        self.removed.labels(parameter if parameter in NAMED else "other").inc()

    def note(self, task: str, error: object) -> None:
        """Count and log an error that a background task survives."""
        self.errors.labels(task).inc()
        log.warning("%s: %s", task, error)

    def render(self) -> bytes:
        """Prometheus' text format."""
        return generate_latest(self.registry)

    def _counter(self, name: str) -> Counter:
        row = self._rows[name]
        return Counter(name, row.meaning, row.labels, registry=self.registry)

    def _gauge(self, name: str) -> Gauge:
        row = self._rows[name]
        return Gauge(name, row.meaning, row.labels, registry=self.registry)

    def _histogram(self, name: str) -> Histogram:
        row = self._rows[name]
        return Histogram(name, row.meaning, row.labels, buckets=row.buckets, registry=self.registry)


def table() -> str:
    """The catalogue as the rows of `docs/metrics.md`."""
    rows = [
        f"| `{row.name}` | {row.type} | {', '.join(row.labels) or '-'} | {row.meaning} |" for row in CATALOGUE
    ]
    return "\n".join(["| name | type | labels | meaning |", "|---|---|---|---|", *rows])

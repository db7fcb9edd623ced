"""What the learner reports: /metrics for Prometheus, and a line of JSON for every batch."""

import json
import logging
from collections import deque
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Literal, Self

import msgspec
from prometheus_client import CollectorRegistry, Counter, Gauge, start_http_server

from capture.errors import ConfigError
from learner.sinks import Sinks

PREFIX = "hone_learner_"
LINES_MAX = 1000  # of the JSONL file that wait for room on the disk

log = logging.getLogger(__name__)


class Metric(msgspec.Struct, frozen=True):
    """One row of the catalogue."""

    name: str  # without prefix; a counter's without `_total`
    kind: Literal["gauge", "counter"]
    meaning: str
    source: str = ""  # key of a batch's numbers that it shows or sums
    labels: tuple[str, ...] = ()

    @property
    def exported(self) -> str:
        """The name that Prometheus sees."""
        return f"{PREFIX}{self.name}{'_total' if self.kind == 'counter' else ''}"


def gauge(name: str, meaning: str, source: str = "") -> Metric:
    """A number of the newest committed batch."""
    return Metric(name, "gauge", meaning, source or name)


def counter(name: str, meaning: str, source: str = "", *labels: str) -> Metric:
    """A sum since this process started."""
    return Metric(name, "counter", meaning, source, labels)


CATALOGUE = (
    counter("batches", "Committed batches, by whether they stepped.", "", "kind"),
    counter("batches_dropped", "Batches that were given up.", "", "reason"),
    counter("sink_errors", "Times that a sink of train.sinks failed.", "", "sink"),
    counter("memory_splits", "Times that micro-batches were halved because memory ran out."),
    counter("disk_full", "Times that training waited because the disk was full."),
    counter("trained_tokens", "Owned tokens that were trained on.", "trained_tokens"),
    counter("zero_advantage_tokens", "Owned tokens whose advantage was zero.", "zero_advantage_tokens"),
    counter("mismatch_tokens", "Tokens compared between engine and learner.", "mismatch_tokens"),
    gauge("step", "Optimizer steps so far in the lineage."),
    gauge("version", "Head version of the lineage."),
    gauge("groups", "Groups in the batch."),
    gauge("zero_variance_groups", "Groups in which every advantage is zero."),
    gauge("rollouts", "Rollouts in the batch."),
    gauge("overlong_rollouts", "Of them, left out by train.overlong_filter."),
    gauge("reward_mean", "Mean reward of the batch's rollouts."),
    gauge("reward_std", "Standard deviation of the batch's rewards."),
    Metric("score_mean", "gauge", "Mean of a named score over the rollouts that have it.", "", ("name",)),
    gauge("advantage_abs_mean", "Mean absolute advantage of the batch's rollouts."),
    gauge("advantage_abs_max", "Largest absolute advantage."),
    gauge("staleness_mean", "Mean staleness of owned tokens, in lineage versions."),
    gauge("staleness_max", "Largest staleness of an owned token."),
    gauge("sampling_versions", "Distinct versions that sampled in the batch."),
    gauge("loss", "Loss, mean over the batch's optimizer steps."),
    gauge("grad_norm", "Gradient norm before clipping, mean over steps."),
    gauge("learning_rate", "Learning rate, mean over the batch's optimizer steps.", "lr"),
    gauge("ratio_mean", "Mean of the loss's ratio over trained tokens: learner/sampled by default."),
    gauge("ratio_max", "Largest such ratio."),
    gauge("clip_fraction", "Share of trained tokens whose ratio the loss bounds or masks."),
    gauge("correction_fraction", "Share of trained tokens at the bounds of train.engine_correction."),
    gauge("entropy_nats", "Mean -logprob of trained tokens: an estimate of entropy.", "entropy"),
    gauge("policy_drift_nats", "Mean |learner - sampled| logprob of trained tokens.", "policy_drift"),
    gauge("kl_nats", "Estimated KL to the reference a trained token; 0 where train.kl_coef is 0.", "kl"),
    gauge("mismatch_max_nats", "Largest |learner - engine| under the sampling version.", "mismatch_max"),
    gauge("mismatch_mean_nats", "Mean |learner - engine| under the sampling version.", "mismatch_mean"),
    gauge("mismatch_versions", "Sampling versions compared."),
    gauge("mismatch_missing", "Sampling versions whose adapter is gone, so they were not compared."),
    gauge(
        "mismatch_wrong_adapter_max_nats",
        "Largest |learner - engine| under a wrong adapter; must exceed mismatch_max_nats.",
        "mismatch_wrong_adapter_max",
    ),
    gauge("tokens_per_second", "Sample tokens, context included, per second of compute.", "tokens_per_s"),
    gauge("wait_seconds", "Time without a batch to train on.", "wait_s"),
    gauge("data_seconds", "Reading the batch from the store.", "data_s"),
    gauge("forward_backward_seconds", "Optimizer steps.", "forward_backward_s"),
    gauge("mismatch_seconds", "Comparing with the engine.", "mismatch_s"),
    gauge("commit_seconds", "Checkpoint and commit of the batch before.", "commit_s"),
    gauge("publish_seconds", "Publishing the version before.", "publish_s"),
)


class Metrics:
    """The exported metrics and the JSONL file, from `with` to its end."""

    def __init__(self, host: str, port: int | None, steps_path: str | None) -> None:
        self.registry = CollectorRegistry()
        self.port = port
        self._host = host
        self._steps_path = None if steps_path is None else Path(steps_path)
        self._lines: deque[str] = deque(maxlen=LINES_MAX)  # of the file, not written yet
        self.sinks = Sinks({}, self.sink_failed)
        self._gauges: dict[str, Gauge] = {}
        self._counters: dict[str, Counter] = {}
        for metric in CATALOGUE:
            name, meaning = PREFIX + metric.name, metric.meaning
            if metric.kind == "gauge":
                self._gauges[metric.name] = Gauge(name, meaning, metric.labels, registry=self.registry)
            else:
                self._counters[metric.name] = Counter(name, meaning, metric.labels, registry=self.registry)

    def __enter__(self) -> Self:
        """Listen. `ConfigError` if the port is taken."""
        if self.port is not None:
            try:
                self._server, self._thread = start_http_server(self.port, self._host, self.registry)
            except OSError as error:
                raise ConfigError(f"train.metrics_port: {self._host}:{self.port}: {error}") from error
            self.port = self._server.server_port
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Stop listening."""
        if self.port is not None:
            self._server.shutdown()
            self._server.server_close()
            self._thread.join()

    def committed(self, batch_id: str, numbers: Mapping[str, float], stepped: bool) -> None:
        """Show and write down the numbers of one committed batch."""
        self._counters["batches"].labels("step" if stepped else "all_zero").inc()
        for metric in CATALOGUE:
            if metric.source in numbers and metric.kind == "gauge":
                self._gauges[metric.name].set(numbers[metric.source])
            elif metric.source in numbers:
                self._counters[metric.name].inc(numbers[metric.source])
        for key, value in numbers.items():
            if key.startswith("score_"):
                self._gauges["score_mean"].labels(key.removeprefix("score_")).set(value)
        self.sinks.write(int(numbers.get("step", 0)), numbers)
        if self._steps_path is not None:
            self._lines.append(json.dumps({"batch_id": batch_id, **numbers}) + "\n")
            self._write_lines(self._steps_path)

    def _write_lines(self, path: Path) -> None:
        """Append what waits, whole lines only; what finds no room waits for the next batch."""
        text = "".join(self._lines).encode()
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            with path.open("ab", buffering=0) as file:
                end = file.tell()
                if file.write(text) == len(text):
                    self._lines.clear()
                else:
                    file.truncate(end)
        except OSError as error:  # the store has the same numbers
            log.warning("%s: %s", path, error)

    def sink_failed(self, name: str) -> None:
        """Count an error of a sink."""
        self._counters["sink_errors"].labels(name).inc()

    def out_of_memory(self) -> None:
        """Count a split of the micro-batches."""
        self._counters["memory_splits"].inc()

    def disk_full(self) -> None:
        """Count a write that found no room."""
        self._counters["disk_full"].inc()

    def dropped(self, reason: str) -> None:
        """Count a batch that was given up."""
        self._counters["batches_dropped"].labels(reason).inc()


def markdown() -> str:
    """The catalogue as a section of `docs/metrics.md`."""
    lines = [
        "## Learner",
        "",
        "Served at `127.0.0.1:8002/metrics` by default. Gauges show the newest committed batch; counters sum",
        "since the process started.",
        "",
        "| name | type | labels | meaning |",
        "|---|---|---|---|",
    ]
    rows = [f"| `{m.exported}` | {m.kind} | {', '.join(m.labels)} | {m.meaning} |" for m in CATALOGUE]
    return "\n".join([*lines, *rows]) + "\n"

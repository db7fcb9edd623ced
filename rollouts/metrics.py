"""What the runner says to Prometheus; every row is explained in `docs/metrics.md`."""

import contextlib
from collections.abc import Iterator

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, start_http_server

START_BUCKETS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0)
AGENT_BUCKETS = (0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0, 600.0, 1800.0)


class Metrics:
    """The runner's own registry and everything in it."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self.in_flight = Gauge(
            "hone_runner_in_flight", "Agents that run now.", ["mode"], registry=self.registry
        )
        self.launched = Counter(
            "hone_runner_launched_total", "Agents started.", ["mode"], registry=self.registry
        )
        self.finished = Counter(
            "hone_runner_finished_total", "Rollouts finished.", ["mode", "status"], registry=self.registry
        )
        self.retries = Counter(
            "hone_runner_retries_total",
            "New attempts for rollouts that our side broke.",
            ["mode"],
            registry=self.registry,
        )
        self.groups = Counter("hone_runner_groups_total", "Groups opened.", registry=self.registry)
        self.proxy_failures = Counter(
            "hone_runner_proxy_failures_total",
            "Requests to the proxy that got no answer or a 5xx.",
            registry=self.registry,
        )
        self.start_seconds = Histogram(
            "hone_runner_start_seconds",
            "From the wish to run an agent to its process.",
            registry=self.registry,
            buckets=START_BUCKETS,
        )
        self.agent_seconds = Histogram(
            "hone_runner_agent_seconds",
            "Whole runs of agents.",
            ["mode"],
            registry=self.registry,
            buckets=AGENT_BUCKETS,
        )


@contextlib.contextmanager
def served(metrics: Metrics, port: int) -> Iterator[None]:
    """Answer Prometheus on 127.0.0.1:`port` while the block runs; 0: do not."""
    if port == 0:
        yield
        return
    server, thread = start_http_server(port, addr="127.0.0.1", registry=metrics.registry)
    try:
        yield
    finally:
        server.shutdown()
        server.server_close()
        thread.join()

"""Failed requests as the proxy and the engine counted them, out of their /metrics. Pure."""

from collections.abc import Iterator, Mapping

from prometheus_client.parser import text_string_to_metric_families

ATTEMPTS = "hone_upstream_attempts_total"
SWAP_FAILURES = "hone_swap_failures_total"
HTTP = "http_requests_total"
FINISHED = "vllm:request_success_total"
BAD_FINISHES = ("abort", "error")


def client_failures(exposition: str) -> dict[str, int]:
    """The proxy's failed attempts at the engine by outcome, failed loads and verifications included."""
    failed: dict[str, int] = {}
    for labels, value in _samples(exposition, ATTEMPTS):
        if labels.get("outcome") != "ok":
            _add(failed, labels.get("outcome", "unknown"), value)
    for labels, value in _samples(exposition, SWAP_FAILURES):
        _add(failed, f"swap_{labels.get('stage', 'unknown')}", value)
    return failed


def engine_failures(exposition: str) -> dict[str, int]:
    """What vLLM refused (4xx, 5xx) and what it began and did not finish."""
    failed: dict[str, int] = {}
    for labels, value in _samples(exposition, HTTP):
        status = labels.get("status", "")
        if labels.get("method") == "POST" and status[:1] in ("4", "5"):
            _add(failed, f"http_{status}", value)
    for labels, value in _samples(exposition, FINISHED):
        reason = labels.get("finished_reason", "")
        if reason in BAD_FINISHES:
            _add(failed, reason, value)
    return failed


def _samples(exposition: str, name: str) -> Iterator[tuple[Mapping[str, str], float]]:
    for family in text_string_to_metric_families(exposition):
        for sample in family.samples:
            if sample.name == name:
                yield sample.labels, sample.value


def _add(counts: dict[str, int], name: str, value: float) -> None:
    if value:
        counts[name] = counts.get(name, 0) + int(value)

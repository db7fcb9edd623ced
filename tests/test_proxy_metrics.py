"""The catalogue, the page that documents it and what is exported are one."""

from pathlib import Path

from prometheus_client.parser import text_string_to_metric_families
from proxy_world import COMPLETION, USER, FakeUpstream, capture_settings, completion, world

from proxy.metrics import CATALOGUE, Metrics, table

PAGE = Path(__file__).parent.parent / "docs" / "metrics.md"


def test_the_page_has_the_catalogue() -> None:
    assert table() in PAGE.read_text()


def test_the_catalogue_is_what_is_exported() -> None:
    exported = {
        family.name + ("_total" if family.type == "counter" else ""): (family.type, family.documentation)
        for family in text_string_to_metric_families(Metrics().render().decode())
        if not family.name.endswith("_created")
    }
    assert exported == {row.name: (row.type, row.meaning) for row in CATALOGUE}


def test_names_are_prefixed_in_base_units_and_labels_are_bounded() -> None:
    for row in CATALOGUE:
        assert row.name.startswith("hone_")
        assert row.name.endswith("_total") == (row.type == "counter")
        assert not {"rollout", "rollout_id", "version", "call"} & set(row.labels)
        assert "_ms" not in row.name
        assert (row.type == "histogram") == bool(row.buckets)


async def test_a_call_is_counted(tmp_path: Path) -> None:
    async with (
        FakeUpstream(completion).listening() as upstream,
        world(capture_settings(upstream.url), tmp_path) as hone,
    ):
        for _ in range(3):
            await hone.post("/v1/chat/completions", {"model": "gpt", "messages": [USER]})
        await hone.post("/v1/chat/completions", b"{")
        async with hone.client.get(hone.url + "/metrics") as response:
            families = list(text_string_to_metric_families(await response.text()))
    samples = {
        (sample.name, *sorted(sample.labels.values())): sample.value
        for family in families
        for sample in family.samples
    }
    usage = COMPLETION["usage"]
    assert isinstance(usage, dict)
    assert samples["hone_requests_total", "*", "200"] == 3
    assert samples["hone_requests_total", "400", "none"] == 1
    assert samples["hone_upstream_attempts_total", "*", "ok"] == 3
    assert samples["hone_tokens_total", "*", "prompt"] == 3 * usage["prompt_tokens"]
    assert samples["hone_tokens_total", "*", "completion"] == 3 * usage["completion_tokens"]
    assert samples["hone_rollouts_opened_total", "headless"] == 3
    assert samples[("hone_commit_seconds_count",)] == 3
    assert samples[("hone_requests_in_flight",)] == 0
    assert samples[("hone_journal_queue_bytes",)] == 0

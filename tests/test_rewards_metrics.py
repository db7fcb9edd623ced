"""The catalogue is what is exported, and what the docs say."""

import re
from pathlib import Path

import msgspec
from prometheus_client.parser import text_string_to_metric_families

from capture.store import Counts
from capture.types import Balance
from rewards.metrics import CATALOGUE, Metrics

DOCS = Path(__file__).parents[1] / "docs"
COUNTS = Counts(
    rollouts={"open": 3, "scored": 2},
    groups={"open": 1},
    batches={"taken": 1},
    calls=9,
    calls_not_ingested=4,
    failed_calls=0,
    drops={"stale": 5},
    untrainable={"grammar": 6},
)
BALANCE = Balance(100, 40, 10, {"stale": 20}, {"grammar": 5}, {"eval": 15}, 10)


def exported(metrics: Metrics) -> dict[tuple[str, tuple[str, ...]], float]:
    families = text_string_to_metric_families(metrics.text().decode())
    return {
        (sample.name, tuple(sample.labels.values())): sample.value
        for family in families
        for sample in family.samples
    }


def filled() -> Metrics:
    metrics = Metrics()
    metrics.show(COUNTS, BALANCE)
    for row in CATALOGUE:
        if row.kind == "histogram":
            metrics.observe(row.name, 0.2)
        elif row.kind == "counter":
            metrics.add(row.name, 1, **dict.fromkeys(row.labels, "x"))
    return metrics


def test_what_is_exported_is_the_catalogue() -> None:
    found = {}
    for family in text_string_to_metric_families(filled().text().decode()):
        name = f"{family.name}_total" if family.type == "counter" else family.name
        labels = {key for sample in family.samples for key in sample.labels} - {"le"}
        found[name] = (family.type, labels, family.documentation)
    assert found == {row.name: (row.kind, {*row.labels}, row.meaning) for row in CATALOGUE}


def test_the_docs_have_the_catalogue() -> None:
    rows = set()
    for row in CATALOGUE:
        labels = ", ".join(f"`{label}`" for label in row.labels) or "-"
        rows.add(f"| `{row.name}` | {row.kind} | {labels} | {row.meaning} |")
    pages = "\n".join(page.read_text() for page in DOCS.glob("metrics*.md"))
    documented = set(re.findall(r"^\| `hone_.*$", pages, re.MULTILINE))
    assert rows <= documented


def test_gauges_of_the_store() -> None:
    values = exported(filled())
    assert values["hone_rollouts", ("open",)] == 3
    assert values["hone_tokens", ("sampled", "")] == 100
    assert values["hone_tokens", ("dropped", "stale")] == 20
    assert values["hone_ingest_backlog_calls", ()] == 4
    terms = [
        value for (name, labels), value in values.items() if name == "hone_tokens" and labels[0] != "sampled"
    ]
    assert sum(terms) == 100


def test_a_state_that_emptied_disappears() -> None:
    metrics = filled()
    metrics.show(msgspec.structs.replace(COUNTS, rollouts={"scored": 5}), BALANCE)
    values = exported(metrics)
    assert ("hone_rollouts", ("open",)) not in values
    assert values["hone_rollouts", ("scored",)] == 5

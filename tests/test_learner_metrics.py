import json
import urllib.request
from pathlib import Path

import pytest

from capture.errors import ConfigError
from learner.metrics import CATALOGUE, Metrics, markdown

DOCS = Path(__file__).parents[1] / "docs" / "metrics.md"


def scrape(port: int | None) -> dict[str, float]:
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics") as response:
        lines = response.read().decode().splitlines()
    return {line.rsplit(" ", 1)[0]: float(line.rsplit(" ", 1)[1]) for line in lines if line[0] != "#"}


def test_the_page_has_the_catalogue() -> None:
    assert markdown() in DOCS.read_text()


def test_everything_catalogued_is_exported_and_nothing_else(tmp_path: Path) -> None:
    numbers = {metric.source: 2.0 for metric in CATALOGUE if metric.source}
    with Metrics("127.0.0.1", 0, str(tmp_path / "steps.jsonl")) as metrics:
        metrics.committed("b_1", numbers | {"score_win": 0.25}, True)
        metrics.committed("b_2", numbers | {"score_win": 0.5}, True)
        metrics.dropped("nonfinite")
        metrics.sink_failed("wandb")
        found = scrape(metrics.port)
    exported = {name.split("{")[0] for name in found if "_created" not in name}
    assert exported == {metric.exported for metric in CATALOGUE}
    assert found["hone_learner_trained_tokens_total"] == 4.0
    assert found["hone_learner_reward_mean"] == 2.0
    assert found['hone_learner_score_mean{name="win"}'] == 0.5
    assert found['hone_learner_batches_total{kind="step"}'] == 2.0
    assert found['hone_learner_batches_dropped_total{reason="nonfinite"}'] == 1.0
    rows = [json.loads(line) for line in (tmp_path / "steps.jsonl").read_text().splitlines()]
    assert [(row["batch_id"], row["score_win"]) for row in rows] == [("b_1", 0.25), ("b_2", 0.5)]


def test_a_taken_port_is_a_setting_to_change() -> None:
    with Metrics("127.0.0.1", 0, None) as first, pytest.raises(ConfigError, match=r"train\.metrics_port"):
        Metrics("127.0.0.1", first.port, None).__enter__()

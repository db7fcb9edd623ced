import re
import socket
import urllib.request
from pathlib import Path

from rollouts.metrics import Metrics, served

DOC = Path(__file__).parent.parent / "docs" / "metrics.md"


def documented() -> dict[str, tuple[str, tuple[str, ...]]]:
    """Name -> type, labels, of the rows of the catalogue."""
    section = DOC.read_text().partition("\n## Runner\n")[2]
    rows = re.findall(r"^\| `(\w+)` \| (\w+) \|(.*?)\| .+ \|$", section, re.MULTILINE)
    return {name: (kind, tuple(re.findall(r"`(\w+)`", labels))) for name, kind, labels in rows}


def test_the_catalogue_is_what_is_exported() -> None:
    exported = {}
    collectors = [value for name, value in vars(Metrics()).items() if name != "registry"]
    for collector in collectors:
        (family,) = collector.describe() if hasattr(collector, "describe") else collector.collect()
        suffix = "_total" if family.type == "counter" else ""
        exported[family.name + suffix] = (family.type, tuple(collector._labelnames))
    assert exported == documented()
    assert len(exported) == 8


def test_it_is_served_and_stops() -> None:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    metrics = Metrics()
    metrics.groups.inc(3)
    with served(metrics, port):
        text = urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=5).read().decode()
    assert "hone_runner_groups_total 3.0" in text
    with socket.create_server(("127.0.0.1", port)):
        pass

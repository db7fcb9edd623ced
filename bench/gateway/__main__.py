"""What the gateway costs: Hone's proxy beside a bare relay, nginx and LiteLLM, in one run.

A stub engine, each gateway and the load are processes of their own; CPU seconds are those of all processes
of a gateway, user and system. Hone runs with keys, limits, deadlines, metrics, attribution, stripping and
durable commits; calls belong to training rollouts named by path, in `stitched` to whatever they go on from.
`with ingest` counts control too, until nothing waits; sealing, settling and scoring are left out. Rounds go
round all gateways and the median counts. Requests a second and latencies mean little where load, engine and
gateway share two cores.

Last line: one JSON object.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from contextlib import ExitStack
from pathlib import Path
from statistics import median
from typing import Any

import msgspec

from bench.gateway import faults, gateways, measure
from bench.gateway.gateways import KEY, ROOT, Gateway, Hone
from bench.gateway.load import Outcome, Plan
from bench.gateway.payloads import TURNS, Kind

CASES: dict[str, tuple[Kind, int, int]] = {  # name -> kind, clients, requests
    "big": ("big", 64, 4000),
    "small": ("small", 64, 4000),
    "stream": ("stream", 16, 1000),
    "turns": ("turn", 64, 4096),
    "stitched": ("turn", 64, 4096),
    "one": ("big", 1, 500),
}
COLUMNS = (
    "case",
    "gateway",
    "CPU s/1000",
    "x relay",
    "with ingest",
    "requests/s",
    "p50 ms",
    "p99 ms",
    "failed",
)
SLOW_SHARE = 20  # LiteLLM gets that much less to do
QUICK_SHARE = 8


class Row(msgspec.Struct, kw_only=True):
    """One case on one gateway, once."""

    case: str
    gateway: str
    cpu_s_per_1000: float
    total_cpu_s_per_1000: float
    rps: float
    p50_ms: float
    p99_ms: float
    failed: int


def load(plan: Plan) -> Outcome:
    """Send it from a process of its own."""
    done = subprocess.run(
        [sys.executable, "-m", "bench.gateway.load"],
        input=msgspec.json.encode(plan),
        stdout=subprocess.PIPE,
        cwd=ROOT,
        check=True,
    )
    return msgspec.json.decode(done.stdout, type=Outcome)


def run(case: str, gateway: Gateway, requests: int) -> Row:
    """One case on one gateway."""
    kind, clients, _ = CASES[case]
    plan = Plan(port=gateway.port, kind=kind, clients=clients, requests=requests, key=KEY)
    if isinstance(gateway, Hone) and case != "stitched":
        plan.paths = gateway.paths(requests // TURNS + clients + 1)
        gateway.settle()
    total = gateway.cpu_s()
    own = gateway.proxy_cpu_s() if isinstance(gateway, Hone) else total
    outcome = load(plan)
    own_after = gateway.proxy_cpu_s() if isinstance(gateway, Hone) else gateway.cpu_s()
    if isinstance(gateway, Hone):
        gateway.settle()
    return Row(
        case=case,
        gateway=gateway.name,
        cpu_s_per_1000=1000 * (own_after - own) / outcome.requests,
        total_cpu_s_per_1000=1000 * (gateway.cpu_s() - total) / outcome.requests,
        rps=outcome.rps,
        p50_ms=outcome.p50_ms,
        p99_ms=outcome.p99_ms,
        failed=outcome.failed,
    )


def middle(rows: list[Row]) -> Row:
    """The median of every column; failures add up."""
    names = ("cpu_s_per_1000", "total_cpu_s_per_1000", "rps", "p50_ms", "p99_ms")
    figures = {name: median(getattr(row, name) for row in rows) for name in names}
    return Row(case=rows[0].case, gateway=rows[0].gateway, failed=sum(row.failed for row in rows), **figures)


def compare(found: list[Gateway], cases: list[str], rounds: int, share: int) -> list[Row]:
    """Every case on every gateway, round after round."""
    rows: dict[tuple[str, str], list[Row]] = {}
    for case in cases:
        for gateway in found:
            slow = SLOW_SHARE if gateway.name == "litellm" else 1
            run(case, gateway, max(CASES[case][1], 200 // slow))  # warm
        for turn in range(rounds):
            for gateway in found:
                if gateway.name == "litellm" and turn:
                    continue
                slow = SLOW_SHARE if gateway.name == "litellm" else 1
                requests = max(CASES[case][1], CASES[case][2] // share // slow)
                rows.setdefault((case, gateway.name), []).append(run(case, gateway, requests))
    return [middle(several) for several in rows.values()]


def grown(hone: Hone, requests: int) -> dict[str, Any]:
    """Memory of the proxy after each tenth of the requests; its caches are full after some 6,000."""
    sizes = []
    for _ in range(10):
        run("big", hone, max(64, requests // 10))
        sizes.append(measure.rss_bytes([hone.proxy.pid]))
    return {
        "memory_requests": requests,
        "rss_mb": [round(size / 1e6, 1) for size in sizes],
        "rss_growth": round(sizes[-1] / sizes[3] - 1, 3),
    }


def table(rows: list[Row], relays: dict[str, float]) -> str:
    lines = [COLUMNS]
    for row in rows:
        relay = relays.get(row.case)
        lines.append(
            (
                row.case,
                row.gateway,
                f"{row.cpu_s_per_1000:.3f}" if row.gateway != "direct" else "-",
                f"{row.cpu_s_per_1000 / relay:.2f}" if relay and row.gateway != "direct" else "-",
                f"{row.total_cpu_s_per_1000:.3f}" if row.gateway == "hone" else "-",
                f"{row.rps:.0f}",
                f"{row.p50_ms:.2f}",
                f"{row.p99_ms:.2f}",
                str(row.failed),
            )
        )
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    return "\n".join("  ".join(map(str.rjust, line, widths)) for line in lines)


def summary(rows: list[Row], fsync_ms: float) -> dict[str, Any]:
    """The figures that are looked at first."""
    at = {(row.case, row.gateway): row for row in rows}

    def figure(case: str, gateway: str, name: str) -> float | None:
        row = at.get((case, gateway))
        return None if row is None else round(getattr(row, name), 4)

    def over(one: float | None, other: float | None) -> float | None:
        return round(one / other, 2) if one is not None and other else None

    rps, litellm_rps = figure("big", "hone", "rps"), figure("big", "litellm", "rps")
    small = over(figure("small", "hone", "rps"), figure("small", "litellm", "rps"))
    cpu, relay_cpu = figure("big", "hone", "cpu_s_per_1000"), figure("big", "relay", "cpu_s_per_1000")
    p50, direct = figure("one", "hone", "p50_ms"), figure("one", "direct", "p50_ms")
    added = round(p50 - direct - fsync_ms, 3) if p50 is not None and direct is not None else None
    return {
        "rps": rps,
        "litellm_rps": litellm_rps,
        "ratio": over(rps, litellm_rps),
        "small_ratio": small,
        "cpu_s_per_1000": cpu,
        "relay_cpu_s_per_1000": relay_cpu,
        "relay_ratio": over(cpu, relay_cpu),
        "nginx_cpu_s_per_1000": figure("big", "nginx", "cpu_s_per_1000"),
        "total_cpu_s_per_1000": figure("big", "hone", "total_cpu_s_per_1000"),
        "turns_cpu_s_per_1000": figure("turns", "hone", "cpu_s_per_1000"),
        "stitched_cpu_s_per_1000": figure("stitched", "hone", "cpu_s_per_1000"),
        "stream_cpu_s_per_1000": figure("stream", "hone", "cpu_s_per_1000"),
        "relay_stream_cpu_s_per_1000": figure("stream", "relay", "cpu_s_per_1000"),
        "added_p50_ms": added,
        "fsync_ms": round(fsync_ms, 3),
        "failed": sum(row.failed for row in rows),
    }


def bench(arguments: argparse.Namespace) -> dict[str, Any]:
    share = QUICK_SHARE if arguments.quick else 1
    with tempfile.TemporaryDirectory(dir=arguments.dir) as name, ExitStack() as stack:
        directory = Path(name)
        engine = gateways.stub(stack, directory)
        hone = gateways.hone(stack, directory, engine.port)
        wanted: dict[str, Gateway | None] = {"direct": engine, "hone": hone}
        if "relay" in arguments.gateways:
            wanted["relay"] = gateways.relay(stack, directory, engine.port)
        if "nginx" in arguments.gateways:
            wanted["nginx"] = gateways.nginx(stack, directory, engine.port)
        if "litellm" in arguments.gateways:
            wanted["litellm"] = gateways.litellm(stack, directory, engine.port, arguments.litellm)
        found = [gateway for gateway in wanted.values() if gateway is not None]
        versions = {name: gateway.version if gateway else "absent" for name, gateway in wanted.items()}
        for name, version in versions.items():
            print(f"{name}: {version}")
        fsync_ms = measure.fsync_ms(directory)
        rows = compare(found, arguments.cases, 1 if arguments.quick else arguments.rounds, share)
        relays = {row.case: row.cpu_s_per_1000 for row in rows if row.gateway == "relay"}
        print(table(rows, relays))
        result = summary(rows, fsync_ms)
        result["cancelled"] = faults.hung_up(hone, engine)
        if arguments.kills:
            result |= faults.killed(directory / "kills", engine.port, max(1, arguments.kills // share))
        if arguments.memory:
            result |= grown(hone, arguments.memory // share)
    return {**result, "versions": versions, "cpus": os.cpu_count(), "rows": msgspec.to_builtins(rows)}


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="bench.gateway", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--cases", nargs="+", choices=CASES, default=list(CASES))
    parser.add_argument(
        "--gateways",
        nargs="*",
        choices=("relay", "nginx", "litellm"),
        default=["relay", "nginx", "litellm"],
        help="beside direct and hone",
    )
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument(
        "--memory", type=int, default=60_000, metavar="N", help="requests of the memory run; 0: none"
    )
    parser.add_argument("--kills", type=int, default=20, metavar="N", help="kill -9 under load; 0: none")
    parser.add_argument(
        "--litellm", default="litellm", metavar="PROGRAM", help="its command, compiled beforehand"
    )
    parser.add_argument("--dir", default=None, help="where the store is put: a disk, not tmpfs")
    parser.add_argument("--quick", action="store_true", help="an eighth of everything, once")
    parser.add_argument("--json", action="store_true", help="print nothing but the JSON object")
    arguments = parser.parse_args()
    if arguments.json:
        sys.stdout, out = sys.stderr, sys.stdout
        print(json.dumps(bench(arguments)), file=out)
    else:
        print(json.dumps(bench(arguments)))


if __name__ == "__main__":
    main()

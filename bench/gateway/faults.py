"""What happens to calls when the proxy is killed, and to generations when their clients leave."""

import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import apsw
import msgspec

from bench.gateway import gateways, payloads
from bench.gateway.gateways import KEY, ROOT, Gateway, Hone
from bench.gateway.load import Plan

KILL_AFTER_S = 1.5  # under load
CANCEL_WITHIN_S = 1.0
CLIENTS = 8


def killed(directory: Path, engine: int, times: int) -> dict[str, int]:
    """Kill the proxy under load, again and again on one store: calls whose clients have a whole answer, and
    those of them that the store does not have."""
    directory.mkdir()
    port, acknowledged = gateways.free_port(), directory / "acknowledged"
    acknowledged.touch()
    gateways.write_config(directory, engine, port, gateways.free_port())
    for _ in range(times):
        log = directory / "hone.log"
        with gateways.process(gateways.hone_command("proxy", directory), log) as proxy:
            gateways.wait_for(port, "/ready", proxy, log)
            hone = Hone(directory, port, proxy, None)
            plan = Plan(port=port, kind="big", clients=32, requests=1_000_000, key=KEY)
            plan.paths, plan.log = hone.paths(64), str(acknowledged)
            load = subprocess.Popen(
                [sys.executable, "-m", "bench.gateway.load"],
                stdin=subprocess.PIPE,
                stdout=subprocess.DEVNULL,
                cwd=ROOT,
            )
            assert load.stdin is not None
            load.stdin.write(msgspec.json.encode(plan))
            load.stdin.close()
            time.sleep(KILL_AFTER_S)
            proxy.kill()
            load.wait(60)
    answered = set(acknowledged.read_text().split())
    db = apsw.Connection(str(directory / "runs/hone.db"))
    stored = {id for (id,) in db.execute("SELECT id FROM calls")}
    return {"kills": times, "acknowledged": len(answered), "lost": len(answered - stored)}


def hung_up(hone: Hone, engine: Gateway) -> int:
    """How many of `CLIENTS` generations the engine saw cut after their clients had left."""
    before = gateways.ask(engine.port, "/stub")
    body = payloads.request("slow", 0)
    head = f"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {KEY}\r\n"
    request = f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body
    clients = [socket.create_connection(("127.0.0.1", hone.port)) for _ in range(CLIENTS)]
    for client in clients:
        client.sendall(request)
    _until(lambda: gateways.ask(engine.port, "/stub")["asked"] - before["asked"] == CLIENTS, 10.0)
    for client in clients:
        client.close()
    _until(lambda: gateways.ask(engine.port, "/stub")["cut"] - before["cut"] == CLIENTS, CANCEL_WITHIN_S)
    return gateways.ask(engine.port, "/stub")["cut"] - before["cut"]


def _until(condition: Callable[[], bool], seconds: float) -> None:
    deadline = time.monotonic() + seconds
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.02)

"""The gateways that are compared: how each is started, and where its calls go."""

import hashlib
import json
import os
import shutil
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from secrets import token_hex
from typing import Any

import apsw

from bench.gateway import measure
from bench.gateway.payloads import MODEL

KEY = f"sk-{token_hex(24)}"  # of this run
START_S = 90.0
ROOT = Path(__file__).parents[2]

NGINX = """
daemon off; worker_processes 1; pid {dir}/nginx.pid; error_log {dir}/error.log;
events {{ worker_connections 4096; }}
http {{
  access_log off; client_max_body_size 16m; client_body_buffer_size 64k;
  client_body_temp_path {dir}/b; proxy_temp_path {dir}/p; fastcgi_temp_path {dir}/f;
  uwsgi_temp_path {dir}/u; scgi_temp_path {dir}/s;
  upstream engine {{ server 127.0.0.1:{engine}; keepalive 256; }}
  server {{
    listen 127.0.0.1:{port} backlog=1024; keepalive_requests 1000000;
    location / {{
      proxy_pass http://engine; proxy_http_version 1.1; proxy_set_header Connection "";
      proxy_buffering off;
    }}
  }}
}}
"""
LITELLM = """
model_list:
  - model_name: {model}
    litellm_params: {{model: openai/{model}, api_base: "http://127.0.0.1:{engine}/v1", api_key: none}}
general_settings: {{master_key: {key}}}
"""
HONE = """
[policy]
name = "{model}"
base_model = "stub"
[engine]
urls = ["http://127.0.0.1:{engine}"]
[proxy]
port = {port}
keys = [{{ id = "bench", sha256 = "{sha256}", scopes = ["infer", "train"] }}]
[control]
port = {control}
[rewards.seal]
idle_s = 86400
"""


class Gateway:
    """A server that calls go through; `direct` is the engine itself."""

    def __init__(self, name: str, port: int, processes: list[subprocess.Popen[bytes]], version: str) -> None:
        self.name = name
        self.port = port
        self.processes = processes
        self.version = version

    @property
    def pids(self) -> list[int]:
        return [process.pid for process in self.processes]

    def cpu_s(self) -> float:
        """CPU seconds of all its processes so far."""
        return measure.cpu_s(self.pids) if self.processes else 0.0


class Hone(Gateway):
    """Proxy and control, on a store of their own."""

    def __init__(
        self,
        directory: Path,
        port: int,
        proxy: subprocess.Popen[bytes],
        control: subprocess.Popen[bytes] | None,
    ) -> None:
        processes = [proxy] if control is None else [proxy, control]
        super().__init__("hone", port, processes, _hone_version())
        self.proxy = proxy
        self.control = control
        self.db = directory / "runs/hone.db"

    def proxy_cpu_s(self) -> float:
        """Of the request path alone."""
        return measure.cpu_s([self.proxy.pid])

    def backlog(self) -> int:
        """Calls that are captured and not ingested yet."""
        db = apsw.Connection(str(self.db), flags=apsw.SQLITE_OPEN_READONLY)
        db.set_busy_timeout(5000)
        try:
            return int(db.execute("SELECT count(*) FROM calls WHERE ingested_at IS NULL").fetchall()[0][0])
        finally:
            db.close()

    def settle(self, timeout_s: float = 600.0) -> None:
        """Wait until every call is ingested."""
        deadline = time.monotonic() + timeout_s
        while self.backlog():
            if time.monotonic() > deadline:
                raise TimeoutError("ingest does not come to its end")
            time.sleep(0.2)

    def paths(self, count: int) -> list[str]:
        """Opens training rollouts; their base URLs' paths."""
        body = {"mode": "train", "max_calls": 1_000_000}
        return [f"/rollouts/{ask(self.port, '/rollouts', body)['id']}" for _ in range(count)]


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


def ask(port: int, path: str, body: object = None) -> dict[str, Any]:
    """JSON of a request with the bench's key."""
    data = None if body is None else json.dumps(body).encode()
    headers = {"Authorization": f"Bearer {KEY}", "Content-Type": "application/json"}
    request = urllib.request.Request(f"http://127.0.0.1:{port}{path}", data=data, headers=headers)
    with urllib.request.urlopen(request, timeout=30) as response:
        found: dict[str, Any] = json.load(response)
    return found


@contextmanager
def process(command: list[str], log: Path, cwd: Path = ROOT) -> Iterator[subprocess.Popen[bytes]]:
    """A program until the end of the block; bytecode is kept, as in a deployment."""
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    environment["PYTHONPATH"] = str(ROOT)
    with log.open("ab") as output:
        child = subprocess.Popen(command, stdout=output, stderr=output, cwd=cwd, env=environment)
    try:
        yield child
    finally:
        child.terminate()
        try:
            child.wait(20)
        except subprocess.TimeoutExpired:
            child.kill()
            child.wait()


def wait_for(port: int, path: str, child: subprocess.Popen[bytes], log: Path) -> None:
    """Until it answers 200."""
    deadline = time.monotonic() + START_S
    while True:
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{port}{path}", timeout=5):
                return
        except OSError:
            if child.poll() is not None or time.monotonic() > deadline:
                raise RuntimeError(f"it does not start:\n{log.read_text()[-3000:]}") from None
            time.sleep(0.1)


def stub(stack: ExitStack, directory: Path) -> Gateway:
    """The engine."""
    port, log = free_port(), directory / "stub.log"
    child = stack.enter_context(process([sys.executable, "-m", "bench.gateway.stub", str(port)], log))
    wait_for(port, "/health", child, log)
    return Gateway("direct", port, [], f"stub engine, Python {sys.version.split()[0]}")


def hone(stack: ExitStack, directory: Path, engine: int) -> Hone:
    """Proxy and control with a key and default settings otherwise."""
    port, log = free_port(), directory / "hone.log"
    write_config(directory, engine, port, free_port())
    proxy = stack.enter_context(process(hone_command("proxy", directory), log))
    wait_for(port, "/ready", proxy, log)
    control = stack.enter_context(process(hone_command("control", directory), log))
    return Hone(directory, port, proxy, control)


def write_config(directory: Path, engine: int, port: int, control: int) -> None:
    sha256 = hashlib.sha256(KEY.encode()).hexdigest()
    text = HONE.format(model=MODEL, engine=engine, port=port, control=control, sha256=sha256)
    (directory / "hone.toml").write_text(text)


def hone_command(verb: str, directory: Path) -> list[str]:
    return [sys.executable, "-m", "hone.cli.main", verb, "--config", str(directory / "hone.toml")]


def relay(stack: ExitStack, directory: Path, engine: int) -> Gateway:
    port, log = free_port(), directory / "relay.log"
    command = [sys.executable, "-m", "bench.gateway.relay", str(port), f"http://127.0.0.1:{engine}"]
    child = stack.enter_context(process(command, log))
    wait_for(port, "/health", child, log)
    version = measure.says([sys.executable, "-c", "import aiohttp; print(aiohttp.__version__)"])
    return Gateway("relay", port, [child], f"aiohttp {version}")


def nginx(stack: ExitStack, directory: Path, engine: int) -> Gateway | None:
    """None if it is not installed."""
    program = shutil.which("nginx")
    if program is None:
        return None
    home = directory / "nginx"
    home.mkdir()
    port = free_port()
    (home / "nginx.conf").write_text(NGINX.format(dir=home, engine=engine, port=port))
    command = [program, "-p", str(home), "-c", str(home / "nginx.conf")]
    child = stack.enter_context(process(command, directory / "nginx.log"))
    wait_for(port, "/health", child, directory / "nginx.log")
    return Gateway("nginx", port, [child], measure.says([program, "-v"]).removeprefix("nginx version: "))


def litellm(stack: ExitStack, directory: Path, engine: int, program: str) -> Gateway | None:
    """None if it is not installed."""
    if shutil.which(program) is None:
        return None
    port, log = free_port(), directory / "litellm.log"
    config = directory / "litellm.yaml"
    config.write_text(LITELLM.format(model=MODEL, engine=engine, key=KEY))
    command = [program, "--config", str(config), "--port", str(port), "--host", "127.0.0.1"]
    child = stack.enter_context(process(command, log, directory))
    wait_for(port, "/health/liveliness", child, log)
    python = str(Path(program).resolve().parent / "python")
    code = "import importlib.metadata as m; print(m.version('litellm'))"
    return Gateway("litellm", port, [child], f"litellm {measure.says([python, '-c', code])}")


def _hone_version() -> str:
    compiled = list((ROOT / "proxy/__pycache__").glob(f"relay.{sys.implementation.cache_tag}.pyc"))
    commit = measure.says(["git", "-C", str(ROOT), "rev-parse", "--short", "HEAD"])
    return f"hone {commit}, bytecode {'compiled' if compiled else 'not compiled'}"

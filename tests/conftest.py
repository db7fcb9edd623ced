"""Real things for tests: free ports, a store, and one real vLLM for the whole session."""

import asyncio
import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from capture.store import Store
from hone import reaper
from hone.engine import launch, offline
from hone.process import die_with_parent, kill_group
from hone.settings import EngineSettings, PolicySettings

ROOT = Path(__file__).parent.parent
BASE_MODEL = ROOT / "examples" / "tictactoe" / "base"
POLICY = "policy"
LORA_RANK = 8
ENGINE_START_S = 300.0


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Of several workers one runs whatever shares the engine, so that there is one."""
    for item in items:
        if "engine" in getattr(item, "fixturenames", ()):
            item.add_marker(pytest.mark.xdist_group("engine"))


@dataclass(frozen=True)
class Engine:
    """A real vLLM that serves the example's base model and takes adapters of rank 8."""

    url: str  # without /v1
    policy: str  # the base answers to `<policy>@v0`
    base_dir: Path
    adapter_dir: Path  # empty at start; tests put their versions there
    log: Path
    pid: int


def unused_port() -> int:
    """A TCP port of the loopback interface that nobody listens on."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@pytest.fixture
def free_port() -> int:
    return unused_port()


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    from capture.sqlite import SqliteStore

    opened = SqliteStore(tmp_path / "hone.db")
    yield opened
    opened.close()


@pytest.fixture(scope="session")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    """Started when the first test asks for it; stopped with its whole group at the end."""
    root = tmp_path_factory.mktemp("engine")
    with start_engine(root, unused_port()) as running:
        yield running


class start_engine:  # noqa: N801 - used as a function
    """A context with a vLLM of its own; kill tests use it directly."""

    def __init__(self, root: Path, port: int, base_dir: Path = BASE_MODEL) -> None:
        settings = EngineSettings(port=port, max_model_len=1024, device="cpu")
        start = launch(
            PolicySettings(name=POLICY, base_model=str(base_dir)),
            settings,
            lora_rank=LORA_RANK,
            hardware="cpu",
            cores=os.cpu_count() or 1,
            python=sys.executable,
        )
        (root / "adapters").mkdir(exist_ok=True)
        self._log = root / "engine.log"
        with self._log.open("ab") as log:
            self._process = subprocess.Popen(
                start.command,
                env={**os.environ, **offline(start.env, base_model_is_local=True)},
                stdout=log,
                stderr=log,
                start_new_session=True,
                preexec_fn=die_with_parent(),
            )
        # vLLM's engine process outlives a server that is killed: the reaper ends it if pytest dies.
        self._reaper = subprocess.Popen(
            [sys.executable, "-I", "-S", reaper.__file__, "no-mark"], stdin=subprocess.PIPE
        )
        assert self._reaper.stdin is not None
        self._reaper.stdin.write(f"+{self._process.pid}\n".encode())
        self._reaper.stdin.flush()
        self.engine = Engine(
            url=f"http://127.0.0.1:{port}",
            policy=POLICY,
            base_dir=base_dir,
            adapter_dir=root / "adapters",
            log=self._log,
            pid=self._process.pid,
        )

    def __enter__(self) -> Engine:
        deadline = time.monotonic() + ENGINE_START_S
        while not self._answers():
            if self._process.poll() is not None or time.monotonic() > deadline:
                self.__exit__()
                pytest.fail("vLLM did not start; its log ends:\n" + self._log.read_text()[-4000:])
            time.sleep(0.25)
        return self.engine

    def __exit__(self, *_: object) -> None:
        kill_group(self._process.pid, signal.SIGTERM)
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(10)
        kill_group(self._process.pid)
        self._process.wait()
        assert self._reaper.stdin is not None
        self._reaper.stdin.write(f"-{self._process.pid}\n".encode())
        self._reaper.stdin.close()
        self._reaper.wait()

    def _answers(self) -> bool:
        try:
            with urllib.request.urlopen(f"{self.engine.url}/health", timeout=5) as response:
                return bool(response.status == 200)
        except (OSError, urllib.error.URLError):
            return False


@pytest.fixture(scope="session")
def event_loop_policy() -> asyncio.AbstractEventLoopPolicy:
    return asyncio.DefaultEventLoopPolicy()

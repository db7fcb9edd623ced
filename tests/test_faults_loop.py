"""kill -9 to each part at its worst moment, in a short training run through the real vLLM.

Every run must still finish, train nothing twice and lose nothing that was acknowledged; `Stack.finish`
checks that.
"""

import os
import signal
import sqlite3
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from conftest import Engine
from stack import Stack

from capture.store import Store

pytestmark = [pytest.mark.faults, pytest.mark.engine, pytest.mark.timeout(400)]


@contextmanager
def locked(stack: Stack) -> Iterator[None]:
    """Hold the store's write lock: every commit stands still inside its transaction's start."""
    connection = sqlite3.connect(stack.root / "runs" / "hone.db", isolation_level=None, timeout=30)
    connection.execute("BEGIN IMMEDIATE")
    try:
        yield
    finally:
        connection.execute("ROLLBACK")
        connection.close()


def calls_flow(store: Store) -> bool:
    """Whether the run is well under way."""
    return store.counts().calls >= 20


@pytest.fixture
def stack(request: pytest.FixtureRequest, tmp_path: Path, engine: Engine) -> Iterator[Stack]:
    """A run on the session's engine; its policy's name is its own, so are its adapters' names."""
    policy = "p" + request.node.name.removeprefix("test_").replace("[", "-").replace("]", "")[:40]
    # The runner has to be back before what its death left open counts as idle.
    idle_s = 60.0 if "runner" in policy else 8.0
    running = Stack(tmp_path, policy=policy, engine_url=engine.url, idle_s=idle_s)
    yield running
    running.stop()


def test_proxy_mid_stream_and_mid_commit(stack: Stack) -> None:
    stack.start()
    stack.wait_for(calls_flow, "calls")
    with locked(stack):
        time.sleep(0.5)  # answers have arrived, are being committed, and no agent has seen their end
        stack.kill("proxy")
    stack.finish()


def test_control_mid_ingest(stack: Stack) -> None:
    stack.start()
    stack.wait_for(calls_flow, "calls")
    with locked(stack):
        time.sleep(0.3)
        stack.kill("control")
    stack.finish()


@pytest.mark.parametrize("point", ["before_commit", "after_checkpoint", "after_commit", "mid_publish"])
def test_learner(stack: Stack, point: str) -> None:
    marker = stack.root / "killed"
    stack.start({"HONE_FAULT": f"learn:{point}:{marker}"})
    stack.finish()
    assert marker.exists(), "the learner never reached the point"


def test_runner(stack: Stack) -> None:
    stack.start()
    stack.wait_for(calls_flow, "calls")
    stack.kill("runner")
    stack.finish()
    with stack.store() as store:
        assert store.counts().drops.get("failed", 0) > 0  # its agents died with it and were replaced


def test_engine_mid_generation_and_mid_load(tmp_path: Path) -> None:
    stack = Stack(tmp_path, policy="policy", engine_url=None)
    stack.start()
    try:
        stack.wait_for(calls_flow, "calls", 240)
        stack.kill("engine")  # requests are being sampled
        stack.wait_for(lambda store: published(store) and calls_flow(store), "a version", 240)
        pid = stack.pid("engine")
        assert pid is not None
        os.kill(pid, signal.SIGSTOP)  # the next load request stands in its socket
        stack.wait_for(lambda store: waiting_for_load(store) or ended(store), "a version to load", 60)
        os.kill(pid, signal.SIGKILL)
        stack.finish(300)
    finally:
        stack.stop()


def published(store: Store) -> bool:
    return any(version.version > 0 for version in store.versions("policy"))


def waiting_for_load(store: Store) -> bool:
    return any(version.state == "published" for version in store.versions("policy"))


def ended(store: Store) -> bool:
    run = store.latest_run()
    return run is not None and store.lineage(run).ended

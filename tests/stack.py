"""A whole Hone as its users run it: `hone train` under its supervisor, on a configuration of its own."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from conftest import ROOT, unused_port

from capture.sqlite import SqliteStore
from capture.store import Store
from hone.state import read_state, state_path

EXAMPLE = ROOT / "examples" / "tictactoe"
ACKNOWLEDGED = "acknowledged.txt"

CONFIG = """
[policy]
name = "{policy}"
base_model = "{example}/base"
[run]
dir = "{root}/runs"
[engine]
urls = {urls}
port = {engine_port}
max_model_len = 1024
[proxy]
port = {proxy_port}
[control]
port = {control_port}
[rewards]
script = "{example}/reward.py"
group_deadline_s = 60.0
seal = {{ idle_s = {idle} }}
[train]
scenarios = "{example}/train.jsonl"
agent = "python acknowledging_agent.py"
cwd = "{tests}"
env = {{ ACKNOWLEDGED = "{root}/acknowledged.txt" }}
concurrency = 16
group_size = 4
groups_per_batch = 4
batches_outstanding_max = {ahead}
batch_wait_s = 10.0
steps_max = {steps}
lr = 2e-3
lora_rank = 8
metrics_port = {learner_port}
"""


class Stack:
    """One run of `hone train` in `root`, and what it left in the store."""

    def __init__(
        self,
        root: Path,
        *,
        policy: str,
        engine_url: str | None,
        steps: int = 2,
        ahead: int = 2,
        idle_s: float = 8.0,
    ) -> None:
        self.root = root
        self.policy = policy
        self.proxy_url = f"http://127.0.0.1:{(port := unused_port())}"
        self.config = root / "hone.toml"
        self.config.write_text(
            CONFIG.format(
                policy=policy,
                example=EXAMPLE,
                tests=ROOT / "tests",
                root=root,
                urls=json.dumps([engine_url] if engine_url else []),
                engine_port=unused_port(),
                proxy_port=port,
                control_port=unused_port(),
                learner_port=unused_port(),
                steps=steps,
                ahead=ahead,
                idle=idle_s,
            )
        )
        self.steps = steps
        self.process: subprocess.Popen[bytes] | None = None

    def start(self, env: Mapping[str, str] | None = None) -> None:
        """Start `hone train`; its output goes to `train.log`."""
        with (self.root / "train.log").open("ab") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "hone.cli.main", "train", "-c", str(self.config)],
                stdout=log,
                stderr=log,
                env={**os.environ, **(env or {})},
            )

    def stop(self) -> None:
        """SIGTERM, and wait until the supervisor has left nothing behind."""
        if self.process is not None and self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
            self.process.wait(60)

    def pid(self, part: str) -> int | None:
        """The part's process, as the supervisor's state file has it."""
        state = read_state(state_path(self.root / "runs", "train"))
        found = state.part(part) if state else None
        return found.pid if found else None

    def kill(self, part: str) -> None:
        """SIGKILL to the part's process alone: what it started is the supervisor's business."""
        pid = self.pid(part)
        assert pid is not None, f"{part} does not run; {self.logs()}"
        os.kill(pid, signal.SIGKILL)

    @contextmanager
    def store(self) -> Iterator[Store]:
        opened = SqliteStore(self.root / "runs" / "hone.db")
        try:
            yield opened
        finally:
            opened.close()

    def wait_for(self, condition: Callable[[Store], Any], what: str, timeout_s: float = 120.0) -> None:
        """Until `condition(store)` is true; fails with the parts' logs when it takes too long."""
        deadline = time.monotonic() + timeout_s
        while not (self.root / "runs" / "hone.db").exists():
            assert time.monotonic() < deadline, f"no store in {timeout_s} s: {self.logs()}"
            time.sleep(0.05)
        with self.store() as store:
            while not condition(store):
                assert time.monotonic() < deadline, f"{what}: not in {timeout_s} s; {self.logs()}"
                assert self.process is None or self.process.poll() is None, f"it ended; {self.logs()}"
                time.sleep(0.02)

    def finish(self, timeout_s: float = 180.0) -> None:
        """Wait for the end of the run, and hold it to every promise that a crash must not break."""
        assert self.process is not None
        try:
            code = self.process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"not finished in {timeout_s} s; {self.logs()}") from None
        assert code == 0, self.logs()
        with self.store() as store:
            run_id = store.latest_run()
            assert run_id is not None
            assert store.verify() == []
            assert store.ledger_twice() == 0
            assert store.lineage(run_id).step == self.steps
            balance = store.balance(self.policy)
            assert balance.exact, balance
            assert balance.pending == 0, balance
            assert balance.trained > 0, balance
            lost = [call for call in self.acknowledged() if not known(store, call)]
            assert not lost, f"acknowledged and lost: {lost}"

    def acknowledged(self) -> list[str]:
        """Ids of the calls whose answers an agent had read to the end."""
        path = self.root / ACKNOWLEDGED
        return path.read_text().split() if path.exists() else []

    def logs(self) -> str:
        """The ends of all logs."""
        logs = [self.root / "train.log", *sorted((self.root / "runs" / "logs").glob("*.log"))]
        return "\n".join(f"== {log.name}\n{log.read_text()[-1500:]}" for log in logs if log.exists())


def known(store: Store, call_id: str) -> bool:
    """Whether the call is in the store."""
    from capture.errors import NotFound

    try:
        store.rollout_of_call(call_id)
    except NotFound:
        return False
    return True

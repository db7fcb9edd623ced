"""kill -9 while calls are committed and ingested: what was acknowledged is there, and all of it sound."""

import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from capture_makers import POLICY, rollout

from capture.graph import build, fates
from capture.ingest import Ingester
from capture.sqlite import SqliteStore

WRITER = """
import asyncio, sys
from pathlib import Path
sys.path.insert(0, sys.argv[3])
from capture_makers import raw_call
from capture.journal import Journal, Settings
from capture.sqlite import SqliteStore

async def commit_forever(journal, rollout_id):
    while True:
        record = raw_call(rollout_id)
        await journal.commit(record)
        print(record.id, flush=True)

async def main():
    journal = Journal(SqliteStore(Path(sys.argv[1])), Settings(frame_calls_max=4))
    journal.start()
    await asyncio.gather(*(commit_forever(journal, id) for id in sys.argv[2].split(",")))

asyncio.run(main())
"""
INGESTER = """
import sys
from pathlib import Path
from capture.ingest import Ingester
from capture.sqlite import SqliteStore

ingester = Ingester(SqliteStore(Path(sys.argv[1])))
print("ready", flush=True)
while True:
    ingester.step(8)
"""


def start(code, *args):
    command = [sys.executable, "-c", code, *map(str, args)]
    root = Path(__file__).parents[1]
    return subprocess.Popen(command, stdout=subprocess.PIPE, start_new_session=True, cwd=root)


@pytest.mark.parametrize("seed", range(2))
def test_kill_9(tmp_path, seed):
    rng = random.Random(seed)
    path = tmp_path / "store.sqlite"
    store = SqliteStore(path)
    store.start_run("run1", POLICY, {})
    ids = [store.open_rollout(rollout()).id for _ in range(6)]
    running = [start(WRITER, path, ",".join(ids), Path(__file__).parent), start(INGESTER, path)]
    try:
        lines = [running[0].stdout.readline(), running[1].stdout.readline()]
        assert all(lines)
        time.sleep(rng.uniform(0.2, 0.6))
    finally:
        for process in rng.sample(running, 2):
            os.killpg(process.pid, signal.SIGKILL)
    acknowledged = (lines[0] + running[0].stdout.read()).decode().split("\n")[:-1]
    for process in running:
        process.wait()
        process.stdout.close()

    assert store.verify() == []
    assert acknowledged
    for call_id in acknowledged:
        assert store.rollout_of_call(call_id) in ids
    ingester = Ingester(store)
    while ingester.step():
        pass
    total = 0
    for rollout_id in ids:
        store.seal_rollout(rollout_id, "completed")
        calls = store.calls(rollout_id)
        store.settle(rollout_id, fates(build(calls)))
        assert all((call.prompt_ids, call.sampled_ids) == ([1, 2], [3, 4]) for call in calls)
        total += len(calls)
    assert total == store.counts().calls >= len(acknowledged)
    assert store.verify() == []
    assert store.balance(POLICY).sampled == 2 * total
    store.close()

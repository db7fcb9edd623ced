"""Supervision of real processes: order, readiness, restarts, clean ends, and ends that are not."""

import asyncio
import os
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from hone.process import started_ticks
from hone.reaper import marked
from hone.state import read_state, state_path
from hone.supervisor import Part, PartFailed, Restarts, Supervisor, backoff_s

PYTHON = sys.executable
SLEEP = "import time; time.sleep(300)"
FAST = Restarts(backoff_s=0.05, backoff_max_s=0.2, stable_s=30.0, crashes_max=3)


def make(tmp_path: Path, *parts: Part, restarts: Restarts = FAST) -> Supervisor:
    return Supervisor(
        parts,
        kind="up",
        state_file=state_path(tmp_path, "up"),
        log_dir=tmp_path / "logs",
        restarts=restarts,
    )


def script(name: str, code: str, **settings: object) -> Part:
    return Part(name=name, command=[PYTHON, "-c", textwrap.dedent(code)], **settings)


async def until(condition: Callable[[], object], timeout_s: float = 20.0) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, "it never came true"
        await asyncio.sleep(0.02)


def wait_until(condition: Callable[[], object]) -> None:
    asyncio.run(until(condition))


def alive(pid: int) -> bool:
    return started_ticks(pid) is not None


@pytest.mark.parametrize(
    ("crashes", "pause"), [(1, 0.5), (2, 1.0), (3, 2.0), (5, 8.0), (6, 15.0), (60, 15.0)]
)
def test_backoff_doubles_up_to_its_bound(crashes: int, pause: float) -> None:
    assert backoff_s(crashes, Restarts()) == pause


async def test_finite_parts_end_the_run_and_take_the_others_with_them(tmp_path: Path) -> None:
    supervisor = make(tmp_path, script("serves", SLEEP), script("works", "print('done')", finite=True))
    run = asyncio.create_task(supervisor.run())
    await supervisor.ready("serves")
    pid = supervisor.status("serves").pid
    await asyncio.wait_for(run, 20)
    assert pid is not None
    assert not alive(pid)
    assert supervisor.status("works").state == "done"
    assert supervisor.status("serves").state == "stopped"
    assert supervisor.status("serves").exit_code == -signal.SIGTERM
    assert (tmp_path / "logs" / "works.log").read_text() == "done\n"


async def test_a_part_starts_only_when_what_it_needs_is_ready(tmp_path: Path, free_port: int) -> None:
    server = f"""
        import time; time.sleep(0.7)
        from http.server import HTTPServer, SimpleHTTPRequestHandler
        HTTPServer(("127.0.0.1", {free_port}), SimpleHTTPRequestHandler).serve_forever()
    """
    url = f"http://127.0.0.1:{free_port}/"
    reader = f"import urllib.request; print(urllib.request.urlopen('{url}').status)"
    supervisor = make(
        tmp_path,
        script("server", server, ready_url=url),
        script("reader", reader, after=("server",), finite=True),
    )
    await asyncio.wait_for(supervisor.run(), 30)
    assert (tmp_path / "logs" / "reader.log").read_text() == "200\n"
    assert supervisor.status("reader").restarts == 0


async def test_what_dies_is_started_again(tmp_path: Path) -> None:
    supervisor = make(tmp_path, script("part", SLEEP))
    run = asyncio.create_task(supervisor.run())
    await supervisor.ready("part")
    first = supervisor.status("part").pid
    assert first is not None
    os.kill(first, signal.SIGKILL)
    await until(lambda: supervisor.status("part").state == "ready" and supervisor.status("part").pid != first)
    assert supervisor.status("part").restarts == 1
    assert supervisor.status("part").exit_code == -signal.SIGKILL
    supervisor.stop()
    await asyncio.wait_for(run, 20)


async def test_dying_too_often_ends_the_run_with_the_end_of_the_log(tmp_path: Path) -> None:
    supervisor = make(
        tmp_path, script("other", SLEEP), script("part", "import sys; sys.exit('no such model')")
    )
    with pytest.raises(
        PartFailed, match=r"(?s)^part died 4 times in a row \(last: exit code 1\).*no such model"
    ):
        await asyncio.wait_for(supervisor.run(), 30)
    assert supervisor.status("part").state == "failed"
    assert supervisor.status("part").restarts == 3
    assert supervisor.status("other").state == "stopped"
    assert marked(supervisor.marker.encode()) == []


async def test_a_part_that_ignores_sigterm_is_killed_at_its_deadline(tmp_path: Path) -> None:
    stubborn = """
        import signal, time
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        print("deaf", flush=True)
        time.sleep(300)
    """
    supervisor = make(tmp_path, script("part", stubborn, stop_timeout_s=0.5))
    run = asyncio.create_task(supervisor.run())
    await until(lambda: (tmp_path / "logs" / "part.log").exists())
    await until(lambda: "deaf" in (tmp_path / "logs" / "part.log").read_text())
    supervisor.stop()
    await asyncio.wait_for(run, 10)
    assert supervisor.status("part").exit_code == -signal.SIGKILL


async def test_a_reaper_that_died_is_replaced_and_told_what_runs(tmp_path: Path) -> None:
    supervisor = make(tmp_path, script("part", SLEEP))
    run = asyncio.create_task(supervisor.run())
    await supervisor.ready("part")
    first = supervisor.reaper_pid
    assert first is not None
    os.kill(first, signal.SIGKILL)
    await until(lambda: supervisor.reaper_pid not in (None, first))
    assert supervisor.status("part").state == "ready"
    supervisor.stop()
    await asyncio.wait_for(run, 20)


async def test_grandchildren_that_moved_to_another_session_do_not_stay(tmp_path: Path) -> None:
    parent = f"""
        import subprocess, sys, time
        child = subprocess.Popen([sys.executable, "-c", {SLEEP!r}], start_new_session=True)
        print(child.pid, flush=True)
        time.sleep(300)
    """
    supervisor = make(tmp_path, script("part", parent))
    run = asyncio.create_task(supervisor.run())
    log = tmp_path / "logs" / "part.log"
    await until(lambda: log.exists() and log.read_text().strip())
    stray = int(log.read_text())
    assert alive(stray)
    supervisor.stop()
    await asyncio.wait_for(run, 20)
    assert not alive(stray)


async def test_the_state_file_tells_what_runs(tmp_path: Path) -> None:
    supervisor = make(tmp_path, script("part", SLEEP))
    run = asyncio.create_task(supervisor.run())
    await supervisor.ready("part")
    state = read_state(state_path(tmp_path, "up"))
    assert state is not None
    assert state.alive
    assert state.pid == os.getpid()
    assert [(part.name, part.state, part.pid) for part in state.parts] == [
        ("part", "ready", supervisor.status("part").pid)
    ]
    supervisor.stop()
    await asyncio.wait_for(run, 20)
    state = read_state(state_path(tmp_path, "up"))
    assert state is not None
    assert [part.state for part in state.parts] == ["stopped"]


async def test_a_log_that_grew_too_large_is_moved_aside_at_the_next_start(tmp_path: Path) -> None:
    (tmp_path / "logs").mkdir()
    (tmp_path / "logs" / "part.log").write_text("x" * 1000)
    part = script("part", "print('new')", finite=True)
    state_file = state_path(tmp_path, "up")
    await Supervisor(
        [part], kind="up", state_file=state_file, log_dir=tmp_path / "logs", log_bytes_max=999
    ).run()
    assert (tmp_path / "logs" / "part.log").read_text() == "new\n"
    assert (tmp_path / "logs" / "part.log.1").read_text() == "x" * 1000


LONE = """
import asyncio, sys
from pathlib import Path
from hone.state import state_path
from hone.supervisor import Part, Supervisor

root = Path(sys.argv[1])
parent = '''
import subprocess, sys, time
sleep = [sys.executable, "-c", "import time; time.sleep(300)"]
moved = subprocess.Popen(sleep, start_new_session=True)
unmarked = subprocess.Popen(sleep, env={})
print(moved.pid, unmarked.pid, flush=True)
time.sleep(300)
'''
part = Part(name="part", command=[sys.executable, "-c", parent])
supervisor = Supervisor([part], kind="up", state_file=state_path(root, "up"), log_dir=root / "logs")
print(supervisor.marker, flush=True)
asyncio.run(supervisor.run())
"""


def test_a_supervisor_killed_with_sigkill_leaves_no_process(tmp_path: Path) -> None:
    lone = subprocess.Popen([PYTHON, "-c", LONE, str(tmp_path)], stdout=subprocess.PIPE)
    try:
        assert lone.stdout is not None
        marker = lone.stdout.readline().strip()
        log = tmp_path / "logs" / "part.log"
        wait_until(lambda: log.exists() and log.read_text().strip())
        moved, unmarked = map(int, log.read_text().split())
        assert len(marked(marker)) == 2  # the part and its child in another session
        assert alive(moved)
        assert alive(unmarked)
        lone.kill()
        lone.wait()
        wait_until(lambda: not marked(marker) and not alive(moved) and not alive(unmarked))
        state = read_state(state_path(tmp_path, "up"))
        assert state is not None
        assert not state.alive
    finally:
        lone.kill()
        lone.stdout.close()

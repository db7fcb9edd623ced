import asyncio
import contextlib
import json
import os
import signal
import sys
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from capture.errors import ConfigError
from rollouts.agents import LaunchError
from rollouts.command import agent_environ, parse_command
from rollouts.launch import Finished, Launcher
from rollouts.settings import Settings

HERE = Path(__file__).parent
ENVIRON = {"PATH": os.environ["PATH"], "HONE_KEY": "hidden", "LANG": "C.UTF-8"}

AGENT = """
import json, os, sys
from helper import double

class Local:
    pass

def main():
    scenario = json.load(open(os.environ["SCENARIO_FILE"]))
    print(json.dumps({
        "name": __name__, "file": __file__, "argv": sys.argv, "path": sys.path[0], "cwd": os.getcwd(),
        "main": sys.modules["__main__"].Local is Local, "doubled": double(scenario["n"]),
        "model": os.environ["MODEL_NAME"], "url": os.environ["OPENAI_BASE_URL"],
        "key": os.environ["OPENAI_API_KEY"], "extra": os.environ.get("EXTRA"),
        "hone": [name for name in os.environ if name.startswith("HONE_")],
        "leader": os.getpid() == os.getsid(0), "stdin": sys.stdin.read(),
    }))
    print("to stderr", file=sys.stderr)

if __name__ == "__main__":
    main()
"""


def agent(tmp_path: Path, text: str) -> Path:
    (tmp_path / "helper.py").write_text("def double(n):\n    return 2 * n\n")
    (tmp_path / "agent.py").write_text(text)
    return tmp_path


@contextlib.asynccontextmanager
async def launching(cwd: Path, **settings: Any) -> AsyncIterator[Launcher]:
    launcher = Launcher(Settings(**{"agent": "python agent.py", "cwd": str(cwd), **settings}), ENVIRON)
    await launcher.start()
    try:
        yield launcher
    finally:
        await launcher.close()


async def run(launcher: Launcher, rollout_id: str = "r_1", **scenario: Any) -> Finished:
    return await launcher.run(rollout_id, scenario, base_url="http://x/v1", api_key="k")


def alive(pid: int) -> bool:
    try:
        with open(f"/proc/{pid}/stat") as stat:
            return stat.read().rsplit(")", 1)[1].split()[0] != "Z"
    except OSError:
        return False


async def gone(pid: int, within_s: float = 5.0) -> bool:
    for _ in range(int(within_s / 0.02)):
        if not alive(pid):
            return True
        await asyncio.sleep(0.02)
    return False


async def pids_in(file: Path, count: int, within_s: float = 20.0) -> list[int]:
    deadline = time.monotonic() + within_s
    while time.monotonic() < deadline:
        if file.exists() and len(found := file.read_text().split()) >= count:
            return [int(pid) for pid in found]
        await asyncio.sleep(0.02)
    raise AssertionError(f"{file} never held {count} process ids")


async def test_fork_and_command_show_an_agent_the_same_world(tmp_path: Path) -> None:
    cwd = agent(tmp_path, AGENT)
    seen = []
    for launch in ("fork", "command"):
        async with launching(cwd, launch=launch, agent="python agent.py --depth 3") as launcher:
            assert launcher.forks == (launch == "fork")
            finished = await run(launcher, n=21)
            assert (finished.status, finished.exit_code) == ("completed", 0)
            assert finished.stderr == "to stderr\n"
            seen.append(json.loads(finished.stdout))
    assert seen[0] == seen[1]
    assert seen[0] == {
        "name": "__main__",
        "file": str(cwd / "agent.py"),
        "argv": ["agent.py", "--depth", "3"],
        "path": str(cwd),
        "cwd": str(cwd),
        "main": True,
        "doubled": 42,
        "model": "policy",
        "url": "http://x/v1",
        "key": "k",
        "extra": None,
        "hone": [],
        "leader": True,
        "stdin": "",
    }


@pytest.mark.parametrize("launch", ["fork", "command"])
@pytest.mark.parametrize(
    ("text", "code", "stderr"),
    [
        ("import sys; sys.exit(3)", 3, ""),
        ("import sys; sys.exit()", 0, ""),
        ("import sys; sys.exit('no luck')", 1, "no luck\n"),
        ("raise SystemExit(256 + 7)", 7, ""),
        ("import os; os._exit(9)", 9, ""),
        ("import os; os.abort()", -6, ""),
        (
            "from threading import Timer\nTimer(0.1, lambda: print('late')).start()",
            0,
            "",
        ),
        ("import atexit; atexit.register(print, 'late')", 0, ""),
    ],
)
async def test_exit_codes_are_pythons(tmp_path: Path, launch: str, text: str, code: int, stderr: str) -> None:
    async with launching(agent(tmp_path, text), launch=launch) as launcher:
        finished = await run(launcher)
    assert finished.exit_code == code
    assert finished.status == ("completed" if code == 0 else "agent_error")
    assert stderr in finished.stderr
    assert finished.stdout == ("late\n" if "late" in text else "")


async def test_tracebacks_are_the_same(tmp_path: Path) -> None:
    cwd = agent(tmp_path, "def f():\n    1 / 0\nf()\n")
    errors = []
    for launch in ("fork", "command"):
        async with launching(cwd, launch=launch) as launcher:
            finished = await run(launcher)
            assert finished.exit_code == 1
            errors.append(
                [line for line in finished.stderr.splitlines() if "^" not in line and "~" not in line]
            )
    assert errors[0] == errors[1]
    assert errors[0][-1] == "ZeroDivisionError: division by zero"


async def test_a_syntax_error_is_the_agents_error(tmp_path: Path) -> None:
    async with launching(agent(tmp_path, "def :\n"), launch="fork") as launcher:
        finished = await run(launcher)
    assert (finished.status, finished.exit_code) == ("agent_error", 1)
    assert "SyntaxError" in finished.stderr


async def test_an_edited_agent_runs_as_edited(tmp_path: Path) -> None:
    async with launching(agent(tmp_path, "print('one')"), launch="fork") as launcher:
        assert (await run(launcher)).stdout == "one\n"
        (tmp_path / "agent.py").write_text("print('two!')")
        assert (await run(launcher)).stdout == "two!\n"


async def test_children_do_not_share_their_luck(tmp_path: Path) -> None:
    async with launching(agent(tmp_path, "import random; print(random.random())"), launch="fork") as launcher:
        drawn = {(await run(launcher, f"r_{number}")).stdout for number in range(5)}
    assert len(drawn) == 5


@pytest.mark.parametrize("launch", ["fork", "command"])
async def test_only_the_end_of_endless_output_is_kept(tmp_path: Path, launch: str) -> None:
    text = "import sys\nfor i in range(200_000): print(i)\nprint('x' * 400, file=sys.stderr)"
    async with launching(agent(tmp_path, text), launch=launch, stdout_bytes_max=14) as launcher:
        finished = await run(launcher)
    assert finished.stdout == "199998\n199999\n"
    assert len(finished.stderr) == 401


TREE = """
import os, subprocess, sys, time
file = os.environ["PIDS"]
def note():
    with open(file, "a") as out:
        print(os.getpid(), file=out, flush=True)
note()
if os.fork() == 0:            # a child in the group
    note()
    time.sleep(60)
if os.fork() == 0:            # one that leaves the group, and its child, which is orphaned
    os.setsid()
    if os.fork() == 0:
        os.setsid()
        note()
        time.sleep(60)
    note()
    os._exit(0)
{end}
"""


@pytest.mark.parametrize("launch", ["fork", "command"])
@pytest.mark.parametrize(("end", "status"), [("time.sleep(60)", "timeout"), ("time.sleep(1)", "completed")])
async def test_nothing_an_agent_started_survives_it(
    tmp_path: Path, launch: str, end: str, status: str
) -> None:
    file = tmp_path / "pids"
    cwd = agent(tmp_path, TREE.format(end=end))
    async with launching(cwd, launch=launch, timeout_s=2.0, env={"PIDS": str(file)}) as launcher:
        finished = await run(launcher)
        assert finished.status == status
        pids = await pids_in(file, 4)
        for pid in pids:
            assert await gone(pid, 1.0), f"{pid} of {pids} survived"
        assert finished.duration_s < 5


async def test_a_cancelled_run_kills_its_agent_and_leaves_no_file(tmp_path: Path) -> None:
    file = tmp_path / "pids"
    cwd = agent(tmp_path, TREE.format(end="time.sleep(60)"))
    async with launching(cwd, env={"PIDS": str(file)}) as launcher:
        task = asyncio.create_task(run(launcher))
        pids = await pids_in(file, 4)
        directory = launcher._directory
        assert directory is not None
        assert [path.name for path in directory.iterdir()] == ["r_1.json"]
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        for pid in pids:
            assert await gone(pid)
        assert list(directory.iterdir()) == []
    assert not directory.exists()


RUNNER = """
import asyncio, os, sys
from rollouts.launch import Launcher
from rollouts.settings import Settings

async def main():
    settings = Settings(cwd=sys.argv[1], launch=sys.argv[2], env={"PIDS": sys.argv[3]})
    launcher = Launcher(settings, dict(os.environ))
    await launcher.start()
    print(launcher._server._process.pid, launcher._directory, flush=True)
    await asyncio.gather(*(launcher.run(f"r_{n}", {}, base_url="u", api_key="k") for n in range(3)))

asyncio.run(main())
"""


@pytest.mark.parametrize("launch", ["fork", "command"])
async def test_agents_die_with_a_killed_runner(tmp_path: Path, launch: str) -> None:
    file = tmp_path / "pids"
    cwd = agent(tmp_path, TREE.format(end="time.sleep(60)"))
    runner = await asyncio.create_subprocess_exec(
        *(sys.executable, "-c", RUNNER, str(cwd), launch, str(file)),
        cwd=HERE.parent,
        stdout=asyncio.subprocess.PIPE,
    )
    assert runner.stdout is not None
    server, directory = (await runner.stdout.readline()).decode().split()
    pids = await pids_in(file, 12)
    runner.send_signal(signal.SIGKILL)
    await runner.wait()
    for pid in [int(server), *pids]:
        assert await gone(pid), f"{pid} survived the runner"
    assert not Path(directory).exists()


async def test_a_dead_server_of_agents_is_infrastructure_and_replaced(tmp_path: Path) -> None:
    file = tmp_path / "pids"
    (tmp_path / "agent.py").write_text(
        "import os, time\nopen(os.environ['PIDS'], 'a').write(f'{os.getpid()}\\n')\ntime.sleep(60)"
    )
    async with launching(tmp_path, env={"PIDS": str(file)}) as launcher:
        task = asyncio.create_task(run(launcher))
        (pid,) = await pids_in(file, 1)
        assert launcher._server is not None
        os.kill(launcher._server._process.pid, signal.SIGKILL)
        finished = await task
        assert (finished.status, finished.exit_code) == ("failed", None)
        assert finished.stderr == "the server of agents died"
        assert await gone(pid)
        (tmp_path / "agent.py").write_text("print('again')")
        assert (await run(launcher, "r_2")).stdout == "again\n"


async def test_imports_that_start_threads_are_not_forked(tmp_path: Path, caplog: Any) -> None:
    library = tmp_path / "library"
    library.mkdir()
    (library / "threaded.py").write_text(
        "import threading, time\nthreading.Thread(target=time.sleep, args=(60,), daemon=True).start()"
    )
    (tmp_path / "agent").mkdir()
    cwd = agent(tmp_path / "agent", "import threaded\nprint('ok')")
    async with launching(cwd, env={"PYTHONPATH": str(library)}) as launcher:
        assert not launcher.forks
        assert (await run(launcher)).stdout == "ok\n"
    assert "its imports started 1 threads" in caplog.text


async def test_any_command_runs(tmp_path: Path) -> None:
    async with launching(tmp_path, agent="sh -c 'cat \"$SCENARIO_FILE\"; exit 5'") as launcher:
        finished = await run(launcher, n=1)
    assert (finished.stdout, finished.exit_code) == ('{"n":1}', 5)


async def test_a_program_that_vanishes_is_infrastructure(tmp_path: Path) -> None:
    program = tmp_path / "play"
    program.write_text("#!/bin/sh\necho hi\n")
    program.chmod(0o755)
    async with launching(tmp_path, agent="./play") as launcher:
        assert (await run(launcher)).stdout == "hi\n"
        program.unlink()
        finished = await run(launcher)
    assert (finished.status, finished.exit_code) == ("failed", None)
    assert "No such file" in finished.stderr


@pytest.mark.parametrize(
    ("settings", "what"),
    [
        ({"agent": "python none.py"}, "there is no file"),
        ({"agent": "no-such-program"}, "there is no program 'no-such-program'"),
        ({"agent": "sh -c true", "launch": "fork"}, "needs an agent like"),
        ({"agent": "python 'x"}, "cannot split"),
        ({"cwd": "/no/such/place"}, "is not a directory"),
    ],
)
def test_a_command_that_cannot_work_is_a_config_error(
    tmp_path: Path, settings: dict[str, Any], what: str
) -> None:
    with pytest.raises(ConfigError, match=what):
        parse_command(Settings(**{"cwd": str(tmp_path), **settings}))


def test_agents_get_no_configuration_of_ours() -> None:
    settings = Settings(env={"A": "2", "HONE_OK": "asked for"})
    assert agent_environ({"A": "1", "B": "1", "HONE_ADMIN_KEY": "x"}, settings) == {
        "A": "2",
        "B": "1",
        "HONE_OK": "asked for",
    }


async def test_a_fork_server_that_cannot_start_falls_back_or_says_so(tmp_path: Path) -> None:
    python = tmp_path / "python3"
    python.write_text(f'#!/bin/sh\ncase "$1" in *forkserver.py) exit 1;; esac\nexec {sys.executable} "$@"\n')
    python.chmod(0o755)
    cwd = agent(tmp_path, "print('cold')")
    async with launching(cwd, agent="./python3 agent.py") as launcher:
        assert not launcher.forks
        assert (await run(launcher)).stdout == "cold\n"
    with pytest.raises(LaunchError):
        async with launching(cwd, agent="./python3 agent.py", launch="fork"):
            pass

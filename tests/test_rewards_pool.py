"""The reward script in its own process: every way in which scripts go wrong."""

import ast
import asyncio
import signal
import subprocess
import sys
import time
import venv
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from capture.errors import ConfigError
from rewards.pool import Pool
from rewards.script import Failed, Outcome, Scored
from rewards.settings import Settings

SCRIPT = """
import asyncio, os, subprocess, sys, time
from fractions import Fraction
from neighbour import half

WEIGHTS = {"format": 0.2}

def reward(trace):
    return globals()[trace["do"]](trace)

def number(trace): return half(trace["value"])
async def later(trace):
    await asyncio.sleep(0.001)
    return trace["value"]
def named(trace): return {"outcome": 1, "format": Fraction(1, 2)}
def nan(trace): return float("nan")
def inf(trace): return {"outcome": float("-inf")}
def none(trace): return None
def text(trace): return "1.0"
def boolean(trace): return True
def empty(trace): return {}
def nameless(trace): return {3: 1.0}
def raises(trace): raise KeyError("scenario")
def exits(trace): sys.exit(0)
def interrupts(trace): raise KeyboardInterrupt
def dies(trace): os._exit(7)
def crashes(trace):
    import ctypes
    ctypes.string_at(0)
def big(trace): return float(len(bytearray(2 << 30)))
def prints(trace):
    for _ in range(200_000):
        print("x" * 100)
    os.system("head -c 1000000 /dev/zero; head -c 1000000 /dev/zero >&2")
    return 1.0
def prints_and_raises(trace):
    print("the board is", 42)
    raise ValueError("no")
def writes(trace):
    with open(trace["path"], "wb") as file:
        file.write(bytes(1 << 20))
    return 1.0
def environment(trace): return float(len(set(os.environ) - {"LC_CTYPE"}))
async def waits(trace):
    async def inner(): await asyncio.sleep(600)
    return await inner()
async def ignores_its_end(trace):
    while True:
        try:
            await asyncio.sleep(600)
        except asyncio.CancelledError:
            pass
def forks(trace):
    os.fork()
    return 1.0
def hangs(trace):
    children = [
        subprocess.Popen(["sleep", "600"]),
        subprocess.Popen(["sleep", "600"], start_new_session=True),
        subprocess.Popen(["sh", "-c", "setsid sleep 600 & echo $! > " + trace["path"] + ".orphan"]),
    ]
    children[2].wait()
    with open(trace["path"], "w") as file:
        file.write(" ".join(str(each.pid) for each in children[:2]) + " " + str(os.getpid()))
    while True:
        pass
"""


@pytest.fixture
def script(tmp_path: Path) -> Path:
    (tmp_path / "neighbour.py").write_text("def half(x): return x / 2\n")
    path = tmp_path / "reward.py"
    path.write_text(SCRIPT)
    return path


@asynccontextmanager
async def running(script: Path, **settings: object) -> AsyncIterator[Pool]:
    defaults = {"timeout_s": 20.0, "workers": 1}
    pool = Pool(Settings(script=str(script), **defaults | settings))
    await pool.start()
    try:
        yield pool
    finally:
        await pool.close()


async def wait_until(what: Callable[[], bool], seconds: float = 15.0) -> None:
    deadline = time.monotonic() + seconds
    while not what():
        assert time.monotonic() < deadline, "it never happened"
        await asyncio.sleep(0.01)


def alive(pid: int) -> bool:
    """Whether it runs; a zombie does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] not in "ZX"
    except FileNotFoundError:
        return False


def pids(path: Path) -> list[int]:
    return [int(pid) for pid in f"{path.read_text()} {Path(f'{path}.orphan').read_text()}".split()]


def failed(outcome: Outcome, *words: str) -> None:
    assert isinstance(outcome, Failed)
    for word in words:
        assert word in outcome.error


async def test_what_counts_as_a_score(script: Path) -> None:
    async with running(script) as pool:
        first = await pool.score({"do": "number", "value": 3})
        assert isinstance(first, Scored)
        assert (first.scores, first.weights, len(first.script_hash)) == ({"reward": 1.5}, {"format": 0.2}, 64)
        later = await pool.score({"do": "later", "value": -2.25})
        assert isinstance(later, Scored)
        assert later.scores == {"reward": -2.25}
        named = await pool.score({"do": "named"})
        assert isinstance(named, Scored)
        assert named.scores == {"outcome": 1.0, "format": 0.5}
        assert pool.restarts == 0


@pytest.mark.parametrize(
    ("do", "words"),
    [
        ("nan", ["nan"]),
        ("inf", ["-inf", "outcome"]),
        ("none", ["NoneType"]),
        ("text", ["str"]),
        ("boolean", ["bool"]),
        ("empty", ["0 names"]),
        ("nameless", ["3 is no name"]),
        ("raises", ["Traceback", "KeyError: 'scenario'", "reward.py"]),
        ("exits", ["SystemExit: 0"]),
        ("interrupts", ["KeyboardInterrupt"]),
        ("prints_and_raises", ["ValueError: no", "the board is 42"]),
    ],
)
async def test_what_does_not_is_an_error_and_never_zero(script: Path, do: str, words: list[str]) -> None:
    async with running(script) as pool:
        failed(await pool.score({"do": do}), *words)
        after = await pool.score({"do": "number", "value": 2})
        assert isinstance(after, Scored)
        assert (after.scores["reward"], pool.restarts) == (1.0, 0)


@pytest.mark.parametrize(("do", "words"), [("dies", ["died"]), ("crashes", ["died", "Segmentation fault"])])
async def test_a_dead_process_is_replaced(script: Path, do: str, words: list[str]) -> None:
    async with running(script) as pool:
        failed(await pool.score({"do": do}), *words)
        assert isinstance(await pool.score({"do": "number", "value": 2}), Scored)
        assert pool.restarts == 1


async def test_memory_and_file_limits(script: Path, tmp_path: Path) -> None:
    async with running(script, memory_bytes_max=1 << 30, file_bytes_max=1 << 16) as pool:
        failed(await pool.score({"do": "big"}), "MemoryError")
        written = tmp_path / "written"
        failed(await pool.score({"do": "writes", "path": str(written)}), "File too large")
        assert written.stat().st_size <= 1 << 16
        assert isinstance(await pool.score({"do": "number", "value": 2}), Scored)


async def test_printing_a_lot_costs_nothing_but_time(script: Path) -> None:
    async with running(script) as pool:
        outcome = await pool.score({"do": "prints"})
        assert isinstance(outcome, Scored)
        assert outcome.scores == {"reward": 1.0}


async def test_the_environment_is_empty(script: Path) -> None:
    async with running(script) as pool:
        outcome = await pool.score({"do": "environment"})
        assert isinstance(outcome, Scored)
        assert outcome.scores == {"reward": 0.0}


async def test_a_fork_that_comes_back_answers_once(script: Path) -> None:
    async with running(script) as pool:
        assert isinstance(await pool.score({"do": "forks"}), Scored)
        outcome = await pool.score({"do": "number", "value": 8})
        assert isinstance(outcome, Scored)
        assert outcome.scores == {"reward": 4.0}


async def test_at_the_deadline_the_whole_tree_dies(script: Path, tmp_path: Path) -> None:
    path = tmp_path / "pids"
    async with running(script, timeout_s=2.0) as pool:
        started = time.monotonic()
        outcome = await pool.score({"do": "hangs", "path": str(path)})
        assert time.monotonic() - started < 10
        failed(outcome, "no result after 2 s", "in hangs")
        tree = pids(path)
        assert len(tree) == 4
        await wait_until(lambda: not any(map(alive, tree)))
        assert isinstance(await pool.score({"do": "number", "value": 2}), Scored)


@pytest.mark.parametrize("do", ["waits", "ignores_its_end"])
async def test_async_that_never_ends_says_what_it_waits_for(script: Path, do: str) -> None:
    async with running(script, timeout_s=2.0) as pool:
        outcome = await pool.score({"do": do})
        failed(outcome, "no result after 2 s", "a task waits", "asyncio.sleep(600)")
        assert isinstance(outcome, Failed)
        assert 2.0 <= outcome.took_s < 60.0
        assert isinstance(await pool.score({"do": "later", "value": 2}), Scored)


async def test_a_granted_environment_is_there(script: Path) -> None:
    async with running(script, env={"A": "1", "B": "2"}) as pool:
        outcome = await pool.score({"do": "environment"})
        assert isinstance(outcome, Scored)
        assert outcome.scores == {"reward": 2.0}
    with pytest.raises(ConfigError, match=r"rewards\.env"):
        await Pool(Settings(script=str(script), env={"A": "\0"})).start()


HOST = """
import asyncio, sys
from rewards.pool import Pool
from rewards.settings import Settings

async def main():
    pool = Pool(Settings(script=sys.argv[1], timeout_s=600))
    await pool.start()
    await pool.score({"do": "hangs", "path": sys.argv[2]})

asyncio.run(main())
"""


def spawn_host(script: Path, path: Path) -> "subprocess.Popen[bytes]":
    command = [sys.executable, "-c", HOST, str(script), str(path)]
    return subprocess.Popen(command, cwd=Path(__file__).parents[1])


async def test_nothing_survives_the_death_of_the_host(script: Path, tmp_path: Path) -> None:
    path = tmp_path / "pids"
    host = spawn_host(script, path)
    try:
        await wait_until(path.is_file)
        await wait_until(lambda: len(pids(path)) == 4)
        tree = pids(path)
        assert all(map(alive, tree))
    finally:
        host.send_signal(signal.SIGKILL)
        host.wait()
    await wait_until(lambda: not any(map(alive, tree)))


async def test_a_cancelled_trace_never_answers_for_the_next(script: Path, tmp_path: Path) -> None:
    async with running(script, timeout_s=600.0) as pool:
        job = asyncio.create_task(pool.score({"do": "hangs", "path": str(tmp_path / "pids")}))
        await wait_until((tmp_path / "pids").is_file)
        job.cancel()
        with pytest.raises(asyncio.CancelledError):
            await job
        outcome = await pool.score({"do": "number", "value": 2})
        assert isinstance(outcome, Scored)
        assert outcome.scores == {"reward": 1.0}


async def test_many_traces_over_few_recycled_workers(script: Path) -> None:
    async with running(script, workers=2, traces_per_worker=40) as pool:
        traces = [{"do": "number", "value": 2 * n} for n in range(200)]
        outcomes = await asyncio.gather(*[pool.score(trace) for trace in traces])
        assert [each.scores["reward"] for each in outcomes if isinstance(each, Scored)] == list(range(200))
        assert 4 <= pool.restarts <= 5


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("def (", "SyntaxError"),
        ("x = 1", "defines no function"),
        ("import nowhere_to_be_found", "ModuleNotFoundError"),
        ("import os\nos._exit(3)", "died"),
        ("WEIGHTS = {'a': None}\ndef reward(t): return 1", "WEIGHTS"),
    ],
)
async def test_a_script_that_does_not_load_is_refused_at_the_start(
    tmp_path: Path, text: str, words: str
) -> None:
    script = tmp_path / "reward.py"
    script.write_text(text)
    with pytest.raises(ConfigError, match=words):
        await Pool(Settings(script=str(script))).start()


async def test_a_script_broken_later_holds_traces_back(script: Path) -> None:
    async with running(script, traces_per_worker=1) as pool:
        first = await pool.score({"do": "number", "value": 2})
        script.write_text("def (")
        job = asyncio.create_task(pool.score({"do": "number", "value": 2}))
        await wait_until(lambda: pool.problem is not None)
        assert "SyntaxError" in str(pool.problem)
        script.write_text("def reward(trace): return 9")
        outcome = await job
        assert isinstance(outcome, Scored)
        assert isinstance(first, Scored)
        assert (outcome.scores, pool.problem) == ({"reward": 9.0}, None)
        assert outcome.script_hash != first.script_hash


async def test_an_unknown_interpreter_is_a_config_error(script: Path) -> None:
    with pytest.raises(ConfigError, match=r"rewards\.python"):
        await Pool(Settings(script=str(script), python="/no/such/python")).start()


async def test_a_trace_that_is_no_json_is_an_error(script: Path) -> None:
    async with running(script) as pool:
        failed(await pool.score({"do": {1, 2}}), "cannot be given")


@pytest.fixture
def bare_python(tmp_path: Path) -> str:
    """An interpreter that has nothing installed."""
    venv.create(tmp_path / "bare", symlinks=True)
    return str(tmp_path / "bare/bin/python")


async def test_an_interpreter_without_hone_runs_the_worker(script: Path, bare_python: str) -> None:
    async with running(script, python=bare_python) as pool:
        assert isinstance(await pool.score({"do": "number", "value": 2}), Scored)


HELPED = """
import package_of_mine
from rewards.checks import Checks
from rewards.judge import Judge, JudgeError
from rewards.parsers import tagged

def reward(trace):
    checks = Checks()
    checks.add("answer", tagged(trace["text"], "answer") == package_of_mine.ANSWER)
    try:
        Judge("Right?", base_url="http://127.0.0.1:1", retries=0)(trace["text"])
    except JudgeError as error:
        checks.add("refused", "ConnectionRefusedError" in str(error))
    return checks.score
"""


@pytest.mark.parametrize("name", ["reward.py", "rewards.py"])
async def test_a_script_has_the_users_packages_and_hones_helpers(
    tmp_path: Path, bare_python: str, name: str
) -> None:
    [site] = (tmp_path / "bare").glob("lib/python3*/site-packages")
    (site / "package_of_mine.py").write_text("ANSWER = '42'")
    script = tmp_path / name
    script.write_text(HELPED)
    async with running(script, python=bare_python) as pool:
        outcome = await pool.score({"text": "<answer>42</answer>"})
        assert isinstance(outcome, Scored), outcome
        assert outcome.scores == {"reward": 1.0}
        assert 0.0 < outcome.took_s < 60.0
    with pytest.raises(ConfigError, match="No module named 'package_of_mine'"):
        await Pool(Settings(script=str(script))).start()


async def test_a_neighbour_named_rewards_comes_before_hones(tmp_path: Path) -> None:
    (tmp_path / "rewards.py").write_text("MINE = 3.0")
    script = tmp_path / "reward.py"
    script.write_text("import rewards\ndef reward(trace): return rewards.MINE")
    async with running(script) as pool:
        outcome = await pool.score({})
        assert isinstance(outcome, Scored)
        assert outcome.scores == {"reward": 3.0}


@pytest.mark.parametrize("name", ["worker", "parsers", "checks", "judge", "post"])
def test_what_runs_under_the_users_interpreter_is_plain_python(name: str) -> None:
    """Python 3.9 reads it, and it imports the standard library and its like alone."""
    tree = ast.parse(
        Path(__file__).parents[1].joinpath("rewards", f"{name}.py").read_text(), feature_version=(3, 9)
    )
    modules = {alias.name for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names}
    modules |= {str(node.module) for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
    foreign = {module for module in modules if module.partition(".")[0] not in sys.stdlib_module_names}
    assert foreign <= {"rewards.parsers", "rewards.post"}

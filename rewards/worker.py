"""The process that runs a reward script. A plain file: run by path, by any Python 3.9 or later.

::

    python worker.py <socket fd> <reward script> <limits as JSON>

Imports the standard library alone, so that `rewards.python` may be an interpreter that has never
heard of Hone. It is two processes. The *guard* is what control starts: it adopts every orphan
below it, and when its stdin closes (control wants it so, or died) or the runner ends, it kills all
that is left and exits. The *runner* carries the limits, imports the script once and answers traces.

Messages on the socket are a 4-byte big-endian length and that many bytes of JSON. The runner first
sends ``{"weights": …}`` or ``{"error": …}``; then it answers each trace with ``{"scores": …}`` or
``{"error": …}``. What the script prints goes to a bounded buffer whose tail follows an error; what
its children or native code print to fd 1 is lost, to fd 2 goes to a file that control can read.
"""

from __future__ import annotations

import asyncio
import ctypes
import faulthandler
import importlib.abc
import importlib.machinery
import importlib.util
import inspect
import io
import json
import math
import numbers
import os
import resource
import select
import signal
import socket
import sys
import time
import traceback
from collections.abc import Callable
from typing import Any

PR_SET_PDEATHSIG = 1
PR_SET_CHILD_SUBREAPER = 36
KILL_S = 5.0  # how long the guard fights a tree that forks faster than it dies
WATCH_AT = 0.8  # of the deadline
TASKS_TOLD_MAX = 8
PRINTED_MAX = 8_192
ERROR_MAX = 16_384
NAME_MAX = 200
SCORES_MAX = 256


class Tail(io.RawIOBase):
    """A stream that keeps the last `PRINTED_MAX` bytes written to it."""

    def __init__(self) -> None:
        self.kept = b""

    def writable(self) -> bool:
        return True

    def write(self, data: Any) -> int:
        block = bytes(data)
        self.kept = (self.kept + block)[-PRINTED_MAX:]
        return len(block)


class Printed:
    """What the script prints: the end of it."""

    def __init__(self) -> None:
        self.tail = Tail()
        self.text = io.TextIOWrapper(io.BufferedWriter(self.tail), "utf-8", "backslashreplace")

    def take(self) -> str:
        """The end of what was printed since the last take."""
        self.text.flush()
        kept, self.tail.kept = self.tail.kept, b""
        return kept.decode(errors="replace")


# -- guard -------------------------------------------------------------------------------------


def prctl(option: int, value: int) -> None:
    """Linux's prctl; elsewhere nothing (the process group is then all that is killed)."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(option, value, 0, 0, 0)


def guard(runner: int, wakeup: int) -> None:
    """Wait for the end of stdin or of the runner, then leave no process behind."""
    while not readable(0, wakeup):
        if runner in reap():
            break
    kill_everything(runner)


def readable(stdin: int, wakeup: int) -> bool:
    """Sleep until a child changed state (False) or stdin has an end (True)."""
    ready, _, _ = select.select([stdin, wakeup], [], [])
    if wakeup in ready:
        os.read(wakeup, 4096)
    return stdin in ready


def reap() -> list[int]:
    """Collect the children that ended."""
    ended = []
    try:
        while (pid := os.waitpid(-1, os.WNOHANG)[0]) != 0:
            ended.append(pid)
    except ChildProcessError:
        pass
    return ended


def children() -> list[int]:
    """Direct children of this process; orphans of deeper ones become such."""
    try:
        with open(f"/proc/self/task/{os.getpid()}/children") as file:
            return [int(pid) for pid in file.read().split()]
    except OSError:
        return []


def kill_everything(runner: int) -> None:
    """Kill the runner's group, then every child until none is left or `KILL_S` is over."""
    deadline = time.monotonic() + KILL_S
    signal_all([-runner])
    while time.monotonic() < deadline:
        signal_all(children())
        reap()
        try:
            os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return
        time.sleep(0.002)


def signal_all(pids: list[int]) -> None:
    """SIGKILL to each process (or group, where negative) that still exists."""
    for pid in pids:
        try:
            os.kill(pid, signal.SIGKILL)
        except (ProcessLookupError, PermissionError):
            continue


# -- runner ------------------------------------------------------------------------------------


def confine(limits: dict[str, Any]) -> None:
    """Own process group, dies with the guard, limits on memory, files and processes."""
    os.setpgid(0, 0)
    prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    lower(resource.RLIMIT_AS, limits["memory_bytes_max"])
    lower(resource.RLIMIT_FSIZE, limits["file_bytes_max"])
    if os.getuid() != 0:  # the kernel does not enforce it for root
        lower(resource.RLIMIT_NPROC, tasks_of(os.getuid()) + limits["processes_max"])


def lower(what: int, limit: int) -> None:
    """Set a limit, never above the one that is in force."""
    _, hard = resource.getrlimit(what)
    limit = limit if hard == resource.RLIM_INFINITY else min(limit, hard)
    resource.setrlimit(what, (limit, limit))


def tasks_of(uid: int) -> int:
    """Processes and threads of a user: what RLIMIT_NPROC counts."""
    total = 0
    for name in os.listdir("/proc") if os.path.isdir("/proc") else []:
        try:
            if name.isdigit() and os.stat(f"/proc/{name}").st_uid == uid:
                total += len(os.listdir(f"/proc/{name}/task"))
        except OSError:  # it ended meanwhile
            continue
    return total


class Helpers(importlib.abc.MetaPathFinder):
    """Finds `rewards` beside this file: scripts import `rewards.judge` and its like in any interpreter."""

    def find_spec(
        self, name: str, path: Any = None, target: Any = None
    ) -> importlib.machinery.ModuleSpec | None:
        """The package, for its own name alone."""
        if name != "rewards":
            return None
        here = os.path.dirname(os.path.abspath(__file__))
        init = os.path.join(here, "__init__.py")
        return importlib.util.spec_from_file_location(name, init, submodule_search_locations=[here])


def load(path: str) -> tuple[Callable[[Any], Any], dict[str, float]]:
    """Import the script as a module of its directory; its `reward` and its `WEIGHTS`."""
    sys.path[0] = os.path.dirname(path)
    name = os.path.splitext(os.path.basename(path))[0]
    neighbours = {os.path.join(sys.path[0], one) for one in ("rewards", "rewards.py")}
    if not any(map(os.path.exists, neighbours - {path})):  # one of the user's own comes first
        sys.meta_path.insert(0, Helpers())
    name = f"reward_script_{name}" if name in sys.modules or name == "rewards" else name
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise ImportError(f"{path} is not a Python file")
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    function = getattr(module, "reward", None)
    if not callable(function):
        raise TypeError(f"{path} defines no function reward(trace)")
    weights = getattr(module, "WEIGHTS", {})
    return function, named_numbers(weights, "WEIGHTS") if weights else {}


def named_numbers(value: Any, what: str) -> dict[str, float]:
    """A dict of names and finite numbers, as floats; anything else is a TypeError or ValueError."""
    if not isinstance(value, dict):
        raise TypeError(f"{what} must be a dict of names and numbers, not {type(value).__name__}")
    if not value or len(value) > SCORES_MAX:
        raise ValueError(f"{what} has {len(value)} names; 1 to {SCORES_MAX} are allowed")
    return {named(name, what): number(each, f"{what}[{name!r}]") for name, each in value.items()}


def named(name: Any, what: str) -> str:
    """A name of a score: a string of 1 to `NAME_MAX` characters."""
    if not isinstance(name, str) or not 0 < len(name) <= NAME_MAX:
        raise TypeError(f"{what}: {name!r:.80} is no name; use a string of 1 to {NAME_MAX} characters")
    return name


def number(value: Any, what: str) -> float:
    """A finite real number as a float. Bools are refused: `return won` is more often a slip."""
    if isinstance(value, bool) or not isinstance(value, numbers.Real):
        raise TypeError(f"{what} must be a number, not {type(value).__name__} ({value!r:.80})")
    if not math.isfinite(value):
        raise ValueError(f"{what} is {value}")
    return float(value)


def scores_of(result: Any) -> dict[str, float]:
    """Named scores of what the script returned; a number alone is the score `reward`."""
    if isinstance(result, dict):
        return named_numbers(result, "the result of reward(trace)")
    return {"reward": number(result, "the result of reward(trace)")}


async def awaited(result: Any, timeout_s: float) -> Any:
    """Turns any awaitable into a coroutine for `asyncio.run`; says at `WATCH_AT` what it waits for."""
    asyncio.get_running_loop().call_later(WATCH_AT * timeout_s, tell_waits)
    return await result


def tell_waits() -> None:
    """Write to fd 2 where each task of the running loop waits: threads show the loop alone."""
    lines = []
    for task in list(asyncio.all_tasks())[:TASKS_TOLD_MAX]:
        lines.append("a task waits, the innermost place last:\n")
        waits: Any = task.get_coro()
        while (frame := getattr(waits, "cr_frame", None)) is not None:
            lines += traceback.format_list(traceback.extract_stack(frame, 1))
            waits = waits.cr_await
    os.write(2, "".join(lines).encode(errors="replace"))


def score(function: Callable[[Any], Any], trace: Any, printed: Printed, timeout_s: float) -> dict[str, Any]:
    """Run the script on one trace. The boundary of the script: whatever it raises is recorded."""
    runner = os.getpid()
    try:
        result = function(trace)
        if inspect.isawaitable(result):
            result = asyncio.run(awaited(result, timeout_s))
        answer: dict[str, Any] = {"scores": scores_of(result)}
    except BaseException:
        answer = {"error": error_text(printed)}
    if os.getpid() != runner:  # the script forked and both came back: one answer is enough
        os._exit(0)
    return answer


def error_text(printed: Printed) -> str:
    """The current exception's traceback without this file's frames, then what was printed."""
    kind, error, frames = sys.exc_info()
    while frames is not None and frames.tb_frame.f_code.co_filename == __file__:
        frames = frames.tb_next
    text = "".join(traceback.format_exception(kind, error, frames))[-ERROR_MAX:]
    tail = printed.take()
    return f"{text}\nend of what the script printed:\n{tail}" if tail else text


def serve(channel: socket.socket, path: str, timeout_s: float, printed: Printed) -> None:
    """Import the script, then answer traces until the socket ends."""
    try:
        function, weights = load(path)
    except BaseException:  # the script's import is the script's boundary too
        send(channel, {"error": error_text(printed)})
        return
    send(channel, {"weights": weights})
    while (trace := receive(channel)) is not None:
        watched = watch(timeout_s)
        answer = score(function, trace, printed, timeout_s)
        if watched:
            faulthandler.cancel_dump_traceback_later()
        send(channel, answer)
        printed.take()


def watch(timeout_s: float) -> bool:
    """Shortly before the deadline, write where the script is to fd 2, for control to read when it has
    killed it. False: the script's threads left none for this."""
    try:
        faulthandler.dump_traceback_later(WATCH_AT * timeout_s, exit=False, file=2)
    except RuntimeError:
        return False
    return True


def send(channel: socket.socket, message: dict[str, Any]) -> None:
    """One message."""
    payload = json.dumps(message).encode()
    channel.sendall(len(payload).to_bytes(4, "big") + payload)


def receive(channel: socket.socket) -> Any:
    """One message, or None at the end of the socket."""
    head = channel.recv(4, socket.MSG_WAITALL)
    if len(head) < 4:
        return None
    size = int.from_bytes(head, "big")
    payload = bytearray()
    while len(payload) < size and (block := channel.recv(min(1 << 20, size - len(payload)))):
        payload += block
    return json.loads(payload) if len(payload) == size else None


def run(fd: int, path: str, limits: dict[str, Any]) -> None:
    """The runner's life."""
    null = os.open(os.devnull, os.O_RDWR)
    os.dup2(null, 0)
    os.dup2(null, 1)
    sys.dont_write_bytecode = True
    faulthandler.enable(file=2)
    printed = Printed()
    sys.stdout = sys.stderr = printed.text
    confine(limits)
    serve(socket.socket(fileno=fd), path, limits["timeout_s"], printed)


def main(argv: list[str]) -> None:
    """Become the guard of a runner."""
    fd, path, limits = int(argv[1]), argv[2], json.loads(argv[3])
    prctl(PR_SET_CHILD_SUBREAPER, 1)
    wakeup, notify = os.pipe()
    os.set_blocking(notify, False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    signal.set_wakeup_fd(notify)
    runner = os.fork()
    if runner == 0:
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        run(fd, path, limits)
        os._exit(0)
    os.close(fd)
    guard(runner, wakeup)


if __name__ == "__main__":
    main(sys.argv)

"""Runs the parts of Hone on one machine: starts them in order, restarts what dies, leaves nothing.

Each part is a process in a session of its own with its output in `<log_dir>/<part>.log`. A part
gets SIGKILL from the kernel when the supervisor dies; what it had started itself is found by an
environment marker, by the reaper (`hone.reaper`) if the supervisor cannot do it any more.
"""

import asyncio
import contextlib
import os
import secrets
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import aiohttp
import msgspec

from capture.errors import HoneError
from hone import process, reaper
from hone.state import Kind, PartState, PartStatus, State, write_state

TAIL_LINES = 15
TICK_S = 1.0


class Part(msgspec.Struct, frozen=True, kw_only=True):
    """What to run, and when it counts as started."""

    name: str
    command: list[str]
    env: dict[str, str] = {}
    ready_url: str | None = None  # ready once GET answers 200; None: once it runs
    ready_timeout_s: float = 60.0
    after: tuple[str, ...] = ()  # started when these are ready
    finite: bool = False  # exit code 0 means that its work is done
    stop_timeout_s: float = 10.0  # between SIGTERM and SIGKILL


class Restarts(msgspec.Struct, frozen=True, kw_only=True):
    """How often a part may die."""

    backoff_s: float = 0.5  # before the first restart; doubles
    backoff_max_s: float = 15.0
    stable_s: float = 30.0  # a part that lived this long starts counting anew
    crashes_max: int = 5  # in a row; one more and the supervisor gives up


class PartFailed(HoneError):
    """A part died too often; the message names it and ends with the last lines of its log."""


def backoff_s(crashes: int, restarts: Restarts) -> float:
    """The pause before the restart that follows the `crashes`-th crash in a row."""
    return min(restarts.backoff_s * 2.0 ** (crashes - 1), restarts.backoff_max_s)


def tail(path: Path, lines: int = TAIL_LINES) -> str:
    """The last lines of a log."""
    try:
        with path.open("rb") as file:
            file.seek(max(0, path.stat().st_size - 16_384))
            text = file.read().decode(errors="replace")
    except FileNotFoundError:
        return ""
    return "\n".join(text.splitlines()[-lines:])


class Supervisor:
    """Owns the processes of `parts` from `run` until it returns."""

    def __init__(
        self,
        parts: Sequence[Part],
        *,
        kind: Kind,
        state_file: Path,
        log_dir: Path,
        config: str = "",
        until_done: bool = True,
        restarts: Restarts = Restarts(),  # noqa: B008 - frozen
        log_bytes_max: int = 20_000_000,
    ) -> None:
        self._parts = {part.name: part for part in parts}
        self._kind: Kind = kind
        self._state_file = state_file
        self._log_dir = log_dir
        self._config = config
        self._until_done = until_done
        self._restarts = restarts
        self._log_bytes_max = log_bytes_max
        self._token = secrets.token_hex(16)
        self._started_at = time.time()
        self._status = {
            name: PartStatus(name=name, since=self._started_at, log=str(self._log(name)))
            for name in self._parts
        }
        self._ready = {name: asyncio.Event() for name in self._parts}
        self._processes: dict[str, asyncio.subprocess.Process] = {}
        self._stop = asyncio.Event()
        self._hurry = asyncio.Event()
        self._reaper: subprocess.Popen[str] | None = None

    # -- what others may ask ---------------------------------------------------------------------

    @property
    def marker(self) -> str:
        """`NAME=value` that stands in the environment of every process below this supervisor."""
        return f"{process.MARKER}={self._token}"

    @property
    def reaper_pid(self) -> int | None:
        """The process that cleans up if this one is killed."""
        return self._reaper.pid if self._reaper else None

    def status(self, name: str) -> PartStatus:
        """The part as it is now."""
        return self._status[name]

    def stop(self) -> None:
        """Stop everything; asked twice, without waiting for anybody."""
        if self._stop.is_set():
            self._hurry.set()
        self._stop.set()

    async def ready(self, *names: str) -> None:
        """Return once these parts (all, if none is named) have been ready."""
        for name in names or self._parts:
            await self._ready[name].wait()

    # -- the life of a supervisor ----------------------------------------------------------------

    async def run(self) -> None:
        """Keep the parts running until `stop`, or (`until_done`) until every finite part is done.

        Raises `PartFailed` if a part dies too often. No process is left in either case.
        """
        process.adopt_orphans()
        self._log_dir.mkdir(parents=True, exist_ok=True)
        self._state_file.parent.mkdir(parents=True, exist_ok=True)
        self._write_state()
        with self._reaped():
            keepers = {
                asyncio.create_task(self._keep(part), name=part.name): part for part in self._parts.values()
            }
            stop = asyncio.create_task(self._stop.wait())
            try:
                await self._watch(keepers, stop)
            finally:
                self._stop.set()
                stop.cancel()
                await self._stop_all()
                for keeper in keepers:
                    keeper.cancel()
                await asyncio.gather(*keepers, return_exceptions=True)
                await asyncio.to_thread(self._sweep)

    async def _watch(self, keepers: dict["asyncio.Task[None]", Part], stop: "asyncio.Task[bool]") -> None:
        finite = {task for task, part in keepers.items() if part.finite}
        pending: set[asyncio.Task[None]] = set(keepers)
        while not stop.done():
            waited: set[asyncio.Task[object]] = {*pending, stop}
            await asyncio.wait(waited, timeout=TICK_S, return_when=asyncio.FIRST_COMPLETED)
            process.reap_orphans(self._known_pids())
            self._keep_reaper()
            for task in [task for task in pending if task.done()]:
                pending.discard(task)
                task.result()  # raises what ended it
            if self._until_done and finite and not finite & pending:
                return

    async def _keep(self, part: Part) -> None:
        await asyncio.gather(*(self._ready[name].wait() for name in part.after))
        crashes = 0
        while not self._stop.is_set():
            began = time.monotonic()
            code = await self._run_once(part)
            if self._stop.is_set():
                return
            if part.finite and code == 0:
                self._set(part, "done", exit_code=0)
                return
            crashes = 1 if time.monotonic() - began >= self._restarts.stable_s else crashes + 1
            if crashes > self._restarts.crashes_max:
                self._set(part, "failed", exit_code=code)
                raise PartFailed(self._obituary(part, code, crashes))
            self._set(part, "backoff", exit_code=code, restarts=self._status[part.name].restarts + 1)
            await asyncio.sleep(backoff_s(crashes, self._restarts))

    async def _run_once(self, part: Part) -> int:
        """Start the part and wait for its end; its exit code, negative for a signal."""
        with self._open_log(part.name) as log:
            child = await asyncio.create_subprocess_exec(
                *part.command,
                env={**os.environ, **part.env, process.MARKER: self._token},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
                preexec_fn=process.die_with_parent(),
            )
        self._processes[part.name] = child
        self._tell_reaper(f"+{child.pid}")
        self._set(part, "starting", pid=child.pid)
        probe = asyncio.create_task(self._probe(part, child))
        try:
            return await child.wait()
        finally:
            probe.cancel()
            if self._processes.get(part.name) is child and child.returncode is not None:
                del self._processes[part.name]
                process.kill_group(child.pid)  # what it started must not outlive it
                self._tell_reaper(f"-{child.pid}")

    async def _probe(self, part: Part, child: asyncio.subprocess.Process) -> None:
        if part.ready_url is not None and not await self._answers(part.ready_url, part.ready_timeout_s):
            with contextlib.suppress(ProcessLookupError):
                child.kill()
            return
        self._ready[part.name].set()
        self._set(part, "ready", pid=child.pid)

    async def _answers(self, url: str, timeout_s: float) -> bool:
        deadline = time.monotonic() + timeout_s
        timeout = aiohttp.ClientTimeout(total=5.0)
        async with aiohttp.ClientSession(timeout=timeout) as session:
            while time.monotonic() < deadline:
                with contextlib.suppress(aiohttp.ClientError, TimeoutError):
                    async with session.get(url) as response:
                        if response.status == 200:
                            return True
                await asyncio.sleep(0.1)
        return False

    # -- stopping --------------------------------------------------------------------------------

    async def _stop_all(self) -> None:
        """Stop each part before those that it was started after."""
        for name in reversed(list(self._parts)):
            await self._stop_part(self._parts[name])

    async def _stop_part(self, part: Part) -> None:
        child = self._processes.get(part.name)
        if child is not None:
            with contextlib.suppress(ProcessLookupError):
                child.terminate()
            gone = asyncio.create_task(child.wait())
            hurry = asyncio.create_task(self._hurry.wait())
            await asyncio.wait(
                {gone, hurry}, timeout=part.stop_timeout_s, return_when=asyncio.FIRST_COMPLETED
            )
            hurry.cancel()
            process.kill_group(child.pid)
            code = await gone
            self._set(part, "stopped", exit_code=code)
        elif self._status[part.name].state not in ("done", "failed"):
            self._set(part, "stopped")

    def _sweep(self) -> None:
        spare = {os.getpid()} | ({self._reaper.pid} if self._reaper else set())
        if sys.platform == "linux":
            reaper.sweep(self.marker.encode(), frozenset(spare))
            process.reap_orphans(self._known_pids())

    @contextlib.contextmanager
    def _reaped(self) -> Iterator[None]:
        """Have a reaper for as long as there may be processes."""
        self._keep_reaper()
        try:
            yield
        finally:
            if self._reaper and self._reaper.stdin:
                with contextlib.suppress(BrokenPipeError):
                    self._reaper.stdin.close()
                self._reaper.wait()

    def _keep_reaper(self) -> None:
        if sys.platform != "linux" or (self._reaper and self._reaper.poll() is None):
            return
        self._reaper = subprocess.Popen(
            [sys.executable, "-I", "-S", reaper.__file__, self.marker],
            stdin=subprocess.PIPE,
            start_new_session=True,
            text=True,
        )
        for child in self._processes.values():
            self._tell_reaper(f"+{child.pid}")

    def _tell_reaper(self, line: str) -> None:
        if self._reaper and self._reaper.stdin:
            with contextlib.suppress(BrokenPipeError):  # a new one is told everything
                self._reaper.stdin.write(line + "\n")
                self._reaper.stdin.flush()

    # -- bookkeeping -----------------------------------------------------------------------------

    def _known_pids(self) -> set[int]:
        pids = {child.pid for child in self._processes.values()}
        return pids | ({self._reaper.pid} if self._reaper else set())

    def _log(self, name: str) -> Path:
        return self._log_dir / f"{name}.log"

    @contextlib.contextmanager
    def _open_log(self, name: str) -> Iterator[int]:
        path = self._log(name)
        if path.exists() and path.stat().st_size > self._log_bytes_max:
            os.replace(path, path.with_suffix(".log.1"))
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        try:
            yield descriptor
        finally:
            os.close(descriptor)

    def _set(
        self,
        part: Part,
        state: PartState,
        *,
        pid: int | None = None,
        exit_code: int | None = None,
        restarts: int | None = None,
    ) -> None:
        before = self._status[part.name]
        self._status[part.name] = msgspec.structs.replace(
            before,
            state=state,
            pid=pid,
            since=time.time(),
            exit_code=before.exit_code if exit_code is None else exit_code,
            restarts=before.restarts if restarts is None else restarts,
        )
        self._write_state()

    def state(self) -> State:
        """All parts as they are now."""
        return State(
            kind=self._kind,
            pid=os.getpid(),
            pid_ticks=process.started_ticks(os.getpid()) or 0,
            started_at=self._started_at,
            config=self._config,
            parts=list(self._status.values()),
        )

    def _write_state(self) -> None:
        write_state(self._state_file, self.state())

    def _obituary(self, part: Part, code: int, crashes: int) -> str:
        how = f"signal {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"
        path = self._log(part.name)
        return f"{part.name} died {crashes} times in a row (last: {how}); the end of {path}:\n{tail(path)}"

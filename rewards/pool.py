"""Warm processes that run the reward script, and the pool that hands traces to them."""

import asyncio
import json
import logging
import os
import shutil
import socket
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import IO, Any

from capture.errors import ConfigError, HoneError
from rewards.script import Failed, Outcome, Scored, digest
from rewards.settings import Settings

log = logging.getLogger(__name__)

TIER = "rlimits + process group, no environment (files and network are not isolated)"
WORKER = Path(__file__).with_name("worker.py")
KILL_S = 6.0  # the guard needs at most 5 s for the wildest tree
RETRY_S = 1.0  # between two starts of a script that stopped loading
ANSWER_BYTES_MAX = 1 << 20
STDERR_TAIL = 4_096


class ScriptError(HoneError):
    """The reward script cannot be loaded; the message is its traceback."""


class Broken(HoneError):
    """The worker died, hung or spoke nonsense: its answer is lost and it must be replaced."""


class Worker:
    """One process with the script loaded. Its owner calls `close`, also after `Broken`."""

    def __init__(self, process: asyncio.subprocess.Process, stderr: IO[bytes], timeout_s: float) -> None:
        self.traces = 0
        self.script_hash = ""
        self._process = process
        self._stderr = stderr
        self._timeout_s = timeout_s
        self._weights: dict[str, float] = {}
        self._reader: asyncio.StreamReader
        self._writer: asyncio.StreamWriter

    @classmethod
    async def start(cls, settings: Settings) -> "Worker":
        """Spawn and load. `ScriptError` if the script does not load, `ConfigError` if it is not there."""
        while True:
            script_hash = digest(Path(settings.script))
            worker = await cls._spawn(settings)
            try:
                await worker._load(settings.start_timeout_s)
                if digest(Path(settings.script)) == script_hash:  # else it was edited meanwhile
                    worker.script_hash = script_hash
                    return worker
            except BaseException:
                await worker.close()
                raise
            await worker.close()

    @classmethod
    async def _spawn(cls, settings: Settings) -> "Worker":
        ours, theirs = socket.socketpair()
        stderr = tempfile.TemporaryFile()  # noqa: SIM115 (the worker owns it; `close` ends it)
        limits = {
            "timeout_s": settings.timeout_s,
            "memory_bytes_max": settings.memory_bytes_max,
            "file_bytes_max": settings.file_bytes_max,
            "processes_max": settings.processes_max,
        }
        script = str(Path(settings.script).resolve())
        python = shutil.which(settings.python) or settings.python or sys.executable
        command = [python, str(WORKER), str(theirs.fileno()), script]
        try:
            process = await asyncio.create_subprocess_exec(
                *command,
                json.dumps(limits),
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.DEVNULL,
                stderr=stderr,
                env=settings.env,
                pass_fds=[theirs.fileno()],
                start_new_session=True,
            )
        except (OSError, ValueError) as error:
            ours.close()
            stderr.close()
            what = f"python: cannot start {command[0]}" if isinstance(error, OSError) else "env"
            raise ConfigError(f"rewards.{what}: {error}") from error
        finally:
            theirs.close()
        worker = cls(process, stderr, settings.timeout_s)
        worker._reader, worker._writer = await asyncio.open_unix_connection(sock=ours)
        return worker

    async def _load(self, timeout_s: float) -> None:
        try:
            async with asyncio.timeout(timeout_s):
                hello = await self._receive()
        except TimeoutError as error:
            raise ScriptError(f"the reward script took longer than {timeout_s:g} s to load") from error
        except Broken as error:
            raise ScriptError(str(error)) from error
        if "error" in hello:
            raise ScriptError(hello["error"])
        self._weights = hello["weights"]

    async def score(self, payload: bytes) -> Outcome:
        """The script's outcome for one encoded trace. `Broken` if the process must be replaced."""
        self.traces += 1
        began = time.monotonic()
        self._writer.write(len(payload).to_bytes(4, "big") + payload)
        try:
            async with asyncio.timeout(self._timeout_s):
                await self._writer.drain()
                answer = await self._receive()
        except TimeoutError as error:
            raise Broken(
                f"no result after {self._timeout_s:g} s; it was here:\n{self._last_words()}"
            ) from error
        except ConnectionError as error:
            raise Broken(f"the script's process died\n{self._last_words()}") from error
        if "error" in answer:
            return Failed(answer["error"], self.script_hash, time.monotonic() - began)
        return Scored(answer["scores"], self._weights, self.script_hash, time.monotonic() - began)

    async def _receive(self) -> dict[str, Any]:
        try:
            size = int.from_bytes(await self._reader.readexactly(4), "big")
            if size > ANSWER_BYTES_MAX:
                raise Broken(f"the script's process answered with {size} bytes")
            answer = json.loads(await self._reader.readexactly(size))
        except (asyncio.IncompleteReadError, ConnectionError) as error:
            raise Broken(f"the script's process died\n{self._last_words()}") from error
        except ValueError as error:
            raise Broken(f"the script's process answered with something else than JSON: {error}") from error
        if not isinstance(answer, dict) or not answer.keys() & {"error", "scores", "weights"}:
            raise Broken("the script's process answered with something else than an outcome")
        return answer

    def _last_words(self) -> str:
        """The end of what the process wrote to its fd 2."""
        size = os.fstat(self._stderr.fileno()).st_size
        tail = os.pread(self._stderr.fileno(), STDERR_TAIL, max(0, size - STDERR_TAIL))
        return tail.decode(errors="replace")

    async def close(self) -> None:
        """Kill the process and everything below it; returns when it is gone."""
        self._writer.close()
        if self._process.stdin is not None:
            self._process.stdin.close()  # the guard's sign to kill
        try:
            async with asyncio.timeout(KILL_S):
                await self._process.wait()
        except TimeoutError:
            log.warning("reward worker %d did not end by itself; killed", self._process.pid)
            self._process.kill()
            await self._process.wait()
        self._stderr.close()


class Pool:
    """`settings.workers` slots, each with at most one warm worker; callers wait for a free slot.

    A script that loads at `start` and later no longer does (it was edited) holds traces back until it
    loads again: that is not the rollouts' fault. `problem` says so meanwhile.
    """

    def __init__(self, settings: Settings) -> None:
        self.problem: str | None = None
        self.restarts = 0
        self._settings = settings
        self._slots: asyncio.Queue[Worker | None] = asyncio.Queue()

    async def start(self) -> None:
        """Load the script once; `ConfigError` carrying the traceback if it does not load."""
        try:
            worker = await Worker.start(self._settings)
        except ScriptError as error:
            raise ConfigError(f"rewards.script: {self._settings.script} does not load:\n{error}") from error
        self._slots.put_nowait(worker)
        for _ in range(self._settings.workers - 1):
            self._slots.put_nowait(None)

    async def score(self, trace: Mapping[str, Any]) -> Outcome:
        """Score one trace; waits for a free worker. Only cancellation is raised."""
        try:
            payload = json.dumps(trace).encode()
        except (TypeError, ValueError, RecursionError) as error:
            return Failed(f"the trace cannot be given to a script: {error!r}", "")
        worker = await self._slots.get()
        keep, began = False, time.monotonic()
        try:
            if worker is None:
                worker = await self._replacement()
                began = time.monotonic()
            outcome = await worker.score(payload)
            keep = worker.traces < self._settings.traces_per_worker
        except Broken as error:
            script_hash = worker.script_hash if worker else ""
            outcome = Failed(str(error), script_hash, time.monotonic() - began)
        finally:  # a worker that was left midway would answer the next trace with this one's score
            if worker is not None and not keep:
                self.restarts += 1
                await asyncio.shield(worker.close())
            self._slots.put_nowait(worker if keep else None)
        return outcome

    async def _replacement(self) -> Worker:
        while True:
            try:
                worker = await Worker.start(self._settings)
            except (ScriptError, ConfigError) as error:
                if self.problem is None:
                    log.error("the reward script no longer loads; traces wait: %s", error)
                self.problem = str(error)
                await asyncio.sleep(RETRY_S)
            else:
                self.problem = None
                return worker

    async def close(self) -> None:
        """Kill the workers. No `score` may be running."""
        while not self._slots.empty():
            worker = self._slots.get_nowait()
            if worker is not None:
                await worker.close()

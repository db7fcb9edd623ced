"""The runner's side of the server of agents: its process, its socket, the runs in flight."""

import asyncio
import contextlib
import logging
import socket
from asyncio.subprocess import DEVNULL, PIPE, Process
from collections.abc import AsyncIterator, Mapping
from pathlib import Path
from typing import Any

import msgspec

from capture.errors import HoneError
from rollouts.output import Output
from rollouts.settings import Settings

log = logging.getLogger(__name__)

MESSAGE_BYTES_MAX = 128 * 1024
SEND_WAIT_S = 5.0  # a server that takes no message for so long is given up
START_WAIT_S = 10.0  # from a request to its answer: a fork, or a fork and an exec
KILL_WAIT_S = 10.0  # from SIGKILL to the report that the agent has ended
CLOSE_WAIT_S = 10.0  # the server kills what is left and ends
SERVER_FILE = Path(__file__).with_name("forkserver.py")


class LaunchError(HoneError):
    """An agent, or the server of agents, could not be started or was lost: infrastructure."""


class Run:
    """One agent in flight: two futures that the server's messages resolve."""

    def __init__(self, run_id: str) -> None:
        loop = asyncio.get_running_loop()
        self.id = run_id
        self.started: asyncio.Future[int] = loop.create_future()  # its process id
        self.exited: asyncio.Future[int] = loop.create_future()  # its exit code

    def fail(self, error: LaunchError) -> None:
        for future in (self.started, self.exited):
            if not future.done():
                future.set_exception(error)
                future.exception()  # seen: nobody has to be waiting for it


class AgentServer:
    """A running `forkserver.py`. Make one with `start`."""

    def __init__(self, process: Process, control: socket.socket) -> None:
        self._process = process
        self._control = control
        self._runs: dict[str, Run] = {}
        self._ready: asyncio.Future[dict[str, Any]] = asyncio.get_running_loop().create_future()
        self.gone = False
        self.threads = 1
        asyncio.get_running_loop().add_reader(control.fileno(), self._receive)

    @classmethod
    async def start(
        cls,
        interpreter: str,
        file: str | None,
        settings: Settings,
        environ: Mapping[str, str],
        cwd: str,
        directory: Path,
    ) -> "AgentServer":
        """Start it and wait until it is ready; `LaunchError` after `preload_s`. It removes
        `directory` when it ends."""
        directory.mkdir(exist_ok=True)
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        ours.setblocking(False)
        try:
            process = await asyncio.create_subprocess_exec(
                *(interpreter, str(SERVER_FILE), str(theirs.fileno())),
                stdin=PIPE,
                stdout=DEVNULL,
                pass_fds=[theirs.fileno()],
                env=dict(environ),
                cwd=cwd,
                start_new_session=True,
            )
        except OSError as error:
            ours.close()
            raise LaunchError(f"cannot start {interpreter}: {error.strerror}") from error
        finally:
            theirs.close()
        server = cls(process, ours)
        options = {
            "file": file,
            "prepare_tls": settings.prepare_tls,
            "directory": str(directory),
        }
        try:
            await server._introduce(options, settings.preload_s)
        except BaseException:
            await server.close()
            raise
        return server

    async def _introduce(self, options: Mapping[str, Any], wait_s: float) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(msgspec.json.encode(options))
        self._process.stdin.close()
        try:
            async with asyncio.timeout(wait_s):
                ready = await self._ready
        except TimeoutError:
            raise LaunchError(f"the server of agents was not ready after {wait_s:g} s") from None
        self.threads = ready["threads"]
        for name, error in ready["failed"].items():
            log.warning("not preloaded for agents: %s (%s)", name, error)

    async def close(self) -> None:
        """End the server, which kills every agent; every run in flight fails."""
        self._lost("the server of agents was closed")
        self._control.close()
        try:
            async with asyncio.timeout(CLOSE_WAIT_S):
                await self._process.wait()
        except TimeoutError:
            log.error("the server of agents did not end in %g s: killed", CLOSE_WAIT_S)
            self._process.kill()
            await self._process.wait()

    @contextlib.asynccontextmanager
    async def running(
        self, run_id: str, argv: list[str], env: Mapping[str, str], cwd: str, out: Output, err: Output
    ) -> AsyncIterator[Run]:
        """Start an agent; when the block is left and it still runs, it is killed. `LaunchError`."""
        if run_id in self._runs:
            raise LaunchError(f"{run_id} runs already")
        run = self._runs[run_id] = Run(run_id)
        try:
            message = {"run": run_id, "argv": argv, "env": env, "cwd": cwd}
            await self._send(message, [out.writer, err.writer])
            out.hand_over()
            err.hand_over()
            try:
                async with asyncio.timeout(START_WAIT_S):
                    await asyncio.shield(run.started)
            except TimeoutError:
                raise LaunchError(f"{run_id} did not start within {START_WAIT_S:g} s") from None
            yield run
        finally:
            if not run.exited.done():
                with contextlib.suppress(LaunchError):
                    await self.kill(run)
            del self._runs[run_id]

    async def kill(self, run: Run) -> int:
        """Kill an agent and all it started; its exit code. `LaunchError` if it does not end."""
        await self._send({"kill": run.id})
        try:
            async with asyncio.timeout(KILL_WAIT_S):
                return await asyncio.shield(run.exited)
        except TimeoutError:
            raise LaunchError(f"{run.id} was killed and has not ended") from None

    async def _send(self, message: Mapping[str, Any], fds: list[int] | None = None) -> None:
        body = msgspec.json.encode(message)
        if len(body) > MESSAGE_BYTES_MAX:
            raise LaunchError(f"command and environment have {len(body)} bytes; {MESSAGE_BYTES_MAX} may be")
        deadline = asyncio.get_running_loop().time() + SEND_WAIT_S
        while not self.gone:
            try:
                socket.send_fds(self._control, [body], fds or [])
                return
            except BlockingIOError:
                if asyncio.get_running_loop().time() > deadline:
                    raise LaunchError("the server of agents takes no messages") from None
                await asyncio.sleep(0.01)
            except OSError as error:
                self._lost(f"the server of agents is gone: {error.strerror}")
        raise LaunchError("the server of agents is gone")

    def _receive(self) -> None:
        try:
            body = self._control.recv(MESSAGE_BYTES_MAX)
        except BlockingIOError:
            return
        except OSError:
            body = b""
        if not body:
            self._lost("the server of agents died")
            return
        message: dict[str, Any] = msgspec.json.decode(body)
        if "ready" in message:
            if not self._ready.done():
                self._ready.set_result(message)
        elif "started" in message:
            self._resolve(message["started"], "started", message["pid"])
        elif "exited" in message:
            self._resolve(message["exited"], "exited", message["code"])
        elif (run := self._runs.get(message["refused"])) is not None:
            run.fail(LaunchError(f"the agent could not be started: {message['error']}"))

    def _resolve(self, run_id: str, name: str, value: int) -> None:
        run = self._runs.get(run_id)
        if run is not None and not getattr(run, name).done():
            getattr(run, name).set_result(value)

    def _lost(self, reason: str) -> None:
        if self.gone:
            return
        self.gone = True
        asyncio.get_running_loop().remove_reader(self._control.fileno())
        for run in self._runs.values():
            run.fail(LaunchError(reason))
        if not self._ready.done():
            self._ready.set_exception(LaunchError(reason))
            self._ready.exception()

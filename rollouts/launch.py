"""One agent run: started, watched, bounded, killed with everything it started.

Every agent is a child of one small process (`forkserver.py`): Python files are forked there from
an interpreter that has their imports ready, any other command is executed there. So a runner that
dies in whatever way takes its agents with it.
"""

import asyncio
import logging
import shutil
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

import msgspec

from rollouts.agents import AgentServer, LaunchError, Run
from rollouts.command import agent_environ, parse_command
from rollouts.output import Output, drained
from rollouts.settings import Settings

log = logging.getLogger(__name__)

STDERR_BYTES_MAX = 16_384

LaunchStatus = Literal["completed", "agent_error", "timeout", "failed"]


class Finished(msgspec.Struct, frozen=True, kw_only=True):
    """How one agent run ended. `failed` means that it could not be run, and says why in `stderr`."""

    status: LaunchStatus
    stdout: str  # the last `stdout_bytes_max` bytes of it
    stderr: str  # the last 16 KiB of it
    exit_code: int | None  # negative: the signal that ended it; None: it never started or was lost
    duration_s: float
    start_s: float  # of which until the process existed


class Launcher:
    """Runs agents. `start` before use, `close` after; one event loop, any number of runs at once."""

    def __init__(self, settings: Settings, environ: Mapping[str, str]) -> None:
        self._settings = settings
        self._command = parse_command(settings)
        self._environ = agent_environ(environ, settings)
        self._server: AgentServer | None = None
        self._starting = asyncio.Lock()
        self._directory: Path | None = None

    @property
    def forks(self) -> bool:
        """Whether agents are forked from a preloaded interpreter (settled by `start`)."""
        return self._command.file is not None

    async def start(self) -> None:
        """Start the server of agents. `LaunchError` if that cannot be."""
        self._directory = Path(tempfile.mkdtemp(prefix="hone-runner-"))
        await self._running_server()

    async def close(self) -> None:
        """Kill every agent still running and remove every temporary file."""
        if self._server is not None:
            await self._server.close()
            self._server = None
        if self._directory is not None:
            shutil.rmtree(self._directory, ignore_errors=True)
            self._directory = None

    async def run(
        self,
        rollout_id: str,
        scenario: Mapping[str, Any],
        *,
        base_url: str,
        api_key: str,
        extra_env: Mapping[str, str] | None = None,
    ) -> Finished:
        """One attempt, to its end. Cancelling it kills the agent and everything it started."""
        begun = time.monotonic()
        try:
            server = await self._running_server()
            file = self._scenario_file(rollout_id, scenario)
        except (OSError, LaunchError) as error:
            return _failed(str(error), begun)
        env = {
            **(extra_env or {}),
            "MODEL_NAME": self._settings.model_name,
            "OPENAI_BASE_URL": base_url,
            "OPENAI_API_KEY": api_key,
            "SCENARIO_FILE": str(file),
        }
        try:
            return await self._attempt(server, rollout_id, env, begun)
        except (OSError, LaunchError) as error:
            return _failed(str(error), begun)
        finally:
            file.unlink(missing_ok=True)

    async def _attempt(
        self, server: AgentServer, rollout_id: str, env: dict[str, str], begun: float
    ) -> Finished:
        argv = self._command.argv if self._command.file is None else self._command.argv[1:]
        with Output(self._settings.stdout_bytes_max) as out, Output(STDERR_BYTES_MAX) as err:
            async with server.running(rollout_id, argv, env, self._command.cwd, out, err) as run:
                started = time.monotonic()
                code, timed_out = await self._wait(server, run)
            ended = time.monotonic()
            await drained(out, err)
            status: LaunchStatus = "completed" if code == 0 else "agent_error"
            return Finished(
                status="timeout" if timed_out else status,
                stdout=out.text(),
                stderr=err.text(),
                exit_code=code,
                duration_s=ended - begun,
                start_s=started - begun,
            )

    async def _wait(self, server: AgentServer, run: Run) -> tuple[int, bool]:
        """Exit code, and whether the agent was killed for its time."""
        try:
            async with asyncio.timeout(self._settings.timeout_s):
                return await asyncio.shield(run.exited), False
        except TimeoutError:
            return await server.kill(run), True

    def _scenario_file(self, rollout_id: str, scenario: Mapping[str, Any]) -> Path:
        if self._directory is None:
            raise LaunchError("the launcher was not started")
        file = self._directory / f"{rollout_id}.json"
        file.write_bytes(msgspec.json.encode(scenario))
        return file

    async def _running_server(self) -> AgentServer:
        async with self._starting:
            if self._server is not None and self._server.gone:
                log.error("the server of agents died; starting another")
                await self._server.close()
                self._server = None
            if self._server is None:
                self._server = await self._start_server()
            return self._server

    async def _start_server(self) -> AgentServer:
        if self._directory is None:
            raise LaunchError("the launcher was not started")
        if self._command.file is not None:
            server = await self._start_fork_server(self._directory)
            if server is not None:
                return server
            self._command = msgspec.structs.replace(self._command, file=None)
        return await AgentServer.start(
            sys.executable, None, self._settings, self._environ, self._command.cwd, self._directory
        )

    async def _start_fork_server(self, directory: Path) -> AgentServer | None:
        """None where forking is not possible or not safe and the settings let us do without."""
        command = self._command
        must = self._settings.launch == "fork"
        try:
            server = await AgentServer.start(
                command.interpreter, command.file, self._settings, self._environ, command.cwd, directory
            )
        except LaunchError as error:
            if must:
                raise
            trouble = str(error)
        else:
            if server.threads == 1 or must:
                return server
            trouble = f"its imports started {server.threads - 1} threads: forking them is unsafe"
            await server.close()
        log.warning("agents run as cold processes, not from a fork server: %s", trouble)
        return None


def _failed(reason: str, begun: float) -> Finished:
    elapsed = time.monotonic() - begun
    return Finished(
        status="failed", stdout="", stderr=reason, exit_code=None, duration_s=elapsed, start_s=elapsed
    )

"""One rollout from opening to finish, with new attempts where our own side broke it."""

import asyncio
import contextlib
import logging
import time
from typing import Any

import msgspec

from capture.errors import Conflict, HoneError
from capture.ids import new_id
from capture.redact import Redactor
from capture.types import FinishStatus, Mode
from rollouts.api import Opened, ProxyApi, Refused, Request
from rollouts.desk import Desk
from rollouts.launch import Finished, Launcher
from rollouts.metrics import Metrics
from rollouts.settings import Settings

log = logging.getLogger(__name__)

ABANDON_WAIT_S = 10.0  # for the last words about a rollout whose agent we killed to stop
STDERR_LOGGED = 2000  # characters of a failed agent's stderr that go to the log
IDS_MAX = 5  # new ids tried for one rollout whose opening got no clear answer


class Task(msgspec.Struct, frozen=True, kw_only=True):
    """What is attempted: the same for all attempts at one place of a group or evaluation."""

    mode: Mode
    scenario_id: str
    scenario: dict[str, Any]
    run_id: str | None = None
    group_id: str | None = None
    group_size: int | None = None
    policy_version: int | None = None  # None: the active one, at opening (evaluation) or at the first call


class Attempt(msgspec.Struct, frozen=True):
    """An open rollout of a task."""

    opened: Opened
    number: int


class Played(msgspec.Struct, frozen=True):
    """The last attempt and how it ended."""

    rollout_id: str
    status: FinishStatus


def verdict(finished: Finished, *, broken: bool, used_up: bool) -> FinishStatus:
    """The rollout's status. `broken`: our side failed one of its calls; `used_up`: it made all
    the calls it may. An agent is never blamed for what we broke; one that coped completed."""
    if finished.status in ("completed", "failed"):
        return finished.status
    if broken:
        return "failed"
    return "max_calls" if used_up and finished.status == "agent_error" else finished.status


class Player:
    """Plays tasks with one launcher against one proxy."""

    def __init__(
        self, settings: Settings, api: ProxyApi, launcher: Launcher, desk: Desk, metrics: Metrics
    ) -> None:
        self._settings = settings
        self._api = api
        self._launcher = launcher
        self._desk = desk
        self._metrics = metrics
        self._redactor = Redactor(settings.redact)

    async def open(self, task: Task, *, number: int = 0, replaces: str | None = None) -> Attempt:
        """Open a rollout for the task. `Conflict` where its group takes no more; `UpstreamError`."""
        for _ in range(IDS_MAX):
            request = Request(
                id=new_id("r"),
                attempt=number,
                replaces=replaces,
                max_calls=self._settings.max_calls,
                **msgspec.structs.asdict(task),
            )
            try:
                return Attempt(await self._api.open(request), number)
            except Conflict:
                # Either the group is closed, or an earlier try came through and its answer, with the
                # rollout's key, was lost: then that rollout is given up and replaced.
                if not await self._exists(request.id):
                    raise
                await self._finish(request.id, task.mode, "failed", None)
                replaces = request.id
        raise Conflict(f"no rollout could be opened for scenario {task.scenario_id}")

    async def play(self, task: Task, attempt: Attempt) -> Played:
        """Run agents until one attempt stands or the retries are used up. When cancelled, the agent
        is killed and its rollout finished as failed."""
        live = {attempt.opened.id}  # to be abandoned if we leave early
        try:
            while True:
                finished, status = await self._run(task, attempt)
                following = None
                if status == "failed" and attempt.number < self._settings.infrastructure_retries:
                    # Opened before the failed one is finished: its group must not look complete between.
                    following = await self._replacement(task, attempt)
                    live |= {following.opened.id} if following is not None else set()
                await self._finish(attempt.opened.id, task.mode, status, finished)
                live.discard(attempt.opened.id)
                if following is None:
                    return Played(attempt.opened.id, status)
                attempt = following
                self._metrics.retries.labels(task.mode).inc()
                await asyncio.sleep(self._settings.retry_wait_s * 2 ** (attempt.number - 1))
        finally:
            for rollout_id in live:
                await self.abandon(rollout_id, task.mode)

    async def abandon(self, rollout_id: str, mode: Mode) -> None:
        """Finish a rollout as failed, within `ABANDON_WAIT_S` and whatever happens; for the way out."""
        try:
            async with asyncio.timeout(ABANDON_WAIT_S):
                await self._finish(rollout_id, mode, "failed", None)
        except (HoneError, TimeoutError) as error:
            log.warning("%s is left open for the next runner: %s", rollout_id, error)

    async def _run(self, task: Task, attempt: Attempt) -> tuple[Finished, FinishStatus]:
        opened, begun = attempt.opened, time.monotonic()
        self._metrics.launched.labels(task.mode).inc()
        with self._metrics.in_flight.labels(task.mode).track_inprogress():
            finished = await self._launcher.run(
                opened.id,
                task.scenario,
                base_url=opened.base_url,
                api_key=opened.api_key,
                extra_env=self._settings.eval_env if task.mode == "eval" else None,
            )
        self._metrics.start_seconds.observe(finished.start_s)
        self._metrics.agent_seconds.labels(task.mode).observe(finished.duration_s)
        status: FinishStatus = finished.status
        if finished.status in ("agent_error", "timeout"):
            broken = await self._desk.ask(lambda s: s.broken_calls(opened.id))
            rollout = await self._desk.ask(lambda s: s.rollout(opened.id))
            used_up = rollout.max_calls is not None and rollout.call_count >= rollout.max_calls
            outage = self._api.broken_since(begun)
            status = verdict(finished, broken=broken > 0 or outage, used_up=used_up)
        if status != "completed":
            last_words = self._redactor.text(finished.stderr)[-STDERR_LOGGED:]
            log.info("%s: %s (%s) %s", opened.id, status, finished.exit_code, last_words)
        return finished, status

    async def _replacement(self, task: Task, attempt: Attempt) -> Attempt | None:
        """The next attempt, or None where the group was closed meanwhile."""
        try:
            return await self.open(task, number=attempt.number + 1, replaces=attempt.opened.id)
        except Conflict as error:
            log.info("%s is not attempted again: %s", attempt.opened.id, error)
            return None

    async def _finish(
        self, rollout_id: str, mode: Mode, status: FinishStatus, finished: Finished | None
    ) -> None:
        metrics: dict[str, float] = {}
        if finished is not None:
            metrics = {"duration_s": finished.duration_s, "start_s": finished.start_s}
            if finished.exit_code is not None:
                metrics["exit_code"] = finished.exit_code
        try:
            await self._api.finish(rollout_id, status, metrics, finished.stdout if finished else "")
        except (Conflict, Refused) as error:  # sealed for being idle, or dropped as stale: it stands
            log.info("%s was not finished as %s: %s", rollout_id, status, error)
        self._metrics.finished.labels(mode, status).inc()

    async def _exists(self, rollout_id: str) -> bool:
        with contextlib.suppress(HoneError):
            await self._desk.ask(lambda s: s.rollout(rollout_id))
            return True
        return False

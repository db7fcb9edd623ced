"""The runner's loop: open groups while the learner keeps up, play them, repair what a crash left."""

import asyncio
import contextlib
import logging
import os
import socket
from collections.abc import Callable, Coroutine, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import msgspec

from capture.errors import Conflict
from capture.types import Group
from rollouts import desk as desks
from rollouts.admission import Load, groups_to_open, repair
from rollouts.api import connected
from rollouts.desk import Desk, Lease
from rollouts.launch import Launcher
from rollouts.metrics import Metrics, served
from rollouts.play import Attempt, Player, Task
from rollouts.scenarios import Deck, Scenario
from rollouts.settings import Settings

log = logging.getLogger(__name__)

MEMBERS_MAX = 10_000
Ending = Literal["stopped", "done", "ended", "epochs"]


class Outcome(msgspec.Struct, frozen=True):
    """Why the runner ended, and what it did."""

    ending: Ending  # stop was set; no group is needed; the lineage ended; every epoch is through
    groups: int  # opened by this runner
    rollouts: int  # played to an end by this runner


def unlimited() -> int | None:
    """The default of `needed`: train until the epochs are through."""
    return None


async def train(
    settings: Settings,
    scenarios: Sequence[Scenario],
    *,
    store_path: Path,
    proxy_url: str,
    key: str | None,
    run_id: str,
    environ: Mapping[str, str],
    stop: asyncio.Event,
    needed: Callable[[], int | None] = unlimited,
    metrics: Metrics | None = None,
) -> Outcome:
    """Play groups of `scenarios` for a run until one of the `Outcome.ending`s.

    `needed` says how many groups the run can still use, those outstanding included (None: any
    number): no more are opened, and at 0 what plays is played to its end.
    `environ` is what agents inherit (without Hone's own variables). Whatever makes it return or raise,
    its agents are dead by then and their rollouts finished as failed where the proxy still answers.
    Raises `ConfigError`, `Fenced` (another runner took the run over), `UpstreamError` (no proxy for
    `proxy_wait_s`), `StoreError`.
    """
    metrics = metrics or Metrics()
    launcher = Launcher(settings, environ)
    holder = f"{socket.gethostname()}:{os.getpid()}"
    async with contextlib.AsyncExitStack() as stack:
        stack.enter_context(served(metrics, settings.runner_metrics_port))
        desk = await stack.enter_async_context(desks.opened(store_path))
        lease = await stack.enter_async_context(desks.held(desk, f"runner:{run_id}", holder, stop))
        if lease is None:
            return Outcome("stopped", 0, 0)
        api = await stack.enter_async_context(connected(proxy_url, key, settings, metrics))
        stack.push_async_callback(launcher.close)
        await launcher.start()
        player = Player(settings, api, launcher, desk, metrics)
        deck = Deck(scenarios, seed=settings.seed, epochs=settings.epochs)
        runner = Runner(settings, deck, player, desk, lease, metrics, run_id)
        return await runner.run(stop, needed)


class Runner:
    """One run's groups in flight."""

    def __init__(
        self,
        settings: Settings,
        deck: Deck,
        player: Player,
        desk: Desk,
        lease: Lease,
        metrics: Metrics,
        run_id: str,
    ) -> None:
        self._settings = settings
        self._deck = deck
        self._player = player
        self._desk = desk
        self._lease = lease
        self._metrics = metrics
        self._run_id = run_id
        self._agents = asyncio.Semaphore(settings.concurrency)
        self._playing: set[asyncio.Task[None]] = set()
        self._next = 0  # ordinal of the next group
        self._groups = 0
        self._rollouts = 0

    async def run(self, stop: asyncio.Event, needed: Callable[[], int | None]) -> Outcome:
        """Repair, then admit until the end; on the way out every rollout is cancelled."""
        try:
            await self._repair()
            self._next = await self._desk.ask(lambda s: s.group_count(self._run_id))
            while (ending := await self._ending(stop, needed)) is None:
                for _ in range(groups_to_open(self._settings, await self._load(needed()))):
                    await self._open_group()
                await self._pause(stop)
            return Outcome(ending, self._groups, self._rollouts)
        finally:
            await self._cancel()

    async def _ending(self, stop: asyncio.Event, needed: Callable[[], int | None]) -> Ending | None:
        self._lease.check()
        if stop.is_set():
            return "stopped"
        if needed() == 0 and not self._playing:
            return "done"
        if (await self._desk.ask(lambda s: s.lineage(self._run_id))).ended:
            return "ended"
        if self._next < self._deck.total or self._playing:
            return None
        outstanding = await self._desk.ask(lambda s: s.outstanding_groups(self._run_id))
        return "epochs" if outstanding == 0 else None

    async def _load(self, needed: int | None) -> Load:
        return Load(
            needed=needed,
            outstanding=await self._desk.ask(lambda s: s.outstanding_groups(self._run_id)),
            rollouts=len(self._playing),
            remaining=self._deck.total - self._next,
        )

    async def _open_group(self) -> None:
        """Open the next group with its first rollout: groups come into being in the order of their
        ordinals, so that after a crash their number is the next ordinal."""
        ordinal = self._next
        scenario = self._deck.draw(ordinal)
        task = Task(
            mode="train",
            scenario_id=scenario.id,
            scenario=scenario.content,
            run_id=self._run_id,
            group_id=f"g_{self._run_id}_{ordinal:06d}",
            group_size=self._settings.group_size,
        )
        self._next += 1
        try:
            first = await self._player.open(task)
        except Conflict as error:
            log.warning("group %s is left out: %s", task.group_id, error)
            return
        self._groups += 1
        self._metrics.groups.inc()
        self._start(self._play(task, first))
        for _ in range(self._settings.group_size - 1):
            self._start(self._play(task, None))

    async def _play(self, task: Task, attempt: Attempt | None) -> None:
        """One place of a group. An unopened rollout is opened when an agent can start: it then gets
        the newest version."""
        try:
            await self._agents.acquire()
        except asyncio.CancelledError:
            if attempt is not None:
                await self._player.abandon(attempt.opened.id, task.mode)
            raise
        try:
            if attempt is None:
                attempt = await self._player.open(task)
            await self._player.play(task, attempt)
            self._rollouts += 1
        except Conflict as error:  # its group was closed before this rollout could be opened
            log.info("a rollout of group %s is left out: %s", task.group_id, error)
        finally:
            self._agents.release()

    async def _repair(self) -> None:
        """Complete the open groups of a runner that died."""
        for group in await self._desk.ask(lambda s: s.open_groups()):
            if group.run_id == self._run_id:
                await self._repair_group(group)

    async def _repair_group(self, group: Group) -> None:
        members = await self._desk.ask(lambda s: s.rollouts(group_id=group.id, limit=MEMBERS_MAX))
        plan = repair(group, members, self._settings.infrastructure_retries)
        task = Task(
            mode="train",
            scenario_id=members[0].scenario_id or "",
            scenario=members[0].scenario or {},
            run_id=self._run_id,
            group_id=group.id,
            group_size=group.size,
        )
        for slot in plan.slots:
            attempt = await self._player.open(task, number=slot.attempt, replaces=slot.replaces)
            self._start(self._play(task, attempt))
        for rollout_id in plan.abandoned:
            await self._player.abandon(rollout_id, "train")
        if plan.slots or plan.abandoned:
            log.info("group %s: %d rollouts repaired", group.id, len(plan.slots))

    def _start(self, play: Coroutine[Any, Any, None]) -> None:
        self._playing.add(asyncio.create_task(play))

    async def _pause(self, stop: asyncio.Event) -> None:
        """Until a rollout has ended, `stop` is set, or `poll_s`; raises what broke a rollout's task."""
        stopped = asyncio.create_task(stop.wait())
        try:
            await asyncio.wait(
                {stopped, *self._playing},
                timeout=self._settings.poll_s,
                return_when=asyncio.FIRST_COMPLETED,
            )
        finally:
            stopped.cancel()
        for play in [play for play in self._playing if play.done()]:
            self._playing.discard(play)
            play.result()

    async def _cancel(self) -> None:
        for play in self._playing:
            play.cancel()
        for error in await asyncio.gather(*self._playing, return_exceptions=True):
            if isinstance(error, Exception):
                log.warning("on the way out: %s: %s", type(error).__name__, error)
        self._playing.clear()

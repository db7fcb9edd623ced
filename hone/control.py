"""The control process: ingest, seal, settle, score, group; and its pages for operators.

One asyncio loop. All blocking store work of the pipeline runs in one thread, as *steps* that can be
repeated; reward scripts run in processes of their own. Everything durable is in the store: a control
that is killed is replaced by one that reads there what is left to do.
"""

import asyncio
import contextlib
import logging
import signal
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeVar

import msgspec
from aiohttp import web

from capture.errors import StoreBusy, StoreError
from capture.sqlite import SqliteStore
from capture.store import Counts, Store
from capture.types import Balance
from hone.settings import ControlSettings
from rewards.metrics import Metrics
from rewards.pool import TIER, Pool
from rewards.score import Judged, Scorer, Task
from rewards.settings import Settings
from rewards.steps import LEASE_EVERY_S, Steps

log = logging.getLogger(__name__)

IDLE_S = 0.05
GATHER_S = 0.005  # between busy steps: what arrives meanwhile is handled in one
BUSY_RETRY_S = 0.1
LOOK_EVERY_S = 1.0  # the sums of /metrics and /status are at least that fresh
STALLED_S = 30.0  # without a finished step this process is not ready

T = TypeVar("T")


class Look(msgspec.Struct, frozen=True):
    """One look over the store."""

    at: float  # monotonic
    counts: Counts
    balance: Balance


class Control:
    """The asyncio side: the loop, the scoring tasks, the sums for operators."""

    def __init__(self, path: Path, settings: Settings, policy: str) -> None:
        self.metrics = Metrics()
        self.leading = False
        self.stepped_at = time.monotonic()
        self._path = path
        self._settings = settings
        self._policy = policy
        self._pool = Pool(settings) if settings.script else None
        self._restarts = 0
        self._wake = asyncio.Event()
        self._scoring: set[asyncio.Task[None]] = set()
        self._failure: BaseException | None = None
        self._thread = ThreadPoolExecutor(1, "store")
        self._reading = ThreadPoolExecutor(1, "store-read")
        self._reader: Store | None = None
        self._look: Look | None = None
        self._look_lock = asyncio.Lock()

    async def run(self, stop: asyncio.Event) -> None:
        """Work until `stop` is set. `ConfigError` if the reward script does not load at the start;
        `Fenced` if the lease was lost."""
        store = await self._call(lambda: SqliteStore(self._path))
        steps = Steps(store, self._settings, self.metrics)
        try:
            if self._pool is not None:
                log.info("reward scripts run under: %s", TIER)
                await self._pool.start()
            await self._wait_for_lease(steps, stop)
            while not stop.is_set():
                if self._failure is not None:
                    raise self._failure
                busy = await self._step(steps)
                self._hand_out(steps.scorer)
                await (asyncio.sleep(GATHER_S) if busy else self._sleep(IDLE_S))
        finally:
            await self._finish(steps, store)

    async def _wait_for_lease(self, steps: Steps, stop: asyncio.Event) -> None:
        while not stop.is_set() and not await self._call(steps.lead):
            await self._sleep(LEASE_EVERY_S)
        self.leading = not stop.is_set()

    async def _step(self, steps: Steps) -> bool:
        self._wake.clear()
        try:
            busy = await self._call(steps.tick)
        except StoreBusy as error:
            log.warning("a step is repeated: %s", error)
            self.metrics.add("hone_store_busy_total", 1)
            await asyncio.sleep(BUSY_RETRY_S)
            return True
        self.stepped_at = time.monotonic()
        return busy

    async def _sleep(self, seconds: float) -> None:
        """Sleep, but not longer than until a script's outcome arrives or control is stopped."""
        try:
            async with asyncio.timeout(seconds):
                await self._wake.wait()
        except TimeoutError:
            return

    def wake(self) -> None:
        """Look for work at once."""
        self._wake.set()

    def _hand_out(self, scorer: Scorer) -> None:
        while scorer.tasks:
            job = asyncio.create_task(self._score(scorer, scorer.tasks.popleft()))
            self._scoring.add(job)
            job.add_done_callback(self._scored)

    def _scored(self, job: asyncio.Task[None]) -> None:
        self._scoring.discard(job)
        if not job.cancelled() and (error := job.exception()) is not None:
            self._failure = error
            self.wake()

    async def _score(self, scorer: Scorer, task: Task) -> None:
        started = time.monotonic()
        outcome = None
        if self._pool is not None and task.trace is not None:
            outcome = await self._pool.score(task.trace)
            self.metrics.observe("hone_score_seconds", time.monotonic() - started)
        scorer.judged.append(Judged(task.rollout, outcome))
        self.wake()

    async def _finish(self, steps: Steps, store: Store) -> None:
        """Stop scoring (what was out is scored by the next control), let go of everything."""
        for job in list(self._scoring):
            job.cancel()
        await asyncio.gather(*self._scoring, return_exceptions=True)
        if self._pool is not None:
            await self._pool.close()
        self.leading = False
        with contextlib.suppress(StoreError):  # the lease then runs out by itself
            await self._call(steps.resign)
        await self._call(store.close)
        if self._reader is not None:
            self._reading.submit(self._reader.close).result()
        self._thread.shutdown()
        self._reading.shutdown()

    def _call(self, work: Callable[[], T]) -> "asyncio.Future[T]":
        return asyncio.get_running_loop().run_in_executor(self._thread, work)

    # -- for operators -----------------------------------------------------------------------

    async def look(self) -> Look:
        """Counts and balance, at most `LOOK_EVERY_S` old; read beside the pipeline's own connection."""
        async with self._look_lock:
            if self._look is None or time.monotonic() - self._look.at > LOOK_EVERY_S:
                loop = asyncio.get_running_loop()
                self._look = await loop.run_in_executor(self._reading, self._read)
            return self._look

    def _read(self) -> Look:
        if self._reader is None:
            self._reader = SqliteStore(self._path)
        return Look(time.monotonic(), self._reader.counts(), self._reader.balance(self._policy))

    def not_ready(self) -> str | None:
        """Why the pipeline does not move; None: it does."""
        if not self.leading:
            return "starting, or another control holds the lease"
        if self._pool is not None and self._pool.problem is not None:
            return f"the reward script does not load: {self._pool.problem}"
        stalled = time.monotonic() - self.stepped_at
        return f"no step finished for {stalled:.0f} s" if stalled > STALLED_S else None

    async def exposition(self) -> bytes:
        """The text of /metrics."""
        look = await self.look()
        self.metrics.show(look.counts, look.balance)
        self.metrics.set("hone_scoring_rollouts", len(self._scoring))
        self.metrics.set("hone_control_leader", self.leading)
        self.metrics.set("hone_reward_script_ok", self._pool is None or self._pool.problem is None)
        if self._pool is not None:
            self.metrics.add("hone_reward_worker_restarts_total", self._pool.restarts - self._restarts)
            self._restarts = self._pool.restarts
        return self.metrics.text()

    async def status(self) -> dict[str, Any]:
        """The body of /status."""
        look = await self.look()
        return {
            "policy": self._policy,
            "counts": msgspec.to_builtins(look.counts),
            "balance": {**msgspec.to_builtins(look.balance), "exact": look.balance.exact},
            "scoring": len(self._scoring),
            "not_ready": self.not_ready(),
        }


def application(control: Control) -> web.Application:
    """`/health`, `/ready`, `/metrics`, `/status`; all of them only read."""

    async def health(_: web.Request) -> web.Response:
        return web.json_response({"status": "ok"})

    async def ready(_: web.Request) -> web.Response:
        reason = control.not_ready()
        return web.json_response({"ready": reason is None, "reason": reason}, status=503 if reason else 200)

    async def metrics(_: web.Request) -> web.Response:
        return web.Response(
            body=await control.exposition(), headers={"content-type": "text/plain; version=0.0.4"}
        )

    async def status(_: web.Request) -> web.Response:
        return web.json_response(await control.status())

    app = web.Application()
    app.add_routes([web.get(f"/{page.__name__}", page) for page in (health, ready, metrics, status)])
    return app


async def serve(
    path: Path,
    rewards: Settings,
    control: ControlSettings,
    *,
    policy: str,
    stop: asyncio.Event | None = None,
) -> None:
    """Run control on the store at `path` until SIGTERM or SIGINT, or until `stop` (then no signal
    handlers are installed). `ConfigError` if the reward script does not load, `Fenced` if another
    control took over."""
    ours = Control(path, rewards, policy)
    runner = web.AppRunner(application(ours), access_log=None)
    await runner.setup()
    try:
        await web.TCPSite(runner, control.host, control.port).start()
        if stop is None:
            stop = asyncio.Event()
            install(stop)
        waker = asyncio.create_task(wake_at(stop, ours))
        try:
            await ours.run(stop)
        finally:
            waker.cancel()
    finally:
        await runner.cleanup()


async def wake_at(stop: asyncio.Event, control: Control) -> None:
    """Let a sleeping control see `stop` at once."""
    await stop.wait()
    control.wake()


def install(stop: asyncio.Event) -> None:
    """SIGTERM and SIGINT set `stop`."""
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)

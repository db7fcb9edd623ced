"""Wiring: every part of the proxy, its one owner and its lifetime.

`serve` runs one proxy process until SIGTERM or SIGINT.
"""

import asyncio
import logging
import os
import secrets as random_secrets
import signal
import socket
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import msgspec
from aiohttp import web

from capture.errors import StoreError
from capture.journal import Journal
from capture.redact import Redactor
from capture.settings import Settings as CaptureSettings
from capture.sqlite import SqliteStore
from proxy.activator import Activator
from proxy.arrivals import Arrivals
from proxy.attribution import Attributor
from proxy.bridges import Bridges
from proxy.commit import Committer
from proxy.dispatch import Dispatch
from proxy.engines import Fleet
from proxy.heads import Heads
from proxy.limits import Limiter
from proxy.metrics import Metrics
from proxy.refusal import Refused
from proxy.relay import Relay
from proxy.reload import Reloader, Source
from proxy.rollouts_api import RolloutsApi
from proxy.rules import Live, Rules, rules
from proxy.server import Handler, Paths, Request, server
from proxy.settings import Settings
from proxy.stitches import Stitches
from proxy.storage import Storage
from proxy.tips import Tips
from proxy.upstream import Upstream, without_secrets

log = logging.getLogger("hone.proxy")

PRUNE_EVERY_S = 60.0


class Proxy:
    """The parts of one proxy process; `open` gives them their lifetime."""

    def __init__(
        self,
        settings: Settings,
        capture: CaptureSettings,
        store_path: Path,
        secrets: Mapping[str, str],
        source: Source | None = None,
    ) -> None:
        self.live = Live(rules(settings, secrets))
        self.settings = settings
        self.metrics = Metrics()
        self.holder = f"{socket.gethostname()}:{os.getpid()}:{random_secrets.token_hex(4)}"
        self.stopping = False
        self.recorded_at = time.monotonic()  # when the store last took a write of ours
        self._journal_store = SqliteStore(store_path)
        self.journal = Journal(self._journal_store, capture)
        self.storage = Storage(SqliteStore(store_path))  # what requests wait for
        self.upkeep = Storage(SqliteStore(store_path))  # background tasks: no request waits behind them
        self.upstream = Upstream(settings.deadlines, settings.limits)
        self.heads = Heads(self.storage, settings.limits.rollouts_cached, settings.head_ttl_s)
        self.stitches = Stitches(self.storage, settings.limits.rollouts_cached)
        redactor = Redactor(capture.redact)
        self.attributor = Attributor(self.live, self.heads, self.stitches, redactor)
        self.fleet: Fleet | None = None
        if settings.policy is not None and settings.engines.urls:
            self.fleet = Fleet(settings.policy, settings.engines, self.upstream, self.upkeep, settings.health)
        self.committer = Committer(self.journal, self.storage, self.metrics, settings.commit_timeout_s)
        self.limiter = Limiter(self.storage)
        tips = Tips(self.storage, settings.limits.tips_bytes_max)
        bridges = Bridges(capture.continuity, self.upstream, tips, self.metrics)
        self.dispatch = Dispatch(settings, self.fleet, self.upstream, bridges, self.metrics)
        self.relay = Relay(
            settings,
            self.attributor,
            self.live,
            self.limiter,
            Arrivals(self.attributor, self.metrics),
            self.dispatch,
            bridges,
            self.committer,
            self.metrics,
        )
        self.reloader: Reloader | None = None
        if source is not None:
            self.reloader = Reloader(source, settings, self.live, self.metrics, self._forget)
        self.api = RolloutsApi(
            settings, self.attributor, self.heads, self.storage, self.fleet, self.metrics, redactor
        )

    @asynccontextmanager
    async def open(self) -> AsyncIterator[None]:
        """Start the journal and the background tasks; stop them in the reverse order."""
        self.journal.start()
        tasks = [asyncio.create_task(self._record_in_flight()), asyncio.create_task(self._keep_stitches())]
        if self.reloader is not None and self.settings.watch_s:
            tasks.append(asyncio.create_task(self.reloader.watch(self.settings.watch_s)))
        if self.fleet is not None:
            await self.fleet.refresh()
            await asyncio.gather(*(self.fleet.look(engine) for engine in self.fleet.engines))
            activator = Activator(
                self.fleet,
                self.settings.engines,
                self.upstream,
                self.upkeep,
                self.metrics,
                holder=self.holder,
                lease_ttl_s=self.settings.lease_ttl_s,
            )
            tasks += [asyncio.create_task(self.fleet.run()), asyncio.create_task(activator.run())]
        try:
            yield
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            await self.upstream.close()
            await self.committer.drain()
            await self.journal.close()
            await self.storage.close()
            await self.upkeep.close()
            self._journal_store.close()

    def _forget(self, fresh: Rules) -> None:
        """Let go of what is kept for keys and upstreams that are gone."""
        self.limiter.keep(fresh.keyring.ids)
        self.dispatch.breakers.keep(fresh.routes.urls)

    async def _record_in_flight(self) -> None:
        """Tell the store every second which rollouts have calls here, so that none is sealed as idle."""
        while True:
            try:
                await self.upkeep.call(
                    self.upkeep.store.touch_in_flight,
                    self.holder,
                    self.heads.in_flight(),
                    self.settings.lease_ttl_s,
                )
                await self.stitches.write(self.upkeep)
                await self.limiter.refresh(self.upkeep)
                self.recorded_at = time.monotonic()
            except StoreError as error:
                self.metrics.note("in_flight", error)
            await asyncio.sleep(self.settings.in_flight_interval_s)

    async def _keep_stitches(self) -> None:
        """Delete the stitches that are too old, some at a time."""
        while True:
            pruned = 0
            try:
                pruned = await self.upkeep.call(
                    self.upkeep.store.prune_stitches, self.settings.stitch_retention_s
                )
            except StoreError as error:
                self.metrics.note("stitches", error)
            await asyncio.sleep(self.settings.in_flight_interval_s if pruned else PRUNE_EVERY_S)

    # -- small handlers --------------------------------------------------------------------------

    async def models(self, request: Request) -> web.Response:
        """`GET /v1/models`: every name that a call may ask for."""
        caller = await self.attributor.caller(request.headers)
        caller.need("infer")
        if rollout_id := request.rollout_id:
            await self.attributor.owned(caller, rollout_id)
        data = [
            {"id": name, "object": "model", "created": 0, "owned_by": "hone"}
            for name in self.live.rules.routes.names()
        ]
        return _json({"object": "list", "data": data})

    async def health(self, request: Request) -> web.Response:
        """`GET /health`: the process is alive."""
        return _json({"status": "ok"})

    async def ready(self, request: Request) -> web.Response:
        """`GET /ready`: 200 if calls can be captured and the policy served, else 503 with reasons."""
        reasons = self.not_ready()
        return _json({"ready": not reasons, "reasons": reasons}, 503 if reasons else 200)

    def not_ready(self) -> list[str]:
        """Why calls should go elsewhere, in sentences."""
        reasons = ["The proxy is stopping."] if self.stopping else []
        silent_s = time.monotonic() - self.recorded_at
        if silent_s > self.settings.lease_ttl_s:
            reasons.append(f"The store has taken no write for {silent_s:.0f} s.")
        if self.fleet is not None:
            wanted = {self.fleet.view.active, self.fleet.view.promoted}
            missing = {self.fleet.why_not(version) for version in wanted}
            reasons += sorted(reason for reason in missing if reason)
        return reasons

    async def export(self, request: Request) -> web.Response:
        """`GET /metrics`, in Prometheus' text format."""
        self.metrics.queue_bytes.set(self.journal.queue_bytes)
        self._export_shares()
        if self.fleet is not None:
            self.metrics.engines_healthy.set(sum(engine.healthy for engine in self.fleet.engines))
            self.metrics.active_version.set(self.fleet.view.active)
            self.metrics.promoted_version.set(self.fleet.view.promoted)
        return web.Response(
            body=self.metrics.render(), headers={"content-type": "text/plain; version=0.0.4; charset=utf-8"}
        )

    def _export_shares(self) -> None:
        shares = self.dispatch.breakers.shares()
        for engine in self.fleet.engines if self.fleet is not None else ():
            shares[engine.url] = engine.breaker.share if engine.healthy else 0.0
        self.metrics.upstream_share.clear()
        for url, share in shares.items():
            self.metrics.upstream_share.labels(without_secrets(url)).set(share)


def paths(proxy: Proxy) -> Paths:
    """What the proxy answers."""

    def to(handler: Handler) -> Handler:
        async def answered(request: Request) -> web.StreamResponse:
            try:
                return await handler(request)
            except Refused as refused:
                return refused.response()
            except StoreError as error:
                proxy.metrics.note("request", error)
                return Refused(503, "store", f"The store cannot do that now: {error}", retry=True).response()

        return answered

    found = Paths()
    for prefix in ("", "/rollouts/{rollout_id}"):
        found.add("POST", f"{prefix}/v1/chat/completions", proxy.relay.handle)
        found.add("GET", f"{prefix}/v1/models", to(proxy.models))
    found.add("POST", "/rollouts", to(proxy.api.open))
    found.add("GET", "/rollouts/{rollout_id}", to(proxy.api.read))
    found.add("POST", "/rollouts/{rollout_id}/finish", to(proxy.api.finish))
    found.add("POST", "/rewards", to(proxy.api.score))
    found.add("GET", "/health", to(proxy.health))
    found.add("GET", "/ready", to(proxy.ready))
    found.add("GET", "/metrics", to(proxy.export))
    return found


@asynccontextmanager
async def running(
    settings: Settings,
    store_path: Path,
    *,
    capture: CaptureSettings | None = None,
    secrets: Mapping[str, str] | None = None,
    source: Source | None = None,
) -> AsyncIterator[tuple[Proxy, str]]:
    """A proxy that listens; yields it and its URL. On leaving it drains: at most `drain_s`.

    `secrets` holds the values of the routes' `key_env` names. `ConfigError` for settings that cannot work.
    """
    proxy = Proxy(settings, capture or CaptureSettings(), store_path, secrets or {}, source)
    async with proxy.open():
        listening = server(paths(proxy).handle, settings.limits.body_bytes_max)
        runner = web.ServerRunner(listening, shutdown_timeout=settings.drain_s)
        await runner.setup()
        try:
            site = web.TCPSite(runner, settings.host, settings.port, backlog=1024)
            await site.start()
            port = runner.addresses[0][1]
            yield proxy, f"http://{settings.host}:{port}"
        finally:
            await runner.cleanup()


async def serve(
    settings: Settings,
    store_path: Path,
    *,
    capture: CaptureSettings | None = None,
    secrets: Mapping[str, str] | None = None,
    source: Source | None = None,
) -> None:
    """Run one proxy until SIGTERM or SIGINT. SIGHUP reads `source` again.

    Then: not ready for `unready_s`, no new connections, calls in flight get `drain_s`, and last the
    journal closes.
    """
    stop = asyncio.Event()
    reloads: set[asyncio.Task[bool]] = set()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    try:
        async with running(settings, store_path, capture=capture, secrets=secrets, source=source) as (
            proxy,
            url,
        ):
            if (reloader := proxy.reloader) is not None:
                loop.add_signal_handler(signal.SIGHUP, _soon, reloads, reloader.reload)
            log.info("proxy listens on %s", url)
            await stop.wait()
            proxy.stopping = True  # whoever asks /ready sends its calls elsewhere from now on
            await asyncio.sleep(settings.unready_s)
            log.info("proxy stops; %d calls in flight", sum(proxy.heads.in_flight().values()))
    finally:
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            loop.remove_signal_handler(number)


def _soon(tasks: set[asyncio.Task[bool]], work: Callable[[], Coroutine[Any, Any, bool]]) -> None:
    """Do it as a task of the running loop."""
    task = asyncio.get_running_loop().create_task(work())
    tasks.add(task)
    task.add_done_callback(tasks.discard)


def _json(value: object, status: int = 200) -> web.Response:
    return web.Response(status=status, body=msgspec.json.encode(value), content_type="application/json")

"""Load -> verify -> activate -> promote -> unload: one process does it, under the store's `activator` lease.

`proxy.plan` decides; `Activator` carries it out. A name is loaded once and never again with other
weights: vLLM's prefix cache would keep the old ones' results.
"""

import asyncio
import math
import time
from collections import Counter
from typing import Any

import msgspec

from capture.errors import AdapterError, Conflict, StoreError, UpstreamError
from capture.types import EngineVersion, Promotion
from proxy.engines import USABLE, Engine, Fleet, View, versioned
from proxy.metrics import Metrics
from proxy.plan import EngineView, Memory, Plan, plan
from proxy.prover import Prover
from proxy.settings import Engines
from proxy.storage import Storage
from proxy.upstream import Upstream

LEASE = "activator"


class Activator:
    """Carries plans out. `step` is one look; `run` is forever."""

    def __init__(
        self,
        fleet: Fleet,
        settings: Engines,
        upstream: Upstream,
        storage: Storage,
        metrics: Metrics,
        *,
        holder: str,
        lease_ttl_s: float,
    ) -> None:
        self._fleet = fleet
        self._settings = settings
        self._storage = storage
        self._metrics = metrics
        self._holder = holder
        self._ttl_s = lease_ttl_s
        self._memory = Memory()
        self._prover = Prover(fleet, settings, upstream)
        self._attempts: Counter[tuple[str, int]] = Counter()
        self._epoch: int | None = None
        self._renewed_at = -math.inf

    async def run(self) -> None:
        """Step every `poll_s`; a store that is busy or a fenced lease only costs a step."""
        try:
            while True:
                try:
                    await self.step()
                except (StoreError, Conflict) as error:
                    self._metrics.note("activator", error)
                    self._epoch = None
                await asyncio.sleep(self._settings.poll_s)
        finally:
            await self._storage.call(self._storage.store.release_lease, LEASE, self._holder)

    async def step(self) -> Plan:
        """One look at the store and the engines, and everything that follows from it."""
        if not await self._hold_lease():
            return Plan()
        view = await self._fleet.refresh()
        engines = [self._look(engine) for engine in self._fleet.engines]
        todo = plan(view, engines, self._memory, self._settings, time.monotonic())
        store, policy = self._storage.store, self._fleet.policy
        for version in todo.expire:
            self._memory.expired.add(version)
            dropped = await self._storage.call(store.expire_pins, policy, version)
            self._metrics.pins_expired.inc(dropped)
        if todo.load:
            # One load a step: activation and new leases do not wait behind a queue of them.
            await self._load(*todo.load[0], view)
        if todo.activate is not None:
            await self._activate(todo.activate)
        if view.asked is not None and view.asked.n in (todo.promote, todo.refuse):
            await self._promote(view.asked, served=todo.promote is not None)
        for incarnation, version in todo.unload:
            # The load before it may have taken longer than the lease, and another proxy promoted it since.
            if await self._hold_lease() and version not in (await self._fleet.refresh()).named:
                await self._unload(incarnation, version)
        for version in todo.retire:
            await self._storage.call(store.retire_version, policy, version)
        if todo != Plan():
            await self._fleet.refresh()
        return todo

    async def _hold_lease(self) -> bool:
        now = time.monotonic()
        if now - self._renewed_at >= self._ttl_s / 5 or self._epoch is None:
            acquire = self._storage.store.acquire_lease
            self._epoch = await self._storage.call(acquire, LEASE, self._holder, self._ttl_s)
            self._renewed_at = now
        return self._epoch is not None

    def _look(self, engine: Engine) -> EngineView:
        mine = [pair for pair in self._fleet.view.pairs if pair.engine == engine.incarnation]
        by_name = {versioned(self._fleet.policy, v): v for v in self._fleet.view.versions}
        return EngineView(
            incarnation=engine.incarnation,
            healthy=engine.healthy,
            usable=engine.usable,
            failed=frozenset(pair.version for pair in mine if pair.state == "failed"),
            loaded=frozenset(by_name[name] for name in engine.adapters if name in by_name),
            in_flight=engine.in_flight,
        )

    def _engine(self, incarnation: str) -> Engine | None:
        return next((e for e in self._fleet.engines if e.incarnation == incarnation and e.healthy), None)

    # -- load and verify -------------------------------------------------------------------------

    async def _load(self, incarnation: str, version: int, view: View) -> None:
        """Load and verify one version on one engine and record how far it got."""
        engine = self._engine(incarnation)
        if engine is None:
            return
        try:
            verdict, load_s, verify_s = await self._prover.prove(engine, view.versions[version])
        except (UpstreamError, AdapterError) as error:
            self._attempts[incarnation, version] += 1
            self._metrics.swap_failures.labels("load").inc()
            if self._attempts[incarnation, version] >= self._settings.load_attempts:
                await self._record(incarnation, version, "failed", str(error))
            return
        self._metrics.swap_seconds.labels("load").observe(load_s)
        self._metrics.swap_seconds.labels("verify").observe(verify_s)
        await self._record(
            incarnation,
            version,
            verdict.state,
            f"{verdict.detail}; load {load_s:.3f} s, verify {verify_s:.3f} s",
        )
        if verdict.state == "failed":
            self._metrics.swap_failures.labels("verify").inc()
            await self._unload(incarnation, version)

    # -- activate and retire ---------------------------------------------------------------------

    async def _activate(self, version: int) -> None:
        """One store row; then every engine that serves it is recorded with its calls in flight."""
        assert self._epoch is not None
        policy, store = self._fleet.policy, self._storage.store
        in_flight = {engine.incarnation: engine.in_flight.total() for engine in self._fleet.engines}
        await self._storage.call(store.activate, policy, version, self._epoch)
        waited = time.monotonic() - self._memory.first_seen.pop(version, time.monotonic())
        self._metrics.swap_seconds.labels("activate").observe(waited)
        self._metrics.active_version.set(version)
        for pair in self._fleet.view.pairs:
            if pair.version == version and pair.state in USABLE and pair.engine in in_flight:
                row = msgspec.structs.replace(pair, in_flight=in_flight[pair.engine], at=time.time())
                await self._storage.call(store.record_engine_version, row)
        run = await self._storage.call(store.latest_run)
        if run is not None:
            note = {
                "version": version,
                "activate_s": waited,
                "in_flight": sum(in_flight.values()),
                "states": sorted({pair.state for pair in self._fleet.view.pairs if pair.version == version}),
            }
            await self._storage.call(store.put_metrics, run, "swap", note)

    async def _promote(self, asked: Promotion, *, served: bool) -> None:
        """One store row: the version is served, or never will be, and why."""
        assert self._epoch is not None
        store = self._storage.store
        waited = time.monotonic() - self._memory.asked_since.pop(asked.n, time.monotonic())
        if not served:
            mine = [pair for pair in self._fleet.view.pairs if pair.version == asked.version]
            up = {engine.incarnation for engine in self._fleet.engines if engine.healthy}
            failed = [f"{pair.engine}: {pair.detail}" for pair in mine if pair.engine in up]
            await self._storage.call(store.refuse_promotion, asked.n, "; ".join(failed), self._epoch)
            self._metrics.swap_failures.labels("promote").inc()
        elif await self._storage.call(store.promote, asked.n, self._epoch):
            self._metrics.swap_seconds.labels("promote").observe(waited)
            self._metrics.promoted_version.set(asked.version)

    async def _unload(self, incarnation: str, version: int) -> None:
        """Take a version off an engine; one that failed there stays recorded as failed."""
        engine = self._engine(incarnation)
        if engine is None:
            return
        name = versioned(self._fleet.policy, version)
        if version in engine.usable:
            # No call may pick it any more before the engine forgets it.
            await self._record(incarnation, version, "unloaded", "")
            await self._fleet.refresh()
            if engine.in_flight.get(version):
                return
        try:
            body = msgspec.json.encode({"lora_name": name})
            status, answer = await self._prover.ask(engine, "/v1/unload_lora_adapter", body)
        except UpstreamError as error:
            self._metrics.note("unload", error)
            return
        if status in (200, 404):
            engine.set_adapter(name, None)
        else:
            self._metrics.note("unload", f"{status} {answer[:200]!r}")

    async def _record(self, incarnation: str, version: int, state: Any, detail: str) -> None:
        row = EngineVersion(
            engine=incarnation,
            policy=self._fleet.policy,
            version=version,
            state=state,
            detail=detail,
            at=time.time(),
        )
        await self._storage.call(self._storage.store.record_engine_version, row)

"""The policy's engines: which of them are up, and which serves which version.

A worker uses verified pairs (engine incarnation, version) only, read from the store, and always by
versioned name; the base model answers for version 0 alone. Loading and verifying is the activator's.
"""

import asyncio
import hashlib
import math
import re
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import msgspec

from capture.errors import NotFound, StoreError, UpstreamError
from capture.store import Store
from capture.types import EngineVersion, Promotion, Rollout, Version
from proxy.health import Breaker
from proxy.refusal import Refused
from proxy.settings import Engines, Health
from proxy.storage import Storage
from proxy.upstream import Upstream

USABLE = frozenset({"verified", "indistinguishable"})
_START = re.compile(rb"^process_start_time_seconds(?:\{[^}]*\})? (\S+)", re.MULTILINE)


class Model(msgspec.Struct, frozen=True):
    """One entry of an engine's GET /v1/models."""

    id: str
    root: str | None = None
    parent: str | None = None  # None: the base model
    max_model_len: int | None = None


class Models(msgspec.Struct, frozen=True):
    """The whole of it."""

    data: list[Model]


_MODELS = msgspec.json.Decoder(Models)


class View(msgspec.Struct, frozen=True, kw_only=True):
    """What the store says of a policy's versions, at one moment."""

    versions: dict[int, Version] = {}
    active: int = 0
    promoted: int = 0
    asked: Promotion | None = None  # of another version, which engines must prove first
    lineage: str | None = None  # of the latest run: only its versions become active
    pairs: list[EngineVersion] = []
    pinned: dict[int, int] = {}  # version -> open training and eval rollouts that keep it

    @property
    def named(self) -> set[int]:
        """The versions that stay on every engine whoever is pinned to what: active, promoted, asked for."""
        return {self.active, self.promoted} | ({self.asked.version} if self.asked else set())

    def is_base(self, version: int) -> bool:
        """Whether the version is the base model itself, without adapter."""
        row = self.versions.get(version)
        return version == 0 if row is None else row.path is None


def view(store: Store, policy: str) -> View:
    """Read it; a policy that no run ever started has version 0 alone."""
    active, promoted = store.active_version(policy), store.promoted_version(policy)
    run = store.latest_run()
    return View(
        lineage=None if run is None else store.lineage(run).id,
        versions={version.version: version for version in store.versions(policy)},
        active=active.version if active else 0,
        promoted=promoted.version if promoted else 0,
        asked=store.open_promotion(policy),
        pairs=store.engine_versions(policy),
        pinned=store.pinned_versions(policy),
    )


class Engine:
    """One vLLM server as this process sees it."""

    def __init__(self, url: str, breaker: Breaker) -> None:
        self.url = url.rstrip("/")
        self.breaker = breaker
        self.healthy = False
        self.was_up = False  # at any time
        self.incarnation = self.url  # changes when the server restarts
        self.base: str | None = None  # the id that the base model is served under
        self.max_model_len: int | None = None
        self.adapters: dict[str, str] = {}  # served name -> path
        self.usable: frozenset[int] = frozenset()  # versions verified on this incarnation
        self.in_flight: Counter[int] = Counter()  # calls by version, this process's
        self.changes = 0  # loads and unloads by this process, so that an older look does not undo them

    @contextmanager
    def using(self, version: int) -> Iterator[None]:
        """Count a call while it is in flight."""
        self.in_flight[version] += 1
        try:
            yield
        finally:
            self.in_flight[version] -= 1
            if not self.in_flight[version]:
                del self.in_flight[version]

    def set_adapter(self, name: str, path: str | None) -> None:
        """This process just loaded an adapter, or unloaded it (None)."""
        self.changes += 1
        self.adapters = {key: value for key, value in self.adapters.items() if key != name}
        if path is not None:
            self.adapters[name] = path


def prefer(rollout_id: str, engines: Sequence[Engine]) -> Engine | None:
    """Rendezvous hash: a rollout stays on one engine while that engine is there."""
    if len(engines) < 2:
        return engines[0] if engines else None
    return max(
        engines,
        key=lambda engine: hashlib.blake2b(f"{rollout_id} {engine.url}".encode(), digest_size=8).digest(),
    )


class Fleet:
    """All engines of one policy."""

    def __init__(
        self,
        policy: str,
        settings: Engines,
        upstream: Upstream,
        storage: Storage,
        health: Health = Health(),  # noqa: B008 - frozen
    ) -> None:
        self.policy = policy
        self.engines = [Engine(url, Breaker(health)) for url in settings.urls]
        self.view = View()
        self._settings = settings
        self._upstream = upstream
        self._storage = storage
        self._read_at = -math.inf  # monotonic seconds
        self._changed = asyncio.Event()
        self._look_now = asyncio.Event()

    # -- for calls -------------------------------------------------------------------------------

    def name(self, engine: Engine, version: int) -> str | None:
        """What the engine serves this version under; None if it does not serve it (yet)."""
        if self.view.is_base(version):
            return engine.base
        return versioned(self.policy, version) if version in engine.usable else None

    @property
    def max_model_len(self) -> int | None:
        """Tokens that every engine can hold; None while no engine has said."""
        return min((e.max_model_len for e in self.engines if e.max_model_len is not None), default=None)

    def version_for(self, rollout: Rollout) -> int:
        """The version that serves a rollout's next call: promoted for observe, so that a rollback takes hold
        in open rollouts too; else the one it started with."""
        if rollout.mode == "observe":
            return self.view.promoted
        return self.view.active if rollout.policy_version is None else rollout.policy_version

    def pick(self, rollout_id: str, version: int) -> Engine | None:
        """The engine for this rollout among those that are up and proved to serve the version.

        One that fails, or is just coming back, is passed over as far as another can do the work.
        """
        able = [engine for engine in self.engines if engine.healthy and self.name(engine, version)]
        if len(able) > 1:
            able = [engine for engine in able if not engine.breaker.wait_s()] or able
        return prefer(rollout_id, able)

    async def wait(self, rollout: Rollout, deadline: float) -> tuple[Engine, int]:
        """An engine for a rollout's next call and the version there, waiting until `deadline` (monotonic
        seconds); what waits while another version is promoted gets that one. `Refused` 503 names what is
        missing."""
        while True:
            version = self.version_for(rollout)
            if engine := self.pick(rollout.id, version):
                return engine, version
            left = deadline - time.monotonic()
            if left <= 0 or not self.engines:
                raise Refused(503, "no_engine", self.why_not(version) or "The engine left.", retry=True)
            self._changed.clear()
            try:
                await asyncio.wait_for(self._changed.wait(), min(left, self._settings.health_interval_s))
            except TimeoutError:
                continue

    def why_not(self, version: int) -> str | None:
        """One sentence on why the version cannot be served now; None if it can."""
        if not self.engines:
            return f"No engine is configured for the policy {self.policy!r} (proxy.engines.urls)."
        healthy = [engine for engine in self.engines if engine.healthy]
        if not healthy:
            return f"No engine is up: {', '.join(engine.url for engine in self.engines)}."
        if not any(self.name(engine, version) for engine in healthy):
            return f"No engine has proved yet that it serves {versioned(self.policy, version)}."
        return None

    def suspect(self, engine: Engine) -> None:
        """A call found the engine gone, or without an adapter that it had: look before using it again."""
        engine.healthy = False
        self._look_now.set()

    # -- upkeep ----------------------------------------------------------------------------------

    async def run(self) -> None:
        """Look at every engine and at the store, forever."""
        async with asyncio.TaskGroup() as group:
            group.create_task(self._follow_store())
            group.create_task(self._follow_engines())

    async def _follow_engines(self) -> None:
        while True:
            await asyncio.gather(*(self.look(engine) for engine in self.engines))
            try:
                await asyncio.wait_for(self._look_now.wait(), self._settings.health_interval_s)
                await asyncio.sleep(self._settings.poll_s)  # no storm while an engine is down
            except TimeoutError:
                pass
            self._look_now.clear()

    async def _follow_store(self) -> None:
        while True:
            try:
                if time.monotonic() - self._read_at >= self._settings.poll_s:  # the activator reads too
                    await self.refresh()
            except StoreError:  # the last view stays in use; /ready tells of the store itself
                await asyncio.sleep(self._settings.health_interval_s)
            await asyncio.sleep(self._settings.poll_s)

    async def refresh(self) -> View:
        """Read the store now and recompute which pairs are usable."""
        before = self.view.promoted
        self.view = await self._storage.call(view, self._storage.store, self.policy)
        self._read_at = time.monotonic()
        if self.view.promoted != before:
            self._changed.set()
        for engine in self.engines:
            self._recompute(engine)
        return self.view

    def _recompute(self, engine: Engine) -> None:
        usable = frozenset(
            pair.version
            for pair in self.view.pairs
            if pair.engine == engine.incarnation
            and pair.state in USABLE
            and versioned(self.policy, pair.version) in engine.adapters
        )
        if usable != engine.usable:
            engine.usable = usable
            self._changed.set()

    async def look(self, engine: Engine) -> None:
        """One health check; notices a restart, and adapters that came or went."""
        changes = engine.changes
        try:
            status, _ = await self._upstream.get(engine.url + "/health", self._settings.health_timeout_s)
            if status != 200:
                raise UpstreamError(f"GET /health answered {status}")
            models = await self.models(engine)
            lost = changes == engine.changes and engine.adapters.keys() - models
            if not engine.healthy or engine.incarnation == engine.url or lost:
                engine.incarnation = await self._incarnation(engine)
        except UpstreamError:
            engine.healthy = False
            return
        base = next((model for model in models.values() if model.parent is None), None)
        engine.base = base.id if base else None
        engine.max_model_len = base.max_model_len if base else None
        if changes == engine.changes:
            engine.adapters = {model.id: model.root or "" for model in models.values() if model.parent}
        if engine.was_up and not engine.healthy:
            engine.breaker.returns()
        engine.healthy = engine.was_up = True
        self._recompute(engine)
        self._changed.set()

    async def models(self, engine: Engine) -> dict[str, Model]:
        """What the engine says it serves, by name; `UpstreamError`."""
        status, body = await self._upstream.get(engine.url + "/v1/models", self._settings.health_timeout_s)
        try:
            if status != 200:
                raise UpstreamError(f"GET /v1/models answered {status}")
            return {model.id: model for model in _MODELS.decode(body).data}
        except msgspec.DecodeError as error:
            raise UpstreamError(f"GET /v1/models answered garbage: {error}") from None

    async def _incarnation(self, engine: Engine) -> str:
        """The URL and when the server's process started."""
        status, body = await self._upstream.get(engine.url + "/metrics", self._settings.health_timeout_s)
        found = _START.search(body) if status == 200 else None
        started = float(found[1]) if found else time.time()
        return f"{engine.url}#{started:.2f}"


def versioned(policy: str, version: int) -> str:
    """The immutable name of a version on every engine."""
    return f"{policy}@v{version}"


def version_of(store: Store, policy: str, version: int) -> Version:
    """`NotFound` if the policy has no such version."""
    for row in store.versions(policy):
        if row.version == version:
            return row
    raise NotFound(f"{policy} has no version {version}")

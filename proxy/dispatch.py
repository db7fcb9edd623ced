"""Where a call goes: to an engine that serves the rollout's version, or to another upstream.

Decides what is set in the request on the way, and tries again only where nothing was generated: an
upstream that cannot be reached, that says it is not there (502, 503, 504) or whose idle connection was dead,
an engine that has lost the adapter, or that refused a prompt made of ids.
"""

import asyncio
import logging
import random
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from msgspec import Raw

from capture.reasons import PROVIDER
from proxy.bridges import Bridges
from proxy.call import Call
from proxy.dialects import chat
from proxy.engines import Engine, Fleet
from proxy.health import CLIENT_ERROR, HUNG_UP, OK, Breaker, Breakers, verdict
from proxy.metrics import Metrics
from proxy.refusal import Refused
from proxy.routes import ToPolicy, ToUpstream
from proxy.sampling import shape, untrainable
from proxy.settings import Settings
from proxy.upstream import ConnectFailed, Dropped, Reply, TimedOut, Upstream

log = logging.getLogger("hone.proxy")

_NOT_THERE = frozenset({502, 503, 504})  # nobody began to generate
_STALE = "stale"  # an idle connection that was dead: nobody's fault
_HARMLESS = frozenset({OK, CLIENT_ERROR, HUNG_UP, _STALE})
_EARLY_S = 1.0  # a call that is asked about within that has its whole deadline


class Dispatch:
    """Sends calls out; whoever gets a reply reads it inside the `with`."""

    def __init__(
        self,
        settings: Settings,
        fleet: Fleet | None,
        upstream: Upstream,
        bridges: Bridges,
        metrics: Metrics,
    ) -> None:
        self._settings = settings
        self._fleet = fleet
        self._upstream = upstream
        self._bridges = bridges
        self._metrics = metrics
        self.breakers = Breakers(settings.health)  # of upstreams; engines have their own

    @asynccontextmanager
    async def open(self, call: Call) -> AsyncIterator[Reply]:
        """The upstream's answer, from its head on; closed, and so cancelled, on every way out."""
        if isinstance(call.target, ToUpstream):
            reply = await self._ask_upstream(call, call.target)
            try:
                yield reply
            finally:
                reply.close()
            return
        fleet = self._fleet_for(call.target)
        self._shape(call, fleet)
        deadline = time.monotonic() + (0.0 if call.fallbacks else self._settings.engines.engine_wait_s)
        tries = 0
        while True:
            engine, call.version = await fleet.wait(call.head.rollout, deadline)
            with engine.using(call.version):
                last = tries >= self._settings.deadlines.retries
                found = await self._ask_engine(call, fleet, engine, last)
                if found is None:
                    tries += 1
                    continue
                try:
                    yield found
                finally:
                    found.close()
                return

    async def _ask_upstream(self, call: Call, target: ToUpstream) -> Reply:
        """Its answer; sent again where it saw nothing of the call. `Refused` 503 while it is left alone."""
        body, key = self._for_upstream(call, target)
        breaker = self.breakers.of(target.url)
        url = target.url + "/chat/completions"
        tries = 0
        while True:
            if (wait_s := breaker.wait_s()) > 0:
                message = f"{target.name}: the upstream fails, and is left alone for a moment."
                raise Refused(503, "upstream_unavailable", message, retry=True, retry_after_s=wait_s)
            last = tries >= self._settings.deadlines.retries
            try:
                reply = await self._try(call, breaker, url, body, key, last)
            except ConnectFailed:
                if last:
                    raise
                self.attempt(call, "connect")
                reply = None
            if reply is not None:
                return reply
            await self._pause(call, tries)
            tries += 1

    async def _ask_engine(self, call: Call, fleet: Fleet, engine: Engine, last: bool) -> Reply | None:
        """Its answer; None if it generated nothing and may be asked again: it saw nothing of the call, has
        lost the adapter, or refused the ids that the prompt was made of."""
        assert call.version is not None
        name = fleet.name(engine, call.version)
        if name is None:
            return None
        call.fields["model"] = chat.quote(name)
        call.upstream = engine.incarnation
        await self._bridges.prepare(call, engine)
        url, body = engine.url + "/v1/chat/completions", chat.encode(call.fields)
        try:
            reply = await self._try(call, engine.breaker, url, body, None, last)
        except ConnectFailed:
            self.attempt(call, "connect")
            fleet.suspect(engine)
            return None
        if reply is None:
            await self._pause(call, 0)
            return None
        if reply.status == 400 and self._bridges.withdraw(call):
            reply.close()
            self.attempt(call, CLIENT_ERROR)
            return None
        if reply.status != 404:
            return reply
        reply.close()
        self.attempt(call, "lost_adapter")
        fleet.suspect(engine)
        return None

    async def _try(
        self, call: Call, breaker: Breaker, url: str, body: bytes, key: str | None, last: bool
    ) -> Reply | None:
        """One request; None, counted, if it may be sent again. `UpstreamError` is the caller's to count."""
        left_s = self._left_s(call)
        call.breaker = breaker
        breaker.begin()
        try:
            reply = await self._upstream.post(url, body, key, left_s=left_s)
        except Dropped as error:
            if last or not error.reused:
                raise
            self.attempt(call, _STALE)
            return None
        if last or reply.status not in _NOT_THERE:
            return reply
        reply.close()
        self.attempt(call, "unavailable")
        return None

    async def _pause(self, call: Call, tries: int) -> None:
        """Before another attempt: a random while, so that many callers do not come back at one moment."""
        self._metrics.count(self._metrics.retries, call.target.name)
        longest_s = self._settings.deadlines.retry_pause_s * 2.0**tries
        await asyncio.sleep(random.uniform(0, longest_s))

    def _left_s(self, call: Call) -> float | None:
        """Of the call's own deadline; None: nearly all. `TimedOut` if nothing is left."""
        gone_s = time.monotonic() - call.arrived_at
        if gone_s < _EARLY_S:
            return None
        left_s = self._settings.deadlines.total_s - gone_s
        if left_s <= 0:
            raise TimedOut("the call's time was over before an upstream had answered")
        return left_s

    def _for_upstream(self, call: Call, target: ToUpstream) -> tuple[bytes, str | None]:
        """Body and key for an OpenAI-compatible upstream: the agent's own bytes, but for the model."""
        if call.mode == "train":
            self._untrainable(call, PROVIDER)
        model = target.name if target.model is None and call.fell_back else target.model
        if model is not None:
            call.alias = call.asked.model
            call.fields["model"] = chat.quote(model)
        self._cap(call)
        if call.meter is not None and call.asked.stream and not call.asked.usage:
            chat.ask_for_usage(call.fields)
            call.strips_usage = True
        as_sent = model is None and not call.changed and not call.strips_usage
        body = call.body if as_sent else chat.encode(call.fields)
        return body, call.key if target.passthrough else target.key

    def _cap(self, call: Call) -> None:
        """Set the cap of the call's key, where the agent named none."""
        if call.cap is not None:
            call.fields["max_tokens"] = Raw(b"%d" % call.cap)
            call.changed = {"max_tokens": call.cap}

    def _fleet_for(self, target: ToPolicy) -> Fleet:
        if self._fleet is None:
            raise Refused(503, "no_engine", f"No engine is configured for {target.policy!r}.", retry=False)
        return self._fleet

    def _shape(self, call: Call, fleet: Fleet) -> None:
        """Set what capture and training need in a request to the policy."""
        rollout = call.head.rollout
        call.version = fleet.version_for(rollout)
        if rollout.mode == "train":
            call.version = call.head.pin(call.version)
        call.alias = call.asked.model
        self._cap(call)
        if rollout.mode == "train":
            self._bridges.read(call)
            call.changed |= shape(call.fields, self._settings.sampling, fleet.max_model_len)
            for name in call.changed:
                self._metrics.count_removed(name)
            if reason := untrainable(call.fields):
                self._untrainable(call, reason)
        chat.ask_for_tokens(call.fields, call.asked)

    def _untrainable(self, call: Call, reason: str) -> None:
        call.untrainable = reason
        self._metrics.untrainable.labels(reason).inc()

    def attempt(self, call: Call, outcome: str) -> None:
        """Count one request to an upstream by how it went."""
        route = call.target.name
        self._metrics.count(self._metrics.attempts, route, outcome)
        if outcome not in _HARMLESS:
            self._metrics.route(route).failed_attempts.inc()
        breaker, call.breaker = call.breaker, None
        if breaker is not None and breaker.end(verdict(outcome)):
            self._metrics.count(self._metrics.pauses, route)
            log.warning("%s: the upstream fails (%s); calls leave it alone for a while", route, outcome)

    def leave(self, call: Call) -> None:
        """The call is over, whatever it is that nobody counted."""
        if call.breaker is not None:
            call.breaker.end("neither")
            call.breaker = None

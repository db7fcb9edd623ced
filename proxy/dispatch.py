"""Where a call goes: to an engine that serves the rollout's version, or to another upstream.

Decides what is set in the request on the way, and tries again only where nothing was generated: an
engine that cannot be reached, that has lost the adapter, or that refused a prompt made of ids.
"""

import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from capture.reasons import PROVIDER
from proxy.bridges import Bridges
from proxy.call import Call
from proxy.dialects import chat
from proxy.engines import Engine, Fleet
from proxy.keys import rollout_of
from proxy.metrics import Metrics
from proxy.refusal import Refused
from proxy.routes import ToPolicy, ToUpstream
from proxy.sampling import shape, untrainable
from proxy.settings import Settings
from proxy.upstream import ConnectFailed, Reply, Upstream


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

    @asynccontextmanager
    async def open(self, call: Call) -> AsyncIterator[Reply]:
        """The upstream's answer, from its head on; closed, and so cancelled, on every way out."""
        if isinstance(call.target, ToUpstream):
            body, key = self._for_upstream(call, call.target)
            reply = await self._upstream.post(call.target.url + "/chat/completions", body, key)
            try:
                yield reply
            finally:
                reply.close()
            return
        fleet = self._fleet_for(call.target)
        self._shape(call, fleet)
        deadline = time.monotonic() + self._settings.engines.engine_wait_s
        while True:
            engine, call.version = await fleet.wait(call.head.rollout, deadline)
            with engine.using(call.version):
                found = await self._ask_engine(call, fleet, engine)
                if found is None:
                    continue
                try:
                    yield found
                finally:
                    found.close()
                return

    async def _ask_engine(self, call: Call, fleet: Fleet, engine: Engine) -> Reply | None:
        """Its answer; None if it generated nothing and may be asked again: it saw nothing of the call, has
        lost the adapter, or refused the ids that the prompt was made of."""
        assert call.version is not None
        name = fleet.name(engine, call.version)
        if name is None:
            return None
        call.fields["model"] = chat.quote(name)
        call.upstream = engine.incarnation
        await self._bridges.prepare(call, engine)
        try:
            reply = await self._upstream.post(
                engine.url + "/v1/chat/completions", chat.encode(call.fields), None
            )
        except ConnectFailed:
            self.attempt(call, "connect")
            fleet.suspect(engine)
            return None
        if reply.status == 400 and self._bridges.withdraw(call):
            reply.close()
            self.attempt(call, "client_error")
            return None
        if reply.status != 404:
            return reply
        reply.close()
        self.attempt(call, "lost_adapter")
        fleet.suspect(engine)
        return None

    def _for_upstream(self, call: Call, target: ToUpstream) -> tuple[bytes, str | None]:
        """Body and key for an OpenAI-compatible upstream: the agent's own bytes, but for the model."""
        if call.mode == "train":
            self._untrainable(call, PROVIDER)
        body = call.body
        if target.model is not None:
            call.alias = call.asked.model
            call.fields["model"] = chat.quote(target.model)
            body = chat.encode(call.fields)
        if target.passthrough:
            return body, (call.key or None) if rollout_of(call.key) is None else None
        return body, target.key

    def _fleet_for(self, target: ToPolicy) -> Fleet:
        if self._fleet is None:
            raise Refused(503, "no_engine", f"No engine is configured for {target.policy!r}.", retry=False)
        return self._fleet

    def _shape(self, call: Call, fleet: Fleet) -> None:
        """Set what capture and training need in a request to the policy."""
        rollout = call.head.rollout
        call.version = fleet.version_for(rollout)
        call.alias = call.asked.model
        if rollout.mode == "train":
            self._bridges.read(call)
            call.changed = shape(call.fields, self._settings.sampling, fleet.max_model_len)
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
        if outcome not in ("ok", "client_error", "hung_up"):
            self._metrics.route(route).failed_attempts.inc()

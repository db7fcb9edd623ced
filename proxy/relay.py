"""The hot path: a chat completion in, an upstream's answer out, captured before its end is seen.

What the agent must never see before the call is durable is the terminal part: of a stream
everything from the chunk that completes its last choice, of a whole answer the status, headers and
body.
"""

import asyncio
import time

import msgspec
from aiohttp import web

from capture.errors import StoreError, UpstreamError
from capture.reasons import REDACTED
from proxy.arrivals import Arrivals
from proxy.attribution import Attributor
from proxy.bridges import Bridges
from proxy.call import Call
from proxy.commit import Committer
from proxy.dialects import chat
from proxy.dispatch import Dispatch
from proxy.health import CLIENT_ERROR, OK
from proxy.health import HUNG_UP as LEFT
from proxy.limits import Limited, Limiter, Meter
from proxy.metrics import Metrics
from proxy.refusal import Refused, error_chunk
from proxy.rules import Live
from proxy.server import Request
from proxy.settings import Settings
from proxy.sse import Splitter
from proxy.upstream import ConnectFailed, Reply, TimedOut, TooLong

HUNG_UP = 499
_TOO_MANY = 429
_PASSED_ON = ("retry-after", "retry-after-ms", "x-should-retry", "x-request-id")


class Relay:
    """Serves `POST [/rollouts/{rollout_id}]/v1/chat/completions`."""

    def __init__(
        self,
        settings: Settings,
        attributor: Attributor,
        live: Live,
        limiter: Limiter,
        arrivals: Arrivals,
        dispatch: Dispatch,
        bridges: Bridges,
        committer: Committer,
        metrics: Metrics,
    ) -> None:
        self._settings = settings
        self._attributor = attributor
        self._live = live
        self._limiter = limiter
        self._arrivals = arrivals
        self._dispatch = dispatch
        self._bridges = bridges
        self._committer = committer
        self._metrics = metrics

    async def handle(self, request: Request) -> web.StreamResponse:
        """One call from arrival to its last byte."""
        began = time.perf_counter()
        route, status = "none", HUNG_UP
        self._metrics.in_flight.inc()
        meter: Meter | None = None
        try:
            rules = self._live.rules
            caller = await self._attributor.caller(request.headers, rules)
            if caller.limits is not None:
                meter = await self._limiter.enter(caller.key_id, caller.limits)
            call = await self._arrivals.accept(request, rules, caller, meter)
            route = call.target.name
            call.head.begin()
            try:
                response = await self._serve(request, call)
            finally:
                call.head.end(captured=call.captured)
            status = response.status
            return response
        except Refused as refused:
            status = refused.status
            if isinstance(refused, Limited):
                self._metrics.count(self._metrics.limited, refused.limit)
            return refused.response()
        except StoreError as error:
            self._metrics.note("request", error)
            status = 503
            return Refused(503, "store", f"The store cannot do that now: {error}", retry=True).response()
        finally:
            if meter is not None:
                meter.leave()
            self._metrics.in_flight.dec()
            self._metrics.count(self._metrics.requests, route, str(status))
            self._metrics.route(route).duration.observe(time.perf_counter() - began)

    # -- out -------------------------------------------------------------------------------------

    async def _serve(self, request: Request, call: Call) -> web.StreamResponse:
        """From the target, else from the fallbacks, as long as nothing has been sent to the agent."""
        try:
            while (response := await self._serve_from(request, call)) is None:
                self._metrics.count(self._metrics.fallbacks, call.target.name)
            return response
        finally:
            self._dispatch.leave(call)

    async def _serve_from(self, request: Request, call: Call) -> web.StreamResponse | None:
        """The answer of the target; None if it failed and the call now has the next one as its target."""
        partial = bytearray()  # what the upstream said so far
        try:
            async with self._dispatch.open(call) as reply:
                if reply.status == _TOO_MANY and call.fallbacks:
                    self._dispatch.attempt(call, CLIENT_ERROR)
                    call.fall_back()
                    return None
                if reply.status == 200 and call.asked.stream:
                    return await self._stream(request, call, reply, partial)
                return await self._whole(request, call, reply, partial)
        except (asyncio.CancelledError, ConnectionResetError):
            self._hung_up(call, bytes(partial))
            raise
        except UpstreamError as error:
            self._dispatch.attempt(call, _outcome(error))
            if call.fall_back():
                return None
            await self._commit(call, 502, bytes(partial), str(error))
            refused = Refused(502, "upstream_error", f"{call.target.name}: {error}")
            return await self._deliver(request, call, refused.response(call.headers()))
        except Refused as refused:
            if not call.handed:
                if refused.status == 503 and call.fall_back():
                    return None
                await self._commit(call, refused.status, b"", refused.message)
            return await self._deliver(request, call, refused.response(call.headers()))

    # -- whole answers ---------------------------------------------------------------------------

    async def _whole(
        self, request: Request, call: Call, reply: Reply, partial: bytearray
    ) -> web.StreamResponse:
        body = await reply.read()
        partial += body
        call.first_byte_at = time.time()
        if reply.status >= 500 or not (reply.status == 200 or reply.status >= 400):
            raise UpstreamError(f"the upstream answered {reply.status}: {_excerpt(body)}")
        headers = call.headers()
        content_type = "application/json"
        if reply.status == 200:
            answer = chat.Whole(body)
            stripped = answer.strip(_wanted(call), call.alias)
            call.answers, call.said = answer.answers, answer.said
            self._count_tokens(call, answer.usage)
            call.charge(body, answer.usage)
        else:
            stripped = body
            content_type = reply.headers.get("content-type", content_type)
            headers |= {name: reply.headers[name] for name in _PASSED_ON if name in reply.headers}
        self._dispatch.attempt(call, OK if reply.status == 200 else CLIENT_ERROR)
        if not await self._commit(call, reply.status, body):
            headers |= self._uncaptured(call)
        headers["content-type"] = content_type
        return await self._deliver(
            request, call, web.Response(status=reply.status, body=stripped, headers=headers)
        )

    async def _deliver(
        self, request: Request, call: Call, response: web.StreamResponse
    ) -> web.StreamResponse:
        """Send a whole answer; a durable call whose agent has left meanwhile is undelivered."""
        try:
            await response.prepare(request)
            await response.write_eof()
        except (asyncio.CancelledError, ConnectionResetError):
            if call.captured:
                self._committer.undelivered(call.id)
            raise
        return response

    # -- streams ---------------------------------------------------------------------------------

    async def _stream(
        self, request: Request, call: Call, reply: Reply, partial: bytearray
    ) -> web.StreamResponse:
        if not reply.is_stream:
            raise UpstreamError(f"a stream was asked for, {reply.headers.get('content-type')!r} came")
        gather = call.trail is not None or call.conversation is not None
        state = chat.Stream(_wanted(call), call.alias, gather=gather, strips_usage=call.strips_usage)
        call.answers, call.said = state.answers, state.said
        splitter = Splitter(self._settings.limits.chunk_bytes_max)
        response: web.StreamResponse | None = None
        try:
            async for data in reply.chunks():
                partial += data
                out, error = state.take_all(splitter.feed(data))
                if out and (response is not None or error is None):
                    response = response or await self._begin(request, call)
                    await response.write(out)
                if error is not None:
                    raise error
            if not (state.done or state.complete):
                raise UpstreamError("the stream ended before its end was said")
        except UpstreamError as broken:
            if response is None:
                raise
            self._dispatch.attempt(call, _outcome(broken))
            call.charge(bytes(partial))
            await self._commit(call, 200, bytes(partial), str(broken))
            return await self._finish(call, response, error_chunk("upstream_error", str(broken)))
        self._dispatch.attempt(call, OK)
        self._count_tokens(call, state.usage)
        call.charge(bytes(partial), state.usage)
        return await self._end(request, call, response, state, bytes(partial))

    async def _begin(
        self, request: Request, call: Call, more: dict[str, str] | None = None
    ) -> web.StreamResponse:
        """Send the head of a stream."""
        call.first_byte_at = time.time()
        self._metrics.route(call.target.name).first_token.observe(call.first_byte_at - call.started_at)
        headers = {**call.headers(), "cache-control": "no-cache", **(more or {})}
        headers["content-type"] = "text/event-stream; charset=utf-8"
        response = web.StreamResponse(headers=headers)
        await response.prepare(request)
        return response

    async def _end(
        self,
        request: Request,
        call: Call,
        response: web.StreamResponse | None,
        state: chat.Stream,
        body: bytes,
    ) -> web.StreamResponse:
        """Commit, then let the agent see the end."""
        if await self._commit(call, 200, body):
            response = response or await self._begin(request, call)
            return await self._finish(call, response, state.held)
        try:
            more = self._uncaptured(call)
        except Refused as refused:
            if response is None:
                raise
            return await self._finish(call, response, error_chunk(refused.code, refused.message))
        response = response or await self._begin(request, call, more)
        return await self._finish(call, response, state.held)

    async def _finish(self, call: Call, response: web.StreamResponse, last: bytes) -> web.StreamResponse:
        try:
            await response.write(last)
            await response.write_eof()
        except (asyncio.CancelledError, ConnectionResetError):
            if call.captured:
                self._committer.undelivered(call.id)
            raise
        return response

    # -- capture ---------------------------------------------------------------------------------

    async def _commit(self, call: Call, status: int, response: bytes, error: str | None = None) -> bool:
        """Make the call durable. False where that failed: the caller decides what the agent sees."""
        call.handed = True
        raw, stitches = call.record(status, response, error), call.stitches()
        stored = await self._committer.commit(raw, call.new_rollout, stitches)
        call.captured = stored is not None
        if stored is None:
            self._attributor.uncaptured(raw.key_id, stitches)
        elif status == 200 and error is None:
            self._answered(call, redacted=stored.redacted)
        return call.captured

    def _answered(self, call: Call, *, redacted: bool) -> None:
        self._bridges.answered(call, redacted=redacted)
        if redacted and call.mode == "train" and call.untrainable is None:
            self._metrics.untrainable.labels(REDACTED).inc()

    def _uncaptured(self, call: Call) -> dict[str, str]:
        """Headers of an observed call that is served all the same; `Refused` in train and eval."""
        if call.mode != "observe":
            raise Refused(503, "capture_failed", "The call could not be made durable.", retry=True)
        self._metrics.uncaptured.inc()
        return {"x-hone-captured": "false"}

    def _hung_up(self, call: Call, partial: bytes) -> None:
        """The agent left: the upstream is cut by now; what it said is kept with status 499."""
        if call.handed:
            return
        if call.breaker is not None:  # an upstream was at work
            call.charge(partial)
        self._dispatch.attempt(call, LEFT)
        call.handed = call.captured = True
        self._committer.commit_later(call.record(HUNG_UP, partial), call.new_rollout, call.stitches())

    def _count_tokens(self, call: Call, usage: chat.Usage) -> None:
        route = self._metrics.route(call.target.name)
        route.prompt_tokens.inc(usage.prompt_tokens)
        route.completion_tokens.inc(usage.completion_tokens or 0)


def _wanted(call: Call) -> chat.Asked:
    """What must stay in the answer: of a foreign upstream's everything."""
    if call.policy is not None:
        return call.asked
    return msgspec.structs.replace(call.asked, ids=True, logprobs=True, usage=not call.strips_usage)


def _outcome(error: UpstreamError) -> str:
    if isinstance(error, ConnectFailed):
        return "connect"
    if isinstance(error, TimedOut):
        return "timeout"
    if isinstance(error, TooLong):
        return "too_long"
    return "broken"


def _excerpt(body: bytes) -> str:
    return body[:300].decode(errors="replace")

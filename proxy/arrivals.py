"""A call's arrival: what is asked, by which rollout, and where it shall go."""

from aiohttp import web

from proxy.attribution import Attributor
from proxy.call import Call
from proxy.dialects import chat
from proxy.keys import Caller
from proxy.limits import Meter, body_too_large, check_request, counts_tokens
from proxy.metrics import Metrics
from proxy.refusal import Refused
from proxy.routes import Target, ToUpstream
from proxy.rules import Rules
from proxy.server import Request

_IDEMPOTENCY_KEY_MAX = 255


class Arrivals:
    """Reads requests for model calls."""

    def __init__(self, attributor: Attributor, metrics: Metrics) -> None:
        self._attributor = attributor
        self._metrics = metrics

    async def accept(self, request: Request, rules: Rules, caller: Caller, meter: Meter | None) -> Call:
        """What is asked, for which rollout, to where. `Refused` for what is not served."""
        limits = caller.limits
        body = await read_body(request, None if limits is None else limits.body_bytes_max)
        fields = chat.parse(body)
        asked = chat.asked(fields)
        cap = None if limits is None else check_request(limits, asked, fields)
        target = rules.routes.target(asked.model)
        path_id = request.rollout_id or None
        found = await self._attributor.attribute(caller, path_id, request.headers, fields["messages"])
        self._metrics.count(self._metrics.attributed, found.attribution, found.reason)
        if found.opened:
            self._metrics.count(self._metrics.opened, found.attribution)
        retries = request.headers.get("x-stainless-retry-count", "0")
        return Call(
            key=rules.keyring.for_upstream(request.headers) if _passes_key(target) else None,
            body=body,
            fields=fields,
            asked=asked,
            head=found.head,
            attribution=found.attribution,
            target=target,
            trail=found.trail,
            cap=cap,
            meter=meter if limits is not None and counts_tokens(limits) else None,
            retry_count=int(retries) if retries.isdecimal() and len(retries) < 5 else 0,
            idempotency_key=request.headers.get("Idempotency-Key", "")[:_IDEMPOTENCY_KEY_MAX] or None,
        )


async def read_body(request: Request, limit: int | None = None) -> bytes:
    """The request's body; `Refused` 413 over the limit of all, or over that of its key."""
    if limit is not None and (request.content_length or 0) > limit:
        raise body_too_large(limit)
    try:
        body = await request.read()
    except web.HTTPRequestEntityTooLarge as error:
        raise Refused(413, "body_too_large", f"The body is too large: {error.text}") from None
    if limit is not None and len(body) > limit:
        raise body_too_large(limit)
    return body


def _passes_key(target: Target) -> bool:
    """Whether the agent's own key may be needed for an upstream."""
    return any(isinstance(one, ToUpstream) and one.passthrough for one in (target, *target.fallbacks))

"""One call on its way through the proxy."""

import hashlib
import time
from collections.abc import Callable
from typing import Any

from capture.ids import new_id
from capture.types import Attribution, Mode, RawCall, Rollout, Stitch
from proxy.attribution import first_of
from proxy.continuity import Conversation, Onward
from proxy.dialects import chat
from proxy.dialects.chat import Asked, Fields, Said, Usage
from proxy.heads import Head
from proxy.health import Breaker
from proxy.limits import Meter, estimate
from proxy.replay import Message, Trail
from proxy.routes import Target, ToPolicy


class Call:
    """What is known of a call between its arrival and its commit; one task owns it."""

    __slots__ = (
        "alias",
        "answers",
        "arrived_at",
        "asked",
        "attribution",
        "body",
        "breaker",
        "cap",
        "captured",
        "changed",
        "charged_tokens",
        "conversation",
        "fallbacks",
        "fell_back",
        "fields",
        "first_byte_at",
        "handed",
        "head",
        "id",
        "idempotency_key",
        "key",
        "meter",
        "onward",
        "retry_count",
        "said",
        "started_at",
        "strips_usage",
        "target",
        "trail",
        "untrainable",
        "upstream",
        "version",
    )

    def __init__(
        self,
        *,
        key: str | None,
        body: bytes,
        fields: Fields,
        asked: Asked,
        head: Head,
        attribution: Attribution,
        target: Target,
        retry_count: int,
        idempotency_key: str | None,
        trail: Trail | None = None,
        cap: int | None = None,
        meter: Meter | None = None,
    ) -> None:
        self.id = new_id("c")
        self.started_at = time.time()
        self.arrived_at = time.monotonic()
        self.key = key  # the agent's own, for an upstream that it is passed on to
        self.body = body
        self.fields = fields
        self.asked = asked
        self.head = head
        self.attribution = attribution
        self.target = target
        self.fallbacks = _allowed(target, head.rollout.mode)  # what may still be tried after the target
        self.fell_back = False
        self.breaker: Breaker | None = None  # of the upstream that is being asked now
        self.cap = cap  # of an answer's tokens, which the key has and the request does not name
        self.meter = meter  # of its key, if that one's tokens are limited
        self.charged_tokens = 0
        self.strips_usage = False  # of a stream that was asked for it by us, not by the agent
        self.retry_count = retry_count
        self.idempotency_key = idempotency_key
        self.trail = trail  # of a call that named no rollout
        self.answers: Callable[[], list[Message]] = list  # what was answered so far, where there is a trail
        self.said: Callable[[], Said | None] = _nothing  # the whole answer, once there is one
        self.alias: str | None = None  # what to put into `model` of the answer; None: leave it whole
        self.changed: dict[str, Any] = {}
        self.untrainable: str | None = None  # why, where that is known before it is answered
        self.conversation: Conversation | None = None  # of a training call whose prompt may be made of ids
        self.onward: Onward | None = None  # if it goes on from an answer
        self.upstream = target.name  # becomes the engine's incarnation
        self.version: int | None = None
        self.first_byte_at: float | None = None
        self.handed = False  # to the journal
        self.captured = False

    @property
    def mode(self) -> Mode:
        return self.head.rollout.mode

    @property
    def policy(self) -> str | None:
        """The policy that is asked, None for other upstreams."""
        return self.target.policy if isinstance(self.target, ToPolicy) else None

    @property
    def new_rollout(self) -> Rollout | None:
        """The rollout, if the store gets it with this call."""
        return self.head.rollout if self.head.is_new else None

    def fall_back(self) -> bool:
        """Go on to the next fallback, with the request as the agent sent it; False if there is none."""
        if not self.fallbacks:
            return False
        self.target, *rest = self.fallbacks
        self.fallbacks, self.fell_back = tuple(rest), True
        self.fields = chat.parse(self.body)
        self.alias = self.untrainable = self.conversation = self.onward = self.version = None
        self.changed, self.strips_usage = {}, False
        self.upstream = self.target.name
        return True

    def charge(self, response: bytes, usage: Usage | None = None) -> None:
        """Have its key pay for its tokens, by their own count or by what there is to see of them."""
        if self.meter is None or self.charged_tokens:
            return
        counted = 0 if usage is None else usage.prompt_tokens + (usage.completion_tokens or 0)
        self.charged_tokens = counted or estimate(self.body, response)
        self.meter.charge(self.charged_tokens)

    def stitches(self) -> list[Stitch]:
        """By what a call is recognised that goes on from what this one was answered."""
        if self.trail is None:
            return []
        first = first_of(self.head.rollout)
        return [Stitch(digest, first) for answer in self.answers() for digest in self.trail.then(answer)]

    def headers(self) -> dict[str, str]:
        """What every answer to this call carries."""
        headers = {"x-hone-rollout-id": self.head.rollout.id, "x-hone-call-id": self.id}
        if self.version is not None:
            headers["x-hone-policy-version"] = str(self.version)
        if self.fell_back:
            headers["x-hone-fallback"] = self.target.name
        return headers

    def record(self, status: int, response: bytes, error: str | None = None) -> RawCall:
        """The call as the store keeps it."""
        rollout = self.head.rollout
        return RawCall(
            id=self.id,
            rollout_id=rollout.id,
            key_id=rollout.key_id,
            mode=rollout.mode,
            attribution=self.attribution,
            stream=self.asked.stream,
            route=self.asked.model,
            upstream=self.upstream,
            policy=self.policy,
            policy_version=self.version,
            started_at=self.started_at,
            first_byte_at=self.first_byte_at,
            ended_at=time.time(),
            status=status,
            request=self.body,
            response=response,
            changed=self.changed,
            retry_count=self.retry_count,
            idempotency_key=self.idempotency_key,
            body_hash=hashlib.blake2b(self.body, digest_size=16).digest(),
            error=error,
            charged_tokens=self.charged_tokens,
        )


def _allowed(target: Target, mode: Mode) -> tuple[Target, ...]:
    """Its fallbacks, as far as the mode allows: who trains or evaluates the policy wants it and no other."""
    if mode == "observe" or not target.fallbacks:
        return target.fallbacks
    if isinstance(target, ToPolicy):
        return ()
    return tuple(other for other in target.fallbacks if not isinstance(other, ToPolicy))


def _nothing() -> None:
    return None

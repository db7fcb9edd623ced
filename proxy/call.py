"""One call on its way through the proxy."""

import hashlib
import time
from collections.abc import Callable
from typing import Any

from capture.ids import new_id
from capture.types import Attribution, Mode, RawCall, Rollout, Stitch
from proxy.attribution import first_of
from proxy.continuity import Conversation, Onward
from proxy.dialects.chat import Asked, Fields, Said
from proxy.heads import Head
from proxy.replay import Message, Trail
from proxy.routes import Target, ToPolicy


class Call:
    """What is known of a call between its arrival and its commit; one task owns it."""

    __slots__ = (
        "alias",
        "answers",
        "asked",
        "attribution",
        "body",
        "captured",
        "changed",
        "conversation",
        "fields",
        "first_byte_at",
        "handed",
        "head",
        "id",
        "idempotency_key",
        "key",
        "onward",
        "retry_count",
        "said",
        "started_at",
        "target",
        "trail",
        "untrainable",
        "upstream",
        "version",
    )

    def __init__(
        self,
        *,
        key: str,
        body: bytes,
        fields: Fields,
        asked: Asked,
        head: Head,
        attribution: Attribution,
        target: Target,
        retry_count: int,
        idempotency_key: str | None,
        trail: Trail | None = None,
    ) -> None:
        self.id = new_id("c")
        self.started_at = time.time()
        self.key = key  # as the agent sent it
        self.body = body
        self.fields = fields
        self.asked = asked
        self.head = head
        self.attribution = attribution
        self.target = target
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
        )


def _nothing() -> None:
    return None

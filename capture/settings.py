"""The capture room's settings."""

from typing import Literal

import msgspec

from capture.patterns import check

Continuity = Literal["auto", "exact", "off"]


class Settings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How the journal gathers calls, how much may wait in it, what prompts are made of, and what is
    never stored."""

    queue_bytes_max: int = 64 * 1024 * 1024  # request + response bytes that wait for a commit
    frame_calls_max: int = 64  # calls in one frame, which is one transaction
    frame_bytes_max: int = 8 * 1024 * 1024  # bytes in one frame before compression
    commit_timeout_s: float = 10.0  # how long a failing commit is retried before its calls get the error
    continuity: Continuity = "auto"  # prompts of training calls from sampled ids; auto: once they drift
    redact: tuple[str, ...] = ()  # regular expressions, or email, api_key, credit_card, private_key

    def __post_init__(self) -> None:
        check(self.redact)

"""Which rollout a call that names none goes on with. Pure.

Everything a call answers is written to the store before its agent sees it, so whoever goes on from an
answer finds at least its own rollout under that digest. A digest that several rollouts wrote is shared,
and stays so: which of them a call belongs to cannot be known, and strangers are never merged.
"""

from collections.abc import Mapping
from typing import Final

import msgspec

from proxy.replay import Trail

TOOL_CALL: Final = "tool_call"
PREFIX: Final = "prefix"

NO_HISTORY: Final = "no_history"
UNKNOWN: Final = "unknown"
AMBIGUOUS: Final = "ambiguous"
UNREADABLE: Final = "unreadable"
STORE: Final = "store"

REASONS: Final[dict[str, str]] = {
    TOOL_CALL: "It replays a tool call id that only this rollout was given.",
    PREFIX: "It goes on from an answer that only this rollout was given.",
    NO_HISTORY: "It holds no answer of a model: nothing to recognise it by.",
    UNKNOWN: "It goes on from an answer that was not given under this key.",
    AMBIGUOUS: "It goes on from an answer that several rollouts were given.",
    UNREADABLE: "Its messages are not those of a chat.",
    STORE: "The store could not say what it goes on from.",
}
"""Why a call that named no rollout went where it went -> sentence."""

Known = Mapping[bytes, str | None]
"""What the store says of digests: the rollout, None for a shared one, nothing for one it never saw."""


class Stitched(msgspec.Struct, frozen=True):
    """The call belongs to this rollout, or to the one that continues it."""

    rollout_id: str
    reason: str  # TOOL_CALL or PREFIX


class Apart(msgspec.Struct, frozen=True):
    """The call opens a rollout of its own."""

    reason: str  # another of REASONS


def asked(trail: Trail) -> tuple[bytes, ...]:
    """The digests that `decide` wants to know about."""
    return trail.ids if trail.prefix is None else (*trail.ids, trail.prefix)


def decide(trail: Trail, known: Known) -> Stitched | Apart:
    """Random tool call ids decide first, then the conversation up to the last answer.

    An id that several rollouts were given (some upstream repeated an answer) decides nothing.
    """
    if trail.prefix is None:
        return Apart(NO_HISTORY)
    by_id = {rollout_id for id in trail.ids if (rollout_id := known.get(id)) is not None}
    if len(by_id) == 1:
        return Stitched(by_id.pop(), TOOL_CALL)
    if by_id:
        return Apart(AMBIGUOUS)
    if trail.prefix not in known:
        return Apart(UNKNOWN)
    rollout_id = known[trail.prefix]
    return Apart(AMBIGUOUS) if rollout_id is None else Stitched(rollout_id, PREFIX)

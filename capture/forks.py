"""Why a call continues no earlier one: judged by what its messages say, in normal form.

Only an explanation: whether a call continues another is decided by token ids alone (`capture.graph`).
"""

from collections.abc import Sequence
from typing import Any

import msgspec

from capture.normalise import is_reasoned, message_key
from capture.reasons import (
    CHANGED_TOOLS,
    COMPACTED,
    HANDOFF,
    NEW_SYSTEM_PROMPT,
    NO_TOKENS,
    REPEATED,
    RETOKENISED,
    REWRITTEN_HISTORY,
    REWRITTEN_RESPONSE,
    ROOT,
    STRIPPED_REASONING,
    SUB_AGENT,
)
from capture.types import ModelCall

SYSTEM_ROLES = ("system", "developer")


class Fork(msgspec.Struct, frozen=True):
    """A reason of `capture.reasons.FORKS`, and the earlier call that the new one was compared with."""

    reason: str
    near: ModelCall | None


class _Message(msgspec.Struct, frozen=True):
    """A message by the number of its normal form."""

    number: int
    is_turn: bool  # said by an assistant or a tool
    is_reasoned: bool


class _Said(msgspec.Struct, frozen=True):
    """What a call's messages say; each message is the number of its normal form."""

    call: ModelCall
    system: list[int]  # the system messages at the head of the request
    asked: list[int]  # the request's messages after those
    whole: list[int]  # and the response
    turns: frozenset[int]  # what assistants and tools said of `whole`: users repeat themselves
    reasoned: bool


class Forks:
    """Judges the calls of one rollout; messages are put in normal form once, and only if a fork asks.

    The calls must outlive it.
    """

    def __init__(self) -> None:
        self._numbers: dict[tuple[Any, ...], int] = {}
        self._messages: dict[int, _Message] = {}  # by identity: calls from a store share their messages
        self._said: dict[str, _Said] = {}

    def judge(self, call: ModelCall, earlier: Sequence[ModelCall]) -> Fork:
        """Why ``call`` continues none of the ``earlier`` ones, given in their order."""
        if not call.prompt_ids:
            return Fork(NO_TOKENS, None)
        mine = self._of(call)
        others = [self._of(one) for one in reversed(earlier) if one.prompt_ids or one.response]
        for rule in (_continued, _repeated, _related):
            found = rule(mine, others)
            if found is not None:
                return found
        return Fork(SUB_AGENT if others else ROOT, None)

    def _of(self, call: ModelCall) -> _Said:
        said = self._said.get(call.id)
        if said is None:
            said = self._said[call.id] = self._read(call)
        return said

    def _read(self, call: ModelCall) -> _Said:
        roles = [message.get("role") for message in call.messages]
        head = next((place for place, role in enumerate(roles) if role not in SYSTEM_ROLES), len(roles))
        said = [self._message(message) for message in call.messages]
        if call.response is not None:
            said.append(self._message(call.response))
        return _Said(
            call=call,
            system=[one.number for one in said[:head]],
            asked=[one.number for one in said[head : len(roles)]],
            whole=[one.number for one in said[head:]],
            turns=frozenset(one.number for one in said if one.is_turn),
            reasoned=any(one.is_reasoned for one in said),
        )

    def _message(self, message: dict[str, Any]) -> _Message:
        found = self._messages.get(id(message))
        if found is None:
            key = message_key(message)
            number = self._numbers.setdefault(key, len(self._numbers))
            found = _Message(number, key[0] in ("assistant", "tool"), is_reasoned(message))
            self._messages[id(message)] = found
        return found


def _continued(mine: _Said, others: Sequence[_Said]) -> Fork | None:
    """The same messages go on, the tokens do not: of such calls the longest, then the latest."""
    found = [
        one
        for one in others
        if one.system == mine.system
        and len(one.asked) < len(mine.asked)
        and one.call.response is not None
        and mine.asked[: len(one.whole)] == one.whole
    ]
    if not found:
        return None
    near = max(found, key=lambda one: (bool(one.call.sampled_ids), len(one.whole)))
    if not near.call.prompt_ids or not near.call.sampled_ids:
        return Fork(NO_TOKENS, near.call)
    if near.call.tools != mine.call.tools:
        return Fork(CHANGED_TOOLS, near.call)
    return Fork(STRIPPED_REASONING if near.reasoned else RETOKENISED, near.call)


def _repeated(mine: _Said, others: Sequence[_Said]) -> Fork | None:
    """Asked before, as a retry, a parallel attempt or a step back does."""
    for one in others:
        same = one.system == mine.system and one.call.tools == mine.call.tools
        if same and mine.asked == one.whole[: len(mine.asked)]:
            return Fork(REPEATED, one.call)
    return None


def _related(mine: _Said, others: Sequence[_Said]) -> Fork | None:
    """Another telling of an earlier conversation: of the one with most in common, the latest."""
    found = [
        one
        for one in others
        if (mine.asked[:1] and mine.asked[:1] == one.whole[:1]) or not one.turns.isdisjoint(mine.asked)
    ]
    if not found:
        return None
    near = max(found, key=lambda one: (one.system == mine.system, _common(mine.asked, one.whole)))
    tools_changed = near.call.tools != mine.call.tools
    if near.system != mine.system:
        return Fork(HANDOFF if tools_changed else NEW_SYSTEM_PROMPT, near.call)
    if tools_changed:
        return Fork(CHANGED_TOOLS, near.call)
    return Fork(_rewriting(mine, near), near.call)


def _rewriting(mine: _Said, near: _Said) -> str:
    asked = len(near.asked)
    if near.call.response is not None and mine.asked[:asked] == near.asked and len(mine.asked) > asked:
        return REWRITTEN_RESPONSE
    return COMPACTED if len(mine.asked) < len(near.whole) else REWRITTEN_HISTORY


def _common(left: list[int], right: list[int]) -> int:
    for place, (one, other) in enumerate(zip(left, right, strict=False)):
        if one != other:
            return place
    return min(len(left), len(right))

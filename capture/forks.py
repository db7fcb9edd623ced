"""Why a call begins a branch: judged by what its messages say, in normal form.

Only an explanation: whether a call continues another is decided by token ids alone (`capture.graph`).
"""

from collections.abc import Sequence
from typing import Any

import msgspec

from capture.normalise import is_reasoned, message_key
from capture.reasons import (
    BRANCHED,
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
    """What a call's messages say. Two calls say the same up to a place iff their paths are equal there."""

    call: ModelCall
    system: int  # the system messages at the head of the request, as the end of a path
    path: list[int]  # numbers of the prefixes of the messages after those, the response included
    asked: int  # how many of them are the request's
    roles: list[str | None]  # of those
    numbers: list[int]  # the messages themselves
    turns: frozenset[int]  # those of assistants and tools in the request: users repeat themselves
    reasoned: bool


class Forks:
    """Judges the calls of one rollout; messages are put in normal form once, and only if a fork asks.

    The calls must outlive it.
    """

    def __init__(self) -> None:
        self._numbers: dict[tuple[Any, ...], int] = {}
        self._messages: dict[int, _Message] = {}  # by identity: calls from a store share their messages
        self._prefixes: dict[tuple[int, int], int] = {}
        self._said: dict[str, _Said] = {}

    def judge(self, call: ModelCall, earlier: Sequence[ModelCall], parent: ModelCall | None) -> Fork:
        """Why ``call`` goes on from none of the ``earlier`` ones, given in their order, or only from its
        ``parent``, which was continued before."""
        if not call.prompt_ids:
            return Fork(NO_TOKENS, None)
        mine = self._of(call)
        others = [self._of(one) for one in reversed(earlier) if one.prompt_ids or one.response]
        near = _nearest(mine, others)
        if near is None:
            return Fork(SUB_AGENT if others else ROOT, None)
        reason = _reason(mine, near)
        if parent is not None:  # what it goes on from is as it was
            is_before = len(near.path) <= len(self._of(parent).path)
            reason = BRANCHED if is_before or reason in (COMPACTED, REWRITTEN_HISTORY) else reason
        return Fork(reason, near.call)

    def _of(self, call: ModelCall) -> _Said:
        said = self._said.get(call.id)
        if said is None:
            said = self._said[call.id] = self._read(call)
        return said

    def _read(self, call: ModelCall) -> _Said:
        request = [self._message(message) for message in call.messages]
        response = [] if call.response is None else [self._message(call.response)]
        head = 0
        while head < len(request) and call.messages[head].get("role") in SYSTEM_ROLES:
            head += 1
        said = [*request[head:], *response]
        return _Said(
            call=call,
            system=self._path(request[:head])[-1] if head else 0,
            path=self._path(said),
            asked=len(request) - head,
            roles=[message.get("role") for message in call.messages[head:]],
            numbers=[one.number for one in said],
            turns=frozenset(one.number for one in request if one.is_turn),
            reasoned=any(one.is_reasoned for one in (*request, *response)),
        )

    def _message(self, message: dict[str, Any]) -> _Message:
        found = self._messages.get(id(message))
        if found is None:
            key = message_key(message)
            number = self._numbers.setdefault(key, len(self._numbers))
            found = _Message(number, key[0] in ("assistant", "tool"), is_reasoned(message))
            self._messages[id(message)] = found
        return found

    def _path(self, messages: Sequence[_Message]) -> list[int]:
        at, path = 0, []
        for message in messages:
            at = self._prefixes.setdefault((at, message.number), len(self._prefixes) + 1)
            path.append(at)
        return path


def _nearest(mine: _Said, others: Sequence[_Said]) -> _Said | None:
    """The call that says most of the same from the first message on, under the same system prompt and with
    the same tools if there is one; of such calls that with most of the same further on; the latest."""
    related = [
        one
        for one in others
        if (mine.asked and one.path and mine.path[0] == one.path[0]) or not mine.turns.isdisjoint(one.numbers)
    ]
    if not related:
        return None
    likeness = [
        (one.system == mine.system, _common(mine, one), one.call.tools == mine.call.tools) for one in related
    ]
    most = max(likeness)
    found = [one for one, like in zip(related, likeness, strict=True) if like == most]
    numbers = frozenset(mine.numbers[: mine.asked])
    return max(
        found,
        key=lambda one: (
            len(numbers.intersection(one.numbers)),
            _is_answered_otherwise(mine, one),
            bool(one.call.sampled_ids),
        ),
    )


def _is_answered_otherwise(mine: _Said, one: _Said) -> bool:
    """Whether it tells the same conversation with another response."""
    common = _common(mine, one)
    return (
        one.call.response is not None
        and common == one.asked < mine.asked
        and mine.roles[common] == "assistant"
    )


def _reason(mine: _Said, near: _Said) -> str:
    """Why a call does not go on from the one that it is nearest to."""
    tools_changed = near.call.tools != mine.call.tools
    if near.system != mine.system:
        return HANDOFF if tools_changed else NEW_SYSTEM_PROMPT
    common = _common(mine, near)
    answered = near.call.response is not None
    if answered and common == len(near.path):  # the same messages go on, their tokens do not
        if not near.call.prompt_ids or not near.call.sampled_ids:
            return NO_TOKENS
        if not tools_changed:
            return STRIPPED_REASONING if near.reasoned else RETOKENISED
    if tools_changed:
        return CHANGED_TOOLS
    if common == mine.asked:
        return REPEATED
    if _is_answered_otherwise(mine, near):
        return REWRITTEN_RESPONSE
    return COMPACTED if mine.asked < len(near.path) else REWRITTEN_HISTORY


def _common(mine: _Said, other: _Said) -> int:
    """How many messages the request has in common with the other's request and response, from the first."""
    low, high = 0, min(mine.asked, len(other.path))
    while low < high:
        middle = (low + high + 1) // 2
        if mine.path[middle - 1] == other.path[middle - 1]:
            low = middle
        else:
            high = middle - 1
    return low

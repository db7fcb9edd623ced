"""The conversations of one rollout, each told once and to its end. Pure."""

from collections import Counter
from collections.abc import Sequence
from typing import Any, Final

import msgspec

from capture import graph
from capture.conversation import conversational
from capture.normalise import message_key
from capture.reasons import (
    BAD_LOGPROBS,
    ERROR,
    GRAMMAR,
    LATE,
    LENGTH_MISMATCH,
    NO_TOKEN_IDS,
    NO_VERSION,
    OTHER_POLICY,
    PARTIAL,
    PROVIDER,
    SAMPLING,
    TEMPERATURE_ZERO,
    UNDELIVERED,
)
from capture.types import ModelCall, Rollout

LENGTH: Final = "length"
HUNG_UP = 499
ONLY_TOKENS = frozenset(
    (
        *(PROVIDER, OTHER_POLICY, NO_VERSION, GRAMMAR, SAMPLING, TEMPERATURE_ZERO),
        *(NO_TOKEN_IDS, LENGTH_MISMATCH, BAD_LOGPROBS),
    )
)
"""Why tokens are not trained although what they say was said, whole and to the agent: text may be learned."""


class Conversation(msgspec.Struct, frozen=True, kw_only=True):
    """One line in the conversational format, whose last message is the assistant's."""

    messages: list[dict[str, Any]]
    tools: list[dict[str, Any]]
    reward: float | None
    scenario_id: str | None
    rollout_id: str
    call_id: str  # that gave the last message
    model: str  # that it asked for
    status: str | None


def conversations(rollout: Rollout, calls: Sequence[ModelCall]) -> tuple[list[Conversation], Counter[str]]:
    """One conversation for each branch that ends with an answer; calls left out, by reason.

    Which answers count is the call graph's to say, but for reasons that concern tokens alone. Branches that
    differ by tokens only (drift, a provider that gives none) are one conversation: what a later request
    repeats in full, with the same tools, is told by that one.
    """
    usable: list[ModelCall] = []
    left_out = Counter[str]()
    nodes = graph.build(calls)
    for fate in graph.fates(nodes):
        call = nodes.nodes[fate.call_id].call
        reason = _unfit(call, fate.excluded)
        if reason is None:
            usable.append(call)
        else:
            left_out[reason] += 1
    return [_conversation(rollout, call) for call in _ends(usable)], left_out


def _unfit(call: ModelCall, excluded: str | None) -> str | None:
    """Why the answer of a call is not to be learned as text."""
    if excluded is not None and excluded not in ONLY_TOKENS:
        return excluded
    if call.late:
        return LATE
    if excluded == PROVIDER and call.status == HUNG_UP:  # `provider` goes before every other reason
        return UNDELIVERED
    if call.response is None or call.error is not None:
        return ERROR
    if call.finish_reason is None:
        return PARTIAL
    return LENGTH if call.finish_reason == LENGTH else None


def _ends(calls: Sequence[ModelCall]) -> list[ModelCall]:
    """Those that no other one goes on from, in their order; of equal ones the first."""
    paths = _Paths()
    told = [paths.of(call) for call in calls]
    inner = {place for path in told for place in path[:-1]}
    ends: dict[int, ModelCall] = {}
    for call, path in zip(calls, told, strict=True):
        if path[-1] not in inner:
            ends.setdefault(path[-1], call)
    return list(ends.values())


class _Paths:
    """Conversations as paths of numbers: equal places have the same tools and messages before them."""

    def __init__(self) -> None:
        self._messages: dict[int, str] = {}  # by identity: calls from a store share their messages
        self._places: dict[tuple[int, str], int] = {}

    def of(self, call: ModelCall) -> list[int]:
        """A place for each message of the request, and one for the answer."""
        at = self._place(0, msgspec.json.encode(call.tools, order="sorted").decode())
        path = []
        for message in (*call.messages, *([] if call.response is None else [call.response])):
            at = self._place(at, self._said(message))
            path.append(at)
        return path

    def _said(self, message: dict[str, Any]) -> str:
        if id(message) not in self._messages:
            self._messages[id(message)] = repr(message_key(message))
        return self._messages[id(message)]

    def _place(self, at: int, said: str) -> int:
        return self._places.setdefault((at, said), len(self._places) + 1)


def _conversation(rollout: Rollout, call: ModelCall) -> Conversation:
    answer = [] if call.response is None else [call.response]
    return Conversation(
        messages=[conversational(message) for message in (*call.messages, *answer)],
        tools=call.tools,
        reward=rollout.reward,
        scenario_id=rollout.scenario_id,
        rollout_id=rollout.id,
        call_id=call.id,
        model=call.model,
        status=rollout.status,
    )

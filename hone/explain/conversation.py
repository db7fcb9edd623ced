"""A rollout's calls as a conversation: of each call only what an earlier one did not say yet. Pure."""

import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import msgspec

from capture.normalise import message_key
from capture.types import ModelCall
from hone.explain.facts import CallView

TokenText = Callable[[int], str | None]


class Token(msgspec.Struct, frozen=True, kw_only=True):
    """One sampled token."""

    id: int
    text: str | None  # None: no tokenizer is at hand
    logprob: float | None  # the engine's at sampling; None: it reported none that can be used
    mask: int  # 1: it has loss in its branch's sample
    version: int | None  # of the policy, that sampled it
    owner: str | None  # id of the call that owns it; None where nothing is trained on it
    branch: int | None  # number of the sample in which it has loss
    advantage: float | None  # of its rollout, where it has loss


class Turn(msgspec.Struct, frozen=True, kw_only=True):
    """One call: what was new in its request, and the answer."""

    call: CallView
    like: int | None  # number of the call that its leading messages were seen in
    like_messages: int  # how many of them, that call's answer included
    messages: list[dict[str, Any]]  # the others
    response: dict[str, Any] | None
    tokens: list[Token]  # empty unless they were asked for


def turns(
    calls: Sequence[ModelCall],
    views: Sequence[CallView],
    *,
    numbers: range,
    token_text: TokenText | None = None,
    advantage: float | None = None,
) -> list[Turn]:
    """The calls with these numbers, in order; `token_text` given: with their tokens."""
    by_id = {call.id: call for call in calls}
    heard = _Heard()
    found = []
    for view in views:
        call = by_id[view.id]
        like, shared = heard.add(view, call)
        if view.number in numbers:
            turn = Turn(
                call=view,
                like=like,
                like_messages=shared,
                messages=call.messages[shared:],
                response=call.response,
                tokens=[] if token_text is None else list(_tokens(call, view, token_text, advantage)),
            )
            found.append(turn)
    return found


class _Heard:
    """What the calls so far said, each message as a number that equal ones share."""

    def __init__(self) -> None:
        self._numbers: dict[tuple[Any, ...], int] = {}
        self._told: dict[int, list[int]] = {}  # call number -> its messages and its answer

    def add(self, view: CallView, call: ModelCall) -> tuple[int | None, int]:
        """The call that said most of this one's leading messages before, and how many they are."""
        asked = [self._number(message) for message in call.messages]
        like, shared = self._like(view.parent, asked)
        answer = [] if call.response is None else [self._number(call.response)]
        self._told[view.number] = asked + answer
        return like, shared

    def _like(self, parent: int | None, asked: list[int]) -> tuple[int | None, int]:
        """The parent where it has one, else the latest of the most alike."""
        if parent in self._told:
            return parent, _shared(self._told[parent], asked)
        best: tuple[int | None, int] = (None, 0)
        for number, told in self._told.items():
            shared = _shared(told, asked)
            if shared and shared >= best[1]:
                best = number, shared
        return best

    def _number(self, message: dict[str, Any]) -> int:
        key = message_key(message)
        try:
            return self._numbers.setdefault(key, len(self._numbers))
        except TypeError:  # a role that is a list: agents send what they like
            return self._numbers.setdefault((repr(key),), len(self._numbers))


def _shared(one: Sequence[int], other: Sequence[int]) -> int:
    """How many leading entries are equal."""
    if list(one) == list(other[: len(one)]):
        return len(one)
    pairs = itertools.takewhile(lambda pair: pair[0] == pair[1], zip(one, other, strict=False))
    return sum(1 for _ in pairs)


def _tokens(
    call: ModelCall, view: CallView, token_text: TokenText, advantage: float | None
) -> Iterator[Token]:
    mask = int(view.branch is not None and call.policy is not None and view.fate not in ("eval", "observe"))
    logprobs: Sequence[float | None] = call.sampled_logprobs or [None] * len(call.sampled_ids)
    for id, logprob in zip(call.sampled_ids, logprobs, strict=True):
        yield Token(
            id=id,
            text=token_text(id),
            logprob=logprob,
            mask=mask,
            version=call.policy_version,
            owner=call.id if mask else None,
            branch=view.branch if mask else None,
            advantage=advantage if mask else None,
        )

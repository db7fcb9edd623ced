"""What a chat template is known by: how it ends a reply, and whether it leaves earlier turns alone. Pure."""

from collections.abc import Mapping, Sequence
from typing import Any, Final

import msgspec

Ids = Sequence[int]


class Template(msgspec.Struct, frozen=True):
    """What was learned of a chat template by rendering with it."""

    ends: frozenset[int]  # the tokens that end a reply's turn
    tail: tuple[int, ...]  # what follows them
    rewrites: bool  # earlier turns are written in another way: reasoning is taken out


_ASK = {"role": "user", "content": "Well?"}
_NEXT = {"role": "user", "content": "Go on."}


def _call(name: str) -> dict[str, Any]:
    call = {"id": "call_1", "type": "function", "function": {"name": name, "arguments": "{}"}}
    return {"role": "assistant", "content": "", "tool_calls": [call]}


_YES = {"role": "assistant", "content": "Yes"}
_NO = {"role": "assistant", "content": "No"}
_FIELD = {"role": "assistant", "content": "Yes", "reasoning": "Hm", "reasoning_content": "Hm"}
_INLINE = {"role": "assistant", "content": "<think>\nHm\n</think>\n\nYes"}

PROBES: Final[dict[str, list[dict[str, Any]]]] = {
    "yes": [_ASK, _YES],
    "no": [_ASK, _NO],
    "on": [_ASK, _YES, _NEXT],
    "field": [_ASK, _FIELD],
    "field_on": [_ASK, _FIELD, _NEXT],
    "inline": [_ASK, _INLINE],
    "inline_on": [_ASK, _INLINE, _NEXT],
    "look": [_ASK, _call("look")],
    "find": [_ASK, _call("find")],
}
"""Conversations to render without generation prompt; what a template cannot render is left out."""


def learn(rendered: Mapping[str, Ids]) -> Template | None:
    """The template that renders `PROBES` so; None if its replies have no end of their own."""
    if not {"yes", "no", "on"} <= rendered.keys():
        return None
    closing = _common_end(rendered["yes"], rendered["no"])
    if not closing:
        return None
    end, *tail = closing
    ends = {end}
    calling = _common_end(rendered.get("look", ()), rendered.get("find", ()))
    if len(calling) > len(tail) and calling[len(calling) - len(tail) :] == tuple(tail):
        ends.add(calling[-1 - len(tail)])
    plain = _kept(rendered["yes"], rendered["on"], closing)
    rewrites = not plain or any(_strips(rendered, kind, closing) for kind in _KINDS)
    return Template(frozenset(ends), tuple(tail), rewrites)


_KINDS = ("field", "inline")


def _strips(rendered: Mapping[str, Ids], kind: str, closing: tuple[int, ...]) -> bool:
    """Whether reasoning given in this way is gone from an earlier turn."""
    upto, whole = rendered.get(kind), rendered.get(f"{kind}_on")
    if upto is None or whole is None:
        return False
    if list(upto) == list(rendered["yes"]):
        return kind == "inline"  # a template that does not know the field may have no reasoning at all
    return not _kept(upto, whole, closing)


def _kept(upto: Ids, whole: Ids, closing: tuple[int, ...]) -> bool:
    count = len(upto) - len(closing)
    return list(whole[:count]) == list(upto[:count])


def _common_end(left: Ids, right: Ids) -> tuple[int, ...]:
    count = 0
    while count < min(len(left), len(right)) and left[-1 - count] == right[-1 - count]:
        count += 1
    return tuple(left[len(left) - count :])

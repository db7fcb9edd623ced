"""What a rollout was asked to do, as an id: the scenario of a rollout that names none. Pure.

It is made of the system prompt, the tools and the first user message of the rollout's first call. What
clients write in ways of their own is no part of it: ids, whitespace at the ends of texts, text as a list of
parts, the order of tools and of keys, how JSON spells a number.
"""

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import msgspec

from capture.normalise import canonical, text_of, whole_number
from capture.types import ModelCall

PREFIX = "fp-"
DIGEST_BYTES = 8  # as 16 hex digits; ids of scenarios mean something under one key only
SYSTEM_ROLES = ("system", "developer")

Message = Mapping[str, Any]


def fingerprint_of(calls: Iterable[ModelCall]) -> str | None:
    """The fingerprint of a rollout with these calls; None if none of them holds messages."""
    asked = [call for call in calls if call.messages and not call.late]
    if not asked:
        return None
    first = min(asked, key=lambda call: (call.started_at, call.id))
    return fingerprint(first.messages, first.tools)


def fingerprint(messages: Sequence[Message], tools: Sequence[Message]) -> str:
    """`fp-` and 16 hex digits, of a request's messages and tools."""
    said = (_system(messages), sorted(map(_tool, tools)), _question(messages))
    digest = hashlib.blake2b(msgspec.msgpack.encode(said), digest_size=DIGEST_BYTES)
    return PREFIX + digest.hexdigest()


def _system(messages: Sequence[Message]) -> list[str]:
    """The texts of the system messages before all others."""
    head: list[str] = []
    for message in messages:
        if message.get("role") not in SYSTEM_ROLES:
            break
        head.append(_text(message))
    return [text for text in head if text]


def _question(messages: Sequence[Message]) -> str:
    """The first user message; no text where there is none."""
    return next((_text(message) for message in messages if message.get("role") == "user"), "")


def _text(message: Message) -> str:
    return text_of(message.get("content")).strip()


def _tool(tool: Message) -> tuple[str, str, str]:
    """Name, description and parameters; a tool that is no function counts as it is."""
    function = tool.get("function")
    if not isinstance(function, dict):
        return ("", "", _json(tool))
    description = text_of(function.get("description")).strip()
    return (str(function.get("name")), description, _json(function.get("parameters") or {}))


def _json(value: Any) -> str:
    """Sorted JSON in which whole numbers are integers."""
    return canonical(_NUMBERS.decode(msgspec.json.encode(value)))


_NUMBERS = msgspec.json.Decoder(float_hook=whole_number)

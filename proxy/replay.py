"""A conversation as it is recognised when a client sends it again. Pure.

Clients replay what was said in their own way: arguments serialised anew and in another order, reasoning
dropped, null as an empty string, text as parts, text beside tool calls left out, tool calls as Python
text, another system prompt. So messages are compared by a form that all of this leaves as it is, and
what clients change or make up (system prompts, ids, names, whitespace at the ends) is no part of it.

The form may be coarse but must be stable: two conversations of one form are ambiguous, which costs a
stitch; a message whose replay had another form could be taken for somebody else's.
"""

import ast
import hashlib
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import msgspec

from capture.normalise import whole_number

DIGEST_BYTES = 16
OBJECTS_MAX = 50_000  # braces in the messages of a request, and
VALUES_MAX = 500_000  # commas: more would hold up everybody else
PYTHON_CHARS_MAX = 1 << 16  # of tool calls written as Python, in all messages of a request
_CALLING = "Calling tools:\n"  # smolagents' heading above them
_WRITTEN_MAX = 4  # such lists under one another
_PARSING = 32  # what one such list costs however short, in characters
_OWN_CALL = re.compile(r"\[\{'id': '[^']*', 'type': 'function', 'function': \{'name': 'python_interpreter', ")
_THINKING_ENDS = "</think>"
BROKEN = (msgspec.MsgspecError, ValueError, RecursionError)
_UUID = r"[0-9a-fA-F]{8}(?:-[0-9a-fA-F]{4}){3}-[0-9a-fA-F]{12}"
_MIXED = r"(?=[A-Za-z]*[0-9])(?=[0-9]*[A-Za-z])[0-9A-Za-z]{16,}"
_RANDOM = re.compile(rf"(?:^|[^0-9A-Za-z])(?:{_UUID}|{_MIXED})$")


class Message(msgspec.Struct, frozen=True):
    """What is read of a message; anything may stand in it."""

    role: Any = None
    content: Any = None
    tool_calls: Any = None
    function_call: Any = None  # what came before tool_calls


class Budget:
    """How much Python a request may still make us read."""

    def __init__(self) -> None:
        self._left = PYTHON_CHARS_MAX

    def spend(self, chars: int) -> None:
        self._left -= chars
        if self._left < 0:
            raise ValueError("too many tool calls are written as Python")


class Trail:
    """The conversation of a request, hashed once from its first message to its last.

    `prefix` is the digest of all messages up to and including the assistant's last one, None where
    there is none. `ids` are the digests of the random tool call ids in the assistant's last message
    that has any.
    """

    __slots__ = ("_hash", "ids", "prefix")

    def __init__(self, messages: Sequence[Message]) -> None:
        last = max((n for n, one in enumerate(messages) if one.role == "assistant"), default=-1)
        hash = hashlib.blake2b(digest_size=DIGEST_BYTES)
        budget = Budget()
        self.prefix: bytes | None = None
        answered: list[list[_Call]] = []
        for n, message in enumerate(messages):
            if message.role == "assistant":
                text, calls = _said(message, budget)
                hash.update(_answer(text, calls))
                answered.append(calls)
            elif message.role not in ("system", "developer"):
                hash.update(_encode((str(message.role), _text(message.content))))
            if n == last:
                self.prefix = hash.digest()
        self.ids = next((ids for calls in reversed(answered) if (ids := _random_ids(calls))), ())
        self._hash = hash

    def then(self, answer: Message) -> tuple[bytes, ...]:
        """Digests that a call going on from this answer will have: its prefix, then its random ids.

        There are none for an answer that could not be read in a request either.
        """
        try:
            text, calls = _said(answer, Budget())
        except BROKEN:
            return ()
        hash = self._hash.copy()
        hash.update(_answer(text, calls))
        return (hash.digest(), *_random_ids(calls))


def read(messages: bytes) -> Trail | None:
    """The trail of a request's `messages` as JSON; None if they are not what a chat consists of, or far
    too many."""
    messages = bytes(messages)
    if not is_sane(messages):
        return None
    try:
        return Trail(_MESSAGES.decode(messages))
    except BROKEN:
        return None


def message_of(fields: Mapping[str, Any]) -> Message:
    """An assistant's message that was decoded already."""
    return Message("assistant", fields.get("content"), fields.get("tool_calls"), fields.get("function_call"))


def form(answer: Message, budget: Budget) -> bytes:
    """An assistant's message in the form that every client's replay of it has too. Raises one of `BROKEN`."""
    return _answer(*_said(answer, budget))


def is_sane(messages: bytes) -> bool:
    """Whether JSON is short enough to be looked into as a chat's messages."""
    return messages.count(b"{") <= OBJECTS_MAX and messages.count(b",") <= VALUES_MAX


def is_random(id: str) -> bool:
    """Whether a tool call id is unique by construction: it ends in a UUID or in 16 or more letters and
    digits. Numbered ones (`call_0`, `functions.play:0`) are not, and neither are short ones."""
    return _RANDOM.search(id) is not None


class _Call(msgspec.Struct, frozen=True):
    """A tool call: what it says, and its id, which is no part of that."""

    said: tuple[str, str]  # name, canonical arguments
    id: str


def _said(message: Message, budget: Budget) -> tuple[str, list[_Call]]:
    """An assistant's text and tool calls, wherever the client put them."""
    text = _text(message.content)
    calls = [_call(one) for one in message.tool_calls] if isinstance(message.tool_calls, list) else []
    if isinstance(message.function_call, dict):
        calls.append(_call({"function": message.function_call}))
    if not calls:
        text, calls = _written(text, budget)
    if _THINKING_ENDS in text:
        text = text.rpartition(_THINKING_ENDS)[2].lstrip()
    return text, calls


def _written(text: str, budget: Budget) -> tuple[str, list[_Call]]:
    """A text without the tool calls that smolagents wrote under it, and those calls.

    Where it made one call of the code that it found in the text, there is none. Else the lowest list
    counts: what stands above it is the model's own text, whatever it looks like.
    """
    for _ in range(_WRITTEN_MAX):
        before, heading, written = text.rpartition(_CALLING)
        if not heading:
            break
        if not _OWN_CALL.match(written):
            calls = _in_python(written, budget)
            return (text, []) if calls is None else (before.rstrip(), calls)
        text = before.rstrip()
    return text, []


def _answer(text: str, calls: Sequence[_Call]) -> bytes:
    """The form of an assistant's message. Clients drop the text beside calls, and some sort the calls."""
    return _encode(("assistant", sorted(call.said for call in calls) if calls else text))


def _random_ids(calls: Iterable[_Call]) -> tuple[bytes, ...]:
    return tuple(
        hashlib.blake2b(call.id.encode("utf-8", "replace"), digest_size=DIGEST_BYTES, person=b"id").digest()
        for call in calls
        if is_random(call.id)
    )


def _call(call: Any) -> _Call:
    if not isinstance(call, dict):
        return _Call(("", _canonical(call)), "")
    function, id = call.get("function"), call.get("id")
    id = id if isinstance(id, str) else ""
    if not isinstance(function, dict):
        return _Call(("", _canonical({name: call[name] for name in call if name not in ("id", "index")})), id)
    return _Call((str(function.get("name")), _arguments(function.get("arguments"))), id)


def _in_python(written: str, budget: Budget) -> list[_Call] | None:
    """Tool calls from Python's way of writing a list; None if it is not one."""
    budget.spend(len(written) + _PARSING)
    try:
        value = ast.literal_eval(written.strip())
        return [_call(one) for one in value] if isinstance(value, list) else None
    except (*BROKEN, SyntaxError, TypeError, MemoryError):
        return None


def _arguments(arguments: Any) -> str:
    """Canonical JSON of arguments given as JSON text or as an object; text that is no JSON as it is."""
    text = arguments if isinstance(arguments, str) else msgspec.json.encode(arguments or {})
    try:
        return _canonical(_NUMBERS.decode(text or "{}"))
    except BROKEN:
        return str(arguments).strip()


def _text(content: Any) -> str:
    """Plain text of a content, without whitespace at its ends; parts that are no text as JSON."""
    if isinstance(content, str):
        return content.strip()
    if not content:
        return ""
    if not isinstance(content, list):
        return _canonical(content)
    return "".join([_part(part) for part in content]).strip()


def _part(part: Any) -> str:
    if not isinstance(part, dict):
        return _canonical(part)
    text = part.get("text")
    if isinstance(text, str):
        return text
    return _canonical({name: value for name, value in part.items() if name != "cache_control"})


def _canonical(value: Any) -> str:
    return msgspec.json.encode(value, order="sorted").decode()


_MESSAGES = msgspec.json.Decoder(list[Message])
_NUMBERS = msgspec.json.Decoder(float_hook=whole_number)
_encode = msgspec.msgpack.Encoder().encode

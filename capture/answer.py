"""An upstream's answer as redaction sees it: texts that are spread over pieces, and what is stored instead.

The text of one answer is spread over the chunks of its stream and again over its tokens, so neither can be
looked at piece by piece, and what replaces an answer has neither: it is a plain response without ids and
logprobs, whose choices are those that were answered.
"""

import re
from collections.abc import Iterator, Sequence
from typing import Any

import msgspec
from msgspec import Raw

from capture.completion import read_deltas
from capture.parse import BROKEN

_KEPT = ("id", "created", "model")
_SAID = (  # of a message; anything else there may hold ids
    "role",
    "content",
    "refusal",
    "reasoning",
    "reasoning_content",
    "tool_calls",
    "function_call",
)


class _Token(msgspec.Struct):
    token: str = ""
    bytes: list[int] | None = None


class _Logprobs(msgspec.Struct):
    content: list[_Token] | None = None


class _Choice(msgspec.Struct):
    index: Any = 0
    message: Any = None
    delta: Any = None
    finish_reason: Any = None
    logprobs: Raw = Raw(b"null")
    token_ids: Raw = Raw(b"null")


class _Part(msgspec.Struct):
    """A whole answer, or a chunk of one; lenient, so that no oddity hides what else it says."""

    choices: list[_Choice]
    id: Any = None
    created: Any = None
    model: Any = None
    usage: Any = None
    prompt_token_ids: Raw = Raw(b"null")


class Answer:
    """What one upstream said to a call.

    `lines` are its JSON objects: the body itself or the chunks of a stream. `rest` is what is neither, raw:
    an upstream's garbage, a line that was cut.
    """

    def __init__(self, body: bytes, stream: bool) -> None:
        self.lines: list[bytes] = []
        self.rest: list[bytes] = []
        self._parts: list[_Part] = []
        for line in [body] if not stream or is_json(body) else _lines(body):
            self._take(line)

    @property
    def is_completion(self) -> bool:
        """Whether anything of a chat completion is in it."""
        return bool(self._parts)

    def spread(self) -> Iterator[str]:
        """Every text that stands in several pieces, put together."""
        texts: dict[tuple[str, ...], list[str]] = {}
        sampled: dict[str, list[_Token]] = {}
        parts: list[list[dict[str, Any]]] = []
        for part in self._parts:
            for choice in part.choices:
                index = str(choice.index)
                _gather(texts, (index,), choice.delta)
                for said in (choice.message, choice.delta):
                    parts += _text_parts(said)
                if choice.logprobs != _NULL:
                    sampled.setdefault(index, []).extend(_tokens(choice.logprobs))
        joined = ["".join(pieces) for pieces in texts.values()]
        yield from joined
        yield from ("".join(part["text"] for part in content) for content in parts)
        for tokens in sampled.values():
            yield from _spelled(tokens)
        for cut in (text for line in self.rest[-1:] for text in _cut_texts(line)):
            yield from (text + cut for text in joined)

    def plain(self) -> dict[str, Any]:
        """A response that says the same without ids and logprobs."""
        first = self._parts[0]
        answer = {name: getattr(first, name) for name in _KEPT if getattr(first, name) is not None}
        answer["object"] = "chat.completion"
        answer["choices"] = [self._choice(index) for index in self._indexes()]
        usage = next((part.usage for part in reversed(self._parts) if isinstance(part.usage, dict)), None)
        return {**answer, "usage": usage or self._counted()}

    def _take(self, line: bytes) -> None:
        try:
            if not line.isascii():
                line.decode()
            part = _PART.decode(line)
        except BROKEN:
            if is_json(line):
                self.lines.append(line)
            else:
                self.rest.append(line)
            return
        self.lines.append(line)
        self._parts.append(part)

    def _indexes(self) -> list[int]:
        indexes = {choice.index for part in self._parts for choice in part.choices}
        return sorted(index for index in indexes if isinstance(index, int))

    def _choice(self, index: int) -> dict[str, Any]:
        found = [choice for part in self._parts for choice in part.choices if choice.index == index]
        whole = next((choice.message for choice in found if isinstance(choice.message, dict)), None)
        if whole is None:
            message = _message([choice.delta for choice in found if isinstance(choice.delta, dict)])
        else:
            message = {name: whole[name] for name in _SAID if name in whole}
        finish = next((choice.finish_reason for choice in reversed(found) if choice.finish_reason), None)
        return {"index": index, "message": message, "finish_reason": finish}

    def _counted(self) -> dict[str, int]:
        """Usage, of an answer that was cut before it said its own."""
        prompts = [len(_ids(part.prompt_token_ids)) for part in self._parts]
        sampled = [len(_ids(one.token_ids)) for part in self._parts for one in part.choices if one.index == 0]
        return {"prompt_tokens": max(prompts), "completion_tokens": sum(sampled)}


def is_json(body: bytes) -> bool:
    """Whether it is one JSON value in UTF-8, down to its last string."""
    try:
        if not body.isascii():
            body.decode()
        _ANY.decode(body)
    except BROKEN:
        return False
    return True


def text_parts(document: Any) -> list[list[dict[str, Any]]]:
    """Of every message of a request or response whose content is a list, the parts that are text."""
    found: list[list[dict[str, Any]]] = []
    if isinstance(document, dict):
        for message in _list(document.get("messages")):
            found += _text_parts(message)
        for choice in _list(document.get("choices")):
            found += _text_parts(choice.get("message")) if isinstance(choice, dict) else []
    return found


def _text_parts(message: Any) -> list[list[dict[str, Any]]]:
    content = _list(message.get("content")) if isinstance(message, dict) else []
    parts = [part for part in content if isinstance(part, dict) and isinstance(part.get("text"), str)]
    return [parts] if len(parts) > 1 else []


def _list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []


def _lines(body: bytes) -> Iterator[bytes]:
    """What a stream's lines hold, all of them: also comments, what was cut, and what follows the end."""
    for line in body.splitlines():
        data = line.removeprefix(b"data:").strip()
        if data and data != b"[DONE]":
            yield data


def _gather(texts: dict[tuple[str, ...], list[str]], path: tuple[str, ...], value: Any) -> None:
    """Collect the strings of a delta by the place that they have in the message."""
    if isinstance(value, str):
        texts.setdefault(path, []).append(value)
    elif isinstance(value, dict):
        for name, inner in value.items():
            _gather(texts, (*path, name), inner)
    elif isinstance(value, list):
        for place, inner in enumerate(value):
            index = inner.get("index", place) if isinstance(inner, dict) else place
            _gather(texts, (*path, str(index)), inner)


def _tokens(logprobs: Raw) -> list[_Token]:
    try:
        return _LOGPROBS.decode(logprobs).content or []
    except BROKEN:
        return []


def _spelled(tokens: Sequence[_Token]) -> Iterator[str]:
    """What tokens spell, by their text and by their bytes."""
    yield "".join([one.token for one in tokens])
    try:
        spelled = b"".join([one.token.encode() if one.bytes is None else bytes(one.bytes) for one in tokens])
    except ValueError:  # they are no bytes
        return
    yield spelled.decode(errors="replace")


def _cut_texts(line: bytes) -> list[str]:
    """The strings of a chunk that was cut, also the one that it was cut in, as they are written."""
    text = line.decode(errors="replace")
    return [*(one[1:-1] for one in _STRING.findall(text)), _STRING.sub("", text).partition('"')[2]]


def _message(deltas: Sequence[dict[str, Any]]) -> dict[str, Any] | None:
    try:
        return read_deltas([msgspec.json.encode(delta) for delta in deltas])
    except BROKEN:
        return None


def _ids(raw: Raw) -> list[Any]:
    return _list(msgspec.json.decode(raw))


_NULL = Raw(b"null")
_STRING = re.compile(r'"[^"\\]*+(?:\\.[^"\\]*+)*+"', re.DOTALL)
_ANY = msgspec.json.Decoder(Raw)
_PART = msgspec.json.Decoder(_Part)
_LOGPROBS = msgspec.json.Decoder(_Logprobs)

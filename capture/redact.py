"""Redaction: what the owner's patterns match never becomes durable. Pure.

Every string of a call is looked at by itself: those of the request and of the response wherever they stand,
JSON written inside a string again string by string, each as it is and with JSON's escapes undone, numbers
of 11 digits and more (no token id, count or time is as long) like strings. Text that is spread over pieces
(chunks of a stream, tokens, parts of a content) is put together first. What cannot be read as JSON is looked
at as text.

A call in which nothing matches stays as it is, byte for byte. One in which anything does loses its token
ids and logprobs, also those of its prompt: ids spell what was taken out. So whatever spells a secret by its
ids must say it in its text too. It does where the engine renders the request: a chat template writes the
request's strings as they are, beside its own words, which are the owner's; only one that an agent sends
along could put a secret together out of parts. It need not where the proxy makes the prompt of earlier
calls' ids; so calls that redaction changed are not gone on from (`proxy.tips`).
"""

import hashlib
import json
import re
from collections.abc import Sequence
from typing import Any

import msgspec

from capture.answer import Answer, is_json, text_parts
from capture.parse import BROKEN
from capture.patterns import finder
from capture.types import RawCall

DEPTH_MAX = 8  # how deep JSON written inside JSON is looked into as such
_STRING = r'"[^"\\]*+(?:\\.[^"\\]*+)*+"'
_STRINGS = re.compile(_STRING, re.DOTALL)
_NUMBER = r"(?<![\w.+-])-?\d{11,}(?:\.\d+)?(?:[eE][+-]?\d+)?"  # of a body
_INNER_NUMBER = r"-?\d[\w.+-]*"  # of JSON inside a string, where it is text like all else
_LONG = re.compile(r"[:,\[]\s*+-?[1-9]\d{10}[\d.eE+-]*")  # at least those of _NUMBER in JSON, and fast
_PAIR = r"\\u[dD][89abAB][0-9a-fA-F]{2}\\u[dD][c-fC-F][0-9a-fA-F]{2}"
_ESCAPE = re.compile(rf'{_PAIR}|\\u[0-9a-fA-F]{{4}}|\\["\\/bfnrt]')
_SHORT = {"\\" + short: said for short, said in zip('bfnrt"/\\', '\b\f\n\r\t"/\\', strict=True)}
_ID_LISTS = re.compile(r'"(?:prompt_token_ids|token_ids|bytes)":\s?\[[\d,\s]*+\]')  # no text in them
_IDS = re.compile(r"\[[\s\d.,eE+-]+\]?")
_SPELLING = re.compile(rf'("token"\s*:\s*)({_STRING})', re.DOTALL)
_TEXTS = ("route", "error", "idempotency_key")

Marked = tuple[int, int, str]  # start, end, what is put there


class Redactor:
    """Takes what patterns match out of calls and texts. `ConfigError` for a pattern that cannot work."""

    def __init__(self, patterns: Sequence[str]) -> None:
        self._finders = tuple(map(finder, patterns))

    def __bool__(self) -> bool:
        return bool(self._finders)

    # -- calls -----------------------------------------------------------------------------------

    def call(self, raw: RawCall) -> RawCall:
        """The call as it may be stored: itself, or without what matched, without ids and `redacted`.

        The hash of a changed body is that of the body that is stored: with the true one, whoever reads
        the store could try what was taken out.
        """
        if not self._finders:
            return raw
        answer = Answer(raw.response, raw.stream)
        if not self._suspects(raw, answer):
            return raw
        request = self._body(raw.request)
        changed = self._fields(raw.changed)
        texts = {name: text for name in _TEXTS if (text := getattr(raw, name))}
        said = {name: self.text(text) for name, text in texts.items()}
        same = request is raw.request and changed is raw.changed and said == texts
        if same and not self._is_in(answer):
            return raw
        return msgspec.structs.replace(
            raw,
            request=request,
            body_hash=hashlib.blake2b(request, digest_size=16).digest(),
            response=self._plain(answer, raw.response),
            stream=raw.stream and not answer.is_completion,
            changed=changed,
            redacted=True,
            **said,
        )

    def text(self, text: str, depth: int = 0) -> str:
        """A text without what matches in it, itself if nothing does; what is JSON stays JSON."""
        if not self._finders:
            return text
        found = text
        if depth < DEPTH_MAX and text.lstrip()[:1] in ("{", "[") and is_json(text.encode("utf-8", "replace")):
            found = self._json(text, _INNER_NUMBER, depth + 1)
        marks = self._marks(found)
        return _cut(found, marks, 0, len(found)) if marks else found

    def name(self, name: str) -> str:
        """A name by which things are told apart: one in which something matches becomes a digest."""
        if self.text(name) == name:
            return name
        return f"[redacted:{hashlib.blake2b(name.encode(errors='replace'), digest_size=16).hexdigest()}]"

    def _suspects(self, raw: RawCall, answer: Answer) -> bool:
        """Whether something may match: whether it does where everything is looked at in one."""
        rest = [line.decode(errors="surrogateescape") for line in answer.rest]
        strange = any(_SPELLING.search(line) for line in rest) or not is_json(raw.request)
        if strange or not all(one.anywhere for one in self._finders):
            return True
        request = raw.request.decode()
        changed = msgspec.json.encode(raw.changed).decode()
        answered = _ID_LISTS.sub("0", b",".join([b"", *answer.lines]).decode())
        text = ",".join([request, changed, answered])
        written = {*_STRINGS.findall(text), *_LONG.findall(text)}
        said = [_ESCAPE.sub(_unescape, one) if "\\" in one else one for one in written]
        said += [*rest, *answer.spread()]
        said += ["".join(part["text"] for part in parts) for parts in text_parts(_read(request))]
        said += [text for name in _TEXTS if (text := getattr(raw, name))]
        return self._hits(said)

    def _hits(self, texts: Sequence[str], depth: int = 0) -> bool:
        joined = "\0".join(texts)
        if any(one.find(joined) for one in self._finders):
            return True
        said = [_ESCAPE.sub(_unescape, text) for text in texts if "\\" in text]
        return bool(said) and depth < DEPTH_MAX and self._hits(said, depth + 1)

    # -- bodies ----------------------------------------------------------------------------------

    def _body(self, body: bytes) -> bytes:
        """A request's body without what matches; itself if nothing does."""
        if not is_json(body):
            return self._garbage(body)
        text = body.decode()
        found = self._joined(self._json(text, _NUMBER))
        return body if found is text else found.encode()

    def _fields(self, fields: dict[str, Any]) -> dict[str, Any]:
        if not fields:
            return fields
        text = msgspec.json.encode(fields).decode()
        found = self._json(text, _NUMBER)
        return fields if found is text else dict(msgspec.json.decode(found))

    def _is_in(self, answer: Answer) -> bool:
        lines = b"\n".join(answer.lines).decode()
        return (
            self._json(lines, _NUMBER) is not lines
            or any(self.text(text) is not text for text in answer.spread())
            or any(self._garbage(rest) is not rest for rest in answer.rest)
        )

    def _plain(self, answer: Answer, body: bytes) -> bytes:
        """What is stored of the answer to a call that redaction changed."""
        if not answer.is_completion:
            return self._garbage(body, without_ids=True)
        text = msgspec.json.encode(answer.plain()).decode()
        return self._joined(self._json(text, _NUMBER)).encode()

    def _garbage(self, body: bytes, *, without_ids: bool = False) -> bytes:
        """What cannot be read; itself if nothing matches."""
        text = body.decode(errors="surrogateescape")
        spelled = "".join(_unquoted(piece[2]) for piece in _SPELLING.finditer(text))
        stays = not without_ids and not self._marks(spelled)
        bare = text if stays else _SPELLING.sub(r'\1""', _IDS.sub("[]", text))
        found = self._json(bare, _NUMBER)
        marks = self._marks(found)
        found = _cut(found, marks, 0, len(found)) if marks else found
        return body if found is text else found.encode(errors="surrogateescape")

    # -- JSON ------------------------------------------------------------------------------------

    def _json(self, text: str, number: str, depth: int = 0) -> str:
        """JSON, or several under one another, with its strings and numbers redacted; itself if none is."""
        found: dict[str, str] = {}
        for token in {*_STRINGS.findall(text), *re.findall(number, _STRINGS.sub('""', text))}:
            said = _unquoted(token) if token[0] == '"' else token
            kept = self.text(said, depth)
            if kept is not said:
                found[token] = json.dumps(kept)
        if not found:
            return text
        return re.sub(
            f"{_STRING}|{number}", lambda match: found.get(match[0], match[0]), text, flags=re.DOTALL
        )

    def _joined(self, text: str) -> str:
        """A request or response without what its messages hide across the parts of a content."""
        document = _read(text)
        found = [self._join(parts) for parts in text_parts(document)]
        return msgspec.json.encode(document).decode() if any(found) else text

    def _join(self, parts: Sequence[dict[str, Any]]) -> bool:
        """Redact what stands across parts, in place; whether there was anything."""
        joined = "".join(part["text"] for part in parts)
        marks = self._marks(joined)
        start = 0
        for part in parts if marks else ():
            end = start + len(part["text"])
            part["text"] = _cut(joined, marks, start, end)
            start = end
        return bool(marks)

    # -- texts -----------------------------------------------------------------------------------

    def _marks(self, text: str, depth: int = 0) -> list[Marked]:
        """What matches in a text or, with JSON's escapes undone, in what it says; in order, none overlap."""
        marks = [(*span, one.marker) for one in self._finders for span in one.find(text)]
        if "\\" in text and depth < DEPTH_MAX:
            said = _ESCAPE.sub(_unescape, text)
            if len(said) < len(text) and (inner := self._marks(said, depth + 1)):
                at = _offsets(text)
                marks += [(at[start], at[end], marker) for start, end, marker in inner]
        return _merged(marks) if len(marks) > 1 else marks


def _read(text: str) -> Any:
    """The request or response, if there may be text parts in it."""
    if '"text"' not in text:
        return None
    try:
        return msgspec.json.decode(text)
    except BROKEN:  # a number that nothing decodes
        return None


def _merged(marks: Sequence[Marked]) -> list[Marked]:
    merged: list[Marked] = []
    for start, end, marker in sorted(marks):
        if merged and start < merged[-1][1]:
            before = merged.pop()
            merged.append((before[0], max(before[1], end), before[2]))
        else:
            merged.append((start, end, marker))
    return merged


def _cut(text: str, marks: Sequence[Marked], start: int, end: int) -> str:
    """``text[start:end]`` without what is marked; a marker stands where its mark begins."""
    kept: list[str] = []
    for first, last, marker in marks:
        kept.append(text[start : max(start, min(first, end))])
        if start <= first < end:
            kept.append(marker)
        start = max(start, min(last, end))
    return "".join([*kept, text[start:end]])


def _unquoted(token: str) -> str:
    """What a JSON string says."""
    if "\\" not in token:
        return token[1:-1]
    try:
        return str(msgspec.json.decode(token))
    except BROKEN:
        return _ESCAPE.sub(_unescape, token[1:-1])


def _unescape(match: re.Match[str]) -> str:
    escape = match[0]
    if (short := _SHORT.get(escape)) is not None:
        return short
    units = [int(unit, 16) for unit in escape.split("\\u")[1:]]
    if len(units) == 1:
        return chr(units[0])
    return chr(0x10000 + ((units[0] - 0xD800) << 10) + (units[1] - 0xDC00))


def _offsets(text: str) -> list[int]:
    """Where each character of what a text says begins in it, and its end."""
    at: list[int] = []
    last = 0
    for match in _ESCAPE.finditer(text):
        at += [*range(last, match.start()), match.start()]
        last = match.end()
    return [*at, *range(last, len(text) + 1)]

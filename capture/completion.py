"""Chat completions as engines answer them, whole or as a stream, reduced to what ingest needs."""

from collections.abc import Iterator, Sequence
from typing import Annotated, Any

import msgspec

Token = Annotated[int, msgspec.Meta(ge=0, lt=2**31)]  # also a count of them


class Completion(msgspec.Struct, kw_only=True):
    """What a response says, of its first choice. Lists are as reported, not checked."""

    message: dict[str, Any] | None = None  # the assistant's
    finish_reason: str | None = None
    prompt_ids: list[int] = []
    token_ids: list[int] = []
    logprobs: list[float] = []
    prompt_tokens: int = 0  # the engine's count; 0 if it gave none
    completion_tokens: int = 0
    choices: int = 0


class _Usage(msgspec.Struct):
    prompt_tokens: Token = 0
    completion_tokens: Token | None = 0


class _Logprob(msgspec.Struct):
    logprob: float | None = None


class _Logprobs(msgspec.Struct):
    content: list[_Logprob] | None = None


class _Choice(msgspec.Struct):
    index: int = 0
    message: dict[str, Any] | None = None
    finish_reason: str | None = None
    token_ids: list[Token] | None = None
    logprobs: _Logprobs | None = None


class _Body(msgspec.Struct):
    choices: list[_Choice]
    usage: _Usage | None = None
    prompt_token_ids: list[Token] | None = None


class _FunctionDelta(msgspec.Struct):
    name: str | None = None
    arguments: str | None = None


class _ToolDelta(msgspec.Struct):
    index: int = 0
    id: str | None = None
    function: _FunctionDelta | None = None


class _Delta(msgspec.Struct):
    role: str | None = None
    content: str | None = None
    refusal: str | None = None
    reasoning: str | None = None
    reasoning_content: str | None = None
    tool_calls: list[_ToolDelta] | None = None


class _ChunkChoice(msgspec.Struct):
    index: int = 0
    delta: _Delta | None = None
    finish_reason: str | None = None
    token_ids: list[Token] | None = None
    logprobs: _Logprobs | None = None


class _Chunk(msgspec.Struct):
    choices: list[_ChunkChoice] = []
    usage: _Usage | None = None
    prompt_token_ids: list[Token] | None = None


_body = msgspec.json.Decoder(_Body)
_chunk = msgspec.json.Decoder(_Chunk)
_deltas = msgspec.json.Decoder(list[_Delta])
_TEXTS = ("content", "refusal", "reasoning", "reasoning_content")


def read_body(body: bytes) -> Completion:
    """A JSON response. Raises `msgspec.MsgspecError`, `ValueError` or `RecursionError` if it is none."""
    answer = _body.decode(body)
    found = Completion(choices=len(answer.choices), prompt_ids=answer.prompt_token_ids or [])
    _count(found, answer.usage)
    if len(answer.choices) == 1:
        choice = answer.choices[0]
        found.message = None if choice.message is None else tidy(choice.message)
        found.finish_reason = choice.finish_reason
        found.token_ids = choice.token_ids or []
        found.logprobs = _logprobs(choice.logprobs)
    return found


def read_stream(body: bytes) -> Completion:
    """The server-sent chunks of a response, put together; a cut stream gives what had come by then.

    Raises like `read_body` if a whole chunk is none.
    """
    found = Completion()
    parts = _Parts()
    for data in _data_lines(body):
        chunk = _chunk.decode(data)
        if chunk.prompt_token_ids:
            found.prompt_ids = chunk.prompt_token_ids
        _count(found, chunk.usage)
        for choice in chunk.choices:
            found.choices = max(found.choices, choice.index + 1)
            if choice.index == 0:
                _extend(found, parts, choice)
    found.message = parts.message()
    if found.choices > 1:  # one choice's tokens would not be the call's
        found.token_ids, found.logprobs = [], []
    return found


def read_deltas(deltas: Sequence[bytes]) -> dict[str, Any] | None:
    """The assistant message that the deltas of one choice make, each given as JSON; None if there are none.

    Raises like `read_body`.
    """
    parts = _Parts()
    for delta in _deltas.decode(b"[" + b",".join(deltas) + b"]"):
        parts.add(delta)
    return parts.message()


def _extend(found: Completion, parts: "_Parts", choice: _ChunkChoice) -> None:
    if choice.token_ids:
        found.token_ids.extend(choice.token_ids)
    if choice.logprobs is not None:
        found.logprobs.extend(_logprobs(choice.logprobs))
    if choice.finish_reason is not None:
        found.finish_reason = choice.finish_reason
    if choice.delta is not None:
        parts.add(choice.delta)


class _Parts:
    """The assistant message of a stream, gathered from its deltas."""

    def __init__(self) -> None:
        self._any = False
        self._role = "assistant"
        self._texts: dict[str, list[str]] = {}
        self._tools: dict[int, dict[str, Any]] = {}

    def add(self, delta: _Delta) -> None:
        self._any = True
        self._role = delta.role or self._role
        for name in _TEXTS:
            text = getattr(delta, name)
            if text:
                self._texts.setdefault(name, []).append(text)
        for tool in delta.tool_calls or ():
            self._add_tool(tool)

    def _add_tool(self, tool: _ToolDelta) -> None:
        call = self._tools.setdefault(
            tool.index, {"id": None, "type": "function", "function": {"name": "", "arguments": ""}}
        )
        call["id"] = tool.id or call["id"]
        if tool.function is not None:
            call["function"]["name"] = tool.function.name or call["function"]["name"]
            call["function"]["arguments"] += tool.function.arguments or ""

    def message(self) -> dict[str, Any] | None:
        """None if there was no delta."""
        if not self._any:
            return None
        message: dict[str, Any] = {"role": self._role, "content": None}
        message.update((name, "".join(texts)) for name, texts in self._texts.items())
        if self._tools:
            message["tool_calls"] = [self._tools[index] for index in sorted(self._tools)]
        return message


def _data_lines(body: bytes) -> Iterator[bytes]:
    """The payloads of the ``data:`` lines up to ``[DONE]``; a last line that is cut is left out."""
    end = body.rfind(b"\n")
    for line in body[: end + 1].splitlines():
        if line.startswith(b"data:"):
            data = line[5:].strip()
            if data == b"[DONE]":
                return
            if data:
                yield data


def tidy(message: dict[str, Any]) -> dict[str, Any]:
    """Without the keys that the engine fills with nothing."""
    return {name: value for name, value in message.items() if name == "content" or value not in (None, [])}


def _count(found: Completion, usage: _Usage | None) -> None:
    if usage is not None:
        found.prompt_tokens = usage.prompt_tokens
        found.completion_tokens = usage.completion_tokens or 0


def _logprobs(logprobs: _Logprobs | None) -> list[float]:
    """A missing logprob becomes NaN, which nothing trains on."""
    content = (logprobs.content if logprobs is not None else None) or []
    return [float("nan") if entry.logprob is None else entry.logprob for entry in content]

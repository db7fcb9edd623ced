"""When two messages are the same although a client wrote them down again in its own way.

Clients reorder and re-space JSON arguments, drop reasoning (a field of its own, or ``<think>`` in the
text), turn null content into an empty string or text into a list of parts, and add indexes. None of that
makes it another message.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

_THINKING_ENDS = "</think>"


def message_key(message: Mapping[str, Any]) -> tuple[Any, ...]:
    """Equal for two messages iff they say the same: role, text, tool calls, the call they answer."""
    calls = message.get("tool_calls")
    text = text_of(message.get("content"))
    return (
        message.get("role"),
        _without_thinking(text) if message.get("role") == "assistant" else text,
        tuple(_tool_call(call) for call in calls) if isinstance(calls, list) else (),
        message.get("tool_call_id"),
    )


def conversation_key(messages: Sequence[Mapping[str, Any]]) -> list[tuple[Any, ...]]:
    """The keys of messages in order."""
    return [message_key(message) for message in messages]


def opening(messages: Sequence[Mapping[str, Any]]) -> Sequence[Mapping[str, Any]]:
    """What was said before the first answer: the system prompt and the first user messages."""
    for index, message in enumerate(messages):
        if message.get("role") in ("assistant", "tool", "function"):
            return messages[:index]
    return messages


def is_reasoned(message: Mapping[str, Any]) -> bool:
    """Whether an assistant's message carries its reasoning, as a field or in its text."""
    if message.get("role") != "assistant":
        return False
    return bool(
        message.get("reasoning")
        or message.get("reasoning_content")
        or _THINKING_ENDS in text_of(message.get("content"))
    )


def text_of(content: Any) -> str:
    """Plain text of a content: null and no text are the same; parts are joined."""
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    if isinstance(content, list) and all(_is_text(part) for part in content):
        return "".join(part["text"] for part in content)
    return canonical(content)


def canonical(value: Any) -> str:
    """A value as JSON with sorted keys."""
    return msgspec.json.encode(value, order="sorted").decode()


def whole_number(number: str) -> float | int:
    """JSON has one kind of number: 1.0 is 1. For a decoder's `float_hook`."""
    value = float(number)
    return int(value) if value.is_integer() and abs(value) < 1 << 53 else value


def _without_thinking(text: str) -> str:
    """What follows the reasoning; templates may put its beginning into the prompt, so the end decides."""
    _, ended, answer = text.rpartition(_THINKING_ENDS)
    return answer.lstrip() if ended else text


def _is_text(part: Any) -> bool:
    return isinstance(part, dict) and part.get("type") == "text" and isinstance(part.get("text"), str)


def _tool_call(call: Any) -> tuple[Any, ...]:
    if not isinstance(call, dict):
        return (canonical(call),)
    function = call.get("function")
    if not isinstance(function, dict):
        return (call.get("id"), canonical(call))
    return (call.get("id"), function.get("name"), _arguments(function.get("arguments")))


def _arguments(arguments: Any) -> str:
    """Canonical JSON of arguments given as JSON text or as an object; text that is no JSON as it is."""
    if not isinstance(arguments, str):
        return canonical(arguments)
    try:
        return canonical(msgspec.json.decode(arguments))
    except (msgspec.MsgspecError, ValueError, RecursionError):
        return arguments

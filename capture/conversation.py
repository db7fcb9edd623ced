"""Messages in the form that chat templates and SFT trainers take."""

from collections.abc import Mapping
from typing import Any

import msgspec

_KEPT = ("name", "tool_call_id")
_REASONING = ("reasoning_content", "reasoning")


def conversational(message: Mapping[str, Any]) -> dict[str, Any]:
    """A message as a template reads it, without what only the wire needs.

    Text parts become one text and no content an empty one; arguments of tool calls are objects, where their
    JSON says one, as an engine hands them to its template; reasoning is called `reasoning_content`.
    """
    plain: dict[str, Any] = {"role": message.get("role"), "content": _content(message.get("content"))}
    plain |= {name: message[name] for name in _KEPT if message.get(name) is not None}
    reasoning = next((message[name] for name in _REASONING if message.get(name)), None)
    if reasoning is not None:
        plain["reasoning_content"] = reasoning
    calls = message.get("tool_calls")
    if isinstance(calls, list) and calls:
        plain["tool_calls"] = [_tool_call(call) for call in calls]
    return plain


def _content(content: Any) -> Any:
    if content is None:
        return ""
    if isinstance(content, list) and all(isinstance(part, dict) and "text" in part for part in content):
        return "".join(str(part["text"]) for part in content)
    return content


def _tool_call(call: Any) -> Any:
    if not isinstance(call, dict) or not isinstance(call.get("function"), dict):
        return call
    function = {**call["function"], "arguments": _arguments(call["function"].get("arguments"))}
    identity = {"id": call["id"]} if call.get("id") is not None else {}
    return {**identity, "type": "function", "function": function}


def _arguments(arguments: Any) -> Any:
    if not isinstance(arguments, str):
        return {} if arguments is None else arguments
    try:
        parsed = msgspec.json.decode(arguments or "{}")
    except (msgspec.MsgspecError, ValueError, RecursionError):
        return arguments
    return parsed if isinstance(parsed, dict) else arguments

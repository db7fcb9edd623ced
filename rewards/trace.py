"""The trace: what a reward script sees of a rollout, as a plain dict. Pure."""

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from capture.types import ModelCall, Rollout

Trace = dict[str, Any]
Message = Mapping[str, Any]


def build_trace(rollout: Rollout, calls: Sequence[ModelCall], branch: Sequence[ModelCall]) -> Trace:
    """The trace of `rollout`.

    `calls` are all its calls (they make up `usage`); `branch` is the branch whose conversation the
    script judges, root first. The turns are the messages that its last answered call was asked with,
    without leading system messages, and the answer: so the last tool result is among them.
    """
    last = last_answered(branch)
    messages: list[Message] = [] if last is None else [*last.messages]
    if last is not None and last.response is not None:
        messages.append(last.response)
    system, rest = split_system(messages)
    metadata = rollout.metadata if isinstance(rollout.metadata, dict) else {}
    return {
        "agent_id": str(metadata.get("agent_id", rollout.key_id)),
        "model": last.model if last is not None else (rollout.policy or ""),
        "system_prompt": system,
        "tools": [tool_of(tool) for tool in (last.tools if last is not None else [])],
        "turns": list(turns_of(rest)),
        "scenario": rollout.scenario,
        "rollout_id": rollout.id,
        "status": rollout.status,
        "metadata": rollout.metadata,
        "metrics": rollout.metrics,
        "usage": usage_of(calls),
        "duration_s": duration_of(rollout),
        "stdout": rollout.stdout,
    }


def last_answered(branch: Sequence[ModelCall]) -> ModelCall | None:
    """The last call of the branch that has a response, else its last call, else None."""
    answered = [call for call in branch if call.response is not None]
    candidates = answered or branch
    return candidates[-1] if candidates else None


def split_system(messages: Sequence[Message]) -> tuple[str, Sequence[Message]]:
    """The text of the leading system (or developer) messages, and the messages after them."""
    count = 0
    while count < len(messages) and messages[count].get("role") in ("system", "developer"):
        count += 1
    texts = [content_of(message.get("content")) for message in messages[:count]]
    return "\n\n".join(text for text in texts if isinstance(text, str)), messages[count:]


def turns_of(messages: Sequence[Message]) -> Iterator[dict[str, Any]]:
    """Messages in the form of a trace; a tool's message gets the name of the call it answers."""
    names: dict[str, str] = {}
    for message in messages:
        turn: dict[str, Any] = {"role": str(message.get("role", ""))}
        content = content_of(message.get("content"))
        if content is not None:
            turn["content"] = content
        calls = message.get("tool_calls")
        if isinstance(calls, list) and calls:
            turn["tool_calls"] = [tool_call_of(call) for call in calls]
            names |= {str(call.get("id")): name for call, name in named(calls)}
        if turn["role"] == "tool":
            turn["name"] = str(message.get("name") or names.get(str(message.get("tool_call_id")), ""))
        yield turn


def named(calls: Sequence[Any]) -> Iterator[tuple[Message, str]]:
    """Tool calls that are objects, each with the name of its function."""
    for call in calls:
        if isinstance(call, dict):
            yield call, str(tool_call_of(call)["name"])


def content_of(content: Any) -> Any:
    """Text parts joined to one string; content with other parts (images) stays a list; None stays."""
    if not isinstance(content, list):
        return content
    parts = [part.get("text") if isinstance(part, dict) else part for part in content]
    texts = [part for part in parts if isinstance(part, str)]
    return "".join(texts) if len(texts) == len(parts) else content


def tool_call_of(call: Any) -> dict[str, Any]:
    """`{name, arguments}`; arguments are an object where they parse as one, else the raw string."""
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict):
        return {"name": "", "arguments": call}
    return {"name": str(function.get("name", "")), "arguments": arguments_of(function.get("arguments"))}


def arguments_of(arguments: Any) -> Any:
    """The object that the JSON text stands for, else the argument as it came."""
    if not isinstance(arguments, str):
        return arguments
    try:
        parsed = json.loads(arguments)
    except (ValueError, RecursionError):
        return arguments
    return parsed if isinstance(parsed, dict) else arguments


def tool_of(tool: Message) -> dict[str, Any]:
    """`{name, description, parameters}` of a tool as the agent offered it."""
    function = tool.get("function")
    inner = function if isinstance(function, dict) else tool
    return {
        "name": inner.get("name", ""),
        "description": inner.get("description", ""),
        "parameters": inner.get("parameters", {}),
    }


def usage_of(calls: Sequence[ModelCall]) -> dict[str, int]:
    """Calls made, and the tokens they read and sampled."""
    return {
        "calls": len(calls),
        "prompt_tokens": sum(call.prompt_tokens for call in calls),
        "completion_tokens": sum(call.completion_tokens for call in calls),
    }


def duration_of(rollout: Rollout) -> float:
    """Seconds from opening to sealing; 0 while it is open."""
    return max(0.0, rollout.sealed_at - rollout.created_at) if rollout.sealed_at is not None else 0.0

"""How agents' clients replay a conversation, as recorded from them; each a function of what was said.

A conversation is a list of turns: `{"user": text}`, `{"answer": message}` (as the upstream gave it) and
`{"result": text, "id": id}` of a tool call.
"""

import json
from collections.abc import Callable
from typing import Any

Turn = dict[str, Any]
Message = dict[str, Any]
Client = Callable[[list[Turn]], list[Message]]

SYSTEM = {"role": "system", "content": "You play."}


def verbatim(turns: list[Turn]) -> list[Message]:
    return [SYSTEM, *(_plain(turn) for turn in turns)]


def _plain(turn: Turn) -> Message:
    if "user" in turn:
        return {"role": "user", "content": turn["user"]}
    if "result" in turn:
        return {"role": "tool", "tool_call_id": turn["id"], "content": turn["result"]}
    return {"role": "assistant", **turn["answer"]}


def _rewritten(turns: list[Turn], rewrite: Callable[[Message], Message]) -> list[Message]:
    return [rewrite(one) if one["role"] == "assistant" else one for one in verbatim(turns)]


def _with_arguments(message: Message, dump: Callable[[Any], str]) -> list[Message]:
    return [
        {
            **call,
            "function": {**call["function"], "arguments": _again(call["function"]["arguments"], dump)},
        }
        for call in message["tool_calls"]
    ]


def _again(arguments: str, dump: Callable[[Any], Any]) -> Any:
    """Serialised anew; what is no JSON stays as it is."""
    try:
        return dump(json.loads(arguments))
    except ValueError:
        return arguments


def pydantic_ai(turns: list[Turn]) -> list[Message]:
    """Arguments serialised anew; reasoning put into the text; no content is left out."""

    def rewrite(message: Message) -> Message:
        texts = [message.get("content")]
        if message.get("reasoning_content"):
            texts.insert(0, f"<think>\n{message['reasoning_content']}\n</think>")
        text = "\n\n".join(text for text in texts if text)
        new = {"role": "assistant", **({"content": text} if text else {"content": None})}
        if message.get("tool_calls"):
            new["tool_calls"] = _with_arguments(
                message, lambda value: json.dumps(value, separators=(",", ":"))
            )
        return new

    return _rewritten(turns, rewrite)


def verifiers(turns: list[Turn]) -> list[Message]:
    """No content beside tool calls, and an index in each of them."""

    def rewrite(message: Message) -> Message:
        if not message.get("tool_calls"):
            return {"role": "assistant", "content": message.get("content")}
        calls = [{**call, "index": n} for n, call in enumerate(message["tool_calls"])]
        return {"role": "assistant", "tool_calls": calls}

    return _rewritten(turns, rewrite)


def smolagents(turns: list[Turn]) -> list[Message]:
    """Everything as text in lists of parts, tool calls as Python, consecutive messages of a role as one."""
    messages = [{"role": "system", "content": [_part("You play.")]}]
    for turn in turns:
        for role, text in _as_text(turn):
            if messages[-1]["role"] == role:
                messages[-1]["content"][-1]["text"] += "\n" + text
            else:
                messages.append({"role": role, "content": [_part(text)]})
    return messages


def _part(text: str) -> dict[str, str]:
    return {"type": "text", "text": text}


def _as_text(turn: Turn) -> list[tuple[str, str]]:
    if "user" in turn:
        return [("user", f"New task:\n{turn['user']}")]
    if "result" in turn:
        return [("user", f"Observation:\n{turn['result']}")]
    answer, found = turn["answer"], []
    if answer.get("content") is not None:
        found.append(("assistant", answer["content"].strip()))
    calls = [
        {
            "id": call["id"],
            "type": "function",
            "function": {
                "name": call["function"]["name"],
                "arguments": _again(call["function"]["arguments"], lambda value: value),
            },
        }
        for call in sorted(answer.get("tool_calls") or [], key=lambda call: call["id"])
    ]
    if calls:
        found.append(("assistant", "Calling tools:\n" + str(calls)))
    return found


def smolagents_code(turns: list[Turn]) -> list[Message]:
    """An agent that writes code: its text, then what the client made of it."""

    def rewrite(message: Message) -> Message:
        text = (message.get("content") or "").strip()
        call = {
            "id": "call_2",
            "type": "function",
            "function": {"name": "python_interpreter", "arguments": text},
        }
        text += "\nCalling tools:\n" + str([call])
        return {"role": "assistant", "content": [_part(text)]}

    return _rewritten(turns, rewrite)


def inspect_ai(turns: list[Turn]) -> list[Message]:
    """An empty string for no content."""
    return _rewritten(
        turns,
        lambda message: {
            "role": "assistant",
            "content": message.get("content") or "",
            **({"tool_calls": message["tool_calls"]} if message.get("tool_calls") else {}),
        },
    )


def langchain(turns: list[Turn]) -> list[Message]:
    """No reasoning; arguments from Python's dictionaries."""

    def rewrite(message: Message) -> Message:
        new = {"role": "assistant", "content": message.get("content") or None}
        if message.get("tool_calls"):
            new["tool_calls"] = _with_arguments(message, json.dumps)
        return new

    return _rewritten(turns, rewrite)


def openai_agents(turns: list[Turn]) -> list[Message]:
    """Another system prompt after every handoff: here after every answer."""
    count = sum("answer" in turn for turn in turns)
    return [{"role": "developer", "content": f"You are agent {count}."}, *verbatim(turns)[1:]]


def javascript(turns: list[Turn]) -> list[Message]:
    """Numbers have one kind there."""

    def number(value: Any) -> Any:
        if isinstance(value, dict):
            return {name: number(one) for name, one in value.items()}
        if isinstance(value, list):
            return [number(one) for one in value]
        return int(value) if isinstance(value, float) and value.is_integer() and abs(value) < 2**53 else value

    def rewrite(message: Message) -> Message:
        if not message.get("tool_calls"):
            return message
        return {**message, "tool_calls": _with_arguments(message, lambda value: json.dumps(number(value)))}

    return _rewritten(turns, rewrite)


TOOL_CLIENTS: dict[str, Client] = {
    client.__name__: client
    for client in (
        verbatim,
        pydantic_ai,
        verifiers,
        smolagents,
        inspect_ai,
        langchain,
        openai_agents,
        javascript,
    )
}
CLIENTS: dict[str, Client] = {**TOOL_CLIENTS, "smolagents_code": smolagents_code}

"""Exact continuity on the real vLLM: long conversations that drift, replayed as each client does it.

The example's model is sampled at temperature 2, where it says what no tokenizer would cut in the same
way: broken characters, words spelled in pieces, tool calls that were never finished.
"""

import asyncio
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
from proxy_world import World, engine_settings, until, world, write_adapter
from replaying_clients import CLIENTS, Turn, verbatim

from capture.completion import read_stream
from capture.graph import FORKS, build
from capture.parse import parse
from capture.settings import Continuity
from capture.settings import Settings as CaptureSettings
from capture.types import ModelCall
from proxy.continuity import EXACT, FAITHFUL, UNKNOWN
from proxy.settings import Sampling

pytestmark = pytest.mark.engine

CHAT = "/v1/chat/completions"
TURNS = 20
TEXTS = ["012\n3X5\n678", "½ 1.0\n345", "naïve  \t3", "漢1\nX2", '{"a": 1}\n']
PLAY: Any = {
    "type": "function",
    "function": {
        "name": "play",
        "parameters": {"type": "object", "properties": {"cell": {"type": "integer"}}},
    },
}


def handoff(turns: list[Turn]) -> list[dict[str, Any]]:
    """openai-agents: from the tenth answer on another agent talks, with a system prompt of its own."""
    count = sum("answer" in turn for turn in turns)
    name = "O" if count < TURNS // 2 else "X"
    return [{"role": "system", "content": f"You are {name}."}, *verbatim(turns)[1:]]


REPLAYS: dict[str, Callable[[list[Turn]], list[dict[str, Any]]]] = {
    name: CLIENTS[name] for name in ("pydantic_ai", "verifiers", "smolagents", "inspect_ai", "langchain")
} | {"openai_agents": handoff}


def settings(continuity: Continuity) -> dict[str, Any]:
    return {"capture": CaptureSettings(continuity=continuity)}


async def answered(hone: World, rollout: str, body: dict[str, Any]) -> dict[str, Any]:
    """The assistant's message, as the agent gets it whole or as a stream."""
    async with hone.client.post(f"{hone.url}/rollouts/{rollout}{CHAT}", json=body) as response:
        got = await response.read()
        assert response.status == 200, got
    if body["stream"]:
        assert got.endswith(b"data: [DONE]\n\n")
        assert b"token_ids" not in got
        message = read_stream(got).message
    else:
        answer = json.loads(got)
        assert answer["model"] == "policy"
        assert answer["choices"][0]["logprobs"] is None
        message = answer["choices"][0]["message"]
    assert message is not None
    return {name: value for name, value in message.items() if value not in (None, [])}


async def converse(hone: World, client: Callable[[list[Turn]], Any], turns: int = TURNS) -> str:
    """A conversation of so many calls in a rollout of its own, every other one streamed."""
    rollout = str((await hone.opened())["id"])
    said: list[Turn] = [{"user": TEXTS[0]}]
    for n in range(turns):
        body = {"model": "policy", "messages": client(said), "tools": [PLAY], "stream": n % 2 == 1}
        answer = await answered(hone, rollout, body)
        if not is_json(answer):
            answer = {"content": str(answer.get("tool_calls"))}  # TODO
        said.append({"answer": answer})
        results = [{"result": f"{n}½ ", "id": call["id"]} for call in answer.get("tool_calls") or []]
        said += results or [{"user": TEXTS[n % len(TEXTS)]}]
    return rollout


def is_json(answer):
    for call in answer.get("tool_calls") or []:
        try:
            json.loads(call["function"]["arguments"])
        except ValueError:
            return False
    return True

"""The proxy in front of the real vLLM: ids asked for, stripped, stored; the real openai SDK as the agent."""

import asyncio
import json
from pathlib import Path
from typing import Any

import aiohttp
import openai
import pytest
from proxy_world import engine_settings, until, world

from capture.parse import parse
from proxy.settings import Sampling

pytestmark = pytest.mark.engine

CHAT = "/v1/chat/completions"
SYSTEM = "You play X at tic-tac-toe. Free cells show their number. Call play until the end."
MESSAGES = [
    {"role": "system", "content": SYSTEM},
    {"role": "user", "content": "012\n345\n678"},
]
BODY: dict[str, Any] = {"model": "policy", "messages": MESSAGES, "max_tokens": 24}
PLAY: Any = {
    "type": "function",
    "function": {
        "name": "play",
        "description": "Put X on a free cell.",
        "strict": True,
        "parameters": {
            "type": "object",
            "properties": {"cell": {"type": "integer"}},
            "required": ["cell"],
            "additionalProperties": False,
        },
    },
}


async def test_ids_and_logprobs_are_stored_and_stripped_unless_asked_for(engine: Any, tmp_path: Path) -> None:
    async with world(engine_settings(engine.url), tmp_path) as hone:
        status, answer, headers = await hone.post(CHAT, BODY)
        assert status == 200, answer
        assert answer["model"] == "policy"
        assert "prompt_token_ids" not in answer
        (choice,) = answer["choices"]
        assert "token_ids" not in choice
        assert choice["logprobs"] is None
        assert headers["x-hone-policy-version"] == "0"
        (raw,) = hone.raw_calls()
        call = parse(raw)
        assert call.untrainable is None
        assert len(call.sampled_ids) == len(call.sampled_logprobs) == answer["usage"]["completion_tokens"]
        assert len(call.prompt_ids) == answer["usage"]["prompt_tokens"]
        assert (raw.policy, raw.policy_version, raw.mode) == ("policy", 0, "observe")
        assert raw.upstream.startswith(engine.url + "#")

        status, answer, _ = await hone.post(CHAT, {**BODY, "logprobs": True, "return_token_ids": True})
        (choice,) = answer["choices"]
        assert (
            len(choice["token_ids"])
            == len(choice["logprobs"]["content"])
            == answer["usage"]["completion_tokens"]
        )
        assert answer["prompt_token_ids"] == call.prompt_ids


async def sse(hone: Any, body: Any) -> list[Any]:
    async with hone.client.post(hone.url + CHAT, json=body) as response:
        assert response.status == 200
        chunks = (await response.text()).strip().split("\n\n")
    assert chunks[-1] == "data: [DONE]"
    return [json.loads(chunk.removeprefix("data: ")) for chunk in chunks[:-1]]


async def test_a_stream_is_stored_with_every_id_and_stripped(engine: Any, tmp_path: Path) -> None:
    async with world(engine_settings(engine.url), tmp_path) as hone:
        seen = await sse(hone, {**BODY, "stream": True})
        assert all(chunk["model"] == "policy" and "usage" not in chunk and chunk["choices"] for chunk in seen)
        assert not any("token_ids" in str(chunk) for chunk in seen)
        assert all(choice.get("logprobs") is None for chunk in seen for choice in chunk["choices"])
        (raw,) = hone.raw_calls()
        call = parse(raw)
        assert call.untrainable is None
        assert len(call.sampled_ids) == len(call.sampled_logprobs) == call.completion_tokens > 0
        text = "".join(chunk["choices"][0]["delta"].get("content") or "" for chunk in seen)
        assert call.response is not None
        assert text == call.response["content"]
        with_usage = await sse(hone, {**BODY, "stream": True, "stream_options": {"include_usage": True}})
        assert with_usage[-1]["choices"] == []
        assert with_usage[-1]["usage"]["prompt_tokens"] == len(call.prompt_ids)


async def test_the_openai_sdk_streams_and_calls_tools(engine: Any, tmp_path: Path) -> None:
    async with world(engine_settings(engine.url), tmp_path) as hone:
        opened = await hone.opened(mode="eval")
        async with openai.AsyncOpenAI(base_url=opened["base_url"], api_key=opened["api_key"]) as sdk:
            asked: dict[str, Any] = {"model": "gpt-none", "messages": MESSAGES, "temperature": 0}
            with pytest.raises(openai.NotFoundError, match="There is no model 'gpt-none'"):
                await sdk.chat.completions.create(**asked)
            asked |= {"model": "policy", "tools": [PLAY], "max_tokens": 60}
            whole = await sdk.chat.completions.create(**asked)
            (call,) = whole.choices[0].message.tool_calls or []
            assert call.type == "function"
            assert call.function.name == "play"
            name = arguments = ""
            finish = None
            async for chunk in await sdk.chat.completions.create(**asked, stream=True):
                for choice in chunk.choices:
                    finish = choice.finish_reason or finish
                    for part in choice.delta.tool_calls or []:
                        assert part.function is not None
                        name += part.function.name or ""
                        arguments += part.function.arguments or ""
            assert (name, json.loads(arguments)) == ("play", json.loads(call.function.arguments))
            assert finish == whole.choices[0].finish_reason == "tool_calls"
        first, second = (parse(raw) for raw in hone.raw_calls())
        assert first.sampled_ids == second.sampled_ids
        assert first.temperature == second.temperature == 0.0
        assert first.untrainable == "grammar"  # evaluation leaves strict tools as they are


async def test_training_rollouts_sample_purely(engine: Any, tmp_path: Path) -> None:
    settings = engine_settings(engine.url, sampling=Sampling(temperature=0.7, max_tokens=4096))
    async with world(settings, tmp_path) as hone:
        hone.store.start_run("run", "policy", {})
        opened = await hone.opened()
        body = {
            **BODY,
            "max_tokens": 5000,  # above what the engine can hold
            "seed": 1,
            "top_p": 0.5,
            "temperature": 0,
            "tools": [PLAY],
            "parallel_tool_calls": False,
        }
        answers = [await hone.post(f"/rollouts/{opened['id']}{CHAT}", body) for _ in range(4)]
        assert [status for status, _, _ in answers] == [200] * 4
        for raw in hone.raw_calls():
            call = parse(raw)
            assert call.untrainable is None
            assert call.temperature == 0.7
            assert raw.changed["max_tokens"] == 1024
            assert {"seed", "top_p", "tools", "parallel_tool_calls"} <= raw.changed.keys()
        status, answer, _ = await hone.post(f"/rollouts/{opened['id']}{CHAT}", {**body, "n": 2})
        assert (status, answer["error"]["param"]) == (400, "n")


async def test_the_engines_own_refusal_reaches_the_agent(engine: Any, tmp_path: Path) -> None:
    async with world(engine_settings(engine.url), tmp_path) as hone:
        status, answer, _ = await hone.post(
            CHAT, {**BODY, "messages": [{"role": "user", "content": "x " * 3000}]}
        )
        assert status == 400
        assert "1024" in answer["error"]["message"]
        (raw,) = hone.raw_calls()
        assert (raw.status, raw.error) == (400, None)


async def running(engine: Any) -> float:
    """Requests that the engine is generating for, by its own metric."""
    async with aiohttp.ClientSession() as client, client.get(engine.url + "/metrics") as response:
        text = await response.text()
    return sum(
        float(line.rsplit(" ", 1)[1])
        for line in text.splitlines()
        if line.startswith("vllm:num_requests_running")
    )


@pytest.mark.parametrize("stream", [False, True])
async def test_hang_ups_end_the_generation_within_a_second(engine: Any, tmp_path: Path, stream: bool) -> None:
    async with world(engine_settings(engine.url), tmp_path) as hone:
        body = {**BODY, "max_tokens": 900, "ignore_eos": True, "stream": stream}

        async def ask() -> None:
            async with hone.client.post(hone.url + CHAT, json=body) as response:
                await response.read()

        asking = [asyncio.create_task(ask()) for _ in range(8)]
        deadline = asyncio.get_running_loop().time() + 10
        while await running(engine) < 8:
            assert asyncio.get_running_loop().time() < deadline
            await asyncio.sleep(0.02)
        for task in asking:
            task.cancel()
        await asyncio.gather(*asking, return_exceptions=True)
        left = asyncio.get_running_loop().time()
        while await running(engine) > 0:
            assert asyncio.get_running_loop().time() < left + 1
            await asyncio.sleep(0.02)
        assert [raw.status for raw in await hone.raw_calls_when(8)] == [499] * 8


async def test_a_proxy_without_its_engine_is_not_ready_and_says_why(tmp_path: Path) -> None:
    settings = engine_settings("http://127.0.0.1:9")
    async with world(settings, tmp_path) as hone:
        status, answer = await hone.get("/ready")
        assert status == 503
        assert answer["reasons"] == ["No engine is up: http://127.0.0.1:9."]


async def test_ready_once_the_engine_is_seen(engine: Any, tmp_path: Path) -> None:
    async with world(engine_settings(engine.url), tmp_path) as hone:
        assert await hone.get("/ready") == (200, {"ready": True, "reasons": []})
        fleet = hone.proxy.fleet
        assert fleet is not None
        assert fleet.engines[0].incarnation.startswith(engine.url + "#1")
        assert fleet.max_model_len == 1024
        fleet.suspect(fleet.engines[0])
        await until(lambda: fleet.engines[0].healthy)

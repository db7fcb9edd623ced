"""Exact continuity on the real vLLM: long conversations that drift, replayed as each client does it.

The example's model is sampled at temperature 2, where it says what no tokenizer would cut in the same
way: broken characters, words spelled in pieces, tool calls that it never finished.
"""

import asyncio
import json
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import msgspec
import pytest
from proxy_world import World, engine_settings, logprobs, until, world, write_adapter, write_manifest
from replaying_clients import CLIENTS, Message, Turn, verbatim
from test_proxy_activator import publish, states

from capture.completion import read_stream
from capture.graph import build
from capture.parse import parse
from capture.settings import Continuity
from capture.settings import Settings as CaptureSettings
from capture.types import ModelCall, RawCall
from proxy.continuity import EXACT, FAITHFUL, UNKNOWN
from proxy.settings import Sampling

pytestmark = pytest.mark.engine

CHAT = "/v1/chat/completions"
TURNS = 20
MAX_TOKENS = 40
CALLS_MAX = {"smolagents": 3}  # tool calls: it writes them down at length, and the engine holds 1024 tokens
TEMPERATURE = 2.0
TEXTS = ("½\n3", "é \t", "漢X", "{}\n", "1.0")
PLAY: Any = {
    "type": "function",
    "function": {
        "name": "play",
        "parameters": {"type": "object", "properties": {"cell": {"type": "integer"}}},
    },
}
Client = Callable[[list[Turn]], list[Message]]


def openai_agents(turns: list[Turn]) -> list[Message]:
    """One handoff, in the middle: another agent goes on, with a system prompt of its own."""
    name = "X" if sum("answer" in turn for turn in turns) < TURNS // 2 else "O"
    return [{"role": "system", "content": f"You are {name}."}, *verbatim(turns)[1:]]


PROMPTS = {"openai_agents": 2}  # system prompts; elsewhere one
REPLAYS: dict[str, Client] = {
    **{name: CLIENTS[name] for name in ("pydantic_ai", "verifiers", "smolagents", "inspect_ai", "langchain")},
    "openai_agents": openai_agents,
}


@asynccontextmanager
async def training(
    engine: Any, root: Path, continuity: Continuity, temperature: float = TEMPERATURE
) -> AsyncIterator[World]:
    sampling = Sampling(temperature=temperature, max_tokens=MAX_TOKENS)
    settings = engine_settings(engine.url, sampling=sampling)
    async with world(settings, root, capture=CaptureSettings(continuity=continuity)) as hone:
        hone.store.start_run("run", "policy", {})
        yield hone


async def answered(hone: World, rollout: str, body: dict[str, Any]) -> tuple[Message, str | None]:
    """The assistant's message and how it ended, as the agent gets it whole or as a stream."""
    async with hone.client.post(f"{hone.url}/rollouts/{rollout}{CHAT}", json=body) as response:
        got = await response.read()
        assert response.status == 200, got
    assert b"token_ids" not in got
    if body["stream"]:
        assert got.endswith(b"data: [DONE]\n\n")
        found = read_stream(got)
        assert found.message is not None
        return found.message, found.finish_reason
    answer = json.loads(got)
    (choice,) = answer["choices"]
    assert (answer["model"], choice["logprobs"]) == ("policy", None)
    assert answer["usage"]["completion_tokens"] > 0
    return choice["message"], choice["finish_reason"]


async def converse(hone: World, client: Client, turns: int = TURNS) -> tuple[str, int]:
    """A conversation of so many answers in a rollout of its own, every other one streamed.

    Returns the rollout and how often the agent asked again: for an answer that was cut off, or after
    `CALLS_MAX` tool calls for one without.
    """
    calls_max = CALLS_MAX.get(client.__name__, turns)
    rollout, again, called = str((await hone.opened(max_calls=10 * turns))["id"]), 0, 0
    said: list[Turn] = [{"user": TEXTS[0]}]
    for n in range(turns):
        body = {"model": "policy", "messages": client(said), "tools": [PLAY], "stream": n % 2 == 1}
        while True:
            message, finish = await answered(hone, rollout, body)
            if finish != "length" and not (message.get("tool_calls") and called == calls_max):
                break
            again += 1
        called += bool(message.get("tool_calls"))
        calls = [{k: v for k, v in call.items() if k != "index"} for call in message.get("tool_calls") or []]
        said.append({"answer": {"content": message.get("content") or "", "tool_calls": calls}})
        said += [{"result": f"{n}½ ", "id": call["id"]} for call in calls] or [
            {"user": TEXTS[n % len(TEXTS)]}
        ]
    return rollout, again


async def as_rendered(engine: Any, hone: World, raws: Sequence[RawCall]) -> list[ModelCall]:
    """The same calls, with the prompts that an ordinary server would have made of the same requests."""
    calls = []
    for raw in raws:
        asked = {**json.loads(raw.request), "model": "policy@base", "max_tokens": 1}
        async with hone.client.post(f"{engine.url}{CHAT}/render", json=asked) as response:
            assert response.status == 200, await response.text()
            ids = (await response.json())["token_ids"]
        calls.append(msgspec.structs.replace(parse(raw), prompt_ids=ids))
    return calls


def outcomes(hone: World) -> dict[str, int]:
    """What the proxy counted of the last calls."""
    lines = hone.proxy.metrics.render().decode().splitlines()
    found = [line.split('"') for line in lines if line.startswith("hone_continuity_total{")]
    return {outcome: int(float(count.removeprefix("} "))) for _, outcome, count in found}


async def test_twenty_turns_that_drift_are_one_branch_in_every_clients_manner(
    engine: Any, tmp_path: Path
) -> None:
    """Prints branches, and forks for 100 calls, with exact continuity and as the same requests render."""
    forks_with = forks_without = calls_all = 0
    for name, client in REPLAYS.items():
        (tmp_path / name).mkdir()
        async with training(engine, tmp_path / name, "exact") as hone:
            _, again = await converse(hone, client)
            raws = hone.raw_calls()
            calls = [parse(raw) for raw in raws]
            assert [call.untrainable for call in calls] == [None] * len(calls)
            expected = PROMPTS.get(name, 1)
            found = outcomes(hone)
            assert found.pop(UNKNOWN, 0) == expected - 1
            assert set(found) <= {EXACT, FAITHFUL}
            branches = len(build(calls).branches())
            without = len(build(await as_rendered(engine, hone, raws)).branches())
            assert branches == expected + again
            assert without - branches <= found.get(EXACT, 0)
            forks_with += branches - expected - again
            forks_without += without - expected - again
            calls_all += len(calls) - expected - again
            both = f"{branches - again} branches; as rendered {without - again}"
            print(f"{name}: {len(calls)} calls, {both}; {found}")
    rates = {
        "forks_per_100_calls": 100 * forks_with / calls_all,
        "as_rendered": 100 * forks_without / calls_all,
    }
    print(json.dumps(rates))
    assert forks_with == 0
    assert forks_without > 10


async def test_auto_forks_once_and_then_looks(engine: Any, tmp_path: Path) -> None:
    async with training(engine, tmp_path, "auto") as hone:
        agains = [(await converse(hone, verbatim))[1] for _ in range(2)]
        found = outcomes(hone)
        assert found["drifted"] == 1
        assert found[EXACT] > 0
        assert set(found) == {"drifted", EXACT, FAITHFUL}
        graphs = [
            build([parse(raw) for raw in hone.raw_calls() if raw.rollout_id == rollout])
            for rollout in dict.fromkeys(raw.rollout_id for raw in hone.raw_calls())
        ]
        assert sum(len(graph.branches()) for graph in graphs) == 2 + 1 + sum(agains)


async def test_logprobs_are_those_of_the_ids_that_were_given(engine: Any, tmp_path: Path) -> None:
    """Recomputed with transformers at T = 2, over prompts that no tokenizer would have made."""
    import torch
    from transformers import AutoModelForCausalLM

    async with training(engine, tmp_path, "exact") as hone:
        await converse(hone, CLIENTS["smolagents"], 8)
        assert outcomes(hone)[EXACT] > 0
        calls = [parse(raw) for raw in hone.raw_calls()]
        rendered = await as_rendered(engine, hone, hone.raw_calls())
    model = AutoModelForCausalLM.from_pretrained(engine.base_dir, dtype=torch.float32)

    def distance(call: ModelCall, prompt_ids: list[int]) -> float:
        ids = torch.tensor([[*prompt_ids, *call.sampled_ids]])
        with torch.no_grad():
            logits = model(ids).logits[0, len(prompt_ids) - 1 : -1]
        own = torch.log_softmax(logits / TEMPERATURE, -1)[range(len(call.sampled_ids)), call.sampled_ids]
        return float((own - torch.tensor(call.sampled_logprobs)).abs().max())

    assert max(distance(call, call.prompt_ids) for call in calls) < 1e-3
    assert max(distance(call, other.prompt_ids) for call, other in zip(calls, rendered, strict=True)) > 0.01


async def test_a_conversation_of_an_adapters_version(engine: Any, tmp_path: Path) -> None:
    directory = engine.adapter_dir / f"continuity-{time.time_ns()}"
    write_adapter(directory, engine.base_dir, seed=5)
    base, own = logprobs(engine.base_dir, None), logprobs(engine.base_dir, directory)
    sha256 = write_manifest(directory, 1, child=own, parent=base, base=base)
    async with training(engine, tmp_path, "exact") as hone:
        publish(hone, 1, directory, sha256)
        await until(lambda: states(hone).get(1) == "verified", 20)
        await until(lambda: hone.store.active_version("policy").version == 1)
        _, again = await converse(hone, verbatim, 8)
        calls = [parse(raw) for raw in hone.raw_calls()]
        assert {call.policy_version for call in calls} == {1}
        assert [call.untrainable for call in calls] == [None] * len(calls)
        assert len(build(calls).branches()) == 1 + again
        assert set(outcomes(hone)) <= {EXACT, FAITHFUL}
        await hone.proxy.upstream.ask(
            engine.url + "/v1/unload_lora_adapter", b'{"lora_name": "policy@v1"}', 10
        )


@pytest.mark.parametrize("stream", [False, True])
async def test_hanging_up_on_a_prompt_of_ids(engine: Any, tmp_path: Path, stream: bool) -> None:
    """The call ends with 499 and leaves nothing running; the conversation goes on from the answer before."""
    async with training(engine, tmp_path, "exact") as hone:
        rollout = str((await hone.opened())["id"])
        said: list[Turn] = [{"user": TEXTS[0]}]
        body: dict[str, Any] = {"model": "policy", "messages": verbatim(said), "stream": stream}
        message, _ = await answered(hone, rollout, body)
        said += [{"answer": {"content": message["content"]}}, {"user": TEXTS[1]}]
        body["messages"] = verbatim(said)

        async def ask() -> None:
            async with hone.client.post(f"{hone.url}/rollouts/{rollout}{CHAT}", json=body) as response:
                await response.read()

        for pause_s in (0.001, 0.004, 0.01, 0.02):
            asking = asyncio.create_task(ask())
            await asyncio.sleep(pause_s)
            asking.cancel()
            await asyncio.gather(asking, return_exceptions=True)
        await answered(hone, rollout, body)
        await until(lambda: not hone.proxy.heads.in_flight())
        await until(lambda: not hone.proxy.fleet.engines[0].in_flight)
        calls = [parse(raw) for raw in await hone.raw_calls_when(2)]
        assert {call.status for call in calls} <= {200, 499}
        last = max(calls, key=lambda call: call.started_at)
        assert last.prompt_ids[: len(calls[0].prompt_ids + calls[0].sampled_ids)] == (
            calls[0].prompt_ids + calls[0].sampled_ids
        )

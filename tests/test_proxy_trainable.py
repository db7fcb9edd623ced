"""What is called trainable was sampled from softmax(logits / T); what is not would not have been.

Every parameter that the installed vLLM knows is sent to it, and what was sampled is computed again with
transformers at float32.
"""

import asyncio
import json
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import msgspec
import pytest
import pytest_asyncio
from proxy_world import World, engine_settings, world

from capture.frames import unpack
from capture.parameters import DISTORTING, FORWARDED, OLD_GRAMMARS, WITHHELD
from capture.parse import parse
from capture.types import ModelCall
from proxy.settings import Sampling

pytestmark = [pytest.mark.engine, pytest.mark.asyncio(loop_scope="module")]

CHAT = "/v1/chat/completions"
TEMPERATURES = (0.7, 1.0)
EQUAL = 1e-4  # nats, of each token; at float32 the two agree to about 1e-5
DIFFERENT = 1e-2
REPEATS = 3
MESSAGES = [
    {"role": "system", "content": "s"},
    {"role": "user", "content": "Free cells"},
    {"role": "assistant", "content": "XO at tic"},
]
# The model goes on with this in many ways, so that whatever shapes the sampling shows.
BODY: dict[str, Any] = {
    "model": "policy",
    "messages": MESSAGES,
    "continue_final_message": True,
    "add_generation_prompt": False,
    "max_tokens": 24,
}
# After this it begins a tool call, which is where the grammar of strict tools begins.
ASKED: dict[str, Any] = {
    "messages": [
        {"role": "system", "content": "You play X. Say what you see, in any words."},
        {"role": "user", "content": "0O2\nX45\n6O8"},
    ],
    "continue_final_message": False,
    "add_generation_prompt": True,
}
SCHEMA = {"type": "object", "properties": {"to": {"type": "string"}}, "required": ["to"]}


def tool(**fields: Any) -> list[dict[str, Any]]:
    """A tool that the model would call by another name, so that a grammar shows."""
    return [{"type": "function", "function": {"name": "move", "parameters": SCHEMA, **fields}}]


# Parameter -> what is sent of it (with what it needs beside it), at a value that does something.
FORWARDED_CASES: dict[str, dict[str, Any]] = {
    "model": {},
    "messages": {"messages": [{"role": "user", "content": [{"type": "text", "text": "X wins?"}]}]},
    "tools": {"tools": tool()},
    "documents": {"documents": [{"title": "a", "text": "b"}]},
    "chat_template_kwargs": {"chat_template_kwargs": {"enable_thinking": False}},
    "reasoning_effort": {"reasoning_effort": "low"},
    "add_generation_prompt": {"add_generation_prompt": True, "continue_final_message": False},
    "continue_final_message": {"continue_final_message": False},
    "add_special_tokens": {"add_special_tokens": True},
    "truncate_prompt_tokens": {"truncate_prompt_tokens": 10},
    "truncation_side": {"truncate_prompt_tokens": 10, "truncation_side": "right"},
    "stop": {"stop": ["O", "2", "a", "}"]},
    "stop_token_ids": {"stop_token_ids": list(range(30, 90))},
    "max_tokens": {"max_tokens": 3},
    "max_completion_tokens": {"max_completion_tokens": 3},
    "repetition_detection": {"repetition_detection": {"max_pattern_size": 1, "min_count": 2}},
    "stream": {"stream": True, "tools": tool()},
    "stream_options": {
        "stream": True,
        "stream_options": {"include_usage": True, "continuous_usage_stats": True},
    },
    "stream_interval": {"stream": True, "stream_interval": 5},
    "logprobs": {"logprobs": True},
    "top_logprobs": {"logprobs": True, "top_logprobs": 4},
    "return_token_ids": {"return_token_ids": True},
    "return_tokens_as_token_ids": {"return_tokens_as_token_ids": True, "logprobs": True},
    "return_prompt_text": {"return_prompt_text": True},
    "include_stop_str_in_output": {"stop": ["O", "2", "a"], "include_stop_str_in_output": True},
    "skip_special_tokens": {"skip_special_tokens": False},
    "spaces_between_special_tokens": {"spaces_between_special_tokens": False},
    "user": {"user": "someone"},
    "cache_salt": {"cache_salt": "0123456789"},
    "tool_choice": {"tools": tool(strict=True), "tool_choice": "none"},
    "parallel_tool_calls": {"tools": tool(strict=True), "parallel_tool_calls": False},
    "response_format": {"response_format": {"type": "text"}},
    "structured_outputs": {"structured_outputs": None},
    "temperature": {"temperature": 1.9},
    "n": {"n": 1},
}
REFUSED_FORWARDED = {"chat_template": "{{ messages[-1].content }}"}  # engines take no templates from requests

# The same for what is taken out: why each goes stands in `capture.parameters`.
DISTORTING_CASES: dict[str, Any] = {
    "top_p": 0.5,
    "top_k": 2,
    "min_p": 0.3,
    "presence_penalty": 2,
    "frequency_penalty": 2,
    "repetition_penalty": 1.8,
    "logit_bias": {str(token): 20 for token in range(40, 60)},
    "bad_words": ["X", "O", "1", "3", "5", "7"],
    "allowed_token_ids": list(range(20, 120)),
    "min_tokens": 24,
    "seed": 7,
    "ignore_eos": True,
    "use_beam_search": True,
    "length_penalty": 0.5,
    "watermarking": True,
    "thinking_token_budget": 2,
    "vllm_xargs": {"a": 1},
    "kv_transfer_params": {"a": 1},
    "ec_transfer_params": {"a": 1},
    "logits_processors": ["x"],
}
REFUSED = {"thinking_token_budget": "reasoning"}  # what the engine says of it: it has no reasoning parser
# What leaves the logprobs as they are, in this engine or in all.
UNSEEN = {
    "seed": "draws from the same distribution, but the same tokens each time",
    "ignore_eos": "samples on after the end of the response",
    "use_beam_search": "takes the likeliest tokens of that distribution",
    "length_penalty": "does nothing without beam search",
    "watermarking": "this engine has no watermark configured",
    "vllm_xargs": "this engine has no extensions",
    "kv_transfer_params": "this engine has no other engine to read from",
    "ec_transfer_params": "this engine has no other engine to read from",
    "logits_processors": "no parameter of this engine any more",
}
WITHHELD_CASES: dict[str, Any] = {
    "logprob_token_ids": [5, 6],
    "include_reasoning": False,
    "echo": True,
    "prompt_logprobs": 1,
    "priority": 0,
    "request_id": "one",
    "session_id": "one",
    "mm_processor_kwargs": {"a": 1},
    "media_io_kwargs": {"image": {}},
    "mm_payload": "none",
    "return_mm_kwargs": False,
    "return_token_offsets": True,
    "routed_experts_prompt_start": 1,
}
GRAMMAR_CASES: dict[str, dict[str, Any]] = {
    "json_object": {"response_format": {"type": "json_object"}},
    "json_schema": {
        "response_format": {"type": "json_schema", "json_schema": {"name": "s", "schema": SCHEMA}}
    },
    "structured_outputs": {"structured_outputs": {"regex": "[ab]{9}"}},
    "required": {"tools": tool(), "tool_choice": "required"},
    "named": {"tools": tool(), "tool_choice": {"type": "function", "function": {"name": "move"}}},
}
STRICT_CASES: dict[str, dict[str, Any]] = {
    "strict": {"tools": tool(strict=True)},
    "strict_auto": {"tools": tool(strict=True), "tool_choice": "auto"},
    "parallel_tool_calls": {"tools": tool(), "parallel_tool_calls": False},
}


class Reference:
    """The base model under transformers at float32."""

    def __init__(self, base_dir: Path) -> None:
        import torch
        from transformers import AutoModelForCausalLM

        self._torch = torch
        self._model = AutoModelForCausalLM.from_pretrained(base_dir, dtype=torch.float32)

    def distance(self, call: ModelCall, temperature: float) -> float:
        """The largest |difference| of the call's logprobs to log softmax(logits / T), in nats."""
        torch, start = self._torch, len(call.prompt_ids)
        with torch.no_grad():
            logits = self._model(torch.tensor([call.prompt_ids + call.sampled_ids])).logits[0, start - 1 : -1]
        rows = torch.log_softmax(logits / temperature, -1)
        chosen = rows[range(len(call.sampled_ids)), call.sampled_ids]
        return float((chosen - torch.tensor(call.sampled_logprobs)).abs().max())


@pytest.fixture(scope="module")
def reference(engine: Any) -> Reference:
    return Reference(engine.base_dir)


Hones = dict[float, World]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def hones(engine: Any, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Hones]:
    """A proxy for each temperature of training rollouts, in front of one engine."""
    async with AsyncExitStack() as stack:
        found = {}
        for temperature in TEMPERATURES:
            settings = engine_settings(engine.url, sampling=Sampling(temperature=temperature))
            hone = await stack.enter_async_context(world(settings, tmp_path_factory.mktemp("hone")))
            hone.store.start_run("run", "policy", {})
            found[temperature] = hone
        yield found


async def calls(hone: World, prefix: str, fields: dict[str, Any]) -> list[ModelCall]:
    """Some calls at once, as they were captured."""
    body = msgspec.json.encode({**BODY, **fields})

    async def ask() -> None:
        async with hone.client.post(hone.url + prefix + CHAT, data=body) as response:
            assert response.status == 200, await response.text()
            await response.read()

    ((last,),) = hone.store._rows("SELECT ifnull(max(id), 0) FROM frames")
    await asyncio.gather(*(ask() for _ in range(REPEATS)))
    rows = hone.store._rows("SELECT body FROM frames WHERE id > ?", (last,))
    found = [parse(raw) for (frame,) in rows for raw in unpack(frame)]
    assert len(found) == REPEATS
    return found


async def trained(hone: World, fields: dict[str, Any]) -> list[ModelCall]:
    """Calls of a training rollout."""
    opened = await hone.opened()
    return await calls(hone, f"/rollouts/{opened['id']}", fields)


def installed_parameters() -> set[str]:
    """Every field of the installed vLLM's chat request, asked in a process of its own."""
    code = (
        "import json; from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest; "
        "print(json.dumps(list(ChatCompletionRequest.model_fields)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return set(json.loads(done.stdout.splitlines()[-1]))


async def test_every_parameter_of_the_engine_is_judged() -> None:
    judged = FORWARDED | DISTORTING.keys() | WITHHELD.keys()
    assert installed_parameters() == judged - {"logits_processors"}


async def test_every_judged_parameter_has_its_case() -> None:
    assert FORWARDED_CASES.keys() | REFUSED_FORWARDED.keys() == FORWARDED
    assert DISTORTING_CASES.keys() == DISTORTING.keys()
    assert WITHHELD_CASES.keys() == WITHHELD.keys()


@pytest.mark.parametrize("temperature", TEMPERATURES)
@pytest.mark.parametrize("name", FORWARDED_CASES)
async def test_what_is_forwarded_leaves_the_distribution_alone(
    hones: Hones, reference: Reference, name: str, temperature: float
) -> None:
    for call in await trained(hones[temperature], FORWARDED_CASES[name]):
        assert call.untrainable is None
        assert call.temperature == temperature
        assert reference.distance(call, temperature) <= EQUAL


async def test_a_stop_string_cuts_the_text_not_the_ids(
    hones: Hones, engine: Any, reference: Reference
) -> None:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(engine.base_dir)
    stops = {"O", "2"}
    found = []
    for _ in range(4):
        found += await trained(hones[1.0], {"stop": sorted(stops), "max_tokens": 100})
    wholes = [tokenizer.decode(call.sampled_ids) for call in found]
    stopped = [(call, whole) for call, whole in zip(found, wholes, strict=True) if stops & set(whole)]
    assert stopped
    for call, whole in stopped:
        text = (call.response or {}).get("content") or ""
        assert call.finish_reason == "stop"
        assert whole.startswith(text)
        assert not stops & set(text)
        assert reference.distance(call, 1.0) <= EQUAL


async def test_a_wrong_temperature_would_show(hones: Hones, reference: Reference) -> None:
    for temperature, other in (TEMPERATURES, TEMPERATURES[::-1]):
        found = await trained(hones[temperature], {})
        assert max(reference.distance(call, other) for call in found) >= DIFFERENT


async def test_the_engine_takes_no_template_from_a_request(hones: Hones) -> None:
    opened = await hones[1.0].opened()
    path = f"/rollouts/{opened['id']}{CHAT}"
    for name, value in REFUSED_FORWARDED.items():
        status, answer, _ = await hones[1.0].post(path, {**BODY, name: value})
        assert (status, "template" in answer["error"]["message"]) == (400, True)


@pytest.mark.parametrize("temperature", TEMPERATURES)
@pytest.mark.parametrize("name", [*DISTORTING_CASES, *WITHHELD_CASES, *sorted(OLD_GRAMMARS)])
async def test_without_what_is_taken_out_a_call_is_trainable(
    hones: Hones, reference: Reference, name: str, temperature: float
) -> None:
    value = {**DISTORTING_CASES, **WITHHELD_CASES}.get(name, {"type": "object"})
    for call in await trained(hones[temperature], {name: value}):
        assert call.untrainable is None
        assert reference.distance(call, temperature) <= EQUAL


@pytest.mark.parametrize("temperature", TEMPERATURES)
@pytest.mark.parametrize("name", STRICT_CASES)
async def test_without_strictness_tools_are_trainable(
    hones: Hones, reference: Reference, name: str, temperature: float
) -> None:
    for call in await trained(hones[temperature], STRICT_CASES[name]):
        assert call.untrainable is None
        assert reference.distance(call, temperature) <= EQUAL


async def observed(hone: World, fields: dict[str, Any], temperature: float) -> list[ModelCall]:
    """Calls that reach the engine as they are sent."""
    return await calls(hone, "", {**fields, "temperature": temperature})


@pytest.mark.parametrize("temperature", TEMPERATURES)
@pytest.mark.parametrize("name", DISTORTING_CASES)
async def test_what_is_taken_out_would_distort(
    hones: Hones, reference: Reference, name: str, temperature: float
) -> None:
    if name in REFUSED:
        status, answer, _ = await hones[temperature].post(CHAT, {**BODY, name: DISTORTING_CASES[name]})
        assert (status, REFUSED[name] in answer["error"]["message"]) == (400, True)
        return
    found = await observed(hones[temperature], {name: DISTORTING_CASES[name]}, temperature)
    assert [call.untrainable for call in found] == ["sampling"] * REPEATS
    distance = max(reference.distance(call, temperature) for call in found)
    assert distance <= EQUAL if name in UNSEEN else distance >= DIFFERENT


@pytest.mark.parametrize("temperature", TEMPERATURES)
@pytest.mark.parametrize("name", [*GRAMMAR_CASES, *STRICT_CASES])
async def test_a_grammar_distorts(hones: Hones, reference: Reference, name: str, temperature: float) -> None:
    fields = {**GRAMMAR_CASES, **STRICT_CASES}[name]
    found = await observed(hones[temperature], {**ASKED, **fields}, temperature)
    assert [call.untrainable for call in found] == ["grammar"] * REPEATS
    assert max(reference.distance(call, temperature) for call in found) >= DIFFERENT


@pytest.mark.parametrize("name", GRAMMAR_CASES)
async def test_a_grammar_is_honoured_in_training_rollouts_and_named(hones: Hones, name: str) -> None:
    found = await trained(hones[1.0], GRAMMAR_CASES[name])
    assert [call.untrainable for call in found] == ["grammar"] * REPEATS

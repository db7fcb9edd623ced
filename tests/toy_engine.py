"""A toy model behind vLLM's routes, whose every reply drifts: a character is a token, but what the model
samples is spelled with other tokens than a tokenizer would take (1000 more)."""

import asyncio
import json
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any

from aiohttp import web
from serving import serving

START, END = 1, 2
OTHER_SPELLING = 1000

Message = dict[str, Any]


def spelled(text: str) -> list[int]:
    """As the tokenizer does it."""
    return [ord(letter) for letter in text]


def sampled(text: str) -> list[int]:
    """As the model does it, with the end of its turn."""
    return [OTHER_SPELLING + ord(letter) for letter in text] + [END]


def render(
    messages: Sequence[Message], generation: bool, strips: bool = False, drops: bool = False
) -> list[int]:
    """The chat template.

    One that `strips` is in the manner of Qwen3: it writes reasoning only after the last user's message,
    and there an empty one into the very last message. One that `drops` reasoning never writes any.
    """
    asked = max((n for n, one in enumerate(messages) if one["role"] == "user"), default=-1)
    ids: list[int] = []
    for n, message in enumerate(messages):
        text = message.get("content") or ""
        thought = message.get("reasoning_content") or ""
        if message["role"] == "assistant" and not drops:
            empty = strips and n == len(messages) - 1
            if (thought or empty) and (n > asked or not strips):
                text = f"<think>{thought}</think>{text}"
        for call in message.get("tool_calls") or []:
            text += f"[{call['function']['name']}]"
        ids += [START, *spelled(message["role"] + "\n" + text), END, ord("\n")]
    return [*ids, START, *spelled("assistant\n")] if generation else ids


class ToyEngine:
    """Answers `reply 0`, `reply 1`, ... in order; misbehaves as told."""

    def __init__(
        self,
        *,
        render_status: int = 200,
        takes_ids: bool = True,
        refuses_ids: bool = False,
        strips: bool = False,
        reasoning: str | None = None,
        calls: bool = False,
        cut_off: bool = False,
        drifts: bool = True,
        max_model_len: int = 4096,
    ) -> None:
        self.render_status = render_status
        self.takes_ids = takes_ids
        self.refuses_ids = refuses_ids
        self.strips = strips
        self.drops_reasoning = False
        self.reasoning = reasoning
        self.calls = calls  # every reply is a tool call
        self.cut_off = cut_off
        self.drifts = drifts
        self.max_model_len = max_model_len
        self.hangs = asyncio.Event()  # once set, renderings never come
        self.rendered: list[Any] = []  # bodies
        self.asked: list[Any] = []
        self.url = ""

    @asynccontextmanager
    async def listening(self) -> AsyncIterator["ToyEngine"]:
        routes = [
            web.get("/health", self._health),
            web.get("/metrics", self._health),
            web.get("/v1/models", self._models),
            web.post("/v1/chat/completions/render", self._render),
            web.post("/v1/chat/completions", self._chat),
        ]
        async with serving(routes) as self.url:
            yield self

    async def _health(self, request: web.Request) -> web.Response:
        return web.Response(text="process_start_time_seconds 1.0\n")

    async def _models(self, request: web.Request) -> web.Response:
        model = {"id": "policy@v0", "max_model_len": self.max_model_len}
        return web.json_response({"data": [model]})

    async def _render(self, request: web.Request) -> web.Response:
        body = await request.json()
        self.rendered.append(body)
        if self.hangs.is_set():
            await asyncio.Event().wait()
        if self.render_status != 200:
            return web.json_response({}, status=self.render_status)
        ids = render(body["messages"], body["add_generation_prompt"], self.strips, self.drops_reasoning)
        return web.json_response({"token_ids": ids, "sampling_params": {}})

    async def _chat(self, request: web.Request) -> web.Response:
        body = await request.json()
        given = (body.get("kv_transfer_params") or {}).get("prompt_token_ids")
        if body.get("max_tokens", 99) > 1:  # no probe of the proxy's
            self.asked.append(body)
            if given and self.refuses_ids:
                return web.json_response({"error": {"message": "no ids"}}, status=400)
        prompt = (
            given
            if given and self.takes_ids
            else render(body["messages"], True, self.strips, self.drops_reasoning)
        )
        text = f"reply {len(self.asked) - 1}"
        thought = f"<think>{self.reasoning}</think>" if self.reasoning else ""
        message: Message = {"role": "assistant", "content": text, "reasoning_content": self.reasoning}
        if self.calls:
            function = {"name": text, "arguments": "{}"}
            message |= {
                "content": None,
                "tool_calls": [{"id": text, "type": "function", "function": function}],
            }
            text = f"[{text}]"
        ids = sampled(thought + text) if self.drifts else [*spelled(thought + text), END]
        ids = ids[: -1 if self.cut_off else None]
        choice = {
            "index": 0,
            "message": message,
            "finish_reason": "length" if self.cut_off else "stop",
            "token_ids": ids,
            "logprobs": {"content": [{"token": "", "logprob": -0.5} for _ in ids]},
        }
        usage = {"prompt_tokens": len(prompt), "completion_tokens": len(ids)}
        answer = {"id": "chatcmpl-1", "object": "chat.completion", "created": 1, "model": body["model"]}
        return web.Response(
            text=json.dumps({**answer, "choices": [choice], "usage": usage, "prompt_token_ids": prompt}),
            content_type="application/json",
        )

"""A listening proxy, upstreams that misbehave, and LoRA adapters, all real."""

import asyncio
import hashlib
import json
import os
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import msgspec
from aiohttp import web
from serving import serving

from capture.adapters import MANIFEST, Manifest
from capture.frames import unpack
from capture.sqlite import SqliteStore
from capture.types import RawCall
from proxy.app import Proxy, running
from proxy.settings import Deadlines, Engines, Route, Settings

USER = {"role": "user", "content": "hi"}
COMPLETION = {
    "id": "chatcmpl-1",
    "object": "chat.completion",
    "created": 1,
    "model": "real",
    "choices": [{"index": 0, "message": {"role": "assistant", "content": "hello"}, "finish_reason": "stop"}],
    "usage": {"prompt_tokens": 3, "completion_tokens": 1, "total_tokens": 4},
}

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


def chunk(content: str, finish: str | None = None) -> bytes:
    """One server-sent chunk of a completion."""
    choice = {"index": 0, "delta": {"content": content}, "finish_reason": finish}
    body = {"id": "x", "object": "chat.completion.chunk", "created": 1, "model": "real", "choices": [choice]}
    return b"data: " + json.dumps(body).encode() + b"\n\n"


class FakeUpstream:
    """An OpenAI-compatible server whose answer a test writes; keeps what it was sent."""

    def __init__(self, handler: Handler) -> None:
        self._handler = handler
        self.bodies: list[bytes] = []
        self.headers: list[dict[str, str]] = []
        self.cancelled = 0
        self.url = ""

    @asynccontextmanager
    async def listening(self) -> AsyncIterator["FakeUpstream"]:
        routes = [web.post("/v1/chat/completions", self._answer)]
        async with serving(routes, handler_cancellation=True) as url:
            self.url = f"{url}/v1"
            yield self

    async def _answer(self, request: web.Request) -> web.StreamResponse:
        self.bodies.append(await request.read())
        self.headers.append(dict(request.headers))
        try:
            return await self._handler(request)
        except asyncio.CancelledError:
            self.cancelled += 1
            raise


async def completion(request: web.Request) -> web.Response:
    """The ordinary answer."""
    return web.json_response(COMPLETION)


def streaming(
    *pieces: bytes,
    pause_s: float = 0.0,
    then: Callable[[web.StreamResponse], Awaitable[None]] | None = None,
) -> Handler:
    """An answer of these bytes as a stream, a pause after each; `then` runs before its end."""

    async def handler(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse(headers={"content-type": "text/event-stream"})
        await response.prepare(request)
        for piece in pieces:
            await response.write(piece)
            await asyncio.sleep(pause_s)
        if then is not None:
            await then(response)
        await response.write_eof()
        return response

    return handler


def capture_settings(url: str, **fields: Any) -> Settings:
    """A proxy that sends every model to `url` and trains nothing."""
    fields.setdefault("deadlines", Deadlines(connect_s=2, first_byte_s=5, idle_s=5, total_s=10))
    fields.setdefault("routes", {"*": Route(url=url, model="real")})
    return Settings(port=0, policy=None, **fields)


def engine_settings(url: str, **fields: Any) -> Settings:
    """A proxy in front of one vLLM."""
    engines = Engines(urls=(url,), unload_grace_s=fields.pop("unload_grace_s", 0.3))
    return Settings(port=0, engines=engines, **fields)


class World:
    """A listening proxy, a client and a store connection of the test's own."""

    def __init__(self, proxy: Proxy, url: str, client: aiohttp.ClientSession, store: SqliteStore) -> None:
        self.proxy = proxy
        self.url = url
        self.client = client
        self.store = store

    async def post(
        self, path: str, body: Any, headers: dict[str, str] | None = None
    ) -> tuple[int, Any, dict[str, str]]:
        """Status, decoded JSON and headers; `bytes` are sent as they are."""
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        async with self.client.post(self.url + path, data=data, headers=headers) as response:
            text = await response.text()
            return response.status, json.loads(text), {k.lower(): v for k, v in response.headers.items()}

    async def get(self, path: str, headers: dict[str, str] | None = None) -> tuple[int, Any]:
        async with self.client.get(self.url + path, headers=headers) as response:
            return response.status, await response.json()

    async def opened(self, **fields: Any) -> dict[str, Any]:
        """`POST /rollouts`."""
        status, body, _ = await self.post("/rollouts", {"mode": "train", **fields})
        assert status == 201, body
        return dict(body)

    def raw_calls(self) -> list[RawCall]:
        """Everything that the journal committed, oldest first."""
        rows = self.store._rows("SELECT body FROM frames ORDER BY id")
        return [raw for (body,) in rows for raw in unpack(body)]

    async def raw_calls_when(self, count: int, timeout_s: float = 5.0) -> list[RawCall]:
        """The same once there are at least `count`."""
        await until(lambda: len(self.raw_calls()) >= count, timeout_s)
        return self.raw_calls()


@asynccontextmanager
async def world(settings: Settings, root: Path, **more: Any) -> AsyncIterator[World]:
    """A proxy on a fresh store in `root`."""
    path = root / "hone.db"
    async with running(settings, path, **more) as (proxy, url):
        store = SqliteStore(path)
        try:
            async with aiohttp.ClientSession() as client:
                yield World(proxy, url, client, store)
        finally:
            store.close()


async def until(condition: Callable[[], bool], timeout_s: float = 10.0) -> None:
    """Poll until true; fails the test after `timeout_s`."""
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, "it did not happen in time"
        await asyncio.sleep(0.02)


# -- adapters ------------------------------------------------------------------------------------

CANARY = [5, 17, 42, 99, 130, 201, 7, 256, 33, 64, 11, 300]


def write_adapter(directory: Path, base_dir: Path, seed: int, scale: float = 0.3) -> None:
    """A random rank-4 LoRA on q_proj and v_proj; the same seed gives the same weights."""
    import torch
    from safetensors.torch import save_file

    config = json.loads((base_dir / "config.json").read_text())
    hidden, head = config["hidden_size"], config["head_dim"]
    outs = {
        "q_proj": config["num_attention_heads"] * head,
        "v_proj": config["num_key_value_heads"] * head,
    }
    generator = torch.Generator().manual_seed(seed)
    weights = {}
    for layer in range(config["num_hidden_layers"]):
        for name, out in outs.items():
            key = f"base_model.model.model.layers.{layer}.self_attn.{name}"
            weights[f"{key}.lora_A.weight"] = torch.randn(4, hidden, generator=generator) * scale
            weights[f"{key}.lora_B.weight"] = torch.randn(out, 4, generator=generator) * scale
    directory.mkdir(parents=True)
    save_file(weights, directory / "adapter_model.safetensors")
    adapter_config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": str(base_dir),
        "r": 4,
        "lora_alpha": 4,
        "lora_dropout": 0.0,
        "target_modules": sorted(outs),
        "bias": "none",
        "inference_mode": True,
    }
    (directory / "adapter_config.json").write_text(json.dumps(adapter_config))


def logprobs(base_dir: Path, adapter: Path | None) -> list[float]:
    """Of CANARY[1:] under transformers and peft, at float32."""
    import torch
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(base_dir, dtype=torch.float32)
    if adapter is not None:
        model = PeftModel.from_pretrained(model, str(adapter))
    with torch.no_grad():
        logits = model(torch.tensor([CANARY])).logits[0, :-1]
    found = torch.log_softmax(logits, -1)[range(len(CANARY) - 1), CANARY[1:]]
    return [float(value) for value in found]


def write_manifest(
    directory: Path,
    version: int,
    *,
    child: Sequence[float],
    parent: Sequence[float],
    base: Sequence[float],
) -> str:
    """The manifest, last; returns the sha256 of the weights."""
    sha256 = hashlib.sha256((directory / "adapter_model.safetensors").read_bytes()).hexdigest()
    manifest = Manifest(
        policy="policy",
        version=version,
        parent=version - 1,
        lineage="l",
        step=version,
        sha256=sha256,
        fingerprint="f",
        dtype="float32",
        lora_rank=4,
        canary_ids=CANARY,
        canary_logprobs=list(child),
        parent_logprobs=list(parent),
        base_logprobs=list(base),
        created_at=time.time(),
    )
    partial = directory / f".{MANIFEST}"
    partial.write_bytes(msgspec.json.encode(manifest))
    os.replace(partial, directory / MANIFEST)
    return sha256

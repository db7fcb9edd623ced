"""A server that answers like vLLM with runtime LoRA loading: its weights are what a manifest says of them."""

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from aiohttp import web
from proxy_world import CANARY, COMPLETION, write_manifest
from serving import serving

from capture.adapters import Manifest, read_manifest

BASE = "policy@base"


def canary(version: int) -> list[float]:
    """Logprobs of CANARY[1:]: every version is half a nat from the one before."""
    return [-1.0 - 0.5 * version] * (len(CANARY) - 1)


def write_adapter(directory: Path, version: int) -> str:
    """A complete adapter directory for `LoraEngine`; its sha256."""
    directory.mkdir(parents=True)
    (directory / "adapter_model.safetensors").write_bytes(b"%d" % version)
    parts = {"child": canary(version), "parent": canary(version - 1), "base": canary(0)}
    return write_manifest(directory, version, **parts)


class LoraEngine:
    """Keeps what was loaded, unloaded and answered; misbehaves as told."""

    def __init__(self) -> None:
        self.started_at = 1.0
        self.adapters: dict[str, str] = {}  # name -> path
        self.loads: list[str] = []
        self.unloads: list[str] = []
        self.answered: list[str] = []  # names that chat completions were answered under
        self.may_load = asyncio.Event()  # cleared: a load waits for it
        self.may_load.set()
        self.breaks: set[str] = set()  # names whose loads fail
        self.parents: set[str] = set()  # names that are served the parent's weights
        self.url = ""

    @asynccontextmanager
    async def listening(self) -> AsyncIterator["LoraEngine"]:
        routes = [
            web.get("/health", self._health),
            web.get("/metrics", self._health),
            web.get("/v1/models", self._models),
            web.post("/v1/load_lora_adapter", self._load),
            web.post("/v1/unload_lora_adapter", self._unload),
            web.post("/v1/completions", self._probe),
            web.post("/v1/chat/completions", self._chat),
        ]
        async with serving(routes) as self.url:
            yield self

    def restart(self) -> None:
        """Another incarnation, with nothing loaded."""
        self.started_at += 1
        self.adapters.clear()

    async def _health(self, _: web.Request) -> web.Response:
        return web.Response(text=f"process_start_time_seconds {self.started_at}\n")

    async def _models(self, _: web.Request) -> web.Response:
        loaded = [{"id": name, "root": path, "parent": BASE} for name, path in self.adapters.items()]
        return web.json_response({"data": [{"id": BASE, "max_model_len": 4096}, *loaded]})

    async def _load(self, request: web.Request) -> web.Response:
        body = await request.json()
        name, path = body["lora_name"], body["lora_path"]
        self.loads.append(name)
        await self.may_load.wait()
        if name in self.breaks:
            return web.json_response({"error": {"message": "out of memory"}}, status=500)
        self.adapters[name] = path
        return web.Response()

    async def _unload(self, request: web.Request) -> web.Response:
        name = (await request.json())["lora_name"]
        self.unloads.append(name)
        return web.Response(status=200 if self.adapters.pop(name, None) else 404)

    async def _probe(self, request: web.Request) -> web.Response:
        """The canary's logprobs, as `proxy.verify.question` asks for them."""
        body: dict[str, Any] = await request.json()
        name = body["model"]
        if name != BASE and name not in self.adapters:
            return web.json_response({}, status=404)
        found = canary(0)
        if name != BASE:
            manifest: Manifest = read_manifest(Path(self.adapters[name]))
            found = manifest.parent_logprobs if name in self.parents else manifest.canary_logprobs
        choices = [
            {
                "index": i,
                "logprobs": {"top_logprobs": [{f"token_id:{CANARY[len(p)]}": found[len(p) - 1]}]},
            }
            for i, p in enumerate(body["prompt"])
        ]
        return web.Response(text=json.dumps({"choices": choices}), content_type="application/json")

    async def _chat(self, request: web.Request) -> web.Response:
        name = (await request.json())["model"]
        if name != BASE and name not in self.adapters:
            return web.json_response({"error": {"message": f"no model {name}"}}, status=404)
        self.answered.append(name)
        return web.json_response(COMPLETION)

"""SIGTERM: first not ready and still serving, then closed, and what was in flight is answered."""

import asyncio
import json
import os
import signal
import sys
from pathlib import Path

import aiohttp
import pytest
from aiohttp import web
from proxy_world import COMPLETION, USER, FakeUpstream

ROOT = Path(__file__).parent.parent
CHAT = "/v1/chat/completions"
SERVE = """
import asyncio, sys
from pathlib import Path
from proxy.app import serve
from proxy.settings import Route, Settings
url, port, path = sys.argv[1:]
settings = Settings(port=int(port), policy=None, routes={"*": Route(url=url)}, unready_s=3.0)
asyncio.run(serve(settings, Path(path)))
"""


async def test_not_ready_comes_before_closed(tmp_path: Path, free_port: int) -> None:
    url, go, asked = f"http://127.0.0.1:{free_port}", asyncio.Event(), asyncio.Event()
    body = json.dumps({"model": "m", "messages": [USER]})

    async def wait(request: web.Request) -> web.Response:
        if asked.is_set():  # all but the first are answered at once
            return web.json_response(COMPLETION)
        asked.set()
        await go.wait()
        return web.json_response(COMPLETION)

    async def status(path: str, data: str | None = None) -> int | None:
        """Over a connection of its own; None if there is none."""
        async with aiohttp.ClientSession() as client:
            try:
                async with client.request("POST" if data else "GET", url + path, data=data) as response:
                    return response.status
            except aiohttp.ClientConnectionError:
                return None

    async def when(path: str, wanted: int | None) -> None:
        for _ in range(600):
            if await status(path) == wanted:
                return
            await asyncio.sleep(0.05)
        pytest.fail(f"{path} never was {wanted}")

    async with FakeUpstream(wait).listening() as upstream:
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-c", SERVE, upstream.url, str(free_port), str(tmp_path / "hone.db")),
            cwd=ROOT,
            env={**os.environ, "PYTHONPATH": str(ROOT)},
        )
        try:
            await when("/ready", 200)
            early = asyncio.create_task(status(CHAT, body))
            await asyncio.wait_for(asked.wait(), 10)
            process.send_signal(signal.SIGTERM)
            await when("/ready", 503)
            assert await status(CHAT, body) == 200
            await when("/ready", None)
            assert not early.done()
            go.set()
            assert await early == 200
            assert await asyncio.wait_for(process.wait(), 20) == 0
        finally:
            if process.returncode is None:
                process.kill()
                await process.wait()

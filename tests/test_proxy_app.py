"""The process: it serves, drains on SIGTERM and loses nothing."""

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

from capture.errors import ConfigError
from capture.frames import unpack
from capture.settings import Settings as CaptureSettings
from capture.sqlite import SqliteStore
from proxy.app import Proxy
from proxy.settings import Route, Settings

SERVE = """
import asyncio, sys
from pathlib import Path
from proxy.app import serve
from proxy.settings import Route, Settings
url, port, path = sys.argv[1:]
settings = Settings(port=int(port), policy=None, routes={"*": Route(url=url)})
asyncio.run(serve(settings, Path(path)))
"""
ROOT = Path(__file__).parent.parent


async def listening(url: str) -> None:
    async with aiohttp.ClientSession() as client:
        for _ in range(400):
            try:
                async with client.get(url + "/ready") as response:
                    assert response.status == 200
                    return
            except aiohttp.ClientConnectionError:
                await asyncio.sleep(0.05)
    pytest.fail("the proxy did not listen")


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
async def test_a_signal_lets_calls_in_flight_end_and_then_stops_cleanly(
    tmp_path: Path, free_port: int, number: signal.Signals
) -> None:
    asked, go = asyncio.Event(), asyncio.Event()

    async def wait(request: web.Request) -> web.Response:
        asked.set()
        await go.wait()
        return web.json_response(COMPLETION)

    async with FakeUpstream(wait).listening() as upstream, aiohttp.ClientSession() as client:
        arguments = (upstream.url, str(free_port), str(tmp_path / "hone.db"))
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-c", SERVE, *arguments, cwd=ROOT, env={**os.environ, "PYTHONPATH": str(ROOT)}
        )
        try:
            url = f"http://127.0.0.1:{free_port}"
            await listening(url)
            body = json.dumps({"model": "m", "messages": [USER]})
            asking = asyncio.create_task(client.post(url + "/v1/chat/completions", data=body))
            await asyncio.wait_for(asked.wait(), 10)
            process.send_signal(number)
            await asyncio.sleep(2.0)
            assert not asking.done()
            with pytest.raises(aiohttp.ClientConnectionError):
                await client.get(url + "/health")
            go.set()
            response = await asking
            assert response.status == 200
            call_id = response.headers["x-hone-call-id"]
            assert await asyncio.wait_for(process.wait(), 20) == 0
        finally:
            if process.returncode is None:
                process.kill()
                await process.wait()
    store = SqliteStore(tmp_path / "hone.db")
    ((frame,),) = store._rows("SELECT body FROM frames")
    assert [raw.id for raw in unpack(frame)] == [call_id]
    store.close()


def test_settings_that_cannot_work_stop_it_before_it_listens(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"proxy\.keys"):
        Proxy(Settings(host="0.0.0.0"), CaptureSettings(), tmp_path / "hone.db", {})
    settings = Settings(routes={"a": Route(url="http://x", key_env="K")})
    with pytest.raises(ConfigError, match="K is not set"):
        Proxy(settings, CaptureSettings(), tmp_path / "hone.db", {})
    assert list(tmp_path.iterdir()) == []

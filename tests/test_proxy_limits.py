"""What keys may use: the buckets by hand-made clocks, every limit over HTTP."""

import asyncio
import hashlib
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web
from proxy_world import (
    COMPLETION,
    USER,
    FakeUpstream,
    Handler,
    World,
    capture_settings,
    chunk,
    completion,
    streaming,
    world,
)

from proxy.limits import Bucket, Limited, Meter
from proxy.settings import Key, KeyLimits, Route

CHAT = "/v1/chat/completions"
BODY = {"model": "gpt", "messages": [USER]}
DONE = b"data: [DONE]\n\n"
USAGE = b'data: {"id": "x", "choices": [], "usage": {"prompt_tokens": 30, "completion_tokens": 12}}\n\n'


def key(name: str, limits: KeyLimits | None = None, scopes: tuple[Any, ...] = ("infer", "train")) -> Key:
    return Key(
        id=name, sha256=hashlib.sha256(f"sk-{name}".encode()).hexdigest(), scopes=scopes, limits=limits
    )


def auth(name: str) -> dict[str, str]:
    return {"Authorization": f"Bearer sk-{name}"}


@asynccontextmanager
async def limited(
    root: Path, limits: KeyLimits, handler: Handler = completion, **fields: Any
) -> AsyncIterator[tuple[World, FakeUpstream]]:
    """A proxy with the keys `ann`, who has these limits, and `bob`, who has none."""
    async with FakeUpstream(handler).listening() as upstream:
        keys = (key("ann", limits), key("bob"))
        async with world(capture_settings(upstream.url, keys=keys, **fields), root) as hone:
            yield hone, upstream


def counted(hone: World, limit: str) -> float:
    for line in hone.proxy.metrics.render().decode().splitlines():
        if line.startswith(f'hone_limited_calls_total{{limit="{limit}"}} '):
            return float(line.split()[1])
    return 0.0


# -- buckets and meters ------------------------------------------------------------------------------


def test_a_bucket_fills_at_its_rate_up_to_its_size_and_may_be_overdrawn() -> None:
    bucket = Bucket(rate=2.0, size=4.0, now=100.0)
    assert bucket.wait_s(4.0, 100.0) == 0.0
    bucket.take(4.0)
    assert bucket.wait_s(1.0, 100.0) == 0.5
    assert bucket.wait_s(1.0, 100.25) == 0.25
    assert bucket.wait_s(1.0, 100.5) == 0.0
    bucket.take(7.0)  # 1 - 7 = -6
    assert bucket.wait_s(1.0, 100.5) == 3.5
    assert bucket.wait_s(4.0, 105.5) == 0.0
    assert bucket.wait_s(5.0, 999.0) == 0.5  # never more than its size


def test_a_changed_limit_keeps_what_was_used() -> None:
    meter = Meter()
    meter.enter(KeyLimits(requests_per_s=1.0, burst=10), 0.0)
    for _ in range(9):
        meter.enter(KeyLimits(requests_per_s=1.0, burst=10), 0.0)
    with pytest.raises(Limited) as caught:
        meter.enter(KeyLimits(requests_per_s=0.5, burst=20), 0.0)
    assert (caught.value.limit, caught.value.status, caught.value.retry_after_s) == (
        "requests_per_s",
        429,
        2.0,
    )
    assert meter.in_flight == 10
    meter.enter(KeyLimits(concurrency=11), 0.0)
    with pytest.raises(Limited) as caught:
        meter.enter(KeyLimits(concurrency=11), 0.0)
    assert caught.value.limit == "concurrency"


# -- rates -------------------------------------------------------------------------------------------


async def test_calls_over_the_rate_are_429_with_the_time_to_wait(tmp_path: Path) -> None:
    async with limited(tmp_path, KeyLimits(requests_per_s=0.1, burst=2)) as (hone, upstream):
        assert [(await hone.post(CHAT, BODY, auth("ann")))[0] for _ in range(2)] == [200, 200]
        status, answer, headers = await hone.post(CHAT, BODY, auth("ann"))
        assert (status, answer["error"]["code"], answer["error"]["type"]) == (
            429,
            "rate_limit_exceeded",
            "rate_limit_error",
        )
        assert 8 <= int(headers["retry-after"]) <= 10
        assert 8000 < int(headers["retry-after-ms"]) <= 10000
        assert "x-should-retry" not in headers
        assert (await hone.post(CHAT, BODY, auth("bob")))[0] == 200
        assert len(upstream.bodies) == 3
        assert counted(hone, "requests_per_s") == 1


async def test_after_the_time_it_says_a_call_is_served(tmp_path: Path) -> None:
    async with limited(tmp_path, KeyLimits(requests_per_s=5, burst=1)) as (hone, _):
        assert (await hone.post(CHAT, BODY, auth("ann")))[0] == 200
        status, _, headers = await hone.post(CHAT, BODY, auth("ann"))
        assert status == 429
        await asyncio.sleep(int(headers["retry-after-ms"]) / 1000)
        assert (await hone.post(CHAT, BODY, auth("ann")))[0] == 200


async def test_calls_at_one_time_and_a_hang_up_makes_room(tmp_path: Path) -> None:
    go, asked = asyncio.Event(), asyncio.Semaphore(0)

    async def wait(request: web.Request) -> web.Response:
        asked.release()
        await go.wait()
        return web.json_response(COMPLETION)

    async with limited(tmp_path, KeyLimits(concurrency=2), wait) as (hone, _):
        opened = await hone.client.post(hone.url + "/rollouts", json={"mode": "train"}, headers=auth("ann"))
        own = {"Authorization": f"Bearer {(await opened.json())['api_key']}"}  # counts as ann's
        calls = [asyncio.create_task(hone.post(CHAT, BODY, headers)) for headers in (auth("ann"), own)]
        for _ in calls:
            await asyncio.wait_for(asked.acquire(), 5)
        for headers in (auth("ann"), own):
            status, answer, sent = await hone.post(CHAT, BODY, headers)
            assert (status, answer["error"]["code"], sent["retry-after"]) == (
                429,
                "concurrency_limit_exceeded",
                "1",
            )
        calls[0].cancel()
        await asyncio.gather(calls[0], return_exceptions=True)
        third = asyncio.create_task(hone.post(CHAT, BODY, auth("ann")))
        await asyncio.wait_for(asked.acquire(), 5)
        go.set()
        assert [(await call)[0] for call in (calls[1], third)] == [200, 200]
        assert (await hone.post(CHAT, BODY, auth("ann")))[0] == 200
        assert counted(hone, "concurrency") == 2


# -- tokens ------------------------------------------------------------------------------------------


async def test_tokens_a_minute_are_what_upstreams_counted(tmp_path: Path) -> None:
    async with limited(tmp_path, KeyLimits(tokens_per_minute=6)) as (hone, _):
        assert (await hone.post(CHAT, BODY, auth("ann")))[0] == 200  # 3 + 1 tokens: 2 are left
        assert (await hone.post(CHAT, BODY, auth("ann")))[0] == 200  # overdrawn by 2
        status, answer, headers = await hone.post(CHAT, BODY, auth("ann"))
        assert (status, answer["error"]["code"]) == (429, "rate_limit_exceeded")
        assert 25 <= int(headers["retry-after"]) <= 30  # 3 tokens at 6 a minute
        assert counted(hone, "tokens_per_minute") == 1


async def test_a_budget_outlives_the_proxy_and_is_one_for_all_proxies(tmp_path: Path) -> None:
    limits = KeyLimits(tokens_total=10)
    async with limited(tmp_path, limits) as (hone, upstream):
        other_settings = capture_settings(upstream.url, keys=(key("ann", limits),), in_flight_interval_s=0.05)
        async with world(other_settings, tmp_path) as other:
            for proxy in (hone, other, hone):  # 4 tokens each: 12
                assert (await proxy.post(CHAT, BODY, auth("ann")))[0] == 200
            await asyncio.sleep(0.3)
            status, answer, headers = await other.post(CHAT, BODY, auth("ann"))
            assert (status, answer["error"]["code"]) == (429, "insufficient_quota")
            assert headers["x-should-retry"] == "false"
            assert "retry-after" not in headers
    async with limited(tmp_path, limits) as (hone, upstream):
        assert (await hone.post(CHAT, BODY, auth("ann")))[0] == 429
        assert upstream.bodies == []
        assert hone.store.key_tokens(["ann", "bob"]) == {"ann": 12}
        assert [raw.charged_tokens for raw in hone.raw_calls()] == [4, 4, 4]


@pytest.mark.parametrize("asks", [False, True])
@pytest.mark.parametrize("model", [None, "real"])
async def test_a_stream_is_asked_for_its_usage_and_shows_it_to_who_asked(
    tmp_path: Path, asks: bool, model: str | None
) -> None:
    handler = streaming(chunk("a"), chunk("", "stop"), USAGE, DONE)
    async with FakeUpstream(handler).listening() as upstream:
        routes = {"*": Route(url=upstream.url, model=model)}
        keys = (key("ann", KeyLimits(tokens_total=1000)), key("bob"))
        async with world(capture_settings(upstream.url, keys=keys, routes=routes), tmp_path) as hone:
            body: dict[str, Any] = {**BODY, "stream": True}
            if asks:
                body["stream_options"] = {"include_usage": True}
            async with hone.client.post(hone.url + CHAT, json=body, headers=auth("ann")) as response:
                text = await response.read()
        assert json.loads(upstream.bodies[0])["stream_options"] == {"include_usage": True}
        assert text.endswith(DONE)
        assert (b'"usage"' in text) == asks
        assert hone_tokens(tmp_path) == {"ann": 42}


def hone_tokens(root: Path) -> dict[str, int]:
    from capture.sqlite import SqliteStore

    store = SqliteStore(root / "hone.db")
    try:
        return store.key_tokens(["ann", "bob"])
    finally:
        store.close()


async def test_who_hangs_up_pays_by_what_there_is_to_see(tmp_path: Path) -> None:
    async def forever(response: web.StreamResponse) -> None:
        await asyncio.Event().wait()

    handler = streaming(*[chunk(str(n)) for n in range(10)], then=forever)
    async with limited(tmp_path, KeyLimits(tokens_total=1000), handler) as (hone, _):
        body = {**BODY, "stream": True, "user": "x" * 400}
        async with hone.client.post(hone.url + CHAT, json=body, headers=auth("ann")) as response:
            for _ in range(10):
                await response.content.readuntil(b"\n\n")
            response.close()
        (raw,) = await hone.raw_calls_when(1)
        assert raw.status == 499
        assert raw.charged_tokens == len(json.dumps(body)) // 4 + 10


async def test_what_an_upstream_refused_costs_nothing(tmp_path: Path) -> None:
    async def refuse(request: web.Request) -> web.Response:
        return web.json_response({"error": {"message": "no"}}, status=400)

    async with limited(tmp_path, KeyLimits(tokens_total=10), refuse) as (hone, _):
        assert (await hone.post(CHAT, BODY, auth("ann")))[0] == 400
        assert hone.store.key_tokens(["ann"]) == {}


# -- sizes -------------------------------------------------------------------------------------------


async def test_a_body_over_the_keys_limit_is_413(tmp_path: Path) -> None:
    async with limited(tmp_path, KeyLimits(body_bytes_max=200)) as (hone, upstream):
        long = {**BODY, "user": "x" * 300}
        status, answer, headers = await hone.post(CHAT, long, auth("ann"))
        assert (status, answer["error"]["code"]) == (413, "body_too_large")
        assert headers["x-should-retry"] == "false"

        async def pieces() -> AsyncIterator[bytes]:
            for byte in json.dumps(long).encode():
                yield bytes([byte])

        async with hone.client.post(hone.url + CHAT, data=pieces(), headers=auth("ann")) as response:
            assert response.status == 413
        assert upstream.bodies == []
        assert (await hone.post(CHAT, long, auth("bob")))[0] == 200
        assert counted(hone, "body_bytes_max") == 2


@pytest.mark.parametrize(
    ("more", "code", "param"),
    [
        ({"n": 3}, "n_too_large", "n"),
        ({"max_tokens": 101}, "max_tokens_too_large", "max_tokens"),
        ({"max_tokens": 1, "max_completion_tokens": 101}, "max_tokens_too_large", "max_completion_tokens"),
        ({"max_tokens": "many"}, "invalid_type", "max_tokens"),
        ({"max_tokens": -1}, "invalid_type", "max_tokens"),
    ],
)
async def test_n_and_max_tokens(tmp_path: Path, more: dict[str, Any], code: str, param: str) -> None:
    async with limited(tmp_path, KeyLimits(n_max=2, max_tokens=100)) as (hone, upstream):
        status, answer, _ = await hone.post(CHAT, {**BODY, **more}, auth("ann"))
        assert (status, answer["error"]["code"], answer["error"]["param"]) == (400, code, param)
        assert upstream.bodies == []
        if code != "invalid_type":
            assert counted(hone, "n_max" if param == "n" else "max_tokens") == 1
        assert (await hone.post(CHAT, {**BODY, **more}, auth("bob")))[0] in (200, 400)


async def test_who_names_no_cap_gets_that_of_the_key_and_it_is_recorded(tmp_path: Path) -> None:
    async with limited(tmp_path, KeyLimits(n_max=2, max_tokens=100)) as (hone, upstream):
        assert (await hone.post(CHAT, {**BODY, "n": 2}, auth("ann")))[0] == 200
        assert (await hone.post(CHAT, {**BODY, "max_completion_tokens": 100}, auth("ann")))[0] == 200
        first, second = map(json.loads, upstream.bodies)
        assert first["max_tokens"] == 100
        assert "max_tokens" not in second
        assert [raw.changed for raw in hone.raw_calls()] == [{"max_tokens": 100}, {}]


async def test_without_keys_the_limits_of_all_hold_for_everybody(tmp_path: Path) -> None:
    async with FakeUpstream(completion).listening() as upstream:
        settings = capture_settings(upstream.url, key_limits=KeyLimits(requests_per_s=0.01))
        async with world(settings, tmp_path) as hone:
            assert [(await hone.post(CHAT, BODY))[0] for _ in range(2)] == [200, 429]

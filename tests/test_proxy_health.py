"""Upstreams that fail: breakers by a hand-made clock; retries, fallbacks and deadlines over HTTP."""

import asyncio
import json
import time
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
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
    until,
    world,
)

from proxy.health import Breaker, verdict
from proxy.settings import Deadlines, Health, Limits, Route, Settings

CHAT = "/v1/chat/completions"
BODY = {"model": "gpt", "messages": [USER]}
STREAM = {**BODY, "stream": True}
DONE = b"data: [DONE]\n\n"
QUICK = Deadlines(connect_s=1, first_byte_s=5, idle_s=5, total_s=10, retries=2, retry_pause_s=0.01)


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


def breaker(clock: Clock, **fields: Any) -> Breaker:
    fields = {"failures_max": 3, "pause_s": 1.0, "pause_max_s": 3.0, "return_calls": 4} | fields
    return Breaker(Health(**fields), clock)


def send(one: Breaker, *outcomes: str) -> list[bool]:
    """Calls one after the other; whether a pause began with each."""
    began = []
    for outcome in outcomes:
        one.begin()
        began.append(one.end(verdict(outcome)))
    return began


# -- breakers ----------------------------------------------------------------------------------------


def test_failures_in_a_row_begin_a_pause_and_what_is_the_callers_fault_does_not_count() -> None:
    clock = Clock()
    one = breaker(clock)
    assert send(one, "broken", "timeout", "ok", "connect", "client_error", "unavailable") == [False] * 6
    assert send(one, "hung_up", "stale", "too_long", *["client_error"] * 100) == [False] * 103
    assert one.wait_s() == 0.0
    assert send(one, "broken") == [True]  # the third: connect, unavailable, broken
    assert (one.wait_s(), one.share) == (1.0, 0.0)


def test_calls_return_one_by_one_and_then_in_any_number() -> None:
    clock = Clock()
    one = breaker(clock)
    send(one, *["broken"] * 3)
    clock.now += 1.0
    assert one.wait_s() == 0.0
    one.begin()
    assert one.wait_s() > 0  # one at a time
    assert not one.end("good")
    assert one.room == 2
    one.begin(), one.begin()
    assert one.wait_s() > 0
    one.end("good"), one.end("neither")
    assert one.room == 3
    send(one, "ok")
    assert (one.room, one.share) == (4, 0.8)
    send(one, "ok")
    assert (one.room, one.share, one.wait_s()) == (None, 1.0, 0.0)


def test_pauses_double_up_to_their_bound_while_the_first_call_after_them_fails() -> None:
    clock = Clock()
    one = breaker(clock)
    send(one, *["broken"] * 3)
    waits = [one.wait_s()]
    for _ in range(3):
        clock.now += one.wait_s()
        assert send(one, "broken") == [True]
        waits.append(one.wait_s())
    assert waits == [1.0, 2.0, 3.0, 3.0]
    clock.now += 3.0
    send(one, *["ok"] * 4)
    assert one.room is None
    send(one, *["broken"] * 3)
    assert one.wait_s() == 1.0  # it had worked as it should: from the beginning


def test_a_failure_on_the_way_back_halves_the_room_and_calls_from_before_the_pause_change_nothing() -> None:
    clock = Clock()
    one = breaker(clock)
    one.begin()
    send(one, *["broken"] * 3)
    assert not one.end("bad")  # it was sent before
    clock.now += 1.0
    send(one, "ok", "ok")
    assert one.room == 3
    assert send(one, "broken") == [False]
    assert one.room == 1
    assert send(one, "broken") == [True]
    one.begin()
    one.end("good")  # one that was sent before the pause does not end it
    assert one.wait_s() == 2.0


# -- over HTTP ---------------------------------------------------------------------------------------


@asynccontextmanager
async def routed(
    root: Path,
    handlers: dict[str, Handler],
    routes: Callable[[dict[str, str]], dict[str, Route]],
    **fields: Any,
) -> AsyncIterator[tuple[World, dict[str, FakeUpstream]]]:
    """Upstreams by name; `routes` gets their URLs."""
    async with AsyncExitStack() as stack:
        upstreams = {
            name: await stack.enter_async_context(FakeUpstream(handler).listening())
            for name, handler in handlers.items()
        }
        urls = {name: upstream.url for name, upstream in upstreams.items()}
        fields.setdefault("deadlines", QUICK)
        settings = Settings(port=0, policy=None, routes=routes(urls), **fields)
        yield await stack.enter_async_context(world(settings, root)), upstreams


def one_route(urls: dict[str, str]) -> dict[str, Route]:
    return {"*": Route(url=urls["a"])}


def two_routes(urls: dict[str, str]) -> dict[str, Route]:
    return {"a": Route(url=urls["a"]), "b": Route(url=urls["b"])}


def with_b(urls: dict[str, str]) -> dict[str, Route]:
    return {"*": Route(url=urls["a"], fallbacks=("b",)), "b": Route(url=urls["b"])}


def in_turn(*handlers: Handler) -> Handler:
    """The first call gets the first, the last gets all that follow."""
    left = list(handlers)

    async def handler(request: web.Request) -> web.StreamResponse:
        return await (left.pop(0) if len(left) > 1 else left[0])(request)

    return handler


def answering(status: int) -> Handler:
    async def handler(request: web.Request) -> web.Response:
        return web.json_response({"error": {"message": f"it is {status}"}}, status=status)

    return handler


async def drop(request: web.Request) -> web.Response:
    assert request.transport is not None
    request.transport.close()
    return web.Response()


async def hang(request: web.Request) -> web.Response:
    await asyncio.Event().wait()
    raise AssertionError


def metric(hone: World, sample: str) -> float:
    for line in hone.proxy.metrics.render().decode().splitlines():
        if line.startswith(sample + " "):
            return float(line.rpartition(" ")[2])
    return 0.0


@pytest.mark.parametrize("body", [BODY, STREAM])
async def test_an_upstream_that_is_not_there_for_a_moment_is_asked_again(tmp_path: Path, body: Any) -> None:
    answer = streaming(chunk("a", "stop"), DONE) if body is STREAM else completion
    handler = in_turn(answering(503), answering(502), answer)
    async with routed(tmp_path, {"a": handler}, one_route) as (hone, upstreams):
        async with hone.client.post(hone.url + CHAT, json=body) as response:
            assert response.status == 200
            assert await response.read()
        assert len(upstreams["a"].bodies) == 3
        assert len(hone.raw_calls()) == 1
        assert metric(hone, 'hone_retries_total{route="*"}') == 2


async def test_retries_end_and_the_last_answer_is_told(tmp_path: Path) -> None:
    async with routed(tmp_path, {"a": answering(503)}, one_route) as (hone, upstreams):
        status, answer, _ = await hone.post(CHAT, BODY)
        assert status == 502
        assert "answered 503" in answer["error"]["message"]
        assert len(upstreams["a"].bodies) == 3


@pytest.mark.parametrize("handler", [answering(500), answering(429), answering(400), drop])
async def test_what_may_have_been_generated_or_refused_is_not_asked_again(
    tmp_path: Path, handler: Handler
) -> None:
    async with routed(tmp_path, {"a": handler}, one_route) as (hone, upstreams):
        await hone.post(CHAT, BODY)
        assert len(upstreams["a"].bodies) == 1


async def test_nothing_is_asked_again_once_the_agent_has_seen_something(tmp_path: Path) -> None:
    async def die(response: web.StreamResponse) -> None:
        transport = response._req.transport
        assert transport is not None
        transport.abort()

    handlers = {"a": streaming(chunk("a"), pause_s=0.05, then=die), "b": completion}
    async with routed(tmp_path, handlers, with_b) as (hone, upstreams):
        async with hone.client.post(hone.url + CHAT, json=STREAM) as response:
            text = await response.read()
        assert b"upstream_error" in text
        assert b"[DONE]" not in text
        assert (len(upstreams["a"].bodies), len(upstreams["b"].bodies)) == (1, 0)


# -- circuit -----------------------------------------------------------------------------------------


async def test_an_upstream_that_fails_is_left_alone_and_comes_back(tmp_path: Path) -> None:
    health = Health(failures_max=3, pause_s=0.3, return_calls=2)
    handler = in_turn(*[answering(500)] * 3, completion)
    async with routed(tmp_path, {"a": handler}, one_route, health=health) as (hone, upstreams):
        for _ in range(3):
            assert (await hone.post(CHAT, BODY))[0] == 502
        status, answer, headers = await hone.post(CHAT, BODY)
        assert (status, answer["error"]["code"]) == (503, "upstream_unavailable")
        assert (headers["x-should-retry"], headers["retry-after"]) == ("true", "1")
        assert len(upstreams["a"].bodies) == 3
        _, text = await metrics(hone)
        assert f'hone_upstream_share{{upstream="{upstreams["a"].url}"}} 0.0' in text
        await asyncio.sleep(0.3)
        for _ in range(2):
            assert (await hone.post(CHAT, BODY))[0] == 200
        _, text = await metrics(hone)
        assert f'hone_upstream_share{{upstream="{upstreams["a"].url}"}} 1.0' in text
        assert [raw.status for raw in hone.raw_calls()] == [502, 502, 502, 503, 200, 200]
        assert 'hone_upstream_pauses_total{route="*"} 1.0' in text


async def metrics(hone: World) -> tuple[int, str]:
    async with hone.client.get(hone.url + "/metrics") as response:
        return response.status, await response.text()


async def test_client_errors_and_long_answers_never_open_the_circuit(tmp_path: Path) -> None:
    health = Health(failures_max=2, pause_s=30)
    limits = Limits(response_bytes_max=300)
    handler = in_turn(*[answering(400)] * 5, *[answering(429)] * 5, *[long] * 3, completion)
    async with routed(tmp_path, {"a": handler}, one_route, health=health, limits=limits) as (hone, _):
        got = [(await hone.post(CHAT, BODY))[0] for _ in range(14)]
        assert got == [400] * 5 + [429] * 5 + [502] * 3 + [200]


async def long(request: web.Request) -> web.Response:
    return web.json_response({**COMPLETION, "more": "x" * 1000})


async def test_one_upstreams_circuit_is_not_anothers(tmp_path: Path) -> None:
    health = Health(failures_max=1, pause_s=30)
    handlers = {"a": answering(500), "b": completion}
    async with routed(tmp_path, handlers, two_routes, health=health) as (hone, _):
        got = [(await hone.post(CHAT, {**BODY, "model": model}))[0] for model in "aab"]
        assert got == [502, 503, 200]


# -- fallbacks ---------------------------------------------------------------------------------------


def with_fallback(urls: dict[str, str]) -> dict[str, Route]:
    return {
        "*": Route(url=urls["a"], model="real", fallbacks=("b", "c")),
        "b": Route(url=urls["b"], fallbacks=("c",)),
        "c": Route(url=urls["c"], model="third"),
    }


async def garbage(request: web.Request) -> web.Response:
    return web.Response(text="<html>")


@pytest.mark.parametrize("body", [BODY, STREAM])
@pytest.mark.parametrize(
    "handler",
    [answering(500), answering(503), answering(429), drop, hang, garbage, streaming(b"data: {x\n\n")],
)
async def test_a_fallback_answers_before_the_first_byte(tmp_path: Path, handler: Handler, body: Any) -> None:
    answer = streaming(chunk("a", "stop"), DONE) if body is STREAM else completion
    handlers = {"a": handler, "b": answer, "c": answer}
    deadlines = Deadlines(first_byte_s=0.3, retries=0)
    async with routed(tmp_path, handlers, with_fallback, deadlines=deadlines) as (hone, upstreams):
        async with hone.client.post(hone.url + CHAT, json=body) as response:
            text = await response.text()
            assert (response.status, response.headers["x-hone-fallback"]) == (200, "b")
        assert '"model":"gpt"' in text  # the agent's own name for it
        assert json.loads(upstreams["b"].bodies[0]) == {**body, "model": "b"}
        assert len(upstreams["c"].bodies) == 0
        (raw,) = hone.raw_calls()
        assert (raw.route, raw.upstream, raw.status, raw.error) == ("gpt", "b", 200, None)
        assert metric(hone, 'hone_fallbacks_total{route="b"}') == 1


async def test_fallbacks_are_tried_in_order_and_a_bad_request_by_none(tmp_path: Path) -> None:
    handlers = {"a": answering(500), "b": answering(500), "c": completion}
    async with routed(tmp_path, handlers, with_fallback) as (hone, upstreams):
        status, _, headers = await hone.post(CHAT, BODY)
        assert (status, headers["x-hone-fallback"]) == (200, "c")
        assert json.loads(upstreams["c"].bodies[0])["model"] == "third"
    root = tmp_path / "bad"
    root.mkdir()
    async with routed(root, handlers | {"a": answering(400)}, with_fallback) as (hone, upstreams):
        assert (await hone.post(CHAT, BODY))[0] == 400
        assert upstreams["b"].bodies == []


async def test_an_open_circuit_falls_back_at_once_and_all_failing_is_the_last_ones_error(
    tmp_path: Path,
) -> None:
    health = Health(failures_max=1, pause_s=30)
    handlers = {
        "a": answering(500),
        "b": in_turn(completion, completion, answering(500)),
        "c": answering(500),
    }
    async with routed(tmp_path, handlers, with_fallback, health=health) as (hone, upstreams):
        assert [(await hone.post(CHAT, BODY))[0] for _ in range(2)] == [200, 200]
        assert len(upstreams["a"].bodies) == 1
        status, answer, headers = await hone.post(CHAT, BODY)
        assert (status, headers["x-hone-fallback"]) == (502, "c")
        assert answer["error"]["message"].startswith("c: ")
        assert len(hone.raw_calls()) == 3


# -- deadlines ---------------------------------------------------------------------------------------


async def head_then_hang(request: web.Request) -> web.StreamResponse:
    response = web.StreamResponse(headers={"content-length": "1000", "content-type": "application/json"})
    await response.prepare(request)
    await response.write(b'{"choices"')
    await asyncio.Event().wait()
    return response


async def trickle(response: web.StreamResponse) -> None:
    for n in range(1000):
        await response.write(chunk(str(n)))
        await asyncio.sleep(0.05)


async def never(response: web.StreamResponse) -> None:
    await asyncio.Event().wait()


@pytest.mark.parametrize(
    ("handler", "body", "deadlines", "says"),
    [
        (hang, BODY, Deadlines(first_byte_s=0.3, idle_s=30), "nothing came"),
        (hang, STREAM, Deadlines(first_byte_s=0.3, idle_s=30), "nothing came"),
        (head_then_hang, BODY, Deadlines(first_byte_s=30, idle_s=0.3), "nothing came"),
        (streaming(chunk("a"), then=never), STREAM, Deadlines(first_byte_s=30, idle_s=0.3), "nothing came"),
        (hang, BODY, Deadlines(first_byte_s=30, total_s=0.3), "took too long"),
        (streaming(then=trickle), STREAM, Deadlines(idle_s=30, total_s=0.5), "took too long"),
    ],
)
async def test_first_byte_idle_and_total_are_deadlines_of_their_own(
    tmp_path: Path, handler: Handler, body: Any, deadlines: Deadlines, says: str
) -> None:
    async with routed(tmp_path, {"a": handler}, one_route, deadlines=deadlines) as (hone, upstreams):
        began = time.monotonic()
        async with hone.client.post(hone.url + CHAT, json=body) as response:
            text = await response.text()
        assert time.monotonic() - began < 5
        assert says in text
        assert "[DONE]" not in text
        await until(lambda: upstreams["a"].cancelled == 1)
        assert says in (hone.raw_calls()[0].error or "")


async def test_a_slow_first_byte_is_no_idle_and_steady_chunks_are_neither(tmp_path: Path) -> None:
    async def late(request: web.Request) -> web.StreamResponse:
        await asyncio.sleep(0.6)
        return await streaming(*map(chunk, "abcdefgh"), chunk("", "stop"), DONE, pause_s=0.1)(request)

    deadlines = Deadlines(first_byte_s=5, idle_s=0.4, total_s=30)
    async with (
        routed(tmp_path, {"a": late}, one_route, deadlines=deadlines) as (hone, _),
        hone.client.post(hone.url + CHAT, json=STREAM) as response,
    ):
        assert (await response.read()).endswith(DONE)


async def test_no_connection_within_the_deadline_is_502(tmp_path: Path) -> None:
    """A listener whose queue is full: connections neither stand nor are refused."""
    import socket

    with socket.socket() as full:
        full.bind(("127.0.0.1", 0))
        full.listen(0)
        fillers = []
        for _ in range(4):
            filler = socket.socket()
            filler.setblocking(False)
            filler.connect_ex(full.getsockname())
            fillers.append(filler)
        url = f"http://127.0.0.1:{full.getsockname()[1]}/v1"
        deadlines = Deadlines(connect_s=0.3, retries=1, retry_pause_s=0.01)
        async with world(capture_settings(url, deadlines=deadlines), tmp_path) as hone:
            began = time.monotonic()
            status, answer, _ = await hone.post(CHAT, BODY)
            assert 0.6 <= time.monotonic() - began < 5
            assert status == 502
            assert "cannot be reached" in answer["error"]["message"]
        for filler in fillers:
            filler.close()


async def test_the_total_deadline_holds_for_retries_and_fallbacks_together(tmp_path: Path) -> None:
    async def slowly(request: web.Request) -> web.Response:
        await asyncio.sleep(1.2)
        return web.json_response({}, status=500)

    deadlines = Deadlines(total_s=1.7, retries=0)
    async with routed(tmp_path, {"a": slowly, "b": hang}, with_b, deadlines=deadlines) as (
        hone,
        upstreams,
    ):
        began = time.monotonic()
        status, answer, _ = await hone.post(CHAT, BODY)
        assert status == 502
        assert "took too long" in answer["error"]["message"]
        assert 1.6 < time.monotonic() - began < 2.5
        await until(lambda: upstreams["b"].cancelled == 1)

"""The hot path against upstreams that misbehave and a store that does not take writes."""

import asyncio
import json
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any

import aiohttp
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

from capture.sqlite import SqliteStore
from proxy.settings import Deadlines, Limits, Route

CHAT = "/v1/chat/completions"
BODY = {"model": "gpt", "messages": [USER]}
STREAM = {**BODY, "stream": True}
DONE = b"data: [DONE]\n\n"


@asynccontextmanager
async def against(handler: Handler, root: Path, **fields: Any) -> AsyncIterator[tuple[World, FakeUpstream]]:
    """A proxy that sends everything to this handler."""
    async with (
        FakeUpstream(handler).listening() as upstream,
        world(capture_settings(upstream.url, **fields), root) as hone,
    ):
        yield hone, upstream


async def streamed(hone: World, path: str = CHAT, body: Any = STREAM) -> tuple[int, bytes]:
    async with hone.client.post(hone.url + path, json=body) as response:
        return response.status, await response.read()


@contextmanager
def locked(root: Path) -> Iterator[Callable[[], None]]:
    """Somebody else holds the store's write lock, until the end or until what is yielded is called."""
    other = SqliteStore(root / "hone.db")
    other._db.execute("BEGIN IMMEDIATE")

    def unlock() -> None:
        if other._db.in_transaction:
            other._db.execute("ROLLBACK")

    try:
        yield unlock
    finally:
        unlock()
        other.close()


# -- whole answers --------------------------------------------------------------------------------


async def test_an_answer_is_relayed_under_the_alias_and_stored_whole(tmp_path: Path) -> None:
    async with against(completion, tmp_path) as (hone, upstream):
        status, answer, headers = await hone.post(CHAT, {**BODY, "temperature": 0.3, "x": [1, {"y": None}]})
        assert (status, answer) == (200, {**COMPLETION, "model": "gpt"})
        assert json.loads(upstream.bodies[0]) == {
            **BODY,
            "model": "real",
            "temperature": 0.3,
            "x": [1, {"y": None}],
        }
        (raw,) = hone.raw_calls()
        assert json.loads(raw.response) == COMPLETION
        assert json.loads(raw.request)["model"] == "gpt"
        assert (raw.id, raw.rollout_id) == (headers["x-hone-call-id"], headers["x-hone-rollout-id"])
        assert (raw.status, raw.route, raw.upstream, raw.policy, raw.changed) == (200, "gpt", "*", None, {})
        assert "x-hone-policy-version" not in headers


async def test_without_a_mapped_name_not_a_byte_is_changed(tmp_path: Path) -> None:
    body = b'{ "model" : "gpt",  "messages":[ {"role":"user","content":"\\u00e9"} ] }'
    odd = b'{"choices":[{"index":0,"message":{},"finish_reason":"stop"}] ,  "model":"gpt-0613"}'

    async def answer(request: web.Request) -> web.Response:
        return web.Response(body=odd, content_type="application/json")

    async with FakeUpstream(answer).listening() as upstream:
        settings = capture_settings(upstream.url, routes={"gpt": Route(url=upstream.url)})
        async with (
            world(settings, tmp_path) as hone,
            hone.client.post(hone.url + CHAT, data=body) as response,
        ):
            assert await response.read() == odd
        assert upstream.bodies == [body]


async def test_the_agents_key_goes_to_nobody_but_a_passthrough_route(tmp_path: Path) -> None:
    async with FakeUpstream(completion).listening() as upstream:
        routes = {
            "plain": Route(url=upstream.url),
            "ours": Route(url=upstream.url, key_env="UPSTREAM_KEY"),
            "theirs": Route(url=upstream.url, auth="passthrough"),
        }
        settings = capture_settings(upstream.url, routes=routes)
        async with world(settings, tmp_path, secrets={"UPSTREAM_KEY": "sk-ours"}) as hone:
            agent = {"Authorization": "Bearer sk-agent"}
            for model in routes:
                assert (await hone.post(CHAT, {**BODY, "model": model}, agent))[0] == 200
            own = {"Authorization": f"Bearer {(await hone.opened())['api_key']}"}
            assert (await hone.post(CHAT, {**BODY, "model": "theirs"}, own))[0] == 200
        sent = [headers.get("Authorization") for headers in upstream.headers]
        assert sent == [None, "Bearer sk-ours", "Bearer sk-agent", None]


async def test_what_says_that_a_request_is_made_again_is_captured(tmp_path: Path) -> None:
    async with against(completion, tmp_path) as (hone, _):
        said = {"x-stainless-retry-count": "2", "Idempotency-Key": "k" * 999}
        assert (await hone.post(CHAT, BODY, said))[0] == 200
        assert (await hone.post(CHAT, BODY, {"x-stainless-retry-count": "soon"}))[0] == 200
        again, plain = hone.raw_calls()
        assert (again.retry_count, again.idempotency_key) == (2, "k" * 255)
        assert (plain.retry_count, plain.idempotency_key) == (0, None)
        assert again.body_hash == plain.body_hash


async def test_a_client_error_of_the_upstream_is_passed_on_and_captured(tmp_path: Path) -> None:
    async def refuse(request: web.Request) -> web.Response:
        return web.json_response(
            {"error": {"message": "slow down"}}, status=429, headers={"retry-after": "7"}
        )

    async with against(refuse, tmp_path) as (hone, _):
        for body in (BODY, STREAM):
            status, answer, headers = await hone.post(CHAT, body)
            assert (status, answer) == (429, {"error": {"message": "slow down"}})
            assert headers["retry-after"] == "7"
        assert [(raw.status, raw.error) for raw in hone.raw_calls()] == [(429, None)] * 2
        assert hone.store.counts().failed_calls == 2


async def server_error(request: web.Request) -> web.Response:
    return web.Response(status=500, text="boom")


async def html(request: web.Request) -> web.Response:
    return web.Response(text="<html>hello</html>", content_type="text/html")


async def redirect(request: web.Request) -> web.Response:
    return web.Response(status=302, headers={"location": "http://elsewhere/"})


async def cut(request: web.Request) -> web.StreamResponse:
    response = web.StreamResponse(headers={"content-length": "1000"})
    await response.prepare(request)
    await response.write(b'{"choices"')
    assert request.transport is not None
    request.transport.close()
    return response


@pytest.mark.parametrize("body", [BODY, STREAM])
@pytest.mark.parametrize(
    ("handler", "says"),
    [(server_error, "answered 500: boom"), (html, ""), (redirect, "302"), (cut, "")],
)
async def test_a_broken_upstream_is_502_and_stored_as_broken(
    tmp_path: Path, handler: Handler, says: str, body: Any
) -> None:
    async with against(handler, tmp_path) as (hone, _):
        status, answer, headers = await hone.post(CHAT, body)
        assert (status, answer["error"]["code"], answer["error"]["type"]) == (
            502,
            "upstream_error",
            "server_error",
        )
        assert says in answer["error"]["message"]
        (raw,) = hone.raw_calls()
        assert (raw.status, raw.id) == (502, headers["x-hone-call-id"])
        assert says in (raw.error or "")
        assert raw.error


async def test_an_upstream_that_is_not_there_is_502(tmp_path: Path) -> None:
    async with world(capture_settings("http://127.0.0.1:9/v1"), tmp_path) as hone:
        status, answer, _ = await hone.post(CHAT, BODY)
        assert (status, answer["error"]["code"]) == (502, "upstream_error")
        assert "cannot be reached" in answer["error"]["message"]


@pytest.mark.parametrize("body", [BODY, STREAM])
async def test_an_upstream_that_hangs_is_cut_at_the_deadline(tmp_path: Path, body: Any) -> None:
    async def hang(request: web.Request) -> web.Response:
        await asyncio.sleep(60)
        raise AssertionError

    async with against(hang, tmp_path, deadlines=Deadlines(first_byte_s=0.2)) as (
        hone,
        upstream,
    ):
        status, answer, _ = await hone.post(CHAT, body)
        assert status == 502
        assert "in time" in answer["error"]["message"]
        await until(lambda: upstream.cancelled == 1)


async def test_a_request_over_the_limit_is_413_and_an_answer_over_it_502(tmp_path: Path) -> None:
    limits = Limits(body_bytes_max=1000, response_bytes_max=100)
    async with against(completion, tmp_path, limits=limits) as (hone, upstream):
        status, answer, _ = await hone.post(CHAT, {**BODY, "user": "x" * 2000})
        assert (status, answer["error"]["code"]) == (413, "body_too_large")
        assert upstream.bodies == []
        status, answer, _ = await hone.post(CHAT, BODY)
        assert status == 502
        assert "longer than 100 bytes" in answer["error"]["message"]


async def test_a_dead_reused_connection_is_tried_once_more(tmp_path: Path) -> None:
    """The first connection answers once, then closes when the next request arrives on it."""
    body = json.dumps(COMPLETION).encode()
    head = b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n" % len(body)
    requests = []

    async def answer_once(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        first = len(requests) == 0
        for _ in range(2):
            line = await reader.readuntil(b"\r\n\r\n")
            length = int(line.lower().split(b"content-length: ")[1].split(b"\r\n")[0])
            requests.append(await reader.readexactly(length))
            if first and len(requests) == 2:
                break
            writer.write(head + body)
            await writer.drain()
        writer.close()

    server = await asyncio.start_server(answer_once, "127.0.0.1", 0)
    url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}/v1"
    async with server, world(capture_settings(url), tmp_path) as hone:
        assert (await hone.post(CHAT, BODY))[0] == 200
        assert (await hone.post(CHAT, BODY))[0] == 200
    assert len(requests) == 3


async def test_a_fresh_connection_that_drops_is_not_tried_again(tmp_path: Path) -> None:
    async def drop(request: web.Request) -> web.Response:
        assert request.transport is not None
        request.transport.close()
        return web.Response()

    async with against(drop, tmp_path) as (hone, upstream):
        assert (await hone.post(CHAT, BODY))[0] == 502
        assert len(upstream.bodies) == 1


# -- streams --------------------------------------------------------------------------------------


async def test_a_stream_is_relayed_and_stored_byte_for_byte(tmp_path: Path) -> None:
    pieces = (chunk("a"), b": ping\n\n", chunk("b"), chunk("", "stop"), DONE)
    async with against(streaming(*pieces), tmp_path) as (hone, _):
        status, body = await streamed(hone)
        assert status == 200
        assert body == b"".join(pieces).replace(b'"model": "real"', b'"model":"gpt"').replace(
            b'{"id": "x", "object": "chat.completion.chunk", "created": 1, ',
            b'{"id":"x","object":"chat.completion.chunk","created":1,',
        ).replace(b', "choices": [', b',"choices":[')
        (raw,) = hone.raw_calls()
        assert raw.response == b"".join(pieces)
        assert raw.stream
        assert raw.first_byte_at is not None


async def test_chunks_are_relayed_at_once(tmp_path: Path) -> None:
    go = asyncio.Event()

    async def wait(response: web.StreamResponse) -> None:
        await go.wait()
        await response.write(chunk("", "stop") + DONE)

    async with (
        against(streaming(chunk("early"), then=wait), tmp_path) as (hone, _),
        hone.client.post(hone.url + CHAT, json=STREAM) as response,
    ):
        first = await asyncio.wait_for(response.content.readuntil(b"\n\n"), 5)
        assert b"early" in first
        assert hone.raw_calls() == []
        go.set()
        assert (await response.read()).endswith(DONE)


async def die(response: web.StreamResponse) -> None:
    transport = response._req.transport
    assert transport is not None
    transport.abort()


@pytest.mark.parametrize(
    "handler",
    [
        streaming(chunk("a"), then=die),
        streaming(chunk("a")),  # ends without saying so
        streaming(chunk("a"), b'data: {"error": {"message": "engine died"}}\n\n', DONE, pause_s=0.05),
        streaming(chunk("a"), b"data: {garbage\n\n", DONE, pause_s=0.05),
    ],
)
async def test_a_stream_that_breaks_ends_in_an_error_chunk_and_never_in_done(
    tmp_path: Path, handler: Handler
) -> None:
    async with against(handler, tmp_path) as (hone, _):
        status, body = await streamed(hone)
        assert status == 200
        *_, last = body.strip().split(b"\n\n")
        assert json.loads(last.removeprefix(b"data: "))["error"]["code"] == "upstream_error"
        assert b"[DONE]" not in body
        assert b'"content": "a"' in body
        (raw,) = hone.raw_calls()
        assert raw.error
        assert raw.response.startswith(chunk("a"))


async def test_a_stream_that_breaks_before_its_first_chunk_is_502(tmp_path: Path) -> None:
    broken = streaming(b'data: {"error": {"message": "no memory"}}\n\n', DONE)
    async with against(broken, tmp_path) as (hone, _):
        status, answer, _ = await hone.post(CHAT, STREAM)
        assert status == 502
        assert "no memory" in answer["error"]["message"]


# -- the end comes after the commit -----------------------------------------------------------------


async def test_a_stream_shows_its_end_only_when_the_call_is_durable(tmp_path: Path) -> None:
    pieces = (chunk("a"), chunk("b"), chunk("", "stop"), DONE)
    async with against(streaming(*pieces), tmp_path) as (hone, _):
        with locked(tmp_path) as unlock:
            async with hone.client.post(hone.url + CHAT, json=STREAM) as response:
                seen = await response.content.readuntil(b"\n\n")
                seen += await response.content.readuntil(b"\n\n")
                with pytest.raises(TimeoutError):
                    seen += await asyncio.wait_for(response.content.readany(), 0.5)
                assert b'"content": "b"' in seen
                assert b"stop" not in seen
                assert hone.raw_calls() == []
                unlock()
                rest = await response.read()
        assert b'"stop"' in rest
        assert rest.endswith(DONE)
        assert len(hone.raw_calls()) == 1


async def test_a_whole_answer_shows_nothing_until_the_call_is_durable(tmp_path: Path) -> None:
    async with against(completion, tmp_path) as (hone, _):
        with locked(tmp_path) as unlock:
            asking = asyncio.create_task(hone.post(CHAT, BODY))
            await asyncio.sleep(0.5)
            assert not asking.done()
            unlock()
            assert (await asking)[0] == 200
        assert len(hone.raw_calls()) == 1


async def test_a_training_call_that_cannot_be_made_durable_is_refused(tmp_path: Path) -> None:
    handler = streaming(chunk("a"), chunk("", "stop"), DONE)
    async with against(completion, tmp_path, commit_timeout_s=0.3) as (hone, _):
        opened = await hone.opened(max_calls=2)
        path = f"/rollouts/{opened['id']}{CHAT}"
        with locked(tmp_path):
            status, answer, headers = await hone.post(path, BODY)
            assert (status, answer["error"]["code"]) == (503, "capture_failed")
            assert headers["x-should-retry"] == "true"
        # It became durable later, and its agent did not get it.
        await until(lambda: hone.store._rows("SELECT undelivered FROM calls") == [(1,)])
    root = tmp_path / "stream"
    root.mkdir()
    async with against(handler, root, commit_timeout_s=0.3) as (hone, _):
        opened = await hone.opened()
        with locked(root):
            status, body = await streamed(hone, f"/rollouts/{opened['id']}{CHAT}")
            assert status == 200
            assert b"capture_failed" in body
            assert b"[DONE]" not in body
            assert b'"stop"' not in body


async def test_an_observed_call_is_served_uncaptured_and_says_so(tmp_path: Path) -> None:
    async with against(completion, tmp_path, commit_timeout_s=0.3) as (hone, _):
        with locked(tmp_path):
            status, answer, headers = await hone.post(CHAT, BODY)
            assert (status, answer["choices"]) == (200, COMPLETION["choices"])
            assert headers["x-hone-captured"] == "false"
        text = hone.proxy.metrics.render().decode()
        assert "hone_uncaptured_calls_total 1.0" in text
        assert "hone_commit_failures_total 1.0" in text


# -- hang-ups -------------------------------------------------------------------------------------


async def test_a_hang_up_before_a_whole_answer_ends_the_upstream_and_is_stored(tmp_path: Path) -> None:
    async def think(request: web.Request) -> web.Response:
        await asyncio.sleep(60)
        raise AssertionError

    async with against(think, tmp_path) as (hone, upstream):
        with pytest.raises(TimeoutError):
            async with hone.client.post(hone.url + CHAT, json=BODY, timeout=aiohttp.ClientTimeout(total=0.3)):
                pass
        await until(lambda: upstream.cancelled == 1, 2)
        (raw,) = await hone.raw_calls_when(1)
        assert (raw.status, raw.response, raw.error) == (499, b"", None)
        assert hone.proxy.heads.in_flight() == {}


async def test_a_hang_up_in_a_stream_ends_the_upstream_and_is_stored(tmp_path: Path) -> None:
    async def forever(response: web.StreamResponse) -> None:
        for n in range(1000):
            await response.write(chunk(str(n)))
            await asyncio.sleep(0.02)

    async with against(streaming(then=forever), tmp_path) as (hone, upstream):
        async with hone.client.post(hone.url + CHAT, json=STREAM) as response:
            await response.content.readuntil(b"\n\n")
            response.close()
        await until(lambda: upstream.cancelled == 1, 2)
        (raw,) = await hone.raw_calls_when(1)
        assert raw.status == 499
        assert raw.response.startswith(chunk("0"))


async def test_a_hang_up_while_the_call_is_being_committed_leaves_it_undelivered(tmp_path: Path) -> None:
    async with against(completion, tmp_path) as (hone, _):
        with locked(tmp_path), pytest.raises(TimeoutError):
            async with hone.client.post(hone.url + CHAT, json=BODY, timeout=aiohttp.ClientTimeout(total=0.4)):
                pass
        (raw,) = await hone.raw_calls_when(1)
        assert raw.status == 200
        await until(lambda: hone.store._rows("SELECT undelivered FROM calls") == [(1,)])


# -- paths ----------------------------------------------------------------------------------------


async def test_health_ready_models_and_everything_else(tmp_path: Path) -> None:
    async with FakeUpstream(completion).listening() as upstream:
        routes = {"a": Route(url=upstream.url), "*": Route(to="a"), "p": Route(provider="x/y")}
        async with world(capture_settings(upstream.url, routes=routes), tmp_path) as hone:
            assert await hone.get("/health") == (200, {"status": "ok"})
            assert await hone.get("/ready") == (200, {"ready": True, "reasons": []})
            status, models = await hone.get("/v1/models")
            assert (status, [model["id"] for model in models["data"]]) == (200, ["a", "p"])
            status, answer, _ = await hone.post(CHAT, {**BODY, "model": "p"})
            assert (status, answer["error"]["code"]) == (501, "provider_not_supported")
            for path in ("/nothing", "/v1/chat/completions/render", "/v1/load_lora_adapter"):
                status, answer, _ = await hone.post(path, {})
                assert (status, answer["error"]["code"]) == (404, "not_found")
            hone.proxy.stopping = True
            status, ready = await hone.get("/ready")
            assert (status, ready["reasons"]) == (503, ["The proxy is stopping."])


async def test_calls_in_flight_are_recorded_under_a_live_lease(tmp_path: Path) -> None:
    go = asyncio.Event()

    async def wait(request: web.Request) -> web.Response:
        await go.wait()
        return web.json_response(COMPLETION)

    async with against(wait, tmp_path, in_flight_interval_s=0.05) as (hone, _):
        opened = await hone.opened()
        asking = asyncio.create_task(hone.post(f"/rollouts/{opened['id']}{CHAT}", BODY))
        rows = "SELECT rollouts FROM in_flight WHERE rollouts != '{}'"
        await until(lambda: bool(hone.store._rows(rows)), 3)
        assert json.loads(hone.store._rows(rows)[0][0]) == {opened["id"]: 1}
        assert hone.store.idle_rollouts(0.0) == []
        go.set()
        await asking
        await until(lambda: not hone.store._rows(rows), 3)
        assert [rollout.id for rollout in hone.store.idle_rollouts(0.0)] == [opened["id"]]

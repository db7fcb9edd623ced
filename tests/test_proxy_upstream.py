"""The HTTP client against servers that answer in every way."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

import pytest

from capture.errors import UpstreamError
from proxy.connection import BUFFER_BYTES_MAX, TooLong
from proxy.settings import Deadlines, Limits
from proxy.upstream import ConnectFailed, Dropped, TimedOut, Upstream

Answer = Callable[[asyncio.StreamWriter], Awaitable[None]]
OK = b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\nok"


class Server:
    """Reads requests and answers each with the next of `answers`, the last one again and again."""

    def __init__(self, *answers: bytes | Answer) -> None:
        self.answers = list(answers)
        self.connections = 0
        self.closed = 0
        self.requests: list[bytes] = []
        self.url = ""

    @asynccontextmanager
    async def listening(self) -> AsyncIterator["Server"]:
        server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        self.url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}/x"
        async with server:
            yield self

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        try:
            while True:
                head = await reader.readuntil(b"\r\n\r\n")
                length = int(head.partition(b"Content-Length: ")[2].partition(b"\r\n")[0] or b"0")
                self.requests.append(head + await reader.readexactly(length))
                answer = self.answers.pop(0) if len(self.answers) > 1 else self.answers[0]
                if isinstance(answer, bytes):
                    writer.write(answer)
                else:
                    await answer(writer)
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            self.closed += 1
            writer.close()


@asynccontextmanager
async def client(limits: Limits | None = None, **deadlines: Any) -> AsyncIterator[Upstream]:
    upstream = Upstream(Deadlines(**deadlines), limits or Limits())
    try:
        yield upstream
    finally:
        await upstream.close()


async def asked(upstream: Upstream, url: str) -> tuple[int, bytes]:
    reply = await upstream.post(url, b"{}", "sk")
    try:
        return reply.status, await reply.read()
    finally:
        reply.close()


async def close(writer: asyncio.StreamWriter) -> None:
    writer.close()


async def nothing(writer: asyncio.StreamWriter) -> None:
    await asyncio.sleep(60)


async def test_a_connection_is_used_again_after_a_whole_answer() -> None:
    chunked = b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n1\r\no\r\n1\r\nk\r\n0\r\n\r\n"
    early = b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 103 Early Hints\r\nlink: x\r\n\r\n" + OK
    async with Server(OK, chunked, early, OK).listening() as server, client() as upstream:
        for _ in range(4):
            assert await asked(upstream, server.url) == (200, b"ok")
        assert server.connections == 1
        assert await upstream.get(server.url, 1) == (200, b"ok")
        assert server.requests[0].endswith(b"\r\n\r\n{}")
        assert b"POST /x HTTP/1.1\r\n" in server.requests[0]
        assert b"Authorization: Bearer sk\r\n" in server.requests[0]
        assert b"Authorization" not in server.requests[-1]


@pytest.mark.parametrize(
    "answer",
    [
        b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\nconnection: close\r\n\r\nok",
        OK + b"more",
        b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n2\r\nok\r\n0\r\n\r\nmore",
    ],
)
async def test_what_cannot_be_trusted_is_not_used_again(answer: bytes) -> None:
    async with Server(answer).listening() as server, client() as upstream:
        for _ in range(2):
            assert await asked(upstream, server.url) == (200, b"ok")
        assert server.connections == 2


async def test_bytes_that_nobody_asked_for_close_an_idle_connection() -> None:
    async def late(writer: asyncio.StreamWriter) -> None:
        writer.write(OK)
        await writer.drain()
        await asyncio.sleep(0.1)
        writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: 4\r\n\r\nevil")

    async with Server(late, OK).listening() as server, client() as upstream:
        assert await asked(upstream, server.url) == (200, b"ok")
        await asyncio.sleep(0.3)
        assert await asked(upstream, server.url) == (200, b"ok")
        assert server.connections == 2


async def test_a_body_may_end_with_its_connection() -> None:
    async def until_closed(writer: asyncio.StreamWriter) -> None:
        writer.write(b"HTTP/1.0 200 OK\r\n\r\nab")
        await writer.drain()
        await asyncio.sleep(0.05)
        writer.write(b"cd")
        writer.close()

    async with Server(until_closed).listening() as server, client() as upstream:
        assert await asked(upstream, server.url) == (200, b"abcd")


@pytest.mark.parametrize(
    ("answer", "kind", "says"),
    [
        (close, Dropped, "closed the connection"),
        (b"garbage\r\n\r\n", UpstreamError, "not HTTP"),
        (b"HTTP/1.1 200 OK\r\nx: " + b"y" * 70_000, UpstreamError, "longer than 65536"),
        (b"HTTP/1.1 200 OK\r\ncontent-length: 101\r\n\r\n", TooLong, "longer than 100"),
        (b"HTTP/1.1 200 OK\r\n\r\n" + b"x" * 101, TooLong, "longer than 100"),
        (b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\nzz\r\n", UpstreamError, "size"),
        (nothing, TimedOut, "in time"),
    ],
)
async def test_every_failure_says_what_it_is(
    answer: bytes | Answer, kind: type[UpstreamError], says: str
) -> None:
    limits = Limits(response_bytes_max=100)
    async with Server(answer).listening() as server, client(limits, first_byte_s=0.3, idle_s=0.3) as upstream:
        with pytest.raises(kind, match=says):
            await asked(upstream, server.url)


async def test_an_answer_that_breaks_off_is_an_error_after_what_came() -> None:
    async def cut(writer: asyncio.StreamWriter) -> None:
        writer.write(b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n2\r\nok\r\n")
        await writer.drain()
        writer.close()

    async with Server(cut).listening() as server, client() as upstream:
        reply = await upstream.post(server.url, b"{}")
        chunks = aiter(reply.chunks())
        assert await anext(chunks) == b"ok"
        with pytest.raises(UpstreamError, match="broke off"):
            await anext(chunks)
        reply.close()
        with pytest.raises(UpstreamError, match="broke off"):
            await asked(upstream, server.url)


async def test_the_whole_answer_has_a_deadline_however_often_something_comes() -> None:
    async def drip(writer: asyncio.StreamWriter) -> None:
        writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: 100\r\n\r\n")
        for _ in range(100):
            writer.write(b"x")
            await writer.drain()
            await asyncio.sleep(0.05)

    async with (
        Server(drip).listening() as server,
        client(first_byte_s=1.0, idle_s=1.0, total_s=0.5) as upstream,
    ):
        with pytest.raises(TimedOut, match="too long"):
            await asked(upstream, server.url)


async def test_an_upstream_waits_while_nobody_takes_its_answer() -> None:
    sent = 0

    async def pour(writer: asyncio.StreamWriter) -> None:
        nonlocal sent
        writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n" % (40 << 20))
        for _ in range(40):
            writer.write(b"x" * (1 << 20))
            await writer.drain()
            sent += 1

    async with Server(pour).listening() as server, client(first_byte_s=0.4, idle_s=0.4) as upstream:
        reply = await upstream.post(server.url, b"{}")
        await asyncio.sleep(1.0)  # longer than the deadline: it is we who do not read
        assert sent < 40
        assert reply._connection._waiting_bytes < BUFFER_BYTES_MAX + (1 << 20)
        assert sum([len(data) async for data in reply.chunks()]) == 40 << 20
        reply.close()


async def test_who_gives_up_cuts_the_upstream() -> None:
    partial = b"HTTP/1.1 200 OK\r\ncontent-length: 9\r\n\r\nab"
    async with Server(nothing, partial, nothing).listening() as server, client() as upstream:
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(asked(upstream, server.url), 0.2)
        reply = await upstream.post(server.url, b"{}")
        reply.close()
        reply.close()
        with pytest.raises(TimedOut):
            await upstream.get(server.url, 0.2)
        await upstream.close()
        assert server.connections == 3


async def test_closing_ends_what_is_waited_for() -> None:
    async with Server(nothing).listening() as server, client() as upstream:
        waiting = asyncio.create_task(asked(upstream, server.url))
        await asyncio.sleep(0.1)
        await upstream.close()
        with pytest.raises(UpstreamError, match="was cut"):
            await asyncio.wait_for(waiting, 2)
        with pytest.raises(UpstreamError, match="stops"):
            await asked(upstream, server.url)


async def test_no_more_connections_than_allowed_are_in_use() -> None:
    limits = Limits(connections_max=1)
    async with Server(OK).listening() as server, client(limits, total_s=0.3) as upstream:
        reply = await upstream.post(server.url, b"{}")
        with pytest.raises(TimedOut, match="every connection is in use"):
            await asked(upstream, server.url)
        waiting = asyncio.create_task(asked(upstream, server.url))
        await asyncio.sleep(0.05)
        await reply.read()
        reply.close()
        assert await waiting == (200, b"ok")
        assert server.connections == 1


async def test_nobody_there_and_no_url() -> None:
    async with client() as upstream:
        with pytest.raises(ConnectFailed, match="cannot be reached"):
            await asked(upstream, "http://127.0.0.1:9/")
        with pytest.raises(ConnectFailed, match="cannot be reached"):
            await asked(upstream, "http://no-such-host.invalid/")
        with pytest.raises(UpstreamError, match="control characters"):
            await upstream.post("http://127.0.0.1:9/", b"", "a\r\nHost: b")

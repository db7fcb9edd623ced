"""The only HTTP client: pooled, with deadlines and limits; every failure is an `UpstreamError`."""

import asyncio
import random
from collections.abc import AsyncIterator

from capture.errors import UpstreamError
from proxy.connection import Connection, Dropped, TimedOut, Within
from proxy.pool import ConnectFailed, Pool, Target, target
from proxy.settings import Deadlines, Limits
from proxy.wire import Head

__all__ = ["ConnectFailed", "Dropped", "Reply", "TimedOut", "Upstream"]


class Reply:
    """An upstream's answer whose head has arrived. Whoever got it must `close` it."""

    __slots__ = ("_connection", "_pool", "headers", "status")

    def __init__(self, pool: Pool, connection: Connection, head: Head) -> None:
        self._pool = pool
        self._connection = connection
        self.status = head.status
        self.headers = head.headers  # names in lower case

    @property
    def is_stream(self) -> bool:
        """Server-sent chunks follow."""
        return self.headers.get("content-type", "").partition(";")[0].strip().lower() == "text/event-stream"

    async def read(self) -> bytes:
        """The whole body. `UpstreamError` if it breaks off or is over the limit."""
        return await self._connection.read()

    async def chunks(self) -> AsyncIterator[bytes]:
        """The body as it arrives. `UpstreamError` if it breaks off or is over the limit."""
        while data := await self._connection.take():
            yield data

    def close(self) -> None:
        """Give the connection back if the body has come, else cut it: the upstream stops generating."""
        self._pool.release(self._connection)


class Upstream:
    """One pooled client for engines and other upstreams."""

    def __init__(self, deadlines: Deadlines, limits: Limits) -> None:
        self._deadlines = deadlines
        self._limit = limits.response_bytes_max
        self._pool = Pool(limits.connections_max, deadlines.connect_s)
        self._within = Within(
            first_byte_s=deadlines.read_s,
            idle_s=deadlines.read_s,
            total_s=deadlines.total_s,
            bytes_max=self._limit,
        )

    async def close(self) -> None:
        """Close every connection."""
        self._pool.close()

    async def post(self, url: str, body: bytes, key: str | None = None) -> Reply:
        """Send JSON and wait for the answer's head.

        Sent again, at most `deadlines.retries` times, only if a reused connection proved dead before
        any byte of an answer. Raises `ConnectFailed` or another `UpstreamError`.
        """
        to = target(url)
        request = _request("POST", to, body, key)
        for attempt in range(self._deadlines.retries + 1):
            try:
                return await self._send(to, request, self._within)
            except Dropped as dropped:
                if not dropped.reused or attempt == self._deadlines.retries:
                    raise
            await asyncio.sleep(random.uniform(0, self._deadlines.retry_jitter_s))
        raise AssertionError("unreachable")

    async def get(self, url: str, timeout_s: float) -> tuple[int, bytes]:
        """Status and body of a GET within `timeout_s`; `UpstreamError`."""
        return await self._whole("GET", url, None, timeout_s)

    async def ask(self, url: str, body: bytes, timeout_s: float) -> tuple[int, bytes]:
        """Status and body of a POST of JSON within `timeout_s`, never sent twice; `UpstreamError`."""
        return await self._whole("POST", url, body, timeout_s)

    async def _send(self, to: Target, request: bytes, within: Within) -> Reply:
        connection = await self._pool.send(to, request, within)
        try:
            return Reply(self._pool, connection, await connection.head())
        except BaseException:
            self._pool.release(connection)
            raise

    async def _whole(self, method: str, url: str, body: bytes | None, timeout_s: float) -> tuple[int, bytes]:
        to = target(url)
        within = Within(first_byte_s=timeout_s, idle_s=timeout_s, total_s=timeout_s, bytes_max=self._limit)
        try:
            async with asyncio.timeout(timeout_s):
                reply = await self._send(to, _request(method, to, body, None), within)
                try:
                    return reply.status, await reply.read()
                finally:
                    reply.close()
        except TimeoutError:
            raise TimedOut("the upstream did not answer in time") from None


def _request(method: str, to: Target, body: bytes | None, key: str | None) -> bytes:
    """A request from its first byte to its last."""
    head = f"{method} {to.path} HTTP/1.1\r\nHost: {to.host}\r\nAccept: */*\r\nAccept-Encoding: identity\r\n"
    if key is not None:
        if any(char < " " for char in key):
            raise UpstreamError("the upstream's key has control characters in it")
        head += f"Authorization: Bearer {key}\r\n"
    if body is None:
        return f"{head}\r\n".encode()
    head += f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
    return head.encode("utf-8", "surrogateescape") + body

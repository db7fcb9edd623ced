"""The only HTTP client: pooled, with deadlines and limits; every failure is an `UpstreamError`."""

import asyncio
from collections.abc import AsyncIterator
from urllib.parse import urlsplit, urlunsplit

import msgspec

from capture.errors import UpstreamError
from proxy.connection import Connection, Dropped, TimedOut, TooLong, Within
from proxy.pool import ConnectFailed, Pool, Target, target
from proxy.settings import Deadlines, Limits
from proxy.wire import Head

__all__ = ["ConnectFailed", "Dropped", "Reply", "TimedOut", "TooLong", "Upstream", "without_secrets"]


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


def without_secrets(url: str) -> str:
    """A URL as it may be shown: without user, password and query."""
    parts = urlsplit(url)
    return urlunsplit((parts.scheme, parts.netloc.rpartition("@")[2], parts.path, "", ""))


class Upstream:
    """One pooled client for engines and other upstreams."""

    def __init__(self, deadlines: Deadlines, limits: Limits) -> None:
        self._limit = limits.response_bytes_max
        self._pool = Pool(limits.connections_max, deadlines.connect_s)
        self._within = Within(
            first_byte_s=deadlines.first_byte_s,
            idle_s=deadlines.idle_s,
            total_s=deadlines.total_s,
            bytes_max=self._limit,
        )

    async def close(self) -> None:
        """Close every connection."""
        self._pool.close()

    async def post(
        self, url: str, body: bytes, key: str | None = None, *, left_s: float | None = None
    ) -> Reply:
        """Send JSON and wait for the answer's head; `left_s` until its last byte, where that is less than
        `deadlines.total_s`. Raises `ConnectFailed`, `Dropped` or another `UpstreamError`.
        """
        to = target(url)
        within = self._within
        if left_s is not None:
            within = msgspec.structs.replace(within, total_s=max(left_s, 0.001))
        return await self._send(to, _request("POST", to, body, key), within)

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

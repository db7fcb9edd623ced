"""Connections to upstreams, kept for a moment after an exchange.

An idle one is forgotten after 2 s: uvicorn, vLLM's server, closes it after 5 s, and a request on a
connection that is just being closed fails.
"""

import asyncio
import ssl
from collections import deque
from functools import lru_cache
from urllib.parse import urlsplit

import msgspec

from capture.errors import UpstreamError
from proxy.connection import Connection, TimedOut, Within

KEEPALIVE_S = 2.0
_TARGETS_MAX = 256


class ConnectFailed(UpstreamError):
    """No connection came to stand: the upstream has seen nothing of the request."""


class Target(msgspec.Struct, frozen=True):
    """A URL taken apart."""

    origin: tuple[str, int, bool]  # host, port, whether over TLS
    host: str  # as the Host header has it
    path: str  # with the query


@lru_cache(_TARGETS_MAX)
def target(url: str) -> Target:
    """`UpstreamError` for what is no http or https URL."""
    try:
        parts = urlsplit(url)
        secure = {"http": False, "https": True}[parts.scheme]
        port = parts.port or (443 if secure else 80)
    except (KeyError, ValueError):
        raise UpstreamError(f"{url[:200]!r} is not the URL of an upstream") from None
    path = (parts.path or "/") + (f"?{parts.query}" if parts.query else "")
    host = parts.netloc.rpartition("@")[2]
    if not parts.hostname or not f"{host}{path}".isascii() or any(map(str.isspace, url)):
        raise UpstreamError(f"{url[:200]!r} is not the URL of an upstream")
    return Target((parts.hostname, port, secure), host, path)


class Pool:
    """Idle connections by origin, the most recently used taken first; at most `size` in use at a time."""

    def __init__(self, size: int, connect_s: float) -> None:
        self._slots = asyncio.Semaphore(size)
        self._connect_s = connect_s
        self._idle: dict[tuple[str, int, bool], deque[Connection]] = {}
        self._used: dict[Connection, tuple[str, int, bool]] = {}
        self._tls: ssl.SSLContext | None = None
        self._sweeper: asyncio.TimerHandle | None = None
        self._closed = False

    async def send(self, to: Target, request: bytes, within: Within) -> Connection:
        """A connection on which the request was sent; give it back with `release`. `UpstreamError`."""
        if self._closed:
            raise UpstreamError("the proxy stops")
        if self._slots.locked():
            await self._wait(within.total_s)
        else:
            await self._slots.acquire()
        try:
            connection = self._take(to.origin)
            reused = connection is not None
            if connection is None:
                connection = await self._connect(to.origin)
        except BaseException:
            self._slots.release()
            raise
        self._used[connection] = to.origin
        connection.send(request, within, reused=reused)
        return connection

    def release(self, connection: Connection) -> None:
        """Keep it if its answer came whole, else cut it: the upstream stops generating. Idempotent."""
        origin = self._used.pop(connection, None)
        if origin is None:
            return
        self._slots.release()
        if self._closed or not connection.is_reusable:
            connection.abort()
            return
        connection.rest()
        self._idle.setdefault(origin, deque()).append(connection)
        if self._sweeper is None:
            self._sweeper = asyncio.get_running_loop().call_later(KEEPALIVE_S, self._sweep)

    def close(self) -> None:
        """Cut every connection."""
        self._closed = True
        if self._sweeper is not None:
            self._sweeper.cancel()
        for idle in self._idle.values():
            for connection in idle:
                connection.abort()
        for connection in list(self._used):
            self.release(connection)

    async def _wait(self, seconds: float) -> None:
        try:
            async with asyncio.timeout(seconds):
                await self._slots.acquire()
        except TimeoutError:
            raise TimedOut("the upstream did not answer in time: every connection is in use") from None

    def _take(self, origin: tuple[str, int, bool]) -> Connection | None:
        idle = self._idle.get(origin)
        oldest = asyncio.get_running_loop().time() - KEEPALIVE_S
        while idle:
            connection = idle.pop()
            if connection.is_open and connection.idle_since > oldest:
                return connection
            connection.abort()
        return None

    async def _connect(self, origin: tuple[str, int, bool]) -> Connection:
        host, port, secure = origin
        if secure and self._tls is None:
            self._tls = ssl.create_default_context()
        loop = asyncio.get_running_loop()
        try:
            async with asyncio.timeout(self._connect_s):
                _, connection = await loop.create_connection(
                    lambda: Connection(loop), host, port, ssl=self._tls if secure else None
                )
        except TimeoutError:
            raise ConnectFailed(f"the upstream cannot be reached: {host}:{port} does not answer") from None
        except (OSError, UnicodeError) as error:
            raise ConnectFailed(f"the upstream cannot be reached: {error}") from error
        return connection

    def _sweep(self) -> None:
        """Forget what was idle for too long."""
        loop = asyncio.get_running_loop()
        oldest = loop.time() - KEEPALIVE_S
        for idle in self._idle.values():
            while idle and not (idle[0].is_open and idle[0].idle_since > oldest):
                idle.popleft().abort()
        left = any(self._idle.values())
        self._sweeper = loop.call_later(KEEPALIVE_S, self._sweep) if left else None

"""The only HTTP client: pooled, with deadlines and limits; every failure becomes `UpstreamError` here.

The pool forgets an idle connection after 2 s: uvicorn, vLLM's server, closes it after 5 s, and a
request on a connection that is just being closed fails.
"""

from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any
from urllib.parse import urlsplit, urlunsplit

import aiohttp

from capture.errors import UpstreamError
from proxy.settings import Deadlines, Limits

KEEPALIVE_S = 2.0


class ConnectFailed(UpstreamError):
    """No connection came to stand: the upstream has seen nothing of the request."""


class TimedOut(UpstreamError):
    """A deadline passed."""


class Dropped(UpstreamError):
    """The connection closed before any byte of an answer. A `reused` one had been idle, and was dead."""

    reused = False


class TooLong(UpstreamError):
    """The answer is longer than is allowed here."""


class Reply:
    """An upstream's answer whose head has arrived. Whoever got it must `close` it."""

    def __init__(self, response: aiohttp.ClientResponse, limit: int, idle_s: float) -> None:
        if response.connection is not None and (protocol := response.connection.protocol) is not None:
            protocol.read_timeout = idle_s  # until here it was that of the first byte
            protocol.start_timeout()
        self._response = response
        self._limit = limit
        self.status = response.status
        self.headers = response.headers

    @property
    def is_stream(self) -> bool:
        """Server-sent chunks follow."""
        return self._response.content_type == "text/event-stream"

    async def read(self) -> bytes:
        """The whole body. `UpstreamError` if it breaks off or is over the limit."""
        with translated():
            if self._response.content_length is not None and self._response.content_length <= self._limit:
                return await self._response.read()
        return b"".join([data async for data in self.chunks()])

    async def chunks(self) -> AsyncIterator[bytes]:
        """The body as it arrives. `UpstreamError` if it breaks off or is over the limit."""
        size = 0
        with translated():
            async for data in self._response.content.iter_any():
                size += len(data)
                if size > self._limit:
                    raise TooLong(f"the upstream's answer is longer than {self._limit} bytes")
                yield data

    def close(self) -> None:
        """Give the connection back if the body was read, else cut it: the upstream stops generating."""
        self._response.close() if not self._response.content.at_eof() else self._response.release()


def without_secrets(url: str) -> str:
    """A URL as it may be shown: without user, password and query."""
    parts = urlsplit(url)
    return urlunsplit((parts.scheme, parts.netloc.rpartition("@")[2], parts.path, "", ""))


class Upstream:
    """One pooled client for engines and other upstreams."""

    def __init__(self, deadlines: Deadlines, limits: Limits) -> None:
        self._deadlines = deadlines
        self._limit = limits.response_bytes_max
        self._timeout = aiohttp.ClientTimeout(
            total=deadlines.total_s, sock_connect=deadlines.connect_s, sock_read=deadlines.first_byte_s
        )
        trace = aiohttp.TraceConfig()
        trace.on_connection_reuseconn.append(_note_reuse)
        self._session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=limits.connections_max, keepalive_timeout=KEEPALIVE_S),
            timeout=self._timeout,
            headers={"Accept-Encoding": "identity"},
            cookie_jar=aiohttp.DummyCookieJar(),
            trace_configs=[trace],
            auto_decompress=True,
        )

    async def close(self) -> None:
        """Close every connection."""
        await self._session.close()

    async def post(
        self, url: str, body: bytes, key: str | None = None, *, left_s: float | None = None
    ) -> Reply:
        """Send JSON and wait for the answer's head; `left_s` until its last byte, where that is less than
        `deadlines.total_s`. Raises `ConnectFailed`, `Dropped` or another `UpstreamError`.
        """
        headers = {"Content-Type": "application/json"}
        if key is not None:
            headers["Authorization"] = f"Bearer {key}"
        timeout = self._timeout if left_s is None else self._within(left_s)
        note = SimpleNamespace(reused=False)
        try:
            with translated():
                response = await self._session.post(
                    url,
                    data=body,
                    headers=headers,
                    allow_redirects=False,
                    trace_request_ctx=note,
                    timeout=timeout,
                )
        except Dropped as dropped:
            dropped.reused = note.reused
            raise
        return Reply(response, self._limit, self._deadlines.idle_s)

    async def get(self, url: str, timeout_s: float) -> tuple[int, bytes]:
        """Status and body of a GET within `timeout_s`; `UpstreamError`."""
        return await self._whole("GET", url, None, timeout_s)

    async def ask(self, url: str, body: bytes, timeout_s: float) -> tuple[int, bytes]:
        """Status and body of a POST of JSON within `timeout_s`, never sent twice; `UpstreamError`."""
        return await self._whole("POST", url, body, timeout_s)

    def _within(self, left_s: float) -> aiohttp.ClientTimeout:
        deadlines = self._deadlines
        return aiohttp.ClientTimeout(
            total=max(left_s, 0.001), sock_connect=deadlines.connect_s, sock_read=deadlines.first_byte_s
        )

    async def _whole(self, method: str, url: str, body: bytes | None, timeout_s: float) -> tuple[int, bytes]:
        with translated():
            async with self._session.request(
                method,
                url,
                data=body,
                headers={"Content-Type": "application/json"} if body is not None else None,
                timeout=aiohttp.ClientTimeout(total=timeout_s),
                allow_redirects=False,
            ) as response:
                return response.status, await Reply(response, self._limit, timeout_s).read()


@contextmanager
def translated() -> Iterator[None]:
    """The one place where aiohttp's errors become Hone's."""
    try:
        yield
    except (aiohttp.ClientConnectorError, aiohttp.ConnectionTimeoutError) as error:
        raise ConnectFailed(f"the upstream cannot be reached: {error}") from error
    except aiohttp.SocketTimeoutError as error:
        raise TimedOut("the upstream did not answer in time: nothing came from it for too long") from error
    except TimeoutError as error:
        raise TimedOut("the upstream did not answer in time: its whole answer took too long") from error
    except (aiohttp.ServerDisconnectedError, aiohttp.ClientOSError) as error:
        raise Dropped(f"the upstream closed the connection: {error}") from error
    except (aiohttp.ClientError, ValueError) as error:
        raise UpstreamError(f"the upstream's answer broke off or is garbage: {error}") from error


async def _note_reuse(session: aiohttp.ClientSession, context: Any, params: Any) -> None:
    if context.trace_request_ctx is not None:
        context.trace_request_ctx.reused = True

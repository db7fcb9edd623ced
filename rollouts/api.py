"""The proxy's rollouts API, as the runner uses it: open, finish, and whether the proxy is there."""

import asyncio
import contextlib
import logging
import time
from collections import deque
from collections.abc import AsyncIterator, Mapping
from typing import Any

import aiohttp
import msgspec

from capture.errors import Conflict, HoneError, UpstreamError
from capture.types import FinishStatus, Mode
from rollouts.metrics import Metrics
from rollouts.settings import Settings

log = logging.getLogger(__name__)

RETRY_FIRST_S = 0.1
RETRY_MAX_S = 2.0
PULSE_S = 0.5  # between two looks at the proxy's health
PULSE_TIMEOUT_S = 2.0
FAILURES_KEPT = 1000
ANSWER_BYTES_MAX = 1 << 20


class Refused(HoneError):
    """The proxy understood and will not: a wrong key, a malformed request."""


class Request(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Body of `POST /rollouts`."""

    id: str
    mode: Mode
    scenario_id: str
    scenario: dict[str, Any]
    max_calls: int
    attempt: int = 0
    replaces: str | None = None
    run_id: str | None = None
    group_id: str | None = None
    group_size: int | None = None
    policy_version: int | None = None
    metadata: dict[str, Any] | None = None


class Opened(msgspec.Struct, frozen=True):
    """Answer to it: what the agent needs."""

    id: str
    base_url: str
    api_key: str
    policy_version: int | None = None


class ProxyApi:
    """One session to one proxy. Use as `async with connected(...) as api`."""

    def __init__(
        self, session: aiohttp.ClientSession, url: str, key: str | None, settings: Settings, metrics: Metrics
    ) -> None:
        self._session = session
        self._url = url.rstrip("/")
        self._headers = {"content-type": "application/json"}
        if key:
            self._headers["authorization"] = f"Bearer {key}"
        self._settings = settings
        self._metrics = metrics
        self._failures: deque[float] = deque(maxlen=FAILURES_KEPT)  # monotonic times

    async def open(self, request: Request) -> Opened:
        """Open a rollout. `Conflict` where its id exists or its group is closed; `Refused`;
        `UpstreamError` when the proxy gives no answer for `proxy_wait_s`."""
        body = await self._post("/rollouts", msgspec.json.encode(request))
        return msgspec.json.decode(body, type=Opened)

    async def finish(
        self, rollout_id: str, status: FinishStatus, metrics: Mapping[str, float], stdout: str
    ) -> None:
        """Seal a rollout. `Conflict` where it was sealed otherwise; `Refused`; `UpstreamError`."""
        body = {"status": status, "metrics": metrics, "stdout": stdout}
        await self._post(f"/rollouts/{rollout_id}/finish", msgspec.json.encode(body))

    def broken_since(self, begun: float) -> bool:
        """Whether the proxy failed to answer us at some moment after `begun` (monotonic)."""
        return bool(self._failures) and self._failures[-1] >= begun

    async def watch(self) -> None:
        """Look at the proxy's health until cancelled, so that `broken_since` knows every outage."""
        timeout = aiohttp.ClientTimeout(total=PULSE_TIMEOUT_S)
        while True:
            with contextlib.suppress(UpstreamError):
                await self._once("GET", "/health", None, timeout)
            await asyncio.sleep(PULSE_S)

    async def _post(self, path: str, body: bytes) -> bytes:
        deadline = time.monotonic() + self._settings.proxy_wait_s
        timeout = aiohttp.ClientTimeout(total=self._settings.request_timeout_s)
        wait = RETRY_FIRST_S
        while True:
            try:
                return await self._once("POST", path, body, timeout)
            except UpstreamError:
                if time.monotonic() + wait > deadline:
                    raise
            await asyncio.sleep(wait)
            wait = min(RETRY_MAX_S, 2 * wait)

    async def _once(
        self, method: str, path: str, body: bytes | None, timeout: aiohttp.ClientTimeout
    ) -> bytes:
        """One request; every foreign error becomes one of ours here, and a broken one is remembered."""
        try:
            async with self._session.request(
                method, self._url + path, data=body, headers=self._headers, timeout=timeout
            ) as response:
                answer = await response.content.read(ANSWER_BYTES_MAX)
                status = response.status
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            raise self._broken(f"{method} {path}: {type(error).__name__}: {error}") from error
        if status >= 500 or status == 429:
            raise self._broken(f"{method} {path}: {status} {answer[:200]!r}")
        if status == 409:
            raise Conflict(f"{method} {path}: {_message(answer)}")
        if status >= 400:
            raise Refused(f"{method} {path}: {status} {_message(answer)}")
        return answer

    def _broken(self, what: str) -> UpstreamError:
        self._failures.append(time.monotonic())
        self._metrics.proxy_failures.inc()
        log.warning("proxy: %s", what)
        return UpstreamError(f"proxy: {what}")


@contextlib.asynccontextmanager
async def connected(
    url: str, key: str | None, settings: Settings, metrics: Metrics
) -> AsyncIterator[ProxyApi]:
    """A session to the proxy, watched, closed in the end."""
    connector = aiohttp.TCPConnector(limit=settings.concurrency, keepalive_timeout=3)
    async with aiohttp.ClientSession(connector=connector) as session:
        api = ProxyApi(session, url, key, settings, metrics)
        pulse = asyncio.create_task(api.watch())
        try:
            yield api
        finally:
            pulse.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await pulse


def _message(answer: bytes) -> str:
    """The sentence in an error body, or the body itself."""
    try:
        return str(msgspec.json.decode(answer)["error"]["message"])
    except (msgspec.DecodeError, KeyError, TypeError):
        return repr(answer[:200])

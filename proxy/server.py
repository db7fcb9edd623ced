"""The HTTP server: aiohttp's low-level one, and which method and path leads to which handler.

Matched is the raw path, by one look-up: no name in it is ever percent-encoded.
"""

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

from aiohttp import web

from proxy.refusal import error_body

_ROLLOUTS = "/rollouts/"
_ANY_ROLLOUT = "/rollouts/{rollout_id}"


class Request(web.BaseRequest):
    """A request, and the rollout that its path names."""

    rollout_id: str = ""  # empty: none


Handler = Callable[[Request], Awaitable[web.StreamResponse]]


class Paths:
    """Handlers by method and path; `{rollout_id}` may stand behind `/rollouts/`."""

    def __init__(self) -> None:
        self._handlers: dict[tuple[str, str], Handler] = {}

    def add(self, method: str, path: str, handler: Handler) -> None:
        """Calls of this method and path go to the handler; those of HEAD to that of GET."""
        self._handlers[method, path] = handler
        if method == "GET":
            self._handlers["HEAD", path] = handler

    async def handle(self, request: Request) -> web.StreamResponse:
        """Answer it; 404 for every path that was not added."""
        path = request.raw_path.partition("?")[0]
        handler = self._handlers.get((request.method, path))
        if handler is None and path.startswith(_ROLLOUTS):
            rollout_id, slash, rest = path[len(_ROLLOUTS) :].partition("/")
            if rollout_id:
                request.rollout_id = rollout_id
                handler = self._handlers.get((request.method, _ANY_ROLLOUT + slash + rest))
        if handler is None:
            text = f"There is no {request.method} {path[:200]} here."
            body = error_body(404, "not_found", text)
            return web.Response(status=404, body=body, content_type="application/json")
        if "Expect" in request.headers:
            await _go_on(request)
        return await handler(request)


def server(handler: Handler, body_bytes_max: int) -> web.Server:
    """A server of these requests; a client that hangs up cancels its handler."""
    loop = asyncio.get_running_loop()

    def request(message: Any, payload: Any, protocol: Any, writer: Any, task: Any) -> Request:
        return Request(message, payload, protocol, writer, task, loop, client_max_size=body_bytes_max)

    async def handle(given: web.BaseRequest) -> web.StreamResponse:
        assert isinstance(given, Request)
        return await handler(given)

    return web.Server(handle, request_factory=request, handler_cancellation=True, access_log=None)


async def _go_on(request: Request) -> None:
    """Tell a client that asks first to send its body."""
    if request.headers["Expect"].lower() == "100-continue":
        await request.writer.write(b"HTTP/1.1 100 Continue\r\n\r\n")
        request.writer.output_size = 0

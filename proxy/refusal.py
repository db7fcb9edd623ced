"""Every error that the proxy answers with, in the one shape of the wire."""

import math

import msgspec
from aiohttp import web

from capture.errors import HoneError

_TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    409: "conflict_error",
    413: "invalid_request_error",
    429: "rate_limit_error",
}


class Refused(HoneError):
    """A request that gets an error answer: status, a stable `code`, a sentence for a person.

    `retry` sets `x-should-retry`, which OpenAI's SDKs obey; None leaves it to the status. `retry_after_s`
    sets `retry-after` and `retry-after-ms`.
    """

    def __init__(
        self,
        status: int,
        code: str,
        message: str,
        *,
        param: str | None = None,
        retry: bool | None = None,
        retry_after_s: float | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.code = code
        self.message = message
        self.param = param
        self.retry = retry
        self.retry_after_s = retry_after_s

    def body(self) -> bytes:
        """The JSON body."""
        return error_body(self.status, self.code, self.message, self.param)

    def response(self, headers: dict[str, str] | None = None) -> web.Response:
        """The whole answer."""
        headers = dict(headers or {})
        if self.retry is not None:
            headers["x-should-retry"] = "true" if self.retry else "false"
        if self.retry_after_s is not None:
            headers["retry-after"] = str(max(1, math.ceil(self.retry_after_s)))
            headers["retry-after-ms"] = str(max(1, math.ceil(self.retry_after_s * 1000)))
        return web.Response(
            status=self.status, body=self.body(), content_type="application/json", headers=headers
        )


def error_body(status: int, code: str, message: str, param: str | None = None) -> bytes:
    """`{"error": {message, type, param, code}}`; `type` follows from the status."""
    kind = _TYPES.get(status, "invalid_request_error" if status < 500 else "server_error")
    return msgspec.json.encode({"error": {"message": message, "type": kind, "param": param, "code": code}})


def error_chunk(code: str, message: str) -> bytes:
    """A server-sent chunk that tells a client mid-stream that the answer is broken."""
    return b"data: " + error_body(502, code, message) + b"\n\n"

"""One POST with a deadline that holds, whatever the server does. Standard library alone."""

from __future__ import annotations

import http.client
import socket
import threading
from urllib.parse import urlsplit

ANSWER_BYTES_MAX = 4 << 20
EXCERPT = 300


class Unanswered(Exception):
    """No whole answer came: refused, cut off, too late, no HTTP."""


class Refusal(Exception):
    """A status other than 200."""

    def __init__(self, url: str, status: int, body: bytes) -> None:
        super().__init__(f"{url} answered {status}: {body[:EXCERPT].decode(errors='replace')}")
        self.passes = status in (408, 409, 429) or status >= 500


def post(url: str, body: bytes, headers: dict[str, str], timeout_s: float) -> tuple[dict[str, str], bytes]:
    """The answer's headers (names in lower case) and body. `ValueError` for a URL that is not HTTP,
    `Unanswered`, `Refusal`.

    The deadline is for all of it: a server that sends one byte now and then meets it too.
    """
    parts = urlsplit(url)
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise ValueError(f"{url!r} is not a URL like http://host:8000/v1")
    kind = http.client.HTTPSConnection if parts.scheme == "https" else http.client.HTTPConnection
    connection = kind(parts.hostname, parts.port, timeout=timeout_s)
    path = (parts.path or "/") + (f"?{parts.query}" if parts.query else "")
    late = threading.Event()

    def cut() -> None:
        late.set()
        if (held := opened or connection.sock) is not None:  # without `opened` it still shakes hands
            _shut(held)

    opened: socket.socket | None = None
    timer = threading.Timer(timeout_s, cut)
    timer.daemon = True
    timer.start()
    try:
        connection.connect()
        opened = connection.sock
        if late.is_set():
            raise TimeoutError
        connection.request("POST", path, body, {"Content-Type": "application/json", **headers})
        response = connection.getresponse()
        answer = response.read(ANSWER_BYTES_MAX + 1)
    except (OSError, http.client.HTTPException) as error:
        what = (
            f"nothing whole within {timeout_s:.1f} s" if late.is_set() else f"{type(error).__name__}: {error}"
        )
        raise Unanswered(f"{url}: {what}") from error
    finally:
        timer.cancel()
        connection.close()
    if late.is_set():  # what was cut off may look like an end
        raise Unanswered(f"{url}: nothing whole within {timeout_s:.1f} s")
    if len(answer) > ANSWER_BYTES_MAX:
        raise Unanswered(f"{url}: the answer is longer than {ANSWER_BYTES_MAX} bytes")
    if response.status != 200:
        raise Refusal(url, response.status, answer)
    return {name.lower(): value for name, value in response.getheaders()}, answer


def _shut(opened: socket.socket) -> None:
    try:
        opened.shutdown(socket.SHUT_RDWR)
    except OSError:  # it is closed already
        return

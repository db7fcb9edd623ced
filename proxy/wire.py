"""HTTP/1.1 answers as bytes: their heads, and where their bodies end. Pure."""

from typing import Final

import msgspec

from capture.errors import UpstreamError

HEAD_BYTES_MAX: Final = 64 << 10
LINE_BYTES_MAX: Final = 4096  # of a chunk's size with its extensions, or of a trailer
_HEX = b"0123456789abcdefABCDEF"
_BODILESS = (204, 304)


class Head(msgspec.Struct, frozen=True):
    """Status and headers of an answer; names in lower case, the last of several with one name counts."""

    status: int
    headers: dict[str, str]
    length: int | None  # of the body; None: it says itself where it ends
    chunked: bool
    keep: bool  # the connection is good for another request


def read_head(head: bytes) -> Head:
    """The head up to its blank line. `UpstreamError` if it is none, or ends its body in two ways."""
    first, *lines = head.split(b"\r\n")
    version, _, rest = first.partition(b" ")
    status = rest[:3]
    if version not in (b"HTTP/1.1", b"HTTP/1.0") or not status.isdigit() or rest[3:4] not in (b"", b" "):
        raise UpstreamError(f"the upstream's answer is not HTTP: {first[:80]!r}")
    headers: dict[str, str] = {}
    for line in lines:
        name, colon, value = line.partition(b":")
        if not colon or not name or name != name.strip():
            raise UpstreamError(f"the upstream's answer has a broken header: {line[:80]!r}")
        key, text = name.decode("latin-1").lower(), value.strip().decode("utf-8", "surrogateescape")
        if key == "content-length" and headers.get(key, text) != text:
            raise UpstreamError("the upstream's answer has two lengths")
        headers[key] = text
    return _head(int(status), headers, version == b"HTTP/1.1")


def _head(status: int, headers: dict[str, str], is_newest: bool) -> Head:
    encoding = headers.get("content-encoding", "identity").lower()
    if encoding != "identity":
        raise UpstreamError(f"the upstream's answer is encoded ({encoding[:40]}), which nobody asked for")
    connection = headers.get("connection", "").lower()
    keep = connection != "close" if is_newest else connection == "keep-alive"
    transfer = headers.get("transfer-encoding", "").lower()
    if transfer not in ("", "chunked"):
        raise UpstreamError(f"the upstream's answer has the transfer encoding {transfer[:40]!r}")
    said = headers.get("content-length")
    if said is not None and not (said.isascii() and said.isdigit() and len(said) < 19):
        raise UpstreamError(f"the upstream's answer has the length {said[:40]!r}")
    if status in _BODILESS:
        return Head(status, headers, 0, False, keep)
    if transfer:
        return Head(status, headers, None, True, keep and said is None)
    length = None if said is None else int(said)
    return Head(status, headers, length, False, keep and length is not None)


class Chunked:
    """Takes the chunks of a body apart as they come."""

    __slots__ = ("_buffer", "_left", "_trailing", "done", "rest")

    def __init__(self) -> None:
        self._buffer = b""  # the beginning of a line
        self._left = 0  # of the chunk that is being read, with the line end behind it
        self._trailing = False
        self.done = False
        self.rest = b""  # what came behind the end

    def feed(self, data: bytes) -> list[bytes]:
        """The body's own bytes in `data`. `UpstreamError` for what is no chunk."""
        found: list[bytes] = []
        if self._buffer:
            data, self._buffer = self._buffer + data, b""
        at = 0
        while at < len(data) and not self.done:
            if self._left:
                at = self._body(data, at, found)
                continue
            end = data.find(b"\n", at)
            if end - at > LINE_BYTES_MAX or (end < 0 and len(data) - at > LINE_BYTES_MAX):
                raise UpstreamError("a chunk of the upstream's answer has no end")
            if end < 0:
                self._buffer = data[at:]
                break
            self._line(data[at:end].rstrip(b"\r"))
            at = end + 1
        if self.done:
            self.rest = data[at:]
        return found

    def _body(self, data: bytes, at: int, found: list[bytes]) -> int:
        """The next bytes of a chunk; the last two of `_left` are its line end."""
        end = min(len(data), at + self._left)
        body = min(end, at + self._left - 2)
        if body > at:
            found.append(data[at:body])
        if data[max(at, body) : end] not in (b"", b"\r\n", b"\r" if self._left > 1 else b"\n"):
            raise UpstreamError("a chunk of the upstream's answer is longer than it says")
        self._left -= end - at
        return end

    def _line(self, line: bytes) -> None:
        if self._trailing:
            self.done = not line
            return
        size = line.partition(b";")[0].strip()
        if not size or len(size) > 15 or size.strip(_HEX):
            raise UpstreamError(f"a chunk of the upstream's answer has the size {size[:40]!r}")
        count = int(size, 16)
        self._trailing = count == 0
        self._left = count + 2 if count else 0

"""Server-sent chunks out of a byte stream. Pure."""

from capture.errors import UpstreamError

DONE = b"[DONE]"


class Splitter:
    """Cuts a byte stream into server-sent chunks; holds at most one incomplete chunk."""

    def __init__(self, chunk_bytes_max: int) -> None:
        self._buffer = b""
        self._max = chunk_bytes_max

    def feed(self, data: bytes) -> list[bytes]:
        """The chunks that `data` completes, each without its blank line.

        Raises `UpstreamError` once a chunk grows past the limit.
        """
        buffer = self._buffer + data if self._buffer else data
        if b"\r" in buffer:
            # A lone trailing \r may be half of a \r\n: keep it for the next read.
            keep = b"\r" if buffer.endswith(b"\r") else b""
            buffer = buffer[: len(buffer) - len(keep)].replace(b"\r\n", b"\n") + keep
        *whole, self._buffer = buffer.split(b"\n\n")
        if len(self._buffer) > self._max:
            raise UpstreamError(f"a chunk of the stream is longer than {self._max} bytes")
        return [chunk for chunk in whole if chunk]

    @property
    def rest(self) -> bytes:
        """Bytes after the last complete chunk."""
        return self._buffer


def payload(chunk: bytes) -> bytes | None:
    """The data of a chunk; None for comments and other chunks without data."""
    if chunk.startswith(b"data: ") and b"\n" not in chunk:
        return chunk[6:]
    lines = [line[5:].lstrip(b" ") for line in chunk.split(b"\n") if line.startswith(b"data:")]
    return b"\n".join(lines) if lines else None

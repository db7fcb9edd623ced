"""The output of an agent: read as it comes, its end kept, the rest counted and forgotten."""

import asyncio
import contextlib
import os
from types import TracebackType
from typing import Self

READ_BYTES = 65_536
DRAIN_WAIT_S = 1.0  # from an agent's end to the end of its output


class Output:
    """A pipe whose last `bytes_max` bytes are kept. Use as a context manager, in an event loop."""

    def __init__(self, bytes_max: int) -> None:
        self._bytes_max = bytes_max
        self._kept = bytearray()
        self._reader = self._writer = -1
        self._loop = asyncio.get_running_loop()
        self.ended: asyncio.Future[None] = self._loop.create_future()
        self.total = 0  # bytes written by the agent

    def __enter__(self) -> Self:
        self._reader, self._writer = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        os.set_blocking(self._writer, True)
        self._loop.add_reader(self._reader, self._read)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.hand_over()
        if self._reader >= 0:
            self._loop.remove_reader(self._reader)
            os.close(self._reader)
            self._reader = -1
        self.ended.cancel()

    @property
    def writer(self) -> int:
        """The descriptor for the agent."""
        return self._writer

    def hand_over(self) -> None:
        """Close our copy of the writing end: only the agent and what it started hold it now."""
        if self._writer >= 0:
            os.close(self._writer)
            self._writer = -1

    def text(self) -> str:
        """What was kept; bytes that are not UTF-8 become U+FFFD."""
        tail = self._kept[-self._bytes_max :] if self._bytes_max else b""
        return tail.decode(errors="replace")

    def _read(self) -> None:
        try:
            chunk = os.read(self._reader, READ_BYTES)
        except BlockingIOError:
            return
        if not chunk:
            self._loop.remove_reader(self._reader)
            if not self.ended.done():
                self.ended.set_result(None)
            return
        self.total += len(chunk)
        self._kept += chunk
        if len(self._kept) > 2 * self._bytes_max + READ_BYTES:
            del self._kept[: len(self._kept) - self._bytes_max]


async def drained(*outputs: Output) -> None:
    """Wait until all have ended, `DRAIN_WAIT_S` at most: a stray holder of a pipe is not waited for."""
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(DRAIN_WAIT_S):
            await asyncio.gather(*(asyncio.shield(output.ended) for output in outputs))

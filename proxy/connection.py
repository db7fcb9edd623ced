"""One connection to an upstream, and one exchange on it at a time: a request out, its answer in."""

import asyncio
from collections import deque
from typing import cast

import msgspec

from capture.errors import UpstreamError
from proxy.wire import HEAD_BYTES_MAX, Chunked, Head, read_head

BUFFER_BYTES_MAX = 1 << 20  # of a body that nobody takes; then the upstream waits


class TimedOut(UpstreamError):
    """A deadline passed."""


class Dropped(UpstreamError):
    """The connection closed before any byte of an answer. A `reused` one had been idle, and was dead."""

    reused = False


class TooLong(UpstreamError):
    """The answer is longer than is allowed here."""


class Within(msgspec.Struct, frozen=True, kw_only=True):
    """How long an exchange may take, in seconds, and how many bytes its body may have."""

    first_byte_s: float  # until the answer begins
    idle_s: float  # between any two reads of it
    total_s: float  # until its last byte
    bytes_max: int


class Connection(asyncio.Protocol):
    """The client's side. Whoever has it awaits `head`, then takes the body; nobody else may write."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._transport: asyncio.Transport | None = None
        self._waiter: asyncio.Future[None] | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._busy = False
        self.idle_since = loop.time()
        self._clear()

    def _clear(self) -> None:
        """As it is before an exchange."""
        self._seen = b""  # of a head that is not whole
        self._head: Head | None = None
        self._chunked: Chunked | None = None
        self._pieces: deque[bytes] = deque()
        self._waiting_bytes = 0  # in `_pieces`
        self._got = 0  # bytes of the body so far
        self._gathering = False  # the body is wanted whole
        self._paused = False
        self._excess = False  # more came than the answer
        self._error: UpstreamError | None = None
        self.complete = False
        self.reused = False

    # -- for whoever has it ----------------------------------------------------------------------

    @property
    def is_open(self) -> bool:
        return self._transport is not None and not self._transport.is_closing()

    @property
    def is_reusable(self) -> bool:
        """The answer came whole, and the upstream keeps the connection."""
        keep = self._head is not None and self._head.keep
        return keep and self.complete and self.is_open and not self._excess

    def send(self, request: bytes, within: Within, *, reused: bool) -> None:
        """Begin an exchange."""
        assert self._transport is not None
        self._clear()
        self._busy, self.reused, self._within = True, reused, within
        self._began = self._heard = self._loop.time()
        self._timer = self._loop.call_later(
            min(within.first_byte_s, within.idle_s, within.total_s), self._look
        )
        self._transport.write(request)

    async def head(self) -> Head:
        """The answer's head. `UpstreamError`."""
        while self._head is None:
            await self._more()
        return self._head

    async def read(self) -> bytes:
        """The body from here on, whole. `UpstreamError`."""
        self._gathering = True
        self._resume()
        while not self.complete:
            await self._more()
        return self._taken()

    async def take(self) -> bytes:
        """What has come of the body, at least a byte; empty at its end. `UpstreamError`."""
        while not self._pieces and not self.complete:
            await self._more()
        data = self._taken()
        self._resume()
        return data

    def rest(self) -> None:
        """The exchange is over, and the next one may come."""
        self._busy = False
        self.idle_since = self._loop.time()

    def abort(self) -> None:
        """Cut it: the upstream sees that nobody wants its answer, and so does whoever still waits for it."""
        self._stop_timer()
        if self._busy and not self.complete and self._error is None:
            self._error = UpstreamError("the connection to the upstream was cut")
        self._busy = False
        if self._transport is not None:
            self._transport.abort()
        self._wake()

    # -- asyncio's side --------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)

    def data_received(self, data: bytes) -> None:
        if not self._busy or self.complete:  # nobody asked: whatever it is, no later answer may begin with it
            self.abort()
            return
        self._heard = self._loop.time()
        try:
            if self._head is None:
                data = self._read_head(self._seen + data if self._seen else data)
            if self._head is not None:
                self._read_body(self._head, data)
        except UpstreamError as error:
            self._fail(error)
        self._wake()

    def eof_received(self) -> None:
        head = self._head
        if self._busy and head is not None and head.length is None and not head.chunked:
            self._finish()

    def connection_lost(self, error: Exception | None) -> None:
        if self._busy and not self.complete:
            if self._head is None and not self._seen:
                dropped = Dropped(f"the upstream closed the connection: {error or 'without an answer'}")
                dropped.reused = self.reused
                self._fail(dropped)
            else:
                why = error or "the connection closed"
                self._fail(UpstreamError(f"the upstream's answer broke off: {why}"))
        self._wake()

    # -- the answer ------------------------------------------------------------------------------

    def _read_head(self, data: bytes) -> bytes:
        """Take the head; what follows it."""
        while True:
            end = data.find(b"\r\n\r\n")
            if end < 0:
                if len(data) > HEAD_BYTES_MAX:
                    raise UpstreamError(f"the answer's head is longer than {HEAD_BYTES_MAX} bytes")
                self._seen = data
                return b""
            head, data = read_head(data[:end]), data[end + 4 :]
            if head.status >= 200:
                break
        self._head = head
        if head.length is not None and head.length > self._within.bytes_max:
            raise self._too_long()
        if head.chunked:
            self._chunked = Chunked()
        if head.length == 0:
            self._finish()
        return data

    def _read_body(self, head: Head, data: bytes) -> None:
        if self._chunked is not None:
            for piece in self._chunked.feed(data):
                self._keep(piece)
            if self._chunked.done:
                self._finish()
                data = self._chunked.rest
            else:
                return
        elif head.length is not None:
            left = head.length - self._got
            if data and left:
                self._keep(data[:left] if len(data) > left else data)
            if len(data) >= left:
                self._finish()
            data = data[left:]
        else:
            self._keep(data)
            return
        self._excess = self.complete and bool(data)

    def _keep(self, data: bytes) -> None:
        if not data:
            return
        self._got += len(data)
        if self._got > self._within.bytes_max:
            raise self._too_long()
        self._pieces.append(data)
        self._waiting_bytes += len(data)
        if self._waiting_bytes > BUFFER_BYTES_MAX and not (self._gathering or self._paused):
            assert self._transport is not None
            self._transport.pause_reading()
            self._paused = True

    def _taken(self) -> bytes:
        data = self._pieces[0] if len(self._pieces) == 1 else b"".join(self._pieces)
        self._pieces.clear()
        self._waiting_bytes = 0
        return data

    def _resume(self) -> None:
        if self._paused and self._transport is not None:
            self._paused = False
            self._heard = self._loop.time()
            self._transport.resume_reading()

    def _too_long(self) -> TooLong:
        return TooLong(f"the upstream's answer is longer than {self._within.bytes_max} bytes")

    def _finish(self) -> None:
        self.complete = True
        self._stop_timer()

    def _fail(self, error: UpstreamError) -> None:
        if self._error is None:
            self._error = error
        self.complete = False
        self.abort()

    # -- waiting ---------------------------------------------------------------------------------

    async def _more(self) -> None:
        """Until something has changed. `UpstreamError` if nothing more will come."""
        if self._error is not None:
            raise self._error
        self._waiter = self._loop.create_future()
        try:
            await self._waiter
        finally:
            self._waiter = None

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    def _look(self) -> None:
        """Whether a deadline has passed; asked again when the next one may have."""
        now, within = self._loop.time(), self._within
        quiet_s = within.first_byte_s if self._head is None and not self._seen else within.idle_s
        quiet_until = now + within.idle_s if self._paused else self._heard + quiet_s
        total_until = self._began + within.total_s
        if now >= min(quiet_until, total_until):
            why = "its whole answer took too long" if now >= total_until else "nothing came for too long"
            self._fail(TimedOut(f"the upstream did not answer in time: {why}"))
            self._wake()
            return
        # The first byte may come at any moment, and then it is the idle deadline that counts.
        self._timer = self._loop.call_at(min(quiet_until, total_until, now + within.idle_s), self._look)

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

"""The journal: calls of one process become durable, many in one transaction.

The event loop hands records to a single writer thread. The thread takes what has gathered, redacts and writes
it as one frame, and wakes the loop once for the whole frame. Nothing is dropped: when too many bytes
wait, `Journal.commit` waits too.
"""

import asyncio
import contextlib
import logging
import queue
import threading
import time
from collections import deque
from collections.abc import Sequence

from capture.errors import NotFound, StoreError
from capture.frames import Packer
from capture.redact import Redactor
from capture.settings import Settings
from capture.store import Store
from capture.types import RawCall, Rollout, Stitch

__all__ = ["Journal", "Settings"]

log = logging.getLogger("hone.capture")

SLOW_S = 1.0  # CPU for redacting one call: a pattern does not suit what agents send
_RETRY_S = 0.05


class _Entry:
    """One record on its way, and the future that its caller awaits."""

    __slots__ = ("done", "new", "raw", "size", "stitches")

    def __init__(
        self, raw: RawCall, new: Rollout | None, stitches: Sequence[Stitch], done: asyncio.Future[RawCall]
    ) -> None:
        self.raw = raw
        self.new = new
        self.stitches = stitches
        self.done = done
        self.size = len(raw.request) + len(raw.response)


class Journal:
    """Commits raw calls durably and in batches.

    ``store`` belongs to the writer thread from `start` to the end of `close`; nobody else may use it.
    """

    def __init__(self, store: Store, settings: Settings) -> None:
        self._store = store
        self._settings = settings
        self._redactor = Redactor(settings.redact)
        self._packer = Packer()
        self._queue: queue.SimpleQueue[_Entry | None] = queue.SimpleQueue()
        self._waiting: deque[_Entry] = deque()  # the queue has no room for these yet
        self._thread: threading.Thread | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._closed = False
        self.queue_bytes = 0  # request and response bytes that are not durable yet
        self.calls = 0  # committed so far
        self.frames = 0  # written so far
        self.commit_s = 0.0  # time spent in committing so far

    def start(self) -> None:
        """Start the writer thread; call it inside the event loop that will call `commit`."""
        self._loop = asyncio.get_running_loop()
        self._thread = threading.Thread(target=self._write_forever, name="journal", daemon=True)
        self._thread.start()

    async def commit(
        self, raw: RawCall, new: Rollout | None = None, stitches: Sequence[Stitch] = ()
    ) -> RawCall:
        """What `submit` promises. A cancelled wait takes the record back only while the queue has no room
        for it."""
        return await self.submit(raw, new, stitches)

    def submit(
        self, raw: RawCall, new: Rollout | None = None, stitches: Sequence[Stitch] = ()
    ) -> asyncio.Future[RawCall]:
        """The call as it is stored, once it is durable, with ``new``, its rollout that nobody opened, and
        its stitches.

        `StoreError` if the store failed for ``commit_timeout_s`` and `NotFound` if the call's rollout does
        not exist; then nothing of this call was written. Cancelling takes the record back only while the
        queue has no room for it.
        """
        if self._closed or self._loop is None:
            raise StoreError("the journal is not open")
        entry = _Entry(raw, new, stitches, self._loop.create_future())
        self._waiting.append(entry)
        self._admit()
        return entry.done

    async def close(self) -> None:
        """Commit everything that was handed in, then stop the writer thread. Idempotent."""
        if self._thread is None or self._closed:
            return
        self._closed = True
        if self._waiting:
            await asyncio.wait([entry.done for entry in self._waiting])
        self._queue.put(None)
        await asyncio.to_thread(self._thread.join)

    # -- the loop's side ---------------------------------------------------------------------

    def _admit(self) -> None:
        """Let waiting entries into the queue, in order, as far as their bytes fit; one always fits."""
        while self._waiting:
            size = self._waiting[0].size
            if self.queue_bytes > 0 and self.queue_bytes + size > self._settings.queue_bytes_max:
                return
            entry = self._waiting.popleft()
            if not entry.done.cancelled():
                self.queue_bytes += size
                self._queue.put(entry)

    def _resolve(self, entries: Sequence[_Entry], errors: Sequence[Exception | None]) -> None:
        for entry, error in zip(entries, errors, strict=True):
            if entry.done.done():  # its caller gave up waiting
                continue
            if error is None:
                entry.done.set_result(entry.raw)
            else:
                entry.done.set_exception(error)
        self.queue_bytes -= sum(entry.size for entry in entries)
        self._admit()

    # -- the writer thread's side ------------------------------------------------------------

    def _write_forever(self) -> None:
        assert self._loop is not None
        closing = False
        while not closing:
            entries, closing = self._gather()
            if not entries:
                continue
            refused = {entry: error for entry in entries if (error := self._redact(entry)) is not None}
            written = [entry for entry in entries if entry not in refused]
            deadline = time.monotonic() + self._settings.commit_timeout_s
            errors = self._commit(written, deadline) if written else []
            entries, errors = [*written, *refused], [*errors, *refused.values()]
            with contextlib.suppress(RuntimeError):  # the loop is gone, and so is everybody who waited
                self._loop.call_soon_threadsafe(self._resolve, entries, errors)

    def _gather(self) -> tuple[list[_Entry], bool]:
        """What is queued now, at least one entry unless closing, within the limits of a frame."""
        entries: list[_Entry] = []
        size = 0
        while len(entries) < self._settings.frame_calls_max and size < self._settings.frame_bytes_max:
            try:
                entry = self._queue.get(block=not entries)
            except queue.Empty:
                break
            if entry is None:
                return entries, True
            entries.append(entry)
            size += entry.size
        return entries, False

    def _redact(self, entry: _Entry) -> Exception | None:
        """Put what may be stored in the place of the call; the error of one that cannot be."""
        if not self._redactor:
            return None
        began = time.thread_time()
        try:
            entry.raw = self._redactor.call(entry.raw)
        except Exception as error:  # the boundary of the thread; its text could be the agent's
            return StoreError(f"{type(error).__name__} while redacting call {entry.raw.id}")
        took_s = time.thread_time() - began
        if took_s > SLOW_S:
            log.warning("redacting the %d bytes of %s took %.1f s", entry.size, entry.raw.id, took_s)
        return None

    def _commit(self, entries: Sequence[_Entry], deadline: float) -> list[Exception | None]:
        """Write the entries, halving them around one that the store refuses; an error or None for each."""
        began = time.monotonic()
        try:
            self._write(entries, deadline)
        except NotFound as error:
            if len(entries) == 1:
                return [error]
            middle = len(entries) // 2
            return self._commit(entries[:middle], deadline) + self._commit(entries[middle:], deadline)
        except Exception as error:  # the boundary of the thread: each caller gets what was caught
            return [error] * len(entries)
        self.calls += len(entries)
        self.frames += 1
        self.commit_s += time.monotonic() - began
        return [None] * len(entries)

    def _write(self, entries: Sequence[_Entry], deadline: float) -> None:
        records = [entry.raw for entry in entries]
        new = list({entry.new.id: entry.new for entry in entries if entry.new is not None}.values())
        stitches = {entry.raw.id: entry.stitches for entry in entries if entry.stitches}
        frame = self._packer.pack(records)
        while True:
            try:
                return self._store.commit_calls(frame, records, new, stitches)
            except StoreError:
                if time.monotonic() >= deadline:
                    raise
                time.sleep(_RETRY_S)

"""Making calls durable before their agents see them end."""

import asyncio
import time
from collections.abc import Sequence
from typing import Any, TypeVar

from capture.errors import HoneError, StoreError
from capture.journal import Journal
from capture.types import RawCall, Rollout, Stitch
from proxy.metrics import Metrics
from proxy.storage import Storage

F = TypeVar("F", bound=asyncio.Future[Any])


class Committer:
    """Hands calls to the journal, waits with a deadline, and outlives clients that hang up."""

    def __init__(self, journal: Journal, storage: Storage, metrics: Metrics, timeout_s: float) -> None:
        self._journal = journal
        self._storage = storage
        self._metrics = metrics
        self._timeout_s = timeout_s
        self._tasks: set[asyncio.Future[Any]] = set()

    async def commit(
        self, raw: RawCall, new: Rollout | None, stitches: Sequence[Stitch] = ()
    ) -> RawCall | None:
        """The call as it is stored, once it is durable; None if it failed or is not durable in time.

        Cancelling the caller never cancels the commit. A call that becomes durable although its
        agent was refused or has gone is marked undelivered.
        """
        began = time.perf_counter()
        try:
            durable = self._hand_over(raw, new, stitches)
        except StoreError as error:
            self._metrics.commit_failures.inc()
            self._metrics.note("commit", error)
            return None
        try:
            done = await _done_within(durable, self._timeout_s)
        except asyncio.CancelledError:
            self._undeliver(durable, raw.id)
            raise
        if done and durable.exception() is None:
            self._metrics.commit_seconds.observe(time.perf_counter() - began)
            return durable.result()
        self._metrics.commit_failures.inc()
        if done:
            self._metrics.note("commit", durable.exception())
        else:
            self._undeliver(durable, raw.id)
        return None

    def commit_later(self, raw: RawCall, new: Rollout | None, stitches: Sequence[Stitch] = ()) -> None:
        """For a call whose agent has gone: durable as soon as may be, in the background."""
        try:
            self._hand_over(raw, new, stitches)
        except StoreError as error:
            self._metrics.note("journal", error)

    def undelivered(self, call_id: str) -> None:
        """A durable call whose agent left before its end."""
        self._metrics.undelivered.inc()
        store = self._storage.store
        marking = self._storage.call(store.mark_undelivered, [call_id])
        self._watch(asyncio.get_running_loop().create_task(marking))

    async def drain(self) -> None:
        """Wait for everything that was handed over."""
        while self._tasks:
            await asyncio.wait(self._tasks)

    def _hand_over(
        self, raw: RawCall, new: Rollout | None, stitches: Sequence[Stitch]
    ) -> asyncio.Future[RawCall]:
        """Resolved once it is durable. `StoreError` if the journal is closed."""
        return self._watch(self._journal.submit(raw, new, stitches))

    def _undeliver(self, durable: asyncio.Future[RawCall], call_id: str) -> None:
        """Mark it once it is durable, if it ever is."""

        def mark(done: asyncio.Future[RawCall]) -> None:
            if not done.cancelled() and done.exception() is None:
                self.undelivered(call_id)

        durable.add_done_callback(mark)

    def _watch(self, work: F) -> F:
        """What `drain` waits for."""
        self._tasks.add(work)
        work.add_done_callback(self._forget)
        return work

    def _forget(self, work: asyncio.Future[Any]) -> None:
        self._tasks.discard(work)
        if not work.cancelled() and isinstance(error := work.exception(), HoneError):
            self._metrics.note("journal", error)


async def _done_within(work: asyncio.Future[Any], seconds: float) -> bool:
    """Whether it is done by then; cancelling the wait leaves it alone. `asyncio.wait`, for one future."""
    loop = asyncio.get_running_loop()
    waiter = loop.create_future()

    def wake(_: object = None) -> None:
        if not waiter.done():
            waiter.set_result(None)

    work.add_done_callback(wake)
    timer = loop.call_later(seconds, wake)
    try:
        await waiter
    finally:
        timer.cancel()
        work.remove_done_callback(wake)
    return work.done()

"""Making calls durable before their agents see them end."""

import asyncio
import time
from collections.abc import Coroutine, Sequence
from typing import Any, TypeVar

from capture.errors import HoneError
from capture.journal import Journal
from capture.types import RawCall, Rollout, Stitch
from proxy.metrics import Metrics
from proxy.storage import Storage

T = TypeVar("T")


class Committer:
    """Hands calls to the journal, waits with a deadline, and outlives clients that hang up."""

    def __init__(self, journal: Journal, storage: Storage, metrics: Metrics, timeout_s: float) -> None:
        self._journal = journal
        self._storage = storage
        self._metrics = metrics
        self._timeout_s = timeout_s
        self._tasks: set[asyncio.Task[Any]] = set()

    async def commit(
        self, raw: RawCall, new: Rollout | None, stitches: Sequence[Stitch] = ()
    ) -> RawCall | None:
        """The call as it is stored, once it is durable; None if it failed or is not durable in time.

        Cancelling the caller never cancels the commit. A call that becomes durable although its
        agent was refused or has gone is marked undelivered.
        """
        began = time.perf_counter()
        task = self._spawn(self._journal.commit(raw, new, stitches))
        try:
            done, _ = await asyncio.wait({task}, timeout=self._timeout_s)
        except asyncio.CancelledError:
            self._undeliver(task, raw.id)
            raise
        if done and task.exception() is None:
            self._metrics.commit_seconds.observe(time.perf_counter() - began)
            return task.result()
        self._metrics.commit_failures.inc()
        if done:
            self._metrics.note("commit", task.exception())
        else:
            self._undeliver(task, raw.id)
        return None

    def commit_later(self, raw: RawCall, new: Rollout | None, stitches: Sequence[Stitch] = ()) -> None:
        """For a call whose agent has gone: durable as soon as may be, in the background."""
        self._spawn(self._journal.commit(raw, new, stitches))

    def undelivered(self, call_id: str) -> None:
        """A durable call whose agent left before its end."""
        self._metrics.undelivered.inc()
        store = self._storage.store
        self._spawn(self._storage.call(store.mark_undelivered, [call_id]))

    async def drain(self) -> None:
        """Wait for everything that was handed over."""
        while self._tasks:
            await asyncio.wait(self._tasks)

    def _undeliver(self, task: asyncio.Task[Any], call_id: str) -> None:
        """Mark it once it is durable, if it ever is."""

        def mark(done: asyncio.Task[Any]) -> None:
            if not done.cancelled() and done.exception() is None:
                self.undelivered(call_id)

        task.add_done_callback(mark)

    def _spawn(self, work: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._forget)
        return task

    def _forget(self, task: asyncio.Task[Any]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and isinstance(error := task.exception(), HoneError):
            self._metrics.note("journal", error)

"""The store for an asyncio process: one instance in one thread of its own, and leases kept alive."""

import asyncio
import contextlib
import logging
import time
from collections.abc import AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TypeVar

from capture.errors import Fenced, StoreError
from capture.sqlite import SqliteStore
from capture.store import Store

T = TypeVar("T")
log = logging.getLogger(__name__)

LEASE_TTL_S = 5.0
LEASE_RENEW_S = 1.0


class Desk:
    """Calls of the store, one after another, off the event loop."""

    def __init__(self, store: Store, thread: ThreadPoolExecutor) -> None:
        self._store = store
        self._thread = thread

    async def ask(self, question: Callable[[Store], T]) -> T:
        """Run `question(store)` in the store's thread; its errors come through."""
        return await asyncio.get_running_loop().run_in_executor(self._thread, question, self._store)


@contextlib.asynccontextmanager
async def opened(path: Path) -> AsyncIterator[Desk]:
    """The SQLite store at `path`, closed in the end."""
    loop = asyncio.get_running_loop()
    with ThreadPoolExecutor(max_workers=1, thread_name_prefix="store") as thread:
        store = await loop.run_in_executor(thread, SqliteStore, path)
        try:
            yield Desk(store, thread)
        finally:
            await loop.run_in_executor(thread, store.close)


class Lease:
    """A lease that is held until `lost` says otherwise."""

    def __init__(self, desk: Desk, name: str, holder: str) -> None:
        self._desk = desk
        self._name = name
        self._holder = holder
        self._renewed = 0.0
        self.lost = False

    async def take(self) -> bool:
        """Take or renew it; False while somebody else holds it."""
        asked = time.monotonic()
        epoch = await self._desk.ask(lambda s: s.acquire_lease(self._name, self._holder, LEASE_TTL_S))
        if epoch is not None:
            self._renewed = asked
        return epoch is not None

    async def keep(self) -> None:
        """Renew until cancelled, or until the lease is lost."""
        while not self.lost:
            await asyncio.sleep(LEASE_RENEW_S)
            try:
                self.lost = not await self.take()
            except StoreError as error:
                log.warning("lease %s not renewed: %s", self._name, error)
            self.lost = self.lost or time.monotonic() - self._renewed > LEASE_TTL_S

    def check(self) -> None:
        """`Fenced` once it is lost."""
        if self.lost:
            raise Fenced(f"the lease {self._name} was lost: another runner is at work")

    async def give_back(self) -> None:
        await self._desk.ask(lambda s: s.release_lease(self._name, self._holder))


@contextlib.asynccontextmanager
async def held(desk: Desk, name: str, holder: str, stop: asyncio.Event) -> AsyncIterator[Lease | None]:
    """Wait for the lease, keep it while the block runs, give it back. None: stopped before."""
    lease = Lease(desk, name, holder)
    while not await lease.take():
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(stop.wait(), LEASE_RENEW_S)
        if stop.is_set():
            yield None
            return
    keeper = asyncio.create_task(lease.keep())
    try:
        yield lease
    finally:
        keeper.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await keeper
        if not lease.lost:
            await lease.give_back()

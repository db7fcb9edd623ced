"""The store, from asyncio: one thread of its own, so that no disk ever stops the event loop."""

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import ParamSpec, TypeVar

from capture.store import Store

P = ParamSpec("P")
T = TypeVar("T")


class Storage:
    """Calls a `Store` in one thread; `store` is that store, for naming its methods."""

    def __init__(self, store: Store) -> None:
        self.store = store
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="storage")

    async def call(self, method: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Run one method of the store in its thread; raises what the method raises."""
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._thread, lambda: method(*args, **kwargs))

    async def close(self) -> None:
        """Close the store after everything that was asked of it."""
        await self.call(self.store.close)
        self._thread.shutdown()

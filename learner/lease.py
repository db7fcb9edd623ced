"""The learner's lease: one learner a policy, and a number that tells the store which one."""

import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Self

from capture.errors import Fenced, StoreError
from capture.ids import new_id
from capture.sqlite import SqliteStore

TTL_S = 5.0
RENEW_S = 1.0


class Lease:
    """Held from `with` to its end, renewed by a daemon thread with a store handle of its own."""

    def __init__(self, store_path: Path, policy: str, wait_s: float, should_stop: Callable[[], bool]) -> None:
        self.name = f"learner:{policy}"
        self.holder = new_id("l")
        self.epoch = 0
        self._path = store_path
        self._wait_s = wait_s
        self._should_stop = should_stop
        self._lost = threading.Event()
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._renew, name=self.name, daemon=True)

    def __enter__(self) -> Self:
        """Take the lease; `Fenced` if another learner still holds it after `wait_s`."""
        self.epoch = self._acquire()
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Stop renewing and give the lease back."""
        self._done.set()
        self._thread.join()

    def check(self) -> None:
        """`Fenced` once somebody else took the lease."""
        if self._lost.is_set():
            raise Fenced(f"{self.name}: another learner took over; this one stops")

    def _acquire(self) -> int:
        store = SqliteStore(self._path)
        try:
            deadline = time.monotonic() + self._wait_s
            while (epoch := store.acquire_lease(self.name, self.holder, TTL_S)) is None:
                if self._should_stop() or time.monotonic() > deadline:
                    raise Fenced(f"{self.name}: another learner holds it")
                time.sleep(RENEW_S / 4)
            return epoch
        finally:
            store.close()

    def _renew(self) -> None:
        store = SqliteStore(self._path)
        try:
            while not self._done.wait(RENEW_S):
                try:
                    if store.acquire_lease(self.name, self.holder, TTL_S) != self.epoch:
                        self._lost.set()
                        return
                except StoreError:
                    continue  # busy: the store refuses a late commit by itself, so trying on is safe
            store.release_lease(self.name, self.holder)
        finally:
            store.close()

"""Rollout heads in memory: a bounded cache over the store, and which calls are in flight.

Nothing here is the truth: a head that is missing or old is read from the store again. Only the
count of calls in flight lives here alone, and the store is told of it every second.
"""

import asyncio
import time
from collections import OrderedDict

import msgspec

from capture.types import Rollout
from proxy.storage import Storage


class Head:
    """One rollout as this process knows it."""

    __slots__ = ("calls", "idle", "in_flight", "is_new", "read_at", "rollout")

    def __init__(self, rollout: Rollout, *, is_new: bool, read_at: float) -> None:
        self.rollout = rollout
        self.is_new = is_new  # the store gets it with its first call
        self.read_at = read_at
        self.calls = rollout.call_count  # begun here or committed anywhere
        self.in_flight = 0
        self.idle = asyncio.Event()
        self.idle.set()

    @property
    def is_open(self) -> bool:
        return self.rollout.state == "open"

    @property
    def is_full(self) -> bool:
        """Every call that `max_calls` allows has begun."""
        return self.rollout.max_calls is not None and self.calls >= self.rollout.max_calls

    def pin(self, version: int) -> int:
        """The version that serves this training rollout from its first call on: this one, if it is the
        first."""
        if self.rollout.policy_version is None:
            self.rollout = msgspec.structs.replace(self.rollout, policy_version=version)
        assert self.rollout.policy_version is not None
        return self.rollout.policy_version

    def begin(self) -> None:
        """A call of this rollout enters."""
        self.calls += 1
        self.in_flight += 1
        self.idle.clear()

    def end(self, *, captured: bool) -> None:
        """It left; one that was not captured does not count."""
        self.in_flight -= 1
        if captured:
            self.is_new = False
        else:
            self.calls -= 1
        if not self.in_flight:
            self.idle.set()


class Heads:
    """The heads this process uses, least recently used first; those in flight are never evicted."""

    def __init__(self, storage: Storage, size: int, ttl_s: float) -> None:
        self._storage = storage
        self._size = size
        self._ttl_s = ttl_s
        self._heads: OrderedDict[str, Head] = OrderedDict()
        self._sessions: OrderedDict[tuple[str, str], str] = OrderedDict()

    async def get(self, rollout_id: str) -> Head:
        """The head, at most `ttl_s` old. `NotFound` if there is no such rollout."""
        head = self._heads.get(rollout_id)
        now = time.monotonic()
        if head is None or (now - head.read_at > self._ttl_s and not head.is_new):
            rollout = await self._storage.call(self._storage.store.rollout, rollout_id)
            head = self.update(rollout, read_at=now)
        self._heads.move_to_end(rollout_id)
        return head

    async def session(self, key_id: str, session: str, fresh: Rollout) -> Head:
        """The open observe rollout of a session, or `fresh`, now opened (the head's rollout has its id)."""
        known = self._sessions.get((key_id, session))
        if known is not None:
            head = await self.get(known)
            if head.is_open:
                return head
        rollout = await self._storage.call(self._storage.store.session_rollout, key_id, session, fresh)
        self._sessions[key_id, session] = rollout.id
        while len(self._sessions) > self._size:
            self._sessions.popitem(last=False)
        return self.update(rollout)

    def add(self, rollout: Rollout) -> Head:
        """A rollout that the store gets with its first call."""
        head = self._heads[rollout.id] = Head(rollout, is_new=True, read_at=time.monotonic())
        self._evict()
        return head

    def update(self, rollout: Rollout, *, read_at: float | None = None) -> Head:
        """Take over what the store says of a rollout."""
        read_at = time.monotonic() if read_at is None else read_at
        head = self._heads.get(rollout.id)
        if head is None:
            head = self._heads[rollout.id] = Head(rollout, is_new=False, read_at=read_at)
            self._evict()
        else:
            if head.rollout.policy_version is not None and rollout.policy_version is None:
                rollout = msgspec.structs.replace(rollout, policy_version=head.rollout.policy_version)
            head.rollout, head.read_at, head.is_new = rollout, read_at, False
            head.calls = max(head.calls, rollout.call_count + head.in_flight)
        return head

    def in_flight(self) -> dict[str, int]:
        """Rollout id -> calls in flight here."""
        return {id: head.in_flight for id, head in self._heads.items() if head.in_flight}

    async def idle(self, rollout_id: str, timeout_s: float) -> None:
        """Wait, at most `timeout_s`, until the rollout has no call in flight here."""
        head = self._heads.get(rollout_id)
        if head is not None:
            try:
                await asyncio.wait_for(head.idle.wait(), timeout_s)
            except TimeoutError:
                return

    def _evict(self) -> None:
        excess = len(self._heads) - self._size
        if excess <= 0:
            return
        for rollout_id in [id for id, head in self._heads.items() if not head.in_flight][:excess]:
            del self._heads[rollout_id]

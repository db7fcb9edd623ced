"""The store's stitches, as the proxy asks for them.

What the store says is read for every call: another proxy may have made a digest shared a moment ago.
Only that a digest is shared is remembered here, because that never changes back. So are the digests of
answers that were served without capture: the store learns of them when it takes writes again.
"""

from collections import OrderedDict
from collections.abc import Sequence

from capture.types import Stitch
from proxy.replay import Trail
from proxy.stitch import Apart, Known, Stitched, asked, decide
from proxy.storage import Storage

ASKED_MAX = 64  # digests of one call; a message with more tool calls is recognised by its last ones


class Stitches:
    """Finds the rollouts of calls that name none."""

    def __init__(self, storage: Storage, size: int) -> None:
        self._storage = storage
        self._size = size
        self._shared: OrderedDict[tuple[str, bytes], None] = OrderedDict()
        self._unwritten: dict[tuple[str, bytes], None] = {}

    async def find(self, key_id: str, trail: Trail) -> Stitched | Apart:
        """Where a call of this key belongs."""
        if trail.prefix is None:
            return decide(trail, {})
        digests = asked(trail)[-ASKED_MAX:]
        known: dict[bytes, str | None] = {}
        fresh = []
        for digest in digests:
            if (key_id, digest) in self._shared or (key_id, digest) in self._unwritten:
                known[digest] = None
            else:
                fresh.append(digest)
        if fresh:
            known.update(await self._read(key_id, fresh))
        return decide(trail, known)

    def uncaptured(self, key_id: str, stitches: Sequence[Stitch]) -> None:
        """An agent has an answer that the store does not know of: nobody may be taken for it."""
        self._unwritten.update({(key_id, one.digest): None for one in stitches})
        while len(self._unwritten) > self._size:
            del self._unwritten[next(iter(self._unwritten))]

    async def write(self, storage: Storage) -> None:
        """Tell the store of answers that were served without capture. `StoreError`: again later."""
        if pairs := list(self._unwritten):
            await storage.call(storage.store.share_stitches, pairs)
            for pair in pairs:
                self._unwritten.pop(pair, None)

    async def _read(self, key_id: str, digests: Sequence[bytes]) -> Known:
        known = await self._storage.call(self._storage.store.stitched, key_id, digests)
        for digest, rollout_id in known.items():
            if rollout_id is None:
                self._shared[key_id, digest] = None
        while len(self._shared) > self._size:
            self._shared.popitem(last=False)
        return known

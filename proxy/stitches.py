"""The store's stitches, as the proxy asks for them.

What the store says is read for every call: another proxy may have made a digest shared a moment ago.
Only that a digest is shared is remembered here, because that never changes back. So are the digests of
answers that were served without capture: the store learns of them when it takes writes again.
"""

import asyncio
from collections import OrderedDict
from collections.abc import Sequence

from capture.types import Stitch
from proxy.replay import Trail
from proxy.stitch import Apart, Stitched, asked, decide
from proxy.storage import Storage

ASKED_MAX = 64  # digests of one call; a message with more tool calls is recognised by its last ones

Pair = tuple[str, bytes]  # key id, digest
Read = dict[Pair, str | None]


class Stitches:
    """Finds the rollouts of calls that name none; calls that ask at one time share a read."""

    def __init__(self, storage: Storage, size: int) -> None:
        self._storage = storage
        self._size = size
        self._shared: OrderedDict[Pair, None] = OrderedDict()
        self._unwritten: dict[Pair, None] = {}
        self._waiting: list[tuple[list[Pair], asyncio.Future[Read]]] = []
        self._reader: asyncio.Task[None] | None = None

    async def find(self, key_id: str, trail: Trail) -> Stitched | Apart:
        """Where a call of this key belongs. `StoreError`."""
        if trail.prefix is None:
            return decide(trail, {})
        pairs = [(key_id, digest) for digest in asked(trail)[-ASKED_MAX:]]
        known: Read = {pair: None for pair in pairs if pair in self._shared or pair in self._unwritten}
        if len(known) < len(pairs):
            read = await self._read([pair for pair in pairs if pair not in known])
            known |= {pair: read[pair] for pair in pairs if pair in read}
        return decide(trail, {digest: rollout_id for (_, digest), rollout_id in known.items()})

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

    async def _read(self, pairs: list[Pair]) -> Read:
        """What the store says from now on: a read that began before is not waited for."""
        answer: asyncio.Future[Read] = asyncio.get_running_loop().create_future()
        self._waiting.append((pairs, answer))
        if self._reader is None or self._reader.done():
            self._reader = asyncio.create_task(self._read_all())
        return await answer

    async def _read_all(self) -> None:
        while self._waiting:
            waiting, self._waiting = self._waiting, []
            pairs = list({pair: None for pairs, _ in waiting for pair in pairs})
            try:
                read = await self._storage.call(self._storage.store.stitched, pairs)
            except Exception as error:  # the boundary of the task: each caller gets what was caught
                for _, answer in waiting:
                    if not answer.done():
                        answer.set_exception(error)
                continue
            self._shared.update({pair: None for pair, rollout_id in read.items() if rollout_id is None})
            while len(self._shared) > self._size:
                self._shared.popitem(last=False)
            for _, answer in waiting:
                if not answer.done():
                    answer.set_result(read)

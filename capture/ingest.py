"""Ingest: committed raw calls become parsed calls with exact tokens, stored as differences."""

from collections.abc import Mapping, Sequence

from capture.bases import Bases
from capture.errors import StoreError
from capture.parse import parse
from capture.store import ContentBase, PendingCall, Store
from capture.types import ModelCall

__all__ = ["Ingester", "parse"]

CALLS_PER_STEP = 64
CACHE_BYTES_MAX = 64 * 1024 * 1024
CALLS_PER_SAVE = 32  # these two keep a transaction near 5 ms
TOKENS_PER_SAVE = 20_000


class Ingester:
    """Parses pending calls and saves them; safe to repeat, idempotent by call id.

    One at a time works on a store (control's lease sees to that); a second one would do the same
    work again without harm.
    """

    def __init__(self, store: Store, *, cache_bytes_max: int = CACHE_BYTES_MAX) -> None:
        self._store = store
        self._bases = Bases(store.parents, cache_bytes_max)

    def step(self, limit: int = CALLS_PER_STEP) -> int:
        """Parse and save up to ``limit`` pending calls, in short transactions; how many."""
        pending = self._store.pending_calls(min(limit, CALLS_PER_STEP))
        calls = [_parsed(one) for one in pending]
        for chunk in _chunks(calls):
            bases = {call.id: base for call in chunk if (base := self._bases.find(call)) is not None}
            self._save(chunk, bases)
        return len(calls)

    def _save(self, calls: Sequence[ModelCall], bases: Mapping[str, ContentBase]) -> None:
        try:
            self._store.save_calls(calls, bases)
        except StoreError:
            self._bases.forget()  # it counts on these calls, and they may not be there
            raise


def _parsed(pending: PendingCall) -> ModelCall:
    return parse(pending.raw, late=pending.late)


def _chunks(calls: Sequence[ModelCall]) -> list[list[ModelCall]]:
    """The calls in order, cut where a transaction would grow too long."""
    chunks: list[list[ModelCall]] = []
    tokens = TOKENS_PER_SAVE
    for call in calls:
        if tokens >= TOKENS_PER_SAVE or len(chunks[-1]) >= CALLS_PER_SAVE:
            chunks.append([])
            tokens = 0
        chunks[-1].append(call)
        tokens += len(call.prompt_ids) + len(call.sampled_ids)
    return chunks

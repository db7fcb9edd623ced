"""Stitches: by what a call that names no rollout is recognised."""

from collections.abc import Mapping, Sequence

from capture.sqlite.base import Base
from capture.types import RawCall, Stitch

PRUNED_AT_ONCE = 5000
_FIND = "SELECT rollout_id FROM stitches WHERE key_id = ? AND digest = ?"
_WRITE = (
    "INSERT INTO stitches VALUES (?, ?, ?, ?, ?) ON CONFLICT (key_id, digest) DO UPDATE SET "
    "rollout_id = CASE WHEN rollout_id = excluded.rollout_id THEN rollout_id END, "
    "call_id = excluded.call_id, at = excluded.at"
)
_SUPERSEDE = (
    "DELETE FROM stitches WHERE key_id = ? AND digest = ? AND rollout_id IS NOT NULL AND EXISTS "
    "(SELECT 1 FROM calls WHERE calls.id = stitches.call_id "
    "AND body_hash = ? AND (retry_count < ? OR idempotency_key = ?) AND undelivered = 1)"
)


class Stitches(Base):
    """The methods of `capture.store.Store` for stitches."""

    def stitched(self, stitches: Sequence[tuple[str, bytes]]) -> dict[tuple[str, bytes], str | None]:
        with self._read():
            rows = ((one, self._row(_FIND, one)) for one in stitches)
            return {one: row[0] for one, row in rows if row is not None}

    def share_stitches(self, stitches: Sequence[tuple[str, bytes]]) -> None:
        now = self.now()
        with self._write():
            self._db.executemany(_WRITE, [(key_id, digest, None, None, now) for key_id, digest in stitches])

    def prune_stitches(self, older_than_s: float) -> int:
        with self._write():
            self._db.execute(
                "DELETE FROM stitches WHERE (key_id, digest) IN "
                "(SELECT key_id, digest FROM stitches WHERE at < ? LIMIT ?)",
                (self.now() - older_than_s, PRUNED_AT_ONCE),
            )
            return int(self._db.changes())

    def _write_stitches(self, records: Sequence[RawCall], stitches: Mapping[str, Sequence[Stitch]]) -> None:
        """Inside the transaction that commits the records.

        A repeated request whose earlier answer did not arrive takes that one's place: the agent has only
        one of the two. Whatever else two rollouts were given is shared from then on.
        """
        now = self.now()
        for record in records:
            key_id, found = record.key_id, stitches.get(record.id, ())
            if record.retry_count or record.idempotency_key:
                sent = record.body_hash, record.retry_count, record.idempotency_key
                self._db.executemany(_SUPERSEDE, [(key_id, one.digest, *sent) for one in found])
            self._db.executemany(
                _WRITE, [(key_id, one.digest, one.rollout_id, record.id, now) for one in found]
            )

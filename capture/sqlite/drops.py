"""Leaving the pipeline: a rollout is dropped once, with a reason and with its tokens counted."""

from collections.abc import Iterable

from capture.sqlite.base import Base

OWNED = (
    "SELECT coalesce(sum(sampled_tokens), 0) FROM calls "
    "WHERE calls.rollout_id = {rollout} AND ingested_at IS NOT NULL AND for_training AND excluded IS NULL "
    "AND policy IS NOT NULL"
)
"""Trainable sampled tokens of one rollout, as SQL."""


class Drops(Base):
    """What the nouns share when they drop; always inside the caller's transaction."""

    def _drop(self, rollout_ids: Iterable[str], reason: str, *, state: str = "dropped") -> int:
        """Give rollouts for training that have no drop yet their reason and state; how many."""
        now = self.now()
        dropped = 0
        for rollout_id in rollout_ids:
            rows = self._rows(
                "UPDATE rollouts SET state = ?, drop_reason = ?, rescore = 0 WHERE id = ? AND for_training "
                "AND drop_reason IS NULL AND state != 'trained' RETURNING id",
                (state, reason, rollout_id),
            )
            if rows:
                self._db.execute(
                    f"INSERT INTO drops VALUES (?1, ?2, ({OWNED.format(rollout='?1')}), ?3)",
                    (rollout_id, reason, now),
                )
                dropped += 1
        return dropped

    def _recount_drops(self, rollout_ids: Iterable[str]) -> None:
        """Calls of these rollouts changed: dropped ones among them count their tokens anew."""
        self._db.executemany(
            f"UPDATE drops SET tokens = ({OWNED.format(rollout='?1')}) WHERE rollout_id = ?1",
            [(rollout_id,) for rollout_id in rollout_ids],
        )

    def _drop_group(self, group_id: str, reason: str) -> int:
        """The group and every member that is still in the pipeline."""
        self._db.execute(
            "UPDATE groups SET state = 'dropped' WHERE id = ? AND state NOT IN ('trained', 'dropped')",
            (group_id,),
        )
        members = self._rows("SELECT id FROM rollouts WHERE group_id = ?", (group_id,))
        return self._drop((row[0] for row in members), reason)

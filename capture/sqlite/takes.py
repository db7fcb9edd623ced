"""Taking a batch: which closed groups the learner gets, and which it never will."""

from collections.abc import Sequence
from itertools import groupby
from operator import itemgetter
from typing import Any

from capture.errors import NotFound
from capture.ids import new_id
from capture.sqlite.rollouts import COLUMNS, rollout_from
from capture.sqlite.versions import Versions
from capture.store import ALL_GROUPS
from capture.types import Batch, GroupFilter, Lineage

LINEAGE_COLUMNS = "id, run_id, policy, start_version, head_version, step, checkpoint, ended"


class Takes(Versions):
    """The methods of `capture.store.Store` by which the learner takes."""

    def lineage(self, run_id: str) -> Lineage:
        row = self._row(f"SELECT {LINEAGE_COLUMNS} FROM lineages WHERE run_id = ?", (run_id,))
        if row is None:
            raise NotFound(f"no run {run_id}")
        return lineage_from(row)

    def take_batch(
        self,
        run_id: str,
        *,
        epoch: int,
        groups: int,
        batch_wait_s: float,
        staleness_max: int,
        unless: GroupFilter = ALL_GROUPS,
    ) -> Batch | None:
        with self._write():
            lineage = self.lineage(run_id)
            self._fence(f"learner:{lineage.policy}", epoch)
            taken = self._row(
                "SELECT id, taken_at FROM batches WHERE run_id = ? AND state = 'taken' ORDER BY id", (run_id,)
            )
            if taken is not None:
                return self._batch(taken[0], run_id, taken[1])
            self._drop_stale(lineage, staleness_max)
            self._drop_filtered(run_id, unless)
            ready = self._rows(
                "SELECT id, closed_at FROM groups WHERE run_id = ? AND state = 'closed' AND NOT EXISTS "
                "(SELECT 1 FROM rollouts WHERE group_id = groups.id AND rescore = 1) "
                "ORDER BY closed_at, id LIMIT ?",
                (run_id, groups),
            )
            now = self.now()
            if not ready or (len(ready) < groups and now - ready[0][1] < batch_wait_s):
                return None
            return self._take(run_id, [row[0] for row in ready], now)

    def _take(self, run_id: str, group_ids: Sequence[str], now: float) -> Batch:
        batch_id = new_id("b")
        self._db.execute(
            "INSERT INTO batches (id, run_id, state, taken_at) VALUES (?, ?, 'taken', ?)",
            (batch_id, run_id, now),
        )
        for group_id in group_ids:
            self._db.execute(
                "UPDATE groups SET state = 'taken', batch_id = ? WHERE id = ?", (batch_id, group_id)
            )
            self._db.execute(
                "UPDATE rollouts SET state = 'taken', batch_id = ? WHERE group_id = ? AND state = 'grouped'",
                (batch_id, group_id),
            )
        return self._batch(batch_id, run_id, now)

    def _batch(self, batch_id: str, run_id: str, taken_at: float) -> Batch:
        rows = self._rows(f"SELECT {COLUMNS} FROM rollouts WHERE batch_id = ? ORDER BY id", (batch_id,))
        order = self._rows("SELECT id FROM groups WHERE batch_id = ? ORDER BY closed_at, id", (batch_id,))
        groups: dict[str | None, list[Any]] = {row[0]: [] for row in order}
        for row in rows:
            rollout = rollout_from(row)
            groups[rollout.group_id].append(rollout)
        return Batch(id=batch_id, run_id=run_id, taken_at=taken_at, groups=list(groups.values()))

    def _drop_stale(self, lineage: Lineage, staleness_max: int) -> None:
        """Drop closed groups in which some version is not among the newest of the lineage. Who is observed
        may be served another one from call to call."""
        fresh: list[int] = []
        version: int | None = lineage.head_version
        while version is not None and len(fresh) <= staleness_max:
            fresh.append(version)
            version = self._value(
                "SELECT parent FROM versions WHERE policy = ? AND version = ?", (lineage.policy, version)
            )
        old = f"NOT IN ({', '.join('?' * len(fresh))})"
        stale = self._rows(
            "SELECT DISTINCT groups.id FROM groups JOIN rollouts ON rollouts.group_id = groups.id "
            "WHERE groups.run_id = ? AND groups.state = 'closed' AND rollouts.state = 'grouped' "
            f"AND (coalesce(rollouts.policy_version, -1) {old} OR (passive AND EXISTS (SELECT 1 FROM calls "
            f"WHERE rollout_id = rollouts.id AND excluded IS NULL AND calls.policy_version {old})))",
            (lineage.run_id, *fresh, *fresh),
        )
        for row in stale:
            self._drop_group(row[0], "stale")

    def _drop_filtered(self, run_id: str, unless: GroupFilter) -> None:
        """Drop closed groups, no reward of which is to be scored again, for which the filter has a reason."""
        if unless == ALL_GROUPS:
            return
        rows = self._rows(
            "SELECT groups.id, reward FROM groups JOIN rollouts ON rollouts.group_id = groups.id "
            "WHERE groups.run_id = ? AND groups.state = 'closed' AND rollouts.state = 'grouped' "
            "AND NOT EXISTS (SELECT 1 FROM rollouts WHERE group_id = groups.id AND rescore = 1) "
            "ORDER BY groups.id",
            (run_id,),
        )
        for group_id, members in groupby(rows, key=itemgetter(0)):
            reason = unless.reason([reward for _, reward in members])
            if reason is not None:
                self._drop_group(group_id, reason)


def lineage_from(row: tuple[Any, ...]) -> Lineage:
    """A row of the table `lineages` as a Lineage."""
    return Lineage(**dict(zip(LINEAGE_COLUMNS.split(", "), (*row[:-1], bool(row[-1])), strict=True)))

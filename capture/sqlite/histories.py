"""One rollout's story: what the other nouns know of it, read in one transaction."""

from capture.errors import Conflict, NotFound
from capture.sqlite.passive import GROUP_COLUMNS, group_from
from capture.sqlite.rollouts import COLUMNS, Rollouts, from_json, rollout_from
from capture.sqlite.takes import LINEAGE_COLUMNS, lineage_from
from capture.store import BatchRow, Drop, History, WaitingCall
from capture.types import Group, LedgerRow, Lineage, Rollout

MEMBERS_MAX = 10_000
_NAMED_MAX = 3  # candidates that an ambiguous id's error names


class Histories(Rollouts):
    """The methods of `capture.store.Store` that look at one rollout from every side."""

    def find_rollout(self, text: str) -> str:
        with self._read():
            for sql in ("SELECT id FROM rollouts WHERE id = ?", "SELECT rollout_id FROM calls WHERE id = ?"):
                if (exact := self._value(sql, (text,))) is not None:
                    return str(exact)
            past = text + "\U0010ffff"
            rows = self._rows(
                "SELECT id FROM rollouts WHERE id >= ? AND id < ? ORDER BY id LIMIT ?",
                (text, past, _NAMED_MAX + 1),
            ) or self._rows(
                "SELECT DISTINCT rollout_id FROM (SELECT rollout_id FROM calls WHERE id >= ? AND id < ? "
                "LIMIT 1000) LIMIT ?",
                (text, past, _NAMED_MAX + 1),
            )
        if not rows or not text:
            raise NotFound(f"no rollout or call {text!r}")
        if len(rows) > 1:
            named = ", ".join(row[0] for row in rows[:_NAMED_MAX])
            more = ", …" if len(rows) > _NAMED_MAX else ""
            raise Conflict(f"{text} could be {named}{more}: give more of the id")
        return str(rows[0][0])

    def history(self, rollout_id: str) -> History:
        with self._read():
            rollout = self.rollout(rollout_id)
            group, members = self._group_of(rollout)
            drop = self._row("SELECT reason, tokens, at FROM drops WHERE rollout_id = ?", (rollout_id,))
            posted = self._rows("SELECT name, value FROM posted_scores WHERE rollout_id = ?", (rollout_id,))
            now = self.now()
            flights = self._rows("SELECT rollouts FROM in_flight WHERE expires_at > ?", (now,))
            ready = "SELECT count(*) FROM groups WHERE run_id = ? AND state = 'closed'"
            leases = self._rows("SELECT name FROM leases WHERE expires_at > ? ORDER BY name", (now,))
            return History(
                rollout=rollout,
                group=group,
                members=members,
                ledger=self._ledger_of(rollout, group),
                drop=None if drop is None else Drop(*drop),
                batch=None if rollout.batch_id is None else self._batch_row(rollout.batch_id),
                waiting=self._waiting(rollout_id),
                calls_in_flight=sum(from_json(row[0]).get(rollout_id, 0) for row in flights),
                posted=dict(posted),
                lineage=self._lineage_of(rollout),
                run_end_reason=self._value("SELECT end_reason FROM runs WHERE id = ?", (rollout.run_id,)),
                groups_ready=int(self._value(ready, (rollout.run_id,))),
                leases=[row[0] for row in leases],
            )

    def _group_of(self, rollout: Rollout) -> tuple[Group | None, list[Rollout]]:
        row = self._row(f"SELECT {GROUP_COLUMNS} FROM groups WHERE id = ?", (rollout.group_id,))
        if row is None:
            return None, []
        members = self._rows(
            f"SELECT {COLUMNS} FROM rollouts WHERE group_id = ? ORDER BY id LIMIT ?",
            (rollout.group_id, MEMBERS_MAX),
        )
        return group_from(row), [rollout_from(member) for member in members]

    def _lineage_of(self, rollout: Rollout) -> Lineage | None:
        row = self._row(f"SELECT {LINEAGE_COLUMNS} FROM lineages WHERE run_id = ?", (rollout.run_id,))
        return None if row is None else lineage_from(row)

    def _ledger_of(self, rollout: Rollout, group: Group | None) -> dict[str, LedgerRow]:
        rows = self._rows(
            "SELECT rollout_id, trained_tokens, zero_advantage_tokens, advantage FROM ledger "
            "WHERE rollout_id = ?1 OR rollout_id IN (SELECT id FROM rollouts WHERE group_id = ?2)",
            (rollout.id, None if group is None else group.id),
        )
        return {row[0]: LedgerRow(*row) for row in rows}

    def _batch_row(self, batch_id: str) -> BatchRow | None:
        row = self._row(
            "SELECT batches.id, batches.state, taken_at, batches.committed_at, steps.step, batches.version, "
            "reason, (SELECT count(*) FROM groups WHERE batch_id = batches.id) FROM batches "
            "LEFT JOIN steps ON steps.batch_id = batches.id WHERE batches.id = ?",
            (batch_id,),
        )
        if row is None:
            return None
        return BatchRow(**dict(zip(BatchRow.__struct_fields__, row, strict=True)))

    def _waiting(self, rollout_id: str) -> list[WaitingCall]:
        rows = self._rows(
            "SELECT id, started_at, ended_at, status, policy_version, late, error FROM calls "
            "WHERE rollout_id = ? AND ingested_at IS NULL ORDER BY started_at, id",
            (rollout_id,),
        )
        return [
            WaitingCall(
                id=id,
                started_at=started_at,
                ended_at=ended_at,
                status=status,
                policy_version=version,
                late=bool(late),
                error=error,
            )
            for id, started_at, ended_at, status, version, late, error in rows
        ]

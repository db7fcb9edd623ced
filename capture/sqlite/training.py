"""Runs and batches: starting, committing exactly once, ending."""

from collections.abc import Collection, Mapping
from typing import Any

import msgspec

from capture.errors import Conflict, NotFound
from capture.sqlite.drops import OWNED
from capture.sqlite.rollouts import from_json
from capture.sqlite.takes import LINEAGE_COLUMNS, Takes
from capture.types import Commit, Lineage, RewardMean, StepRow, Version


class Training(Takes):
    """The methods of `capture.store.Store` for runs and for the learner's commits."""

    # -- runs --------------------------------------------------------------------------------

    def start_run(
        self, run_id: str, policy: str, settings: Mapping[str, Any], *, start_version: int = 0
    ) -> Lineage:
        now = self.now()
        with self._write():
            if self._value("SELECT 1 FROM runs WHERE id = ?", (run_id,)):
                return self.lineage(run_id)
            lineage = f"l_{run_id}"
            self._start_policy(policy, None, None)
            self._db.execute(
                "UPDATE versions SET lineage = ? WHERE policy = ? AND lineage = ''", (lineage, policy)
            )
            self._set_start(policy, start_version)
            text = msgspec.json.encode(dict(settings)).decode()
            self._db.execute("INSERT INTO runs VALUES (?, ?, ?, ?, NULL)", (run_id, policy, text, now))
            self._db.execute(
                f"INSERT INTO lineages ({LINEAGE_COLUMNS}) VALUES (?, ?, ?, ?, ?, 0, NULL, 0)",
                (lineage, run_id, policy, start_version, start_version),
            )
            return self.lineage(run_id)

    def _set_start(self, policy: str, start: int) -> None:
        """A run's training rollouts begin at its starting version."""
        found = self._rows(
            "UPDATE versions SET state = 'active' WHERE policy = ? AND version = ? "
            "AND state IN ('active', 'retired') RETURNING version",
            (policy, start),
        )
        if not found:
            raise NotFound(f"policy {policy} has no version {start} that ever was active")
        self._db.execute("UPDATE policies SET active = ? WHERE policy = ?", (start, policy))

    def run_settings(self, run_id: str) -> dict[str, Any]:
        text = self._value("SELECT settings FROM runs WHERE id = ?", (run_id,))
        if text is None:
            raise NotFound(f"no run {run_id}")
        settings: dict[str, Any] = from_json(text)
        return settings

    def latest_run(self) -> str | None:
        found = self._value("SELECT id FROM runs ORDER BY created_at DESC, id DESC LIMIT 1")
        return None if found is None else str(found)

    def end_run(self, run_id: str, reason: str) -> int:
        with self._write():
            self.lineage(run_id)
            self._db.execute(
                "UPDATE runs SET end_reason = coalesce(end_reason, ?) WHERE id = ?", (reason, run_id)
            )
            self._db.execute("UPDATE lineages SET ended = 1 WHERE run_id = ?", (run_id,))
            self._db.execute(
                "UPDATE batches SET state = 'dropped', reason = ? WHERE run_id = ? AND state = 'taken'",
                (reason, run_id),
            )
            self._db.execute(
                "UPDATE groups SET state = 'dropped' "
                "WHERE run_id = ? AND state NOT IN ('trained', 'dropped')",
                (run_id,),
            )
            left = self._rows(
                "SELECT id FROM rollouts WHERE run_id = ? AND for_training AND drop_reason IS NULL "
                "AND state != 'trained'",
                (run_id,),
            )
            return self._drop((row[0] for row in left), reason)

    # -- groups of a run ---------------------------------------------------------------------

    def groups_of_run(self, run_id: str) -> dict[str, int]:
        rows = self._rows("SELECT state, count(*) FROM groups WHERE run_id = ? GROUP BY state", (run_id,))
        return dict(rows)

    def group_count(self, run_id: str) -> int:
        sql = "SELECT count(*) FROM groups WHERE run_id = ? AND passive_key IS NULL"
        return int(self._value(sql, (run_id,)))

    def outstanding_groups(self, run_id: str) -> int:
        sql = (
            "SELECT count(*) FROM groups WHERE run_id = ? AND state IN ('open', 'closed', 'taken') "
            "AND passive_key IS NULL"
        )
        return int(self._value(sql, (run_id,)))

    # -- batches -----------------------------------------------------------------------------

    def commit_batch(self, commit: Commit) -> Version | None:
        with self._write():
            lineage = self.lineage(commit.run_id)
            self._fence(f"learner:{lineage.policy}", commit.epoch)
            row = self._row(
                "SELECT state, version FROM batches WHERE id = ? AND run_id = ?",
                (commit.batch_id, commit.run_id),
            )
            if row is None:
                raise NotFound(f"no batch {commit.batch_id} in run {commit.run_id}")
            if row[0] == "committed":
                return None if row[1] is None else self._version(lineage.policy, row[1])
            if row[0] != "taken" or commit.lineage != lineage.id:
                raise Conflict(f"batch {commit.batch_id} is {row[0]}, its lineage is {lineage.id}")
            self._drop_left_out(commit)
            self._write_ledger(commit)
            version = self._new_version(lineage, commit) if commit.new_version else None
            head = lineage.head_version if version is None else version.version
            self._finish_batch(commit, head, None if version is None else head)
            return version

    def _drop_left_out(self, commit: Commit) -> None:
        """What the learner left out of the batch leaves it before anything is counted."""
        for rollout_id, reason in commit.dropped.items():
            found = self._rows(
                "UPDATE rollouts SET batch_id = NULL WHERE id = ? AND batch_id = ? RETURNING id",
                (rollout_id, commit.batch_id),
            )
            if not found:
                raise Conflict(f"batch {commit.batch_id} has no rollout {rollout_id} to leave out")
            self._drop([rollout_id], reason)

    def _write_ledger(self, commit: Commit) -> None:
        """One row for every rollout of the batch, its tokens those that its calls have."""
        rows = self._rows(
            f"SELECT id, ({OWNED.format(rollout='rollouts.id')}) FROM rollouts WHERE batch_id = ?",
            (commit.batch_id,),
        )
        owned: dict[str, int] = dict(rows)
        given = {row.rollout_id: row.trained_tokens + row.zero_advantage_tokens for row in commit.rows}
        if given != owned or len(given) != len(commit.rows):
            wrong = sorted(id for id in owned.keys() | given.keys() if owned.get(id) != given.get(id))
            shown = ", ".join(f"{id}: {given.get(id)} given, {owned.get(id)} owned" for id in wrong[:3])
            raise Conflict(f"batch {commit.batch_id}: {len(wrong)} ledger rows are wrong ({shown})")
        self._db.executemany(
            "INSERT INTO ledger VALUES (?, ?, ?, ?, ?, ?)",
            [
                (
                    commit.lineage,
                    row.rollout_id,
                    commit.batch_id,
                    row.trained_tokens,
                    row.zero_advantage_tokens,
                    row.advantage,
                )
                for row in commit.rows
            ],
        )

    def _new_version(self, lineage: Lineage, commit: Commit) -> Version:
        """The next number of the policy's sequence, as the child of the lineage's head."""
        parent = self._version(lineage.policy, lineage.head_version)
        number = self._value(
            "UPDATE policies SET next_version = next_version + 1 WHERE policy = ? RETURNING next_version - 1",
            (lineage.policy,),
        )
        self._db.execute(
            "INSERT INTO versions VALUES (?, ?, ?, ?, ?, 'committed', NULL, NULL, ?, NULL, ?)",
            (
                lineage.policy,
                number,
                lineage.id,
                parent.version,
                commit.step,
                self.now(),
                parent.distance + 1,
            ),
        )
        return self._version(lineage.policy, number)

    def _finish_batch(self, commit: Commit, head: int, made: int | None) -> None:
        """Head, step row and states; the last part of the commit's transaction."""
        now = self.now()
        batch = (commit.batch_id,)
        self._db.execute(
            "UPDATE lineages SET head_version = ?, step = ?, checkpoint = ? WHERE id = ?",
            (head, commit.step, commit.checkpoint, commit.lineage),
        )
        self._db.execute(
            "UPDATE batches SET state = 'committed', committed_at = ?, version = ? WHERE id = ?",
            (now, made, commit.batch_id),
        )
        self._db.execute("UPDATE groups SET state = 'trained' WHERE batch_id = ?", batch)
        self._db.execute("UPDATE rollouts SET state = 'trained' WHERE batch_id = ?", batch)
        metrics = msgspec.json.encode(commit.metrics).decode()
        self._db.execute(
            "INSERT INTO steps VALUES (?, ?, ?, ?, ?, ?)",
            (commit.batch_id, commit.run_id, commit.step, head, now, metrics),
        )

    def drop_batch(self, batch_id: str, reason: str, epoch: int) -> None:
        with self._write():
            row = self._row(
                "SELECT batches.state, policy FROM batches JOIN runs ON runs.id = run_id "
                "WHERE batches.id = ?",
                (batch_id,),
            )
            if row is None:
                raise NotFound(f"no batch {batch_id}")
            self._fence(f"learner:{row[1]}", epoch)
            if row[0] == "committed":
                raise Conflict(f"batch {batch_id} is committed")
            self._db.execute(
                "UPDATE batches SET state = 'dropped', reason = coalesce(reason, ?) WHERE id = ?",
                (reason, batch_id),
            )
            for group in self._rows("SELECT id FROM groups WHERE batch_id = ?", (batch_id,)):
                self._drop_group(group[0], reason)

    def reward_means(
        self, run_id: str, asked: Collection[tuple[str, str | None]]
    ) -> dict[tuple[str, str | None], RewardMean]:
        sql = (
            "SELECT count(*), avg(reward) FROM rollouts "
            "WHERE run_id = ? AND key_id = ? AND scenario_id IS ? AND state = 'trained'"
        )
        found = {one: self._row(sql, (run_id, *one)) for one in asked}
        return {one: RewardMean(*row) for one, row in found.items() if row is not None and row[0]}

    # -- history -----------------------------------------------------------------------------

    def steps(self, run_id: str) -> list[StepRow]:
        rows = self._rows(
            "SELECT run_id, batch_id, step, version, committed_at, metrics FROM steps WHERE run_id = ? "
            "ORDER BY committed_at, batch_id",
            (run_id,),
        )
        names = StepRow.__struct_fields__
        return [StepRow(**dict(zip(names, (*row[:5], from_json(row[5])), strict=True))) for row in rows]

    def put_metrics(self, run_id: str, kind: str, metrics: Mapping[str, Any]) -> None:
        body = msgspec.json.encode(dict(metrics)).decode()
        with self._write():
            self._db.execute(
                "INSERT INTO metrics (run_id, kind, at, body) VALUES (?, ?, ?, ?)",
                (run_id, kind, self.now(), body),
            )

    def get_metrics(self, run_id: str, kind: str) -> list[dict[str, Any]]:
        rows = self._rows(
            "SELECT body FROM metrics WHERE run_id = ? AND kind = ? ORDER BY id", (run_id, kind)
        )
        return [from_json(row[0]) for row in rows]

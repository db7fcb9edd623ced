"""Rollouts: opening, reading, sealing."""

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from capture.errors import Conflict, NotFound
from capture.sqlite.drops import Drops
from capture.types import FinishStatus, Rollout

COLUMNS = (
    "id, key_id, mode, state, status, run_id, scenario_id, group_id, attempt, replaces, session, headless, "
    "passive, policy, policy_version, secret_hash, call_count, max_calls, created_at, last_call_at, "
    "sealed_at, reward, reward_error, script_hash, drop_reason, batch_id, scores, metrics, scenario, "
    "metadata, stdout"
)
_INSERT = (
    f"INSERT INTO rollouts ({COLUMNS}) VALUES ({', '.join('?' * len(COLUMNS.split(', ')))}) "
    "ON CONFLICT (id) DO NOTHING RETURNING id"
)
_JSON = ("scores", "metrics", "scenario", "metadata")
_NAMES = COLUMNS.split(", ")


def to_json(value: Any) -> str | None:
    """JSON text, or None for None and for the empty mapping."""
    return None if value is None or value == {} else msgspec.json.encode(value).decode()


def from_json(text: str | None) -> Any:
    """What `to_json` was given; None for None."""
    return None if text is None else msgspec.json.decode(text)


class Rollouts(Drops):
    """The methods of `capture.store.Store` for rollouts up to their end."""

    # -- opening -----------------------------------------------------------------------------

    def open_rollout(self, rollout: Rollout, *, group_size: int | None = None) -> Rollout:
        with self._write():
            rollout = self._pinned(rollout)
            if rollout.mode == "train" and self._ended(rollout.run_id):
                raise Conflict(f"run {rollout.run_id} has ended: it trains on no more rollouts")
            if rollout.group_id is not None:
                self._join_group(rollout, group_size)
            if not self._insert_rollout(rollout):
                raise Conflict(f"rollout {rollout.id} exists")
            return self.rollout(rollout.id)

    def _pinned(self, rollout: Rollout) -> Rollout:
        """With its policy filled in, and for an evaluation the active version, for a train rollout in a group
        the live run. A train rollout gets its version with its first call: what waits grows no older."""
        policy = rollout.policy or self._only_policy()
        version, run_id = rollout.policy_version, rollout.run_id
        if version is None and rollout.mode == "eval":
            version = self._active(policy)
        if run_id is None and rollout.mode == "train" and rollout.group_id is not None:
            run_id = self._live_run(policy)
        return msgspec.structs.replace(rollout, policy=policy, policy_version=version, run_id=run_id)

    def _active(self, policy: str | None) -> int | None:
        found = self._value("SELECT active FROM policies WHERE policy = ?", (policy,))
        return None if found is None else int(found)

    def _live_run(self, policy: str | None) -> str | None:
        """The newest run of the policy that has not ended."""
        found = self._value(
            "SELECT id FROM runs WHERE policy = ? AND end_reason IS NULL "
            "ORDER BY created_at DESC, id DESC LIMIT 1",
            (policy,),
        )
        return None if found is None else str(found)

    def _ended(self, run_id: str | None) -> bool:
        return self._value("SELECT end_reason FROM runs WHERE id = ?", (run_id,)) is not None

    def _only_policy(self) -> str | None:
        rows = self._rows("SELECT policy FROM policies LIMIT 2")
        return rows[0][0] if len(rows) == 1 else None

    def _join_group(self, rollout: Rollout, size: int | None) -> None:
        row = self._row("SELECT state, run_id, passive_key FROM groups WHERE id = ?", (rollout.group_id,))
        if row is None:
            self._db.execute(
                "INSERT INTO groups (id, run_id, scenario_id, size, state, created_at) "
                "VALUES (?, ?, ?, ?, 'open', ?)",
                (rollout.group_id, rollout.run_id, rollout.scenario_id, size or 0, self.now()),
            )
        elif row[2] is not None or self._value(
            "SELECT 1 FROM rollouts WHERE group_id = ? AND key_id != ?", (rollout.group_id, rollout.key_id)
        ):
            raise NotFound(f"no group {rollout.group_id}")  # under this key
        elif row[0] != "open":
            raise Conflict(f"group {rollout.group_id} is {row[0]}: it takes no more rollouts")
        elif row[1] != rollout.run_id:
            raise Conflict(f"group {rollout.group_id} belongs to run {row[1]}")

    def _insert_rollout(self, rollout: Rollout) -> bool:
        """False if the id exists."""
        if not rollout.created_at:
            rollout = msgspec.structs.replace(rollout, created_at=self.now())
        values = {name: getattr(rollout, name) for name in _NAMES}
        for name in _JSON:
            values[name] = to_json(values[name])
        return bool(self._rows(_INSERT, tuple(values.values())))

    def session_rollout(self, key_id: str, session: str, fresh: Rollout) -> Rollout:
        sql = (
            f"SELECT {COLUMNS} FROM rollouts "
            "WHERE key_id = ? AND session = ? AND state = 'open' AND mode = 'observe'"
        )
        found = self._row(sql, (key_id, session))
        if found is not None:
            return rollout_from(found)
        with self._write():
            found = self._row(sql, (key_id, session))
            if found is not None:
                return rollout_from(found)
            fresh = msgspec.structs.replace(self._pinned(fresh), key_id=key_id, session=session)
            if not self._insert_rollout(fresh):
                raise Conflict(f"rollout {fresh.id} exists")
            return self.rollout(fresh.id)

    # -- reading -----------------------------------------------------------------------------

    def rollout(self, rollout_id: str) -> Rollout:
        row = self._row(f"SELECT {COLUMNS} FROM rollouts WHERE id = ?", (rollout_id,))
        if row is None:
            raise NotFound(f"no rollout {rollout_id}")
        return rollout_from(row)

    def rollouts(
        self,
        *,
        run_id: str | None = None,
        group_id: str | None = None,
        mode: str | None = None,
        states: Sequence[str] = (),
        limit: int = 1000,
        after: str | None = None,
    ) -> list[Rollout]:
        equal = {"run_id": run_id, "group_id": group_id, "mode": mode}
        where = [f"{name} = ?" for name, value in equal.items() if value is not None]
        args: list[Any] = [value for value in equal.values() if value is not None]
        if states:
            where.append(f"state IN ({', '.join('?' * len(states))})")
            args.extend(states)
        if after is not None:
            where.append("id > ?")
            args.append(after)
        clause = f"WHERE {' AND '.join(where)} " if where else ""
        rows = self._rows(f"SELECT {COLUMNS} FROM rollouts {clause}ORDER BY id LIMIT ?", (*args, limit))
        return [rollout_from(row) for row in rows]

    def _in_state(self, state: str, limit: int) -> list[Rollout]:
        sql = f"SELECT {COLUMNS} FROM rollouts WHERE state = ? LIMIT ?"
        return [rollout_from(row) for row in self._rows(sql, (state, limit))]

    def rollout_of_call(self, call_id: str) -> str:
        found = self._value("SELECT rollout_id FROM calls WHERE id = ?", (call_id,))
        if found is None:
            raise NotFound(f"no call {call_id}")
        return str(found)

    # -- sealing -----------------------------------------------------------------------------

    def seal_rollout(
        self,
        rollout_id: str,
        status: FinishStatus,
        *,
        metrics: Mapping[str, float] | None = None,
        stdout: str = "",
    ) -> Rollout:
        with self._write():
            rollout = self.rollout(rollout_id)
            if rollout.status is not None:
                if rollout.status != status:
                    raise Conflict(f"rollout {rollout_id} was sealed as {rollout.status}")
                return rollout
            state = "sealed" if rollout.state == "open" else rollout.state  # dropped stays dropped
            unasked = (
                self._active(rollout.policy) if rollout.mode == "train" else None
            )  # if no call pinned it
            self._db.execute(
                "UPDATE rollouts SET state = ?, status = ?, policy_version = coalesce(policy_version, ?), "
                "sealed_at = ?, metrics = ?, stdout = ? WHERE id = ?",
                (
                    state,
                    status,
                    unasked,
                    self.now(),
                    to_json({**rollout.metrics, **(metrics or {})}),
                    stdout,
                    rollout_id,
                ),
            )
            if status == "failed" and state == "sealed":
                self._db.execute("UPDATE rollouts SET state = 'failed' WHERE id = ?", (rollout_id,))
                self._drop([rollout_id], "failed", state="failed")
            return self.rollout(rollout_id)

    def touch_in_flight(self, holder: str, open_calls: Mapping[str, int], ttl_s: float) -> None:
        with self._write():
            self._db.execute("DELETE FROM in_flight WHERE expires_at < ?", (self.now() - 3600,))
            self._db.execute(
                "INSERT INTO in_flight VALUES (?, ?, ?) ON CONFLICT (holder) DO UPDATE SET "
                "expires_at = excluded.expires_at, rollouts = excluded.rollouts",
                (holder, self.now() + ttl_s, msgspec.json.encode(open_calls).decode()),
            )

    def idle_rollouts(self, idle_s: float, limit: int = 100) -> list[Rollout]:
        with self._read():
            now = self.now()
            live = self._rows("SELECT rollouts FROM in_flight WHERE expires_at > ?", (now,))
            busy = {
                rollout_id for row in live for rollout_id, calls in from_json(row[0]).items() if calls > 0
            }
            rows = self._rows(
                f"SELECT {COLUMNS} FROM rollouts WHERE state = 'open' "
                "AND max(coalesce(last_call_at, 0), created_at) <= ? ORDER BY id LIMIT ?",
                (now - idle_s, limit + len(busy)),
            )
            return [rollout for row in rows if (rollout := rollout_from(row)).id not in busy][:limit]


def rollout_from(row: tuple[Any, ...]) -> Rollout:
    """A row of `COLUMNS` as a Rollout."""
    fields = dict(zip(_NAMES, row, strict=True))
    fields["headless"] = bool(fields["headless"])
    fields["passive"] = bool(fields["passive"])
    for name in _JSON:
        fields[name] = from_json(fields[name])
    fields["scores"] = fields["scores"] or {}
    fields["metrics"] = fields["metrics"] or {}
    return Rollout(**fields)

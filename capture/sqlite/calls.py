"""Calls: the journal's frames in, parsed calls out as differences to earlier ones."""

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import msgspec

from capture.errors import Corrupt, NotFound
from capture.frames import unpack
from capture.reasons import LATE, OTHER_POLICY, UNDELIVERED
from capture.sqlite.content import (
    Content,
    Readable,
    Whole,
    blob,
    floats,
    pack_content,
    readable,
    unpack_content,
    unpack_tools,
)
from capture.sqlite.rollouts import COLUMNS, Rollouts, rollout_from
from capture.sqlite.stitches import Stitches
from capture.store import ContentBase, ParentContent, PendingCall
from capture.types import ModelCall, RawCall, Rollout, Stitch

CALLS_PER_SAVE = 64
HUNG_UP = 499  # the status of a call whose client left first
_ROWS_MAX = 128  # of one statement
_FRAMES_CACHED = 8
_BLOBS_KNOWN = 4096

_INSERT = (
    "INSERT INTO calls (id, rollout_id, key_id, mode, policy, policy_version, frame_id, place, started_at, "
    "ended_at, status, retry_count, body_hash, late, undelivered, failed, error, idempotency_key, passive) "
    "VALUES "
)
_HEADS = "SELECT json_group_array(json_array(id, mode, passive, state)) FROM rollouts WHERE id IN "
_MOVE = (
    "UPDATE rollouts SET call_count = call_count + moved.column2, last_call_at = ?, "
    "policy = coalesce(policy, moved.column3), policy_version = coalesce(policy_version, moved.column4) "
    "FROM (VALUES {values}) AS moved WHERE id = moved.column1"
)
_SAVE = (
    "UPDATE calls SET ingested_at = ?, prompt_tokens = ?, completion_tokens = ?, sampled_tokens = ?, "
    "finish_reason = ?, excluded = ? WHERE n = ?"
)
_CONTENT = f"INSERT INTO contents VALUES ({', '.join('?' * len(Content.__struct_fields__))})"
_CONTENT_COLUMNS = ", ".join(f"contents.{name}" for name in Content.__struct_fields__)


def marks(values: Sequence[Any]) -> str:
    """``?, ?`` for an SQL list of these values."""
    return ", ".join("?" * len(values))


def rows_of(rows: Sequence[Sequence[Any]]) -> tuple[str, list[Any]]:
    """``(?, ?), (?, ?)`` for an SQL ``VALUES`` of these rows, and what stands in it, in order."""
    return ", ".join([f"({marks(rows[0])})"] * len(rows)), [value for row in rows for value in row]


class Calls(Rollouts, Stitches):
    """The methods of `capture.store.Store` for the journal and for ingest.

    SQLite runs without the interpreter's lock, and the journal's thread must wait for it again after every
    row: what it writes of many calls is a few statements, one row long in what they answer.
    """

    # -- the journal -------------------------------------------------------------------------

    def commit_calls(
        self,
        frame: bytes,
        records: Sequence[RawCall],
        new: Sequence[Rollout],
        stitches: Mapping[str, Sequence[Stitch]] = MappingProxyType({}),
    ) -> None:
        ids = [record.id for record in records]
        touched = list({record.rollout_id for record in records})
        with self._write():
            for rollout in new:
                self._insert_rollout(self._pinned(rollout))
            found = self._value(f"{_HEADS} ({marks(touched)})", touched)
            heads: dict[str, list[Any]] = {
                rollout_id: head for rollout_id, *head in msgspec.json.decode(found)
            }
            if unknown := [rollout_id for rollout_id in touched if rollout_id not in heads]:
                raise NotFound(f"no rollout {', '.join(unknown)}")
            known = {row[0] for row in self._rows(f"SELECT id FROM calls WHERE id IN ({marks(ids)})", ids)}
            fresh = {record.id: place for place, record in enumerate(records) if record.id not in known}
            if not fresh:
                return
            self._db.execute("INSERT INTO frames (body, remaining) VALUES (?, ?)", (frame, len(fresh)))
            frame_id = self._db.last_insert_rowid()
            narrow = [
                _narrow(records[place], frame_id, place, *heads[records[place].rollout_id])
                for place in fresh.values()
            ]
            for start in range(0, len(narrow), _ROWS_MAX):
                values, args = rows_of(narrow[start : start + _ROWS_MAX])
                self._db.execute(_INSERT + values, args)
            self._move_heads([records[place] for place in fresh.values()])
            self._charge([records[place] for place in fresh.values()])
            if stitches:
                self._write_stitches([records[place] for place in fresh.values()], stitches)

    def _charge(self, records: Sequence[RawCall]) -> None:
        """Add up, in the calls' own transaction, what keys with a budget have used."""
        used: Counter[str] = Counter()
        for record in records:
            if record.charged_tokens:
                used[record.key_id] += record.charged_tokens
        if used:
            self._db.executemany(
                "INSERT INTO key_tokens VALUES (?, ?) ON CONFLICT (key_id) "
                "DO UPDATE SET tokens = tokens + excluded.tokens",
                list(used.items()),
            )

    def key_tokens(self, key_ids: Sequence[str]) -> dict[str, int]:
        sql = f"SELECT key_id, tokens FROM key_tokens WHERE key_id IN ({marks(key_ids)})"
        return dict(self._rows(sql, key_ids))

    def _move_heads(self, records: Sequence[RawCall]) -> None:
        now = self.now()
        counts = Counter(record.rollout_id for record in records)
        pins = {
            record.rollout_id: (record.policy, record.policy_version)
            for record in reversed(records)
            if record.policy is not None
        }
        moved = [(id, count, *pins.get(id, (None, None))) for id, count in counts.items()]
        for start in range(0, len(moved), _ROWS_MAX):
            values, args = rows_of(moved[start : start + _ROWS_MAX])
            self._db.execute(_MOVE.format(values=values), [now, *args])

    def raw_calls(self, rollout_id: str, *, but: Collection[str] = (), limit: int = 64) -> list[RawCall]:
        with self._read():
            rows = self._rows(
                "SELECT calls.id, frame_id, place FROM calls JOIN frames ON frames.id = frame_id "
                "WHERE rollout_id = ? ORDER BY n DESC LIMIT ?",
                (rollout_id, limit),
            )
            found = [(frame, place) for call_id, frame, place in reversed(rows) if call_id not in but]
            return [self._frame(frame)[place] for frame, place in found]

    def mark_undelivered(self, call_ids: Sequence[str]) -> None:
        with self._write():
            self._db.executemany("UPDATE calls SET undelivered = 1 WHERE id = ?", [(id,) for id in call_ids])

    def broken_calls(self, rollout_id: str) -> int:
        return int(
            self._value(
                "SELECT count(*) FROM calls WHERE rollout_id = ? "
                "AND (status >= 500 OR (error IS NOT NULL AND status < 400))",
                (rollout_id,),
            )
        )

    # -- ingest ------------------------------------------------------------------------------

    def pending_calls(self, limit: int) -> list[PendingCall]:
        with self._read():
            rows = self._rows(
                "SELECT id, frame_id, place, late FROM calls WHERE ingested_at IS NULL ORDER BY n LIMIT ?",
                (limit,),
            )
            pending = []
            for call_id, frame_id, place, late in rows:
                raw = self._frame(frame_id)[place]
                if raw.id != call_id:
                    raise Corrupt(f"frame {frame_id} has {raw.id} where call {call_id} should be")
                pending.append(PendingCall(raw=raw, late=bool(late)))
            return pending

    def _frame(self, frame_id: int) -> list[RawCall]:
        cached = self._frames.get(frame_id)
        if cached is None:
            body = self._value("SELECT body FROM frames WHERE id = ?", (frame_id,))
            if body is None:
                raise Corrupt(f"frame {frame_id} is gone, and its calls were never ingested")
            cached = self._frames[frame_id] = unpack(body)
            while len(self._frames) > _FRAMES_CACHED:
                del self._frames[next(iter(self._frames))]
        return cached

    def parents(self, rollout_id: str) -> list[ParentContent]:
        return [
            ParentContent(call_id=row[0], tokens=whole.tokens, messages=whole.messages)
            for row, _, whole in self._contents(rollout_id, "calls.id")
        ]

    def save_calls(self, calls: Sequence[ModelCall], bases: Mapping[str, ContentBase]) -> None:
        if len(calls) > CALLS_PER_SAVE:
            raise ValueError(f"{len(calls)} calls in one transaction; at most {CALLS_PER_SAVE}")
        now = self.now()
        new_blobs: set[bytes] = set()
        frames: Counter[int] = Counter()
        with self._write():
            for call in calls:
                frame_id = self._save_call(call, bases.get(call.id), now, new_blobs)
                if frame_id is not None:
                    frames[frame_id] += 1
            self._db.executemany(
                "UPDATE frames SET remaining = remaining - ?1, "
                "ingested_at = CASE WHEN remaining = ?1 THEN ?2 END WHERE id = ?3",
                [(count, now, frame_id) for frame_id, count in frames.items()],
            )
            self._recount_drops({call.rollout_id for call in calls})
        self._blobs |= new_blobs
        if len(self._blobs) > _BLOBS_KNOWN:
            self._blobs.clear()

    def _save_call(
        self, call: ModelCall, base: ContentBase | None, now: float, new_blobs: set[bytes]
    ) -> int | None:
        """The frame that it came from; None if it was saved before."""
        row = self._row(
            "SELECT n, frame_id, late, calls.policy, rollouts.policy, ingested_at FROM calls "
            "JOIN rollouts ON rollouts.id = rollout_id WHERE calls.id = ? AND rollout_id = ?",
            (call.id, call.rollout_id),
        )
        if row is None:
            raise NotFound(f"no call {call.id} in rollout {call.rollout_id}")
        n, frame_id, late, policy, own_policy, ingested_at = row
        if ingested_at is not None:
            return None
        excluded = call.untrainable or (LATE if late else OTHER_POLICY if policy != own_policy else None)
        sampled = len(call.sampled_ids) or call.completion_tokens
        counts = (call.prompt_tokens, call.completion_tokens, sampled)
        self._db.execute(_SAVE, (now, *counts, call.finish_reason, excluded, n))
        tools = blob(call.tools)
        if tools is not None and tools[0] not in self._blobs:
            self._db.execute("INSERT INTO blobs VALUES (?, ?) ON CONFLICT DO NOTHING", tools)
            new_blobs.add(tools[0])
        content = pack_content(call, n, self._numbered(call, n, base), tools and tools[0])
        self._db.execute(_CONTENT, tuple(getattr(content, name) for name in Content.__struct_fields__))
        return int(frame_id)

    def _numbered(self, call: ModelCall, n: int, base: ContentBase | None) -> tuple[int, ContentBase] | None:
        """The base with its number, if it is an earlier ingested call of the same rollout."""
        if base is None:
            return None
        base_n = self._value(
            "SELECT n FROM calls WHERE id = ? AND rollout_id = ? AND n < ? AND ingested_at IS NOT NULL",
            (base.content.call_id, call.rollout_id, n),
        )
        return None if base_n is None else (base_n, base)

    # -- reading back ------------------------------------------------------------------------

    def calls(self, rollout_id: str) -> list[ModelCall]:
        names = (
            "id",
            "rollout_id",
            "policy",
            "policy_version",
            "started_at",
            "ended_at",
            "status",
            "finish_reason",
            "prompt_tokens",
            "completion_tokens",
            "retry_count",
            "idempotency_key",
            "body_hash",
            "late",
            "undelivered",
            "excluded",
            "error",
        )
        with self._read():
            open_state = self.rollout(rollout_id).state in ("open", "sealed")
            found = self._contents(rollout_id, ", ".join(f"calls.{name}" for name in names))
            tools = {content.tools for _, content, _ in found if content.tools is not None}
            rows = self._rows(
                f"SELECT hash, body FROM blobs WHERE hash IN ({marks(list(tools))})", list(tools)
            )
            bodies = {hash: unpack_tools(body) for hash, body in rows}
        calls = []
        read: dict[int | None, Readable] = {}
        known: dict[bytes, dict[str, Any]] = {}
        for row, content, whole in found:
            fields = dict(zip(names, row, strict=True))
            excluded = fields.pop("excluded")
            said = read[content.n] = readable(content, whole, read.get(content.base), known)
            split = len(said.messages) - content.has_response
            fields["late"] = bool(fields["late"])
            # A mark that came after settling changes nothing: samples must agree with the balance.
            fields["undelivered"] = bool(fields["undelivered"]) if open_state else excluded == UNDELIVERED
            call = ModelCall(
                **fields,
                model=content.model,
                temperature=content.temperature,
                messages=said.messages[:split],
                tools=bodies[content.tools] if content.tools is not None else [],
                response=said.messages[-1] if content.has_response else None,
                prompt_ids=said.tokens[: content.prompt_count],
                sampled_ids=said.tokens[content.prompt_count :],
                sampled_logprobs=floats(content.logprobs),
                untrainable=excluded,
            )
            calls.append(call)
        return sorted(calls, key=lambda call: (call.started_at, call.id))

    def _contents(self, rollout_id: str, extra: str) -> list[tuple[tuple[Any, ...], Content, Whole]]:
        """Every ingested call of a rollout: the columns asked for, its content, and that made whole."""
        width = len(Content.__struct_fields__)
        rows = self._rows(
            f"SELECT {_CONTENT_COLUMNS}, {extra} FROM calls JOIN contents ON contents.n = calls.n "
            "WHERE calls.rollout_id = ? ORDER BY calls.n",
            (rollout_id,),
        )
        wholes: dict[int, Whole] = {}
        found = []
        for row in rows:
            content = Content(**dict(zip(Content.__struct_fields__, row[:width], strict=True)))
            base = None if content.base is None else wholes[content.base]
            whole = wholes[content.n] = unpack_content(content, base)
            found.append((row[width:], content, whole))
        return found

    def settleable(self, limit: int = 100) -> list[Rollout]:
        rows = self._rows(
            f"SELECT {COLUMNS} FROM rollouts WHERE state = 'sealed' AND NOT EXISTS "
            "(SELECT 1 FROM calls WHERE rollout_id = rollouts.id AND ingested_at IS NULL AND late = 0) "
            "LIMIT ?",
            (limit,),
        )
        return [rollout_from(row) for row in rows]

    def prune_frames(self, older_than_s: float) -> int:
        with self._write():
            self._db.execute("DELETE FROM frames WHERE ingested_at < ?", (self.now() - older_than_s,))
            return int(self._db.changes())


def _narrow(
    record: RawCall, frame_id: int, place: int, mode: str, passive: int, state: str
) -> tuple[Any, ...]:
    """The row of ``calls`` for a record of a rollout like this."""
    return (
        record.id,
        record.rollout_id,
        record.key_id,
        mode,
        record.policy,
        record.policy_version,
        frame_id,
        place,
        record.started_at,
        record.ended_at,
        record.status,
        record.retry_count,
        record.body_hash,
        int(state != "open"),
        int(record.status == HUNG_UP),
        int(record.status >= 400 or record.error is not None),
        record.error,
        record.idempotency_key,
        passive,
    )

"""Sums over the store: the token balance, counts, and every invariant checked."""

from typing import Any

from capture.reasons import SUPERSEDED
from capture.sqlite.base import Base
from capture.sqlite.invariants import INVARIANTS
from capture.store import Counts, FateCounts
from capture.types import Balance

_PENDING_STATES = "('open', 'sealed', 'ingested', 'scored', 'grouped', 'taken')"


class Sums(Base):
    """The reading methods of `capture.store.Store` that look over everything."""

    def balance(self, policy: str) -> Balance:
        with self._read():
            return self._balance(policy)

    def _balance(self, policy: str) -> Balance:
        of_policy = "policy = ? AND ingested_at IS NOT NULL"
        untrainable = self._sums(
            f"SELECT excluded, sum(sampled_tokens) FROM calls WHERE {of_policy} AND for_training "
            f"AND excluded IS NOT NULL GROUP BY excluded",
            policy,
        )
        not_for_training = self._sums(
            f"SELECT mode, sum(sampled_tokens) FROM calls WHERE {of_policy} AND NOT for_training "
            "GROUP BY mode",
            policy,
        )
        if SUPERSEDED in untrainable:
            not_for_training[SUPERSEDED] = untrainable.pop(SUPERSEDED)
        trained, zero_advantage = self._rows(
            "SELECT coalesce(sum(trained_tokens), 0), coalesce(sum(zero_advantage_tokens), 0) FROM ledger "
            "JOIN rollouts ON rollouts.id = rollout_id WHERE rollouts.policy = ?",
            (policy,),
        )[0]
        dropped = self._sums(
            "SELECT reason, sum(tokens) FROM drops JOIN rollouts ON rollouts.id = rollout_id "
            "WHERE rollouts.policy = ? GROUP BY reason",
            policy,
        )
        pending = self._value(
            "SELECT coalesce(sum(sampled_tokens), 0) FROM rollouts JOIN calls ON rollout_id = rollouts.id "
            f"WHERE state IN {_PENDING_STATES} AND rollouts.for_training AND calls.policy = ? "
            "AND ingested_at IS NOT NULL AND excluded IS NULL",
            (policy,),
        )
        sampled = self._value(
            f"SELECT coalesce(sum(sampled_tokens), 0) FROM calls WHERE {of_policy}", (policy,)
        )
        return Balance(sampled, trained, zero_advantage, dropped, untrainable, not_for_training, pending)

    def _sums(self, sql: str, *args: Any) -> dict[str, int]:
        return {name: total for name, total in self._rows(sql, args) if total}

    def counts(self, run_id: str | None = None) -> Counts:
        of_run = "" if run_id is None else "WHERE run_id = ?"
        of_rollout = (
            "" if run_id is None else "WHERE rollout_id IN (SELECT id FROM rollouts WHERE run_id = ?)"
        )
        more = "AND" if of_rollout else "WHERE"
        args = () if run_id is None else (run_id,)
        with self._read():
            return Counts(
                rollouts=self._sums(f"SELECT state, count(*) FROM rollouts {of_run} GROUP BY state", *args),
                groups=self._sums(f"SELECT state, count(*) FROM groups {of_run} GROUP BY state", *args),
                batches=self._sums(f"SELECT state, count(*) FROM batches {of_run} GROUP BY state", *args),
                calls=self._value(f"SELECT count(*) FROM calls {of_rollout}", args),
                calls_not_ingested=self._value(
                    f"SELECT count(*) FROM calls {of_rollout} {more} ingested_at IS NULL", args
                ),
                failed_calls=self._value(f"SELECT count(*) FROM calls {of_rollout} {more} failed = 1", args),
                drops=self._sums(f"SELECT reason, count(*) FROM drops {of_rollout} GROUP BY reason", *args),
                untrainable=self._sums(
                    f"SELECT excluded, count(*) FROM calls {of_rollout} {more} excluded IS NOT NULL "
                    "GROUP BY excluded",
                    *args,
                ),
            )

    def fate_counts(self, policy: str) -> FateCounts:
        with self._read():
            out = self._sums(
                "SELECT CASE WHEN for_training THEN coalesce(drop_reason, 'pending') ELSE mode END AS fate, "
                "count(*) FROM rollouts WHERE policy = ? AND state != 'trained' GROUP BY fate",
                policy,
            )
            in_batches = self._sums(
                "SELECT CASE WHEN trained_tokens > 0 THEN 'trained' WHEN zero_advantage_tokens > 0 "
                "THEN 'zero_advantage' ELSE 'no_tokens' END AS fate, count(*) FROM ledger "
                "JOIN rollouts ON rollouts.id = rollout_id WHERE policy = ? GROUP BY fate",
                policy,
            )
            calls = self._sums(
                "SELECT excluded, count(*) FROM calls WHERE excluded IS NOT NULL AND for_training "
                "AND coalesce(policy, ?1) = ?1 GROUP BY excluded",
                policy,
            )
        return FateCounts(out | in_batches, calls)

    def ledger_twice(self) -> int:
        found = self._value(
            "SELECT count(*) FROM (SELECT 1 FROM ledger GROUP BY rollout_id HAVING count(*) > 1)"
        )
        return int(found)

    def verify(self) -> list[str]:
        wrong: list[str] = []
        with self._read():
            for (line,) in self._rows("PRAGMA quick_check"):
                if line != "ok":
                    wrong.append(f"the file: {line}")
            wrong += [
                f"a row of {row[0]} refers to no row of {row[2]}"
                for row in self._rows("PRAGMA foreign_key_check")
            ]
            for sentence, sql in INVARIANTS:
                wrong += [f"{row[0]}: {sentence}" for row in self._rows(sql)]
            for (policy,) in self._rows("SELECT policy FROM policies"):
                balance = self._balance(policy)
                if not balance.exact:
                    wrong.append(f"policy {policy}: the token balance does not add up: {balance}")
        return wrong

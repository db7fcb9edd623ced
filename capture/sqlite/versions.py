"""Versions of a policy, and how far each engine has got with them."""

from typing import Any

from capture.errors import Conflict, NotFound
from capture.sqlite.rollouts import Rollouts
from capture.types import EngineVersion, Version

_COLUMNS = "policy, version, lineage, parent, step, state, path, sha256, created_at, activated_at, distance"
_ENGINE_COLUMNS = "engine, policy, version, state, detail, in_flight, at"


class Versions(Rollouts):
    """The methods of `capture.store.Store` for versions and engines."""

    def versions(self, policy: str) -> list[Version]:
        rows = self._rows(f"SELECT {_COLUMNS} FROM versions WHERE policy = ? ORDER BY version", (policy,))
        return [_version(row) for row in rows]

    def _version(self, policy: str, version: int) -> Version:
        row = self._row(
            f"SELECT {_COLUMNS} FROM versions WHERE policy = ? AND version = ?", (policy, version)
        )
        if row is None:
            raise NotFound(f"policy {policy} has no version {version}")
        return _version(row)

    def active_version(self, policy: str) -> Version | None:
        return self._named("active", policy)

    def promoted_version(self, policy: str) -> Version | None:
        return self._named("promoted", policy)

    def _named(self, name: str, policy: str) -> Version | None:
        row = self._row(
            f"SELECT {_COLUMNS} FROM versions WHERE policy = ?1 "
            f"AND version = (SELECT {name} FROM policies WHERE policy = ?1)",
            (policy,),
        )
        return None if row is None else _version(row)

    def publish_version(self, policy: str, version: int, path: str, sha256: str, epoch: int) -> None:
        with self._write():
            self._fence(f"learner:{policy}", epoch)
            found = self._version(policy, version)
            if found.state == "committed":
                self._db.execute(
                    "UPDATE versions SET state = 'published', path = ?, sha256 = ? "
                    "WHERE policy = ? AND version = ?",
                    (path, sha256, policy, version),
                )
            elif (found.path, found.sha256) != (path, sha256):
                raise Conflict(f"{policy}@v{version} is {found.state} from {found.path}")

    def start_policy(self, policy: str, path: str | None, sha256: str | None) -> Version:
        with self._write():
            self._start_policy(policy, path, sha256)
            return self._version(policy, 0)

    def _start_policy(self, policy: str, path: str | None, sha256: str | None) -> None:
        if self._value("SELECT 1 FROM policies WHERE policy = ?", (policy,)):
            return
        if path is not None and self._value(
            "SELECT 1 FROM rollouts WHERE policy = ? AND policy_version = 0 LIMIT 1", (policy,)
        ):
            raise Conflict(f"the base model has answered as {policy}@v0 already: no adapter can be it")
        now = self.now()
        self._db.execute("INSERT INTO policies VALUES (?, 0, 0, 1)", (policy,))
        self._db.execute(  # the first run will say of which lineage it is
            "INSERT INTO versions VALUES (?, 0, '', NULL, 0, 'active', ?, ?, ?, ?, 0)",
            (policy, path, sha256, now, now),
        )

    # -- engines -----------------------------------------------------------------------------

    def record_engine_version(self, row: EngineVersion) -> None:
        with self._write():
            self._db.execute(
                f"INSERT INTO engine_versions ({_ENGINE_COLUMNS}) VALUES (?, ?, ?, ?, ?, ?, ?) "
                "ON CONFLICT (policy, version, engine) DO UPDATE SET state = excluded.state, "
                "detail = excluded.detail, in_flight = excluded.in_flight, at = excluded.at",
                (
                    row.engine,
                    row.policy,
                    row.version,
                    row.state,
                    row.detail,
                    row.in_flight,
                    row.at or self.now(),
                ),
            )

    def engine_versions(self, policy: str) -> list[EngineVersion]:
        rows = self._rows(
            f"SELECT {_ENGINE_COLUMNS} FROM engine_versions WHERE policy = ? ORDER BY version, engine",
            (policy,),
        )
        return [EngineVersion(**dict(zip(_ENGINE_COLUMNS.split(", "), row, strict=True))) for row in rows]

    # -- activation --------------------------------------------------------------------------

    def activate(self, policy: str, version: int, epoch: int) -> None:
        with self._write():
            self._fence("activator", epoch)
            found = self._version(policy, version)
            active = self._value("SELECT active FROM policies WHERE policy = ?", (policy,))
            if active == version:
                return
            if active > version:
                raise Conflict(f"{policy}@v{version} is older than the active v{active}")
            if found.state not in ("published", "active"):
                raise Conflict(f"{policy}@v{version} is {found.state}: only a published version is activated")
            if not self._is_verified(policy, version):
                raise Conflict(f"{policy}@v{version}: no engine has verified it")
            self._db.execute("UPDATE policies SET active = ? WHERE policy = ?", (version, policy))
            self._db.execute(
                "UPDATE versions SET state = 'active', activated_at = ? WHERE policy = ? AND version = ?",
                (self.now(), policy, version),
            )

    def _is_verified(self, policy: str, version: int) -> bool:
        sql = (
            "SELECT 1 FROM engine_versions WHERE policy = ? AND version = ? "
            "AND state IN ('verified', 'indistinguishable')"
        )
        return self._value(sql, (policy, version)) is not None

    def retire_version(self, policy: str, version: int) -> None:
        with self._write():
            named = self._row("SELECT active, promoted FROM policies WHERE policy = ?", (policy,))
            if named is not None and version in named:
                raise Conflict(f"{policy}@v{version} is the active or promoted version")
            self._version(policy, version)
            self._db.execute(
                "UPDATE versions SET state = 'retired' WHERE policy = ? AND version = ?", (policy, version)
            )

    def pinned_versions(self, policy: str) -> dict[int, int]:
        rows = self._rows(
            "SELECT policy_version, count(*) FROM rollouts WHERE state = 'open' AND policy = ? "
            "AND policy_version IS NOT NULL AND mode != 'observe' GROUP BY policy_version",
            (policy,),
        )
        return dict(rows)

    def expire_pins(self, policy: str, version: int) -> int:
        with self._write():
            rows = self._rows(
                "SELECT id FROM rollouts WHERE state = 'open' AND mode = 'train' AND policy = ? "
                "AND policy_version = ?",
                (policy, version),
            )
            return self._drop((row[0] for row in rows), "stale")


def _version(row: tuple[Any, ...]) -> Version:
    return Version(**dict(zip(_COLUMNS.split(", "), row, strict=True)))

"""One SQLite file: opening, migrations, transactions, leases."""

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib.resources import files
from pathlib import Path
from typing import Any

import apsw

from capture.errors import Corrupt, Fenced, StoreBusy, StoreError
from capture.types import RawCall

Row = tuple[Any, ...]


class Base:
    """A connection to the store's file; every noun's methods are mixed into it.

    Use it from one thread at a time; open as many as wanted on one path. All writes are
    ``BEGIN IMMEDIATE`` transactions that are durable (fsync) when the method returns.
    """

    def __init__(self, path: Path, *, busy_timeout_s: float = 5.0) -> None:
        self.path = path
        self._busy_timeout_s = busy_timeout_s
        self._db = _connect(path, busy_timeout_s)
        migrate(self._db)
        self._frames: dict[int, list[RawCall]] = {}  # the last few frames, by id
        self._blobs: set[bytes] = set()  # hashes that are certainly stored

    def close(self) -> None:
        self._db.close()

    def now(self) -> float:
        """Unix seconds of the store's clock."""
        return time.time()

    @contextmanager
    def _write(self) -> Iterator[None]:
        with _errors():
            self._db.execute("BEGIN IMMEDIATE")
            try:
                yield
                self._db.execute("COMMIT")
            finally:
                if self._db.in_transaction:
                    self._db.execute("ROLLBACK")

    @contextmanager
    def _read(self) -> Iterator[None]:
        """Several reads of one moment."""
        with _errors():
            self._db.execute("BEGIN")
            try:
                yield
            finally:
                self._db.execute("ROLLBACK")

    def _rows(self, sql: str, args: Sequence[Any] = ()) -> list[Row]:
        with _errors():
            return self._db.execute(sql, args).fetchall()

    def _row(self, sql: str, args: Sequence[Any] = ()) -> Row | None:
        with _errors():
            return next(self._db.execute(sql, args), None)

    def _value(self, sql: str, args: Sequence[Any] = ()) -> Any:
        row = self._row(sql, args)
        return None if row is None else row[0]

    # -- leases ------------------------------------------------------------------------------

    def acquire_lease(self, name: str, holder: str, ttl_s: float) -> int | None:
        now = self.now()
        with self._write():
            row = self._row("SELECT holder, epoch, expires_at FROM leases WHERE name = ?", (name,))
            if row is not None and row[0] != holder and row[2] > now:
                return None
            epoch = 1 if row is None else int(row[1]) + (row[0] != holder)
            self._db.execute(
                "INSERT INTO leases VALUES (?, ?, ?, ?) ON CONFLICT (name) DO UPDATE SET "
                "holder = excluded.holder, epoch = excluded.epoch, expires_at = excluded.expires_at",
                (name, holder, epoch, now + ttl_s),
            )
            return epoch

    def release_lease(self, name: str, holder: str) -> None:
        with self._write():
            self._db.execute("UPDATE leases SET expires_at = 0 WHERE name = ? AND holder = ?", (name, holder))

    def live_leases(self, prefix: str) -> dict[str, str]:
        rows = self._rows("SELECT name, holder FROM leases WHERE expires_at > ?", (self.now(),))
        return {name: holder for name, holder in rows if name.startswith(prefix)}

    def _fence(self, lease: str, epoch: int) -> None:
        """Inside a transaction: `Fenced` unless `epoch` is the newest holder's."""
        newest = self._value("SELECT epoch FROM leases WHERE name = ?", (lease,))
        if newest != epoch:
            raise Fenced(f"lease {lease}: epoch {epoch} is not the newest ({newest})")


def _connect(path: Path, busy_timeout_s: float) -> apsw.Connection:
    deadline = time.monotonic() + busy_timeout_s
    while True:  # switching a fresh file to WAL does not wait for other openers by itself
        with _errors():
            db = apsw.Connection(str(path))
        try:
            with _errors():
                db.set_busy_timeout(int(busy_timeout_s * 1000))
                db.execute("PRAGMA journal_mode = WAL").fetchall()
                db.execute("PRAGMA synchronous = FULL")
                db.execute("PRAGMA foreign_keys = ON")
                db.execute("PRAGMA cache_size = -16384")
                db.execute("PRAGMA journal_size_limit = 67108864").fetchall()
            return db
        except StoreBusy:
            db.close()
            if time.monotonic() > deadline:
                raise
            time.sleep(0.01)
        except BaseException:
            db.close()
            raise


def migrations() -> list[tuple[int, str, str]]:
    """``(number, name, sql)`` of every migration that this code has, in order."""
    found = [file for file in files("capture.migrations").iterdir() if file.name.endswith(".sql")]
    return sorted((int(file.name[:4]), file.name, file.read_text()) for file in found)


def migrate(db: apsw.Connection) -> None:
    """Bring the file to this code's schema, one transaction a migration.

    `StoreError` if the file was written by a newer Hone.
    """
    known = migrations()
    with _errors():
        db.execute(
            "CREATE TABLE IF NOT EXISTS migrations "
            "(number INTEGER PRIMARY KEY, name TEXT NOT NULL, applied_at REAL NOT NULL)"
        )
        newest = max(_applied(db), default=0)
        if newest > known[-1][0]:
            raise StoreError(
                f"the store has schema {newest}, this Hone knows up to {known[-1][0]}: upgrade Hone"
            )
        for number, name, sql in known:
            if number in _applied(db):
                continue
            with db_transaction(db):
                if number not in _applied(db):  # another process may have been faster
                    db.execute(sql)
                    db.execute("INSERT INTO migrations VALUES (?, ?, ?)", (number, name, time.time()))


def _applied(db: apsw.Connection) -> set[int]:
    return {number for (number,) in db.execute("SELECT number FROM migrations")}


@contextmanager
def db_transaction(db: apsw.Connection) -> Iterator[None]:
    """One immediate transaction; rolled back if the body raises."""
    db.execute("BEGIN IMMEDIATE")
    try:
        yield
        db.execute("COMMIT")
    finally:
        if db.in_transaction:
            db.execute("ROLLBACK")


@contextmanager
def _errors() -> Iterator[None]:
    """The one place where apsw's errors become Hone's."""
    try:
        yield
    except (apsw.BusyError, apsw.LockedError) as error:
        raise StoreBusy(f"the store is busy: {error}") from error
    except (apsw.CorruptError, apsw.NotADBError) as error:
        raise Corrupt(f"the store's file is damaged: {error}") from error
    except apsw.Error as error:
        raise StoreError(f"the store failed: {error}") from error

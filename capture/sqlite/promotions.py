"""Promotions: which version everyone but training and evaluation is served, and since when."""

from typing import Any

from capture.errors import Conflict, NotFound
from capture.promotions import served_before
from capture.sqlite.versions import Versions
from capture.types import Promotion, PromotionKind

_COLUMNS = "n, policy, version, kind, asked_at, replaced, served_at, reason"
_OPEN = "served_at IS NULL AND reason IS NULL"
_LIST = "`hone adapters ls` lists them"


class Promotions(Versions):
    """The methods of `capture.store.Store` for promotions."""

    def promotions(self, policy: str) -> list[Promotion]:
        rows = self._rows(f"SELECT {_COLUMNS} FROM promotions WHERE policy = ? ORDER BY n", (policy,))
        return [_promotion(row) for row in rows]

    def open_promotion(self, policy: str) -> Promotion | None:
        row = self._row(f"SELECT {_COLUMNS} FROM promotions WHERE policy = ? AND {_OPEN}", (policy,))
        return None if row is None else _promotion(row)

    # -- asking ------------------------------------------------------------------------------

    def ask_promotion(self, policy: str, version: int | None, kind: PromotionKind) -> Promotion | None:
        with self._write():
            named = self._row("SELECT active, promoted FROM policies WHERE policy = ?", (policy,))
            if named is None:
                raise NotFound(f"{policy} has no versions yet: the first run of `hone train` makes them")
            active, served = named
            asked = self.open_promotion(policy)
            if version is None:
                version = active if kind == "promote" else self._before(policy, served, asked)
            elif kind == "rollback":
                self._check_older(policy, version, served)
            if asked is not None and asked.version == version:
                return asked
            if version != served:
                self._check_proven(policy, version)
            if asked is not None:
                self._close(asked.n, f"v{version} was asked for instead")
            if version == served:
                return None
            self._db.execute(
                "INSERT INTO promotions (policy, version, kind, asked_at) VALUES (?, ?, ?, ?)",
                (policy, version, kind, self.now()),
            )
            return self.open_promotion(policy)

    def _before(self, policy: str, served: int, asked: Promotion | None) -> int:
        if asked is not None:
            raise Conflict(
                f"v{asked.version} is asked for and not served yet: `hone adapters promote {served}` takes "
                f"that back and keeps v{served}; to serve an older one, name it"
            )
        before = served_before(self.promotions(policy))
        if before is None:
            raise Conflict(f"nothing was promoted before v{served}: name the version to serve; {_LIST}")
        return before

    def _check_older(self, policy: str, version: int, served: int) -> None:
        known = {served} | {one.version for one in self.promotions(policy) if one.served_at is not None}
        if version > served and version not in known:
            raise Conflict(
                f"v{version} is newer than v{served}, which is promoted, and never was itself: "
                f"`hone adapters promote {version}` serves it"
            )

    def _check_proven(self, policy: str, version: int) -> None:
        """`NotFound`, or `Conflict` unless an engine proved the version at some time."""
        try:
            found = self._version(policy, version)
        except NotFound as error:
            raise NotFound(f"{error}: {_LIST}") from None
        name = f"{policy}@v{version}"
        if found.state == "committed":
            raise Conflict(f"{name} is not published yet: the learner writes it; ask again in a moment")
        if found.activated_at is not None or self._is_verified(policy, version):
            return
        failed = self._value(
            "SELECT engine || ': ' || detail FROM engine_versions WHERE policy = ? AND version = ? "
            "AND state = 'failed' ORDER BY at DESC",
            (policy, version),
        )
        if failed is not None:
            raise Conflict(f"{name} failed where it was loaded: promote another version. {failed}")
        raise Conflict(
            f"{name} is {found.state}, and no engine has verified it: a running proxy does that with each "
            f"version of the newest run; {_LIST} with what engines say of them"
        )

    # -- answering ---------------------------------------------------------------------------

    def promote(self, n: int, epoch: int) -> bool:
        with self._write():
            self._fence("activator", epoch)
            asked = self._promotion(n)
            if not asked.is_open:
                return False
            policy, version = asked.policy, asked.version
            if self._version(policy, version).path is not None and not self._is_verified(policy, version):
                raise Conflict(f"{policy}@v{version}: no engine has verified it")
            self._db.execute(
                "UPDATE promotions SET served_at = ?, replaced = "
                "(SELECT promoted FROM policies WHERE policies.policy = promotions.policy) WHERE n = ?",
                (self.now(), n),
            )
            self._db.execute("UPDATE policies SET promoted = ? WHERE policy = ?", (version, policy))
            self._db.execute(  # it is in use once more
                "UPDATE versions SET state = 'active' WHERE policy = ? AND version = ? AND state = 'retired'",
                (policy, version),
            )
            return True

    def refuse_promotion(self, n: int, reason: str, epoch: int) -> None:
        with self._write():
            self._fence("activator", epoch)
            self._close(n, reason)

    def _close(self, n: int, reason: str) -> None:
        self._db.execute(f"UPDATE promotions SET reason = ? WHERE n = ? AND {_OPEN}", (reason, n))

    def _promotion(self, n: int) -> Promotion:
        row = self._row(f"SELECT {_COLUMNS} FROM promotions WHERE n = ?", (n,))
        if row is None:
            raise NotFound(f"no promotion {n}")
        return _promotion(row)


def _promotion(row: tuple[Any, ...]) -> Promotion:
    return Promotion(**dict(zip(_COLUMNS.split(", "), row, strict=True)))

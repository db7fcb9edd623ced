"""The durable store in one SQLite file."""

from typing import TYPE_CHECKING

from capture.sqlite.calls import Calls
from capture.sqlite.histories import Histories
from capture.sqlite.promotions import Promotions
from capture.sqlite.rescoring import Rescoring
from capture.sqlite.sums import Sums
from capture.sqlite.training import Training

if TYPE_CHECKING:
    from capture.store import Store

__all__ = ["SqliteStore"]


class SqliteStore(Calls, Rescoring, Training, Promotions, Histories, Sums):
    """`capture.store.Store` over SQLite in WAL mode with synchronous=FULL."""


if TYPE_CHECKING:

    def _implements(store: SqliteStore) -> Store:
        return store

"""The blocking side of control: every piece of store work, one pass at a time."""

import os
import socket
import time

from capture.errors import Fenced
from capture.ids import new_id
from capture.ingest import Ingester
from capture.store import Store
from rewards.groups import Grouper
from rewards.metrics import Metrics
from rewards.score import Scorer
from rewards.script import Scored
from rewards.seal import Sealer
from rewards.settings import Settings
from rewards.settle import Settler, Traces

LEASE = "control"
LEASE_TTL_S = 5.0
LEASE_EVERY_S = 1.0
GROUPS_EVERY_S = 1.0  # members also end where control does not see it: failed, expired, run ended
PRUNE_EVERY_S = 60.0


class Timer:
    """Says every `every_s` seconds that something is due; at once at first."""

    def __init__(self, every_s: float) -> None:
        self._every_s = every_s
        self._next = 0.0

    def due(self) -> bool:
        """True, then False until the time has passed again."""
        now = time.monotonic()
        if now < self._next:
            return False
        self._next = now + self._every_s
        return True


class Steps:
    """Ingest, seal, settle, save, group, take: each may be repeated after a failure halfway."""

    def __init__(self, store: Store, settings: Settings, metrics: Metrics) -> None:
        traces = Traces(store)
        self.scorer = Scorer(store, settings, traces)
        self._store = store
        self._settings = settings
        self._metrics = metrics
        self._holder = f"{socket.gethostname()}:{os.getpid()}:{new_id('h')}"
        self._epoch: int | None = None
        self._ingester = Ingester(store)
        self._sealer = Sealer(store, settings.seal)
        self._settler = Settler(store, traces, keep=bool(settings.script), passive=settings.passive.train)
        self._grouper = Grouper(store, settings)
        self._touched: set[str] = set()
        self._lease_timer = Timer(LEASE_EVERY_S)
        self._seal_timer = Timer(min(1.0, settings.seal.idle_s / 4))
        self._groups_timer = Timer(GROUPS_EVERY_S)
        self._prune_timer = Timer(PRUNE_EVERY_S)

    def lead(self) -> bool:
        """Take the lease if it is free."""
        self._epoch = self._store.acquire_lease(LEASE, self._holder, LEASE_TTL_S)
        return self._epoch is not None

    def resign(self) -> None:
        """Give the lease back."""
        if self._epoch is not None:
            self._store.release_lease(LEASE, self._holder)

    def tick(self) -> bool:
        """One pass over everything that may be due; whether there was work. `Fenced` without lease."""
        if self._lease_timer.due():
            self._renew()
        work = self._ingest() + self._seal() + self._settle() + self._save() + self._group()
        if self._prune_timer.due():
            self._count("hone_frames_pruned_total", self._store.prune_frames(self._settings.raw_retention_s))
        return work + self.scorer.take() > 0

    def _renew(self) -> None:
        epoch = self._store.acquire_lease(LEASE, self._holder, LEASE_TTL_S)
        if epoch != self._epoch:
            self._epoch = None
            raise Fenced("another control holds the lease now")

    def _ingest(self) -> int:
        return self._count("hone_calls_ingested_total", self._ingester.step())

    def _seal(self) -> int:
        return (
            self._count("hone_rollouts_sealed_idle_total", self._sealer.step())
            if self._seal_timer.due()
            else 0
        )

    def _settle(self) -> int:
        return self._count("hone_rollouts_settled_total", self._settler.step())

    def _save(self) -> int:
        saved = self.scorer.save()
        for judged in saved:
            outcome = "scored" if isinstance(judged.outcome, Scored) else "reward_error"
            self._metrics.add("hone_rewards_total", 1, outcome=outcome)
            if judged.rollout.group_id is not None:
                self._touched.add(judged.rollout.group_id)
        return len(saved)

    def _group(self) -> int:
        if self._groups_timer.due():
            closed = self._grouper.step()
        elif self._touched:
            closed = self._grouper.step(self._touched)
        else:
            return 0
        self._touched.clear()
        return self._count("hone_groups_closed_total", closed)

    def _count(self, name: str, amount: int) -> int:
        if amount:
            self._metrics.add(name, amount)
        return amount

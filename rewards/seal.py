"""Idle sealing: a rollout that nobody finishes is over once it has been quiet for long enough."""

from capture.errors import Conflict
from capture.store import Store
from capture.types import FinishStatus, Mode
from rewards.settings import SealSettings

SEALS_PER_STEP = 100


def idle_status(mode: Mode) -> FinishStatus:
    """How an idle rollout ends. A train or eval agent should have finished: it hung or was lost. Nobody
    ever says that an observed conversation is over: silence is its normal end."""
    return "completed" if mode == "observe" else "timeout"


class Sealer:
    """Seals open rollouts without a call for `idle_s` and with none in flight."""

    def __init__(self, store: Store, settings: SealSettings) -> None:
        self._store = store
        self._settings = settings

    def step(self) -> int:
        """Seal some; how many."""
        sealed = 0
        for rollout in self._store.idle_rollouts(self._settings.idle_s, SEALS_PER_STEP):
            try:
                self._store.seal_rollout(rollout.id, idle_status(rollout.mode))
            except Conflict:  # somebody finished it a moment ago
                continue
            sealed += 1
        return sealed

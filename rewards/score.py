"""Scoring: hand traces to the pool, join posted scores, save what came out."""

import logging
from collections import deque
from collections.abc import Mapping

import msgspec

from capture.errors import Conflict
from capture.store import Store
from capture.types import Rollout
from rewards.script import Failed, Outcome, Scored, combine
from rewards.settings import Settings
from rewards.settle import Traces
from rewards.trace import Trace

log = logging.getLogger(__name__)

HELD_MAX = 10_000  # rollouts that wait for a posted score and are remembered as such
NO_SCRIPT = Failed("no score: rewards.script is not set and nobody posted one", "")


class Task(msgspec.Struct, frozen=True):
    """A rollout that wants its script's score; `trace` is None where there is no script."""

    rollout: Rollout
    trace: Trace | None


class Judged(msgspec.Struct, frozen=True):
    """What the script made of a rollout; `outcome` is None where there is no script."""

    rollout: Rollout
    outcome: Outcome | None


def joined(
    outcome: Outcome | None, posted: Mapping[str, float], settings: Settings
) -> tuple[Outcome, float, dict[str, float]]:
    """The final outcome, the reward and its named scores; `outcome` is the script's, None without one."""
    if missing := [name for name in settings.require if name not in posted]:
        error = f"no score {', '.join(missing)} was posted within {settings.wait_s:g} s"
        return Failed(error, outcome.script_hash if outcome else ""), 0.0, {}
    if outcome is None:
        outcome = Scored({}, {}, "") if posted else NO_SCRIPT
    if isinstance(outcome, Failed):
        return outcome, 0.0, {}
    try:
        return outcome, *combine(outcome, posted, settings.weights)
    except ValueError as error:
        return Failed(str(error), outcome.script_hash, outcome.took_s), 0.0, {}


class Scorer:
    """The store's side of scoring, between two queues.

    `take` puts what is to be scored on `tasks`; whoever runs the script puts the outcomes on `judged`;
    `save` stores them. A rollout is given out once until it is saved. Nothing leaves a queue before it
    is done, so a step that fails halfway can be repeated.
    """

    def __init__(self, store: Store, settings: Settings, traces: Traces) -> None:
        self.tasks: deque[Task] = deque()
        self.judged: deque[Judged] = deque()
        self._store = store
        self._settings = settings
        self._traces = traces
        self._out: set[str] = set()
        self._held: set[str] = set()
        self._held_at = 0.0

    def take(self) -> int:
        """Queue rollouts to score, so that at most `queue_max` are out; how many. Those that are out are
        read again each time, so it waits until half of them are back."""
        room = self._settings.queue_max - len(self._out)
        if 2 * room < self._settings.queue_max:
            return 0
        self._release_held()
        before = len(self._out)
        for rollout in self._store.scoreable(room + len(self._out) + len(self._held)):
            if len(self._out) - before == room:
                break
            if rollout.id in self._out or self._holds(rollout):
                continue
            self.tasks.append(Task(rollout, self._traces.of(rollout) if self._settings.script else None))
            self._out.add(rollout.id)
        return len(self._out) - before

    def save(self) -> list[Judged]:
        """Store what was judged, joined with posted scores; returns it as it was saved."""
        saved = []
        while self.judged:
            saved.append(self._save(self.judged[0]))
            self._out.discard(self.judged.popleft().rollout.id)
        return saved

    def _save(self, judged: Judged) -> Judged:
        rollout = judged.rollout
        posted = self._store.posted_scores(rollout.id)
        final, reward, scores = joined(judged.outcome, posted, self._settings)
        try:
            if isinstance(final, Scored):
                size = self._settings.passive.group_size
                self._store.save_score(rollout.id, reward, scores, final.script_hash, group_size=size)
            else:
                self._store.save_reward_error(rollout.id, final.error, final.script_hash)
        except Conflict:  # taken or saved meanwhile: what is stored stands
            log.info("rollout %s needed its score no more", rollout.id)
        return Judged(rollout, final)

    def _holds(self, rollout: Rollout) -> bool:
        """Whether the rollout still waits for a required score."""
        if not self._settings.require or rollout.id in self._held:
            return rollout.id in self._held
        waited = self._store.now() - (rollout.sealed_at or 0.0)
        if waited >= self._settings.wait_s or self._store.posted_scores(rollout.id).keys() >= {
            *self._settings.require
        }:
            return False
        if len(self._held) < HELD_MAX:
            self._held.add(rollout.id)
        return True

    def _release_held(self) -> None:
        """Once a second, look at every waiting rollout anew."""
        if self._store.now() - self._held_at >= 1.0:
            self._held.clear()
            self._held_at = self._store.now()

"""Running a script over stored rollouts: traces in, outcomes out, a few at a time."""

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine, Iterable
from typing import Any, TypeVar

import msgspec

from capture.errors import ConfigError
from capture.store import Store
from capture.types import Rollout
from rewards.pool import Pool
from rewards.report import Row
from rewards.score import joined
from rewards.script import Failed, Outcome, Scored
from rewards.settings import Settings
from rewards.settle import Traces

Item = TypeVar("Item")
T = TypeVar("T")


class Attempt(msgspec.Struct, frozen=True, kw_only=True):
    """What a script makes of one stored rollout, posted scores included as control includes them."""

    rollout: Rollout
    outcome: Outcome
    posted: dict[str, float]  # as they were when it was scored
    reward: float = 0.0  # of a `Scored` outcome
    scores: dict[str, float] = {}

    @property
    def scored(self) -> bool:
        """Whether there is a reward."""
        return isinstance(self.outcome, Scored)


def row_of(attempt: Attempt) -> Row:
    """An attempt as a row of a report."""
    rollout, outcome = attempt.rollout, attempt.outcome
    return Row(
        rollout_id=rollout.id,
        scenario_id=rollout.scenario_id,
        group_id=rollout.group_id,
        status=rollout.status,
        untrained=rollout.policy_version == 0,
        reward=attempt.reward if attempt.scored else None,
        stored_reward=rollout.reward,
        scores=attempt.scores,
        error=outcome.error if isinstance(outcome, Failed) else None,
        took_s=outcome.took_s,
    )


class Trial:
    """A script and its workers, for one pass over stored rollouts; the loop's thread uses the store.

    An async context; entering it raises `ConfigError` if the script does not load. If the script is edited
    meanwhile the pass ends with one: rewards of two scripts are not compared.
    """

    def __init__(self, store: Store, settings: Settings, script_hash: str) -> None:
        self.script_hash = script_hash
        self.settings = settings
        self._store = store
        self._traces = Traces(store)
        self._pool = Pool(settings)

    async def __aenter__(self) -> "Trial":
        await self._pool.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._pool.close()

    def over(self, rollouts: Iterable[Rollout]) -> AsyncIterator[Attempt]:
        """Each rollout's attempt, in the order in which they end."""
        return bounded(self.score, rollouts, self.settings.workers)

    async def score(self, rollout: Rollout) -> Attempt:
        """One rollout's."""
        outcome = await self._pool.score(self._traces.of(rollout))
        if outcome.script_hash not in ("", self.script_hash):
            raise ConfigError(f"rewards.script: {self.settings.script} was edited meanwhile; start again")
        return self.combined(rollout, outcome)

    def combined(self, rollout: Rollout, outcome: Outcome) -> Attempt:
        """What the script said, with the scores that are posted now."""
        posted = self._store.posted_scores(rollout.id)
        final, reward, scores = joined(outcome, posted, self.settings)
        return Attempt(rollout=rollout, outcome=final, posted=posted, reward=reward, scores=scores)


async def bounded(
    work: Callable[[Item], Coroutine[Any, Any, T]], items: Iterable[Item], limit: int
) -> AsyncIterator[T]:
    """The results of `work` on each item, as they come; at most `limit` run at a time, and items are taken
    no earlier than that. The first exception ends it, and what runs is cancelled."""
    running: set[asyncio.Task[T]] = set()
    try:
        for item in items:
            running.add(asyncio.create_task(work(item)))
            if len(running) == limit:
                done, running = await asyncio.wait(running, return_when=asyncio.FIRST_COMPLETED)
                for task in done:
                    yield task.result()
        while running:
            done, running = await asyncio.wait(running, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                yield task.result()
    finally:
        for task in running:
            task.cancel()
        await asyncio.gather(*running, return_exceptions=True)

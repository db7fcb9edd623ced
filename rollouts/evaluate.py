"""Evaluation: every scenario some times against one version, scored like training, nothing updated."""

import asyncio
import contextlib
from collections import Counter
from collections.abc import Callable, Coroutine, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from capture.errors import HoneError
from capture.types import Rollout
from rollouts import desk as desks
from rollouts.api import connected
from rollouts.compare import Interval, clustered
from rollouts.desk import Desk
from rollouts.launch import Launcher
from rollouts.metrics import Metrics
from rollouts.play import Attempt, Played, Player, Task
from rollouts.scenarios import Scenario
from rollouts.settings import Settings

SETTLED = frozenset({"scored", "reward_error", "failed", "dropped"})
LOOKS_MAX = 100  # rollouts asked after in one look for scores


class Row(msgspec.Struct, frozen=True, kw_only=True):
    """One rollout of an evaluation. `reward` is None where it was not scored, and `state` says why."""

    rollout_id: str
    scenario_id: str
    state: str
    status: str | None
    reward: float | None
    scores: dict[str, float]


class EvalResult(msgspec.Struct, frozen=True, kw_only=True):
    """What one version did on a scenario set. Intervals are over the scored rollouts only."""

    version: int | None
    rows: list[Row]
    statuses: dict[str, int]  # by finish status
    unscored: dict[str, int]  # by state: never counted as 0
    reward: Interval | None  # None: nothing was scored
    scores: dict[str, Interval]

    @property
    def rollout_ids(self) -> list[str]:
        return [row.rollout_id for row in self.rows]


class Progress(msgspec.Struct, frozen=True):
    """How far an evaluation has come."""

    played: int
    scored: int
    total: int


class Stopped(HoneError):
    """The evaluation was told to stop before it was through."""


def ignore(progress: Progress) -> None:
    """The default progress callback."""


async def evaluate(
    settings: Settings,
    scenarios: Sequence[Scenario],
    *,
    store_path: Path,
    proxy_url: str,
    key: str | None,
    environ: Mapping[str, str],
    version: int | None = None,
    repeats: int = 1,
    run_id: str | None = None,
    stop: asyncio.Event | None = None,
    progress: Callable[[Progress], None] = ignore,
    metrics: Metrics | None = None,
) -> EvalResult:
    """Play every scenario `repeats` times against `version` (None: the one that is active when the
    first rollout opens, for all of them) and wait for the scores, which `control` gives.

    Raises `Stopped` once `stop` is set, else what `rollouts.schedule.train` raises. Its agents are dead
    when it returns or raises.
    """
    metrics = metrics or Metrics()
    stop = stop or asyncio.Event()
    launcher = Launcher(settings, environ)
    async with contextlib.AsyncExitStack() as stack:
        desk = await stack.enter_async_context(desks.opened(store_path))
        api = await stack.enter_async_context(connected(proxy_url, key, settings, metrics))
        stack.push_async_callback(launcher.close)
        await launcher.start()
        player = Player(settings, api, launcher, desk, metrics)
        evaluation = Evaluation(settings, player, desk, run_id, len(scenarios) * repeats, progress)
        work = (scenario for _ in range(repeats) for scenario in scenarios)
        return await _unless(stop, evaluation.run(work, version))


class Evaluation:
    """One evaluation in progress."""

    def __init__(
        self,
        settings: Settings,
        player: Player,
        desk: Desk,
        run_id: str | None,
        total: int,
        progress: Callable[[Progress], None],
    ) -> None:
        self._settings = settings
        self._player = player
        self._desk = desk
        self._run_id = run_id
        self._total = total
        self._progress = progress
        self._played: list[Played] = []
        self._settled: list[Rollout] = []

    async def run(self, work: Iterator[Scenario], version: int | None) -> EvalResult:
        """Play, then wait for scores. The first rollout opens alone: it settles the version."""
        first = self._task(next(work), version)
        attempt = await self._player.open(first)
        version = attempt.opened.policy_version
        try:
            async with asyncio.TaskGroup() as players:
                players.create_task(self._player_task(work, version, (first, attempt)))
                for _ in range(min(self._settings.concurrency, self._total) - 1):
                    players.create_task(self._player_task(work, version, None))
                players.create_task(self._collect())
        except ExceptionGroup as broken:
            raise broken.exceptions[0] from broken
        return summarise(version, self._settled)

    async def _player_task(
        self, work: Iterator[Scenario], version: int | None, begun: tuple[Task, Attempt] | None
    ) -> None:
        """Play scenarios one after another until there are none."""
        if begun is not None:
            await self._play(*begun)
        for scenario in work:
            task = self._task(scenario, version)
            await self._play(task, await self._player.open(task))

    async def _play(self, task: Task, attempt: Attempt) -> None:
        self._played.append(await self._player.play(task, attempt))
        self._report()

    async def _collect(self) -> None:
        """Read rollouts as they get their scores; give up after `score_wait_s` without any news."""
        clock = asyncio.get_running_loop().time
        news, looked = clock(), 0
        while len(self._settled) < self._total:
            known = {rollout.id for rollout in self._settled}
            waiting = [played.rollout_id for played in self._played if played.rollout_id not in known]
            found = [
                rollout
                for rollout_id in waiting[:LOOKS_MAX]
                if (rollout := await self._look(rollout_id)).state in SETTLED
            ]
            self._settled += found
            if found or len(self._played) > looked:
                news, looked = clock(), len(self._played)
                self._report()
            elif len(self._played) == self._total and clock() - news > self._settings.score_wait_s:
                self._settled += [await self._look(rollout_id) for rollout_id in waiting]
                return
            await asyncio.sleep(self._settings.poll_s)

    async def _look(self, rollout_id: str) -> Rollout:
        return await self._desk.ask(lambda s: s.rollout(rollout_id))

    def _task(self, scenario: Scenario, version: int | None) -> Task:
        return Task(
            mode="eval",
            scenario_id=scenario.id,
            scenario=scenario.content,
            run_id=self._run_id,
            policy_version=version,
        )

    def _report(self) -> None:
        self._progress(Progress(len(self._played), len(self._settled), self._total))


def summarise(version: int | None, rollouts: Sequence[Rollout]) -> EvalResult:
    """Means with intervals over the scored rollouts, and a count of the others. Pure."""
    rows = [
        Row(
            rollout_id=rollout.id,
            scenario_id=rollout.scenario_id or "",
            state=rollout.state,
            status=rollout.status,
            reward=rollout.reward if rollout.state == "scored" else None,
            scores=dict(rollout.scores),
        )
        for rollout in sorted(rollouts, key=lambda one: (one.scenario_id or "", one.id))
    ]
    scored = [row for row in rows if row.reward is not None]
    rewards = [(row.scenario_id, row.reward) for row in scored if row.reward is not None]
    names = sorted({name for row in scored for name in row.scores})
    return EvalResult(
        version=version,
        rows=rows,
        statuses=dict(Counter(row.status or "open" for row in rows)),
        unscored=dict(Counter(row.state for row in rows if row.reward is None)),
        reward=clustered(rewards) if rewards else None,
        scores={
            name: clustered([(row.scenario_id, row.scores[name]) for row in scored if name in row.scores])
            for name in names
        },
    )


async def _unless(stop: asyncio.Event, work: Coroutine[Any, Any, EvalResult]) -> EvalResult:
    """The result of `work`; when `stop` is set first, `work` is cancelled and `Stopped` raised."""
    working = asyncio.ensure_future(work)
    stopping = asyncio.ensure_future(stop.wait())
    try:
        await asyncio.wait({working, stopping}, return_when=asyncio.FIRST_COMPLETED)
        if not working.done():
            raise Stopped("the evaluation was stopped")
        return working.result()
    finally:
        for future in (working, stopping):
            future.cancel()
        await asyncio.gather(working, stopping, return_exceptions=True)

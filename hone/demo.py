"""The demonstration: evaluate, train, evaluate again, and show from the store what that did."""

import asyncio
import os
import shutil
import sys
import time
from collections.abc import Coroutine, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import aiohttp
import msgspec

from capture.errors import Conflict, HoneError
from capture.store import Store
from hone.cli.common import supervise
from hone.config import Config
from hone.counters import client_failures, engine_failures
from hone.environment import for_agents, proxy_url
from hone.evidence import EVAL, REQUESTS, TIMES, summarise
from hone.parts import serving, training
from hone.printing import redacted
from hone.progress import Progress
from hone.state import Kind, State, running
from hone.summary import Summary
from hone.supervisor import Part, Supervisor
from hone.training import conduct
from rollouts.evaluate import evaluate
from rollouts.scenarios import Scenario, read_scenarios

RUN_ID = "demo"
OPPONENTS = ("random", "optimal")
OURS = ("adapters", "checkpoints", "logs")  # directories that a demonstration makes
LIMIT_S = 870.0  # a quarter of an hour, less what stopping and drawing take
EVALUATION_MARGIN = 1.3  # how much longer the last evaluation may take: who plays better plays longer
TRAINING_PACE = 0.92  # games a second while training, relative to evaluation: agents wait for the learner


class Plan(msgspec.Struct, frozen=True, kw_only=True):
    """What to do."""

    out: Path
    games: int | None = None  # an evaluation set's first so many; None: all


class Demo:
    """One demonstration from its beginning to the stopped processes."""

    def __init__(self, config: Config, store: Store, plan: Plan, env: Mapping[str, str]) -> None:
        self._config = config
        self._store = store
        self._plan = plan
        self._env = dict(env)
        self._began = time.monotonic()
        self._cold_s = 0.0
        self.supervisors: list[Supervisor] = []

    async def run(self) -> None:
        """Everything up to the last row in the store. Raises what broke it."""
        self._store.start_run(RUN_ID, self._config.policy.name, redacted(self._config.sections()))
        serve = self._supervise("up", serving(self._config, sys.executable, self._env))
        await self._beside(serve, self._story(serve))

    def stop(self) -> None:
        """Stop all processes."""
        for supervisor in self.supervisors:
            supervisor.stop()

    async def _story(self, serve: Supervisor) -> None:
        say("starting vLLM, proxy and control")
        await serve.ready()
        self._cold_s = time.monotonic() - self._began
        say(f"ready after {self._cold_s:.0f} s; evaluating the base model")
        evaluating = time.monotonic()
        await self._evaluate("before", 0)
        now = time.monotonic()
        left_s = training_s(now - self._began, now - evaluating, self._config.train.wall_s)
        await self._train(left_s, self._games() / (now - evaluating))
        newest = self._store.active_version(self._config.policy.name)
        version = newest.version if newest else 0
        say(f"evaluating version {version}")
        await self._evaluate("after", version)
        self._store.put_metrics(RUN_ID, REQUESTS, await self._requests())
        wall_s = time.monotonic() - self._began
        self._store.put_metrics(RUN_ID, TIMES, {"wall_s": wall_s, "cold_s": self._cold_s})

    async def _train(self, wall_s: float, games_s: float) -> None:
        steps = steps_in(wall_s, games_s, self._config)
        env = {**self._env, "HONE_TRAIN__STEPS_MAX": str(steps)}
        say(f"training for {steps} steps")
        parts = training(self._config, sys.executable, RUN_ID, after=(), env=env)
        learn = self._supervise("train", parts)
        progress = asyncio.create_task(Progress(self._store, RUN_ID, self._states).run())
        try:
            work = conduct(
                self._store,
                RUN_ID,
                learn,
                steps_max=steps,
                wall_s=wall_s,
            )
            await self._beside(learn, work)
        finally:
            progress.cancel()
            await asyncio.gather(progress, return_exceptions=True)

    def _scenarios(self) -> list[list[Scenario]]:
        """What each evaluation plays, by opponent."""
        return [read_scenarios(Path(path))[: self._plan.games] for path in self._config.eval.scenarios]

    def _games(self) -> int:
        return sum(map(len, self._scenarios()))

    async def _evaluate(self, name: str, version: int) -> None:
        for opponent, scenarios in zip(OPPONENTS, self._scenarios(), strict=True):
            result = await evaluate(
                self._config.rollouts,
                scenarios,
                store_path=Path(self._config.store.path),
                proxy_url=proxy_url(self._config),
                key=os.environ.get(self._config.train.key_env),
                environ=for_agents(os.environ),
                version=version,
                run_id=RUN_ID,
            )
            row = {"name": name, "opponent": opponent, "version": version, "rollouts": result.rollout_ids}
            self._store.put_metrics(RUN_ID, EVAL, row)

    async def _requests(self) -> dict[str, dict[str, int]]:
        engine = self._config.proxy.engines.urls[0]
        async with aiohttp.ClientSession() as session:
            return {
                "client": client_failures(await _text(session, f"{proxy_url(self._config)}/metrics")),
                "engine": engine_failures(await _text(session, f"{engine}/metrics")),
            }

    async def _beside(self, supervisor: Supervisor, work: Coroutine[Any, Any, object]) -> None:
        """Do `work` while the supervisor keeps its parts; whatever ends first ends both."""
        keeping = asyncio.create_task(supervisor.run())
        working = asyncio.create_task(work)
        try:
            await asyncio.wait({keeping, working}, return_when=asyncio.FIRST_COMPLETED)
            if working.done():
                working.result()
            else:
                keeping.result()  # raises what ended it
                raise Conflict("the demonstration was stopped")
        finally:
            working.cancel()
            with suppress(asyncio.CancelledError, HoneError):
                await working
            supervisor.stop()
            await keeping

    def _supervise(self, kind: Kind, parts: Sequence[Part]) -> Supervisor:
        supervisor = supervise(self._config, kind, parts)
        self.supervisors.append(supervisor)
        return supervisor

    def _states(self) -> list[State]:
        return [supervisor.state() for supervisor in self.supervisors]


def training_s(spent_s: float, evaluation_s: float, wall_s: float | None) -> float:
    """How long training may last, so that an evaluation as long as the first ends in time too."""
    left_s = max(LIMIT_S - spent_s - EVALUATION_MARGIN * evaluation_s, LIMIT_S / 10)
    return left_s if wall_s is None else min(wall_s, left_s)


def steps_in(wall_s: float, games_s: float, config: Config) -> int:
    """The optimizer steps that fit into `wall_s`, at most `train.steps_max`: a learning rate that falls to
    zero at the last step has to know which one that is. `games_s` is the pace of the evaluation."""
    ours = config.learner
    batches = int(wall_s * games_s * TRAINING_PACE / (config.rollouts.group_size * ours.groups_per_batch))
    fitting = max(batches * ours.steps_per_batch, ours.lr_warmup_steps + 1)
    return min(fitting, ours.steps_max) if ours.steps_max else fitting


def clear(out: Path) -> None:
    """Remove what an earlier demonstration left; `Conflict` while one runs there."""
    kinds: tuple[Kind, ...] = ("up", "train")
    for kind in kinds:
        state = running(out, kind)
        if state is not None:
            raise Conflict(f"a demonstration runs in {out} (pid {state.pid})")
    for name in OURS:
        shutil.rmtree(out / name, ignore_errors=True)
    for path in [*out.glob("hone.db*"), *out.glob("*.json*"), *out.glob("curve.png")]:
        path.unlink()


async def _text(session: aiohttp.ClientSession, url: str) -> str:
    async with session.get(url, raise_for_status=True) as response:
        return await response.text()


def say(sentence: str) -> None:
    """One line of the story."""
    print(f"demo: {sentence}", flush=True)


def report(store: Store, out: Path) -> Summary:
    """Summary and picture from the store, written beside it."""
    from hone.curve import draw
    from hone.summary import flat

    summary = summarise(store, RUN_ID)
    (out / "summary.json").write_bytes(msgspec.json.format(msgspec.json.encode(flat(summary))) + b"\n")
    draw(store.steps(RUN_ID), summary, out / "curve.png")
    return summary

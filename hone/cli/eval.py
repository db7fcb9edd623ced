"""`hone eval`: the agent on evaluation scenarios, scored like training, nothing updated."""

import argparse
import asyncio
import os
import sys
from collections.abc import Mapping
from pathlib import Path

from capture.evaluations import Evaluation, record
from hone.cli.common import add_config, add_json, load_config, on_signals, open_store, print_json, supervise
from hone.config import Config
from rollouts.compare import Interval
from rollouts.evaluate import EvalResult, Progress


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of the verb."""
    add_config(parser)
    add_json(parser)
    parser.add_argument("scenarios", nargs="*", help="scenario files (default: eval.scenarios)")
    parser.add_argument("--version", type=int, help="of the policy (default: the newest active one)")
    parser.add_argument("--repeats", type=int, default=1, help="rollouts of each scenario")


def run(arguments: argparse.Namespace) -> int:
    """Evaluate on every file; starts what it needs unless a `hone up` or `hone train` runs."""
    from capture.errors import ConfigError

    config = load_config(arguments)
    paths = arguments.scenarios or config.eval.scenarios
    if not paths:
        raise ConfigError("eval.scenarios is empty and no scenario file was given")
    results = asyncio.run(evaluate_all(config, paths, arguments.version, arguments.repeats))
    said = remember(config, results)
    if arguments.json:
        print_json(results)
    else:
        for path, result in results.items():
            print(render(path, result))
    if said is not None:
        print(f"hone eval: {said}", file=sys.stderr)
    return 0


def remember(config: Config, results: Mapping[str, EvalResult]) -> str | None:
    """Write the evaluations into the newest run's history; what came of `promote.auto`, if it is on."""
    from hone.passing import consider

    store = open_store(config)
    try:
        run_id = store.latest_run()
        version = None
        for path, result in results.items():
            if run_id is None or result.version is None or result.reward is None:
                continue
            version = result.version
            found = Evaluation(
                version=version,
                scenarios=str(Path(path).absolute()),
                reward=result.reward.mean,
                rollouts=result.rollout_ids,
                at=store.now(),
            )
            record(store, run_id, found)
        if run_id is None or version is None or not config.promote.auto:
            return None
        return consider(store, config.policy.name, config.promote, run_id, version)
    finally:
        store.close()


async def evaluate_all(
    config: Config, paths: list[str], version: int | None, repeats: int
) -> dict[str, EvalResult]:
    """One result for each file."""
    from hone.parts import serving
    from hone.start import start_policy
    from hone.state import running

    stop = asyncio.Event()
    on_signals(stop.set)
    directory = Path(config.run.dir)
    store = open_store(config, create=True)
    start_policy(config, store)
    if store.latest_run() is None:  # somebody must say that there is a version 0
        store.start_run("eval", config.policy.name, {})
    store.close()
    if running(directory, "up") or running(directory, "train"):
        return await _evaluate(config, paths, version, repeats, stop)
    supervisor = supervise(config, "up", serving(config, sys.executable))
    keeping = asyncio.create_task(supervisor.run())

    async def once_ready() -> dict[str, EvalResult]:
        await supervisor.ready()
        return await _evaluate(config, paths, version, repeats, stop)

    working = asyncio.create_task(once_ready())
    stopping = asyncio.create_task(stop.wait())
    try:
        await asyncio.wait({keeping, working, stopping}, return_when=asyncio.FIRST_COMPLETED)
        if not working.done() and not keeping.done():
            working.cancel()  # stopped while the parts were still starting
        if keeping.done():
            keeping.result()
        return await working
    finally:
        working.cancel()
        stopping.cancel()
        supervisor.stop()
        await keeping


async def _evaluate(
    config: Config, paths: list[str], version: int | None, repeats: int, stop: asyncio.Event
) -> dict[str, EvalResult]:
    from hone.environment import for_agents, proxy_url
    from rollouts.evaluate import evaluate
    from rollouts.scenarios import read_scenarios

    results = {}
    for path in paths:
        results[path] = await evaluate(
            config.rollouts,
            read_scenarios(Path(path)),
            store_path=Path(config.store.path),
            proxy_url=proxy_url(config),
            key=os.environ.get(config.train.key_env),
            environ=for_agents(os.environ),
            version=version,
            repeats=repeats,
            stop=stop,
            progress=_tell if sys.stderr.isatty() else _silent,
        )
    return results


def _tell(progress: Progress) -> None:
    sys.stderr.write(f"\rplayed {progress.played}, scored {progress.scored} of {progress.total} ")
    sys.stderr.flush()


def _silent(progress: Progress) -> None:
    pass


def render(path: str, result: EvalResult) -> str:
    """Mean reward and scores with 95 % intervals."""
    lines = [f"{path}, version {result.version}: {len(result.rows)} rollouts"]
    if result.reward is not None:
        lines.append(f"  {'reward':<14}{_interval(result.reward)}")
    lines += [f"  {name:<14}{_interval(interval)}" for name, interval in result.scores.items()]
    for title, counts in (("status", result.statuses), ("unscored", result.unscored)):
        if counts:
            lines.append(f"  {title:<14}" + ", ".join(f"{n} {name}" for name, n in sorted(counts.items())))
    return "\n".join(lines)


def _interval(interval: Interval) -> str:
    return f"{interval.mean:.3f} [{interval.low:.3f}, {interval.high:.3f}]"

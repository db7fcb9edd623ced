import asyncio
import contextlib
import os
import signal
import sys
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest
from rollouts_proxy import SECRET, SmallProxy, small_proxy

from capture.errors import Fenced, UpstreamError
from capture.sqlite import SqliteStore
from rollouts.launch import Finished
from rollouts.metrics import Metrics
from rollouts.play import verdict
from rollouts.scenarios import Deck, Scenario
from rollouts.schedule import Outcome, train, unlimited
from rollouts.settings import Settings

HERE = Path(__file__).parent
ENVIRON = {"PATH": os.environ["PATH"]}
SET = [Scenario(f"s{number}", {"id": f"s{number}", "n": number}) for number in range(6)]
QUIET = "import os\nprint(os.environ['SCENARIO_FILE'][-6:])\n"
CALLING = """
import json, os, urllib.request
request = urllib.request.Request(os.environ["OPENAI_BASE_URL"] + "/chat/completions", b'{"messages": []}')
print(json.load(urllib.request.urlopen(request))["choices"][0]["message"]["content"])
"""
SLOW = "import os, time\nopen(os.environ['PIDS'], 'a').write(f'{os.getpid()}\\n')\ntime.sleep(60)\n"


def settings(tmp_path: Path, text: str = QUIET, **more: Any) -> Settings:
    (tmp_path / "agent.py").write_text(text)
    defaults: dict[str, Any] = {
        "cwd": str(tmp_path),
        "group_size": 3,
        "groups_per_batch": 1,
        "concurrency": 6,
        "poll_s": 0.02,
        "retry_wait_s": 0.01,
        "env": {"PIDS": str(tmp_path / "pids")},
    }
    return Settings(**{**defaults, **more})


def enough(proxy: SmallProxy, rollouts: int) -> Callable[[], int | None]:
    """No more groups are needed once so many rollouts have finished."""
    return lambda: 0 if len(proxy.finished) >= rollouts else None


async def trained(
    tmp_path: Path,
    proxy: SmallProxy,
    chosen: Settings,
    *,
    stop: asyncio.Event | None = None,
    needed: Callable[[], int | None] = unlimited,
    metrics: Metrics | None = None,
) -> Outcome:
    return await train(
        chosen,
        SET,
        store_path=tmp_path / "store",
        proxy_url=proxy.url,
        key=SECRET,
        run_id="run",
        environ=ENVIRON,
        stop=stop or asyncio.Event(),
        needed=needed,
        metrics=metrics,
    )


@contextlib.asynccontextmanager
async def learning(path: Path) -> AsyncIterator[list[str]]:
    """Something that takes batches of a group each and gives them up; their scenarios in order."""
    taken: list[str] = []

    async def take() -> None:
        store = SqliteStore(path)
        try:
            while True:
                epoch = store.acquire_lease("learner:policy", "test", 60)
                assert epoch is not None
                batch = store.take_batch("run", epoch=epoch, groups=1, batch_wait_s=60, staleness_max=4)
                if batch is not None:
                    taken.append(batch.groups[0][0].scenario_id or "")
                    assert len(store.groups_of_run("run")) >= 1
                    store.drop_batch(batch.id, "test", epoch)
                await asyncio.sleep(0.02)
        finally:
            store.close()

    task = asyncio.create_task(take())
    try:
        yield taken
    finally:
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task


async def until(condition: Callable[[], bool], within_s: float = 20.0) -> None:
    for _ in range(int(within_s / 0.02)):
        if condition():
            return
        await asyncio.sleep(0.02)
    raise AssertionError("it never came to pass")


async def test_every_scenario_is_played_in_order_and_the_epochs_end(tmp_path: Path) -> None:
    async with small_proxy(tmp_path / "store") as proxy, learning(tmp_path / "store") as taken:
        outcome = await trained(tmp_path, proxy, settings(tmp_path, epochs=2))
        assert outcome == Outcome("epochs", 12, 36)
        deck = Deck(SET, seed=42, epochs=2)
        first = {}
        for body in proxy.opened:
            first.setdefault(body["group_id"], body["scenario_id"])
        assert first == {f"g_run_{n:06d}": deck.draw(n).id for n in range(12)}
        assert sorted(taken) == sorted(2 * [scenario.id for scenario in SET])
        rollout = proxy.store.rollouts(run_id="run", limit=1)[0]
        assert rollout.stdout == f"{rollout.id[-1]}.json\n"
        assert set(rollout.metrics) == {"duration_s", "start_s", "exit_code"}
        assert rollout.scenario == {"id": rollout.scenario_id, "n": int((rollout.scenario_id or "")[1:])}
        assert proxy.store.verify() == []


async def test_without_a_learner_admission_stops_at_the_outstanding_batches(tmp_path: Path) -> None:
    async with small_proxy(tmp_path / "store") as proxy:
        stop = asyncio.Event()
        task = asyncio.create_task(
            trained(tmp_path, proxy, settings(tmp_path, groups_per_batch=2), stop=stop)
        )
        await until(lambda: len(proxy.finished) == 12)
        await asyncio.sleep(0.3)
        assert proxy.store.groups_of_run("run") == {"closed": 4}
        assert len(proxy.opened) == 12
        stop.set()
        assert await task == Outcome("stopped", 4, 12)


async def test_no_more_agents_run_than_allowed(tmp_path: Path) -> None:
    text = "import time; time.sleep(0.2)"
    chosen = settings(tmp_path, text, concurrency=2, batches_outstanding_max=3)
    async with small_proxy(tmp_path / "store") as proxy:
        metrics = Metrics()
        await trained(tmp_path, proxy, chosen, needed=enough(proxy, 9), metrics=metrics)
        # Two run; one more may be open between an agent's end and its finish.
        assert 2 <= proxy.peak_open <= 3
        assert metrics.registry.get_sample_value("hone_runner_in_flight", {"mode": "train"}) == 0


async def test_what_our_side_broke_is_attempted_again_and_never_scored(tmp_path: Path) -> None:
    chosen = settings(tmp_path, CALLING, group_size=2, batches_outstanding_max=1)
    async with small_proxy(tmp_path / "store") as proxy:
        proxy.break_calls = True
        metrics = Metrics()
        task = asyncio.create_task(
            trained(
                tmp_path,
                proxy,
                chosen,
                needed=enough(proxy, 6),
                metrics=metrics,
            )
        )
        await task
        members = proxy.store.rollouts(group_id="g_run_000000")
        assert [member.state for member in members] == ["failed"] * 6
        assert sorted(member.attempt for member in members) == [0, 0, 1, 1, 2, 2]
        by_id = {member.id: member for member in members}
        for member in members:
            if member.replaces is not None:
                assert by_id[member.replaces].attempt == member.attempt - 1
        assert metrics.registry.get_sample_value("hone_runner_retries_total", {"mode": "train"}) == 4
        # Nobody was left to compare: the group is gone and frees its slot.
        assert proxy.store.group("g_run_000000").state == "dropped"


async def test_a_recovered_upstream_completes_the_same_group(tmp_path: Path) -> None:
    chosen = settings(tmp_path, CALLING, group_size=2, batches_outstanding_max=1, retry_wait_s=0.3)
    async with small_proxy(tmp_path / "store") as proxy:
        proxy.break_calls = True
        task = asyncio.create_task(trained(tmp_path, proxy, chosen, needed=enough(proxy, 4)))
        await until(lambda: len(proxy.finished) == 2)
        proxy.break_calls = False
        await task
        members = proxy.store.rollouts(group_id="g_run_000000", states=["scored", "grouped"])
        assert [(member.attempt, member.status) for member in members] == [(1, "completed")] * 2
        assert {member.stdout for member in members} == {"four\n"}
        assert proxy.store.group("g_run_000000").state == "closed"


async def test_a_crashing_agent_is_scored_not_retried(tmp_path: Path) -> None:
    chosen = settings(tmp_path, "raise SystemExit(2)", batches_outstanding_max=1)
    async with small_proxy(tmp_path / "store") as proxy:
        await trained(tmp_path, proxy, chosen, needed=enough(proxy, 3))
        members = proxy.store.rollouts(run_id="run")
        assert [(member.status, member.reward, member.attempt) for member in members] == [
            ("agent_error", 0.0, 0)
        ] * 3


async def test_lost_answers_and_refusals_leave_whole_groups(tmp_path: Path) -> None:
    async with small_proxy(tmp_path / "store") as proxy, learning(tmp_path / "store"):
        proxy.lose_answers = 3
        proxy.refuse = 2
        metrics = Metrics()
        outcome = await trained(tmp_path, proxy, settings(tmp_path), metrics=metrics)
        assert outcome == Outcome("epochs", 6, 18)
        lost = proxy.store.rollouts(states=["failed"])
        assert len(lost) == 3  # opened, but nobody ever knew their keys
        replaced = {body.get("replaces") for body in proxy.opened}
        assert {rollout.id for rollout in lost} <= replaced
        failures = metrics.registry.get_sample_value("hone_runner_proxy_failures_total")
        assert failures == 5


async def test_a_proxy_that_is_gone_ends_the_runner(tmp_path: Path) -> None:
    async with small_proxy(tmp_path / "store") as proxy:
        proxy.url = "http://127.0.0.1:9"
        with pytest.raises(UpstreamError):
            await trained(tmp_path, proxy, settings(tmp_path, proxy_wait_s=0.5))


async def test_stopping_kills_agents_and_fails_their_rollouts(tmp_path: Path) -> None:
    file = tmp_path / "pids"
    async with small_proxy(tmp_path / "store") as proxy:
        stop = asyncio.Event()
        task = asyncio.create_task(trained(tmp_path, proxy, settings(tmp_path, SLOW), stop=stop))
        await until(lambda: file.exists() and len(file.read_text().split()) == 6)
        stop.set()
        assert await task == Outcome("stopped", 2, 0)
        assert [status for _, status in proxy.finished] == ["failed"] * 6
        for pid in file.read_text().split():
            assert not Path(f"/proc/{pid}").exists()
        assert proxy.store.live_leases("runner:") == {}


async def test_an_ended_lineage_ends_the_runner(tmp_path: Path) -> None:
    async with small_proxy(tmp_path / "store") as proxy:
        task = asyncio.create_task(trained(tmp_path, proxy, settings(tmp_path)))
        await until(lambda: len(proxy.finished) == 6)
        proxy.store.end_run("run", "test")
        assert (await task).ending == "ended"


async def test_a_second_runner_waits_and_a_usurped_one_stops(tmp_path: Path) -> None:
    async with small_proxy(tmp_path / "store") as proxy:
        stop = asyncio.Event()
        assert proxy.store.acquire_lease("runner:run", "other", 60) is not None
        waiting = asyncio.create_task(trained(tmp_path, proxy, settings(tmp_path), stop=stop))
        await asyncio.sleep(0.5)
        assert proxy.opened == []
        proxy.store.release_lease("runner:run", "other")
        await until(lambda: len(proxy.finished) == 6)
        (holder,) = proxy.store.live_leases("runner:").values()
        proxy.store.release_lease("runner:run", holder)
        assert proxy.store.acquire_lease("runner:run", "other", 60) is not None
        with pytest.raises(Fenced, match="another runner"):
            await waiting


RUNNER = """
import asyncio, os, sys
from pathlib import Path
from rollouts.scenarios import Scenario
from rollouts.schedule import train
from rollouts.settings import Settings

asyncio.run(train(
    Settings(cwd=sys.argv[1], group_size=3, groups_per_batch=1, concurrency=4,
             env={"PIDS": sys.argv[1] + "/pids"}),
    [Scenario(f"s{n}", {"id": f"s{n}", "n": n}) for n in range(6)],
    store_path=Path(sys.argv[1]) / "store", proxy_url=sys.argv[2], key="secret", run_id="run",
    environ=dict(os.environ), stop=asyncio.Event(),
))
"""


async def test_a_killed_runner_is_replaced_in_the_same_groups(tmp_path: Path) -> None:
    file = tmp_path / "pids"
    chosen = settings(tmp_path, SLOW)
    async with small_proxy(tmp_path / "store") as proxy, learning(tmp_path / "store"):
        runner = await asyncio.create_subprocess_exec(
            *(sys.executable, "-c", RUNNER, str(tmp_path), proxy.url), cwd=HERE.parent
        )
        await until(lambda: file.exists() and len(file.read_text().split()) == 4)
        runner.send_signal(signal.SIGKILL)
        await runner.wait()
        # Four agents ran: the first group whole, of the second one rollout.
        before = {rollout.id: rollout for rollout in proxy.store.rollouts(states=["open"])}
        assert len(before) == 4
        await until(lambda: all(not Path(f"/proc/{pid}").exists() for pid in file.read_text().split()))
        (tmp_path / "agent.py").write_text(QUIET)
        outcome = await trained(tmp_path, proxy, chosen)
        assert outcome == Outcome("epochs", 4, 18)  # four new groups, and six repaired rollouts
        after = proxy.store.rollouts(run_id="run", limit=100)
        replaced = {rollout.replaces for rollout in after if rollout.replaces is not None}
        assert replaced == set(before)
        assert {rollout.state for rollout in after if rollout.id in before} == {"failed"}
        for ordinal in range(6):
            members = proxy.store.rollouts(group_id=f"g_run_{ordinal:06d}")
            assert sum(member.status == "completed" for member in members) == 3
        assert proxy.store.ledger_twice() == 0


@pytest.mark.parametrize(
    ("status", "broken", "used_up", "expected"),
    [
        ("completed", True, True, "completed"),  # it coped
        ("agent_error", False, False, "agent_error"),
        ("agent_error", True, True, "failed"),
        ("agent_error", False, True, "max_calls"),
        ("timeout", False, True, "timeout"),
        ("timeout", True, False, "failed"),
        ("failed", False, False, "failed"),
    ],
)
def test_who_is_to_blame(status: Any, broken: bool, used_up: bool, expected: str) -> None:
    finished = Finished(status=status, stdout="", stderr="", exit_code=1, duration_s=1.0, start_s=0.1)
    assert verdict(finished, broken=broken, used_up=used_up) == expected

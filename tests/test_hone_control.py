"""Control on the real store: from committed calls to closed groups, through kills and bad scripts."""

import asyncio
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import apsw
import msgspec
import pytest

from capture.errors import ConfigError, Fenced, StoreBusy
from capture.ids import new_id
from capture.journal import Journal
from capture.settings import Settings as CaptureSettings
from capture.sqlite import SqliteStore
from capture.types import Group, RawCall, Rollout
from hone.control import serve
from hone.settings import ControlSettings
from rewards.metrics import Metrics
from rewards.score import Judged
from rewards.script import Scored
from rewards.settings import SealSettings, Settings
from rewards.steps import Steps

SCRIPT = """
WEIGHTS = {"length": 0.0}

def reward(trace):
    last = trace["turns"][-1]
    assert last["role"] == "assistant", trace["turns"]
    if last["content"] == "broken":
        raise ValueError("this answer breaks the script")
    return {"outcome": float(last["content"]), "length": len(trace["turns"])}
"""
PROMPT, ANSWER = [1, 2, 3], [10, 11]
BRIDGE = [4, 5]


class World:
    """A store with a run, and calls as the proxy would commit them."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.path = root / "hone.db"
        self.script = root / "reward.py"
        self.script.write_text(SCRIPT)
        self.store = SqliteStore(self.path)
        self.store.start_run("run", "policy", {})

    def settings(self, **changes: Any) -> Settings:
        base = Settings(script=str(self.script), timeout_s=10.0, group_deadline_s=600.0)
        return msgspec.structs.replace(base, **changes)

    def open(self, name: str, group: str | None = "g_1", size: int = 2, **fields: Any) -> Rollout:
        rollout = Rollout(id=name, key_id="key", mode="train", run_id="run", group_id=group, policy="policy")
        rollout = msgspec.structs.replace(rollout, **fields)
        return self.store.open_rollout(rollout, group_size=size)

    async def talk(self, rollout_id: str, answers: list[str]) -> None:
        """A conversation of one call for each answer, every prompt extending the last one's tokens."""
        journal = Journal(SqliteStore(self.path), CaptureSettings())
        journal.start()
        messages: list[dict[str, Any]] = [{"role": "system", "content": "Say a number."}]
        prompt = PROMPT
        for number, answer in enumerate(answers):
            messages = [*messages, {"role": "user", "content": f"question {number}"}]
            await journal.commit(call(rollout_id, messages, prompt, answer, number))
            messages = [*messages, {"role": "assistant", "content": answer}]
            prompt = [*prompt, *ANSWER, *BRIDGE]
        await journal.close()

    async def rollout(self, name: str, answers: list[str], **fields: Any) -> None:
        """Opened, talked, finished."""
        self.open(name, **fields)
        await self.talk(name, answers)
        self.store.seal_rollout(name, "completed")


def call(
    rollout_id: str, messages: list[dict[str, Any]], prompt: list[int], answer: str, number: int
) -> RawCall:
    """As vLLM answers with `return_token_ids` and `logprobs`."""
    request = json.dumps({"model": "policy", "messages": messages, "temperature": 1.0}).encode()
    logprobs = [{"token": "x", "logprob": -0.5, "bytes": None, "top_logprobs": []} for _ in ANSWER]
    choice = {
        "index": 0,
        "message": {"role": "assistant", "content": answer},
        "finish_reason": "stop",
        "token_ids": ANSWER,
        "logprobs": {"content": logprobs},
    }
    response = {
        "id": "x",
        "object": "chat.completion",
        "created": 1,
        "model": "policy@v0",
        "choices": [choice],
        "prompt_token_ids": prompt,
        "usage": {
            "prompt_tokens": len(prompt),
            "completion_tokens": len(ANSWER),
            "total_tokens": len(prompt) + len(ANSWER),
        },
    }
    now = time.time()
    return RawCall(
        id=new_id("c"),
        rollout_id=rollout_id,
        key_id="key",
        mode="train",
        attribution="path",
        route="policy",
        upstream="engine",
        policy="policy",
        policy_version=0,
        started_at=now + number,
        ended_at=now + number + 0.5,
        status=200,
        request=request,
        response=json.dumps(response).encode(),
        body_hash=os.urandom(16),
    )


@pytest.fixture
def world(tmp_path: Path) -> World:
    return World(tmp_path)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@asynccontextmanager
async def controlling(world: World, **changes: Any) -> AsyncIterator[str]:
    """Control running in this process; its URL. Leaving stops it and raises what it raised."""
    port, stop = free_port(), asyncio.Event()
    settings = ControlSettings(port=port)
    task = asyncio.create_task(
        serve(world.path, world.settings(**changes), settings, policy="policy", stop=stop)
    )
    try:
        yield f"http://127.0.0.1:{port}"
    finally:
        stop.set()
        await task


async def wait_until(what: Callable[[], bool | Awaitable[bool]], seconds: float = 20.0) -> None:
    deadline = time.monotonic() + seconds
    while True:
        result = what()
        if result if isinstance(result, bool) else await result:
            return
        assert time.monotonic() < deadline, "it never happened"
        await asyncio.sleep(0.01)


def group(world: World, name: str = "g_1") -> Group:
    return world.store.group(name)


def ended(world: World, name: str, *states: str) -> Callable[[], bool]:
    return lambda: world.store.rollout(name).state in states


async def test_a_group_closes_with_the_right_rewards(world: World) -> None:
    await world.rollout("r_a", ["0.5", "1.0"])
    await world.rollout("r_b", ["0.25"])
    async with controlling(world):
        await wait_until(lambda: group(world).state == "closed")
    first, second = world.store.rollout("r_a"), world.store.rollout("r_b")
    assert (first.reward, first.scores, first.state) == (1.0, {"outcome": 1.0, "length": 4.0}, "grouped")
    assert (second.reward, second.scores) == (0.25, {"outcome": 0.25, "length": 2.0})
    assert first.script_hash == second.script_hash
    assert world.store.balance("policy").pending == 6  # 3 calls, 2 sampled tokens each
    assert world.store.verify() == []


async def test_work_that_arrives_while_it_runs(world: World) -> None:
    async with controlling(world):
        for number in range(3):
            name = f"g_{number}"
            for member in range(2):
                await world.rollout(f"r_{number}_{member}", [str(member)], group=name)
            await wait_until(lambda name=name: group(world, name).state == "closed")
    assert [each.reward for each in world.store.rollouts(run_id="run")] == [0.0, 1.0] * 3


async def test_a_script_that_breaks_is_a_reward_error_and_never_zero(world: World) -> None:
    await world.rollout("r_a", ["1"], size=3)
    await world.rollout("r_b", ["broken"])
    await world.rollout("r_c", ["0"])
    async with controlling(world) as url:
        await wait_until(lambda: group(world).state == "closed")
        async with aiohttp.ClientSession() as client, client.get(f"{url}/metrics") as response:
            assert 'hone_rewards_total{outcome="reward_error"} 1.0' in await response.text()
    broken = world.store.rollout("r_b")
    assert (broken.state, broken.reward, broken.drop_reason) == ("reward_error", None, "reward_error")
    assert "ValueError: this answer breaks the script" in str(broken.reward_error)
    assert world.store.balance("policy").dropped == {"reward_error": 2}
    assert world.store.verify() == []


async def test_idle_rollouts_are_sealed_and_scored(world: World) -> None:
    world.open("r_a")
    world.open("r_b")
    world.open("r_c", group=None, mode="observe")
    for name in ("r_a", "r_b", "r_c"):
        await world.talk(name, ["1"])
    async with controlling(world, seal=SealSettings(idle_s=0.3)):
        await wait_until(lambda: group(world).state == "closed")
        await wait_until(ended(world, "r_c", "scored"))
    statuses = {name: world.store.rollout(name).status for name in ("r_a", "r_b", "r_c")}
    assert statuses == {"r_a": "timeout", "r_b": "timeout", "r_c": "completed"}


async def test_a_failed_member_is_represented_by_its_replacement(world: World) -> None:
    await world.rollout("r_a", ["1"])
    world.open("r_b")
    world.store.seal_rollout("r_b", "failed")
    async with controlling(world):
        await wait_until(ended(world, "r_a", "scored"))
        await asyncio.sleep(1.2)
        assert group(world).state == "open"
        await world.rollout("r_c", ["0"], attempt=1, replaces="r_b")
        await wait_until(lambda: group(world).state == "closed")
    assert {each.id: each.state for each in world.store.rollouts(run_id="run")} == {
        "r_a": "grouped",
        "r_b": "failed",
        "r_c": "grouped",
    }


async def test_a_rollout_without_calls_is_scored_too(world: World) -> None:
    world.script.write_text("def reward(trace): return -1 if not trace['turns'] else 1")
    world.open("r_a")
    world.store.seal_rollout("r_a", "agent_error")
    await world.rollout("r_b", ["1"])
    async with controlling(world):
        await wait_until(lambda: group(world).state == "closed")
    assert [world.store.rollout(name).reward for name in ("r_a", "r_b")] == [-1.0, 1.0]


async def test_posted_scores_are_waited_for_and_weighed(world: World) -> None:
    await world.rollout("r_a", ["1"])
    await world.rollout("r_b", ["0"])
    async with controlling(world, require=["thumbs"], weights={"thumbs": 0.5}, wait_s=3.0):
        await wait_until(ended(world, "r_a", "ingested"))
        await asyncio.sleep(0.5)
        assert world.store.rollout("r_a").state == "ingested"
        world.store.post_score("r_a", "thumbs", 1.0, "user")
        await wait_until(ended(world, "r_a", "scored"))
        await wait_until(ended(world, "r_b", "reward_error"))
    assert world.store.rollout("r_a").reward == 1.5
    assert "thumbs" in str(world.store.rollout("r_b").reward_error)


async def test_a_score_posted_after_scoring_counts(world: World) -> None:
    await world.rollout("r_a", ["1"])
    async with controlling(world):
        await wait_until(ended(world, "r_a", "scored"))
        world.store.post_score("r_a", "thumbs", 2.0, "user")
        await wait_until(lambda: world.store.rollout("r_a").reward == 3.0)
    assert world.store.rollout("r_a").scores == {"outcome": 1.0, "length": 2.0, "thumbs": 2.0}


async def test_without_a_script_posted_scores_are_the_reward(world: World) -> None:
    await world.rollout("r_a", ["1"])
    await world.rollout("r_b", ["1"])
    world.store.post_score("r_a", "thumbs", 0.75, "user")
    async with controlling(world, script=""):
        await wait_until(ended(world, "r_a", "scored", "grouped", "dropped"))
        await wait_until(ended(world, "r_b", "reward_error"))
    assert world.store.rollout("r_a").reward == 0.75
    assert "rewards.script is not set" in str(world.store.rollout("r_b").reward_error)


async def test_pages(world: World) -> None:
    await world.rollout("r_a", ["1"])
    async with controlling(world) as url, aiohttp.ClientSession(url) as client:

        async def ready() -> bool:
            try:
                async with client.get("/ready") as response:
                    return response.status == 200
            except aiohttp.ClientConnectionError:
                return False

        await wait_until(ready)
        await wait_until(ended(world, "r_a", "scored"))
        await asyncio.sleep(1.1)  # what the pages show may be that old
        async with client.get("/health") as response:
            assert await response.json() == {"status": "ok"}
        async with client.get("/status") as response:
            status = await response.json()
        assert (status["policy"], status["not_ready"], status["scoring"]) == ("policy", None, 0)
        assert status["counts"]["rollouts"] == {"scored": 1}
        assert (status["balance"]["sampled"], status["balance"]["exact"]) == (2, True)
        async with client.get("/metrics") as response:
            text = await response.text()
        assert 'hone_rollouts{state="scored"} 1.0' in text
        assert 'hone_tokens{fate="sampled",reason=""} 2.0' in text
        assert "hone_control_leader 1.0" in text


def test_a_step_that_found_the_store_busy_can_be_repeated(world: World) -> None:
    """Outcomes that could not be saved are saved by the next step."""
    for name in ("r_a", "r_b"):
        world.open(name)
        world.store.seal_rollout(name, "completed")
    steps = Steps(SqliteStore(world.path, busy_timeout_s=0.01), world.settings(), Metrics())
    assert steps.lead()
    steps.tick()
    steps.scorer.take()
    for task in steps.scorer.tasks:
        steps.scorer.judged.append(Judged(task.rollout, Scored({"outcome": 0.5}, {}, "hash")))
    other = apsw.Connection(str(world.path))
    other.execute("BEGIN IMMEDIATE")
    with pytest.raises(StoreBusy):
        steps.tick()
    assert world.store.rollout("r_a").state == "ingested"
    other.execute("ROLLBACK")
    steps.tick()
    assert [world.store.rollout(name).reward for name in ("r_a", "r_b")] == [0.5, 0.5]
    assert group(world).state == "closed"


async def test_one_leads_and_the_other_takes_over(world: World) -> None:
    async with controlling(world):
        await wait_until(lambda: "control" in world.store.live_leases("control"))
        leader = world.store.live_leases("control")["control"]
        async with controlling(world) as url, aiohttp.ClientSession(url) as client:
            await asyncio.sleep(1.5)
            async with client.get("/ready") as response:
                assert (response.status, (await response.json())["ready"]) == (503, False)
            assert world.store.live_leases("control") == {"control": leader}


async def test_a_lost_lease_ends_control(world: World) -> None:
    async def usurp() -> None:
        async with controlling(world):
            await wait_until(lambda: "control" in world.store.live_leases("control"))
            world.store.release_lease("control", world.store.live_leases("control")["control"])
            assert world.store.acquire_lease("control", "somebody else", 60.0) is not None
            await asyncio.sleep(1.5)

    with pytest.raises(Fenced):
        await usurp()


async def test_a_script_that_does_not_load_is_refused(world: World) -> None:
    world.script.write_text("def (")
    with pytest.raises(ConfigError, match="SyntaxError"):
        async with controlling(world):
            await asyncio.sleep(0.5)


HOST = """
import asyncio, sys
from pathlib import Path
import msgspec
from hone.control import serve
from hone.settings import ControlSettings
from rewards.settings import Settings

settings = msgspec.json.decode(sys.argv[2], type=Settings)
asyncio.run(serve(Path(sys.argv[1]), settings, ControlSettings(port=int(sys.argv[3])), policy="policy"))
"""


def spawn(world: World) -> subprocess.Popen[bytes]:
    settings = msgspec.json.encode(world.settings()).decode()
    command = [sys.executable, "-c", HOST, str(world.path), settings, str(free_port())]
    return subprocess.Popen(command, cwd=Path(__file__).parents[1])


async def test_kill_9_at_any_moment_loses_nothing(world: World) -> None:
    """Killed again and again while 40 rollouts pass; each is scored, each group closes."""
    world.script.write_text("import time\n" + SCRIPT.replace("last =", "time.sleep(0.15); last ="))
    for number in range(20):
        for member in range(2):
            await world.rollout(
                f"r_{number:02d}_{member}", [str(member), str(member)], group=f"g_{number:02d}"
            )
    done = 0
    for pause_s in (0.0, 0.2, 0.4, 0.5):
        host = spawn(world)
        await wait_until(lambda: "control" in world.store.live_leases("control"))
        await asyncio.sleep(pause_s)
        host.send_signal(signal.SIGKILL)
        host.wait()
        done = world.store.counts().groups.get("closed", 0)
        world.store.release_lease("control", world.store.live_leases("control")["control"])
    assert done < 20, "the kills came too late to prove anything"
    host = spawn(world)
    await wait_until(lambda: world.store.counts().groups == {"closed": 20}, seconds=60.0)
    host.send_signal(signal.SIGTERM)
    assert host.wait(20) == 0
    assert [each.reward for each in world.store.rollouts(run_id="run")] == [0.0, 1.0] * 20
    assert world.store.live_leases("control") == {}
    assert world.store.verify() == []

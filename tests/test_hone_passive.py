"""From traffic that nobody opened for training to a batch: through the real proxy, control and store."""

import asyncio
import hashlib
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, closing
from pathlib import Path
from typing import Any

import pytest
from learner_world import settings
from proxy_world import World, engine_settings, until, world
from test_hone_control import free_port
from toy_engine import ToyEngine

from capture.sqlite import SqliteStore
from capture.types import Balance, Rollout
from hone.control import serve
from hone.settings import ControlSettings
from learner.groups import read
from learner.train import run
from proxy.settings import Key
from rewards.settings import PassiveSettings, SealSettings, Settings

CHAT = "/v1/chat/completions"
SYSTEM = {"role": "system", "content": "Be brief."}
ASKED = {"role": "user", "content": "Count to three."}
KEYS = tuple(
    Key(id=name, sha256=hashlib.sha256(f"sk-{name}".encode()).hexdigest(), scopes=("infer", "train"))
    for name in ("acme", "other")
)
PASSIVE = PassiveSettings(train=True, group_size=2)
SCRIPT = "def reward(trace): return len(trace['turns'])"


@asynccontextmanager
async def hone(root: Path, passive: PassiveSettings = PASSIVE) -> AsyncIterator[tuple[World, ToyEngine]]:
    """`serving` in front of a toy engine, in which a letter is a token."""
    async with ToyEngine(drifts=False).listening() as engine, serving(root, engine.url, passive) as proxied:
        yield proxied, engine


@asynccontextmanager
async def serving(
    root: Path, engine_url: str, passive: PassiveSettings = PASSIVE, idle_s: float = 0.3
) -> AsyncIterator[World]:
    """Proxy and control on one store, in which a run is on; quiet rollouts end after `idle_s`."""
    (root / "reward.py").write_text(SCRIPT)
    settings = Settings(
        script=str(root / "reward.py"),
        seal=SealSettings(idle_s=idle_s),
        passive=passive,
        group_deadline_s=60.0,
    )
    stop = asyncio.Event()
    async with world(engine_settings(engine_url, keys=KEYS, head_ttl_s=0.05), root) as proxied:
        proxied.store.start_run("run", "policy", {})
        control = serve(
            root / "hone.db", settings, ControlSettings(port=free_port()), policy="policy", stop=stop
        )
        task = asyncio.create_task(control)
        try:
            yield proxied
        finally:
            stop.set()
            await task
        assert proxied.store.verify() == []


async def talk(on: World, session: str | None, calls: int = 1, key: str = "acme", **fields: Any) -> str:
    """A conversation of an agent that knows nothing of Hone; the rollout's id."""
    messages: list[dict[str, Any]] = [SYSTEM, ASKED]
    headers = {"Authorization": f"Bearer sk-{key}", **({"X-Session-ID": session} if session else {})}
    rollout_id = ""
    for _ in range(calls):
        body = {"model": "policy", "messages": messages, **fields}
        status, answer, got = await on.post(CHAT, body, headers)
        assert status == 200, answer
        said = answer["choices"][0]["message"]["content"] or ""
        messages = [
            *messages,
            {"role": "assistant", "content": said},
            {"role": "user", "content": "And on."},
        ]
        rollout_id = got["x-hone-rollout-id"]
    return rollout_id


def rollouts(on: World) -> dict[str, Rollout]:
    return {one.id: one for one in on.store.rollouts()}


def balanced(on: World) -> Balance:
    balance = on.store.balance("policy")
    assert balance.exact, balance
    return balance


async def states(on: World, wanted: dict[str, str]) -> None:
    """Wait until the rollouts are in these states, with sums that are exact all the time."""

    def reached() -> bool:
        balanced(on)
        return {id: rollouts(on)[id].state for id in wanted} == wanted

    await until(reached, 20.0)


async def test_from_captured_traffic_to_a_batch(tmp_path: Path) -> None:
    async with hone(tmp_path) as (on, engine):
        short = await talk(on, "s1", temperature=0.7)
        long = await talk(on, "s2", calls=2, temperature=0.7)
        stranger = await talk(on, "s1", key="other")
        shaped = await talk(on, "s3", top_p=0.5)
        headless = await talk(on, None)
        assert balanced(on).pending == 0
        await states(
            on,
            {
                short: "grouped",
                long: "grouped",
                stranger: "scored",
                shaped: "dropped",
                headless: "dropped",
            },
        )
        assert "temperature" not in engine.asked[4]  # what is trained was sent as it came
        assert engine.asked[4]["top_p"] == 0.5
        found = rollouts(on)
        assert len({one.scenario_id for one in found.values()}) == 1
        assert str(found[short].scenario_id).startswith("fp-")
        assert {one.mode for one in found.values()} == {"observe"}
        assert found[shaped].drop_reason == found[headless].drop_reason == "ungrouped"
        assert found[stranger].group_id not in (None, found[short].group_id)
        assert (found[short].reward, found[long].reward) == (2.0, 4.0)

        tokens = len("reply 0") + 1  # a letter is a token, and so is the end
        balance = balanced(on)
        assert (balance.sampled, balance.pending) == (6 * tokens, 4 * tokens)
        assert balance.untrainable == {"sampling": tokens}
        assert balance.dropped == {"ungrouped": tokens}

        epoch = on.store.acquire_lease("learner:policy", "learner", 60.0)
        assert epoch is not None
        batch = on.store.take_batch("run", epoch=epoch, groups=1, batch_wait_s=0.0, staleness_max=4)
        assert batch is not None
        (group,) = read(on.store, batch, settings(tmp_path, tmp_path))
        by_id = {member.rollout.id: member for member in group}
        assert {id: member.advantage for id, member in by_id.items()} == {short: -1.0, long: 1.0}
        (sample,) = by_id[long].samples
        assert [(span.policy_version, span.temperature) for span in sample.spans] == [(0, 0.7), (0, 0.7)]
        assert sum(sample.loss_mask) == 2 * tokens
        assert balanced(on).pending == 4 * tokens


async def test_off_by_default(tmp_path: Path) -> None:
    async with hone(tmp_path, PassiveSettings()) as (on, _):
        ids = [await talk(on, session) for session in ("s1", "s2")]
        await states(on, dict.fromkeys(ids, "scored"))
        assert not any(one.passive or one.group_id for one in rollouts(on).values())
        assert balanced(on).not_for_training == {"observe": balanced(on).sampled}
        assert on.store.counts().groups == {}


async def test_what_goes_on_after_its_end_is_a_rollout_of_its_own(tmp_path: Path) -> None:
    """Of the same session and scenario; both are compared, and no token is in two of them."""
    async with hone(tmp_path) as (on, _):
        first = await talk(on, "s1")
        await states(on, {first: "scored"})
        second = await talk(on, "s1", calls=2)
        assert second != first
        await states(on, {first: "grouped", second: "grouped"})
        assert rollouts(on)[first].group_id == rollouts(on)[second].group_id
        status, _, got = await on.post(
            f"/rollouts/{second}{CHAT}",
            {"model": "policy", "messages": [ASKED]},
            {"Authorization": "Bearer sk-acme"},
        )
        assert status == 200  # as with everything that is observed: a new one goes on
        assert got["x-hone-rollout-id"] not in (first, second)
        await on.raw_calls_when(4)
        balanced(on)


async def test_launched_and_observed_side_by_side(tmp_path: Path) -> None:
    """Each group is of one kind, whatever scenario the launched rollouts name."""
    async with hone(tmp_path) as (on, _):
        key = {"Authorization": "Bearer sk-acme"}
        seen = await talk(on, "s1")
        await states(on, {seen: "scored"})
        scenario = rollouts(on)[seen].scenario_id
        launched = []
        for _ in range(2):
            body = {"mode": "train", "scenario_id": scenario, "group_id": "g_own", "group_size": 2}
            status, opened, _ = await on.post("/rollouts", body, key)
            assert status == 201
            launched.append(opened["id"])
            path = f"/rollouts/{opened['id']}"
            await on.post(path + CHAT, {"model": "policy", "messages": [SYSTEM, ASKED]}, key)
            await on.post(f"{path}/finish", {"status": "completed"}, key)
        await states(on, {seen: "scored", **dict.fromkeys(launched, "grouped")})
        assert on.store.outstanding_groups("run") == 1
        body = {"mode": "train", "group_id": rollouts(on)[seen].group_id}
        assert (await on.post("/rollouts", body, key))[0] == 404
        on.store.end_run("run", "run_ended")
        balance = balanced(on)
        assert balance.dropped == {"run_ended": balance.sampled}


@pytest.mark.engine
async def test_through_the_real_engine_into_a_step(engine: Any, tmp_path: Path) -> None:
    """What was sampled at the client's temperature is what the learner recomputes, and it is trained on."""
    async with serving(tmp_path, engine.url, idle_s=3.0) as on:
        short = await talk(on, "s1", temperature=0.7, max_tokens=24)
        long = await talk(on, "s2", calls=2, temperature=0.7, max_tokens=24)
        await states(on, {short: "grouped", long: "grouped"})
    config = settings(engine.base_dir, tmp_path, groups_per_batch=1, steps_max=1, mismatch_fraction=1.0)
    await asyncio.to_thread(run, config, tmp_path / "hone.db", "run", "policy", lambda: False)
    with closing(SqliteStore(tmp_path / "hone.db")) as store:
        (row,) = store.steps("run")
        balance = store.balance("policy")
        assert {one.state for one in store.rollouts()} == {"trained"}
        assert store.verify() == []
    assert balance.exact
    assert balance.trained == balance.sampled == row.metrics["mismatch_tokens"] > 0
    assert row.metrics["mismatch_max"] < 1e-4

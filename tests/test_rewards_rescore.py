"""Rescoring: who may get another score, whole groups, and the token balance through all of it."""

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from capture_makers import POLICY
from explain_world import World, passive_world
from proxy_world import until

from capture.errors import ConfigError, Conflict, RewardFrozen
from capture.sqlite import SqliteStore
from capture.store import Rescored, Store
from rewards.rescore import Plan, Rescorer, Rescoring, Unit
from rewards.script import digest
from rewards.settings import Settings
from rewards.trial import Trial

ONE = "def reward(trace): return 1.0"
BY_NAME = """
from rewards.parsers import reply

def reward(trace):
    name = trace["rollout_id"]
    if name.startswith("bad"):
        raise ValueError(name)
    return {"length": float(len(name)), "said": float(bool(reply(trace)))}

WEIGHTS = {"said": 0.0}
"""


@contextmanager
def played(tmp_path: Path) -> Iterator[World]:
    store = SqliteStore(tmp_path / "hone.db")
    world = World(store)
    yield world
    assert store.verify() == []
    assert store.balance(POLICY).exact
    store.close()


async def rescored(store: Store, folder: Path, script: str = BY_NAME, *, again: bool = False) -> Rescoring:
    """`hone reward rescore` over everything."""
    path = folder / "reward.py"
    path.write_text(script)
    settings = Settings(script=str(path), timeout_s=60.0)
    script_hash = digest(path)
    plan = Plan(store, script_hash, again=again)
    units = plan.units(store.rollouts())
    async with Trial(store, settings, script_hash) as trial:
        return await Rescorer(trial, store, plan, group_size=2).run(units, lambda count: None)


def rewards(store: Store, *ids: str) -> list[float | None]:
    return [store.rollout(id).reward for id in ids]


async def test_what_was_taken_or_trained_keeps_its_reward(tmp_path: Path) -> None:
    with played(tmp_path) as world:
        for id in ("trained1", "trained2"):
            world.played(id, 0.25 if id[-1] == "1" else 0.5, group="g_1")
        world.group()
        world.train()
        for id in ("taken1", "taken2"):
            world.played(id, 0.25 if id[-1] == "1" else 0.5, group="g_2")
        world.group()
        world.take()
        for id in ("grouped1", "grouped22"):
            world.played(id, 0.25, group="g_3")
        world.group()
        world.played("scored1", 0.25, group="g_4")
        world.open("open1", "g_4")
        world.open("failed1", "g_5")
        world.finish("failed1", "failed")
        world.open("waits1", "g_6")
        world.finish("waits1")
        done = await rescored(world.store, tmp_path)
        assert done.left_alone == {"taken": 4, "unfinished": 2, "failed": 1}
        assert (done.rollouts, done.groups, done.changed, done.revived) == (3, 2, 3, 0)
        assert done.mean_before == 0.25
        assert done.mean_after == pytest.approx((8 + 9 + 7) / 3)
        kept = rewards(world.store, "trained1", "trained2", "taken1", "taken2")
        assert kept == [0.25, 0.5, 0.25, 0.5]
        assert rewards(world.store, "grouped1", "grouped22", "scored1") == [8.0, 9.0, 7.0]
        one = world.store.rollout("grouped1")
        assert (one.state, one.scores) == ("grouped", {"length": 8.0, "said": 1.0})
        assert one.script_hash == digest(tmp_path / "reward.py")
        again = await rescored(world.store, tmp_path)
        assert (again.rollouts, again.left_alone["current"]) == (0, 3)
        assert (await rescored(world.store, tmp_path, again=True)).changed == 0


async def test_the_new_rewards_are_what_is_trained(tmp_path: Path) -> None:
    with played(tmp_path) as world:
        world.played("a", 0.5)
        world.played("abc", 0.5)
        world.group()
        await rescored(world.store, tmp_path)
        world.train()
        row = world.store.history("a").ledger["a"]
        assert (row.trained_tokens, row.advantage) == (5, -1.0)


async def test_a_group_is_scored_whole_or_not_at_all(tmp_path: Path) -> None:
    with played(tmp_path) as world:
        world.played("bad1", 0.5, group="g_1")
        world.played("good1", 0.25, group="g_1")
        world.group()
        world.played("good2", 0.75, group=None, mode="eval")
        world.played("bad2", 0.75, group=None, mode="eval")
        done = await rescored(world.store, tmp_path)
        assert (done.rollouts, done.left_alone) == (1, {"broken": 3})
        assert sorted(failure.rollout_ids[0] for failure in done.failures) == ["bad1", "bad2"]
        assert sorted(failure.error.split()[-1] for failure in done.failures) == ["bad1", "bad2"]
        assert rewards(world.store, "bad1", "good1", "good2", "bad2") == [0.5, 0.25, 5.0, 0.75]


def test_one_member_that_fits_brings_in_its_group(tmp_path: Path) -> None:
    with played(tmp_path) as world:
        world.played("a", 0.5)
        world.played("b", 0.25)
        world.group()
        plan = Plan(world.store, "new", again=False)
        assert plan.units([world.store.rollout("a")]) == [Unit(["a", "b"], "g_1")]


async def test_what_a_broken_script_cost_comes_back_while_its_group_is_open(tmp_path: Path) -> None:
    with played(tmp_path) as world:
        world.played("back", group="g_1")
        world.store.save_reward_error("back", "KeyError", "old")
        world.open("runs", "g_1")
        world.played("late", group="g_2")
        world.store.save_reward_error("late", "KeyError", "old")
        world.played("late2", 0.5, group="g_2", size=3)
        world.played("late3", 0.25, group="g_2")
        world.group()
        world.played("eval", group=None, mode="eval")
        world.store.save_reward_error("eval", "KeyError", "old")
        before = world.store.balance(POLICY)
        assert before.dropped == {"reward_error": 10}
        done = await rescored(world.store, tmp_path)
        assert (done.rollouts, done.revived) == (5, 1)
        assert world.store.balance(POLICY).dropped == {"reward_error": 5}
        back, late, evaluated = (world.store.rollout(id) for id in ("back", "late", "eval"))
        assert (back.state, back.drop_reason, back.reward, back.reward_error) == ("scored", None, 4.0, None)
        assert (late.state, late.drop_reason, late.reward) == ("dropped", "reward_error", 4.0)
        assert (evaluated.state, evaluated.reward) == ("scored", 4.0)
        assert world.why("late")[0] == (
            "Not trained: the reward script failed at first, and it was scored again only when its group had "
            "closed without it (its reward is 4)."
        )
        world.call("runs", [1, 2], [3])
        world.finish("runs")
        world.ingest()
        world.score("runs", 0.5)
        world.group()
        world.train()
        world.train()
        assert world.store.rollout("back").state == "trained"


async def test_observed_ones_join_a_group_when_they_come_back(tmp_path: Path) -> None:
    with passive_world(tmp_path) as world:
        for id in ("one", "two"):
            world.watched(id)
            world.store.save_reward_error(id, "KeyError", "old")
        done = await rescored(world.store, tmp_path)
        assert (done.rollouts, done.revived) == (2, 2)
        one, two = world.store.rollout("one"), world.store.rollout("two")
        assert one.group_id is not None
        assert (one.state, one.group_id) == ("scored", two.group_id)
        assert world.store.balance(POLICY).exact


async def test_after_the_end_of_its_run_the_score_changes_and_nothing_else(tmp_path: Path) -> None:
    with played(tmp_path) as world:
        world.played("ended", 0.5)
        world.played("broke", group="g_2")
        world.store.save_reward_error("broke", "KeyError", "old")
        world.store.end_run("run1", "done")
        before = world.store.balance(POLICY)
        await rescored(world.store, tmp_path)
        assert world.store.balance(POLICY) == before
        ended, broke = world.store.rollout("ended"), world.store.rollout("broke")
        assert (ended.state, ended.drop_reason, ended.reward) == ("dropped", "done", 5.0)
        assert (broke.state, broke.drop_reason, broke.reward) == ("dropped", "reward_error", 5.0)


async def test_posted_scores_are_in_it(tmp_path: Path) -> None:
    with played(tmp_path) as world:
        world.played("a", 0.5, group=None, mode="eval")
        world.store.post_score("a", "thumbs", 10.0, "key")
        await rescored(world.store, tmp_path, ONE)
        one = world.store.rollout("a")
        assert (one.reward, one.scores) == (11.0, {"thumbs": 10.0, "reward": 1.0})


def test_the_store_refuses_what_would_break_a_promise(tmp_path: Path) -> None:
    def new(id: str, **fields: object) -> Rescored:
        given = {"reward": 1.0, "scores": {"reward": 1.0}, "script_hash": "new", "posted": {}, **fields}
        return Rescored(rollout_id=id, **given)

    with played(tmp_path) as world:
        store = world.store
        world.played("a", 0.5)
        world.played("b", 0.25)
        with pytest.raises(Conflict, match="b would keep the score of another script"):
            store.rescore([new("a")])
        world.group()
        with pytest.raises(Conflict, match="b would keep the score of another script"):
            store.rescore([new("a")])
        store.post_score("a", "thumbs", 1.0, "key")
        with pytest.raises(Conflict, match="posted meanwhile"):
            store.rescore([new("a"), new("b")])
        with pytest.raises(ValueError, match="not a finite number"):
            store.rescore([new("a", reward=float("nan"))])
        world.score("a", 0.5)  # control has seen what was posted
        world.open("c", "g_2")
        with pytest.raises(Conflict, match="c is open"):
            store.rescore([new("c")])
        batch = world.take()
        with pytest.raises(RewardFrozen) as frozen:
            store.rescore([new("a", posted={"thumbs": 1.0}), new("b")])
        assert frozen.value.batch_id == batch
        assert rewards(store, "a", "b") == [0.5, 0.25]


SLOW = """
import time
from pathlib import Path

def reward(trace):
    here = Path(__file__).parent
    (here / ("began_" + trace["rollout_id"])).touch()
    while not (here / "go").exists():
        time.sleep(0.01)
    return 9.0
"""


@pytest.mark.parametrize("what", ["taken", "posted", "joined"])
async def test_what_happens_meanwhile_is_noticed(tmp_path: Path, what: str) -> None:
    with played(tmp_path) as world:
        world.played("a", 0.5, size=3 if what == "joined" else 2)
        if what == "joined":
            world.open("c", "g_1")
        world.played("b", 0.25)
        world.group()
        job = asyncio.create_task(rescored(world.store, tmp_path, SLOW))
        await until((tmp_path / "began_b").exists, 60.0)
        if what == "taken":
            world.take()
        elif what == "posted":
            world.store.post_score("a", "thumbs", 1.0, "key")
        else:
            world.call("c", [1, 2], [3])
            world.finish("c")
            world.ingest()
            world.score("c", 0.125)
        (tmp_path / "go").touch()
        done = await job
        if what == "taken":
            assert (done.rollouts, done.left_alone) == (0, {"taken": 2})
            assert rewards(world.store, "a", "b") == [0.5, 0.25]
        elif what == "posted":
            assert (done.rollouts, done.left_alone) == (2, {})
            assert rewards(world.store, "a", "b") == [10.0, 9.0]
        else:
            assert (done.rollouts, done.left_alone) == (3, {"unfinished": 1})  # as it was at first
            assert rewards(world.store, "a", "b", "c") == [9.0, 9.0, 9.0]


async def test_a_script_that_is_edited_meanwhile_ends_it(tmp_path: Path) -> None:
    with played(tmp_path) as world:
        world.played("a", 0.5, group=None, mode="eval")
        path = tmp_path / "reward.py"
        path.write_text(ONE)
        settings = Settings(script=str(path), timeout_s=60.0)
        async with Trial(world.store, settings, "the hash of what it was") as trial:
            with pytest.raises(ConfigError, match="was edited meanwhile"):
                await trial.score(world.store.rollout("a"))

"""Why did this observed rollout not train? With `passive.train` and without."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from capture_makers import POLICY, request, rollout
from explain_world import RUN, World, passive_world

from hone.explain.screen import explained

OPEN_IT = "open a rollout with `POST /rollouts` in mode `train` and give its agent that base_url."
ONLY = "Not for training: nobody opened it for training, so it was only observed; "
CONTROL = "; no control runs now: `hone up` starts it"


@pytest.fixture
def world(tmp_path: Path) -> Iterator[World]:
    with passive_world(tmp_path) as opened:
        yield opened


def test_it_would_have_been_trained_with_the_setting(tmp_path: Path) -> None:
    with passive_world(tmp_path, passive={}) as world:
        world.watched("r_a", 1.0)
        assert world.why("r_a") == (
            f"{ONLY}`passive.train = true` trains on rollouts like it while a run is on; or {OPEN_IT}",
            "passive.train",
        )
        assert world.explain("r_a").setting_value is False


def test_the_setting_alone_would_not_have_done(tmp_path: Path) -> None:
    """Headless, sampled in another way, answered by another model, silent, or somebody's own group."""
    with passive_world(tmp_path, passive={}) as world:
        world.watched("r_headless", headless=True)
        for id, fields in {
            "r_shaped": {"request": request(top_p=0.5)},
            "r_elsewhere": {"policy": None, "policy_version": None},
        }.items():
            world.observe(id)
            world.call(id, [1, 2], [3, 4], **fields)
        world.observe("r_silent")
        world.store.open_rollout(rollout(id="r_own", mode="observe", group_id="g_own"), group_size=2)
        world.call("r_own", [1, 2], [3, 4])
        world.ingest()
        for id in ("r_shaped", "r_elsewhere", "r_silent", "r_own"):
            assert world.why(id) == (f"{ONLY}to train on it, {OPEN_IT}", None)
        assert world.why("r_headless")[0].startswith("Not for training: nobody said whose call it was")


def test_nobody_trained_when_it_ended(world: World) -> None:
    world.store.end_run(RUN, "run_ended")
    world.watched("r_a", 1.0)
    assert world.why("r_a") == (
        f"{ONLY}passive.train was off when it ended, or no run was on: `hone train` starts one.",
        "passive.train",
    )


def test_from_open_to_trained(world: World) -> None:
    world.observe("r_a")
    world.call("r_a", [1, 2], [3, 4])
    world.ingest()
    assert world.explain("r_a").kind == "open"
    world.finish("r_a")
    assert world.explain("r_a").kind == "sealed"
    assert world.explain("r_a").tokens.not_for_training == 2  # until it is settled
    world.ingest()
    told = world.explain("r_a")
    assert (told.kind, told.passive, told.tokens.pending) == ("ingested", True, 2)
    world.score("r_a", 1.0)
    group_id = world.store.rollout("r_a").group_id
    assert world.why("r_a") == (
        f"Not yet: its group {group_id} waits for 1 more rollout of 2 (1 still to come), at most until its "
        f"deadline (rewards.group_deadline_s = 3600){CONTROL}.",
        "rewards.group_deadline_s",
    )
    world.watched("r_b", 0.0)
    world.group()
    assert world.explain("r_a").advantage == 0.5
    batch, _ = world.train()
    told = world.explain("r_a")
    assert told.sentence == (
        f"Trained: all 2 sampled tokens in batch {batch} (step 1, which made v1), advantage +0.5."
    )
    assert told.staleness == 0
    assert [moment.what for moment in told.timeline][:6] == [
        "opened in mode observe, pinned to v0",
        "first call began",
        "last call ended",
        "sealed as completed",
        f"for training from then on, in run {RUN} (passive.train)",
        "scored: reward 1",
    ]
    shown = "\n".join(line.plain for line in explained(told))
    assert f"r_a: observe, for training, trained, completed, v0, run {RUN}, scenario fp-" in shown


def test_what_cannot_be_compared(world: World) -> None:
    world.watched("r_headless", 1.0, headless=True)
    assert world.why("r_headless") == (
        "Not trained: nobody said whose call it was (headless), and such a rollout is compared with no "
        "other; an `X-Session-ID` header, or a base_url of its own, says it.",
        None,
    )
    world.observe("r_shaped", headless=True)
    world.call("r_shaped", [1, 2], [3, 4], request=request(top_p=0.5))
    world.finish("r_shaped")
    world.ingest()
    world.score("r_shaped", 1.0)
    assert world.why("r_shaped") == (
        "Not trained: none of its sampled tokens may be trained: 2 tokens of call 1 (sampling) were not: a "
        "parameter other than temperature shaped the sampling (top_p, penalties, bias, seed).",
        None,
    )


def test_nobody_came_to_its_scenario(tmp_path: Path) -> None:
    with passive_world(tmp_path, rewards={"group_deadline_s": 0.01}) as world:
        world.watched("r_a", 1.0)
        while world.store.rollout("r_a").state == "scored":
            world.group()
        sentence, setting = world.why("r_a")
        scenario = world.store.rollout("r_a").scenario_id
        assert sentence == (
            f"Not trained: nobody attempted its scenario {scenario} again under the same key and with a "
            "reward in time (rewards.group_deadline_s = 0.01), and it takes 2 to compare."
        )
        assert setting == "rewards.group_deadline_s"


def test_served_a_version_that_was_too_old(world: World) -> None:
    for number in range(2):
        world.played(f"r_{number}", float(number))
    world.group()
    world.train()
    for number in range(2):
        world.watched(f"r_seen_{number}", 1.0)
    world.group()
    assert world.take(staleness_max=0) is None
    sentence, setting = world.why("r_seen_0")
    assert sentence.endswith(
        "were 1 version behind v1, more than train.staleness_max = 4; what is observed is served the "
        "promoted version, which may be far behind."
    )
    assert setting == "train.staleness_max"


def test_one_by_one_they_say_what_the_balance_says(world: World) -> None:
    world.watched("r_a", 1.0)
    world.watched("r_headless", 1.0, headless=True)
    world.played("r_c", 1.0)
    world.watched("r_open")
    world.observe("r_now")
    world.call("r_now", [1, 2], [3])
    world.ingest()
    told = [explain_tokens(world, one.id) for one in world.store.rollouts()]
    balance = world.store.balance(POLICY)
    assert tuple(map(sum, zip(*told, strict=True))) == (21, 15, 5, 1)
    assert (balance.sampled, balance.pending) == (21, 15)
    assert (balance.dropped, balance.not_for_training) == ({"ungrouped": 5}, {"observe": 1})


def explain_tokens(world: World, id: str) -> tuple[int, int, int, int]:
    tokens = world.explain(id).tokens
    return tokens.sampled, tokens.pending, tokens.dropped, tokens.not_for_training

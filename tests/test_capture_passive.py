"""Observed rollouts that are trained: which are, with whom they are compared, and where their tokens went."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from capture_makers import POLICY, request, rollout
from explain_world import RUN, World, passive_world

from capture.errors import NotFound
from capture.fingerprint import fingerprint
from capture.sqlite import SqliteStore
from capture.types import Balance

GO = fingerprint([{"role": "user", "content": "go"}], [])


@pytest.fixture
def world(tmp_path: Path) -> Iterator[World]:
    with passive_world(tmp_path) as opened:
        yield opened


def balance(world: World, sampled: int, **terms: Any) -> None:
    """The sums are these, and all others zero."""
    found = world.store.balance(POLICY)
    empty: dict[str, Any] = {
        "trained": 0,
        "zero_advantage": 0,
        "dropped": {},
        "untrainable": {},
        "not_for_training": {},
        "pending": 0,
    }
    assert found == Balance(sampled, **{**empty, **terms})
    assert found.exact


def states(world: World) -> dict[str, str]:
    return {one.id: one.drop_reason or one.state for one in world.store.rollouts()}


# -- from the first call to the ledger -------------------------------------------------------------


def test_the_balance_at_every_stage(world: World) -> None:
    world.observe("r_a")
    world.call("r_a", [1, 2], [3, 4])
    world.ingest()
    balance(world, 2, not_for_training={"observe": 2})  # whether it is trained is not decided yet
    world.finish("r_a")
    balance(world, 2, not_for_training={"observe": 2})
    world.ingest()
    balance(world, 2, pending=2)
    found = world.store.rollout("r_a")
    assert (found.mode, found.passive, found.run_id, found.scenario_id) == ("observe", True, RUN, GO)
    assert found.group_id is None
    world.score("r_a", 1.0)
    balance(world, 2, pending=2)
    world.watched("r_b", 0.0)
    assert world.store.rollout("r_a").group_id == world.store.rollout("r_b").group_id is not None
    world.group()
    assert states(world) == {"r_a": "grouped", "r_b": "grouped"}
    balance(world, 7, pending=7)
    world.take()
    balance(world, 7, pending=7)
    world.train()
    balance(world, 7, trained=7)
    assert states(world) == {"r_a": "trained", "r_b": "trained"}
    assert world.store.fate_counts(POLICY).rollouts == {"trained": 2}


def test_off_by_default(tmp_path: Path) -> None:
    with passive_world(tmp_path, passive={}) as world:
        world.watched("r_a", 1.0)
        world.watched("r_b", 0.0)
        found = world.store.rollout("r_a")
        assert (found.passive, found.run_id, found.state, found.scenario_id) == (False, None, "scored", GO)
        balance(world, 10, not_for_training={"observe": 10})
        assert world.store.groups_of_run(RUN) == {}


def test_the_past_stays_as_it_was_decided(tmp_path: Path) -> None:
    """Turned on, off and on again: each rollout keeps what was decided when it was settled."""
    with passive_world(tmp_path, passive={}) as world:
        world.watched("r_before")
    with passive_world(tmp_path) as world:
        world.watched("r_on")
        balance(world, 10, pending=5, not_for_training={"observe": 5})
    with passive_world(tmp_path, passive={}) as world:
        world.watched("r_after")
        for id in ("r_before", "r_on", "r_after"):
            world.score(id, 1.0)
        balance(world, 15, pending=5, not_for_training={"observe": 10})
        assert states(world) == dict.fromkeys(("r_before", "r_on", "r_after"), "scored")
        assert world.store.rollout("r_on").group_id is not None


# -- which ---------------------------------------------------------------------------------------


def test_only_pure_sampling_is_trained(world: World) -> None:
    """As the calls were sent: nothing was changed in them."""
    world.observe("r_a")
    world.call("r_a", [1, 2], [3, 4])
    world.call("r_a", [1, 9], [5, 6, 7], request=request(top_p=0.5))
    world.observe("r_shaped")
    world.call("r_shaped", [1, 2], [3, 4, 5, 6], request=request(seed=7))
    world.call("r_shaped", [1, 2], [3], request=request(temperature=0))
    for id in ("r_a", "r_shaped"):
        world.finish(id)
    world.ingest()
    balance(world, 10, pending=2, untrainable={"sampling": 7, "temperature_zero": 1})
    world.score("r_a", 1.0)
    world.score("r_shaped", 0.0)
    assert states(world) == {"r_a": "scored", "r_shaped": "ungrouped"}  # it would have nothing to train
    balance(world, 10, pending=2, untrainable={"sampling": 7, "temperature_zero": 1})
    assert world.store.counts().groups == {"open": 1}


def test_what_the_policy_did_not_answer_stays_observed(world: World) -> None:
    world.observe("r_elsewhere")
    world.call("r_elsewhere", [1, 2], [3], policy=None, policy_version=None, route="gpt-5")
    world.observe("r_failed")
    world.call("r_failed", [], [], status=500, error="gone", response=b"")
    world.observe("r_silent")
    world.observe("r_late")
    for id in ("r_elsewhere", "r_failed", "r_silent", "r_late"):
        world.finish(id)
    world.call("r_late", [1, 2], [3, 4])
    world.ingest()
    assert [one.passive for one in world.store.rollouts()] == [False] * 4
    balance(world, 2, not_for_training={"observe": 2})


def test_what_was_opened_for_something_else_stays_what_it_is(world: World) -> None:
    """Evaluations, train rollouts without a group, and observed ones in a group or run of their opener's."""
    world.played("r_eval", 1.0, group=None, mode="eval")
    world.played("r_single", 1.0, group=None)
    world.store.open_rollout(rollout(id="r_own", mode="observe", group_id="g_own"), group_size=2)
    world.store.open_rollout(rollout(id="r_run", mode="observe", run_id=RUN))
    for id in ("r_own", "r_run"):
        world.call(id, [1, 2], [3, 4])
        world.finish(id)
    world.ingest()
    assert [one.passive for one in world.store.rollouts()] == [False] * 4
    assert world.store.rollout("r_single").scenario_id is None
    balance(world, 14, dropped={"ungrouped": 5}, not_for_training={"eval": 5, "observe": 4})


def test_headless_rollouts_have_a_scenario_and_no_group(world: World) -> None:
    for id in ("r_a", "r_b"):
        world.watched(id, 1.0, headless=True)
    assert states(world) == {"r_a": "ungrouped", "r_b": "ungrouped"}
    assert world.store.rollout("r_a").scenario_id == GO
    balance(world, 10, dropped={"ungrouped": 10})
    assert world.store.counts().groups == {}


def test_a_broken_script_and_a_late_call(world: World) -> None:
    world.watched("r_a")
    world.store.save_reward_error("r_a", "boom", "script")
    world.watched("r_b", 1.0)
    world.call("r_b", [1], [2, 3])
    world.ingest()
    assert states(world) == {"r_a": "reward_error", "r_b": "scored"}
    balance(world, 12, pending=5, dropped={"reward_error": 5}, untrainable={"late": 2})


# -- with whom -----------------------------------------------------------------------------------


def test_a_group_is_of_one_scenario_and_one_key(world: World) -> None:
    """What is said under two keys is never compared, whatever it is; nor are two scenarios."""
    for number in range(2):
        world.watched(f"r_k_{number}", float(number))
        world.watched(f"r_other_{number}", float(number), key_id="other")
        world.watched(f"r_stop_{number}", float(number), says="stop")
        world.watched(f"r_named_{number}", float(number), scenario_id="s1")
    members: dict[str | None, list[str]] = {}
    for one in world.store.rollouts():
        members.setdefault(one.group_id, []).append(one.id)
    assert sorted(members.values()) == [
        ["r_k_0", "r_k_1"],
        ["r_named_0", "r_named_1"],
        ["r_other_0", "r_other_1"],
        ["r_stop_0", "r_stop_1"],
    ]
    assert world.store.rollout("r_named_0").scenario_id == "s1"
    world.group()
    assert world.store.counts().groups == {"closed": 4}


def test_a_full_group_takes_no_more(world: World) -> None:
    """Five that are scored before anybody looks at the groups."""
    for number in range(5):
        world.watched(f"r_{number}", 1.0)
    found = [one.group_id for one in world.store.rollouts()]
    assert found[0] == found[1] != found[2] == found[3] != found[4]
    assert [one.id for one in world.store.gathered_groups(60.0)] == [found[0], found[2]]
    world.group()
    assert world.store.counts().groups == {"closed": 2, "open": 1}
    assert world.store.open_groups() == []  # what the runner would repair, and what is looked at every second


def test_at_its_deadline_a_group_closes_on_what_it_has(tmp_path: Path) -> None:
    with passive_world(tmp_path, train={"group_size": 3}, rewards={"group_deadline_s": 0.05}) as world:
        world.watched("r_a", 1.0)
        world.watched("r_b", 0.0)
        world.watched("r_alone", 1.0, says="stop")
        while world.store.counts().groups != {"closed": 1, "dropped": 1}:
            world.group()
        assert states(world) == {"r_a": "grouped", "r_alone": "group_too_small", "r_b": "grouped"}
        balance(world, 15, pending=10, dropped={"group_too_small": 5})


def test_nobody_joins_a_gathered_group_by_its_name(world: World) -> None:
    world.watched("r_a", 1.0)
    group_id = world.store.rollout("r_a").group_id
    for key_id in ("k", "other"):
        with pytest.raises(NotFound):
            world.store.open_rollout(rollout(key_id=key_id, run_id=RUN, group_id=group_id))


def test_a_posted_score_counts_until_the_group_is_taken(world: World) -> None:
    world.watched("r_a", 1.0)
    world.watched("r_b", 0.0)
    world.store.post_score("r_a", "thumbs", 1.0, "user")
    world.group()
    assert world.take() is None  # the learner waits for the new reward
    world.score("r_a", 2.0)
    assert world.take() is not None
    assert [one.reward for one in world.store.rollouts()] == [2.0, 0.0]


# -- runs ----------------------------------------------------------------------------------------


def test_gathered_groups_hold_up_neither_admission_nor_the_run(world: World) -> None:
    world.watched("r_a", 1.0)
    world.watched("r_b", 1.0, says="stop")
    world.watched("r_c", 0.0, says="stop")
    world.group()
    assert world.store.groups_of_run(RUN) == {"open": 1, "closed": 1}
    assert (world.store.outstanding_groups(RUN), world.store.group_count(RUN)) == (0, 0)
    world.open("r_launched", "g_1")
    assert (world.store.outstanding_groups(RUN), world.store.group_count(RUN)) == (1, 1)


def test_the_end_of_a_run_drops_them(world: World) -> None:
    world.watched("r_settled")
    world.watched("r_a", 1.0, says="stop")
    world.watched("r_b", 1.0, says="stop")
    world.watched("r_open_group", 1.0)
    world.group()
    assert world.store.end_run(RUN, "run_ended") == 4
    balance(world, 20, dropped={"run_ended": 20})
    world.watched("r_later", 1.0)  # no run is on
    balance(world, 25, dropped={"run_ended": 20}, not_for_training={"observe": 5})
    world.store.start_run("run2", POLICY, {})
    world.watched("r_next")
    assert world.store.rollout("r_next").run_id == "run2"
    balance(world, 30, dropped={"run_ended": 20}, not_for_training={"observe": 5}, pending=5)


def test_a_run_of_another_policy_takes_none(tmp_path: Path) -> None:
    with passive_world(tmp_path) as world:
        world.store.start_run("theirs", "other", {})
        world.watched("r_a", policy=POLICY)
        world.store.end_run(RUN, "run_ended")
        world.watched("r_b", policy=POLICY)
        assert [one.run_id for one in world.store.rollouts()] == [RUN, None]
        balance(world, 10, dropped={"run_ended": 5}, not_for_training={"observe": 5})


def test_tokens_of_a_version_that_is_too_old_are_stale(world: World) -> None:
    """Whoever is observed gets the promoted version, call by call: after a rollback that is an older one."""
    world.played("r_1", 1.0)
    world.played("r_2", 0.0)
    world.group()
    world.train()
    world.activate(1)
    for number in range(2):
        world.observe(f"r_new_{number}")
        world.call(f"r_new_{number}", [1, 2], [3, 4], policy_version=1)
        world.observe(f"r_back_{number}", scenario_id="s")
        world.call(f"r_back_{number}", [1, 2], [3, 4], policy_version=1)
        world.call(f"r_back_{number}", [1, 2, 3, 4], [5], policy_version=0)
        for id in (f"r_new_{number}", f"r_back_{number}"):
            world.finish(id)
    world.ingest()
    for id in ("r_new_0", "r_new_1", "r_back_0", "r_back_1"):
        world.score(id, 1.0)
    world.group()
    batch = world.store.take_batch(RUN, epoch=world.lead(), groups=2, batch_wait_s=0.0, staleness_max=0)
    assert batch is not None
    assert [[one.id for one in group] for group in batch.groups] == [["r_new_0", "r_new_1"]]
    balance(world, 20, trained=10, pending=4, dropped={"stale": 6})


def test_a_store_from_before_keeps_its_sums(tmp_path: Path) -> None:
    """What was opened for training still is, what was observed still is not, and both may go on."""
    with passive_world(tmp_path, passive={}) as world:
        world.played("r_a", 1.0)
        world.watched("r_b", 1.0)
        before = world.store.balance(POLICY)
        for index in ("groups_gathering", "groups_passive"):
            world.store._db.execute(f"DROP INDEX {index}")
        for column in ("rollouts.for_training", "calls.for_training", "rollouts.passive", "calls.passive"):
            table, name = column.split(".")
            world.store._db.execute(f"ALTER TABLE {table} DROP COLUMN {name}")
        for name in ("passive_key", "filled"):
            world.store._db.execute(f"ALTER TABLE groups DROP COLUMN {name}")
        world.store._db.execute("DELETE FROM migrations WHERE number = 4")
        world.store = SqliteStore(tmp_path / "hone.db")
        assert world.store.balance(POLICY) == before
        world.played("r_c", 0.0)
        world.group()
        assert states(world) == {"r_a": "grouped", "r_b": "scored", "r_c": "grouped"}

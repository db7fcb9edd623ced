"""What is filtered out of training: dropped under a reason, and counted to the token."""

import random
from pathlib import Path
from typing import Any

import pytest
from learner_world import Attempt, World, make_base, random_group, settings

from capture.errors import Conflict
from capture.types import Commit, GroupFilter, LedgerRow
from hone.explain.explanation import explain
from hone.explain.look import look
from learner.train import run


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_base(tmp_path_factory.mktemp("base"))


def never() -> bool:
    return False


def rewarded(*rewards: float) -> list[Attempt]:
    """Members that sampled three tokens each."""
    return [Attempt([5, 6], [[7, 8], [9 + index]], reward) for index, reward in enumerate(rewards)]


def learn(base: Path, scratch: Path, world: World, **changes: Any) -> None:
    config = settings(base, scratch, **{"steps_max": 1, **changes})
    run(config, world.path, world.run_id, world.policy, never)
    assert world.store.verify() == []
    assert world.store.balance(world.policy).exact


def reasons(world: World, ids: list[str]) -> list[str | None]:
    return [world.store.rollout(id).drop_reason for id in ids]


def test_a_group_is_judged_by_its_rewards() -> None:
    wanted = GroupFilter(zero_variance=True, mean_min=0.2, mean_max=0.8)
    assert wanted.reason([0.0, 1.0]) is None
    assert wanted.reason([0.1] * 3) == "too_hard"
    assert wanted.reason([0.5, 0.5]) == "zero_variance"
    assert wanted.reason([0.9, 1.0]) == "too_easy"
    assert GroupFilter().reason([1.0, 1.0]) is None
    assert GroupFilter(mean_min=0.5, mean_max=0.5).reason([0.0, 1.0]) is None


def test_a_batch_is_full_of_groups_that_differ(base: Path, tmp_path: Path) -> None:
    world = World(tmp_path / "db")
    groups = [rewarded(1, 1, 1), rewarded(0, 1), rewarded(0.5, 0.5), rewarded(1, 2, 0)]
    ids = [world.add_group(group) for group in groups]
    learn(base, tmp_path, world, zero_variance_filter=True)
    assert [set(reasons(world, one)) for one in ids] == [{"zero_variance"}, {None}, {"zero_variance"}, {None}]
    balance = world.store.balance(world.policy)
    assert balance.dropped == {"zero_variance": 15}
    assert (balance.trained, balance.zero_advantage) == (12, 3)
    assert world.store.steps(world.run_id)[0].metrics["groups"] == 2.0


def test_groups_out_of_the_wanted_range_are_dropped(base: Path, tmp_path: Path) -> None:
    world = World(tmp_path / "db")
    ids = [world.add_group(rewarded(*rewards)) for rewards in ((0, 0.1), (0, 1), (0.9, 1))]
    learn(base, tmp_path, world, groups_per_batch=1, group_reward_min=0.2, group_reward_max=0.8)
    assert [set(reasons(world, one)) for one in ids] == [{"too_hard"}, {None}, {"too_easy"}]
    assert world.store.balance(world.policy).dropped == {"too_hard": 6, "too_easy": 6}


def test_a_cut_off_rollout_compares_and_is_not_trained(base: Path, tmp_path: Path) -> None:
    world = World(tmp_path / "db")
    group = rewarded(0, 1, 5)
    group[2].finish_reason = "length"
    ids = world.add_group(group)
    learn(base, tmp_path, world, overlong_filter=True, groups_per_batch=1)
    assert reasons(world, ids) == [None, None, "overlong"]
    assert [world.store.rollout(id).state for id in ids] == ["trained", "trained", "dropped"]
    balance = world.store.balance(world.policy)
    assert (balance.trained, balance.dropped) == (6, {"overlong": 3})
    row = world.store.steps(world.run_id)[0].metrics
    assert (row["overlong_rollouts"], row["trained_tokens"], row["reward_mean"]) == (1.0, 6.0, 2.0)
    told = explain(look(world.store, ids[0], {})[0])
    assert told.advantage == -2.0  # from the mean of all three
    told = explain(look(world.store, ids[2], {})[0])
    assert told.setting == "train.overlong_filter"
    assert told.sentence.startswith("Not trained: a reply or its context was cut off")


def test_without_the_filter_it_trains(base: Path, tmp_path: Path) -> None:
    world = World(tmp_path / "db")
    group = rewarded(0, 5)
    group[1].finish_reason = "length"
    world.add_group(group)
    learn(base, tmp_path, world, groups_per_batch=1)
    assert world.store.balance(world.policy).trained == 6


def test_a_batch_of_cut_off_rollouts_is_no_step(base: Path, tmp_path: Path) -> None:
    world = World(tmp_path / "db")
    group = rewarded(0, 5)
    for attempt in group:
        attempt.finish_reason = "length"
    ids = world.add_group(group)
    world.add_group(random_group(random.Random(0)))
    learn(base, tmp_path, world, overlong_filter=True, groups_per_batch=1)
    assert reasons(world, ids) == ["overlong", "overlong"]
    assert [(row.step, row.version) for row in world.store.steps(world.run_id)] == [(0, 0), (1, 1)]


def test_what_a_commit_leaves_out_must_be_the_batch_s_and_is_left_out_once(tmp_path: Path) -> None:
    world = World(tmp_path / "db")
    first, second = world.add_group(rewarded(0, 1))
    epoch = world.store.acquire_lease("learner:policy", "test", 60.0)
    assert epoch is not None
    batch = world.store.take_batch(world.run_id, epoch=epoch, groups=1, batch_wait_s=0.0, staleness_max=4)
    assert batch is not None

    def commit(rows: list[LedgerRow], dropped: dict[str, str]) -> None:
        values: dict[str, Any] = {"lineage": f"l_{world.run_id}", "epoch": epoch, "step": 0, "checkpoint": ""}
        world.store.commit_batch(
            Commit(
                batch_id=batch.id,
                run_id=world.run_id,
                rows=rows,
                metrics={},
                new_version=False,
                dropped=dropped,
                **values,
            )
        )

    rows = [LedgerRow(first, 0, 3, 0.0)]
    with pytest.raises(Conflict, match="no rollout r_other"):
        commit(rows, {"r_other": "overlong"})
    with pytest.raises(Conflict, match="1 ledger rows are wrong"):
        commit([*rows, LedgerRow(second, 0, 3, 0.0)], {second: "overlong"})
    commit(rows, {second: "overlong"})
    commit(rows, {second: "overlong"})
    assert reasons(world, [first, second]) == [None, "overlong"]
    balance = world.store.balance(world.policy)
    assert (balance.zero_advantage, balance.dropped, balance.exact) == (3, {"overlong": 3}, True)
    assert world.store.verify() == []

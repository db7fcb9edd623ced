"""Groups of one: compared with what their scenario brought before, in batches that the run committed."""

from pathlib import Path

import pytest
from learner_world import Attempt, World, make_base, settings

from capture.types import RewardMean
from hone.explain.explanation import explain
from hone.explain.look import look
from learner.train import run


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_base(tmp_path_factory.mktemp("base"))


def play(world: World, *rewards: float, scenario_id: str | None = "s", key_id: str = "k") -> list[str]:
    """A group of one for each reward."""
    made = [world.add_group([Attempt([5, 6], [[7, 8]], one)], scenario_id, key_id) for one in rewards]
    return [member for group in made for member in group]


def learn(base: Path, scratch: Path, world: World) -> None:
    """Train all that is there in one batch; a learner of its own each time."""
    waiting = world.store.groups_of_run(world.run_id)["closed"]

    def done() -> bool:
        return not world.store.groups_of_run(world.run_id).keys() & {"closed", "taken"}

    run(settings(base, scratch, groups_per_batch=waiting), world.path, world.run_id, world.policy, done)
    assert world.store.verify() == []
    assert world.store.balance(world.policy).exact


def advantages(world: World, ids: list[str]) -> list[float]:
    return [world.store.history(one).ledger[one].advantage for one in ids]


def test_a_reward_is_compared_with_those_before(base: Path, tmp_path: Path) -> None:
    world = World(tmp_path / "db")
    first = play(world, 1.0, 0.0)
    learn(base, tmp_path, world)
    assert advantages(world, first) == [0.0, -1.0]
    second = play(world, 1.0, 1.0)
    learn(base, tmp_path, world)
    assert advantages(world, second) == pytest.approx([0.5, 1 / 3])
    assert [world.store.rollout(one).state for one in first + second] == ["trained"] * 4
    assert world.store.reward_means(world.run_id, {("k", "s"), ("k", "t")}) == {
        ("k", "s"): RewardMean(4, 0.75)
    }
    assert world.store.balance(world.policy).zero_advantage == 2  # tokens of the first


def test_scenarios_and_keys_have_means_of_their_own(base: Path, tmp_path: Path) -> None:
    world = World(tmp_path / "db")
    before = play(world, 1.0) + play(world, 5.0, key_id="other") + play(world, 3.0, scenario_id=None)
    learn(base, tmp_path, world)
    assert advantages(world, before) == [0.0] * 3
    after = [
        *play(world, 2.0, scenario_id="t"),
        *play(world, 2.0),
        *play(world, 2.0, key_id="other"),
        *play(world, 2.0, scenario_id=None),
    ]
    learn(base, tmp_path, world)
    assert advantages(world, after) == [0.0, 1.0, -3.0, -1.0]


def test_groups_of_one_stand_beside_larger_ones(base: Path, tmp_path: Path) -> None:
    world = World(tmp_path / "db")
    alone = play(world, 1.0)
    several = world.add_group([Attempt([5, 6], [[7]], reward) for reward in (0.0, 1.0)], "s")
    learn(base, tmp_path, world)
    assert advantages(world, alone + several) == [0.0, -0.5, 0.5]
    assert world.store.reward_means(world.run_id, {("k", "s")}) == {("k", "s"): RewardMean(3, 2 / 3)}


def test_the_filter_of_equal_rewards_lets_them_pass(base: Path, tmp_path: Path) -> None:
    world = World(tmp_path / "db")
    ids = play(world, 1.0, 0.0)
    run(
        settings(base, tmp_path, groups_per_batch=2, steps_max=1, zero_variance_filter=True),
        world.path,
        world.run_id,
        world.policy,
        lambda: False,
    )
    assert advantages(world, ids) == [0.0, -1.0]


def test_what_was_dropped_counts_in_no_mean(base: Path, tmp_path: Path) -> None:
    world = World(tmp_path / "db")
    play(world, 1.0)
    world.store.end_run(world.run_id, "interrupted")
    assert world.store.reward_means(world.run_id, {("k", "s")}) == {}


def test_the_first_is_told_why_it_did_not_train(base: Path, tmp_path: Path) -> None:
    world = World(tmp_path / "db")
    first, _ = play(world, 1.0, 0.0)
    learn(base, tmp_path, world)
    said = explain(look(world.store, first, {})[0])
    assert said.kind == "zero_advantage"
    assert "a group of one" in said.sentence
    assert "its reward 1 was the first of its scenario" in said.sentence

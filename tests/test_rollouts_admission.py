import msgspec
import pytest

from capture.types import Group, Rollout, RolloutState
from rollouts.admission import Load, Repair, Slot, groups_to_open, repair
from rollouts.settings import Settings

# 64 agents, groups of 8; at most 2 batches of 4 groups out.
SETTINGS = Settings(concurrency=64, group_size=8, groups_per_batch=4, batches_outstanding_max=2)


@pytest.mark.parametrize(
    ("outstanding", "rollouts", "remaining", "groups"),
    [
        (0, 0, 100, 8),  # both limits: 64 / 8 agents, 2 * 4 groups
        (5, 0, 100, 3),  # the learner's
        (8, 0, 100, 0),
        (9, 0, 100, 0),  # more than allowed, after a restart with smaller settings
        (0, 60, 100, 1),  # 4 free agents start one group
        (0, 55, 100, 2),  # 9 free agents: a whole group and a beginning
        (0, 64, 100, 0),
        (0, 70, 100, 0),
        (0, 0, 3, 3),  # the epochs'
        (0, 0, 0, 0),
    ],
)
def test_admission(outstanding: int, rollouts: int, remaining: int, groups: int) -> None:
    load = Load(outstanding=outstanding, rollouts=rollouts, remaining=remaining)
    assert groups_to_open(SETTINGS, load) == groups


def test_no_group_opens_that_the_run_cannot_use() -> None:
    load = Load(outstanding=2, rollouts=0, remaining=50)
    for needed, groups in ((None, 6), (5, 3), (2, 0), (0, 0)):
        assert groups_to_open(SETTINGS, msgspec.structs.replace(load, needed=needed)) == groups


def test_agents_may_be_a_part_of_a_batch_ahead() -> None:
    settings = msgspec.structs.replace(SETTINGS, batches_outstanding_max=1.25)
    assert groups_to_open(settings, Load(outstanding=0, rollouts=0, remaining=50)) == 5
    assert groups_to_open(settings, Load(outstanding=4, rollouts=0, remaining=50)) == 1


def test_a_group_larger_than_the_agents_still_opens() -> None:
    settings = Settings(concurrency=2, group_size=8, groups_per_batch=1, batches_outstanding_max=1)
    assert groups_to_open(settings, Load(outstanding=0, rollouts=0, remaining=5)) == 1


GROUP = Group(id="g", run_id="run", scenario_id="s", size=4, state="open", created_at=0.0)


def member(name: str, state: RolloutState, attempt: int = 0, replaces: str | None = None) -> Rollout:
    return Rollout(id=name, key_id="k", mode="train", state=state, attempt=attempt, replaces=replaces)


def test_repair_replaces_what_died_and_opens_what_never_was() -> None:
    found = [member("a", "scored"), member("b", "open"), member("c", "open", attempt=2)]
    assert repair(GROUP, found, retries=2) == Repair([Slot(1, "b"), Slot(3, "c"), Slot(0, None)], ["b", "c"])


def test_repair_retries_failures_within_the_limit() -> None:
    found = [
        member("a", "failed"),
        member("b", "failed", attempt=2),
        member("c", "failed"),
        member("d", "open", attempt=1, replaces="c"),
        member("e", "dropped"),
    ]
    # b has no retry left; c was replaced by d, whose agent died; e was expired and stays.
    assert repair(GROUP, found, retries=2) == Repair([Slot(1, "a"), Slot(2, "d")], ["d"])


def test_a_crash_between_opening_a_replacement_and_failing_the_old_one() -> None:
    found = [member("a", "open"), member("b", "open", attempt=1, replaces="a")]
    found += [member("c", "scored"), member("d", "scored"), member("e", "scored")]
    assert repair(GROUP, found, retries=2) == Repair([Slot(2, "b")], ["a", "b"])


def test_nothing_to_repair() -> None:
    found = [member(name, "scored") for name in "abc"] + [member("d", "sealed")]
    assert repair(GROUP, found, retries=2) == Repair([], [])

"""When groups close: hand-made cases of the pure decider."""

import msgspec
import pytest

from capture.types import Group, Rollout
from rewards.groups import Close, Wait, decide
from rewards.settings import Settings

SETTINGS = Settings(group_deadline_s=100.0, infrastructure_retries=2)
EARLY, LATE = 1_050.0, 1_100.0


def group(size: int) -> Group:
    return Group(id="g_1", run_id="run", scenario_id="s", size=size, state="open", created_at=1_000.0)


def member(name: str, state: str, **fields: object) -> Rollout:
    base = Rollout(id=name, key_id="k", mode="train", group_id="g_1")
    return msgspec.structs.replace(base, state=state, **fields)


def scored(name: str, status: str = "completed", **fields: object) -> Rollout:
    return member(name, "scored", status=status, reward=1.0, **fields)


def test_closes_when_all_declared_members_are_scored() -> None:
    assert decide(group(2), [scored("a"), scored("b")], EARLY, SETTINGS) == Close(["a", "b"], {})


def test_a_group_of_one_closes_with_its_member() -> None:
    assert decide(group(1), [scored("a")], EARLY, SETTINGS) == Close(["a"], {})
    assert decide(group(1), [member("a", "sealed")], LATE, SETTINGS) == Wait()


@pytest.mark.parametrize("state", ["open", "sealed", "ingested"])
def test_waits_for_a_member_that_still_runs(state: str) -> None:
    assert decide(group(3), [scored("a"), scored("b"), member("c", state)], EARLY, SETTINGS) == Wait()


def test_waits_for_members_that_were_declared_but_not_opened() -> None:
    assert decide(group(3), [scored("a"), scored("b")], EARLY, SETTINGS) == Wait()


def test_a_reward_error_is_terminal_and_never_compared() -> None:
    broken = member("c", "reward_error", drop_reason="reward_error")
    decision = decide(group(3), [scored("a"), scored("b"), broken], EARLY, SETTINGS)
    assert decision == Close(["a", "b"], {"c": "reward_error"})


def test_a_failure_with_attempts_left_is_waited_for() -> None:
    failed = member("c", "failed", attempt=1, drop_reason="failed")
    assert decide(group(3), [scored("a"), scored("b"), failed], EARLY, SETTINGS) == Wait()


def test_a_failure_of_the_last_attempt_is_terminal() -> None:
    failed = member("c", "failed", attempt=2, drop_reason="failed")
    decision = decide(group(3), [scored("a"), scored("b"), failed], EARLY, SETTINGS)
    assert decision == Close(["a", "b"], {"c": "failed"})


def test_a_replaced_failure_is_represented_by_its_replacement() -> None:
    failed = member("b", "failed", attempt=0, drop_reason="failed")
    running = member("c", "open", attempt=1, replaces="b")
    assert decide(group(2), [scored("a"), failed, running], EARLY, SETTINGS) == Wait()
    done = scored("c", attempt=1, replaces="b")
    assert decide(group(2), [scored("a"), failed, done], EARLY, SETTINGS) == Close(
        ["a", "c"], {"b": "failed"}
    )


def test_a_chain_of_replacements_counts_once() -> None:
    first = member("b", "failed", attempt=0, drop_reason="failed")
    second = member("c", "failed", attempt=1, replaces="b", drop_reason="failed")
    third = member("d", "failed", attempt=2, replaces="c", drop_reason="failed")
    decision = decide(group(3), [scored("a"), scored("e"), first, second, third], EARLY, SETTINGS)
    assert decision == Close(["a", "e"], {"b": "failed", "c": "failed", "d": "failed"})


def test_expired_members_are_terminal() -> None:
    stale = member("c", "dropped", drop_reason="stale")
    decision = decide(group(3), [scored("a"), stale, scored("b")], EARLY, SETTINGS)
    assert decision == Close(["a", "b"], {"c": "stale"})


def test_a_group_of_failures_closes_empty() -> None:
    broken = [member(name, "reward_error", drop_reason="reward_error") for name in ("a", "b")]
    assert decide(group(2), broken, EARLY, SETTINGS) == Close([], {"a": "reward_error", "b": "reward_error"})


@pytest.mark.parametrize("status", ["agent_error", "timeout", "max_calls", "context_overflow"])
def test_agent_failures_are_compared_unless_they_are_to_be_dropped(status: str) -> None:
    members = [scored("a"), scored("b", status), scored("c")]
    assert decide(group(3), members, EARLY, SETTINGS) == Close(["a", "b", "c"], {})
    dropping = msgspec.structs.replace(SETTINGS, on_agent_failure="drop")
    assert decide(group(3), members, EARLY, dropping) == Close(["a", "c"], {"b": "agent_failure"})


def test_the_deadline_closes_on_two_scored_members() -> None:
    members = [scored("a"), scored("b"), member("c", "open")]
    assert decide(group(4), members, LATE - 0.001, SETTINGS) == Wait()
    assert decide(group(4), members, LATE, SETTINGS) == Close(["a", "b"], {"c": "group_deadline"})


def test_the_deadline_does_not_close_on_one_member_while_another_runs() -> None:
    assert decide(group(3), [scored("a"), member("b", "ingested")], LATE, SETTINGS) == Wait()


def test_the_deadline_ends_a_group_that_cannot_grow_any_more() -> None:
    failed = member("b", "failed", attempt=0, drop_reason="failed")
    assert decide(group(3), [scored("a"), failed], LATE, SETTINGS) == Close(["a"], {"b": "failed"})


def test_an_undeclared_group_closes_at_its_deadline_only() -> None:
    members = [scored("a"), scored("b")]
    assert decide(group(0), members, EARLY, SETTINGS) == Wait()
    assert decide(group(0), members, LATE, SETTINGS) == Close(["a", "b"], {})


def test_more_members_than_declared_are_all_compared() -> None:
    members = [scored("a"), scored("b"), scored("c")]
    assert decide(group(2), members, EARLY, SETTINGS) == Close(["a", "b", "c"], {})

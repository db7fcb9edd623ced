"""Which branch of a rollout its script judges, and what is set aside."""

from pathlib import Path

from capture_makers import POLICY
from explain_world import passive_world

from capture.graph import build
from capture.types import ModelCall
from hone.traffic.filters import Filters
from hone.traffic.scenarios import from_rollouts
from rewards.judge import SCENARIO
from rewards.settle import main_branch


def call(name: str, at: float, prompt: list[int], sampled: list[int], **fields: object) -> ModelCall:
    base = {"policy": "policy", "policy_version": 0, "ended_at": at + 0.5, "status": 200}
    answer = {"role": "assistant", "content": name}
    shared = {"rollout_id": "r_1", "started_at": at, "response": answer, "messages": [{"role": "user"}]}
    tokens = {"prompt_ids": prompt, "sampled_ids": sampled, "sampled_logprobs": [-1.0] * len(sampled)}
    return ModelCall(id=name, **base | shared | tokens | fields)


FIRST = call("c_1", 1.0, [1, 2], [3])
SECOND = call("c_2", 2.0, [1, 2, 3, 4], [5])
THIRD = call("c_3", 3.0, [1, 2, 3, 4, 5, 6], [7])


def ids(*calls: ModelCall) -> list[str]:
    return [each.id for each in main_branch(build(calls), "policy")]


def test_a_straight_conversation_is_its_own_branch() -> None:
    assert ids(THIRD, FIRST, SECOND) == ["c_1", "c_2", "c_3"]


def test_of_several_branches_that_of_the_last_call() -> None:
    side = call("c_4", 2.5, [9, 9], [8])
    assert ids(FIRST, SECOND, side) == ["c_4"]
    assert ids(FIRST, SECOND, side, THIRD) == ["c_1", "c_2", "c_3"]


def test_a_judge_on_another_model_is_not_the_agent() -> None:
    judge = call("c_4", 9.0, [], [], policy=None, policy_version=None)
    assert ids(FIRST, SECOND, judge) == ["c_1", "c_2"]


def test_a_rollout_on_other_models_only_is_judged_by_its_last_call() -> None:
    calls = [call(f"c_{n}", float(n), [], [], policy=None, policy_version=None) for n in range(3)]
    assert ids(*calls) == ["c_2"]


def test_unanswered_and_late_calls_are_passed_over() -> None:
    broken = call("c_4", 9.0, [], [], response=None, status=502)
    late = call("c_5", 10.0, [1, 2, 3, 4, 5, 6], [7], late=True)
    assert ids(FIRST, SECOND, broken, late) == ["c_1", "c_2"]
    assert ids(broken) == ["c_4"]
    assert ids(late) == []


def test_what_a_judge_asked_is_neither_scored_nor_trained(tmp_path: Path) -> None:
    with passive_world(tmp_path) as world:
        world.watched("judged", scenario_id=SCENARIO)
        world.watched("other", scenario_id="s")
        assert [one.id for one in world.store.scoreable()] == ["other"]
        judged = world.store.rollout("judged")
        assert (judged.state, judged.drop_reason, judged.for_training) == ("dropped", "judge", False)
        assert world.why("judged") == (
            "Not for training: it is a judge's own: a reward script asked it about another rollout, so "
            "nothing scores it.",
            None,
        )
        assert world.store.balance(POLICY).not_for_training == {"observe": 5}
        assert from_rollouts(world.store, Filters(), tmp_path / "a").left_out == {"judge": 1}

"""The trace of a rollout, against one written by hand."""

import json

from capture.types import ModelCall, Rollout
from rewards.trace import arguments_of, build_trace, content_of, split_system, turns_of

TOOL = {
    "type": "function",
    "function": {"name": "play", "description": "Put X.", "parameters": {"type": "object"}, "strict": True},
}
ASKED = {"role": "user", "content": [{"type": "text", "text": "your "}, {"type": "text", "text": "move"}]}
PLAYED = {
    "role": "assistant",
    "content": None,
    "tool_calls": [
        {"id": "t1", "type": "function", "function": {"name": "play", "arguments": '{"cell": 4}'}}
    ],
}
RESULT = {"role": "tool", "tool_call_id": "t1", "content": "you win"}
SYSTEM = {"role": "system", "content": "You play X."}


def call(name: str, messages: list[dict], response: dict | None, **fields: object) -> ModelCall:
    base = {"policy": "policy", "policy_version": 3, "started_at": 10.0, "ended_at": 11.0, "status": 200}
    shared = {"model": "policy", "tools": [TOOL], "prompt_tokens": 7, "completion_tokens": 5}
    return ModelCall(
        id=name, rollout_id="r_1", messages=messages, response=response, **base | shared | fields
    )


ROLLOUT = Rollout(
    id="r_1",
    key_id="key",
    mode="train",
    state="sealed",
    status="completed",
    created_at=100.0,
    sealed_at=102.5,
    scenario={"seed": 1},
    metadata={"agent_id": "x-player"},
    metrics={"moves": 1.0},
    stdout="done",
)


def test_golden() -> None:
    first = call("c_1", [SYSTEM, ASKED], PLAYED)
    second = call("c_2", [SYSTEM, ASKED, PLAYED, RESULT], {"role": "assistant", "content": "I won"})
    stray = call("c_3", [{"role": "user", "content": "judge this"}], {"role": "assistant", "content": "ok"})
    trace = build_trace(ROLLOUT, [first, stray, second], [first, second])
    assert trace == {
        "agent_id": "x-player",
        "model": "policy",
        "system_prompt": "You play X.",
        "tools": [{"name": "play", "description": "Put X.", "parameters": {"type": "object"}}],
        "turns": [
            {"role": "user", "content": "your move"},
            {"role": "assistant", "tool_calls": [{"name": "play", "arguments": {"cell": 4}}]},
            {"role": "tool", "content": "you win", "name": "play"},
            {"role": "assistant", "content": "I won"},
        ],
        "scenario": {"seed": 1},
        "rollout_id": "r_1",
        "status": "completed",
        "metadata": {"agent_id": "x-player"},
        "metrics": {"moves": 1.0},
        "usage": {"calls": 3, "prompt_tokens": 21, "completion_tokens": 15},
        "duration_s": 2.5,
        "stdout": "done",
    }
    assert json.loads(json.dumps(trace)) == trace


def test_a_call_without_answer_is_passed_over() -> None:
    first = call("c_1", [SYSTEM, ASKED], PLAYED)
    broken = call("c_2", [SYSTEM, ASKED, PLAYED, RESULT], None, status=502)
    turns = build_trace(ROLLOUT, [first, broken], [first, broken])["turns"]
    assert [turn["role"] for turn in turns] == ["user", "assistant"]


def test_only_unanswered_calls_leave_what_was_asked() -> None:
    broken = call("c_1", [SYSTEM, ASKED], None, status=502)
    assert build_trace(ROLLOUT, [broken], [broken])["turns"] == [{"role": "user", "content": "your move"}]


def test_a_rollout_without_calls_has_no_turns() -> None:
    trace = build_trace(ROLLOUT, [], [])
    assert (trace["turns"], trace["tools"], trace["usage"]["calls"]) == ([], [], 0)


def test_arguments_that_are_no_object_stay_as_they_came() -> None:
    assert arguments_of('{"cell": 4}') == {"cell": 4}
    for raw in ('{"cell": 4', "[4]", "4", "", "null"):
        assert arguments_of(raw) == raw
    assert arguments_of({"cell": 4}) == {"cell": 4}
    deep = "[" * 100_000
    assert arguments_of(deep) == deep


def test_odd_messages_do_not_break_it() -> None:
    odd = [{"role": "assistant", "tool_calls": ["?", {"id": 3}, {"function": {"name": "f"}}]}, {}]
    assert list(turns_of(odd)) == [
        {
            "role": "assistant",
            "tool_calls": [
                {"name": "", "arguments": "?"},
                {"name": "", "arguments": {"id": 3}},
                {"name": "f", "arguments": None},
            ],
        },
        {"role": ""},
    ]


def test_content_with_images_stays_a_list() -> None:
    parts = [{"type": "text", "text": "see"}, {"type": "image_url", "image_url": {"url": "x"}}]
    assert content_of(parts) == parts


def test_leading_system_messages_are_joined_and_later_ones_are_turns() -> None:
    later = {"role": "system", "content": "be brief"}
    developer = {"role": "developer", "content": [{"type": "text", "text": "Rules."}]}
    assert split_system([SYSTEM, developer, ASKED, later]) == ("You play X.\n\nRules.", [ASKED, later])

"""Stored rollouts as lines for supervised fine-tuning."""

import json
from pathlib import Path
from typing import Any, get_args

import pytest
from capture_makers import model_call
from traffic_world import SYSTEM, TOOL, World, assistant, talk, user

from capture.conversation import conversational
from capture.errors import NotFound
from capture.types import Rollout
from hone.cli.main import main
from hone.traffic.conversations import conversations
from hone.traffic.export import Format, Summary, export
from hone.traffic.filters import Filters


@pytest.fixture
def world(tmp_path: Path) -> World:
    return World(tmp_path / "hone.db")


def exported(
    world: World, tmp_path: Path, format: Format, said: Filters | None = None, best_of: int | None = None
) -> tuple[Summary, list[dict[str, Any]]]:
    out = tmp_path / "out.jsonl"
    summary = export(world.store, said or Filters(), format, out, best_of=best_of, force=True)
    return summary, [json.loads(line) for line in out.read_text().splitlines()]


def test_a_conversation_is_one_line_to_its_end(world: World, tmp_path: Path) -> None:
    world.add("r_1", talk("first", "second"), reward=0.5, scenario_id="s1")
    summary, lines = exported(world, tmp_path, "messages")
    assert (summary.lines, summary.rollouts) == (1, 1)
    assert lines == [
        {
            "messages": [SYSTEM, user("go"), assistant("first"), user("and?"), assistant("second")],
            "tools": [TOOL],
            "reward": 0.5,
            "scenario_id": "s1",
            "rollout_id": "r_1",
            "call_id": "c_r_1_2",
            "model": "policy",
            "status": "completed",
        }
    ]


def test_every_branch_has_its_line(world: World, tmp_path: Path) -> None:
    root, on = talk("first", "second")
    other = {**on, "response": assistant("else"), "sampled_ids": [90, 91]}
    world.add("r_1", [root, on, other])
    _, lines = exported(world, tmp_path, "messages")
    assert [line["messages"][-1]["content"] for line in lines] == ["second", "else"]


def test_drift_in_tokens_makes_no_second_conversation(world: World, tmp_path: Path) -> None:
    root, on = talk("first", "second")
    drifted = {**on, "prompt_ids": [1, 2, 77, 78, 3]}
    world.add("r_1", [root, drifted])
    world.add("r_2", [{**call, "prompt_ids": [], "sampled_ids": []} for call in talk("a", "b", "c")])
    _, lines = exported(world, tmp_path, "messages")
    assert [(line["rollout_id"], line["messages"][-1]["content"]) for line in lines] == [
        ("r_1", "second"),
        ("r_2", "c"),
    ]
    _, tokens = exported(world, tmp_path, "tokens", Filters(states=["ingested"]))
    assert [line["token_ids"] for line in tokens][:2] == [[1, 2, 30, 31], [1, 2, 77, 78, 3, 40, 41]]


def test_changed_tools_are_another_conversation(world: World, tmp_path: Path) -> None:
    root, on = talk("first", "second")
    world.add("r_1", [root, {**on, "tools": []}])
    _, lines = exported(world, tmp_path, "messages")
    assert [(line["messages"][-1]["content"], line["tools"]) for line in lines] == [
        ("first", [TOOL]),
        ("second", []),
    ]


def test_tokens_are_the_samples_of_the_call_graph(world: World, tmp_path: Path) -> None:
    world.add("r_1", talk("first", "second"), reward=1.0)
    _, lines = exported(world, tmp_path, "tokens")
    assert len(lines) == 1
    line = lines[0]
    assert line["token_ids"] == [1, 2, 30, 31, 3, 40, 41]
    assert line["loss_mask"] == [False, False, True, True, False, True, True]
    assert line["sampled_logprobs"] == [0.0, 0.0, -30 / 8, -31 / 8, 0.0, -5.0, -41 / 8]
    assert [(span["start"], span["end"], span["call_id"]) for span in line["spans"]] == [
        (2, 4, "c_r_1_1"),
        (5, 7, "c_r_1_2"),
    ]
    assert (line["rollout_id"], line["reward"], line["status"]) == ("r_1", 1.0, "completed")


@pytest.mark.parametrize(
    ("changed", "messages", "tokens"),
    [
        ({}, None, None),
        ({"untrainable": "grammar"}, None, "grammar"),
        ({"untrainable": "provider", "policy": None}, None, "provider"),
        ({"untrainable": "no_token_ids", "sampled_ids": [], "sampled_logprobs": []}, None, "no_token_ids"),
        ({"untrainable": "redacted", "sampled_ids": [], "sampled_logprobs": []}, "redacted", "redacted"),
        ({"untrainable": "media"}, "media", "media"),
        ({"untrainable": "error", "response": None}, "error", "error"),
        ({"untrainable": "partial"}, "partial", "partial"),
        ({"untrainable": "n_choices"}, "n_choices", "n_choices"),
        ({"undelivered": True}, "undelivered", "undelivered"),
        ({"untrainable": "provider", "policy": None, "status": 499}, "undelivered", "provider"),
        ({"untrainable": "provider", "policy": None, "error": "cut"}, "error", "provider"),
        ({"untrainable": "provider", "policy": None, "finish_reason": None}, "partial", "provider"),
        ({"finish_reason": "length"}, "length", None),
    ],
)
def test_what_is_left_out(changed: dict[str, Any], messages: str | None, tokens: str | None) -> None:
    from capture import graph

    call = model_call(**changed)
    found, left_out = conversations(Rollout(id="r_1", key_id="k", mode="train"), [call])
    assert (len(found), dict(left_out)) == ((1, {}) if messages is None else (0, {messages: 1}))
    assert [fate.excluded for fate in graph.fates(graph.build([call]))] == [tokens]


def test_late_and_superseded_calls_are_counted(world: World, tmp_path: Path) -> None:
    once, again = talk("a")[0], {**talk("a")[0], "retry_count": 1, "sampled_ids": [50, 51]}
    late = talk("x", asked="late")
    world.add("r_1", [{**once, "body_hash": b"same"}, {**again, "body_hash": b"same"}], late=late)
    for format in get_args(Format):
        summary, lines = exported(world, tmp_path, format)
        assert len(lines) == 1
        assert summary.left_out.calls == {"late": 1, "superseded": 1}


def test_rollouts_that_are_not_taken_are_counted(world: World, tmp_path: Path) -> None:
    world.add("r_1", talk("a"))
    world.add("r_2", talk("a"), sealed=False)
    world.add("r_3", [])
    world.add("r_4", [], sealed=False)
    world.store.seal_rollout("r_4", "failed")
    summary, lines = exported(world, tmp_path, "messages")
    assert [line["rollout_id"] for line in lines] == ["r_1"]
    assert summary.left_out.rollouts == {"unfinished": 1, "nothing": 1, "failed": 1}
    _, lines = exported(world, tmp_path, "messages", Filters(states=["open"]))
    assert [line["rollout_id"] for line in lines] == ["r_2"]


def test_best_of_keeps_the_highest_rewards_of_each_scenario(world: World, tmp_path: Path) -> None:
    rewards = [("s1", 0.1), ("s1", 0.9), ("s1", 0.9), ("s1", 0.2), ("s2", 0.0), ("s2", None), (None, 1.0)]
    for number, (scenario, reward) in enumerate(rewards, 1):
        world.add(f"r_{number}", talk("a"), scenario_id=scenario, reward=reward)
    for best_of, kept in ((1, "35"), (2, "235"), (3, "2345"), (9, "12345")):
        summary, lines = exported(world, tmp_path, "messages", best_of=best_of)
        assert [line["rollout_id"] for line in lines] == [f"r_{digit}" for digit in kept]
        expected = {"no_reward": 1, "no_scenario": 1, "not_best": 5 - len(kept)}
        assert summary.left_out.rollouts == {name: count for name, count in expected.items() if count}


def test_nothing_is_left_where_there_is_nothing_to_write(world: World, tmp_path: Path) -> None:
    world.add("r_1", [{"untrainable": "redacted"}])
    with pytest.raises(NotFound, match="1 rollouts fit, none can be used; left out: 1 rollouts nothing"):
        exported(world, tmp_path, "messages")
    with pytest.raises(NotFound, match="no rollout fits --mode eval"):
        exported(world, tmp_path, "messages", Filters(mode="eval"))
    assert [path.name for path in tmp_path.iterdir() if not path.name.startswith("hone.db")] == []


def test_messages_as_templates_and_trainers_take_them() -> None:
    call = {"id": "x", "index": 0, "type": "function", "function": {"name": "f", "arguments": '{"a": [1]}'}}
    said = {"role": "assistant", "content": None, "refusal": None, "reasoning": "hm", "tool_calls": [call]}
    assert conversational(said) == {
        "role": "assistant",
        "content": "",
        "reasoning_content": "hm",
        "tool_calls": [{"id": "x", "type": "function", "function": {"name": "f", "arguments": {"a": [1]}}}],
    }
    broken = {"function": {"name": "f", "arguments": "{a"}}
    assert conversational({"role": "assistant", "tool_calls": [broken]})["tool_calls"] == [
        {"type": "function", "function": {"name": "f", "arguments": "{a"}}
    ]
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    assert conversational({"role": "user", "content": parts}) == {"role": "user", "content": "ab"}
    image = [{"type": "image_url", "image_url": {"url": "x"}}]
    assert conversational({"role": "user", "content": image})["content"] == image
    assert conversational({"role": "tool", "tool_call_id": "x", "content": "42"}) == {
        "role": "tool",
        "tool_call_id": "x",
        "content": "42",
    }


def test_the_command(world: World, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    world.add("r_1", talk("a"), reward=1.0, scenario_id="s1")
    world.add("r_2", talk("a"), reward=0.0, scenario_id="s1")
    config = tmp_path / "hone.toml"
    config.write_text(f"[capture]\npath = '{tmp_path / 'hone.db'}'\n")
    words = ["rollouts", "export", "-c", str(config), "--out", str(tmp_path / "x.jsonl"), "--json"]
    assert main([*words, "--format", "messages", "--best-of", "1"]) == 0
    told = capsys.readouterr()
    assert json.loads(told.out) == {
        "out": str(tmp_path / "x.jsonl"),
        "format": "messages",
        "lines": 1,
        "rollouts": 1,
        "left_out": {"rollouts": {"not_best": 1}, "calls": {}},
    }
    assert "left out: 1 rollouts not_best (others of the scenario have more reward)" in told.err
    assert main([*words, "--format", "tokens"]) == 1
    assert "is there already; --force replaces it" in capsys.readouterr().err

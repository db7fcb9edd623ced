"""From captured first requests to a scenario set that the runner reads."""

import argparse
import json
import time
from pathlib import Path
from typing import Any

import pytest
from traffic_world import SYSTEM, TOOL, World, assistant, talk, user

from capture.errors import Conflict, NotFound
from capture.fingerprint import fingerprint
from hone.cli.main import main
from hone.cli.selection import moment
from hone.config import load
from hone.traffic import filters as filtering
from hone.traffic.filters import Filters, matching
from hone.traffic.scenarios import from_rollouts
from rollouts.scenarios import LINE_BYTES_MAX, Deck, read_scenarios


@pytest.fixture
def world(tmp_path: Path) -> World:
    return World(tmp_path / "hone.db")


def written(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_one_scenario_for_each_distinct_first_request(world: World, tmp_path: Path) -> None:
    spelt = talk("a", asked="sort")
    spelt[0]["messages"] = [SYSTEM, {"content": [{"type": "text", "text": "sort"}], "role": "user"}]
    world.add("r_1", talk("x", "y", asked="sort"))
    world.add("r_2", talk("x", asked="find"))
    world.add("r_3", spelt)
    world.add("r_4", talk("x", asked="burn"))
    summary = from_rollouts(world.store, Filters(), tmp_path / "set.jsonl")
    assert (summary.scenarios, summary.distinct, summary.rollouts) == (3, 3, 4)
    found = written(tmp_path / "set.jsonl")
    assert [(one["count"], one["rollouts"]) for one in found] == [
        (2, ["r_3", "r_1"]),  # the most frequent first
        (1, ["r_4"]),  # then the newest
        (1, ["r_2"]),
    ]
    assert found[0]["messages"] == spelt[0]["messages"]  # of the newest, as captured
    assert found[1]["messages"] == [SYSTEM, user("burn")]
    assert found[1]["tools"] == [TOOL]
    assert found[1]["id"] == fingerprint([SYSTEM, user("burn")], [TOOL])


def test_the_runner_takes_the_file(world: World, tmp_path: Path) -> None:
    world.add("r_1", talk("x", asked="sort"))
    world.add("r_2", talk("x", asked="find"))
    from_rollouts(world.store, Filters(), tmp_path / "set.jsonl")
    scenarios = read_scenarios(tmp_path / "set.jsonl")
    drawn = [Deck(scenarios, seed=1, epochs=1).draw(ordinal) for ordinal in range(2)]
    assert {one.id for one in drawn} == {
        fingerprint([SYSTEM, user("sort")], [TOOL]),
        fingerprint([SYSTEM, user("find")], [TOOL]),
    }
    assert {one.content["messages"][1]["content"] for one in drawn} == {"sort", "find"}


def test_what_gives_no_scenario_is_counted(world: World, tmp_path: Path) -> None:
    world.add("r_1", [])
    world.add("r_2", [{"messages": [SYSTEM], "tools": []}])
    world.add("r_3", [{"messages": []}], late=talk("x", asked="late"))
    world.add("r_4", [{"messages": [user("few"), assistant("shots"), user("go")]}])
    world.add("r_5", talk("x", asked="long " * (LINE_BYTES_MAX // 5)))
    summary = from_rollouts(world.store, Filters(), tmp_path / "set.jsonl")
    assert summary.left_out == {"no_call": 2, "no_user_message": 1, "too_long": 1}
    assert (summary.scenarios, summary.distinct, summary.under_way) == (1, 2, 1)
    assert written(tmp_path / "set.jsonl")[0]["messages"] == [user("few")]


def test_a_first_request_counts_although_it_failed(world: World, tmp_path: Path) -> None:
    failed = {"messages": [user("hard")], "response": None, "untrainable": "error", "status": 500}
    world.add("r_1", [failed, *talk("x")])
    from_rollouts(world.store, Filters(), tmp_path / "set.jsonl")
    assert [one["messages"] for one in written(tmp_path / "set.jsonl")] == [[user("hard")]]


def test_no_file_is_left_or_replaced_where_it_should_not(world: World, tmp_path: Path) -> None:
    out = tmp_path / "set.jsonl"
    with pytest.raises(NotFound, match="the store has no rollouts"):
        from_rollouts(world.store, Filters(), out)
    world.add("r_1", talk("x"))
    with pytest.raises(NotFound, match=r"no rollout fits --mode eval --scenario s1 --min-reward 0\.5"):
        from_rollouts(world.store, Filters(mode="eval", scenarios=["s1"], min_reward=0.5), out)
    assert [path.name for path in tmp_path.iterdir() if "set" in path.name] == []
    out.write_text("mine\n")
    with pytest.raises(Conflict, match="is there already; --force replaces it"):
        from_rollouts(world.store, Filters(), out)
    assert out.read_text() == "mine\n"
    from_rollouts(world.store, Filters(), out, force=True)
    assert written(out)[0]["count"] == 1


def test_limit_keeps_the_most_frequent(world: World, tmp_path: Path) -> None:
    for number, asked in enumerate(["a", "b", "b", "c"]):
        world.add(f"r_{number}", talk("x", asked=asked))
    summary = from_rollouts(world.store, Filters(), tmp_path / "set.jsonl", limit=2)
    assert (summary.scenarios, summary.distinct) == (2, 3)
    assert [one["messages"][1]["content"] for one in written(tmp_path / "set.jsonl")] == ["b", "c"]


@pytest.mark.parametrize(
    ("said", "fit"),
    [
        (Filters(), "12345"),
        (Filters(mode="observe"), "4"),
        (Filters(run="run"), "1"),
        (Filters(states=["ingested"]), "14"),
        (Filters(states=["ingested", "open"]), "145"),
        (Filters(scenarios=["s1", "s2"]), "123"),
        (Filters(statuses=["completed"]), "1234"),
        (Filters(min_reward=0.5), "2"),
        (Filters(max_reward=0.5), "3"),
        (Filters(min_reward=0.25, max_reward=0.25), "3"),
        (Filters(policy="policy"), "12345"),
        (Filters(policy="other"), ""),
        (Filters(model="gpt-4o"), "4"),
        (Filters(since=100.0), "345"),
        (Filters(since=100.0, scenarios=["s2"]), "3"),
    ],
)
def test_filters(world: World, said: Filters, fit: str) -> None:
    world.add("r_1", talk("x"), run_id="run", scenario_id="s1", created_at=1.0)
    world.add("r_2", talk("x"), scenario_id="s1", reward=1.0, created_at=99.5)
    world.add("r_3", talk("x"), scenario_id="s2", reward=0.25, created_at=100.0)
    world.add("r_4", talk("x", model="gpt-4o", policy=None), mode="observe")
    world.add("r_5", [], sealed=False)
    assert [one.id for one in matching(world.store, said)] == [f"r_{digit}" for digit in fit]


def test_pages_are_turned(world: World) -> None:
    count = 2 * filtering.PAGE + 1
    for number in range(count):
        world.add(f"r_{number:06d}", [], sealed=False)
    looked: list[int] = []
    assert len(list(matching(world.store, Filters(), seen=looked.append))) == count
    assert looked == [filtering.PAGE, 2 * filtering.PAGE, count]
    after = matching(world.store, Filters(), after=f"r_{count - 3:06d}")
    assert [one.id for one in after] == [f"r_{count - 2:06d}", f"r_{count - 1:06d}"]


def test_moments() -> None:
    assert moment("90m") == pytest.approx(time.time() - 5400, abs=5)
    assert moment("2d") == pytest.approx(time.time() - 172800, abs=5)
    assert moment("2026-01-31T12:00+00:00") == 1769860800.0
    with pytest.raises(argparse.ArgumentTypeError, match="'soon' is not like 90m"):
        moment("soon")


def test_the_command(world: World, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    world.add("r_1", talk("x"), reward=1.0)
    world.add("r_2", talk("x"))
    world.add("r_3", [])
    config = tmp_path / "hone.toml"
    config.write_text(f"[capture]\npath = '{tmp_path / 'hone.db'}'\n")
    assert load(config, {}, "cpu").store.path == str(tmp_path / "hone.db")
    words = ["-c", str(config), "--out", str(tmp_path / "set.jsonl")]
    assert main(["scenarios", "from-rollouts", "--json", *words]) == 0
    told = capsys.readouterr()
    assert json.loads(told.out) == {
        "out": str(tmp_path / "set.jsonl"),
        "scenarios": 1,
        "distinct": 1,
        "rollouts": 3,
        "under_way": 0,
        "left_out": {"no_call": 1},
    }
    assert "1 scenarios from 3 rollouts" in told.err
    assert main(["scenarios", "from-rollouts", *words]) == 1
    assert "is there already; --force replaces it" in capsys.readouterr().err
    assert main(["scenarios", "from-rollouts", "--force", "--status", "timeout", *words]) == 1
    assert "no rollout fits --status timeout" in capsys.readouterr().err
    assert main(["rollouts", "ls", "--min-reward", "0.5", "-c", str(config), "--json"]) == 0
    assert [one["id"] for one in json.loads(capsys.readouterr().out)] == ["r_1"]

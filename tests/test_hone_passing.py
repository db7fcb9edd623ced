"""Promotion after an evaluation."""

from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest
from explain_world import RUN, World

from capture.evaluations import Evaluation, best, record, recorded
from capture.sqlite import SqliteStore
from capture.types import Rollout
from hone.cli.eval import remember
from hone.config import load
from hone.passing import consider, verdict
from hone.settings import PromoteSettings
from rollouts.evaluate import summarise

AUTO = PromoteSettings(auto=True, rollouts_min=4)


def rewards(*means: float) -> dict[tuple[str, str], list[float]]:
    return {("eval.jsonl", f"s{number}"): [mean, mean] for number, mean in enumerate(means)}


def test_it_passes_where_the_whole_interval_lies_above_the_margin() -> None:
    old, new = rewards(0.0, 0.5, 0.2, 0.3), rewards(0.5, 0.9, 0.7, 0.8)  # by 0.5, 0.4, 0.5, 0.5
    passed, why = verdict(AUTO, new, old)
    assert passed
    assert why == "the reward differs by +0.475 [+0.395, +0.555], more than promote.margin = 0"
    strict = PromoteSettings(auto=True, rollouts_min=4, margin=0.4)
    assert verdict(strict, new, old) == (
        False,
        "the reward differs by +0.475 [+0.395, +0.555]: not surely more than promote.margin = 0.4",
    )
    assert not verdict(AUTO, old, new)[0]
    assert not verdict(AUTO, old, old)[0]


def test_too_little_was_played() -> None:
    passed, why = verdict(AUTO, rewards(1.0, 1.0), rewards(0.0))
    assert not passed
    assert why.startswith("2 against 2 scored rollouts on 1 scenarios that both played are too few")
    many = PromoteSettings(auto=True, rollouts_min=9)
    assert not verdict(many, rewards(1.0, 1.0, 1.0, 1.0), rewards(0.0, 0.1, 0.0, 0.0))[0]


@pytest.fixture
def world(tmp_path: Path) -> Iterator[World]:
    """A policy whose version 1 an engine has proved; version 0 is promoted."""
    with closing(SqliteStore(tmp_path / "hone.db")) as store:
        world = World(store)
        for number, reward in enumerate((0.0, 1.0)):
            world.played(f"r_{number}", reward)
        world.group()
        world.train()
        world.activate(1)
        yield world


def played_by(world: World, version: int, values: list[float]) -> list[str]:
    """The ids of scored rollouts of the version, one a scenario."""
    ids = []
    for number, value in enumerate(values):
        ids.append(f"r_{version}_{number}")
        world.store.open_rollout(
            Rollout(
                id=ids[-1],
                key_id="k",
                mode="eval",
                scenario_id=f"s{number}",
                policy="policy",
                policy_version=version,
            )
        )
        world.store.seal_rollout(ids[-1], "completed")
        world.store.settle(ids[-1], [])
        world.store.save_score(ids[-1], value, {}, "script")
    return ids


def play(world: World, version: int, values: list[float]) -> None:
    """Evaluate the version."""
    ids, mean = played_by(world, version, values), sum(values) / len(values)
    found = Evaluation(version=version, scenarios="eval.jsonl", reward=mean, rollouts=ids, at=0.0)
    record(world.store, RUN, found)


def test_what_passed_is_asked_for(world: World) -> None:
    play(world, 1, [0.8, 0.9, 0.8, 0.9])
    assert consider(world.store, "policy", AUTO, RUN, 1) == (
        "v1 is not promoted: v0, which is, has no evaluation on eval.jsonl to compare with; "
        "`hone eval --version 0` makes one"
    )
    play(world, 0, [0.1, 0.1, 0.0, 0.2])
    assert consider(world.store, "policy", AUTO, RUN, 0) == "v0 is promoted already"
    assert consider(world.store, "policy", AUTO, RUN, 1).startswith(
        "v1 passed and is asked for in place of v0"
    )
    asked = world.store.open_promotion("policy")
    assert asked is not None
    assert (asked.version, asked.kind) == (1, "promote")


def test_what_is_worse_is_not(world: World) -> None:
    play(world, 0, [0.8, 0.9, 0.8, 0.9])
    play(world, 1, [0.8, 0.9, 0.8, 0.9])
    assert "v1 is not promoted in place of v0: the reward differs by +0.000" in consider(
        world.store, "policy", AUTO, RUN, 1
    )
    assert world.store.open_promotion("policy") is None


def test_an_evaluation_is_remembered_and_may_promote(world: World, tmp_path: Path) -> None:
    path, store = tmp_path / "hone.toml", tmp_path / "hone.db"
    path.write_text(
        f"[policy]\nbase_model = 'org/model'\n[run]\ndir = '{tmp_path}'\n[capture]\npath = '{store}'\n"
        "[rewards]\nscript = 'reward.py'\n[promote]\nauto = true\nrollouts_min = 4\n"
    )
    config = load(path, {})
    for version, values in ((0, [0.1, 0.2, 0.1, 0.2]), (1, [0.8, 0.9, 0.8, 0.9])):
        played = [world.store.rollout(id) for id in played_by(world, version, values)]
        said = remember(config, {"eval.jsonl": summarise(version, played)})
    assert said is not None
    assert said.startswith("v1 passed and is asked for in place of v0")
    found = recorded(world.store, RUN)
    assert [(one.version, round(one.reward, 6), len(one.rollouts)) for one in found] == [
        (0, 0.15, 4),
        (1, 0.85, 4),
    ]
    assert all(Path(one.scenarios).is_absolute() for one in found)
    assert best(found) == 1

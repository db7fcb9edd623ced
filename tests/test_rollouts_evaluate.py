import asyncio
import os
from pathlib import Path
from typing import Any

import pytest
from rollouts_proxy import SECRET, SmallProxy, small_proxy

from capture.types import Rollout
from rollouts.compare import student, wilson
from rollouts.evaluate import EvalResult, Progress, Stopped, evaluate, summarise
from rollouts.scenarios import Scenario
from rollouts.settings import Settings

ENVIRON = {"PATH": os.environ["PATH"]}
SET = [Scenario(f"s{number}", {"n": number}) for number in range(8)]
# Scenarios 0 and 1 crash.
AGENT = """
import json, os, sys
print(os.environ.get("TEMPERATURE"))
sys.exit(json.load(open(os.environ["SCENARIO_FILE"]))["n"] < 2)
"""


def settings(tmp_path: Path, text: str = AGENT, **more: Any) -> Settings:
    (tmp_path / "agent.py").write_text(text)
    defaults = {"cwd": str(tmp_path), "concurrency": 3, "poll_s": 0.02, "retry_wait_s": 0.01}
    return Settings(**{**defaults, "eval_env": {"TEMPERATURE": "0"}, **more})


async def evaluated(tmp_path: Path, proxy: SmallProxy, chosen: Settings, **more: Any) -> EvalResult:
    return await evaluate(
        chosen,
        SET,
        store_path=tmp_path / "store",
        proxy_url=proxy.url,
        key=SECRET,
        environ=ENVIRON,
        **more,
    )


async def test_every_scenario_is_scored_as_often_as_asked(tmp_path: Path) -> None:
    seen: list[Progress] = []
    async with small_proxy(tmp_path / "store") as proxy:
        result = await evaluated(tmp_path, proxy, settings(tmp_path), repeats=2, progress=seen.append)
        rollouts = {one.id: one for one in proxy.store.rollouts(mode="eval")}
    assert sorted(result.rollout_ids) == sorted(rollouts)
    assert result.version == 0
    assert result.statuses == {"agent_error": 4, "completed": 12}
    assert result.unscored == {}
    assert result.reward == student([0, 0, 1, 1, 1, 1, 1, 1])  # repeats of a scenario count as one
    assert result.scores["win"] == result.reward
    assert result.scores["length"].mean == 3.0
    assert {one.stdout for one in rollouts.values()} == {"0\n"}
    assert {one.group_id for one in rollouts.values()} == {None}
    assert {one.policy_version for one in rollouts.values()} == {0}
    assert seen[-1] == Progress(16, 16, 16)
    assert [one.played for one in seen] == sorted(one.played for one in seen)


async def test_all_rollouts_are_pinned_to_the_version_asked_for(tmp_path: Path) -> None:
    async with small_proxy(tmp_path / "store") as proxy:
        result = await evaluated(tmp_path, proxy, settings(tmp_path), version=7)
        assert {body["policy_version"] for body in proxy.opened} == {7}
    assert result.version == 7
    assert result.reward == wilson(6, 8)


async def test_rollouts_without_scores_are_counted_not_zero(tmp_path: Path) -> None:
    async with small_proxy(tmp_path / "store") as proxy:
        proxy.scoring = False
        result = await evaluated(tmp_path, proxy, settings(tmp_path, score_wait_s=0.3))
    assert result.unscored == {"sealed": 8}
    assert result.reward is None
    assert result.scores == {}


async def test_a_stopped_evaluation_leaves_nothing_open(tmp_path: Path) -> None:
    stop = asyncio.Event()
    async with small_proxy(tmp_path / "store") as proxy:
        chosen = settings(tmp_path, "import time; time.sleep(60)")
        asyncio.get_running_loop().call_later(1.0, stop.set)
        with pytest.raises(Stopped):
            await evaluated(tmp_path, proxy, chosen, stop=stop)
        assert [one.state for one in proxy.store.rollouts(mode="eval")] == ["failed"] * 3


def test_summary_by_hand() -> None:
    def scored(name: str, reward: float, scores: dict[str, float]) -> Rollout:
        return Rollout(
            id=name, key_id="k", mode="eval", state="scored", status="completed",
            scenario_id=name, reward=reward, scores=scores,
        )  # fmt: skip

    broken = Rollout(
        id="z", key_id="k", mode="eval", state="reward_error", status="completed", scenario_id="z"
    )
    found = [scored("b", 1.2, {"win": 1.0}), scored("a", 0.2, {"win": 0.0, "draw": 0.0}), broken]
    result = summarise(3, found)
    assert result.rollout_ids == ["a", "b", "z"]
    assert result.unscored == {"reward_error": 1}
    assert result.reward == student([0.2, 1.2])
    assert result.scores == {"draw": wilson(0, 1), "win": wilson(1, 2)}

"""The runner with the real proxy and the real vLLM."""

import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import pytest

from capture.sqlite import SqliteStore
from proxy.app import running
from proxy.settings import Engines
from proxy.settings import Settings as ProxySettings
from rollouts.evaluate import evaluate
from rollouts.scenarios import read_scenarios
from rollouts.settings import Settings

EXAMPLE = Path(__file__).parent.parent / "examples" / "tictactoe"


def spoken(response: bytes) -> tuple[str, list[str]]:
    """What a call's response says, without the ids that differ each time."""
    message = json.loads(response)["choices"][0]["message"]
    return message.get("content") or "", [
        call["function"]["arguments"] for call in message.get("tool_calls") or []
    ]


def traces(store: SqliteStore, rollout_ids: Sequence[str]) -> dict[str, list[Any]]:
    """Scenario -> what the model said, call after call, and the agent in the end."""
    found: dict[str, list[Any]] = {}
    wanted = set(rollout_ids)
    for rollout_id in rollout_ids:
        found[store.rollout(rollout_id).scenario_id or ""] = []
    for pending in store.pending_calls(10_000):
        if pending.raw.rollout_id in wanted:
            scenario = store.rollout(pending.raw.rollout_id).scenario_id or ""
            found[scenario].append(spoken(pending.raw.response))
    for rollout_id in rollout_ids:
        rollout = store.rollout(rollout_id)
        found[rollout.scenario_id or ""].append((rollout.status, rollout.stdout))
    return found


@pytest.mark.engine
async def test_forked_and_cold_agents_leave_the_same_traces(engine: Any, tmp_path: Path) -> None:
    store = SqliteStore(tmp_path / "store")
    store.start_run("run", "policy", {})
    scenarios = read_scenarios(EXAMPLE / "eval_random.jsonl")[:4]
    base = Settings(
        cwd=str(EXAMPLE),
        concurrency=1,  # the same batches for the engine both times
        eval_env={"TEMPERATURE": "0"},
        score_wait_s=0.1,  # nobody scores here
    )
    proxy = ProxySettings(port=0, policy="policy", engines=Engines(urls=(engine.url,)))
    seen = []
    async with running(proxy, tmp_path / "store") as (_, url):
        for launch in ("fork", "command"):
            chosen = msgspec.structs.replace(base, launch=launch)
            result = await evaluate(
                chosen,
                scenarios,
                store_path=tmp_path / "store",
                proxy_url=url,
                key=None,
                environ={name: os.environ[name] for name in ("PATH", "HOME") if name in os.environ},
            )
            assert result.statuses == {"completed": 4}
            seen.append(traces(store, result.rollout_ids))
    assert seen[0] == seen[1]
    assert all(len(trace) >= 3 for trace in seen[0].values())  # several calls each, and the agent's words
    assert store.counts().failed_calls == 0
    store.close()

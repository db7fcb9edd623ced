"""The reward scripts to begin with run as they stand."""

import json
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web
from serving import serving

from rewards.pool import Pool
from rewards.script import Outcome, Scored, combine
from rewards.settings import Settings

EXAMPLES = Path(__file__).parent.parent / "examples" / "rewards"


def trace(*turns: dict[str, Any], scenario: Any = None) -> dict[str, Any]:
    given = {"agent_id": "k", "model": "policy", "system_prompt": "", "tools": [], "scenario": scenario}
    return {**given, "turns": list(turns), "rollout_id": "r_1", "status": "completed", "metadata": None}


def says(text: str, *tools: str) -> dict[str, Any]:
    calls = [{"name": name, "arguments": {}} for name in tools]
    return {"role": "assistant", "content": text, **({"tool_calls": calls} if calls else {})}


def uses(*tools: str) -> dict[str, Any]:
    return {"role": "assistant", "tool_calls": [{"name": name, "arguments": {}} for name in tools]}


USER = {"role": "user", "content": "how many?"}


async def scored(script: Path, *traces: dict[str, Any]) -> list[Outcome]:
    pool = Pool(Settings(script=str(script), timeout_s=60.0, workers=1))
    await pool.start()
    try:
        return [await pool.score(one) for one in traces]
    finally:
        await pool.close()


def reward(outcome: Outcome) -> float:
    assert isinstance(outcome, Scored), outcome
    return combine(outcome, {}, {})[0]


async def test_typical() -> None:
    found = await scored(
        EXAMPLES / "typical.py",
        trace(),
        trace(USER, says("four")),
        trace(USER, uses("look"), says("four")),
        trace(USER, uses("look", "look", "ask", "look"), says("four")),
        trace(*[USER, uses("look")] * 6),
    )
    assert [reward(one) for one in found] == pytest.approx([0.3, 0.7, 1.0, 0.9, 0.0])


async def test_answer() -> None:
    whole = "<think>two and two</think><answer>{}</answer>"
    found = await scored(
        EXAMPLES / "answer.py",
        trace(USER, says(whole.format("4")), scenario={"answer": 4}),
        trace(USER, says(whole.format("5")), scenario={"answer": 4}),
        trace(USER, says(whole.format("many")), scenario={"answer": 4}),
        trace(USER, says("it is 4"), scenario={"answer": 4}),
    )
    assert [reward(one) for one in found] == pytest.approx([1.0, 0.4, 0.2, 0.0])
    assert isinstance(found[0], Scored)
    assert found[0].scores == {"form": 1.0, "number": 1.0, "right": 1.0, "words": 3.0}


async def test_judged(tmp_path: Path) -> None:
    asked: list[Any] = []

    async def judge(request: web.Request) -> web.Response:
        asked.append(await request.json())
        text = json.dumps({"reason": "fine", "score": [0.5, 1.0, 0.75][len(asked) % 3]})
        return web.json_response({"choices": [{"message": {"role": "assistant", "content": text}}]})

    async with serving([web.post("/v1/chat/completions", judge)]) as url:
        script = tmp_path / "judged.py"
        text = (EXAMPLES / "judged.py").read_text()
        script.write_text(text.replace("    votes=3,", f"    votes=3,\n    base_url={url + '/v1'!r},"))
        one = trace(USER, says("four"))
        found = [*await scored(script, one, one), *await scored(script, one)]
    assert [reward(outcome) for outcome in found] == pytest.approx([0.8 * 0.75 + 0.2] * 3)
    assert len(asked) == 3  # the second pass, and the second process, found the verdict
    material = json.loads(asked[0]["messages"][1]["content"])
    assert (material["asked"], material["reply"]) == (["how many?"], "four")

"""Exact continuity through a listening proxy, against an engine whose replies drift and that misbehaves."""

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from proxy_world import World, engine_settings, until, world
from toy_engine import ToyEngine, render, sampled

from capture.graph import build
from capture.parse import parse
from capture.settings import Continuity
from capture.settings import Settings as CaptureSettings
from proxy.continuity import (
    DRIFTED,
    EXACT,
    FAITHFUL,
    OUTCOMES,
    REWRITTEN,
    STRIPPED,
    TOO_LONG,
    UNENDED,
    UNKNOWN,
    UNRENDERED,
    UNSUPPORTED,
)
from proxy.metrics import CATALOGUE
from proxy.template import PROBES

CHAT = "/v1/chat/completions"
SYSTEM = {"role": "system", "content": "Talk."}


@asynccontextmanager
async def talking(
    toy: ToyEngine, root: Path, continuity: Continuity = "exact", **fields: Any
) -> AsyncIterator[World]:
    """A proxy in front of a toy engine that listens already."""
    settings = engine_settings(toy.url, **fields)
    async with world(settings, root, capture=CaptureSettings(continuity=continuity)) as hone:
        hone.store.start_run("run", "policy", {})
        yield hone


def asked(n: int) -> dict[str, str]:
    return {"role": "user", "content": f"ask {n}"}


async def say(hone: World, rollout: str, messages: list[Any], **fields: Any) -> dict[str, Any]:
    """One call; the assistant's message."""
    body = {"model": "policy", "messages": messages, **fields}
    status, answer, _ = await hone.post(f"/rollouts/{rollout}{CHAT}", body)
    assert status == 200, answer
    assert answer["model"] == "policy"
    assert "prompt_token_ids" not in answer
    message: dict[str, Any] = answer["choices"][0]["message"]
    return message


async def talk(hone: World, turns: int, rollout: str | None = None) -> list[Any]:
    """A conversation of so many calls, replayed as it was answered; its messages."""
    rollout = rollout or (await hone.opened())["id"]
    messages: list[Any] = [SYSTEM]
    for n in range(turns):
        messages.append(asked(n))
        message = await say(hone, rollout, messages)
        messages.append({name: value for name, value in message.items() if value is not None})
    return messages


def outcomes(hone: World) -> dict[str, int]:
    """What the proxy counted."""
    found = {}
    for line in hone.proxy.metrics.render().decode().splitlines():
        if line.startswith("hone_continuity_total{"):
            name, count = line.split('outcome="')[1].split('"} ')
            found[name] = int(float(count))
    assert found.keys() <= OUTCOMES.keys()
    return found


def branches(hone: World) -> int:
    return len(build([parse(raw) for raw in hone.raw_calls()]).branches())


async def test_a_conversation_that_drifts_in_every_turn_is_one_branch(tmp_path: Path) -> None:
    async with ToyEngine().listening() as toy, talking(toy, tmp_path) as hone:
        messages = await talk(hone, 4)
        assert outcomes(hone) == {EXACT: 3}
        assert branches(hone) == 1
        calls = [parse(raw) for raw in hone.raw_calls()]
        assert [call.untrainable for call in calls] == [None] * 4
        assert calls[1].prompt_ids == [
            *render([SYSTEM, asked(0)], True),
            *sampled("reply 0"),
            10,
            *render([asked(1)], True),
        ]
        raw = hone.raw_calls()[2]
        assert json.loads(raw.request)["messages"] == messages[:6]  # as the agent sent them
        note = raw.changed["kv_transfer_params"]["prompt_token_ids"]
        assert note == f"the {len(calls[1].prompt_ids) + 8} of {calls[1].id} and 25 more"
        assert toy.asked[2]["messages"] == messages[:6]


async def test_without_it_the_same_conversation_forks_in_every_turn(tmp_path: Path) -> None:
    async with ToyEngine().listening() as toy, talking(toy, tmp_path, "off") as hone:
        await talk(hone, 4)
        assert (branches(hone), outcomes(hone), toy.rendered) == (4, {}, [])


async def test_auto_begins_to_look_when_something_has_drifted(tmp_path: Path) -> None:
    async with ToyEngine().listening() as toy, talking(toy, tmp_path, "auto") as hone:
        await talk(hone, 1)
        assert toy.rendered == []
        await talk(hone, 4)
        assert (branches(hone), outcomes(hone)) == (3, {DRIFTED: 1, EXACT: 2})
        await talk(hone, 4)
        assert (branches(hone), outcomes(hone)) == (4, {DRIFTED: 1, EXACT: 5})


@pytest.mark.parametrize("continuity", ["auto", "exact"])
async def test_what_does_not_drift_needs_one_rendering_or_none(
    tmp_path: Path, continuity: Continuity
) -> None:
    async with ToyEngine(drifts=False).listening() as toy, talking(toy, tmp_path, continuity) as hone:
        messages = await talk(hone, 3)
        assert (branches(hone), outcomes(hone)) == (1, {FAITHFUL: 2})
        given = toy.asked[-1].get("kv_transfer_params")
        if continuity == "auto":
            assert (given, toy.rendered) == (None, [])
        else:
            assert given == {"prompt_token_ids": render(messages[:-1], True)}
            assert len(toy.rendered) == len(PROBES) + 2
        assert "kv_transfer_params" not in hone.raw_calls()[-1].changed


async def test_the_ids_live_in_the_store(tmp_path: Path) -> None:
    """Two proxies that answer the calls of one rollout in turns, and one that starts later."""
    async with ToyEngine().listening() as toy, talking(toy, tmp_path) as one:
        rollout = (await one.opened())["id"]
        messages: list[Any] = [SYSTEM]
        async with talking(toy, tmp_path) as other:
            for n in range(4):
                messages.append(asked(n))
                messages.append(await say((one, other)[n % 2], rollout, messages))
            assert (outcomes(one), outcomes(other)) == ({EXACT: 1}, {EXACT: 2})
        async with talking(toy, tmp_path) as late:
            messages.append(asked(4))
            messages.append(await say(late, rollout, messages))
            assert outcomes(late) == {EXACT: 1}
            assert branches(late) == 1
            seen = late.proxy.relay._bridges._tips._rollouts[rollout]
            assert (len(seen.calls), len(seen.tips)) == (5, 5)
            newest = [raw.id for raw in late.raw_calls()][-2:]
            assert [raw.id for raw in late.store.raw_calls(rollout, limit=2)] == newest
            assert [raw.id for raw in late.store.raw_calls(rollout, but=newest[:1], limit=2)] == newest[1:]


async def test_what_is_forgotten_is_read_again(tmp_path: Path) -> None:
    async with ToyEngine().listening() as toy, talking(toy, tmp_path) as hone:
        tips = hone.proxy.relay._bridges._tips
        tips._bytes_max = 1000
        rollouts = [(await hone.opened())["id"] for _ in range(3)]
        talks: dict[str, list[Any]] = {rollout: [SYSTEM] for rollout in rollouts}
        for n in range(3):
            for rollout, messages in talks.items():
                messages.append(asked(n))
                messages.append(await say(hone, rollout, messages))
        assert outcomes(hone) == {EXACT: 6}
        assert len(tips._rollouts) == 1
        assert tips._bytes == sum(one.size for one in tips._rollouts.values())


@pytest.mark.parametrize(
    ("toy", "outcome"),
    [
        (ToyEngine(render_status=403), UNSUPPORTED),
        (ToyEngine(render_status=500), UNSUPPORTED),
        (ToyEngine(takes_ids=False), UNSUPPORTED),
        (ToyEngine(refuses_ids=True), UNRENDERED),
        (ToyEngine(cut_off=True), UNENDED),
        (ToyEngine(max_model_len=95), TOO_LONG),
        (ToyEngine(strips=True, reasoning="hm"), REWRITTEN),
    ],
    ids=["no routes", "no rendering", "ignores ids", "refuses ids", "cut off", "too long", "strips"],
)
async def test_what_cannot_be_proven_goes_as_it_came(tmp_path: Path, toy: ToyEngine, outcome: str) -> None:
    async with toy.listening(), talking(toy, tmp_path) as hone:
        await talk(hone, 3)
        assert outcomes(hone) == ({outcome: 2} if outcome != TOO_LONG else {EXACT: 1, TOO_LONG: 1})
        last = hone.raw_calls()[-1]
        assert (last.status, last.changed.get("kv_transfer_params")) == (200, None)
        assert "kv_transfer_params" not in toy.asked[-1]
        if outcome == UNSUPPORTED:  # found out once
            assert len(toy.rendered) <= 9


async def test_reasoning_that_no_template_writes_is_not_put_back(tmp_path: Path) -> None:
    """This one drops it always, so what follows a reply does not depend on it; the sampled ids hold it."""
    toy = ToyEngine(reasoning="hm")
    async with toy.listening(), talking(toy, tmp_path) as hone:
        rollout = (await hone.opened())["id"]
        first = await say(hone, rollout, [SYSTEM, asked(0)])
        toy.reasoning = None
        toy.drops_reasoning = True
        reply = {"role": "assistant", "content": first["content"]}
        await say(hone, rollout, [SYSTEM, asked(0), reply, asked(1)])
        assert outcomes(hone) == {STRIPPED: 1}


@pytest.mark.parametrize("keeps", [True, False], ids=["replayed", "left out"])
async def test_reasoning_that_the_template_keeps_stays_as_it_was_sampled(tmp_path: Path, keeps: bool) -> None:
    """Tools are called between a question and its answer: nothing is stripped, whatever clients leave out."""
    toy = ToyEngine(strips=True, reasoning="hm", calls=True)
    async with toy.listening(), talking(toy, tmp_path) as hone:
        rollout = (await hone.opened())["id"]
        messages: list[Any] = [SYSTEM, asked(0)]
        for _ in range(3):
            said = await say(hone, rollout, messages)
            if not keeps:
                del said["reasoning_content"]
            messages += [said, {"role": "tool", "tool_call_id": said["tool_calls"][0]["id"], "content": "ok"}]
        assert (branches(hone), outcomes(hone)) == (1, {EXACT: 2})
        await say(hone, rollout, [*messages, asked(1)])
        assert (branches(hone), outcomes(hone)) == (2, {EXACT: 2, REWRITTEN: 1})


async def test_auto_leaves_templates_alone_that_take_reasoning_out(tmp_path: Path) -> None:
    toy = ToyEngine(strips=True)
    async with toy.listening(), talking(toy, tmp_path, "auto") as hone:
        await talk(hone, 4)
        assert outcomes(hone) == {DRIFTED: 1, UNSUPPORTED: 2}


async def test_an_agent_that_leaves_while_its_call_is_rendered(tmp_path: Path) -> None:
    async with ToyEngine().listening() as toy, talking(toy, tmp_path) as hone:
        rollout = (await hone.opened())["id"]
        messages = [*await talk(hone, 2, rollout), asked(2)]
        toy.hangs.set()
        leaving = asyncio.create_task(say(hone, rollout, messages))
        await until(lambda: len(toy.rendered) == len(PROBES) + 3)
        leaving.cancel()
        await asyncio.gather(leaving, return_exceptions=True)
        left = (await hone.raw_calls_when(3))[-1]
        assert (left.status, left.response, len(toy.asked)) == (499, b"", 2)
        toy.hangs.clear()
        await say(hone, rollout, messages)
        assert outcomes(hone) == {EXACT: 2}
        assert branches(hone) == 2  # the call that was left stays alone


async def test_another_history_is_another_conversation(tmp_path: Path) -> None:
    async with ToyEngine().listening() as toy, talking(toy, tmp_path) as hone:
        rollout = (await hone.opened())["id"]
        messages = await talk(hone, 2, rollout)
        await say(hone, rollout, [{**SYSTEM, "content": "Be brief."}, *messages[1:], asked(2)])
        assert outcomes(hone) == {EXACT: 1, UNKNOWN: 1}
        await say(hone, rollout, [*messages[:3], asked(3)])  # goes on from an earlier answer
        assert outcomes(hone) == {EXACT: 2, UNKNOWN: 1}
        assert branches(hone) == 3


async def test_evaluated_and_observed_calls_pass_as_they_came(tmp_path: Path) -> None:
    async with ToyEngine().listening() as toy, talking(toy, tmp_path) as hone:
        await talk(hone, 3, (await hone.opened(mode="eval"))["id"])
        headers = {"X-Session-ID": "s"}
        for n in range(2):
            body = {"model": "policy", "messages": [SYSTEM, asked(0), {"role": "assistant", "content": "x"}]}
            status, _, _ = await hone.post(CHAT, {**body, "user": str(n)}, headers)
            assert status == 200
        assert (outcomes(hone), toy.rendered) == ({}, [])
        assert not any("kv_transfer_params" in body for body in toy.asked)


def test_every_outcome_is_in_the_catalogue() -> None:
    (row,) = (row for row in CATALOGUE if row.name == "hone_continuity_total")
    assert all(outcome in row.meaning for outcome in OUTCOMES)

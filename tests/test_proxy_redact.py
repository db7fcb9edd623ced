"""Redaction over the wire: agents get what was answered, the store and the log never do."""

import json
import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web
from proxy_world import (
    COMPLETION,
    USER,
    FakeUpstream,
    World,
    capture_settings,
    chunk,
    engine_settings,
    streaming,
    world,
)
from redaction_world import everything, is_stored
from test_proxy_bridges import asked, outcomes, say
from test_proxy_stitched import obey, said, user
from toy_engine import ToyEngine, sampled

from capture.ingest import Ingester
from capture.settings import Continuity
from capture.settings import Settings as CaptureSettings
from capture.tokens import packed
from proxy.continuity import EXACT, UNKNOWN

CHAT = "/v1/chat/completions"
CANARY = "CANARY-00c0ffee"
REDACT = CaptureSettings(redact=("CANARY-[0-9a-f]{8}", "email"))
SYSTEM = {"role": "system", "content": "Talk."}


@asynccontextmanager
async def against(handler: Any, root: Path, capture: CaptureSettings = REDACT) -> AsyncIterator[World]:
    async with (
        FakeUpstream(handler).listening() as upstream,
        world(capture_settings(upstream.url), root, capture=capture) as hone,
    ):
        yield hone


@asynccontextmanager
async def talking(toy: ToyEngine, root: Path, continuity: Continuity = "exact") -> AsyncIterator[World]:
    settings = engine_settings(toy.url)
    capture = CaptureSettings(continuity=continuity, redact=REDACT.redact)
    async with world(settings, root, capture=capture) as hone:
        hone.store.start_run("run", "policy", {})
        yield hone


def untrainable(hone: World) -> dict[str, float]:
    """What the proxy counted."""
    (family,) = hone.proxy.metrics.untrainable.collect()
    return {one.labels["reason"]: one.value for one in family.samples if one.name.endswith("_total")}


async def answered(hone: World, body: Any, path: str = CHAT, **headers: str) -> tuple[int, bytes]:
    async with hone.client.post(hone.url + path, json=body, headers=headers) as response:
        return response.status, await response.read()


# -- what agents get -----------------------------------------------------------------------------


async def echo(request: web.Request) -> web.Response:
    message = {
        "role": "assistant",
        "content": f"you said {(await request.json())['messages'][-1]['content']}",
    }
    return web.json_response(
        {**COMPLETION, "choices": [{"index": 0, "message": message, "finish_reason": "stop"}]}
    )


async def test_an_agent_gets_its_answer_untouched(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)
    async with against(echo, tmp_path) as hone:
        status, body = await answered(hone, {"model": "gpt", "messages": [user(CANARY)], "user": CANARY})
        assert (status, json.loads(body)["choices"][0]["message"]["content"]) == (200, f"you said {CANARY}")
        (raw,) = hone.raw_calls()
        assert json.loads(raw.response)["choices"][0]["message"]["content"] == "you said [redacted]"
        assert (raw.redacted, json.loads(raw.request)["user"]) == (True, "[redacted]")
        Ingester(hone.store).step()
        assert not is_stored(CANARY, tmp_path)
    assert CANARY not in caplog.text


async def test_so_does_one_that_streams(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)
    pieces = [chunk("it is "), chunk(CANARY[:5]), chunk(CANARY[5:9]), chunk(CANARY[9:]), chunk("", "stop")]
    streams = streaming(*pieces, b"data: [DONE]\n\n")
    async with against(streams, tmp_path) as hone:
        status, body = await answered(hone, {"model": "real", "messages": [USER], "stream": True})
        texts = [json.loads(line[6:])["choices"][0]["delta"]["content"] for line in body.split(b"\n\n")[:-2]]
        assert (status, "".join(texts)) == (200, f"it is {CANARY}")
        (raw,) = hone.raw_calls()
        (choice,) = json.loads(raw.response)["choices"]
        message = {"role": "assistant", "content": "it is [redacted]"}
        assert choice == {"index": 0, "message": message, "finish_reason": "stop"}
        Ingester(hone.store).step()
        assert not is_stored(CANARY, tmp_path)
    assert CANARY not in caplog.text


@pytest.mark.parametrize("stream", [False, True])
async def test_calls_without_a_match_are_stored_as_ever(tmp_path: Path, stream: bool) -> None:
    handler = streaming(chunk("a "), chunk("b", "stop"), b"data: [DONE]\n\n") if stream else echo
    body = {"model": "gpt", "messages": [USER], "stream": stream}
    stored = []
    for folder, capture in (("without", CaptureSettings()), ("with", REDACT)):
        (tmp_path / folder).mkdir()
        async with against(handler, tmp_path / folder, capture) as hone:
            assert (await answered(hone, body))[0] == 200
            stored += hone.raw_calls()
    names = ("request", "response", "stream", "changed", "route", "body_hash", "status", "redacted", "error")
    first, second = ({name: getattr(raw, name) for name in names} for raw in stored)
    assert first == second


async def test_errors_and_garbage(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)

    async def refuse(request: web.Request) -> web.Response:
        said = (await request.json())["messages"][-1]["content"]
        if said == "garbage":
            return web.Response(body=f"<{CANARY}>".encode(), content_type="application/json")
        if said == "server":
            return web.Response(body=CANARY.encode(), status=500)
        return web.json_response({"error": {"message": f"no {CANARY}"}}, status=400)

    async with against(refuse, tmp_path) as hone:
        for said, expected in (("garbage", 502), ("server", 502), ("client", 400)):
            status, body = await answered(hone, {"model": CANARY, "messages": [user(said)]})
            assert status == expected
            assert said == "garbage" or CANARY.encode() in body  # the agent is told what the upstream said
        raws = hone.raw_calls()
        assert [raw.response for raw in raws] == [
            b"<[redacted]>",
            b"[redacted]",
            b'{"error": {"message": "no [redacted]"}}',
        ]
        assert [raw.route for raw in raws] == ["[redacted]"] * 3
        Ingester(hone.store).step()
        assert not is_stored(CANARY, tmp_path)
    assert CANARY not in caplog.text


async def test_an_agent_that_leaves(tmp_path: Path) -> None:
    pieces = [chunk(CANARY[:5]), chunk(CANARY[5:])] * 2 + [chunk("x")] * 50
    async with against(streaming(*pieces, pause_s=0.05), tmp_path) as hone:
        body = {"model": "gpt", "messages": [USER], "stream": True}
        async with hone.client.post(hone.url + CHAT, json=body) as response:
            seen = b""
            while seen.count(b"data:") < 4:
                seen += await response.content.readany()
        (raw,) = await hone.raw_calls_when(1)
        assert (raw.status, raw.redacted, raw.stream) == (499, True, False)
        assert not is_stored(CANARY, tmp_path)


# -- what is stored beside calls -----------------------------------------------------------------


async def test_stdout_and_what_headers_name(tmp_path: Path) -> None:
    async with against(echo, tmp_path) as hone:
        opened = await hone.opened(mode="train", metadata={"owner": "own@example.org"})
        finish = {"status": "completed", "stdout": f"key {CANARY}\nfrom a@example.org"}
        status, rollout, _ = await hone.post(f"/rollouts/{opened['id']}/finish", finish)
        assert (status, rollout["stdout"]) == (200, "key [redacted]\nfrom [redacted:email]")
        assert hone.store.rollout(opened["id"]).metadata == {"owner": "own@example.org"}  # as it was given
        body = {"model": "gpt", "messages": [USER]}
        for session in (CANARY, CANARY, CANARY[:-1] + "f"):
            headers = {"X-Session-ID": session, "X-Scenario-ID": CANARY, "X-Group-ID": CANARY}
            assert (await answered(hone, body, **headers))[0] == 200
        first, again, other = (raw.rollout_id for raw in hone.raw_calls())
        assert first == again != other
        found = hone.store.rollout(first)
        assert [name[:10] for name in (found.session, found.scenario_id)] == ["[redacted:"] * 2
        assert not is_stored(CANARY, tmp_path)


async def test_idempotency_keys(tmp_path: Path) -> None:
    async with against(echo, tmp_path) as hone:
        await answered(hone, {"model": "gpt", "messages": [USER]}, **{"Idempotency-Key": f"a {CANARY}"})
        (raw,) = hone.raw_calls()
        assert (raw.idempotency_key, raw.redacted) == ("a [redacted]", True)
        assert not is_stored(CANARY, tmp_path)


# -- stitching and continuity --------------------------------------------------------------------


async def test_a_conversation_that_was_redacted_is_found_again_and_strangers_stay_apart(
    tmp_path: Path,
) -> None:
    async with against(obey, tmp_path) as hone:
        rollouts = []
        for mail in ("a@example.org", "b@example.org"):
            first = [user("my mail"), user(mail)]
            headers = []
            for messages in (first, [*first, said(mail), user("and now?")]):
                body = {"model": "gpt", "messages": messages}
                async with hone.client.post(hone.url + CHAT, json=body) as response:
                    await response.read()
                    headers.append(response.headers["x-hone-rollout-id"])
            assert headers[0] == headers[1]
            rollouts.append(headers[0])
        assert rollouts[0] != rollouts[1]
        raws = hone.raw_calls()
        assert [raw.attribution for raw in raws] == ["headless", "stitched"] * 2
        assert all(raw.redacted for raw in raws)
        stored = [json.loads(raw.request)["messages"] for raw in raws]
        assert stored[0] == stored[2]  # nothing of what differs was kept
        assert not is_stored("a@example.org", tmp_path)


async def test_ids_that_spell_a_secret_do_not_come_back_in_later_prompts(tmp_path: Path) -> None:
    """The second reply's reasoning holds it; the agent leaves that out, so its third request is clean."""
    toy = ToyEngine(strips=True, calls=True)
    secret_ids = sampled(CANARY)[:-1]
    async with toy.listening(), talking(toy, tmp_path) as hone:
        rollout = (await hone.opened())["id"]
        messages: list[Any] = [SYSTEM, asked(0)]
        for reasoning in ("hm", CANARY, "so", "well"):
            toy.reasoning = reasoning
            reply = await say(hone, rollout, messages)
            assert reply.pop("reasoning_content") == reasoning
            messages += [
                reply,
                {"role": "tool", "tool_call_id": reply["tool_calls"][0]["id"], "content": "ok"},
            ]
        raws = hone.raw_calls()
        assert [raw.redacted for raw in raws] == [False, True, False, False]
        Ingester(hone.store).step()
        calls = hone.store.calls(rollout)
        assert [call.untrainable for call in calls] == [None, "redacted", None, None]
        # The third goes on from the first's ids; the second is there only as the agent replayed it.
        assert outcomes(hone) == {EXACT: 3}
        before = calls[0].prompt_ids + calls[0].sampled_ids
        assert calls[2].prompt_ids[: len(before)] == before
        assert packed(secret_ids) not in packed([id for call in calls for id in call.prompt_ids])
        assert calls[3].prompt_ids[: len(calls[2].prompt_ids)] == calls[2].prompt_ids
        assert not is_stored(CANARY, tmp_path)
        assert ",".join(map(str, secret_ids)).encode() not in everything(tmp_path)
        assert untrainable(hone) == {"redacted": 1}


async def test_without_redaction_they_would(tmp_path: Path) -> None:
    """What the test above looks for does come back where nobody takes care."""
    toy = ToyEngine(strips=True, calls=True, reasoning=CANARY)
    capture = CaptureSettings(continuity="exact")
    async with toy.listening(), world(engine_settings(toy.url), tmp_path, capture=capture) as hone:
        hone.store.start_run("run", "policy", {})
        rollout = (await hone.opened())["id"]
        messages: list[Any] = [SYSTEM, asked(0)]
        for _ in range(2):
            reply = await say(hone, rollout, messages)
            del reply["reasoning_content"]
            messages += [
                reply,
                {"role": "tool", "tool_call_id": reply["tool_calls"][0]["id"], "content": "ok"},
            ]
        Ingester(hone.store).step()
        last = hone.store.calls(rollout)[-1]
        assert packed(sampled(CANARY)[:-1]) in packed(last.prompt_ids)
        assert is_stored(CANARY, tmp_path)


async def test_a_secret_in_the_history_is_taken_out_of_every_later_call(tmp_path: Path) -> None:
    toy = ToyEngine()
    async with toy.listening(), talking(toy, tmp_path) as hone:
        rollout = (await hone.opened())["id"]
        messages: list[Any] = [SYSTEM, asked(0)]
        messages.append(await say(hone, rollout, messages))
        messages.append(user(CANARY))
        for n in range(3):
            messages.append(await say(hone, rollout, messages))
            messages.append(asked(n))
        Ingester(hone.store).step()
        calls = hone.store.calls(rollout)
        assert [call.untrainable for call in calls] == [None] + ["redacted"] * 3
        assert [len(call.prompt_ids) > 0 for call in calls] == [True, False, False, False]
        assert [call.completion_tokens for call in calls] == [8] * 4  # counted all the same
        assert outcomes(hone) == {EXACT: 3}  # from the first's ids, as long as that is the last known
        assert hone.store.balance("policy").untrainable == {"redacted": 24}
        assert not is_stored(CANARY, tmp_path)


async def test_a_proxy_that_reads_the_store_treats_redacted_calls_alike(tmp_path: Path) -> None:
    toy = ToyEngine()
    async with toy.listening(), talking(toy, tmp_path) as one, talking(toy, tmp_path) as other:
        rollout = (await one.opened())["id"]
        messages: list[Any] = [SYSTEM, user(CANARY)]
        for n in range(4):
            messages.append(await say((one, other)[n % 2], rollout, messages))
            messages.append(asked(n))
        assert outcomes(one) == {UNKNOWN: 1}
        assert outcomes(other) == {UNKNOWN: 2}
        assert not is_stored(CANARY, tmp_path)

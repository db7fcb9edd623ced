"""Calls without any name, over the wire: found again, kept apart, continued, counted."""

import asyncio
import json
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web
from capture_makers import raw_call, rollout
from proxy_world import COMPLETION, FakeUpstream, World, capture_settings, until, world
from test_proxy_attribution import CHAT, KEYS, auth
from test_proxy_relay import locked

from capture.errors import NotFound
from capture.frames import pack
from capture.journal import Journal
from capture.settings import Settings as JournalSettings
from capture.sqlite import SqliteStore
from capture.types import RawCall, Stitch
from proxy.attribution import first_of

ID = "chatcmpl-tool-0f4c4e2fe8a627625e040305d8291e67"


async def obey(request: web.Request) -> web.StreamResponse:
    """Answers what the last message says, or calls the tool that it names; several choices if asked."""
    asked = await request.json()
    text = asked["messages"][-1]["content"]
    messages = [_message(text, n) for n in range(asked.get("n", 1))]
    if not asked.get("stream"):
        choices = [
            {"index": n, "message": message, "finish_reason": "stop"} for n, message in enumerate(messages)
        ]
        return web.json_response({**COMPLETION, "choices": choices})
    response = web.StreamResponse(headers={"content-type": "text/event-stream"})
    await response.prepare(request)
    for n, message in enumerate(messages):
        content = message["content"] or ""
        calls = [{"index": 0, **call} for call in message.get("tool_calls", ())]
        deltas = [
            {"role": "assistant", "content": content[:2]},
            {"content": content[2:], "tool_calls": calls},
        ]
        for delta in deltas:
            await response.write(_chunk(n, delta, None))
        if text == "hang":
            await asyncio.sleep(60)
        await response.write(_chunk(n, {}, "stop"))
    await response.write(b"data: [DONE]\n\n")
    return response


def _message(text: str, n: int) -> dict[str, Any]:
    if text.startswith("tool "):
        call = {"id": text[5:], "type": "function", "function": {"name": "play", "arguments": '{"cell": 1}'}}
        return {"role": "assistant", "content": None, "tool_calls": [call]}
    return {"role": "assistant", "content": text + str(n or "")}


def _chunk(index: int, delta: dict[str, Any], finish: str | None) -> bytes:
    choice = {"index": index, "delta": delta, "finish_reason": finish}
    return b"data: " + json.dumps({"id": "x", "model": "real", "choices": [choice]}).encode() + b"\n\n"


@asynccontextmanager
async def obeying(root: Path, **fields: Any) -> AsyncIterator[World]:
    fields.setdefault("head_ttl_s", 0.0)
    async with (
        FakeUpstream(obey).listening() as upstream,
        world(capture_settings(upstream.url, **fields), root) as hone,
    ):
        yield hone


def user(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}


def said(text: str) -> dict[str, str]:
    return {"role": "assistant", "content": text}


async def ask(
    hone: World, *messages: Any, headers: dict[str, str] | None = None, path: str = CHAT, **more: Any
) -> str:
    """The rollout that the call was found to belong to."""
    body = {"model": "gpt", "messages": messages, **more}
    async with hone.client.post(hone.url + path, json=body, headers=headers) as response:
        await response.read()
        assert response.status == 200
        return response.headers["x-hone-rollout-id"]


def counted(hone: World) -> dict[tuple[str, str], float]:
    """Attribution and reason -> calls."""
    (family,) = hone.proxy.metrics.attributed.collect()
    return {
        (sample.labels["attribution"], sample.labels["reason"]): sample.value
        for sample in family.samples
        if sample.name.endswith("_total")
    }


async def test_a_conversation_without_a_name_is_one_rollout_whole_or_streamed(tmp_path: Path) -> None:
    async with obeying(tmp_path) as hone:
        first = await ask(hone, user("one"))
        assert await ask(hone, user("one"), said("one"), user("two"), stream=True) == first
        long = [user("one"), said("one"), user("two"), said("two")]
        assert await ask(hone, *long, user("three")) == first
        assert await ask(hone, *long, user("else"), stream=True) == first  # two of one agent at once
        other = await ask(hone, user("other"))
        assert other != first
        assert await ask(hone, user("other"), said("other"), user("two")) == other
        assert await ask(hone, user("one"), said("what it never said"), user("two")) not in (first, other)
        rollout = hone.store.rollout(first)
        assert (rollout.headless, rollout.mode, rollout.group_id, rollout.call_count) == (
            True,
            "observe",
            None,
            4,
        )
        assert [raw.attribution for raw in hone.raw_calls() if raw.rollout_id == first] == [
            "headless",
            *["stitched"] * 3,
        ]
        assert counted(hone) == {
            ("headless", "no_history"): 2,
            ("stitched", "prefix"): 4,
            ("headless", "unknown"): 1,
        }


async def test_a_random_tool_call_id_decides_whatever_else_was_rewritten(tmp_path: Path) -> None:
    async with obeying(tmp_path) as hone:
        for stream in (False, True):
            id = ID[:-1] + str(int(stream))
            first = await ask(hone, user("go"), user(f"tool {id}"), stream=stream)
            calls = {
                "tool_calls": [
                    {"id": id, "type": "function", "function": {"name": "play", "arguments": "{}"}}
                ]
            }
            history = [
                {"role": "assistant", **calls},
                {"role": "tool", "tool_call_id": id, "content": "done"},
            ]
            assert (
                await ask(hone, {"role": "system", "content": "new"}, user("(left out)"), *history) == first
            )
            # The answer to that one is on record too.
            assert await ask(hone, user("(left out)"), *history, said("done"), user("more")) == first
        assert counted(hone)["stitched", "tool_call"] == 4


async def test_a_numbered_tool_call_id_decides_nothing(tmp_path: Path) -> None:
    async with obeying(tmp_path) as hone:
        first = await ask(hone, user("a"), user("tool call_0"))
        second = await ask(hone, user("b"), user("tool call_0"))
        calls = {"tool_calls": [{"id": "call_0", "function": {"name": "play", "arguments": '{"cell":1}'}}]}
        history = [
            {"role": "assistant", **calls},
            {"role": "tool", "tool_call_id": "call_0", "content": "done"},
        ]
        assert await ask(hone, user("a"), user("tool call_0"), *history) == first
        assert await ask(hone, user("b"), user("tool call_0"), *history) == second
        assert await ask(hone, user("c"), user("tool call_0"), *history) not in (first, second)


async def test_a_random_id_that_an_upstream_gave_twice_decides_nothing(tmp_path: Path) -> None:
    async with obeying(tmp_path) as hone:
        calls = {
            "tool_calls": [
                {"id": ID, "type": "function", "function": {"name": "play", "arguments": '{"cell": 1}'}}
            ]
        }
        history = [{"role": "assistant", **calls}, {"role": "tool", "tool_call_id": ID, "content": "done"}]
        first = await ask(hone, user("a"), user(f"tool {ID}"))
        assert await ask(hone, user("a"), user(f"tool {ID}"), *history) == first
        second = await ask(hone, user("b"), user(f"tool {ID}"))  # a cache, say
        assert await ask(hone, user("a"), user(f"tool {ID}"), *history) == first  # by its prefix
        assert await ask(hone, user("b"), user(f"tool {ID}"), *history) == second
        assert await ask(hone, user("?"), *history) not in (first, second)


async def test_strangers_with_one_conversation_are_apart_for_good(tmp_path: Path) -> None:
    async with obeying(tmp_path) as hone:
        one = await ask(hone, user("hi"))
        assert await ask(hone, user("hi"), said("hi"), user("one")) == one
        two = await ask(hone, user("hi"))
        assert two != one
        # From here on nobody knows who goes on from "hi", neither one nor two.
        lost = [await ask(hone, user("hi"), said("hi"), user(text)) for text in ("one", "two", "three")]
        assert len({one, two, *lost}) == 5
        # What only one of them said since then is theirs alone.
        assert await ask(hone, user("hi"), said("hi"), user("two"), said("two"), user("on")) == lost[1]
        # "one" was said in two rollouts by now.
        assert await ask(hone, user("hi"), said("hi"), user("one"), said("one"), user("on")) not in (
            one,
            *lost,
        )
        assert counted(hone)["headless", "ambiguous"] == 4
        assert all(hone.store.rollout(id).headless for id in (one, two, *lost))


async def test_every_choice_can_be_gone_on_from(tmp_path: Path) -> None:
    async with obeying(tmp_path) as hone:
        for stream in (False, True):
            text = f"hi {stream}"
            first = await ask(hone, user(text), n=3, stream=stream)
            for choice in (text, text + "1", text + "2"):
                assert await ask(hone, user(text), said(choice), user("on")) == first


async def test_an_answer_that_was_stopped_can_be_gone_on_from(tmp_path: Path) -> None:
    async with obeying(tmp_path) as hone:
        body = {"model": "gpt", "messages": [user("hang")], "stream": True}
        async with hone.client.post(hone.url + CHAT, json=body) as response:
            first = response.headers["x-hone-rollout-id"]
            await response.content.readuntil(b"\n\n")
            await response.content.readuntil(b"\n\n")
            response.close()
        await hone.raw_calls_when(1)
        assert await ask(hone, user("hang"), said("hang"), user("on")) == first


async def test_keys_do_not_meet(tmp_path: Path) -> None:
    async with obeying(tmp_path, keys=KEYS) as hone:
        ann, bob = auth("sk-ann"), auth("sk-bob")
        first = await ask(hone, user("hi"), headers=ann)
        other = await ask(hone, user("hi"), said("hi"), user("on"), headers=bob)
        assert other != first
        assert hone.store.rollout(other).key_id == "bob"
        assert await ask(hone, user("hi"), headers=bob) not in (first, other)
        assert await ask(hone, user("hi"), said("hi"), user("on"), headers=ann) == first


async def test_calls_that_say_whose_they_are_are_neither_stitched_nor_stitched_to(tmp_path: Path) -> None:
    async with obeying(tmp_path) as hone:
        opened = await hone.opened()
        named = [
            await ask(hone, user("hi"), path=f"/rollouts/{opened['id']}{CHAT}"),
            await ask(hone, user("hi"), headers={"X-Session-ID": "s"}),
        ]
        assert hone.store._rows("SELECT * FROM stitches") == []
        nobody = await ask(hone, user("hi"))
        assert nobody not in named
        more = (user("hi"), said("hi"), user("on"))
        assert await ask(hone, *more, headers={"X-Session-ID": "s"}) == named[1]
        assert await ask(hone, *more) == nobody
        assert counted(hone) == {
            ("path", "named"): 1,
            ("header", "named"): 2,
            ("headless", "no_history"): 1,
            ("stitched", "prefix"): 1,
        }
        (family,) = hone.proxy.metrics.opened.collect()
        opened_by = {
            sample.labels["attribution"]: sample.value for sample in family.samples if sample.value < 1e6
        }
        assert opened_by == {"api": 1, "header": 1, "headless": 1}


async def test_a_sealed_rollout_is_continued_by_one_for_all_who_remember_it(tmp_path: Path) -> None:
    async with obeying(tmp_path) as hone:
        first = await ask(hone, user("hi"))
        hone.store.seal_rollout(first, "completed")
        second = await ask(hone, user("hi"), said("hi"), user("two"))
        assert second != first
        rollout = hone.store.rollout(second)
        assert (rollout.metadata, rollout.headless, first_of(rollout)) == ({"continues": first}, True, first)
        assert await ask(hone, user("hi"), said("hi"), user("else")) == second
        long = [user("hi"), said("hi"), user("two"), said("two"), user("three")]
        assert await ask(hone, *long) == second
        hone.store.seal_rollout(second, "completed")
        third = await ask(hone, *long[:3], said("two"), user("else"))
        assert third not in (first, second)
        assert hone.store.rollout(third).metadata == {"continues": first}
        assert await ask(hone, user("hi"), said("hi"), user("again")) == third
        assert await ask(hone, user("hi"), path=f"/rollouts/{second}{CHAT}") == third


async def test_another_proxy_and_a_restarted_one_know_the_same(tmp_path: Path) -> None:
    async with obeying(tmp_path) as hone:
        first = await ask(hone, user("hi"))
        async with obeying(tmp_path) as other:
            assert await ask(other, user("hi"), said("hi"), user("on")) == first
            assert await ask(other, user("hi")) != first
        assert await ask(hone, user("hi"), said("hi"), user("else")) != first  # shared since then
    async with obeying(tmp_path) as hone:
        long = (user("hi"), said("hi"), user("on"), said("on"), user("more"))
        assert await ask(hone, *long) == first


async def test_a_marked_retry_of_an_answer_that_was_lost_is_no_stranger(tmp_path: Path) -> None:
    async with obeying(tmp_path) as hone:
        for marked in (True, False):
            text = f"hi {marked}"
            lost = await ask(hone, user(text))
            (raw,) = [raw for raw in hone.raw_calls() if raw.rollout_id == lost]
            hone.store.mark_undelivered([raw.id])
            headers = {"x-stainless-retry-count": "1"} if marked else {}
            again = await ask(hone, user(text), headers=headers)
            assert again != lost  # nothing says whose it is, and the lost one is never gone on from
            on = await ask(hone, user(text), said(text), user("on"))
            assert (on == again) == marked


async def test_an_answer_served_uncaptured_is_nobodys(tmp_path: Path) -> None:
    async with obeying(tmp_path, commit_timeout_s=0.2, in_flight_interval_s=0.05) as hone:
        first = await ask(hone, user("hi"))
        with locked(tmp_path):
            assert await ask(hone, user("hi")) != first
            # Its agent must not be taken for the first one, here at once, elsewhere once it is written.
            body = {"model": "gpt", "messages": [user("hi"), said("hi"), user("on")]}
            assert (await hone.post(CHAT, body))[2]["x-hone-rollout-id"] != first
        shared = "SELECT 1 FROM stitches WHERE rollout_id IS NULL"
        await until(lambda: bool(hone.store._rows(shared)))
        async with obeying(tmp_path) as other:
            assert await ask(other, user("hi"), said("hi"), user("on")) != first


async def test_stitches_are_forgotten_after_a_time(tmp_path: Path) -> None:
    async with obeying(tmp_path) as hone:
        await ask(hone, user("hi"))
        assert hone.store._rows("SELECT count(*) FROM stitches") == [(1,)]
    async with obeying(tmp_path, stitch_retention_s=0.0) as hone:
        await until(lambda: hone.store._rows("SELECT count(*) FROM stitches") == [(0,)])


# -- the store ------------------------------------------------------------------------------------


@pytest.fixture
def store(tmp_path: Path) -> Iterator[SqliteStore]:
    opened = SqliteStore(tmp_path / "store.sqlite")
    yield opened
    assert opened.verify() == []
    opened.close()


def commit(store: SqliteStore, record: RawCall, *digests: bytes) -> None:
    stitches = {record.id: [Stitch(digest, record.rollout_id) for digest in digests]}
    store.commit_calls(pack([record]), [record], [], stitches)


def test_what_two_rollouts_wrote_is_shared_and_stays_so(store: SqliteStore) -> None:
    one, two = store.open_rollout(rollout()).id, store.open_rollout(rollout()).id
    commit(store, raw_call(one), b"d", b"e")
    commit(store, raw_call(one), b"d")
    asked = [("k", b"d"), ("k", b"e"), ("k", b"x"), ("other", b"d")]
    assert store.stitched(asked) == {("k", b"d"): one, ("k", b"e"): one}
    commit(store, raw_call(two), b"d")
    assert store.stitched(asked) == {("k", b"d"): None, ("k", b"e"): one}
    commit(store, raw_call(one), b"d")
    assert store.stitched(asked) == {("k", b"d"): None, ("k", b"e"): one}
    store.share_stitches([("k", b"e"), ("other", b"d")])
    assert store.stitched(asked) == {("k", b"d"): None, ("k", b"e"): None, ("other", b"d"): None}
    assert store.stitched([]) == {}
    assert store.prune_stitches(60.0) == 0
    assert store.prune_stitches(-1.0) == 3
    assert store.stitched(asked) == {}


def test_a_call_that_is_committed_again_or_not_at_all_writes_nothing(store: SqliteStore) -> None:
    one = store.open_rollout(rollout()).id
    record = raw_call(one)
    commit(store, record, b"d")
    store.prune_stitches(-1.0)
    commit(store, record, b"d")
    with pytest.raises(NotFound):
        commit(store, raw_call("r_nowhere"), b"e")
    assert store.stitched([("k", b"d"), ("k", b"e")]) == {}


def test_only_the_marked_repetition_of_a_lost_answer_takes_its_place(store: SqliteStore) -> None:
    cases = {  # lost, body of the later call, its retry count, its key -> whether it takes the digest over
        (True, b"a", 1, None): True,
        (True, b"a", 0, None): False,
        (True, b"b", 1, None): False,
        (False, b"a", 1, None): False,
        (True, b"a", 0, "one"): True,
        (True, b"a", 0, "two"): False,
        (True, b"b", 0, "one"): False,
        (False, b"a", 0, "one"): False,
    }
    for n, ((lost, body, count, key), expected) in enumerate(cases.items()):
        first, second = store.open_rollout(rollout()).id, store.open_rollout(rollout()).id
        digest = bytes([n])
        record = raw_call(first, body_hash=b"a", idempotency_key="one")
        commit(store, record, digest)
        if lost:
            store.mark_undelivered([record.id])
        commit(store, raw_call(second, body_hash=body, retry_count=count, idempotency_key=key), digest)
        assert store.stitched([("k", digest)]) == {("k", digest): second if expected else None}


async def test_the_journal_keeps_each_calls_stitches_with_it(store: SqliteStore, tmp_path: Path) -> None:
    own = SqliteStore(tmp_path / "store.sqlite")
    journal = Journal(own, JournalSettings())
    journal.start()
    ids = [store.open_rollout(rollout()).id for _ in range(5)]
    calls = [raw_call(id) for id in [*ids, "r_nowhere"]]
    found = await asyncio.gather(
        *(journal.commit(raw, None, [Stitch(raw.id.encode(), raw.rollout_id)]) for raw in calls),
        return_exceptions=True,
    )
    assert [type(one) for one in found] == [RawCall] * 5 + [NotFound]
    known = store.stitched([("k", raw.id.encode()) for raw in calls])
    assert known == {("k", raw.id.encode()): raw.rollout_id for raw in calls[:5]}
    await journal.close()
    own.close()

"""Whatever a client makes of a conversation, it is recognised; what says something else is not it."""

import json
import time
import uuid
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from replaying_clients import CLIENTS, TOOL_CLIENTS, verbatim

from proxy import replay
from proxy.replay import Trail, message_of

TEXT = st.text(st.characters(codec="utf-8"), max_size=12) | st.sampled_from(
    [
        " a\n",
        "hm</think>go",
        "<think>a</think>\n\nb",
        "Calling tools:\n",
        "Calling tools:\n[{'id': 'x'}]",
        "[]",
    ]
)
JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**53), 2**53)
    | st.floats(allow_nan=False, allow_infinity=False)
    | TEXT,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXT, inner, max_size=3),
    max_leaves=6,
)
IDS = st.sampled_from(["call_0", "functions.play:1", f"chatcmpl-tool-{uuid.uuid4().hex}"])


@st.composite
def tool_call(draw: Any) -> dict[str, Any]:
    arguments = json.dumps(draw(st.dictionaries(TEXT, JSON, max_size=3)), ensure_ascii=draw(st.booleans()))
    function = {"name": draw(st.sampled_from(["play", "pass"])), "arguments": arguments}
    return {"id": draw(IDS), "type": "function", "function": function}


SAYING = st.fixed_dictionaries({"content": TEXT}, optional={"reasoning_content": TEXT})
CALLING = st.fixed_dictionaries(
    {"content": st.none() | TEXT, "tool_calls": st.lists(tool_call(), min_size=1, max_size=3)},
    optional={"reasoning_content": TEXT},
)


def trail(messages: list[dict[str, Any]]) -> Trail:
    found = replay.read(json.dumps(messages).encode())
    assert found is not None
    return found


def goes_on(client: Any, answer: dict[str, Any]) -> bool:
    """Whether the client's next call is recognised by what this answer left behind."""
    asked = trail(client([{"user": "go"}]))
    prefix, *ids = asked.then(message_of(answer))
    next = [{"result": "done", "id": "x"}] if answer.get("tool_calls") else [{"user": "more"}]
    later = trail(client([{"user": "go"}, {"answer": answer}, *next]))
    return later.prefix == prefix and set(later.ids) == set(ids)


@pytest.mark.parametrize("name", CLIENTS)
@settings(max_examples=60, deadline=None)
@given(answer=SAYING)
def test_an_answer_is_recognised_in_every_clients_replay(name: str, answer: dict[str, Any]) -> None:
    assert goes_on(CLIENTS[name], answer)


@pytest.mark.parametrize("name", TOOL_CLIENTS)
@settings(max_examples=60, deadline=None)
@given(answer=CALLING)
def test_tool_calls_are_recognised_in_every_clients_replay(name: str, answer: dict[str, Any]) -> None:
    assert goes_on(TOOL_CLIENTS[name], answer)


def test_the_prefix_ends_with_the_last_answer() -> None:
    asked = [{"user": "go"}]
    said = {"content": "hi"}
    (expected,) = trail(verbatim(asked)).then(message_of(said))
    for more in ([], [{"user": "a"}], [{"result": "b", "id": "x"}, {"user": "c"}]):
        assert trail(verbatim([*asked, {"answer": said}, *more])).prefix == expected
    assert trail(verbatim(asked)).prefix is None
    longer = trail(verbatim([*asked, {"answer": said}, {"user": "a"}])).then(message_of(said))
    assert longer != (expected,)


def test_other_conversations_have_other_digests() -> None:
    def call(name: str, arguments: str) -> dict[str, Any]:
        return {
            "content": None,
            "tool_calls": [{"id": "call_0", "function": {"name": name, "arguments": arguments}}],
        }

    answers = [
        {"content": ""},
        {"content": "a"},
        {"content": "b"},
        {"content": "a b"},
        call("play", "{}"),
        call("play", '{"cell": 1}'),
        call("play", '{"cell": "1"}'),
        call("play", '{"cell": [1]}'),
        call("pass", '{"cell": 1}'),
        call("play", '{"cell": 1'),
    ]
    starts = [
        [{"user": "go"}],
        [{"user": "go "}, {"user": "on"}],
        [{"user": "go on"}],
        [{"result": "go", "id": "x"}],
    ]
    digests = [trail(verbatim(start)).then(message_of(answer))[0] for start in starts for answer in answers]
    assert len(set(digests)) == len(starts) * len(answers)


def test_ids_that_are_random_and_ids_that_are_not() -> None:
    for id in (
        "chatcmpl-tool-0f4c4e2fe8a627625e040305d8291e67",
        "chatcmpl-tool-9f86d081884c7d65",
        "call_abcDEF123ghiJKL456mnoPQR",
        "toolu_01A09q90qw90lq917835lq9",
        "123e4567-e89b-42d3-a456-426614174000",
    ):
        assert replay.is_random(id), id
    for id in (
        "",
        "call_0",
        "call_12345678901234567890",
        "functions.play:0",
        "functions.getTheWeatherOfTheDay2:1",
        "search_all_the_documents_twice",
        "0",
        "VzXcMq4Ks",
    ):
        assert not replay.is_random(id), id


def test_the_last_random_ids_count_and_text_may_hold_them() -> None:
    first, second = (f"chatcmpl-tool-{uuid.uuid4().hex}" for _ in range(2))

    def answer(id: str) -> dict[str, Any]:
        call = {"id": id, "type": "function", "function": {"name": "play", "arguments": "{}"}}
        return {"answer": {"content": None, "tool_calls": [call]}}

    turns = [
        {"user": "go"},
        answer(first),
        {"result": "a", "id": first},
        answer(second),
        {"result": "b", "id": second},
    ]
    expected = trail(verbatim(turns[:1])).then(message_of(answer(second)["answer"]))[1:]
    for client in TOOL_CLIENTS.values():
        assert trail(client(turns)).ids == expected
        assert trail(client([*turns, answer("call_0"), {"result": "c", "id": "call_0"}])).ids == expected


@pytest.mark.parametrize(
    "messages",
    [b"[1]", b'["x"]', b"[[]]", b'[{"role":"user","content":"\xff"}]', b"[" * 200_000 + b"]" * 200_000],
)
def test_what_is_no_conversation_has_no_trail(messages: bytes) -> None:
    assert replay.read(messages) is None


@pytest.mark.parametrize(
    "message",
    [
        {"role": "assistant", "content": 1, "tool_calls": "x"},
        {"role": ["assistant"], "content": {"a": 1}},
        {
            "role": "assistant",
            "tool_calls": [1, {"id": 2}, {"function": {"arguments": 3}}, {"custom": {"x": 1}}],
        },
        {"role": "assistant", "function_call": {"name": "play", "arguments": "{"}},
        {"role": "assistant", "content": "Calling tools:\n" + "[" * 3000},
        {"role": "assistant", "content": "Calling tools:\n['a'('b')]"},
        {"role": "assistant", "content": "Calling tools:\n[{(1, 2): 3}, 1j, ..., {1: '\\ud800'}]"},
        {"role": "user", "content": [None, {"type": "image_url", "image_url": {"url": "x"}}]},
        {},
    ],
)
def test_whatever_stands_in_a_message_is_hashed(message: dict[str, Any]) -> None:
    assert len(trail([message]).then(message_of({}))[0]) == replay.DIGEST_BYTES


def test_an_answer_that_no_request_could_hold_leaves_nothing_behind() -> None:
    answer = message_of({"content": "Calling tools:\n" + "x" * replay.PYTHON_CHARS_MAX})
    assert trail([]).then(answer) == ()
    assert replay.read(json.dumps([{"role": "assistant", "content": answer.content}]).encode()) is None


def hostile(one: str, count: int) -> bytes:
    return b"[" + b",".join([one.encode()] * count) + b"]"


PYTHON = json.dumps({"role": "assistant", "content": "Calling tools:\n[" + "1," * 16_000 + "]"})


@pytest.mark.parametrize(
    "messages",
    [
        hostile("{}", 5_000_000),
        hostile('{"role":"assistant","tool_calls":[{}]}', 400_000),
        hostile('{"role":"user","content":[' + "1," * 999_999 + "1]}", 7),
        hostile(PYTHON, 400),
        hostile('{"role":"assistant","content":"' + "Calling tools:\\n[]" * 9 + '"}', 49_000),
        hostile('{"role":"assistant","tool_calls":[' + "{}," * 48 + "{}]}", 1000),
        hostile('{"role":"assistant","content":"' + "x" * 10_000_000 + '</think>"}', 1),
    ],
)
def test_nobody_can_hold_up_the_others(messages: bytes) -> None:
    began = time.process_time()
    replay.read(messages)
    assert time.process_time() - began < 1.0

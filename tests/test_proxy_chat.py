"""Requests peeked at, answers stripped, streams held: bytes in, bytes out."""

import json

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from proxy_world import chunk

from capture.errors import UpstreamError
from proxy.dialects import chat
from proxy.refusal import Refused
from proxy.sse import Splitter, payload

DEEP = b'{"model":"m","messages":' + b"[" * 100_000 + b"]" * 100_000 + b"}"


@pytest.mark.parametrize(
    ("body", "code"),
    [
        (b"", "invalid_json"),
        (b"{", "invalid_json"),
        (b"[]", "invalid_json"),
        (b"null", "invalid_json"),
        (b'{"model":"m","messages":[]}x', "invalid_json"),
        (b'\xef\xbb\xbf{"model":"m","messages":[]}', "invalid_json"),
        (b'{"model":"m","messages":[],"top_p":NaN}', "invalid_json"),
        (b'{"model":"m","messages":["\xff"]}', "invalid_json"),
        (DEEP, "invalid_json"),
        (b'{"messages":[]}', "missing_field"),
        (b'{"model":"m"}', "missing_field"),
        (b'{"model":1,"messages":[]}', "invalid_type"),
        (b'{"model":"m","messages":{}}', "invalid_type"),
        (b'{"model":"m","messages":[],"stream":"yes"}', "invalid_type"),
        (b'{"model":"m","messages":[],"n":0}', "invalid_type"),
        (b'{"model":"m","messages":[],"stream_options":[]}', "invalid_type"),
    ],
)
def test_a_bad_request_is_refused_with_400(body: bytes, code: str) -> None:
    with pytest.raises(Refused) as caught:
        chat.asked(chat.parse(body))
    assert (caught.value.status, caught.value.code) == (400, code)
    error = json.loads(caught.value.body())["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["type"] == "invalid_request_error"


def test_asked_reads_what_the_agent_wants() -> None:
    body = {"model": "m", "messages": [], "stream": True, "n": 2, "logprobs": True, "return_token_ids": None}
    asked = chat.asked(chat.parse(json.dumps({**body, "stream_options": {"include_usage": True}}).encode()))
    assert asked == chat.Asked(model="m", stream=True, choices=2, logprobs=True, ids=False, usage=True)


def test_ask_for_tokens_keeps_everything_else_verbatim() -> None:
    messages = b'[{"role": "user",  "content": "\\u00e9 \xc3\xa9"}]'
    body = b'{"model":"m","messages":' + messages + b',"stream":true,"stream_options":{"x":1}}'
    fields = chat.parse(body)
    chat.ask_for_tokens(fields, chat.asked(fields))
    sent = chat.encode(fields)
    assert messages in sent
    assert json.loads(sent)["stream_options"] == {"x": 1, "include_usage": True}
    assert json.loads(sent)["return_token_ids"] is True
    assert json.loads(sent)["logprobs"] is True


WHOLE = {
    "id": "c",
    "model": "policy@v3",
    "prompt_token_ids": [1, 2],
    "usage": {"prompt_tokens": 2, "completion_tokens": 3},
    "choices": [
        {
            "index": 0,
            "message": {"role": "assistant", "content": "x"},
            "logprobs": {"content": [{"token": "x", "logprob": -0.1}]},
            "finish_reason": "stop",
            "token_ids": [3, 4, 5],
        }
    ],
}


def test_strip_takes_out_what_was_not_asked_for() -> None:
    out, usage = chat.strip(json.dumps(WHOLE).encode(), chat.Asked(model="policy"), "policy")
    answer = json.loads(out)
    assert answer["model"] == "policy"
    assert "prompt_token_ids" not in answer
    assert answer["choices"][0]["logprobs"] is None
    assert "token_ids" not in answer["choices"][0]
    assert answer["choices"][0]["message"] == {"role": "assistant", "content": "x"}
    assert usage == chat.Usage(2, 3)


def test_strip_leaves_what_was_asked_for() -> None:
    want = chat.Asked(model="policy", ids=True, logprobs=True)
    out, _ = chat.strip(json.dumps(WHOLE).encode(), want, "policy")
    assert json.loads(out) == {**WHOLE, "model": "policy"}
    only_ids = chat.Asked(model="policy", ids=True)
    choice = json.loads(chat.strip(json.dumps(WHOLE).encode(), only_ids, "policy")[0])["choices"][0]
    assert choice["token_ids"] == [3, 4, 5]
    assert choice["logprobs"] is None


@pytest.mark.parametrize("body", [b"", b"<html>", b"[]", b"{}", b'{"choices":{}}', b'{"choices":[1]}'])
def test_strip_refuses_garbage(body: bytes) -> None:
    with pytest.raises(UpstreamError):
        chat.strip(body, chat.Asked(model="m"), "m")


def feed(state: chat.Stream, *chunks: bytes) -> list[bytes]:
    return [state.take(piece.removesuffix(b"\n\n")) for piece in chunks]


def test_a_stream_is_held_from_the_chunk_that_ends_its_last_choice() -> None:
    state = chat.Stream(chat.Asked(model="m"), None)
    first, last = chunk("a"), chunk("b", "stop")
    assert feed(state, first, last, b"data: [DONE]\n\n") == [first, b"", b""]
    assert state.complete
    assert state.done
    assert state.held == last + b"data: [DONE]\n\n"


def test_a_stream_of_two_choices_ends_with_the_second() -> None:
    state = chat.Stream(chat.Asked(model="m", choices=2), None)
    other = chunk("b", "length").replace(b'"index": 0', b'"index": 1')
    assert feed(state, chunk("a", "stop"), chunk("", "stop")) == [chunk("a", "stop"), chunk("", "stop")]
    assert not state.complete
    assert feed(state, other) == [b""]
    assert state.complete


def test_a_stream_is_stripped() -> None:
    state = chat.Stream(chat.Asked(model="policy"), "policy")
    choice = {"index": 0, "delta": {"role": "assistant"}, "logprobs": {"content": []}, "finish_reason": None}
    first = {"model": "policy@v3", "prompt_token_ids": [1], "choices": [{**choice, "token_ids": [7]}]}
    silent = {"model": "policy@v3", "choices": [{"index": 0, "delta": {}, "token_ids": [8]}]}
    usage = {"model": "policy@v3", "choices": [], "usage": {"prompt_tokens": 4, "completion_tokens": 2}}
    out, nothing, last, counted = feed(
        state,
        *(b"data: " + json.dumps(body).encode() for body in (first, silent)),
        chunk("", "stop"),
        b"data: " + json.dumps(usage).encode(),
    )
    seen = json.loads(out.removeprefix(b"data: "))
    assert seen == {"model": "policy", "choices": [{**choice, "logprobs": None}]}
    assert (nothing, last, counted) == (b"", b"", b"")
    assert state.usage == chat.Usage(4, 2)
    assert b"usage" not in state.held
    assert state.held.count(b"data: ") == 2  # the last chunk and [DONE]


def test_a_stream_keeps_usage_and_ids_that_were_asked_for() -> None:
    want = chat.Asked(model="policy", usage=True, ids=True)
    state = chat.Stream(want, "policy")
    usage = {"model": "policy@v3", "choices": [], "usage": {"prompt_tokens": 4, "completion_tokens": 2}}
    silent = {"model": "policy@v3", "choices": [{"index": 0, "delta": {}, "token_ids": [8]}]}
    out, *_ = feed(
        state,
        b"data: " + json.dumps(silent).encode(),
        chunk("", "stop"),
        b"data: " + json.dumps(usage).encode(),
    )
    assert json.loads(out.removeprefix(b"data: ")) == {**silent, "model": "policy"}
    assert b'"usage":{"prompt_tokens": 4' in state.held


def test_an_error_chunk_is_no_end() -> None:
    state = chat.Stream(chat.Asked(model="m"), None)
    assert feed(state, b'data: {"error": {"message": "died"}}', b"data: [DONE]") == [b"", b""]
    assert "died" in (state.error or "")
    assert not state.complete


def test_a_chunk_of_garbage_is_an_upstream_error() -> None:
    with pytest.raises(UpstreamError):
        feed(chat.Stream(chat.Asked(model="m"), None), b"data: {nonsense")


@given(st.lists(st.integers(1, 40), max_size=30), st.booleans())
def test_the_splitter_finds_the_same_chunks_however_bytes_arrive(cuts: list[int], crlf: bool) -> None:
    chunks = [b'data: {"a":1}', b": ping", b'event: x\ndata: {"b":\ndata: 2}', b"data: [DONE]"]
    stream = b"\n\n".join(chunks) + b"\n\n"
    data = stream.replace(b"\n", b"\r\n") if crlf else stream
    splitter, found, at = Splitter(1000), [], 0
    for cut in [*cuts, len(data)]:
        found += splitter.feed(data[at : at + cut])
        at += cut
    assert found == chunks
    assert splitter.rest == b""
    assert [payload(piece) for piece in found] == [b'{"a":1}', None, b'{"b":\n2}', b"[DONE]"]


def test_the_splitter_has_a_limit() -> None:
    splitter = Splitter(10)
    assert splitter.feed(b"x" * 10) == []
    with pytest.raises(UpstreamError, match="longer than 10 bytes"):
        splitter.feed(b"x")


def test_raw_bytes_compare_as_the_code_relies_on() -> None:
    assert msgspec.json.decode(b'{"a": true }', type=dict[str, msgspec.Raw])["a"] == chat.TRUE

import json

import pytest
from capture_makers import logprobs, raw_call, request, response, stream
from hypothesis import given
from hypothesis import strategies as st

from capture.parameters import DISTORTING
from capture.parse import parse
from capture.reasons import UNTRAINABLE


def parsed(**fields):
    return parse(raw_call("r_1", **fields))


def test_a_whole_response_gives_exact_tokens():
    tools = [{"type": "function", "function": {"name": "play"}}]
    call = parsed(request=request(tools=tools, temperature=0.7), response=response([1, 2, 3], [8, 16]))
    assert call.untrainable is None
    assert (call.prompt_ids, call.sampled_ids, call.sampled_logprobs) == ([1, 2, 3], [8, 16], [-1.0, -2.0])
    assert (call.prompt_tokens, call.completion_tokens, call.finish_reason) == (3, 2, "stop")
    assert (call.temperature, call.tools, call.model) == (0.7, tools, "policy")
    assert call.messages == [{"role": "user", "content": "go"}]
    assert call.response == {"role": "assistant", "content": "hi"}


def test_a_stream_is_put_together_with_its_tool_call():
    def tool(**function):
        return {"tool_calls": [{"index": 0, "function": function}]}

    named = {"tool_calls": [{"index": 0, "id": "call_7", "type": "function", "function": {"name": "play"}}]}
    deltas = [
        ({"content": "I "}, [1]),
        ({"content": "play"}, [2, 3]),
        (named, [4]),
        ({}, [5]),  # the parser kept the delta empty, the token was sampled all the same
        (tool(arguments='{"cell"'), [6]),
        (tool(arguments=": 3}"), [7]),
    ]
    call = parsed(stream=True, response=stream([9, 9], deltas, finish="tool_calls"))
    assert call.untrainable is None
    assert call.prompt_ids == [9, 9]
    assert call.sampled_ids == [1, 2, 3, 4, 5, 6, 7]
    assert call.sampled_logprobs == [-1 / 8, -2 / 8, -3 / 8, -4 / 8, -5 / 8, -6 / 8, -7 / 8]
    assert call.completion_tokens == 7
    function = {"name": "play", "arguments": '{"cell": 3}'}
    assert call.response == {
        "role": "assistant",
        "content": "I play",
        "tool_calls": [{"id": "call_7", "type": "function", "function": function}],
    }


def test_a_stream_with_windows_line_ends_is_the_same_stream():
    body = stream([9], [({"content": "a"}, [1])])
    unix, windows = (
        parsed(id="c_1", stream=True, response=one) for one in (body, body.replace(b"\n", b"\r\n"))
    )
    assert unix == windows
    assert unix.untrainable is None


def test_what_was_sent_decides_not_what_was_asked():
    asked = request(temperature=0.2, top_p=0.5, tool_choice="required", n=1)
    assert parsed(request=asked).untrainable == "grammar"
    changed = {"temperature": 1.0, "top_p": None, "tool_choice": None}
    call = parsed(request=asked, changed=changed)
    assert (call.untrainable, call.temperature) == (None, 1.0)
    assert (
        parsed(request=asked, changed={"temperature": None, "top_p": None, "tool_choice": "auto"}).temperature
        == 1.0
    )


GRAMMARS = [
    {"tool_choice": "required"},
    {"tool_choice": {"type": "function", "function": {"name": "play"}}},
    {"response_format": {"type": "json_object"}},
    {"structured_outputs": {"choice": ["a", "b"]}},
    {"guided_json": {}},
    {"response_format": {"type": "json_schema", "json_schema": {"name": "text", "schema": {}}}},
    {"tools": [{"type": "function", "function": {"name": "f", "strict": True}}]},
    {"tools": [{"type": "function", "function": {"name": "f"}}], "parallel_tool_calls": False},
]
HARMLESS = [
    {"tool_choice": "auto", "response_format": {"type": "text"}, "structured_outputs": None},
    {"tool_choice": "none", "tools": [{"type": "function", "function": {"name": "f", "strict": True}}]},
    {"parallel_tool_calls": False},
    {"top_p": 1.0, "top_k": -1, "min_p": 0.0, "logit_bias": {}, "n": 1, "stop": ["x"], "temperature": 0.7},
]
SHAPED = {
    "top_p": 0.9,
    "top_k": 5,
    "min_p": 0.1,
    "presence_penalty": 1,
    "frequency_penalty": 0.5,
    "repetition_penalty": 1.1,
    "logit_bias": {"3": 5},
    "bad_words": ["no"],
    "allowed_token_ids": [1],
    "min_tokens": 4,
    "thinking_token_budget": 9,
    "use_beam_search": True,
    "length_penalty": 2.0,
    "seed": 0,
    "watermarking": True,
    "ignore_eos": True,
    "vllm_xargs": {"a": 1},
    "kv_transfer_params": {"a": 1},
    "ec_transfer_params": {"a": 1},
    "logits_processors": ["x"],
}


@pytest.mark.parametrize("fields", GRAMMARS)
def test_a_grammar_makes_a_call_untrainable(fields):
    assert parsed(request=request(**fields)).untrainable == "grammar"


@pytest.mark.parametrize("fields", HARMLESS)
def test_what_leaves_the_distribution_alone_is_trainable(fields):
    assert parsed(request=request(**fields)).untrainable is None


@pytest.mark.parametrize("name", DISTORTING)
def test_what_else_shapes_sampling_makes_a_call_untrainable_unless_it_does_nothing(name):
    assert parsed(request=request(**{name: SHAPED[name]})).untrainable == "sampling"
    for value in DISTORTING[name].neutral:
        assert parsed(request=request(**{name: value})).untrainable is None


def test_a_prompt_given_as_ids_is_sampled_from_as_ever():
    ids = {"prompt_token_ids": [1, 2]}
    assert parsed(request=request(kv_transfer_params=ids)).untrainable is None
    remote = {**ids, "do_remote_prefill": True}
    assert parsed(request=request(kv_transfer_params=remote)).untrainable == "sampling"


IMAGE = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        ("go", None),
        (None, None),
        ([{"type": "text", "text": "go"}, {"text": "on"}, "!"], None),
        ([{"type": "text", "text": "what is this?"}, IMAGE], "media"),
        ([{"image_url": {"url": "http://x/y.png"}}], "media"),
        ([{"type": "input_audio", "input_audio": {}}], "media"),
        ([{"type": ["text"]}], "media"),
    ],
)
def test_a_prompt_with_more_than_text_is_not_trained(content, reason):
    messages = [{"role": "system", "content": "s"}, {"role": "user", "content": content}]
    assert parsed(request=request(messages)).untrainable == reason


def body(**fields):
    choice = json.loads(response([1, 2], [3, 4]))["choices"][0]
    return response([1, 2], [3, 4], choices=[{**choice, **fields}])


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"policy": None}, "provider"),
        ({"status": 400, "response": b'{"error": {"message": "no"}}'}, "error"),
        ({"error": "the engine went away"}, "error"),
        ({"response": b"<html>"}, "unparsable"),
        ({"response": b'{"error": {}}'}, "unparsable"),
        ({"request": b"{"}, "unparsable"),
        ({"request": b"[" * 100_000}, "unparsable"),
        ({"status": 499, "response": b""}, "partial"),
        ({"response": body(finish_reason=None)}, "partial"),
        ({"response": body(finish_reason="abort")}, "partial"),
        ({"request": request(n=2)}, "n_choices"),
        ({"response": body(token_ids=None)}, "no_token_ids"),
        ({"response": response([], [3])}, "no_token_ids"),
        ({"response": body(token_ids=[3, 4, 5])}, "length_mismatch"),
        ({"response": body(logprobs={"content": logprobs([3])})}, "length_mismatch"),
        ({"response": body(logprobs=None)}, "length_mismatch"),
        ({"response": response([1], [3], usage=None)}, "length_mismatch"),
        ({"response": body(logprobs={"content": [{"logprob": None}, {"logprob": -1}]})}, "bad_logprobs"),
        ({"response": body(logprobs={"content": [{"logprob": -9999.0}, {"logprob": -1}]})}, "bad_logprobs"),
        ({"response": body(logprobs={"content": [{"logprob": 0.5}, {"logprob": -1}]})}, "bad_logprobs"),
        ({"response": body(token_ids=[3, 2**31])}, "unparsable"),
        ({"policy_version": None}, "no_version"),
        ({"request": request(temperature=0)}, "temperature_zero"),
    ],
)
def test_each_reason(fields, reason):
    call = parsed(**fields)
    assert call.untrainable == reason
    assert reason in UNTRAINABLE


def test_a_length_finish_is_trainable():
    assert parsed(response=body(finish_reason="length")).untrainable is None


def test_a_cut_stream_is_partial_and_keeps_what_had_come():
    whole = stream([1], [({"content": "a"}, [2]), ({"content": "b"}, [3])], finish=None)
    call = parsed(stream=True, response=whole[:-10])
    assert call.untrainable == "partial"
    assert (call.prompt_ids, call.sampled_ids, call.completion_tokens) == ([1], [2], 1)
    assert call.response == {"role": "assistant", "content": "a"}


def test_a_complete_response_whose_client_left_is_undelivered_not_broken():
    call = parsed(status=499)
    assert (call.untrainable, call.undelivered) == (None, True)


def test_tokens_that_contradict_the_engines_count_are_not_kept_but_counted():
    call = parsed(response=body(token_ids=[3, 4, 5]))
    assert (call.sampled_ids, call.sampled_logprobs, call.completion_tokens) == ([], [], 3)


def test_two_choices_count_all_their_tokens():
    choice = json.loads(response([1, 2], [3, 4]))["choices"][0]
    two = response([1, 2], [3, 4], choices=[choice, {**choice, "index": 1}], usage={"completion_tokens": 4})
    call = parsed(request=request(n=2), response=two)
    assert (call.untrainable, call.sampled_ids, call.completion_tokens) == ("n_choices", [], 4)


def test_late_is_said_last():
    assert parse(raw_call("r_1"), late=True).untrainable == "late"
    assert parse(raw_call("r_1", error="x"), late=True).untrainable == "error"


@given(st.binary(max_size=200), st.binary(max_size=200), st.booleans())
def test_garbage_never_raises(asked, answered, streamed):
    call = parsed(request=asked, response=answered, stream=streamed)
    assert call.untrainable in ("unparsable", "partial")


@given(st.data())
def test_mangled_bodies_never_raise_and_are_trainable_only_with_equal_lengths(data):
    streamed = data.draw(st.booleans())
    good = stream([1], [({"content": "a"}, [2]), ({}, [3])]) if streamed else response([1, 2], [3, 4])
    cut = data.draw(st.integers(0, len(good)))
    until = data.draw(st.integers(cut, len(good)))
    mangled = good[:cut] + data.draw(st.binary(max_size=8)) + good[until:]
    call = parsed(response=mangled, stream=streamed)
    if call.untrainable is None:
        assert len(call.sampled_ids) == len(call.sampled_logprobs) == call.completion_tokens > 0
        assert call.prompt_ids


LEAVES = [None, True, False, 0, 1, -1, 2**70, 0.5, "", "auto", "go", "\u00e9\ud800", "function", "user"]
NAMES = st.sampled_from(["role", "content", "type", "function", "strict", "text"])
JSON = st.recursive(
    st.sampled_from(LEAVES),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(NAMES, inner, max_size=3),
    max_leaves=8,
)
KEYS = st.sampled_from(
    ["messages", "tools", "temperature", "n", "tool_choice", "response_format", "top_p", "stop"]
)


@given(st.dictionaries(KEYS, JSON), st.dictionaries(KEYS, JSON))
def test_any_json_request_is_parsed(asked, changed):
    call = parsed(request=json.dumps(asked).encode(), changed=changed)
    assert call.untrainable is None or call.untrainable in UNTRAINABLE

"""What a training request may carry, what is taken out, and what is written down of it."""

import json
from typing import Any

import pytest
from capture_makers import raw_call

from capture.parameters import DISTORTING, FORWARDED, OLD_GRAMMARS, WITHHELD
from capture.parse import parse as parse_call
from capture.types import RawCall
from proxy.dialects import chat
from proxy.refusal import Refused
from proxy.sampling import shape, untrainable
from proxy.settings import Sampling

BASE: dict[str, Any] = {"model": "policy", "messages": [{"role": "user", "content": "x"}]}
TOOL = {"type": "function", "function": {"name": "f", "strict": True, "parameters": {"strict": 1}}}


def shaped(
    more: dict[str, Any], sampling: Sampling | None = None, max_model_len: int | None = None
) -> tuple[dict[str, Any], dict[str, Any]]:
    """What is sent upstream, and what is recorded of the change."""
    fields = chat.parse(json.dumps({**BASE, **more}).encode())
    changed = shape(fields, sampling or Sampling(), max_model_len)
    return json.loads(chat.encode(fields)), changed


def test_a_plain_request_gets_temperature_and_cap() -> None:
    sent, changed = shaped({})
    assert sent == {**BASE, "temperature": 1.0, "max_tokens": 2048}
    assert changed == {"temperature": 1.0, "max_tokens": 2048}


@pytest.mark.parametrize("name", [*DISTORTING, *WITHHELD, *sorted(OLD_GRAMMARS), "a_key_of_tomorrow"])
def test_what_is_not_known_to_leave_sampling_alone_is_removed_and_recorded(name: str) -> None:
    sent, changed = shaped({name: 1})
    assert name not in sent
    assert changed == {name: None, "temperature": 1.0, "max_tokens": 2048}


def test_every_parameter_is_judged_once() -> None:
    assert not FORWARDED & DISTORTING.keys()
    assert not FORWARDED & WITHHELD.keys()
    assert not DISTORTING.keys() & WITHHELD.keys()


@pytest.mark.parametrize(
    "more",
    [
        {"stop": ["x"]},
        {"user": "u"},
        {"tools": [{"type": "function", "function": {"name": "f"}}], "tool_choice": "auto"},
        {"stream": True, "stream_options": {"include_usage": True}},
        {"chat_template_kwargs": {"enable_thinking": False}},
        {"n": 1},
        {"logprobs": True, "top_logprobs": 2},
    ],
)
def test_what_leaves_the_distribution_alone_passes(more: dict[str, Any]) -> None:
    sent, changed = shaped(more)
    assert sent == {**BASE, **more, "temperature": 1.0, "max_tokens": 2048}
    assert set(changed) == {"temperature", "max_tokens"}


def test_strictness_goes_under_a_free_tool_choice_only() -> None:
    free, changed = shaped({"tools": [TOOL], "parallel_tool_calls": False})
    assert free["tools"] == [{"type": "function", "function": {"name": "f", "parameters": {"strict": 1}}}]
    assert "parallel_tool_calls" not in free
    assert changed["tools"] == free["tools"]
    assert changed["parallel_tool_calls"] is None
    forced, changed = shaped({"tools": [TOOL], "parallel_tool_calls": False, "tool_choice": "required"})
    assert forced["tools"] == [TOOL]
    assert forced["parallel_tool_calls"] is False
    assert "tools" not in changed


def test_grammar_is_honoured_and_named_or_stripped_on_demand() -> None:
    more = {"tools": [TOOL], "tool_choice": "required", "response_format": {"type": "json_object"}}
    fields = chat.parse(json.dumps({**BASE, **more}).encode())
    shape(fields, Sampling(), None)
    assert untrainable(fields) == "grammar"
    sent, changed = shaped(more, Sampling(grammar="strip"))
    assert sent["tool_choice"] == "auto"
    assert "response_format" not in sent
    assert (changed["tool_choice"], changed["response_format"]) == ("auto", None)
    assert untrainable(chat.parse(json.dumps(sent).encode())) is None
    sent, changed = shaped({"structured_outputs": {"choice": ["a"]}}, Sampling(grammar="strip"))
    assert "structured_outputs" not in sent
    assert changed["structured_outputs"] is None


@pytest.mark.parametrize(
    ("body", "reason"),
    [
        ({"response_format": {"type": "text"}}, None),
        ({"response_format": None, "structured_outputs": None, "tool_choice": None}, None),
        ({"response_format": {"type": "json_schema", "json_schema": {"name": "text"}}}, "grammar"),
        ({"response_format": "text"}, "grammar"),
        ({"structured_outputs": {"choice": ["a"]}}, "grammar"),
        ({"tool_choice": {"type": "function", "function": {"name": "f"}}}, "grammar"),
        ({"tool_choice": "none", "tools": [TOOL]}, None),
    ],
)
def test_what_the_proxy_calls_a_grammar_ingest_calls_one_too(
    body: dict[str, Any], reason: str | None
) -> None:
    request = json.dumps({**BASE, **body}).encode()
    assert untrainable(chat.parse(request)) == reason
    assert parse_call(raw_call("r_1", request=request)).untrainable == reason


def test_temperature_and_cap_replace_what_the_agent_sent() -> None:
    sampling = Sampling(temperature=0.7, max_tokens=100)
    sent, changed = shaped({"temperature": 0, "max_tokens": 500}, sampling)
    assert (sent["temperature"], sent["max_tokens"]) == (0.7, 100)
    assert changed == {"temperature": 0.7, "max_tokens": 100}
    sent, changed = shaped({"temperature": 0.7, "max_completion_tokens": 30}, sampling)
    assert (sent["temperature"], sent["max_completion_tokens"]) == (0.7, 30)
    assert "max_tokens" not in sent
    assert changed == {}
    assert shaped({}, sampling, max_model_len=64)[0]["max_tokens"] == 64
    assert shaped({"max_tokens": 80}, sampling, max_model_len=64)[0]["max_tokens"] == 64
    assert shaped({"max_tokens": None}, sampling)[0]["max_tokens"] == 100


@pytest.mark.parametrize(
    ("more", "param"),
    [({"n": 2}, "n"), ({"max_tokens": "many"}, "max_tokens"), ({"max_tokens": -1}, "max_tokens")],
)
def test_what_cannot_be_trained_at_all_is_refused(more: dict[str, Any], param: str) -> None:
    with pytest.raises(Refused) as caught:
        shaped(more)
    assert (caught.value.status, caught.value.param) == (400, param)


def test_ingest_reads_the_record_of_changes_as_what_was_sent() -> None:
    """A shaped call must not be called untrainable for what was taken out of it."""
    body = {**BASE, "top_p": 0.5, "seed": 3, "tools": [TOOL], "parallel_tool_calls": False, "temperature": 0}
    _, changed = shaped(
        {key: value for key, value in body.items() if key not in BASE}, Sampling(temperature=0.7)
    )
    choice = {
        "index": 0,
        "message": {"role": "assistant", "content": "x"},
        "finish_reason": "stop",
        "token_ids": [5],
        "logprobs": {"content": [{"token": "x", "logprob": -0.5}]},
    }
    answer = {
        "prompt_token_ids": [1],
        "choices": [choice],
        "usage": {"prompt_tokens": 1, "completion_tokens": 1},
    }
    raw = RawCall(
        id="c_1",
        rollout_id="r_1",
        key_id="k",
        mode="train",
        attribution="path",
        route="policy",
        upstream="e",
        policy="policy",
        policy_version=1,
        started_at=0,
        ended_at=1,
        status=200,
        request=json.dumps(body).encode(),
        response=json.dumps(answer).encode(),
        changed=changed,
        body_hash=b"",
    )
    call = parse_call(raw)
    assert call.untrainable is None
    assert call.temperature == 0.7

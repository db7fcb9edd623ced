"""What exact continuity rests on: whose words they are, what a template writes, where the cut lies."""

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from replaying_clients import CLIENTS
from toy_engine import END, START, render, sampled, spelled

from proxy.continuity import (
    REWRITTEN,
    TOO_LONG,
    UNENDED,
    Conversation,
    Unproven,
    bridge,
    read,
    read_ids,
    tip_of,
    without_thought,
)
from proxy.dialects import chat
from proxy.dialects.chat import Said
from proxy.template import PROBES, Template, learn

SYSTEM = {"role": "system", "content": "Play."}
USER = {"role": "user", "content": " 3.14  "}
CALLED = {
    "role": "assistant",
    "content": "Now. ",
    "tool_calls": [
        {
            "id": "chatcmpl-tool-84d4d75c9ddb2065",
            "type": "function",
            "function": {"name": "play", "arguments": '{"cell":4,"x":1.0}'},
        }
    ],
}
RESULT = {"role": "tool", "tool_call_id": "chatcmpl-tool-84d4d75c9ddb2065", "content": "ok"}


def conversation(messages: list[Any], **fields: Any) -> Conversation:
    found = read(chat.parse(json.dumps({"model": "m", "messages": messages, **fields}).encode()))
    assert found is not None
    return found


TOY = Template(frozenset({END}), (10,), rewrites=False)


# -- what was said -------------------------------------------------------------------------------


@pytest.mark.parametrize("client", CLIENTS)
def test_an_answer_is_recognised_in_every_clients_replay_of_it(client: str) -> None:
    if client == "smolagents_code":
        answer: dict[str, Any] = {"content": "x = 1"}
        turns: list[Any] = [{"user": "Go."}, {"answer": answer}]
    else:
        answer = {name: CALLED[name] for name in ("content", "tool_calls")}
        turns = [{"user": "Go."}, {"answer": answer}, {"result": "ok", "id": RESULT["tool_call_id"]}]
    replay = CLIENTS[client]
    before, after = conversation(replay(turns[:1])), conversation(replay(turns))
    if client == "openai_agents":  # which swaps the system prompt after each answer
        assert before.then({"role": "assistant", **answer}) not in after.answers.values()
        return
    assert list(after.answers.values()) == [before.then({"role": "assistant", **answer})]
    assert (before.last, after.last) == (-1, next(iter(after.answers)))


@pytest.mark.parametrize(
    ("messages", "fields"),
    [
        ([{"role": "system", "content": "Play on."}, USER, CALLED, RESULT], {}),
        ([SYSTEM, {"role": "user", "content": "3.14"}, CALLED, RESULT], {}),
        ([SYSTEM, USER, {**CALLED, "tool_calls": [], "content": "Now!"}, RESULT], {}),
        ([USER, CALLED, RESULT], {}),
        ([SYSTEM, USER, USER, CALLED, RESULT], {}),
        ([SYSTEM, USER, CALLED, RESULT], {"tools": [{"type": "function"}]}),
        ([SYSTEM, USER, CALLED, RESULT], {"chat_template_kwargs": {"enable_thinking": False}}),
        ([SYSTEM, USER, CALLED, RESULT], {"tool_choice": "none"}),
    ],
    ids=["system", "space", "answer", "no system", "one more", "tools", "arguments", "choice"],
)
def test_anything_else_is_another_conversation(messages: list[Any], fields: dict[str, Any]) -> None:
    assert conversation([SYSTEM, USER]).then(CALLED) not in conversation(messages, **fields).answers.values()


@pytest.mark.parametrize(
    ("messages", "fields"),
    [
        ([{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "data:"}}]}], {}),
        ([USER, CALLED], {"continue_final_message": True, "add_generation_prompt": False}),
        (["hello"], {}),
        ([{"role": "user", "content": 5}], {}),
    ],
)
def test_what_cannot_be_gone_on_with(messages: list[Any], fields: dict[str, Any]) -> None:
    assert read(chat.parse(json.dumps({"messages": messages, **fields}).encode())) is None


@pytest.mark.parametrize("change", ["none", "space", "earlier", "tools", "less"])
def test_reading_only_what_was_added_finds_the_same(change: str) -> None:
    said = [SYSTEM, USER, CALLED, RESULT]
    before = conversation(said)
    more: list[Any] = [*said, {"role": "assistant", "content": "Done."}, USER]
    tools: list[Any] = []
    if change == "earlier":
        more[1] = {"role": "user", "content": "3.15"}
    if change == "tools":
        tools = [{"type": "function"}]
    if change == "less":
        more = more[:3]
    body = json.dumps({"messages": more, "tools": tools}) if tools else json.dumps({"messages": more})
    if change == "space":
        body = body.replace('"tool_call_id": ', '"tool_call_id":')
    fields = chat.parse(body.encode())
    whole, continued = read(fields), read(fields, before)
    assert whole is not None
    assert continued is not None
    assert (before.added(bytes(fields["messages"]), before._context) is not None) == (
        change in ("none", "tools")
    )
    assert continued.answers == whole.answers
    assert continued.then(CALLED) == whole.then(CALLED)
    assert continued.messages() == whole.messages()
    assert before.then(CALLED) == conversation(said).then(CALLED)


def test_messages_keep_the_agents_bytes() -> None:
    raw = b'{"messages": [ {"role" : "user", "content":"\\u00e9 1.0"}, {"role":"user","content":null}]}'
    found = read(chat.parse(raw))
    assert found is not None
    assert [bytes(one) for one in found.messages()] == [
        b'{"role" : "user", "content":"\\u00e9 1.0"}',
        b'{"role":"user","content":null}',
    ]
    assert found.answers == {}


# -- tips ----------------------------------------------------------------------------------------


def test_a_tip_shares_what_it_goes_on_from() -> None:
    said = {"role": "assistant", "content": "hm"}
    first = tip_of("c_1", Said(b"[1, 2]", b"[3]", said), None)
    assert first is not None
    second = tip_of("c_2", Said(b"[1,2,3,4]", b"[5,6]", said), first)
    drifted = tip_of("c_3", Said(b"[1,2,33,4]", b"[5]", said), first)
    assert second is not None
    assert drifted is not None
    assert (second.base, read_ids(second.rest), read_ids(second.ids)) == (
        first,
        [4, 5, 6],
        [1, 2, 3, 4, 5, 6],
    )
    assert (drifted.base, read_ids(drifted.ids)) == (None, [1, 2, 33, 4, 5])
    for odd in (b"[]", b"null", b"[1.5]", b"[[1]]", b'["1"]', b"[-1]"):
        assert tip_of("c_4", Said(b"[1]", odd, said), first) is None
        assert tip_of("c_5", Said(odd, b"[1]", said), first) is None


@pytest.mark.parametrize(
    ("reply", "bare"),
    [
        ({"content": "a", "reasoning": "t"}, {"content": "a"}),
        ({"content": None, "reasoning_content": "t"}, {"content": None}),
        ({"content": "<think>\nt\n</think>\n\na"}, {"content": "a"}),
        ({"content": "a"}, None),
    ],
)
def test_reasoning_is_kept_as_it_was_given(reply: dict[str, Any], bare: dict[str, Any] | None) -> None:
    tip = tip_of("c_1", Said(b"[1]", b"[2]", reply), None)
    assert tip is not None
    if bare is None:
        assert tip.thought is None
    else:
        assert tip.thought is not None
        assert json.loads(bytes(tip.thought)) == reply
        assert json.loads(bytes(without_thought(tip.thought))) == bare


# -- the proof -----------------------------------------------------------------------------------


def test_a_bridge_is_what_the_template_writes_between_two_replies() -> None:
    before = [USER, {"role": "assistant", "content": "yes"}]
    tip = render([USER], True) + sampled("yes")
    found = bridge(TOY, tip, render(before, False), render([*before, USER], True), 100)
    assert found == [10, START, *spelled("user\n 3.14  "), END, 10, START, *spelled("assistant\n")]


@pytest.mark.parametrize(
    ("tip", "upto", "whole", "length_max", "reason"),
    [
        ([5, 6], [5, 6, END, 10], [5, 6, END, 10, 7], 100, UNENDED),  # cut off
        ([5, 3], [5, 6, END, 10], [5, 6, END, 10, 7], 100, UNENDED),  # ended by another token
        ([5, END], [5, 6, END, 11], [5, 6, END, 11, 7], 100, UNENDED),  # another closing than was learned
        ([5, 10], [5, END, 10], [5, END, 10, 7], 100, UNENDED),  # cut off at what follows an end
        ([5, END], [10], [10, 7], 100, UNENDED),
        ([5, END], [5, 6, END, 10], [5, 8, END, 10, 7], 100, REWRITTEN),
        ([5, END], [5, 6, END, 10], [5, 6, END], 100, REWRITTEN),
        ([5, END], [5, 6, END, 10], [5, 6, END, 10, 7], 4, TOO_LONG),
    ],
)
def test_what_proves_nothing(
    tip: list[int], upto: list[int], whole: list[int], length_max: int, reason: str
) -> None:
    with pytest.raises(Unproven) as caught:
        bridge(TOY, tip, upto, whole, length_max)
    assert caught.value.reason == reason
    assert bridge(TOY, [5, END], [5, 6, END, 10], [5, 6, END, 10, 7], 5) == [10, 7]


TEXTS = st.text(st.characters(min_codepoint=32, max_codepoint=900), max_size=8)


@settings(max_examples=200, deadline=None)
@given(st.lists(st.tuples(TEXTS, TEXTS), min_size=1, max_size=6), st.integers(0, 5))
def test_any_conversation_goes_on_from_its_sampled_ids(talk: list[tuple[str, str]], cut_off: int) -> None:
    """Prompts made of ids hold every sampled token, and read as the template's own rendering does."""
    messages: list[Any] = []
    prompt: list[int] = []
    tip: list[int] = []
    for n, (asked, said) in enumerate(talk):
        upto = render(messages, False)
        messages.append({"role": "user", "content": asked})
        whole = render(messages, True)
        if not tip:
            prompt = whole
        elif cut_off and n == cut_off:
            with pytest.raises(Unproven):
                bridge(TOY, tip[:-1], upto, whole, None)
            return
        else:
            prompt = [*tip, *bridge(TOY, tip, upto, whole, None)]
            assert prompt[: len(tip)] == tip
        assert [id - 1000 if id >= 1000 else id for id in prompt] == whole
        tip = prompt + sampled(said)
        messages.append({"role": "assistant", "content": said})


# -- templates -----------------------------------------------------------------------------------


def test_a_template_is_known_by_its_renderings() -> None:
    plain = {name: render(messages, False) for name, messages in PROBES.items()}
    assert learn(plain) == TOY
    stripping = learn({name: render(messages, False, True) for name, messages in PROBES.items()})
    assert stripping is not None
    assert stripping.rewrites is True


def test_templates_that_end_no_reply_or_cannot_be_rendered() -> None:
    ids = {name: render(messages, False) for name, messages in PROBES.items()}
    assert learn({}) is None
    assert learn({**ids, "yes": [1, 2, 3], "no": [1, 2, 4]}) is None  # nothing comes after a reply
    text_only = {name: ids[name] for name in ("yes", "no", "on")}
    assert learn(text_only) == TOY


def test_turns_that_end_in_tool_calls_may_have_an_end_of_their_own() -> None:
    ids = {name: render(messages, False) for name, messages in PROBES.items()}
    for name in ("look", "find"):
        ids[name] = [*ids[name][:-2], 3, 10]
    assert learn(ids) == Template(frozenset({END, 3}), (10,), rewrites=False)
    ids["find"] = [*ids["find"][:-1], 11]
    assert learn(ids) == TOY


def test_thinking_in_the_text_that_is_never_rendered_counts_as_stripped() -> None:
    ids = {name: render(messages, False) for name, messages in PROBES.items()}
    found = learn({**ids, "inline": ids["yes"], "inline_on": ids["on"]})
    assert found is not None
    assert found.rewrites is True

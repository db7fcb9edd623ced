"""The scenario of a rollout that names none: the same however a client writes it, another for another."""

import copy
import json
from typing import Any

from capture_makers import model_call
from hypothesis import given, settings
from hypothesis import strategies as st

from capture.fingerprint import fingerprint, fingerprint_of

WORDS = st.text(st.sampled_from("ab é\n{"), min_size=1, max_size=8).filter(lambda text: text.strip() == text)
SPACE = st.text(st.sampled_from(" \n\t"), max_size=2)
VALUES = st.recursive(
    st.one_of(WORDS, st.integers(-3, 3), st.booleans(), st.none()),
    lambda inner: st.one_of(st.lists(inner, max_size=3), st.dictionaries(WORDS, inner, max_size=3)),
    max_leaves=6,
)
TOOLS = st.lists(
    st.tuples(WORDS, WORDS, st.dictionaries(WORDS, VALUES, max_size=3)),
    max_size=3,
    unique_by=lambda one: one[0],
)
TASK = st.tuples(WORDS, TOOLS, WORDS)  # system prompt, tools, first user message

Task = tuple[str, list[tuple[str, str, dict[str, Any]]], str]
Asked = tuple[list[dict[str, Any]], list[dict[str, Any]]]


def plainly(task: Task) -> Asked:
    """As most clients write it."""
    system, tools, user = task
    messages = [{"role": "system", "content": system}, {"role": "user", "content": user}]
    keys = ("name", "description", "parameters")
    return messages, [{"type": "function", "function": dict(zip(keys, one, strict=True))} for one in tools]


def written(task: Task, draw: Any) -> Asked:
    """As some client might: with ids, other roles and parts, spaces, and JSON in another spelling."""
    messages, tools = plainly(copy.deepcopy(task))
    for message in messages:
        message["content"] = draw(SPACE) + message["content"] + draw(SPACE)
        if draw(st.booleans()):
            at = draw(st.integers(0, len(message["content"])))
            halves = (message["content"][:at], message["content"][at:])
            message["content"] = [{"type": "text", "text": half} for half in halves]
        if draw(st.booleans()):
            message |= {"id": draw(WORDS), "name": draw(WORDS)}
    messages[0]["role"] = draw(st.sampled_from(["system", "developer"]))
    for tool in tools:
        function = tool["function"]
        function["description"] = draw(SPACE) + function["description"] + draw(SPACE)
        function["parameters"] = respelled(function["parameters"], draw)
        if draw(st.booleans()):
            function["strict"] = False
    return messages, draw(st.permutations(tools))


def respelled(value: Any, draw: Any) -> Any:
    """The same JSON value: keys in another order, 1 as 1.0."""
    if isinstance(value, dict):
        return {key: respelled(value[key], draw) for key in draw(st.permutations(list(value)))}
    if isinstance(value, list):
        return [respelled(one, draw) for one in value]
    return float(value) if type(value) is int and draw(st.booleans()) else value


@settings(max_examples=200, deadline=None)
@given(task=TASK, data=st.data())
def test_the_same_task_in_another_spelling(task: Task, data: st.DataObject) -> None:
    messages, tools = written(task, data.draw)
    assert fingerprint(messages, tools) == fingerprint(*plainly(task))
    again = json.loads(json.dumps([messages, tools]))
    assert fingerprint(*again) == fingerprint(messages, tools)


@settings(max_examples=200, deadline=None)
@given(one=TASK, other=TASK)
def test_another_task_is_another_scenario(one: Task, other: Task) -> None:
    """Tools are a set: their order says nothing."""

    def meant(task: Task) -> tuple[Any, ...]:
        tools = sorted(json.dumps(tool, sort_keys=True) for tool in task[1])
        return task[0], tools, task[2]

    assert (fingerprint(*plainly(one)) == fingerprint(*plainly(other))) == (meant(one) == meant(other))


def test_each_part_counts_and_nothing_else_does() -> None:
    task: Task = ("be brief", [("play", "a move", {"cell": 1})], "go")
    base = fingerprint(*plainly(task))
    assert base.startswith("fp-")
    assert len(bytes.fromhex(base[3:])) == 8
    others = [
        ("be long", task[1], "go"),
        ("be brief", [], "go"),
        ("be brief", [("pass", "a move", {"cell": 1})], "go"),
        ("be brief", [("play", "a step", {"cell": 1})], "go"),
        ("be brief", [("play", "a move", {"cell": 2})], "go"),
        ("be brief", task[1], "stop"),
        ("go", task[1], "be brief"),
    ]
    assert len({base, *(fingerprint(*plainly(other)) for other in others)}) == 8
    messages, tools = plainly(task)
    later = [*messages, {"role": "assistant", "content": "a"}, {"role": "user", "content": "b"}]
    assert fingerprint(later, tools) == base
    assert fingerprint(messages[1:], tools) != base  # no system prompt
    late = [messages[1], messages[0]]  # a system message in the middle is not the system prompt
    assert fingerprint(late, tools) == fingerprint(messages[1:], tools)


def test_whatever_clients_send_has_a_fingerprint() -> None:
    image = {"type": "image_url", "image_url": {"url": "x"}}
    odd: list[Any] = [
        [{"role": "user"}],
        [{"role": ["user"], "content": 3}],
        [{"role": "user", "content": [image, "text", {"text": 3}]}],
        [{"role": "system", "content": {"a": 10**40}}],
        [{}],
    ]
    found = [fingerprint(messages, [{}, {"function": 3}, {"function": {"name": ["a"]}}]) for messages in odd]
    assert len(set(found)) == 3  # the first, second and last ask nothing
    assert fingerprint([{"role": "user", "content": [image]}], []) != fingerprint(
        [{"role": "user", "content": [{**image, "image_url": {"url": "y"}}]}], []
    )


def test_the_first_call_on_time_decides() -> None:
    def call(at: float, text: str, **fields: Any) -> Any:
        return model_call(started_at=at, messages=[{"role": "user", "content": text}], **fields)

    first = fingerprint([{"role": "user", "content": "go"}], [])
    calls = [call(3.0, "later"), call(2.0, "go"), call(1.0, "late", late=True)]
    assert fingerprint_of(calls) == fingerprint_of(calls[::-1]) == first
    assert (
        fingerprint_of([model_call(messages=[], started_at=0.0), *calls]) == first
    )  # one that is unreadable
    assert fingerprint_of([]) is None
    assert fingerprint_of([call(1.0, "go", late=True)]) is None

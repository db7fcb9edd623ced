import random

from capture_makers import model_call
from hypothesis import given
from hypothesis import strategies as st

from capture.graph import build, fates, samples
from capture.reasons import FORKS


def excluded(calls):
    return {fate.call_id: fate.excluded for fate in fates(build(calls))}


def forks(calls):
    return {id: node.fork for id, node in build(calls).nodes.items()}


def a_conversation():
    """Three turns: [1,2]+[3,4], then [5]+[6], then [7]+[8]."""
    return [
        model_call(id="c_1", started_at=1.0, prompt_ids=[1, 2], sampled_ids=[3, 4]),
        model_call(id="c_2", started_at=2.0, prompt_ids=[1, 2, 3, 4, 5], sampled_ids=[6]),
        model_call(id="c_3", started_at=3.0, prompt_ids=[1, 2, 3, 4, 5, 6, 7], sampled_ids=[8]),
    ]


def test_a_conversation_is_one_sample_with_loss_on_every_sampled_token():
    calls = a_conversation()
    (sample,) = samples(build(calls))
    assert sample.token_ids == [1, 2, 3, 4, 5, 6, 7, 8]
    assert sample.loss_mask == [False, False, True, True, False, True, False, True]
    assert sample.sampled_logprobs == [0, 0, -3 / 8, -4 / 8, 0, -6 / 8, 0, -1]
    assert [(span.start, span.end, span.call_id) for span in sample.spans] == [
        (2, 4, "c_1"),
        (5, 6, "c_2"),
        (7, 8, "c_3"),
    ]
    assert [[call.id for call in branch] for branch in build(calls).branches()] == [["c_1", "c_2", "c_3"]]


def test_a_fork_shares_its_beginning_as_context_only():
    calls = [
        *a_conversation()[:2],
        model_call(id="c_4", started_at=4.0, prompt_ids=[1, 2, 3, 4, 9], sampled_ids=[6]),
    ]
    first, second = samples(build(calls))
    assert (first.token_ids, first.loss_mask) == ([1, 2, 3, 4, 5, 6], [False, False, True, True, False, True])
    assert (second.token_ids, second.loss_mask) == ([1, 2, 3, 4, 9, 6], [False] * 5 + [True])


def test_one_changed_token_breaks_the_branch():
    calls = [
        *a_conversation()[:1],
        model_call(id="c_5", started_at=5.0, prompt_ids=[1, 2, 3, 9, 5], sampled_ids=[6]),
    ]
    assert [len(sample.token_ids) for sample in samples(build(calls))] == [4, 6]


def test_an_untrainable_call_is_context_for_those_that_continue_it():
    first, second, third = a_conversation()
    grammar = model_call(**{**fields(second), "untrainable": "grammar"})
    (sample,) = samples(build([first, grammar, third]))
    assert sample.loss_mask == [False, False, True, True, False, False, False, True]
    assert excluded([first, grammar, third]) == {"c_1": None, "c_2": "grammar", "c_3": None}


def test_a_branch_ends_with_its_last_trainable_call():
    first, second, third = a_conversation()
    partial = model_call(**{**fields(third), "untrainable": "partial"})
    (sample,) = samples(build([first, second, partial]))
    assert sample.token_ids == [1, 2, 3, 4, 5, 6]
    assert samples(build([partial])) == []


def fields(call):
    return {name: getattr(call, name) for name in call.__struct_fields__}


def a_retry(**more):
    first = model_call(id="c_1", started_at=1.0, prompt_ids=[1], sampled_ids=[2], body_hash=b"same")
    again = {"id": "c_2", "started_at": 2.0, "prompt_ids": [1], "sampled_ids": [3], "body_hash": b"same"}
    return [first, model_call(**{**again, "retry_count": 1, **more})]


def test_a_retry_supersedes():
    assert excluded(a_retry()) == {"c_1": "superseded", "c_2": None}


def test_a_retry_does_not_supersede_what_the_agent_went_on_with():
    extension = model_call(id="c_3", started_at=3.0, prompt_ids=[1, 2, 4], sampled_ids=[5])
    assert excluded([*a_retry(), extension]) == {"c_1": None, "c_2": None, "c_3": None}


def test_a_like_request_is_no_retry_without_the_count():
    assert excluded(a_retry(retry_count=0)) == {"c_1": None, "c_2": None}


def test_a_retry_that_failed_supersedes_too_and_the_prompt_of_its_template_may_differ():
    failed = {"prompt_ids": [], "sampled_ids": [], "untrainable": "error"}
    assert excluded(a_retry(**failed)) == {"c_1": "superseded", "c_2": "error"}
    assert excluded(a_retry(prompt_ids=[7])) == {"c_1": "superseded", "c_2": None}


def test_of_parallel_calls_only_as_many_are_superseded_as_were_repeated():
    """Four like requests at once; one is answered with an error and asked again, one got no answer."""
    like = {"prompt_ids": [1], "body_hash": b"same"}
    error = {"untrainable": "error", "prompt_ids": [], "sampled_ids": []}
    calls = [
        model_call(id="c_1", started_at=1.0, sampled_ids=[2], **like),
        model_call(id="c_2", started_at=1.0, sampled_ids=[3], **like),
        model_call(id="c_3", started_at=1.0, **{**like, **error}),
        model_call(id="c_4", started_at=2.0, sampled_ids=[4], retry_count=1, **like),
    ]
    assert excluded(calls) == {"c_1": None, "c_2": None, "c_3": "error", "c_4": None}
    lost = model_call(id="c_0", started_at=1.5, sampled_ids=[5], undelivered=True, **like)
    again = model_call(id="c_5", started_at=2.0, sampled_ids=[6], retry_count=1, **like)
    assert excluded([*calls, lost, again]) == {
        **{"c_1": None, "c_2": None, "c_3": "error", "c_0": "superseded", "c_4": None, "c_5": None}
    }


def test_a_repetition_whose_first_attempt_never_came_supersedes_the_attempt_before_it():
    first, last = a_retry(retry_count=2)
    middle = model_call(**{**fields(first), "id": "c_3", "retry_count": 1})
    assert excluded([first, last]) == {"c_1": "superseded", "c_2": None}
    assert excluded([first, middle, last]) == {"c_1": "superseded", "c_3": "superseded", "c_2": None}


def test_of_equal_calls_the_one_that_was_delivered_is_continued():
    first, again = a_retry(sampled_ids=[2], undelivered=True, retry_count=0)
    extension = model_call(id="c_3", started_at=3.0, prompt_ids=[1, 2, 4], sampled_ids=[5])
    assert build([first, again, extension]).nodes["c_3"].parent == "c_1"
    assert excluded([first, again, extension]) == {"c_1": None, "c_2": "undelivered", "c_3": None}


def test_a_response_cut_at_its_cap_is_continued_where_the_template_closes_it():
    cut = model_call(id="c_1", started_at=1.0, prompt_ids=[1], sampled_ids=[2, 3], finish_reason="length")
    closed = model_call(id="c_2", started_at=2.0, prompt_ids=[1, 2, 3, 99, 4], sampled_ids=[5])
    (sample,) = samples(build([cut, closed]))
    assert sample.loss_mask == [False, True, True, False, False, True]


def test_when_a_retry_sampled_the_same_the_later_one_is_continued():
    extension = model_call(id="c_3", started_at=3.0, prompt_ids=[1, 2, 4], sampled_ids=[5])
    calls = [*a_retry(sampled_ids=[2]), extension]
    assert build(calls).nodes["c_3"].parent == "c_2"
    assert excluded(calls) == {"c_1": "superseded", "c_2": None, "c_3": None}


def test_undelivered_is_trained_only_if_the_agent_had_it_after_all():
    first, second, _ = a_conversation()
    lost = model_call(**{**fields(first), "undelivered": True})
    assert excluded([lost]) == {"c_1": "undelivered"}
    assert excluded([lost, second]) == {"c_1": None, "c_2": None}


def test_late_calls_change_nothing_that_was_settled():
    first = a_retry()[0]
    undelivered = model_call(id="c_0", prompt_ids=[1, 2], sampled_ids=[3, 4], undelivered=True)
    late = {"late": True, "untrainable": "late"}
    calls = [
        first,
        undelivered,
        model_call(**{**fields(a_retry()[1]), **late}),  # would supersede
        model_call(
            id="c_8", started_at=8.0, prompt_ids=[1, 2, 3, 4, 5], sampled_ids=[6], **late
        ),  # would extend
    ]
    assert excluded(calls) == {"c_0": "undelivered", "c_1": None, "c_2": "late", "c_8": "late"}
    assert samples(build(calls)) == samples(build(calls[:2]))


def said(*messages, reply="hi", **fields):
    response = {"role": "assistant", "content": reply, **fields.pop("reply_fields", {})}
    return model_call(messages=list(messages), response=response, **fields)


SYSTEM, USER, MORE = (
    {"role": role, "content": text} for role, text in (("system", "be brief"), ("user", "go"), ("user", "on"))
)
REPLY = {"role": "assistant", "content": "hi"}
OTHER_SYSTEM = {"role": "system", "content": "be long"}
TOOL = {"type": "function", "function": {"name": "play"}}


def fork_of(*messages, of=None, **fields):
    """The reason of a call with these messages after one that asked SYSTEM, USER and got REPLY."""
    of = of or said(SYSTEM, USER, id="c_1", started_at=1.0, prompt_ids=[1, 2], sampled_ids=[3])
    asked = {"id": "c_9", "started_at": 9.0, "prompt_ids": [1, 9, 9], "sampled_ids": [4], **fields}
    return forks([*(of if isinstance(of, list) else [of]), said(*messages, **asked)])["c_9"]


def test_the_same_messages_with_other_tokens():
    parts = {**REPLY, "content": [{"type": "text", "text": "hi"}]}
    assert fork_of(SYSTEM, USER, REPLY, MORE) == "retokenised"
    assert fork_of(SYSTEM, USER, parts, MORE) == "retokenised"
    assert fork_of(SYSTEM, USER, REPLY, MORE, tools=[TOOL]) == "changed_tools"


def test_stripped_reasoning_however_it_was_said():
    first = {"id": "c_1", "started_at": 1.0, "prompt_ids": [1], "sampled_ids": [3]}
    field = said(SYSTEM, USER, **first, reply_fields={"reasoning": "hm"})
    text = said(SYSTEM, USER, **first, reply="<think>hm</think>\n\nhi")
    half = said(SYSTEM, USER, **first, reply="hm</think>hi")  # the template opened it
    for thought in (field, text, half):
        assert fork_of(SYSTEM, USER, REPLY, MORE, of=thought) == "stripped_reasoning"
    whole = {**REPLY, "content": "<think>hm</think>\n\nhi"}
    assert fork_of(SYSTEM, USER, whole, MORE, of=text) == "stripped_reasoning"  # by the template
    second = {"id": "c_2", "started_at": 2.0, "prompt_ids": [1, 3, 5], "sampled_ids": [6]}
    after = [text, said(SYSTEM, USER, whole, MORE, **second)]  # kept until the next question
    assert fork_of(SYSTEM, USER, REPLY, MORE, REPLY, USER, of=after) == "stripped_reasoning"


def test_another_agent_takes_over():
    assert fork_of(OTHER_SYSTEM, USER, REPLY, MORE) == "new_system_prompt"
    assert fork_of(OTHER_SYSTEM, USER, REPLY, MORE, tools=[TOOL]) == "handoff"
    assert fork_of(OTHER_SYSTEM, REPLY, MORE, tools=[TOOL]) == "handoff"  # it has lost the question


def test_history_told_anew():
    ho = {**REPLY, "content": "ho"}
    assert fork_of(SYSTEM, USER, ho, MORE) == "rewritten_response"
    second = said(
        SYSTEM, USER, REPLY, MORE, id="c_2", started_at=2.0, prompt_ids=[1, 2, 3, 4], sampled_ids=[5]
    )
    first = said(SYSTEM, USER, id="c_1", started_at=1.0, prompt_ids=[1, 2], sampled_ids=[3])
    summary = {"role": "user", "content": "so far: hi"}
    assert fork_of(SYSTEM, USER, summary, of=[first, second]) == "compacted"
    assert fork_of(SYSTEM, REPLY, MORE, of=[first, second]) == "compacted"
    assert fork_of(SYSTEM, USER, ho, MORE, REPLY, MORE, of=[first, second]) == "rewritten_history"


def test_a_conversation_of_its_own_and_one_asked_again():
    assert forks([said(SYSTEM, USER, id="c_1")]) == {"c_1": "root"}
    assert fork_of(SYSTEM, MORE) == "sub_agent"
    assert fork_of(OTHER_SYSTEM, MORE) == "sub_agent"
    assert fork_of(SYSTEM, USER) == "repeated"
    assert fork_of(SYSTEM, USER, tools=[TOOL]) == "changed_tools"


def test_tokens_that_nobody_knows():
    bare = {"untrainable": "error", "prompt_ids": [], "sampled_ids": []}
    assert fork_of(SYSTEM, USER, **bare) == "no_tokens"
    failed = model_call(id="c_1", started_at=1.0, response=None, **bare)
    assert fork_of(SYSTEM, USER, of=failed) == "root"  # nothing was answered before
    provider = said(SYSTEM, USER, id="c_1", started_at=1.0, **{**bare, "untrainable": "provider"})
    assert fork_of(SYSTEM, USER, REPLY, MORE, of=provider) == "no_tokens"


def test_a_fork_names_the_nearest_call_and_where_it_left_it():
    first, second, _ = a_conversation()
    drifted = model_call(id="c_5", started_at=5.0, prompt_ids=[1, 2, 3, 9, 5], sampled_ids=[6])
    node = build([first, drifted]).nodes["c_5"]
    assert (node.fork, node.near, node.shared) == ("repeated", "c_1", 3)
    assert build([first, second]).nodes["c_2"].near is None


def test_fork_reasons_are_a_closed_set_of_sentences():
    assert all(sentence.endswith(".") and sentence[0].isupper() for sentence in FORKS.values())


@st.composite
def call_sets(draw):
    """Random agents over an alphabet of two tokens: many continue, collide, retry, repeat, drift."""
    calls = []
    for index in range(draw(st.integers(1, 9))):
        tokens = st.lists(st.integers(0, 1), min_size=1, max_size=3)
        before = draw(st.sampled_from([None, *calls]))
        prompt = draw(tokens)
        if before is not None:
            kind = draw(st.sampled_from(["continue", "repeat", "exact", "drift"]))
            whole = before.prompt_ids + before.sampled_ids
            prompt = {
                "continue": whole + prompt,
                "repeat": before.prompt_ids,
                "exact": whole,
                "drift": [*whole[:-1], 1 - whole[-1], *prompt] if whole else prompt,
            }[kind]
        sampled = draw(tokens)
        call = model_call(
            id=f"c_{index}",
            started_at=draw(st.sampled_from([1.0, 2.0, 3.0])),
            prompt_ids=prompt,
            sampled_ids=sampled,
            body_hash=bytes([draw(st.integers(0, 2))]),
            retry_count=draw(st.integers(0, 2)),
            undelivered=draw(st.booleans()),
            untrainable=draw(st.sampled_from([None, None, None, "grammar", "partial"])),
        )
        if draw(st.integers(0, 5)) == 0:
            call = model_call(**{**fields(call), "late": True, "untrainable": "late"})
        calls.append(call)
    return calls


def slow_ancestors(call, calls):
    """The obvious model: ids of the calls that a call goes back to, the nearest first."""

    def whole(one):
        return one.prompt_ids + one.sampled_ids

    def order(one):
        return one.started_at, one.id

    able = [
        one
        for one in calls
        if one.prompt_ids and one.sampled_ids  # a call without tokens is continued by nobody
        if (call.late or not one.late) and call.prompt_ids[: len(whole(one))] == whole(one)
    ]
    if not able:
        return []
    longest = max(len(whole(one)) for one in able)
    equal = sorted((one for one in able if len(whole(one)) == longest), key=order)
    equal = [one for one in equal if order(one) < order(call)] or equal
    equal = [one for one in equal if one.untrainable is None and not one.undelivered] or equal
    parent = equal[-1]
    return [parent.id, *slow_ancestors(parent, calls)]


def slow_excluded(call, calls):
    if call.untrainable:
        return call.untrainable
    on_time = [one for one in calls if not one.late]
    went_on = {slow_ancestors(one, calls)[0] for one in on_time if slow_ancestors(one, calls)}
    if call.id in went_on:
        return None
    like = [one for one in on_time if one.body_hash == call.body_hash]
    counts = [one.retry_count for one in like if one.retry_count > call.retry_count]
    places = max((counts.count(count) for count in counts), default=0)
    rivals = [one for one in like if one.retry_count == call.retry_count and one.id not in went_on]
    for is_next in (
        lambda one: one.untrainable in ("error", "partial", "unparsable"),
        lambda one: one.untrainable == "superseded",
        lambda one: one.untrainable is None and one.undelivered,
        lambda one: one.untrainable is None,
    ):
        taken = sorted((one for one in rivals if is_next(one)), key=lambda one: (one.started_at, one.id))
        if call in taken[:places]:
            return "superseded"
        places -= len(taken[:places])
        rivals = [one for one in rivals if one not in taken]
    return "undelivered" if call.undelivered else None


@given(call_sets(), st.randoms(use_true_random=False))
def test_against_the_obvious_model(calls, rng):
    shuffled = rng.sample(calls, len(calls))
    graph = build(shuffled)
    assert build(calls) == graph  # a function of the set
    assert list(graph.nodes) == list(build(calls).nodes)
    by_id = {call.id: call for call in calls}
    for call in calls:
        assert [one.id for one in reversed(graph.path(call.id))][1:] == slow_ancestors(call, calls)
        assert (graph.nodes[call.id].parent is None) != (graph.nodes[call.id].fork is None)
    fate = {one.call_id: one.excluded for one in fates(graph)}
    assert fate == {call.id: slow_excluded(call, calls) for call in calls}

    trainable = sorted(id for id in fate if fate[id] is None)
    found = samples(graph)
    spans = [(span, sample) for sample in found for span in sample.spans]
    assert sorted(span.call_id for span, _ in spans) == trainable  # each owned exactly once
    for span, sample in spans:
        call = by_id[span.call_id]
        assert sample.token_ids[: span.start] == call.prompt_ids
        assert sample.token_ids[span.start : span.end] == call.sampled_ids
        assert sample.sampled_logprobs[span.start : span.end] == call.sampled_logprobs
    for sample in found:
        covered = [False] * len(sample.token_ids)
        for span in sample.spans:
            assert not any(covered[span.start : span.end])
            covered[span.start : span.end] = [True] * (span.end - span.start)
        assert covered == sample.loss_mask  # nothing trained that was not sampled
        assert any(covered)
    total = sum(sum(sample.loss_mask) for sample in found)
    assert total == sum(len(by_id[id].sampled_ids) for id in trainable)


@given(call_sets())
def test_settling_is_stable(calls):
    """Once the fates are written down, the graph of what was stored gives the same fates and samples."""
    before = build(calls)
    settled = []
    for call, fate in zip(before.nodes.values(), fates(before), strict=True):
        undelivered = fate.excluded == "undelivered"
        settled.append(
            model_call(**{**fields(call.call), "untrainable": fate.excluded, "undelivered": undelivered})
        )
    random.Random(0).shuffle(settled)
    after = build(settled)
    assert fates(after) == fates(before)
    assert samples(after) == samples(before)

import time

from capture_makers import model_call

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


def test_an_idempotency_key_says_which_of_like_requests_came_again():
    like = {"prompt_ids": [1], "body_hash": b"same"}
    calls = [
        model_call(id="c_1", started_at=1.0, sampled_ids=[2], idempotency_key="a", **like),
        model_call(id="c_2", started_at=1.0, sampled_ids=[3], idempotency_key="b", **like),
        model_call(id="c_3", started_at=2.0, sampled_ids=[4], idempotency_key="b", **like),
        model_call(id="c_4", started_at=3.0, sampled_ids=[5], **like),
    ]
    assert excluded(calls) == {"c_1": None, "c_2": "superseded", "c_3": None, "c_4": None}
    other_body = model_call(**{**fields(calls[2]), "body_hash": b"other"})
    assert excluded([calls[1], other_body]) == {"c_2": None, "c_3": None}


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


def test_what_began_before_does_not_show_that_a_response_arrived():
    """The same was sampled twice; the one that was lost came after what seems to build on it."""
    extension = model_call(id="c_1", started_at=1.0, prompt_ids=[1, 2, 3], sampled_ids=[4])
    lost = model_call(id="c_2", started_at=2.0, prompt_ids=[1], sampled_ids=[2], undelivered=True)
    assert excluded([extension, lost]) == {"c_1": None, "c_2": "undelivered"}


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
    unread = model_call(**{**fields(calls[-1]), "untrainable": None})  # whoever says so, it is not trained
    assert excluded([*calls[:-1], unread]) == excluded(calls)
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


def asked(id, at, prompt_ids, sampled_ids, *texts, reply, **fields):
    """A call of an agent whose conversation is SYSTEM and these texts: question, answer, question…"""
    messages = [
        {"role": "assistant" if place % 2 else "user", "content": text} for place, text in enumerate(texts)
    ]
    call = {"id": id, "started_at": float(at), "prompt_ids": prompt_ids, "sampled_ids": sampled_ids}
    return said(SYSTEM, *messages, reply=reply, **call, **fields)


def places(calls):
    return {id: (node.parent, node.fork) for id, node in build(calls).nodes.items()}


def owned(calls):
    """For each sample its tokens, those with loss in brackets."""
    return [
        [[id] if loss else id for id, loss in zip(sample.token_ids, sample.loss_mask, strict=True)]
        for sample in samples(build(calls))
    ]


def test_parallel_calls_share_their_beginning_and_own_what_they_sampled():
    """Three answers to one question, one of them gone on with."""
    calls = [
        asked("c_1", 1, [1], [2], "q", reply="a"),
        asked("c_2", 2, [1, 2, 3], [4], "q", "a", "r", reply="b"),
        asked("c_3", 2, [1, 2, 3], [5], "q", "a", "r", reply="c"),
        asked("c_4", 2, [1, 2, 3], [4], "q", "a", "r", reply="b"),
        asked("c_5", 3, [1, 2, 3, 5, 6], [7], "q", "a", "r", "c", "s", reply="d"),
    ]
    assert places(calls) == {
        "c_1": (None, "root"),
        "c_2": ("c_1", None),
        "c_3": ("c_1", "repeated"),
        "c_4": ("c_1", "repeated"),
        "c_5": ("c_3", None),
    }
    # The first branch owns what all begin with; that c_2 and c_4 sampled the same makes them no less two.
    assert owned(calls) == [[1, [2], 3, [4]], [1, 2, 3, [4]], [1, 2, 3, [5], 6, [7]]]


def test_a_step_back_goes_on_from_an_earlier_answer():
    calls = [
        asked("c_1", 1, [1], [2], "q", reply="a"),
        asked("c_2", 2, [1, 2, 3], [4], "q", "a", "r", reply="b"),
        asked("c_3", 3, [1, 2, 5], [6], "q", "a", "s", reply="c"),
    ]
    assert places(calls)["c_3"] == ("c_1", "branched")
    assert owned(calls) == [[1, [2], 3, [4]], [1, 2, 5, [6]]]


def test_a_break_in_the_middle_names_the_call_that_was_left_and_where():
    """The third turn replays the second answer in other tokens: it still goes on from the first."""
    calls = [
        asked("c_1", 1, [1], [2], "q", reply="a"),
        asked("c_2", 2, [1, 2, 3], [4, 5], "q", "a", "r", reply="b"),
        asked("c_3", 3, [1, 2, 3, 4, 9, 6], [7], "q", "a", "r", "b", "s", reply="c"),
        asked("c_4", 4, [1, 2, 3, 4, 9, 6, 7, 8], [10], "q", "a", "r", "b", "s", "c", "t", reply="d"),
    ]
    node = build(calls).nodes["c_3"]
    assert (node.parent, node.fork, node.near, node.shared) == ("c_1", "retokenised", "c_2", 4)
    assert places(calls)["c_4"] == ("c_3", None)
    assert owned(calls) == [[1, [2], 3, [4], [5]], [1, 2, 3, 4, 9, 6, [7], 8, [10]]]


def test_reasoning_that_the_template_strips_from_the_last_answer_only():
    calls = [
        asked("c_1", 1, [1], [50, 2], "q", reply="<think>hm</think>a"),
        asked("c_2", 2, [1, 2, 3], [51, 4], "q", "<think>hm</think>a", "r", reply="<think>ha</think>b"),
        asked("c_3", 3, [1, 2, 3, 4, 5], [52, 6], "q", "a", "r", "b", "s", reply="<think>ho</think>c"),
    ]
    assert places(calls) == {
        "c_1": (None, "root"),
        "c_2": (None, "stripped_reasoning"),
        "c_3": (None, "stripped_reasoning"),
    }
    assert owned(calls) == [[1, [50], [2]], [1, 2, 3, [51], [4]], [1, 2, 3, 4, 5, [52], [6]]]


def test_a_sub_agent_between_two_turns_breaks_nothing():
    calls = [
        asked("c_1", 1, [1], [2], "q", reply="call it"),
        said(OTHER_SYSTEM, MORE, reply="so", id="c_2", started_at=2.0, prompt_ids=[20], sampled_ids=[21]),
        asked("c_3", 3, [1, 2, 3], [4], "q", "call it", "so", reply="b"),
    ]
    assert places(calls) == {"c_1": (None, "root"), "c_2": (None, "sub_agent"), "c_3": ("c_1", None)}
    assert owned(calls) == [[20, [21]], [1, [2], 3, [4]]]


def test_a_handoff_and_back():
    """The second agent reads what the first one said; back, the first goes on where it was."""
    texts = ("q", "a", "r", "b", "s")
    other = [
        {"role": "assistant" if place % 2 else "user", "content": text} for place, text in enumerate(texts)
    ]
    calls = [
        asked("c_1", 1, [1, 2], [3], *texts[:1], reply="a"),
        said(
            OTHER_SYSTEM,
            *other[:3],
            reply="b",
            id="c_2",
            started_at=2.0,
            prompt_ids=[9, 2, 3, 4],
            sampled_ids=[5],
        ),
        asked("c_3", 3, [1, 2, 3, 4, 5, 6], [7], *texts, reply="c"),
    ]
    assert places(calls) == {"c_1": (None, "root"), "c_2": (None, "new_system_prompt"), "c_3": ("c_1", None)}
    assert owned(calls) == [[9, 2, 3, 4, [5]], [1, 2, [3], 4, 5, 6, [7]]]


def test_a_window_that_leaves_the_oldest_turn_out():
    calls = [
        asked("c_1", 1, [1, 2], [3], "q", reply="a"),
        asked("c_2", 2, [1, 2, 3, 4], [5], "q", "a", "r", reply="b"),
        asked("c_3", 3, [1, 4, 5, 6], [7], "r", "b", "s", reply="c"),
    ]
    assert places(calls)["c_3"] == (None, "compacted")
    assert owned(calls) == [[1, 2, [3], 4, [5]], [1, 4, 5, 6, [7]]]


def test_a_rollout_of_two_hundred_long_turns_is_judged_at_once():
    """A bound far above what it takes: a comparison of every pair of calls, token by token, takes minutes."""
    turn, calls, prompt, texts = 150, [], [], []
    for at in range(200):
        prompt = [*prompt, *range(1000 * at, 1000 * at + turn // 2)]
        sampled = list(range(1000 * at + 500, 1000 * at + 500 + turn // 2))
        texts.append(f"q{at}")
        calls.append(asked(f"c_{at:03}", at, prompt, sampled, *texts, reply=f"a{at}"))
        texts.append(f"a{at}")
        prompt = [*prompt, *sampled[:-1], -1]  # every answer drifts
    began = time.process_time()
    graph = build(calls)
    assert time.process_time() - began < 3.0
    assert [node.fork for node in graph.nodes.values()] == ["root", *["retokenised"] * 199]
    assert sum(sum(sample.loss_mask) for sample in samples(graph)) == 200 * turn // 2


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

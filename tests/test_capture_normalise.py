from capture.normalise import is_reasoned, message_key, opening


def assistant(arguments, **fields):
    function = {"name": "play", "arguments": arguments}
    return {
        "role": "assistant",
        "tool_calls": [{"id": "c1", "type": "function", "function": function}],
        **fields,
    }


def test_clients_write_the_same_message_in_many_ways():
    sampled = assistant('{"cell": 3, "note": "a"}', content=None, reasoning_content="hm")
    respaced = assistant('{"note":"a","cell":3}', content="")
    parsed = assistant({"cell": 3, "note": "a"})
    indexed = {"role": "assistant", "tool_calls": [{**sampled["tool_calls"][0], "index": 0}]}
    assert len({message_key(one) for one in (sampled, respaced, parsed, indexed)}) == 1
    parts = [{"type": "text", "text": "go "}, {"type": "text", "text": "on"}]
    assert message_key({"role": "user", "content": parts}) == message_key(
        {"role": "user", "content": "go on"}
    )


def test_reasoning_in_the_text_is_no_part_of_what_was_said():
    def key(text, role="assistant"):
        return message_key({"role": role, "content": text})

    assert key("<think>hm</think>\n\ngo") == key("hm</think>go") == key("go")
    assert key("<think>hm") != key("go")
    assert key("<think>hm</think>go", role="user") != key("go", role="user")
    assert [is_reasoned({"role": "assistant", "content": text}) for text in ("a</think>b", "b", None)] == [
        True,
        False,
        False,
    ]
    assert is_reasoned({"role": "assistant", "content": None, "reasoning_content": "hm"})
    assert not is_reasoned({"role": "user", "content": "</think>"})


def test_other_messages_stay_others():
    messages = [
        {"role": "user", "content": "go"},
        {"role": "user", "content": "go "},
        {"role": "system", "content": "go"},
        {"role": "tool", "content": "go", "tool_call_id": "c1"},
        {"role": "tool", "content": "go", "tool_call_id": "c2"},
        {"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]},
        {"role": "user", "content": [{"type": "image_url", "image_url": {"url": "y"}}]},
        assistant('{"cell": 3}'),
        assistant('{"cell": 4}'),
        assistant('{"cell": 3'),
        {"role": "assistant", "tool_calls": ["?"]},
        {"role": "assistant", "tool_calls": [{"id": "c1"}]},
    ]
    assert len({message_key(message) for message in messages}) == len(messages)


def test_the_opening_ends_before_the_first_answer():
    system, asked = {"role": "system", "content": "Be brief."}, {"role": "user", "content": "Which book?"}
    answer = {"role": "assistant", "content": "This one."}
    more = {"role": "user", "content": "Quick."}
    assert opening([system, asked, more, answer, asked]) == [system, asked, more]
    assert opening([asked]) == [asked]
    assert opening([]) == []

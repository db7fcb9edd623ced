from typing import Any

import pytest

from capture.fingerprint import fingerprint

SYSTEM = {"role": "system", "content": "Be brief."}
ASKED = {"role": "user", "content": "Which book?"}
ANSWER = {"role": "assistant", "content": "This one."}
LOOK = {"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}
PLAY = {"type": "function", "function": {"name": "play", "parameters": {"type": "object"}}}


def test_every_call_of_a_conversation_has_the_same_one() -> None:
    first = fingerprint([SYSTEM, ASKED], [LOOK])
    assert first.startswith("fp-")
    assert len(first) == 19
    assert int(first[3:], 16) >= 0
    assert fingerprint([SYSTEM, ASKED, ANSWER, {"role": "user", "content": "And?"}], [LOOK]) == first


@pytest.mark.parametrize(
    ("messages", "tools"),
    [
        ([{"content": "Be brief.", "role": "system"}, ASKED], [LOOK, PLAY]),
        ([SYSTEM, {"role": "user", "content": [{"type": "text", "text": "Which book?"}]}], [LOOK, PLAY]),
        ([SYSTEM, ASKED], [PLAY, LOOK]),
        ([SYSTEM, ASKED], [{"function": LOOK["function"], "type": "function"}, PLAY]),
    ],
)
def test_spelling_does_not_change_it(messages: list[dict[str, Any]], tools: list[dict[str, Any]]) -> None:
    assert fingerprint(messages, tools) == fingerprint([SYSTEM, ASKED], [LOOK, PLAY])


@pytest.mark.parametrize(
    ("messages", "tools"),
    [
        ([SYSTEM, {"role": "user", "content": "Which one?"}], [LOOK]),
        ([ASKED], [LOOK]),
        ([{"role": "system", "content": "Be long."}, ASKED], [LOOK]),
        ([SYSTEM, ASKED], []),
        ([SYSTEM, ASKED], [PLAY]),
        ([SYSTEM, ASKED], [LOOK, PLAY]),
    ],
)
def test_another_task_has_another_one(messages: list[dict[str, Any]], tools: list[dict[str, Any]]) -> None:
    assert fingerprint(messages, tools) != fingerprint([SYSTEM, ASKED], [LOOK])

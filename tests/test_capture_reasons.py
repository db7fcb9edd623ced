"""The reasons why tokens are not trained: closed sets, in sentences."""

from itertools import combinations

import pytest

from capture.reasons import DROPPED, FORKS, NOT_FOR_TRAINING, UNTRAINABLE

SETS = [UNTRAINABLE, NOT_FOR_TRAINING, DROPPED, FORKS]


@pytest.mark.parametrize(("first", "second"), combinations(SETS[:3], 2))
def test_a_reason_is_in_one_set_only(first: dict[str, str], second: dict[str, str]) -> None:
    assert not first.keys() & second.keys()


@pytest.mark.parametrize("reasons", SETS)
def test_every_reason_has_a_sentence(reasons: dict[str, str]) -> None:
    for reason, sentence in reasons.items():
        assert reason.isidentifier()
        assert reason == reason.lower()
        assert sentence[0].isupper()
        assert sentence.endswith(".")
        assert ". " not in sentence


def test_what_capture_promises_to_say_is_there() -> None:
    promised = [
        "provider",
        "grammar",
        "sampling",
        "redacted",
        "partial",
        "late",
        "undelivered",
        "no_token_ids",
    ]
    assert UNTRAINABLE.keys() >= {*promised, "length_mismatch", "other_policy", "media"}
    assert "superseded" in NOT_FOR_TRAINING

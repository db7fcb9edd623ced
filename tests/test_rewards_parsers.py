"""What scripts read out of text, and assertions with partial credit."""

import math

import pytest

from rewards.checks import Checks
from rewards.parsers import all_tagged, format_share, json_object, number, reply, tagged


def test_the_reply_is_the_last_thing_said() -> None:
    turns = [
        {"role": "user", "content": "go"},
        {"role": "assistant", "content": "first"},
        {"role": "assistant", "content": "last"},
        {"role": "assistant", "tool_calls": [{"name": "look", "arguments": {}}]},
        {"role": "assistant", "content": "  "},
        {"role": "tool", "name": "look", "content": "seen"},
    ]
    assert reply({"turns": turns}) == "last"
    assert reply({"turns": turns[:1]}) == ""
    assert reply({"turns": [{"role": "assistant", "content": [{"type": "image_url"}]}]}) == ""


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        ("<answer> 42\n</answer>", "42"),
        ("<answer>41</answer> no: <answer>42</answer>", "42"),
        ("<answer>41</answer><answer>42", "41"),
        ("<answer>41<answer>42</answer>", "42"),
        ("</answer>42<answer>", None),
        ("<answer>", None),
        ("<answer></answer>", ""),
        ("<answers>42</answers>", None),
        ("", None),
    ],
)
def test_tagged(text: str, answer: str | None) -> None:
    assert tagged(text, "answer") == answer


def test_all_that_is_tagged_in_order() -> None:
    assert all_tagged("<x>a</x> </x> <x>b</x><y>c</y>", "x") == ["a", "b"]


@pytest.mark.parametrize(
    ("text", "share"),
    [
        ("<think>a</think>\n<answer>b</answer>\n", 1.0),
        ("so: <think>a</think><answer>b</answer>", 0.75),
        ("<answer>b</answer><think>a</think>", 0.75),
        ("<answer>b</answer>", 0.25),
        ("<think>a</think><answer> </answer>", 0.25),
        ("<think>a</think><answer>b</answer><answer>b</answer>", 0.25),
        ("</think>a<think>", 0.0),
        ("nothing", 0.0),
    ],
)
def test_the_share_of_a_format(text: str, share: float) -> None:
    assert format_share(text, "think", "answer") == share


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ('{"a": 1}', {"a": 1}),
        ('```json\n{"a": {"b": 2}}\n```', {"a": {"b": 2}}),
        ('{no} then {"a": 1} and {"a": 2}.', {"a": 2}),
        ("[1, 2]", None),
        ('{"a": 1', None),
        ("{" * 5_000, None),
        ('{"a":' * 100_000, None),
    ],
)
def test_the_last_json_object(text: str, found: dict[str, object] | None) -> None:
    assert json_object(text) == found


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("42", 42.0),
        (" $1,250.50 ", 1250.5),
        ("-3", -3.0),
        ("+.5", 0.5),
        ("50 %", 50.0),
        ("1,2", None),
        ("42 apples", None),
        ("-", None),
        ("", None),
        ("nan", None),
        (None, None),
    ],
)
def test_a_number_as_people_write_it(text: str | None, value: float | None) -> None:
    assert number(text) == value


def test_checks_have_partial_credit() -> None:
    checks = Checks({"form": 1.0, "right": 3.0, "never": 1.0, "words": 0.0})
    checks.add("form", 0.5, "half of it")
    checks.add("words", 1.0)
    with checks.that("right"):
        assert 1 + 1 == 2
    assert checks.score == pytest.approx((0.5 + 3.0) / 5.0)
    assert checks.scores == {"form": 0.5, "right": 1.0, "never": 0.0, "words": 1.0}
    assert checks.failures == {"form": "half of it"}


def test_a_check_without_a_weight_weighs_one() -> None:
    checks = Checks()
    checks.add("a", True)
    with checks.that("b", KeyError):
        raise KeyError("missing")
    with checks.that("c"):
        raise AssertionError("never")
    assert checks.score == pytest.approx(1 / 3)
    assert checks.failures == {"b": "KeyError: 'missing'", "c": "AssertionError: never"}


def test_what_is_the_scripts_own_fault_goes_on() -> None:
    checks = Checks()
    with pytest.raises(ZeroDivisionError), checks.that("a"):
        raise ZeroDivisionError
    with pytest.raises(ValueError, match="from 0 to 1"):
        checks.add("a", 1.5)
    with pytest.raises(ValueError, match="from 0 to 1"):
        checks.add("a", math.nan)
    checks.add("a", False)
    with pytest.raises(ValueError, match="already"):
        checks.add("a", True)
    with pytest.raises(ValueError, match="0 or more"):
        Checks({"a": -1.0})
    with pytest.raises(ValueError, match="no check has weight"):
        _ = Checks({"a": 0.0}).score

"""What the named patterns find, and which expressions are refused."""

import time

import pytest

from capture.errors import ConfigError
from capture.patterns import NAMED, finder, is_luhn
from capture.settings import Settings

KEY = "0123456789abcdefghijklmnopqrstuvwxyzABCDEFGHIJ"


@pytest.mark.parametrize(
    ("name", "text", "found"),
    [
        ("email", "write to bob.o-b+x@mail.example.co.uk, or not", ["bob.o-b+x@mail.example.co.uk"]),
        ("email", "<a@b.io>;c@d.org", ["a@b.io", "c@d.org"]),
        ("email", "jürgen@bücher.example", ["jürgen@bücher.example"]),
        ("email", "@app.route x@y a@b.c1 a @ b.org 5@3.14 a@-b.org", []),
        ("email", "-" * 200 + "bob@example.org", ["-" * 61 + "bob@example.org"]),
        ("api_key", f"OPENAI_API_KEY=sk-proj-{KEY}", [f"sk-proj-{KEY}"]),
        ("api_key", f"sk-ant-api03-{KEY} ghp_{KEY[:36]}", [f"sk-ant-api03-{KEY}", f"ghp_{KEY[:36]}"]),
        ("api_key", f"github_pat_{KEY} glpat-{KEY[:20]}", [f"github_pat_{KEY}", f"glpat-{KEY[:20]}"]),
        ("api_key", f"hf_{KEY[:34]} xoxb-123-{KEY[:9]}", [f"hf_{KEY[:34]}", f"xoxb-123-{KEY[:9]}"]),
        ("api_key", "AKIAIOSFODNN7EXAMPLE sk_live_" + KEY, ["AKIAIOSFODNN7EXAMPLE", f"sk_live_{KEY}"]),
        ("api_key", f"AIza{KEY[:35]}", [f"AIza{KEY[:35]}"]),
        ("api_key", f"r_{KEY[:26]}.{KEY[:32]}", [f"r_{KEY[:26]}.{KEY[:32]}"]),
        ("api_key", f"ask-{KEY} sk-short1 sk-learn-compatible-estimators AKIA{KEY[:16]}", []),
        ("credit_card", "4111 1111 1111 1111 2027", ["4111 1111 1111 1111"]),
        ("credit_card", "4111 1111 1111 1111 123", ["4111 1111 1111 1111"]),
        ("credit_card", "25 4111-1111-1111-1111 25", ["4111-1111-1111-1111"]),
        ("credit_card", "378282246310005 5555555555554444", ["378282246310005", "5555555555554444"]),
        ("credit_card", "2223003122003222 30569309025904", ["2223003122003222", "30569309025904"]),
        ("credit_card", "4111111111111112 41111111111111110 0.4111111111111111 1763726400123", []),
        (
            "private_key",
            "a -----BEGIN RSA PRIVATE KEY-----\nMII\n-----END RSA PRIVATE KEY----- b",
            ["-----BEGIN RSA PRIVATE KEY-----\nMII\n-----END RSA PRIVATE KEY-----"],
        ),
        ("private_key", "a -----BEGIN PRIVATE KEY-----\nMII", ["-----BEGIN PRIVATE KEY-----\nMII"]),
        ("private_key", "-----BEGIN PUBLIC KEY-----", []),
    ],
)
def test_a_name_finds_what_it_says_and_not_much_else(name: str, text: str, found: list[str]) -> None:
    assert [text[start:end] for start, end in sorted(finder(name).find(text))] == found
    assert finder(name).marker == f"[redacted:{name}]"


@pytest.mark.parametrize("name", NAMED)
@pytest.mark.parametrize(
    "seed", ["a", "4", "4 ", "@", "a@", "sk-", "-----BEGIN PRIVATE KEY-----", "a.", "r_"]
)
def test_the_names_take_linear_time(name: str, seed: str) -> None:
    text = seed * (400_000 // len(seed))
    began = time.thread_time()
    finder(name).find(text)
    assert time.thread_time() - began < 2.0


def test_luhn() -> None:
    assert is_luhn("79927398713")
    assert not is_luhn("79927398710")


@pytest.mark.parametrize(
    ("pattern", "says"),
    [
        ("(", "is not a regular expression: missing )"),
        ("[z-a]", "is not a regular expression: bad character range"),
        ("", "matches the empty string"),
        ("x*", "matches the empty string"),
        (r"\b", "matches the empty string"),
        ("(?=a)", "matches the empty string"),
        ("(a+)+$", "exponential"),
        (r"key=(\w+\s?)*;", "exponential"),
        ("(q+q+)+z", "exponential"),
    ],
)
def test_what_cannot_work_is_refused_by_name(pattern: str, says: str) -> None:
    with pytest.raises(ConfigError) as caught:
        Settings(redact=("email", pattern))
    assert str(caught.value).startswith(f"capture.redact: {pattern!r} ")
    assert says in str(caught.value)


@pytest.mark.parametrize(
    "pattern", ["hunter2", r"(?i)pin \d{4}", r"(?:[a-z]+\.)+corp", r"^\d{5}$", "(?<=k=)v"]
)
def test_ordinary_expressions_are_taken(pattern: str) -> None:
    assert finder(pattern).marker == "[redacted]"

"""What redaction looks for: names for well-known secrets, and an owner's regular expressions. Pure.

A name is precise rather than complete: it must not make ordinary text untrainable. `find` takes time
linear in the text for the names; for an owner's expressions that is the owner's business (Python's `re`
tries alternatives one after the other), and those that already take exponential time on repeated
characters are refused.
"""

import re
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Final

import msgspec

from capture.errors import ConfigError

Span = tuple[int, int]

SETTING = "capture.redact"
SLOW_S = 0.05  # no decent expression takes that long on a text of 32 characters

_LOCAL = re.compile(r"[\w.%+-]+\Z")
_LOCAL_MAX = 64
_DOMAIN = re.compile(r"@(?:[^\W_](?:[\w-]{0,61}[^\W_])?\.){1,8}[^\W\d_]{2,63}(?![\w-])")
_API_KEYS = {  # what is looked for first -> the whole key; nobody's word begins with these
    "sk-": r"sk-(?=[\w-]{0,80}\d)[\w-]{20,}",  # OpenAI, Anthropic, OpenRouter, DeepSeek
    "sk_live_": r"sk_live_[0-9A-Za-z]{16,}",  # Stripe
    "gh": r"gh[pousr]_[0-9A-Za-z]{36,}",  # GitHub
    "github_pat_": r"github_pat_\w{22,}",
    "glpat-": r"glpat-[\w-]{20,}",  # GitLab
    "hf_": r"hf_[0-9A-Za-z]{30,}",  # Hugging Face
    "xox": r"xox[abeoprs]-[0-9A-Za-z-]{10,}",  # Slack
    "AKIA": r"AKIA[0-9A-Z]{16}(?![0-9A-Za-z])",  # AWS
    "AIza": r"AIza[\w-]{35}",  # Google
    "r_": r"r_[0-9a-z]{26}\.[\w-]{32}",  # of a rollout
}
_SIGNED = tuple(
    (sign, re.compile(rf"(?<![0-9A-Za-z])(?:{key})", re.ASCII)) for sign, key in _API_KEYS.items()
)
_PRIVATE_KEY = re.compile(
    r"-----BEGIN (?:[A-Z0-9]{1,16} ){0,3}PRIVATE KEY-----"
    r"(?:(?!-----END )[\s\S])*(?:-----END (?:[A-Z0-9]{1,16} ){0,3}PRIVATE KEY-----)?",
)
_DIGITS = re.compile(r"[2-6](?<!\d[2-6])(?<!\d\.[2-6])(?=(\d{3}(?:[ -]?\d{3,6}){2,5}))", re.ASCII)
_CARD_CHARS_MAX = 19 + 4  # digits, and what stands between their groups
_CARD = re.compile(  # by the lengths and first digits that networks issue
    r"3[47]\d{13}|3(?:0[0-5]|[68]\d)\d{11}|35(?:2[89]|[3-8]\d)\d{12}|4\d{12}(?:\d{3}){0,2}|5[1-5]\d{14}"
    r"|2(?:22[1-9]|2[3-9]\d|[3-6]\d\d|7[01]\d|720)\d{12}|6(?:011|5\d\d|4[4-9]\d)\d{12}|62\d{14,17}",
    re.ASCII,
)


class Finder(msgspec.Struct, frozen=True):
    """Where something stands in a text, and what is put there."""

    find: Callable[[str], Sequence[Span]]
    marker: str
    anywhere: bool  # it finds something in every text that contains one in which it finds something


def finder(pattern: str) -> Finder:
    """What a pattern of the setting means. `ConfigError` names it where it means nothing."""
    if pattern in NAMED:
        return Finder(NAMED[pattern], f"[redacted:{pattern}]", True)
    try:
        compiled = re.compile(pattern)
    except (re.error, RecursionError, OverflowError) as error:
        raise ConfigError(f"{SETTING}: {pattern!r} is not a regular expression: {error}") from None
    if any(match.end() == match.start() for text in _PLAIN for match in compiled.finditer(text)):
        raise ConfigError(f"{SETTING}: {pattern!r} matches the empty string, so it would match everywhere")
    if _is_slow(compiled):
        raise ConfigError(
            f"{SETTING}: {pattern!r} takes exponential time on some texts and would stop the proxy: "
            "let no repetition contain another that can match the same text, or make it possessive (++)"
        )
    return Finder(_spans_of(compiled), "[redacted]", _LOOKS_AROUND.search(pattern) is None)


def check(patterns: Sequence[str]) -> None:
    """Raise `ConfigError` for the first pattern that cannot work."""
    for pattern in patterns:
        finder(pattern)


def _spans_of(pattern: re.Pattern[str]) -> Callable[[str], Sequence[Span]]:
    def find(text: str) -> Sequence[Span]:
        if pattern.search(text) is None:
            return ()
        return [match.span() for match in pattern.finditer(text) if match.end() > match.start()]

    return find


def _emails(text: str) -> Sequence[Span]:
    found: list[Span] = []
    for at in _places(text, "@"):
        local = _LOCAL.search(text[max(0, at - _LOCAL_MAX) : at])
        domain = None if local is None else _DOMAIN.match(text, at)
        if local is not None and domain is not None:
            found.append((at - len(local[0]), domain.end()))
    return found


def _api_keys(text: str) -> Sequence[Span]:
    matches = (key.match(text, at) for sign, key in _SIGNED for at in _places(text, sign))
    return [match.span() for match in matches if match is not None]


def _places(text: str, sign: str) -> Iterator[int]:
    at = text.find(sign)
    while at >= 0:
        yield at
        at = text.find(sign, at + 1)


def _private_keys(text: str) -> Sequence[Span]:
    return [match.span() for match in _PRIVATE_KEY.finditer(text)] if "PRIVATE KEY-----" in text else ()


def _credit_cards(text: str) -> Sequence[Span]:
    return [span for match in _DIGITS.finditer(text) if (span := _card_at(text, match)) is not None]


def _card_at(text: str, match: re.Match[str]) -> Span | None:
    """The longest card number that begins there; what follows it may be digits of something else."""
    start = match.start()
    end = min(match.end(1), start + _CARD_CHARS_MAX)
    for stop in range(end, start + 12, -1):
        if not text[stop - 1].isdigit() or text[stop : stop + 1].isdigit():
            continue
        digits = text[start:stop].replace(" ", "").replace("-", "")
        if _CARD.fullmatch(digits) and is_luhn(digits):
            return start, stop
    return None


def is_luhn(digits: str) -> bool:
    """Whether the last digit checks the others (ISO/IEC 7812-1, annex B)."""
    values = [int(digit) for digit in reversed(digits)]
    doubled = [sum(divmod(2 * value, 10)) for value in values[1::2]]
    return (sum(values[::2]) + sum(doubled)) % 10 == 0


NAMED: Final[dict[str, Callable[[str], Sequence[Span]]]] = {
    "email": _emails,
    "api_key": _api_keys,
    "credit_card": _credit_cards,
    "private_key": _private_keys,
}
"""Name -> where such things stand in a text."""

# -- what an expression does before it is used -----------------------------------------------------

# Anchors, assertions, possessive repetitions; rather one too many.
_LOOKS_AROUND = re.compile(r"(?<!\[)\^|\$|\\[AZ]|\(\?[=!<>(]|[+*?}]\+")
_PLAIN = ("", "a", "A b", "0", " ", "\n", "a.b@c-d_e:1/\"'{}[]=,")
_SEEDS = ("a", "A", "0", " ", "-", ".", "_", "/", "=", '"', "\n", "a0", "a ", "a.", "0 ", "aA")
_OWN_MAX = 32  # characters of the expression that are repeated too


def _is_slow(pattern: re.Pattern[str]) -> bool:
    """Whether time doubles with every character of a repeated text, behind what it literally begins with."""
    begins = re.match(r"[^\\.^$*+?{}\[\]|()]*", pattern.pattern)
    before = begins[0] if begins else ""
    own = [char for char in dict.fromkeys(pattern.pattern) if char not in _SEEDS][:_OWN_MAX]
    return any(_takes_long(pattern, text) for text in _growing(before, (*_SEEDS, *own)))


def _growing(before: str, seeds: Sequence[str]) -> Iterator[str]:
    for seed in seeds:
        for count in range(8, 33, 2):
            yield f"{before}{seed * count}\0"


def _takes_long(pattern: re.Pattern[str], text: str) -> bool:
    began = time.thread_time()
    pattern.search(text)
    return time.thread_time() - began > SLOW_S

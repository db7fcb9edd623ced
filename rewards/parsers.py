"""What reward scripts read out of text: `from rewards.parsers import tagged`. Standard library alone.

Nothing here raises over what a model wrote: what is not there is None or 0.0, and the script decides
what that is worth.
"""

from __future__ import annotations

import json
import re
from typing import Any

OBJECTS_TRIED_MAX = 1_000


def reply(trace: dict[str, Any]) -> str:
    """The text of the last thing that the agent's model said; empty if it said nothing."""
    for turn in reversed(trace["turns"]):
        if turn["role"] == "assistant" and isinstance(turn.get("content"), str) and turn["content"].strip():
            return str(turn["content"])
    return ""


def tagged(text: str, tag: str) -> str | None:
    """What the last whole `<tag>…</tag>` holds, without whitespace at its ends; None if there is none.

    Of an answer that is given twice the last one counts; one that is not closed is none.
    """
    found = all_tagged(text, tag)
    return found[-1] if found else None


def all_tagged(text: str, tag: str) -> list[str]:
    """What each whole `<tag>…</tag>` holds, in order. A tag that is opened again begins anew."""
    opened, closed = f"<{tag}>", f"</{tag}>"
    parts = text.split(closed)[:-1]
    return [part.rpartition(opened)[2].strip() for part in parts if opened in part]


def format_share(text: str, *tags: str) -> float:
    """How far the text is `<first>…</first><second>…</second>…` and nothing else, from 0 to 1.

    One point for each tag that stands exactly once, whole and not empty; one for the right order; one for
    no other text around them. The share of these points.
    """
    spans = [_only(text, tag) for tag in tags]
    points = sum(span is not None for span in spans)
    if points == len(tags):
        whole = [span for span in spans if span is not None]
        points += all(whole[n - 1][1] <= whole[n][0] for n in range(1, len(whole)))
        points += not _outside(text, whole).strip()
    return points / (len(tags) + 2)


def _only(text: str, tag: str) -> tuple[int, int] | None:
    """Where the one whole element of this name stands."""
    opened, closed = f"<{tag}>", f"</{tag}>"
    if text.count(opened) != 1 or text.count(closed) != 1:
        return None
    start, end = text.index(opened), text.index(closed)
    return (start, end + len(closed)) if text[start + len(opened) : end].strip() else None


def _outside(text: str, spans: list[tuple[int, int]]) -> str:
    kept, at = [], 0
    for start, end in sorted(spans):
        kept.append(text[at:start])
        at = max(at, end)
    return "".join([*kept, text[at:]])


def json_object(text: str) -> dict[str, Any] | None:
    """The last JSON object in the text that is in no other one: bare, in a fence, after reasoning; None if
    there is none."""
    decoder = json.JSONDecoder()
    found, at = None, 0
    for _ in range(OBJECTS_TRIED_MAX):
        at = text.find("{", at)
        if at < 0:
            break
        try:
            found, at = decoder.raw_decode(text, at)
        except (ValueError, RecursionError):
            at += 1
    return found


def number(text: str | None) -> float | None:
    """The number that the text is, as people write it (`1,250`, `$3.50`, `50%` as 50); None if it is none."""
    if text is None:
        return None
    found = re.fullmatch(r"\s*[$€£]?\s*([-+]?(?:\d{1,3}(?:,\d{3})+|\d+)?(?:\.\d+)?)\s*%?\s*", text)
    digits = found[1].replace(",", "") if found else ""
    return float(digits) if re.search(r"\d", digits) else None

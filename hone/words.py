"""What the sentences about a rollout are made of. Pure."""

from typing import Any

import msgspec

from capture.reasons import DROPPED, NOT_FOR_TRAINING, UNTRAINABLE
from capture.types import Rollout
from hone.facts import Facts

ERROR_CHARS_MAX = 200


class Verdict(msgspec.Struct, frozen=True, kw_only=True):
    """The answer."""

    kind: str  # what decided: a state, a drop reason, or one of the kinds in `docs/explain.md`
    sentence: str
    setting: str | None = None  # `section.key` that would change it


def sentence_of(reason: str) -> str:
    """The reason's sentence, to stand inside another one."""
    text = UNTRAINABLE.get(reason) or NOT_FOR_TRAINING.get(reason) or DROPPED.get(reason) or reason
    return text[:1].lower() + text[1:].removesuffix(".")


def error_line(text: str) -> str:
    """The line of a traceback that says what happened; the first line of anything else."""
    lines = [line for line in text.splitlines() if line.strip()]
    starts = [n for n, line in enumerate(lines) if line.startswith("Traceback (")]
    if starts:
        after = lines[starts[-1] + 1 :]
        said = next((line for line in after if not line.startswith(" ")), "")
        return shortened(said or lines[starts[-1]])
    return shortened(lines[0]) if lines else "it said nothing"


def number(value: Any) -> str:
    """As short as it is exact enough for a person."""
    return f"{value:.6g}" if isinstance(value, int | float) else str(value)


def count(amount: int, noun: str) -> str:
    """`1 call`, `2 calls`."""
    return f"{amount} {noun}{'' if amount == 1 else 's'}"


def are(amount: int) -> str:
    """`is` or `are`."""
    return "is" if amount == 1 else "are"


def shortened(text: str) -> str:
    """Without its period, cut where it is too long for a sentence."""
    text = text.strip().rstrip(".")
    return text if len(text) <= ERROR_CHARS_MAX else text[: ERROR_CHARS_MAX - 1] + "…"


def version_of(rollout: Rollout) -> str:
    """`v3`."""
    return "-" if rollout.policy_version is None else f"v{rollout.policy_version}"


def equals(facts: Facts, name: str) -> str:
    """` = 4`, to stand after a setting's name; empty where its value is not known."""
    value = facts.setting(name)
    return "" if value is None else f" = {number(value)}"


def ago(facts: Facts, at: float) -> str:
    """`12 s ago`."""
    seconds = max(0.0, facts.now - at)
    if seconds < 120:
        return f"{seconds:.0f} s ago"
    return f"{seconds / 60:.0f} min ago" if seconds < 7200 else f"{seconds / 3600:.0f} h ago"


def leads(facts: Facts, prefix: str) -> bool:
    """Whether a lease of that name is held, so the part runs."""
    return any(name.startswith(prefix) for name in facts.history.leases)


def nobody_does(facts: Facts, part: str) -> str:
    """Said where the part that does the next thing holds no lease, so does not run."""
    return "" if leads(facts, part) else f"; no {part} runs now: `hone up` starts it"

"""What the sentences about a rollout are made of. Pure."""

from typing import Any

import msgspec

from capture.reasons import (
    DROPPED,
    GRAMMAR,
    LATE,
    NOT_FOR_TRAINING,
    OTHER_POLICY,
    PROVIDER,
    REDACTED,
    UNTRAINABLE,
)
from capture.types import Rollout
from hone.explain.facts import ZERO_ADVANTAGE, Facts

ERROR_CHARS_MAX = 200
SETTINGS = {
    GRAMMAR: "sampling.grammar",
    PROVIDER: "routes",
    REDACTED: "capture.redact",
    OTHER_POLICY: "routes",
    LATE: "proxy.finish_wait_s",
    ZERO_ADVANTAGE: "train.group_size",
    "failed": "train.infrastructure_retries",
    "reward_error": "rewards.script",
    "group_too_small": "train.group_size",
    "agent_failure": "rewards.on_agent_failure",
    "group_deadline": "rewards.group_deadline_s",
    "stale": "train.staleness_max",
    "nonfinite": "train.lr",
    "zero_variance": "train.zero_variance_filter",
    "too_hard": "train.group_reward_min",
    "too_easy": "train.group_reward_max",
    "overlong": "train.overlong_filter",
    "out_of_memory": "engine.max_model_len",
    "run_ended": "train.steps_max",
}
"""Reason -> the setting that would change it; reasons that no setting changes are not here."""


class Verdict(msgspec.Struct, frozen=True, kw_only=True):
    """The answer."""

    kind: str  # what decided: see `hone.explain.verdict`
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


def named(facts: Facts, name: str) -> str:
    """`train.staleness_max = 4`; the name alone where its value is not known or too long for a sentence."""
    value = facts.setting(name)
    return f"{name} = {number(value)}" if isinstance(value, int | float | str) and value != "" else name


def ago(facts: Facts, at: float) -> str:
    """`12 s ago`."""
    return f"{duration(facts.now - at)} ago"


def duration(seconds: float) -> str:
    """`12 s`, `3 min`, `5 h`."""
    seconds = max(0.0, seconds)
    if seconds < 120:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 7200 else f"{seconds / 3600:.0f} h"


def leads(facts: Facts, prefix: str) -> bool:
    """Whether a lease of that name is held, so the part runs."""
    return any(name.startswith(prefix) for name in facts.history.leases)


def no_control(facts: Facts) -> str:
    """Said where control does the next thing and does not run."""
    return "" if leads(facts, "control") else "; no control runs now: `hone up` starts it"


def no_learner(facts: Facts) -> str:
    """Said where the learner does the next thing and does not run."""
    return "" if leads(facts, "learner:") else "; no learner runs now: `hone train` starts one"

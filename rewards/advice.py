"""What the figures of a trial say about training with a script, in plain sentences. Pure.

The bounds are the field's rules of thumb: no reward in 10 attempts is too hard, 80 % before any training is
too easy, and a group teaches by the spread of its rewards.
"""

import math
from collections import defaultdict
from collections.abc import Iterator, Sequence

from rewards.report import Report, Row
from rewards.settings import Settings

HARD_ATTEMPTS = 10
EASY_SHARE = 0.8
EASY_ATTEMPTS = 4  # fewer say nothing about one scenario
SIGNAL_SHARE = 0.5
SLOW_SHARE = 0.5  # of the deadline
SLOW_S = 0.5
CONSTANT_MIN = 10  # rollouts
NAMED_MAX = 5


def advise(report: Report, rows: Sequence[Row], settings: Settings) -> list[str]:
    """Sentences, the most important first; there is always one."""
    said = [*_failed(report), *_latency(report, settings)]
    if report.reward is None:
        return said or ["No rollout was scored, so there is nothing to say about the script."]
    if report.reward.min == report.reward.max and report.scored > 1:
        said.insert(0, f"Every reward is {report.reward.min:g}: nothing can be learned from that.")
    else:
        said += [*_hard(rows), *_easy(rows, report), *_spread(report), *_constant(report)]
    said += _failing_pays(rows)
    return said or ["Nothing speaks against training with this script."]


def _failed(report: Report) -> Iterator[str]:
    if report.failed:
        yield (
            f"The script failed on {report.failed} of {_count(report.rollouts, 'rollout')}: in training they "
            "would be dropped (reward_error), never scored 0. Mend that first."
        )


def _hard(rows: Sequence[Row]) -> Iterator[str]:
    never = {name: len(values) for name, values in _rewards(rows).items() if max(values) <= 0}
    hard = sorted(name for name, attempts in never.items() if attempts >= HARD_ATTEMPTS)
    if hard:
        yield (
            f"Too hard: {_count(len(hard), 'scenario')} had no reward above 0 in {HARD_ATTEMPTS} or more "
            f"attempts ({_named(hard)}). What never succeeds teaches nothing: take easier scenarios, or give "
            "credit for parts of the way."
        )
    few = len(never) - len(hard)
    if few:
        yield (
            f"{_count(few, 'scenario')} had no reward above 0 so far; with fewer than {HARD_ATTEMPTS} "
            "attempts each it is too early to call them too hard."
        )


def _easy(rows: Sequence[Row], report: Report) -> Iterator[str]:
    """By what version 0 did; where no reward is above 1, 1 is the most that can be had."""
    assert report.reward is not None
    untrained = [row for row in rows if row.untrained and row.reward is not None]
    if not untrained:
        yield (
            "None of these rollouts is the untrained policy's, so they cannot tell whether the scenarios are "
            "too easy: run `hone eval` before training, then this again."
        )
        return
    most = max(1.0, report.reward.max)
    mean = math.fsum(row.reward or 0.0 for row in untrained) / len(untrained)
    if mean >= EASY_SHARE * most:
        yield (
            f"Too easy: without any training the mean reward is {mean:.2f} of {most:g} ({mean / most:.0%}). "
            "Take harder scenarios, or a stricter script."
        )
        return
    by_scenario = _rewards(untrained)
    easy = sorted(
        name
        for name, values in by_scenario.items()
        if len(values) >= EASY_ATTEMPTS and math.fsum(values) / len(values) >= EASY_SHARE * most
    )
    if easy:
        yield (
            f"{len(easy)} of {_count(len(by_scenario), 'scenario')} are too easy: without any training they "
            f"have {EASY_SHARE:.0%} of the reward or more ({_named(easy)})."
        )


def _spread(report: Report) -> Iterator[str]:
    signal = report.signal
    if not signal.groups:
        yield "No scenario was attempted twice, so nothing is known of the spread within groups."
        return
    share = signal.with_signal / signal.groups
    if share < SIGNAL_SHARE and signal.group_size == 1:
        yield (
            f"Little spread: only {signal.with_signal} of {_count(signal.groups, 'reward')} ({share:.0%}) "
            "differ from the mean of those before of the same scenario; the others would train nothing. More "
            "attempts at each scenario (train.epochs) or groups of several (train.group_size) make more."
        )
    elif share < SIGNAL_SHARE:
        yield (
            f"Little spread: only {signal.with_signal} of {_count(signal.groups, 'group')} ({share:.0%}) "
            "have two different rewards; the others would train nothing. Finer scores, scenarios of middling "
            "difficulty, a higher temperature or larger groups (train.group_size) make more of them."
        )


def _constant(report: Report) -> Iterator[str]:
    if report.scored < CONSTANT_MIN or len(report.scores) < 2:
        return
    for name, values in report.scores.items():
        if values.min == values.max and values.count == report.scored and report.weights.get(name, 1.0):
            yield f"The score `{name}` is {values.min:g} in every rollout: it teaches nothing."


def _failing_pays(rows: Sequence[Row]) -> Iterator[str]:
    ended = [row.reward for row in rows if row.reward is not None and row.status == "completed"]
    broken = [row.reward for row in rows if row.reward is not None and row.status not in ("completed", None)]
    if not ended or not broken:
        return
    good, bad = math.fsum(ended) / len(ended), math.fsum(broken) / len(broken)
    if bad > good:
        yield (
            f"Failing pays: {_count(len(broken), 'rollout')} whose agent crashed, timed out or hit a cap "
            f"have a mean reward of {bad:.2f}, completed ones {good:.2f}. `status` of the trace says which "
            "these are."
        )


def _latency(report: Report, settings: Settings) -> Iterator[str]:
    if report.latency is None:
        return
    if report.latency.p95_s >= SLOW_SHARE * settings.timeout_s:
        yield (
            f"Slow: one rollout in twenty takes {report.latency.p95_s:.1f} s or more, and at "
            f"rewards.timeout_s = {settings.timeout_s:g} a script is killed. Raise it, or make the script "
            "faster."
        )
    if report.latency.mean_s >= SLOW_S:
        pace = 60 * settings.workers / report.latency.mean_s
        yield (
            f"At {report.latency.mean_s:.1f} s each, rewards.workers = {settings.workers} score {pace:.0f} "
            "rollouts a minute; a script that waits for others may have more workers."
        )


def _rewards(rows: Sequence[Row]) -> dict[str, list[float]]:
    found: dict[str, list[float]] = defaultdict(list)
    for row in rows:
        if row.scenario_id is not None and row.reward is not None:
            found[row.scenario_id].append(row.reward)
    return found


def _named(names: Sequence[str]) -> str:
    return ", ".join([*names[:NAMED_MAX], *(["…"] if len(names) > NAMED_MAX else [])])


def _count(number: int, what: str) -> str:
    return f"{number} {what}" if number == 1 else f"{number} {what}s"

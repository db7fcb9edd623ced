"""A tested script as lines of text."""

from collections.abc import Iterator

from hone.trial import LEFT_OUT, Tested
from rewards.report import Bar, Failure, Latency, Numbers, Report, ScenarioRow, Signal

BAR_CHARS = 40
SCENARIOS_SHOWN = 20
FAILURES_SHOWN = 5
ERROR_LINES = 30


def lines(tested: Tested) -> Iterator[str]:
    """All of it, the advice last."""
    found = tested.report
    failed = f", the script failed on {found.failed}" if found.failed else ""
    yield f"{tested.script}: {found.scored} of {found.rollouts} rollouts scored{failed}"
    yield from (f"left out: {count} ({LEFT_OUT[reason]})" for reason, count in tested.left_out.items())
    if found.reward is not None:
        yield from ("", *_distribution(found, found.reward), "", *_scenarios(found.scenarios))
        yield from ("", *_signal(found.signal))
    if found.latency is not None:
        yield from ("", _latency(found.latency))
    for failure in found.failures[:FAILURES_SHOWN]:
        yield from ("", *failure_lines(failure))
    if len(found.failures) > FAILURES_SHOWN:
        yield f"… and {len(found.failures) - FAILURES_SHOWN} other errors; --json has them all"
    yield from ("", *(f"* {sentence}" for sentence in tested.advice))


def _distribution(report: Report, reward: Numbers) -> Iterator[str]:
    width = max((len(name) for name in report.scores), default=0)
    yield f"{'reward':<{max(6, width)}}  {_figures(reward)}"
    if report.scores.keys() != {"reward"}:
        for name, values in report.scores.items():
            weight = report.weights.get(name, 1.0)
            note = "metric" if weight == 0 else f"weight {weight:g}"
            yield f"{name:<{max(6, width)}}  {_figures(values)}  {note}"
    yield ""
    most = max(bar.count for bar in report.histogram)
    yield from (_bar(bar, most) for bar in report.histogram)


def _figures(values: Numbers) -> str:
    return (
        f"mean {values.mean:7.3f}  std {values.std:6.3f}  min {values.min:7.3f}  quarter {values.p25:7.3f}"
        f"  half {values.median:7.3f}  three quarters {values.p75:7.3f}  max {values.max:7.3f}"
    )


def _bar(bar: Bar, most: int) -> str:
    name = f"{bar.low:8.3f}" if bar.low == bar.high else f"{bar.low:8.3f} to {bar.high:8.3f}"
    length = max(1, round(BAR_CHARS * bar.count / most)) if bar.count else 0
    return f"{name}  {'█' * length}{' ' if length else ''}{bar.count}"


def _scenarios(rows: list[ScenarioRow]) -> Iterator[str]:
    if not rows:
        yield "no rollout names a scenario"
        return
    several = [row for row in rows if row.attempts > 1]
    flat = sum(row.std == 0 for row in several)
    yield f"{len(rows)} scenarios, {len(several)} attempted more than once, {flat} of these without spread"
    for row in several[:SCENARIOS_SHOWN]:
        yield (
            f"  {row.attempts:4} attempts  mean {row.mean:7.3f}  std {row.std:6.3f}"
            f"  {row.min:7.3f} to {row.max:7.3f}  {row.scenario_id}"
        )
    if len(several) > SCENARIOS_SHOWN:
        yield f"  … and {len(several) - SCENARIOS_SHOWN} with less spread; --json has them all"


def _signal(signal: Signal) -> Iterator[str]:
    if not signal.groups:
        yield "no group of two or more"
        return
    share = signal.with_signal / signal.groups
    if signal.group_size == 1:
        yield (
            f"rewards with signal: {signal.with_signal} of {signal.groups} ({share:.0%}); each is compared "
            "with the mean of those before of its scenario"
        )
        yield f"spread within a scenario: {signal.std_mean:.3f} (mean standard deviation)"
        return
    made = signal.groups - signal.declared
    how = f"{signal.declared} as they were" if signal.declared else ""
    if made:
        how += f"{', ' if how else ''}{made} of attempts at one scenario, {signal.group_size} or the rest"
    yield f"groups with signal: {signal.with_signal} of {signal.groups} ({share:.0%}); {how}"
    yield f"spread within a group: {signal.std_mean:.3f} (mean standard deviation)"


def _latency(latency: Latency) -> str:
    return (
        f"seconds a rollout: median {latency.median_s:.3f}, p95 {latency.p95_s:.3f}, max {latency.max_s:.3f}"
    )


def failure_lines(failure: Failure) -> Iterator[str]:
    """How often the script failed so, on what, and where."""
    times = "once" if failure.count == 1 else f"{failure.count} times"
    more = ", …" if failure.count > len(failure.rollout_ids) else ""
    yield f"failed {times} ({', '.join(failure.rollout_ids)}{more}):"
    said = failure.error.rstrip().splitlines()
    kept = said if len(said) <= ERROR_LINES else ["…", *said[-ERROR_LINES:]]
    yield from (f"    {line}" for line in kept)

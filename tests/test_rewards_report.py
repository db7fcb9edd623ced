"""The figures of a tested script, and what they are taken to mean; numbers by hand."""

from typing import Any

import pytest

from rewards.advice import advise
from rewards.report import Bar, Report, Row, histogram, numbers, quantile, report
from rewards.settings import Settings


def row(number: int, reward: float | None, **fields: Any) -> Row:
    given = {"rollout_id": f"r_{number:03}", "scenario_id": "s", "group_id": None, "status": "completed"}
    error = None if reward is not None else "Traceback\nValueError: no"
    more = {"untrained": True, "stored_reward": None, "error": error, **fields}
    return Row(**{**given, "reward": reward, **more})


def found(rows: list[Row], group_size: int = 4, **weights: float) -> Report:
    return report(rows, weights=weights, group_size=group_size)


def advice(rows: list[Row], settings: Settings | None = None, **weights: float) -> list[str]:
    return advise(found(rows, **weights), rows, settings or Settings())


def test_numbers() -> None:
    made = numbers([4.0, 1.0, 3.0, 2.0])
    assert (made.count, made.mean, made.min, made.max) == (4, 2.5, 1.0, 4.0)
    assert made.std == pytest.approx(1.25**0.5)
    assert (made.p25, made.median, made.p75) == (1.75, 2.5, 3.25)
    assert numbers([0.1, 0.1, 0.1]).std == 0.0
    assert quantile([5.0], 0.95) == 5.0


def test_few_values_have_a_bar_each_and_many_share_ten() -> None:
    assert histogram([1.0, 0.0, 1.0]) == [Bar(0.0, 0.0, 1), Bar(1.0, 1.0, 2)]
    assert histogram([]) == []
    bars = histogram([n / 2 for n in range(21)])
    assert [bar.count for bar in bars] == [2] * 9 + [3]
    assert (bars[0].low, bars[-1].high, sum(bar.count for bar in bars)) == (0.0, 10.0, 21)


def test_declared_groups_as_they_were_and_others_by_scenario() -> None:
    rows = [
        *(row(n, reward, group_id="g_1") for n, reward in enumerate([0.0, 1.0, None])),
        *(row(n, 0.5, group_id="g_2") for n in (10, 11)),
        row(20, 1.0, group_id="g_3"),  # alone: nothing to compare
        *(row(n, float(n == 33), scenario_id="t") for n in range(30, 37)),
        row(40, 1.0, scenario_id=None),
    ]
    signal = found(rows).signal
    assert (signal.groups, signal.declared, signal.with_signal) == (4, 2, 2)  # t: [0,0,0,1] and [0,0,0]
    assert signal.std_mean == pytest.approx((0.5 + 0.0 + 0.1875**0.5 + 0.0) / 4)


def test_groups_of_one_are_compared_with_those_before() -> None:
    rows = [
        *(row(n, reward) for n, reward in enumerate([1.0, 1.0, 0.0, 1.0])),  # means before: -, 1, 1, 2/3
        row(10, 1.0, scenario_id="t"),
        row(11, None, scenario_id="t"),
    ]
    signal = report(rows, weights={}, group_size=1).signal
    assert (signal.groups, signal.with_signal, signal.group_size) == (5, 2, 1)
    assert signal.std_mean == pytest.approx(0.1875**0.5)


def test_scenarios_by_spread() -> None:
    rows = [
        row(n, reward, scenario_id=name) for n, (name, reward) in enumerate([("a", 1), ("b", 0), ("b", 1)])
    ]
    assert [(one.scenario_id, one.attempts, one.mean, one.std) for one in found(rows).scenarios] == [
        ("b", 2, 0.5, 0.5),
        ("a", 1, 1.0, 0.0),
    ]


def test_the_same_error_is_told_once() -> None:
    rows = [
        *(row(n, None, error=f"KeyError: 'a'\nend of what the script printed:\n{n}") for n in range(7)),
        row(8, None, error="ValueError"),
        row(9, 1.0),
    ]
    made = found(rows)
    assert (made.rollouts, made.scored, made.failed) == (9, 1, 8)
    assert [(one.count, len(one.rollout_ids)) for one in made.failures] == [(7, 5), (1, 1)]
    assert made.failures[0].error.endswith("printed:\n0")


def test_latency() -> None:
    seconds = found([row(n, 1.0, took_s=float(n)) for n in range(21)]).latency
    assert seconds is not None
    assert (seconds.mean_s, seconds.median_s, seconds.p95_s, seconds.max_s) == (10.0, 10.0, 19.0, 20.0)


def test_a_good_script_is_told_so() -> None:
    rows = [row(n, float(n % 2), scenario_id=f"s{n // 4}", scores={"reward": n % 2}) for n in range(16)]
    assert advice(rows) == ["Nothing speaks against training with this script."]


def test_failures_come_first() -> None:
    said = advice([row(1, None), row(2, 1.0), row(3, 0.0)])
    assert said[0].startswith("The script failed on 1 of 3 rollouts:")
    assert advice([row(1, None)]) == [
        "The script failed on 1 of 1 rollout: in training they would be dropped (reward_error), never scored "
        "0. Mend that first."
    ]


def test_one_reward_for_all_teaches_nothing() -> None:
    assert advice([row(n, 0.7) for n in range(4)]) == [
        "Every reward is 0.7: nothing can be learned from that."
    ]


def test_too_hard_takes_ten_attempts_without_reward() -> None:
    hard = [row(n, 0.0, scenario_id="hard") for n in range(10)]
    few = [row(n, 0.0, scenario_id="few") for n in range(20, 29)]
    fine = [row(n, float(n % 2), scenario_id=f"s{n // 4}") for n in range(40, 80)]
    said = advice([*hard, *few, *fine])
    assert said[0].startswith(
        "Too hard: 1 scenario had no reward above 0 in 10 or more attempts (hard). What never succeeds"
    )
    assert said[1].startswith("1 scenario had no reward above 0 so far; with fewer than 10 attempts")
    assert len(said) == 2


def test_too_easy_is_said_of_the_untrained_policy_alone() -> None:
    rows = [row(n, float(n % 5 > 0), scenario_id=f"s{n // 5}") for n in range(20)]  # 4 of 5
    assert advice(rows)[0].startswith("Too easy: without any training the mean reward is 0.80 of 1 (80%).")
    trained = [row(n, float(n % 5 > 0), scenario_id=f"s{n // 5}", untrained=False) for n in range(20)]
    assert advice(trained)[0].startswith("None of these rollouts is the untrained policy's")
    twice = [row(n, 2.0 * (n % 5 > 0), scenario_id=f"s{n // 5}") for n in range(20)]  # 1.6 of 2
    assert advice(twice)[0].startswith("Too easy: without any training the mean reward is 1.60 of 2 (80%).")
    mixed = [row(n, 1.0, scenario_id="easy") for n in range(4)]
    mixed += [row(n, float(n % 4 == 0), scenario_id=f"s{n // 4}") for n in range(8, 16)]
    assert advice(mixed)[0].startswith("1 of 3 scenarios are too easy: without any training they have 80%")


def test_little_spread() -> None:
    rows = [row(n, float(n == 0), scenario_id=f"s{n // 4}") for n in range(12)]
    assert any(
        said.startswith("Little spread: only 1 of 3 groups (33%) have two different rewards;")
        for said in advice(rows)
    )
    alone = [row(n, float(n % 2), scenario_id=f"s{n}") for n in range(3)]
    assert "No scenario was attempted twice, so nothing is known of the spread within groups." in advice(
        alone
    )


def test_a_score_that_never_varies_unless_it_is_a_metric() -> None:
    rows = [
        row(n, float(n % 2), scenario_id=f"s{n // 4}", scores={"a": n % 2, "b": 1.0, "c": 1.0})
        for n in range(12)
    ]
    assert advice(rows, c=0.0) == ["The score `b` is 1 in every rollout: it teaches nothing."]


def test_failing_must_not_pay() -> None:
    rows = [row(n, float(n % 2), scenario_id=f"s{n // 4}") for n in range(8)]
    rows += [row(n, 0.75 - n % 2 / 2, scenario_id="t", status="timeout") for n in range(8, 10)]
    assert not any("Failing pays" in said for said in advice(rows))
    rows += [row(11, 1.0, scenario_id="t", status="agent_error")]
    [said] = [said for said in advice(rows) if "Failing pays" in said]
    assert "3 rollouts whose agent crashed, timed out or hit a cap have a mean reward of 0.67" in said


def test_slow_scripts() -> None:
    rows = [row(n, float(n % 2), scenario_id=f"s{n // 4}", took_s=6.0) for n in range(8)]
    slow, pace = advice(rows, Settings(timeout_s=10.0, workers=3))[:2]
    assert slow.startswith("Slow: one rollout in twenty takes 6.0 s or more, and at rewards.timeout_s = 10 a")
    assert pace.startswith("At 6.0 s each, rewards.workers = 3 score 30 rollouts a minute;")

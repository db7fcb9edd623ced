import math

import pytest

from rollouts.compare import clustered, difference, interval, student, t95, wilson


def test_wilson_by_hand() -> None:
    # p = 0.5, n = 10, z² = 3.841459: centre 0.5, half = z √(0.025 + z²/400) / (1 + z²/10)
    # = 1.959964 · √0.034603648 / 1.3841459 = 0.263407
    found = wilson(5, 10)
    assert found.mean == 0.5
    assert found.low == pytest.approx(0.236593, abs=1e-6)
    assert found.high == pytest.approx(0.763407, abs=1e-6)


def test_wilson_at_the_edges() -> None:
    # no success of 10: high = (z²/n) / (1 + z²/n) = 0.3841459 / 1.3841459
    assert wilson(0, 10).low == 0.0
    assert wilson(0, 10).high == pytest.approx(0.277533, abs=1e-6)
    assert wilson(10, 10).high == pytest.approx(1.0, abs=1e-12)
    assert wilson(10, 10).low == pytest.approx(1 - 0.277533, abs=1e-6)
    with pytest.raises(ValueError, match="11 successes of 10"):
        wilson(11, 10)


def test_student_by_hand() -> None:
    # mean 3, s² = (4+1+0+1+4)/4 = 2.5, t(4) = 2.7764: half = 2.7764 · √0.5 = 1.963211
    found = student([1, 2, 3, 4, 5])
    assert found.mean == 3
    assert found.high - found.mean == pytest.approx(1.963211, abs=1e-6)
    assert found.mean - found.low == pytest.approx(1.963211, abs=1e-6)


def test_one_value_says_nothing_about_spread() -> None:
    assert student([0.5]).high == math.inf


@pytest.mark.parametrize(("freedom", "quantile"), [(1, 12.7062), (30, 2.0423), (40, 2.0211), (120, 1.9799)])
def test_quantiles_of_t_from_the_tables(freedom: int, quantile: float) -> None:
    assert t95(freedom) == pytest.approx(quantile, abs=1e-4)


def test_interval_chooses_wilson_only_for_zeros_and_ones() -> None:
    assert interval([0, 1, 1, 0]) == wilson(2, 4)
    assert interval([0, 1, 0.5, 0]) == student([0, 1, 0.5, 0])


def test_repeats_of_a_scenario_count_as_one() -> None:
    values = [("a", 1.0), ("a", 0.0), ("b", 1.0), ("b", 1.0), ("c", 0.0), ("c", 0.0)]
    assert clustered(values) == student([0.5, 1.0, 0.0])
    assert clustered([("a", 1.0), ("b", 0.0)]) == wilson(1, 2)
    assert clustered([("a", 1.0), ("a", 0.0)]) == wilson(1, 2)


def test_welch_difference_by_hand() -> None:
    # means 2 and 5, s² = 1 and 4 over n = 3: error = 1/3 + 4/3 = 5/3,
    # freedom = (25/9) / ((1/9)/2 + (16/9)/2) = 50/17 = 2.94 -> 2, half = 4.3027 · √(5/3) = 5.554762
    found = difference([1, 2, 3], [3, 5, 7])
    assert found.delta == 3
    assert found.high == pytest.approx(8.554762, abs=1e-5)
    assert not found.significant
    assert difference([0, 0], [1, 1]).significant

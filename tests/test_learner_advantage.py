import math

import pytest

from learner.advantage import advantages


def test_centred_by_hand() -> None:
    assert advantages([1.2, 0.2, 0.7, 0.3]) == pytest.approx([0.6, -0.4, 0.1, -0.3], abs=1e-15)


def test_grpo_by_hand() -> None:
    # mean 1, deviations -1 0 1, sample standard deviation 1
    assert advantages([0.0, 1.0, 2.0], "grpo") == pytest.approx([-1 / 1.0001, 0.0, 1 / 1.0001], abs=1e-15)


def test_leave_one_out_is_the_distance_to_the_others_mean() -> None:
    rewards = [1.0, 0.5, 0.0, 0.25]
    others = [(sum(rewards) - one) / 3 for one in rewards]
    expected = [one - other for one, other in zip(rewards, others, strict=True)]
    assert advantages(rewards, "leave_one_out") == pytest.approx(expected, abs=1e-15)


@pytest.mark.parametrize("kind", ["centred", "grpo", "leave_one_out"])
def test_equal_rewards_have_no_advantage_though_their_mean_rounds(kind: str) -> None:
    rewards = [0.1] * 3
    assert sum(rewards) / 3 != 0.1
    assert advantages(rewards, kind) == [0.0, 0.0, 0.0]  # type: ignore[arg-type]


def test_centred_sums_to_zero() -> None:
    assert math.fsum(advantages([0.13, 1.2, -0.1, 0.7, 0.7])) == pytest.approx(0.0, abs=1e-15)

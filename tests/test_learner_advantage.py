import math
import random
from fractions import Fraction
from typing import Any

import learner_reference as reference
import pytest

from capture.types import RewardMean
from learner.advantage import advantages, of_batch
from learner.baseline import running_mean

KINDS: list[tuple[Any, Any]] = [
    ("centred", "sample"),
    ("leave_one_out", "sample"),
    ("maxrl", "sample"),
    ("grpo", "sample"),
    ("grpo", "population"),
    ("grpo", "batch"),
]


def test_centred_by_hand() -> None:
    assert advantages([1.2, 0.2, 0.7, 0.3]) == pytest.approx([0.6, -0.4, 0.1, -0.3], abs=1e-15)


def test_grpo_by_hand() -> None:
    # mean 1, deviations -1 0 1, standard deviation 1 of the sample, sqrt(2/3) of the population
    assert advantages([0.0, 1.0, 2.0], "grpo") == pytest.approx([-1 / 1.0001, 0.0, 1 / 1.0001], abs=1e-15)
    one = 1 / (math.sqrt(2 / 3) + 1e-4)
    assert advantages([0.0, 1.0, 2.0], "grpo", "population") == pytest.approx([-one, 0.0, one], abs=1e-15)
    # over 0 1 2 and 5 5: mean 2.6, squares 21.2, divisor 4
    one = 1 / (math.sqrt(21.2 / 4) + 1e-4)
    assert of_batch([[0.0, 1.0, 2.0], [5.0, 5.0]], "grpo", "batch") == [
        pytest.approx([-one, 0.0, one], abs=1e-15),
        [0.0, 0.0],
    ]


def test_maxrl_by_hand() -> None:
    # one success in four: mean 1/4
    assert advantages([0.0, 1.0, 0.0, 0.0], "maxrl") == pytest.approx([-1.0, 3.0, -1.0, -1.0], abs=1e-15)
    assert advantages([-1.0, 1.0], "maxrl") == [0.0, 0.0]
    assert advantages([-3.0, 1.0], "maxrl") == [0.0, 0.0]


def test_leave_one_out_is_the_distance_to_the_others_mean() -> None:
    rewards = [1.0, 0.5, 0.0, 0.25]
    others = [(sum(rewards) - one) / 3 for one in rewards]
    expected = [one - other for one, other in zip(rewards, others, strict=True)]
    assert advantages(rewards, "leave_one_out") == pytest.approx(expected, abs=1e-15)


def agrees(mine: tuple[Any, Any], theirs: tuple[Any, Any]) -> bool:
    """Whether the learner's one kind is the reference's other kind, on random batches."""
    rng = random.Random(7)
    for _ in range(30):
        exact = [
            [Fraction(rng.randint(-8, 40), 16) for _ in range(rng.randint(2, 6))]
            for _ in range(rng.randint(1, 4))
        ]
        found = of_batch([[float(reward) for reward in group] for group in exact], *mine)
        everything = [reward for group in exact for reward in group]
        for group, given in zip(exact, found, strict=True):
            expected = reference.advantages(group, *theirs, everything)
            near = (math.isclose(a, b, abs_tol=1e-12) for a, b in zip(given, expected, strict=True))
            if not all(near):
                return False
    return True


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_is_the_reference_s_and_no_other(kind: tuple[Any, Any]) -> None:
    assert [other for other in KINDS if agrees(kind, other)] == [kind]


@pytest.mark.parametrize("kind", KINDS)
def test_equal_rewards_have_no_advantage_though_their_mean_rounds(kind: tuple[Any, Any]) -> None:
    rewards = [0.1] * 3
    assert sum(rewards) / 3 != 0.1
    assert of_batch([rewards, [0.0, 1.0]], *kind)[0] == [0.0, 0.0, 0.0]


def test_a_running_mean_by_hand() -> None:
    a, b = ("k", "a"), ("k", "b")
    rewards = [(a, 1.0), (b, 4.0), (a, 0.0), (a, 2.0), (b, 4.0)]
    assert running_mean(rewards, {}) == [0.0, 0.0, -1.0, 1.5, 0.0]
    assert running_mean([(a, 3.0), (("other", "a"), 3.0)], {a: RewardMean(3, 1.0)}) == [2.0, 0.0]


def test_a_running_mean_is_the_mean_of_what_came_before() -> None:
    rng = random.Random(1)
    rewards = [(("k", rng.choice("abc")), rng.gauss(0, 1)) for _ in range(60)]
    seen: dict[tuple[str, str], list[float]] = {}
    for (attempted, reward), advantage in zip(rewards, running_mean(rewards, {}), strict=True):
        earlier = seen.setdefault(attempted, [])
        expected = reward - math.fsum(earlier) / len(earlier) if earlier else 0.0
        assert advantage == pytest.approx(expected, abs=1e-14)
        earlier.append(reward)


def test_centred_sums_to_zero() -> None:
    assert math.fsum(advantages([0.13, 1.2, -0.1, 0.7, 0.7])) == pytest.approx(0.0, abs=1e-15)

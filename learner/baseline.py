"""A baseline without a group: the mean of what a scenario has brought before. For groups of one.

    A = R - mean of the scenario's rewards before this one, and 0 for its first

Before: in batches that the run has committed, and earlier in this one. The rewards are rows of the store,
which count from the transaction that commits their batch, so there is no state that a crash could lose.
"""

from collections.abc import Mapping, Sequence

from capture.types import RewardMean

Attempted = tuple[str, str | None]  # key and scenario: what one tenant does moves no other's mean


def running_mean(
    rewards: Sequence[tuple[Attempted, float]], before: Mapping[Attempted, RewardMean]
) -> list[float]:
    """Advantages of `(what was attempted, reward)` in their order, one each."""
    means = dict(before)
    advantages = []
    for attempted, reward in rewards:
        mean = means.get(attempted, RewardMean())
        advantages.append(reward - mean.value if mean.count else 0.0)
        means[attempted] = mean.after(reward)
    return advantages

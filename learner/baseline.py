"""A baseline without a group: the mean of what a scenario has brought so far. For groups of one.

    A = R - mean of the scenario's rewards before this one, and 0 for its first

The means are state: a learner that uses them has them in its checkpoint, as `Mean`s by scenario.
"""

from collections.abc import Mapping, Sequence

import msgspec


class Mean(msgspec.Struct, frozen=True):
    """Of the rewards of one scenario."""

    count: int = 0
    value: float = 0.0

    def after(self, reward: float) -> "Mean":
        """With one reward more (Welford, 1962: no sum that grows)."""
        count = self.count + 1
        return Mean(count, self.value + (reward - self.value) / count)


def running_mean(
    rewards: Sequence[tuple[str, float]], before: Mapping[str, Mean]
) -> tuple[list[float], dict[str, Mean]]:
    """Advantages of `(scenario, reward)` in their order, and the means after them."""
    means = dict(before)
    advantages = []
    for scenario, reward in rewards:
        mean = means.get(scenario, Mean())
        advantages.append(reward - mean.value if mean.count else 0.0)
        means[scenario] = mean.after(reward)
    return advantages, means

"""How token losses become one number: what each rollout's tokens are divided by.

A step has R rollouts that own tokens, rollout i owns n_i of them, N = Σ n_i. All are counted before anything
is filtered or skipped, so that a step over half as much signal is not a larger step.

* token_mean: N, every token weighs the same
* sequence_mean: R · n_i, every rollout weighs the same (GRPO, 2024)
* constant: R · L for a constant L (Dr. GRPO, 2025): as token_mean, without its dependence on the lengths
"""

from collections.abc import Sequence

from learner.settings import Aggregation


def divisors(owned: Sequence[int], kind: Aggregation, constant: int) -> list[int]:
    """One for each rollout; `owned` tokens of each, `constant` L. That of a rollout without any is unused."""
    rollouts = sum(1 for tokens in owned if tokens)
    if kind == "sequence_mean":
        return [rollouts * tokens for tokens in owned]
    if kind == "constant":
        return [rollouts * constant] * len(owned)
    return [sum(owned)] * len(owned)

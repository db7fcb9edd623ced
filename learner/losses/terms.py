"""What every policy loss gives back."""

from typing import NamedTuple

from torch import Tensor


class Terms(NamedTuple):
    """One entry for each of M owned tokens."""

    losses: Tensor  # to be summed; differentiable by log π
    ratios: Tensor  # the ratio to the old policy, without gradient
    clipped: Tensor  # bool: the ratio was bounded, or the token has no gradient

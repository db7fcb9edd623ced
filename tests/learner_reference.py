"""The learner's losses and advantages again: plain Python in double precision, no torch.

Gradients come from numbers that carry their derivatives with them, so that nothing here is derived by hand
either. It is written from the formulas, token by token, and shares no line with `learner`.
"""

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from typing import Any, Union

Real = Union["Dual", float]


class Dual:
    """A number and its derivatives by all inputs."""

    def __init__(self, value: float, slope: Sequence[float]) -> None:
        self.value, self.slope = value, list(slope)

    def _chain(self, value: float, factor: float) -> "Dual":
        return Dual(value, [factor * d for d in self.slope])

    def __add__(self, other: Real) -> "Dual":
        if isinstance(other, Dual):
            slope = [a + b for a, b in zip(self.slope, other.slope, strict=True)]
            return Dual(self.value + other.value, slope)
        return Dual(self.value + other, self.slope)

    def __mul__(self, other: Real) -> "Dual":
        if isinstance(other, Dual):
            slope = [a * other.value + self.value * b for a, b in zip(self.slope, other.slope, strict=True)]
            return Dual(self.value * other.value, slope)
        return self._chain(self.value * other, other)

    def __sub__(self, other: Real) -> "Dual":
        return self + other * -1.0

    def __neg__(self) -> "Dual":
        return self * -1.0

    def __truediv__(self, other: float) -> "Dual":
        return self * (1 / other)

    __radd__, __rmul__ = __add__, __mul__

    def exp(self) -> "Dual":
        return self._chain(math.exp(self.value), math.exp(self.value))

    def log(self) -> "Dual":
        return self._chain(math.log(self.value), 1 / self.value)

    def less(self, other: "Dual") -> "Dual":
        """The smaller of the two."""
        return self if self.value <= other.value else other

    def more(self, other: "Dual") -> "Dual":
        """The larger of the two."""
        return self if self.value >= other.value else other

    def within(self, low: float, high: float) -> "Dual":
        """The number, or the bound that it is beyond, which does not move."""
        return self if low <= self.value <= high else self._chain(min(max(self.value, low), high), 0.0)

    def still(self) -> "Dual":
        """Stop gradient."""
        return self._chain(self.value, 0.0)


@dataclass
class Token:
    """One owned token: logits of its softmax, which one was sampled, and what is known of it."""

    logits: list[float]
    target: int
    temperature: float
    sampled: float  # log μ
    ref: float
    start: float  # log π₀


@dataclass
class Rollout:
    advantage: float
    tokens: list[Token] = field(default_factory=list)


def random_rollouts(rng: random.Random, vocabulary: int = 4) -> list[Rollout]:
    """Two to four rollouts of one to five tokens; learner, engine and reference are some way apart."""
    found = []
    for _ in range(rng.randint(2, 4)):
        rollout = Rollout(rng.choice([-1.5, -0.5, 0.25, 1.0]) + rng.gauss(0, 0.1))
        for _ in range(rng.randint(1, 5)):
            logits = [rng.gauss(0, 1.5) for _ in range(vocabulary)]
            token = Token(logits, rng.randrange(vocabulary), rng.choice([0.7, 1.0, 1.3]), 0.0, 0.0, 0.0)
            now = logprob([Dual(x, [0.0]) for x in logits], token)[0].value
            token.sampled = min(now + rng.gauss(0, 0.5), -1e-3)
            token.start = min(now + rng.gauss(0, 0.4), -1e-3)
            token.ref = min(now + rng.gauss(0, 0.5), -1e-3)
            rollout.tokens.append(token)
        found.append(rollout)
    return found


def logprob(logits: Sequence[Dual], token: Token) -> tuple[Dual, Dual]:
    """log π of the token, and the entropy of the distribution that it came from."""
    scaled = [z / token.temperature for z in logits]
    total = sum((z.exp() for z in scaled[1:]), scaled[0].exp()).log()
    logs = [z - total for z in scaled]
    terms = [one.exp() * one for one in logs]
    return logs[token.target], -sum(terms[1:], terms[0])


def loss(rollouts: Sequence[Rollout], s: Any) -> tuple[float, list[list[float]]]:
    """The whole loss under the settings `s`, and its gradient by the logits of every token."""
    total, gradient = 0.0, []
    for rollout in rollouts:  # which share nothing but the divisor
        size = len(rollout.tokens[0].logits)
        width = size * len(rollout.tokens)
        rows = [
            [Dual(z, [float(i == n * size + j) for i in range(width)]) for j, z in enumerate(token.logits)]
            for n, token in enumerate(rollout.tokens)
        ]
        found = rollout_loss(rollout, rows, s) / divisor(rollout, rollouts, s)
        total += found.value
        gradient += [found.slope[i : i + size] for i in range(0, width, size)]
    return total, gradient


def divisor(rollout: Rollout, rollouts: Sequence[Rollout], s: Any) -> float:
    if s.aggregation == "token_mean":
        return float(sum(len(one.tokens) for one in rollouts))
    return float(
        len(rollouts) * (len(rollout.tokens) if s.aggregation == "sequence_mean" else s.aggregation_tokens)
    )


def rollout_loss(rollout: Rollout, rows: Sequence[Sequence[Dual]], s: Any) -> Dual:
    """The sum over the rollout's tokens, before it is divided."""
    scores = [logprob(row, token) for row, token in zip(rows, rollout.tokens, strict=True)]
    gaps = [now - old_of(token, s) for (now, _), token in zip(scores, rollout.tokens, strict=True)]
    sequence = (sum(gaps[1:], gaps[0]) / len(gaps)).exp()
    one_advantage = s.engine_correction == "none" and not (s.kl_coef and s.kl_form == "advantage")
    parts = []
    for (now, entropy), gap, token in zip(scores, gaps, rollout.tokens, strict=True):
        ratio = gap.exp()
        if s.loss == "gspo":
            ratio = sequence if one_advantage else sequence.still() * (now - now.still()).exp()
        k1 = now - token.ref
        advantage = Dual(rollout.advantage, [0.0] * len(now.slope))
        if s.kl_coef and s.kl_form == "advantage":
            advantage = advantage - k1.still() * s.kl_coef
        part = policy_loss(now, ratio, advantage * correction(token, s), token, s)
        if s.kl_coef and s.kl_form == "k2":
            part = part + k1 * k1 * 0.5 * s.kl_coef
        if s.kl_coef and s.kl_form == "r_k3":
            part = part + (now - token.sampled).exp() * ((-k1).exp() + k1 - 1.0) * s.kl_coef
        parts.append(part - entropy * s.entropy_coef)
    return sum(parts[1:], parts[0])


def old_of(token: Token, s: Any) -> float:
    return token.sampled if s.engine_correction == "none" else token.start


def correction(token: Token, s: Any) -> float:
    ratio = math.exp(token.start - token.sampled)
    if s.engine_correction == "truncated":
        return max(min(ratio, float(s.engine_correction_max)), float(s.engine_correction_min))
    if s.engine_correction == "masked":
        return ratio if s.engine_correction_min <= ratio <= s.engine_correction_max else 0.0
    return 1.0


def policy_loss(now: Dual, ratio: Dual, advantage: Dual, token: Token, s: Any) -> Dual:
    """The formulas as their papers have them; `advantage` has no slope."""
    a = advantage.value
    if s.loss == "cispo":
        return -(ratio.still().within(0.0, s.cispo_clip) * a * now)
    if s.loss == "importance":
        return -(ratio * a)
    low, high = s.clip_range
    if s.loss == "dppo":
        moved = math.exp(now.value) - math.exp(old_of(token, s))
        keep = moved <= high if a > 0 else moved >= -low
        return -(ratio * a) * float(keep)
    clipped = -(ratio * a).less(ratio.within(1 - low, 1 + high) * a)
    if s.loss == "ppo" and s.dual_clip is not None and a < 0:
        return clipped.less(Dual(-s.dual_clip * a, [0.0] * len(now.slope)))
    return clipped


def advantages(rewards: Sequence[Fraction], kind: str, std: str, batch: Sequence[Fraction]) -> list[float]:
    """Exact up to the square root."""
    size = len(rewards)
    mean = sum(rewards) / size
    centred = [reward - mean for reward in rewards]
    if kind == "centred":
        return [float(one) for one in centred]
    if kind == "leave_one_out":
        return [float(reward - (sum(rewards) - reward) / (size - 1)) for reward in rewards]
    if kind == "maxrl":
        return [float(one / mean) if mean > 0 else 0.0 for one in centred]
    over = batch if std == "batch" else rewards
    middle = sum(over) / len(over)
    squares = sum((one - middle) ** 2 for one in over)
    deviation = math.sqrt(squares / (len(over) - (std != "population")))
    return [float(one) / (deviation + 1e-4) for one in centred]

"""Bandits whose best policy is known: every loss and every form of the KL finds it, wrong ones do not.

The gradient is that of the expectation over all arms under μ: no chance is involved.
"""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from learner import kl
from learner.objective import Known, objective
from learner.settings import Settings

REWARDS = torch.tensor([0.1, 0.9, 0.3, 0.5, 0.0], dtype=torch.float64)
REF = torch.log_softmax(torch.tensor([1.0, -1.0, 0.5, 0.0, 1.5], dtype=torch.float64), 0)
OTHER = torch.log_softmax(torch.tensor([0.0, 0.3, -0.3, 0.2, 0.1], dtype=torch.float64), 0)
B = 0.5
BEST = torch.softmax(REF + REWARDS / B, 0)  # of E[reward] - b KL(π | ref)


def learnt(
    loss: Callable[[Tensor, Tensor], Tensor], steps: int, lr: float, mu: Tensor | None = None
) -> Tensor:
    """The policy after plain gradient descent from the reference. `loss(log π, log μ)`; μ is π itself, or
    stays as it is."""
    logits = REF.clone().requires_grad_()
    for _ in range(steps):
        logprobs = torch.log_softmax(logits, 0)
        sampled = logprobs.detach() if mu is None else mu
        (gradient,) = torch.autograd.grad(loss(logprobs, sampled), logits)
        with torch.no_grad():
            logits -= lr * gradient
    return torch.softmax(logits.detach(), 0)


def expectation(s: Settings, logprobs: Tensor, sampled: Tensor) -> Tensor:
    """The learner's loss, every arm weighing its chance under μ."""
    chances = sampled.exp()
    advantages = REWARDS - (chances * REWARDS).sum()
    known = Known(
        sampled,
        chances * advantages,
        penalties=s.kl_coef * chances,
        ref=REF if s.kl_coef else None,
        start=sampled if s.engine_correction != "none" else None,
        log_ratios=logprobs.detach() - sampled,
    )
    return objective(s, logprobs, known).loss


@pytest.mark.parametrize("loss", ["cispo", "ppo", "gspo", "dppo", "importance"])
def test_every_loss_finds_the_best_arm(loss: Any) -> None:
    s = Settings(base_model="x", loss=loss)
    policy = learnt(lambda now, mu: expectation(s, now, mu), 400, 2.0)
    assert policy[1] > 0.98
    assert torch.softmax(REF, 0)[1] < 0.1


def distance(policy: Tensor) -> float:
    """In total variation from the best policy."""
    return float((policy - BEST).abs().sum() / 2)


@pytest.mark.parametrize("loss", ["cispo", "ppo", "gspo", "dppo", "importance"])
@pytest.mark.parametrize("form", ["advantage", "k2", "r_k3"])
def test_every_form_of_the_kl_finds_the_tilted_reference(form: Any, loss: Any) -> None:
    s = Settings(base_model="x", loss=loss, kl_coef=B, kl_form=form)
    assert distance(learnt(lambda now, mu: expectation(s, now, mu), 600, 1.0)) < 1e-6


@pytest.mark.parametrize("form", ["advantage", "r_k3"])
def test_also_where_another_policy_samples(form: Any) -> None:
    s = Settings(base_model="x", loss="importance", kl_coef=B, kl_form=form)
    assert distance(learnt(lambda now, mu: expectation(s, now, mu), 600, 1.0, OTHER)) < 1e-6


WRONG: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "k3 without the ratio": lambda now, mu: B * mu.exp() * kl.k3(now, REF),
    "k1 as a loss": lambda now, mu: B * mu.exp() * (now - REF),
    "k2 without its half": lambda now, mu: B * mu.exp() * (now - REF) ** 2,
    "nothing": lambda now, mu: torch.zeros_like(now),
}


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_penalty_does_not(name: str) -> None:
    s = Settings(base_model="x")
    policy = learnt(lambda now, mu: expectation(s, now, mu) + WRONG[name](now, mu).sum(), 600, 1.0)
    assert distance(policy) > 0.03


def test_without_a_ratio_another_policy_s_samples_mislead() -> None:
    """CISPO at a cap of 1 forgets what it is more likely to do than μ was."""
    right = Settings(base_model="x", loss="importance", kl_coef=B)
    wrong = Settings(base_model="x", cispo_clip=0.5, kl_coef=B)
    assert distance(learnt(lambda now, mu: expectation(right, now, mu), 600, 1.0, OTHER)) < 1e-6
    assert distance(learnt(lambda now, mu: expectation(wrong, now, mu), 600, 1.0, OTHER)) > 0.01

import math
import random

import pytest
import torch

from learner.logprobs import chunk_logprobs, token_logprobs
from learner.losses import cispo, penalised


def reference(
    logits: list[list[float]],
    targets: list[int],
    temperatures: list[float],
    sampled: list[float],
    weights: list[float],
    clip: float,
) -> tuple[float, list[list[float]]]:
    """CISPO and its gradient by the logits, in plain Python: no autograd, no torch."""
    loss = 0.0
    gradient = []
    for row, target, t, mu, weight in zip(logits, targets, temperatures, sampled, weights, strict=True):
        peak = max(row)
        total = math.fsum(math.exp((x - peak) / t) for x in row)
        probabilities = [math.exp((x - peak) / t) / total for x in row]
        logprob = math.log(probabilities[target])
        scale = min(math.exp(logprob - mu), clip) * weight
        loss -= scale * logprob
        gradient.append([-scale * ((i == target) - p) / t for i, p in enumerate(probabilities)])
    return loss, gradient


@pytest.mark.parametrize("seed", range(10))
def test_value_and_gradient_against_plain_python(seed: int) -> None:
    rng = random.Random(seed)
    rows, vocabulary, clip = 7, 5, rng.choice([1.0, 2.0, 5.0])
    logits = [[rng.gauss(0, 2) for _ in range(vocabulary)] for _ in range(rows)]
    targets = [rng.randrange(vocabulary) for _ in range(rows)]
    temperatures = [rng.choice([0.5, 0.7, 1.0, 1.3]) for _ in range(rows)]
    sampled = [-rng.uniform(0.1, 6) for _ in range(rows)]
    weights = [rng.gauss(0, 1) for _ in range(rows)]
    hidden = torch.tensor(logits, dtype=torch.float64, requires_grad=True)
    logprobs = token_logprobs(
        hidden,
        torch.eye(vocabulary, dtype=torch.float64),
        torch.tensor(targets),
        torch.tensor(temperatures, dtype=torch.float64),
        3,
    )
    loss, _ = cispo(
        logprobs, torch.tensor(sampled, dtype=torch.float64), torch.tensor(weights, dtype=torch.float64), clip
    )
    loss.backward()
    expected, gradient = reference(logits, targets, temperatures, sampled, weights, clip)
    assert loss.item() == pytest.approx(expected, abs=1e-12)
    assert hidden.grad is not None
    assert torch.allclose(hidden.grad, torch.tensor(gradient, dtype=torch.float64), rtol=0, atol=1e-12)


def test_ratio_past_the_cap_is_capped_but_keeps_its_gradient() -> None:
    # ratio e^2 = 7.39 > 5: loss -5 * 0.25 * -1 = 1.25, gradient -1.25
    logprobs = torch.tensor([-1.0], dtype=torch.float64, requires_grad=True)
    loss, ratios = cispo(logprobs, torch.tensor([-3.0]), torch.tensor([0.25]), 5.0)
    loss.backward()
    assert ratios.item() == pytest.approx(math.e**2)
    assert loss.item() == pytest.approx(1.25)
    assert logprobs.grad is not None
    assert logprobs.grad.item() == pytest.approx(-1.25)


def test_penalty_by_hand() -> None:
    # k1 = -1 + 3 = 2: weight 0.5 - 0.1 * 2 = 0.3, k3 = e^-2 + 2 - 1; k1 = 0 changes nothing
    logprobs = torch.tensor([-1.0, -2.0], dtype=torch.float64, requires_grad=True)
    weights, kl = penalised(
        torch.tensor([0.5, 0.5]), logprobs, torch.tensor([-3.0, -2.0], dtype=torch.float64), 0.1
    )
    assert weights.tolist() == pytest.approx([0.3, 0.5])
    assert kl.tolist() == pytest.approx([math.exp(-2) + 1, 0.0])
    assert not weights.requires_grad


def test_the_penalty_pulls_along_the_gradient_of_the_kl() -> None:
    """Over every token that could have been sampled, weighted by π: b · d KL(π | ref) / d logits."""
    torch.manual_seed(3)
    logits = torch.randn(6, dtype=torch.float64, requires_grad=True)
    ref = torch.log_softmax(torch.randn(6, dtype=torch.float64), 0)
    logprobs = torch.log_softmax(logits, 0)
    probabilities = logprobs.detach().exp()
    weights, kl = penalised(torch.zeros(6, dtype=torch.float64), logprobs, ref, 0.25)
    loss, _ = cispo(logprobs, logprobs.detach(), weights * probabilities, 5.0)
    (gradient,) = torch.autograd.grad(loss, logits, retain_graph=True)
    exact = (logprobs.exp() * (logprobs - ref)).sum()
    (expected,) = torch.autograd.grad(0.25 * exact, logits)
    assert torch.allclose(gradient, expected, rtol=0, atol=1e-12)
    assert (probabilities * kl).sum().item() == pytest.approx(exact.item())


def test_chunks_change_nothing_and_bound_the_logits() -> None:
    torch.manual_seed(0)
    hidden, head = torch.randn(50, 8, dtype=torch.float64), torch.randn(30, 8, dtype=torch.float64)
    targets, temperatures = torch.randint(0, 30, (50,)), torch.full((50,), 0.7, dtype=torch.float64)
    whole = chunk_logprobs(hidden, head, targets, temperatures)
    expected = torch.log_softmax(hidden @ head.T / 0.7, 1)[torch.arange(50), targets]
    assert torch.allclose(whole, expected, atol=1e-13)
    for rows in (1, 7, 50, 64):
        chunked = token_logprobs(hidden, head, targets, temperatures, rows)
        assert torch.allclose(chunked, whole, rtol=0, atol=1e-13)

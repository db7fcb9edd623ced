"""Every loss against an independent reference, value and gradient; and wrong ones that must fail the same."""

import math
import random
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import learner_reference as reference
import pytest
import torch
from learner_reference import Rollout, random_rollouts
from torch import Tensor

from learner import kl
from learner.aggregate import divisors
from learner.logprobs import chunk_scores, token_logprobs, token_scores
from learner.objective import Known, Objective, log_sequence_ratios, objective
from learner.settings import KlForm, Settings

Objectives = Callable[[Settings, Tensor, Known, Tensor | None], Objective]
Divisors = Callable[[Sequence[int], Any, int], list[int]]
SEEDS = range(12)
TOLERANCE = 1e-12

LOSSES: dict[str, dict[str, Any]] = {
    "cispo": {"cispo_clip": 1.3},
    "ppo": {"loss": "ppo", "clip_low": 0.2, "clip_high": 0.4},
    "ppo dual": {"loss": "ppo", "dual_clip": 1.5},
    "gspo": {"loss": "gspo", "clip_low": 0.1, "clip_high": 0.2},
    "gspo as it is": {"loss": "gspo"},
    "dppo": {"loss": "dppo", "clip_low": 0.05, "clip_high": 0.1},
    "importance": {"loss": "importance"},
}
KLS: dict[str, dict[str, Any]] = {
    form: {"kl_coef": 0.3, "kl_form": form} for form in ("advantage", "k2", "r_k3")
}
CORRECTIONS: dict[str, dict[str, Any]] = {
    "truncated": {
        "engine_correction": "truncated",
        "engine_correction_min": 0.7,
        "engine_correction_max": 1.2,
    },
    "masked": {"engine_correction": "masked", "engine_correction_min": 0.8, "engine_correction_max": 1.3},
}
AGGREGATIONS: dict[str, dict[str, Any]] = {
    "sequence_mean": {"aggregation": "sequence_mean"},
    "constant": {"aggregation": "constant", "aggregation_tokens": 7},
}
ENTROPY: dict[str, dict[str, Any]] = {"entropy": {"entropy_coef": 0.2}}
MORE = {"alone": {}, **KLS, **CORRECTIONS, **AGGREGATIONS, **ENTROPY}


def made(
    rollouts: Sequence[Rollout], s: Settings, objectives: Objectives, divide: Divisors
) -> tuple[float, Tensor]:
    """The loss in torch, and its gradient by the logits of every token, as the learner puts them together."""
    tokens = [token for rollout in rollouts for token in rollout.tokens]
    lengths = [len(rollout.tokens) for rollout in rollouts]
    per_rollout = divide(lengths, s.aggregation, s.aggregation_tokens)
    index = [i for i, rollout in enumerate(rollouts) for _ in rollout.tokens]

    def column(values: Sequence[float]) -> Tensor:
        return torch.tensor(values, dtype=torch.float64)

    logits = column([token.logits for token in tokens]).requires_grad_()
    logprobs, entropies = chunk_scores(
        logits,
        torch.eye(logits.shape[1], dtype=torch.float64),
        torch.tensor([token.target for token in tokens]),
        column([token.temperature for token in tokens]),
    ).unbind(1)
    known = Known(
        sampled=column([token.sampled for token in tokens]),
        weights=column([rollouts[i].advantage / per_rollout[i] for i in index]),
        penalties=column([s.kl_coef / per_rollout[i] for i in index]),
        ref=column([token.ref for token in tokens]) if s.kl_coef else None,
        start=column([token.start for token in tokens]) if s.engine_correction != "none" else None,
        bonuses=column([s.entropy_coef / per_rollout[i] for i in index]),
    )
    if s.loss == "gspo":
        gaps = logprobs.detach() - known.old
        whole = log_sequence_ratios(gaps, torch.tensor(index), torch.tensor(lengths))
        known = replace(known, log_ratios=whole[torch.tensor(index)])
    loss = objectives(s, logprobs, known, entropies).loss
    loss.backward()
    assert logits.grad is not None
    return loss.item(), logits.grad


def agree(
    changes: dict[str, Any], seed: int, objectives: Objectives = objective, divide: Divisors = divisors
) -> bool:
    """Whether loss and gradient are the reference's, on one random configuration."""
    rollouts = random_rollouts(random.Random(seed))
    s = Settings(base_model="x", **changes)
    value, gradient = made(rollouts, s, objectives, divide)
    expected, slopes = reference.loss(rollouts, s)
    near = torch.allclose(gradient, torch.tensor(slopes, dtype=torch.float64), rtol=TOLERANCE, atol=TOLERANCE)
    return near and math.isclose(value, expected, rel_tol=TOLERANCE, abs_tol=TOLERANCE)


@pytest.mark.parametrize("more", MORE)
@pytest.mark.parametrize("loss", LOSSES)
def test_value_and_gradient_are_the_reference_s(loss: str, more: str) -> None:
    assert all(agree(LOSSES[loss] | MORE[more], seed) for seed in SEEDS)


@pytest.mark.parametrize("correction", CORRECTIONS)
@pytest.mark.parametrize("form", KLS)
@pytest.mark.parametrize("loss", LOSSES)
def test_everything_at_once(loss: str, form: str, correction: str) -> None:
    whole = LOSSES[loss] | KLS[form] | CORRECTIONS[correction] | AGGREGATIONS["constant"] | ENTROPY["entropy"]
    assert all(agree(whole, seed) for seed in SEEDS)


def under(**changes: Any) -> Objectives:
    """The objective of other settings than those that were asked for."""

    def wrong(s: Settings, logprobs: Tensor, known: Known, entropies: Tensor | None) -> Objective:
        values = {name: getattr(s, name) for name in s.__struct_fields__}
        return objective(Settings(**(values | changes)), logprobs, known, entropies)

    return wrong


def knowing(change: Callable[[Known, Tensor], Known]) -> Objectives:
    """The objective of tokens of which something else is known."""

    def wrong(s: Settings, logprobs: Tensor, known: Known, entropies: Tensor | None) -> Objective:
        return objective(s, logprobs, change(known, logprobs), entropies)

    return wrong


def added(term: Callable[[Settings, Known, Tensor], Tensor]) -> Objectives:
    """The objective without its KL, and another one instead."""

    def wrong(s: Settings, logprobs: Tensor, known: Known, entropies: Tensor | None) -> Objective:
        found = objective(s, logprobs, replace(known, ref=None), entropies)
        return replace(found, loss=found.loss + term(s, known, logprobs).sum())

    return wrong


def moving_weights(known: Known, logprobs: Tensor) -> Known:
    """k1 in the advantage with a gradient of its own."""
    assert known.penalties is not None
    assert known.ref is not None
    return replace(known, weights=known.weights - known.penalties * (logprobs - known.ref), ref=None)


def corrected_twice(known: Known, logprobs: Tensor) -> Known:
    """The engine's part as a weight, and in the ratio too."""
    assert known.start is not None
    weights = known.weights * torch.exp(known.start - known.sampled)
    return replace(known, weights=weights, start=None)


def over_those_with_an_advantage(owned: Sequence[int], kind: Any, constant: int) -> list[int]:
    return [2 * one for one in divisors(owned[:-1] or owned, kind, constant)[:1]] * len(owned)


WRONG: dict[str, tuple[dict[str, Any], Objectives]] = {
    "no cap": (LOSSES["cispo"], under(cispo_clip=1e9)),
    "REINFORCE for CISPO": (
        LOSSES["cispo"],
        knowing(lambda k, logprobs: replace(k, sampled=logprobs.detach())),
    ),
    "importance for CISPO": (LOSSES["cispo"], under(loss="importance")),
    "CISPO for importance": (LOSSES["importance"], under(loss="cispo", cispo_clip=1e9)),
    "low for high": (LOSSES["ppo"], under(clip_low=0.4, clip_high=0.2)),
    "no clip": (LOSSES["ppo"], under(loss="importance")),
    "no dual clip": (LOSSES["ppo dual"], under(dual_clip=None)),
    "the ratio's range for the probability's": (
        LOSSES["dppo"],
        under(loss="ppo", clip_low=0.05, clip_high=0.1),
    ),
    "GSPO with a token's own ratio": (
        LOSSES["gspo"],
        knowing(lambda k, logprobs: replace(k, log_ratios=logprobs.detach() - k.old)),
    ),
    "GSPO of the sum": (
        LOSSES["gspo"],
        knowing(lambda k, _: replace(k, log_ratios=2 * k.log_ratios)),
    ),
    "k1 as a loss": (KLS["k2"], added(lambda s, k, logprobs: k.penalties * (logprobs - k.ref))),
    "k2 without its half": (KLS["k2"], added(lambda s, k, logprobs: k.penalties * (logprobs - k.ref) ** 2)),
    "k3 without the ratio": (KLS["r_k3"], added(lambda s, k, logprobs: k.penalties * kl.k3(logprobs, k.ref))),
    "k3 with a still ratio": (
        KLS["r_k3"],
        added(
            lambda s, k, logprobs: (
                k.penalties * torch.exp(logprobs.detach() - k.sampled) * kl.k3(logprobs, k.ref)
            )
        ),
    ),
    "k1 in the advantage with a gradient": (KLS["advantage"], knowing(moving_weights)),
    "KL from the reference": (
        KLS["advantage"],
        knowing(lambda k, logprobs: replace(k, ref=2 * logprobs.detach() - k.ref)),
    ),
    "no correction": (CORRECTIONS["truncated"], knowing(lambda k, _: replace(k, start=None))),
    "corrected twice": (CORRECTIONS["truncated"], knowing(corrected_twice)),
    "masked for truncated": (CORRECTIONS["truncated"], under(engine_correction="masked")),
    "truncated for masked": (CORRECTIONS["masked"], under(engine_correction="truncated")),
    "no lower bound": (CORRECTIONS["masked"], under(engine_correction_min=0.0)),
    "entropy as a cost": (ENTROPY["entropy"], knowing(lambda k, _: replace(k, bonuses=-k.bonuses))),
}


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_one_is_told_from_the_right_one(name: str) -> None:
    changes, wrong = WRONG[name]
    assert all(agree(changes, seed) for seed in SEEDS)
    assert not all(agree(changes, seed, wrong) for seed in SEEDS)


@pytest.mark.parametrize("loss", ["ppo", "ppo dual", "gspo", "dppo"])
def test_every_side_of_every_bound_was_met(loss: str) -> None:
    """So that the tests above test something."""
    sides = set()
    for seed in SEEDS:
        for rollout in random_rollouts(random.Random(seed)):
            for token in rollout.tokens:
                one = replace(rollout, tokens=[token])
                value, _ = reference.loss([one], Settings(base_model="x", **LOSSES[loss]))
                free, _ = reference.loss([one], Settings(base_model="x", loss="importance"))
                sides.add((rollout.advantage > 0, math.isclose(value, free)))
    assert len(sides) == 4


@pytest.mark.parametrize("kind", ["token_mean", "sequence_mean", "constant"])
def test_another_divisor_is_told_from_the_right_one(kind: str) -> None:
    changes = {"aggregation": kind, "aggregation_tokens": 7}
    others = [other for other in ("token_mean", "sequence_mean", "constant") if other != kind]
    wrong: list[Divisors] = [over_those_with_an_advantage]
    wrong += [lambda owned, _, constant, other=other: divisors(owned, other, constant) for other in others]
    assert all(agree(changes, seed) for seed in SEEDS)
    for divide in wrong:
        assert not all(agree(changes, seed, divide=divide) for seed in SEEDS)


def test_divisors_by_hand() -> None:
    # three rollouts own tokens, 4 + 1 + 5 = 10 of them
    assert divisors([4, 0, 1, 5], "token_mean", 8) == [10, 10, 10, 10]
    assert divisors([4, 0, 1, 5], "sequence_mean", 8) == [12, 0, 3, 15]
    assert divisors([4, 0, 1, 5], "constant", 8) == [24, 24, 24, 24]


def by_hand(
    gap: float, advantage: float, *, moved: float = 0.0, **changes: Any
) -> tuple[float, float, float, bool]:
    """Loss, gradient by log π, ratio and whether it was bounded, of one token with log π = -1."""
    s = Settings(base_model="x", **changes)
    logprobs = torch.tensor([-1.0], dtype=torch.float64, requires_grad=True)
    sampled = torch.tensor([-1.0 - gap], dtype=torch.float64)
    known = Known(sampled=sampled, weights=torch.tensor([advantage]), log_ratios=logprobs.detach() - sampled)
    found = objective(s, logprobs, known)
    (gradient,) = torch.autograd.grad(found.loss, logprobs)
    return found.loss.item(), gradient.item(), found.ratios.item(), bool(found.clipped.item())


def test_ratio_past_the_cap_is_capped_but_keeps_its_gradient() -> None:
    # ratio e^2 = 7.39 > 5: loss -5 * 0.25 * -1 = 1.25, gradient -1.25
    assert by_hand(2.0, 0.25) == pytest.approx((1.25, -1.25, math.e**2, True))


def test_clips_by_hand() -> None:
    half, double = math.log(0.5), math.log(2.0)
    ppo: dict[str, Any] = {"loss": "ppo", "clip_low": 0.2, "clip_high": 0.28}
    assert by_hand(double, 1.0, **ppo) == pytest.approx((-1.28, 0.0, 2.0, True))
    assert by_hand(half, 1.0, **ppo) == pytest.approx((-0.5, -0.5, 0.5, False))
    assert by_hand(double, -1.0, **ppo) == pytest.approx((2.0, 2.0, 2.0, False))
    assert by_hand(half, -1.0, **ppo) == pytest.approx((0.8, 0.0, 0.5, True))
    assert by_hand(math.log(9.0), -1.0, dual_clip=3.0, **ppo) == pytest.approx((3.0, 0.0, 9.0, True))
    assert by_hand(double, 1.0, loss="gspo") == pytest.approx((-1.0004, 0.0, 2.0, True))
    assert by_hand(half, -1.0, loss="gspo") == pytest.approx((0.9997, 0.0, 0.5, True))
    assert by_hand(double, 1.0, loss="importance") == pytest.approx((-2.0, -2.0, 2.0, False))
    # π = e^-1 = 0.37, old 0.18: moved by 0.18; from 0.14: by 0.23
    assert by_hand(double, 1.0, loss="dppo") == pytest.approx((-2.0, -2.0, 2.0, False))
    assert by_hand(1.0, 1.0, loss="dppo") == pytest.approx((0.0, 0.0, math.e, True))
    assert by_hand(1.0, -1.0, loss="dppo") == pytest.approx((math.e, math.e, math.e, False))


def test_the_default_is_bit_for_bit_what_it_was() -> None:
    torch.manual_seed(0)
    for coefficient in (0.0, 0.02):
        s = Settings(base_model="x", kl_coef=coefficient)
        logprobs = -torch.rand(999) * 4
        sampled, ref = logprobs + torch.randn(999) / 3, logprobs + torch.randn(999) / 3
        weights, scale = torch.randn(999) / 999, coefficient / 999
        mine, plain = logprobs.clone().requires_grad_(), logprobs.clone().requires_grad_()
        penalties = torch.full((999,), scale, dtype=torch.float64).float()
        found = objective(s, mine, Known(sampled, weights, penalties, ref if coefficient else None))
        left = weights - scale * (plain.detach() - ref) if coefficient else weights
        ratios = torch.exp(plain.detach() - sampled)
        expected = -(ratios.clamp(max=5.0) * left * plain).sum()
        found.loss.backward()
        expected.backward()
        assert torch.equal(found.loss, expected)
        assert mine.grad is not None
        assert plain.grad is not None
        assert torch.equal(mine.grad, plain.grad)


@pytest.mark.parametrize("form", KLS)
def test_the_penalty_pulls_along_the_gradient_of_the_kl(form: KlForm) -> None:
    """Over every token that could have been sampled, weighted by π: b · d KL(π | ref) / d logits."""
    torch.manual_seed(3)
    logits = torch.randn(6, dtype=torch.float64, requires_grad=True)
    ref = torch.log_softmax(torch.randn(6, dtype=torch.float64), 0)
    logprobs = torch.log_softmax(logits, 0)
    chances = logprobs.detach().exp()
    s = Settings(base_model="x", kl_coef=0.25, kl_form=form)
    known = Known(logprobs.detach(), torch.zeros_like(chances), 0.25 * chances, ref)
    found = objective(s, logprobs, known)
    (gradient,) = torch.autograd.grad(found.loss, logits, retain_graph=True)
    exact = (logprobs.exp() * (logprobs - ref)).sum()
    (expected,) = torch.autograd.grad(0.25 * exact, logits)
    assert torch.allclose(gradient, expected, rtol=0, atol=1e-12)
    assert found.kl is not None
    assert (chances * found.kl).sum().item() == pytest.approx(exact.item())


def test_chunks_change_nothing_and_bound_the_logits() -> None:
    torch.manual_seed(0)
    hidden, head = torch.randn(50, 8, dtype=torch.float64), torch.randn(30, 8, dtype=torch.float64)
    targets, temperatures = torch.randint(0, 30, (50,)), torch.full((50,), 0.7, dtype=torch.float64)
    softmax = torch.log_softmax(hidden @ head.T / 0.7, 1)
    expected = softmax[torch.arange(50), targets]
    for rows in (1, 7, 50, 64):
        chunked = token_logprobs(hidden, head, targets, temperatures, rows)
        assert torch.allclose(chunked, expected, rtol=0, atol=1e-13)
        logprobs, entropies = token_scores(hidden, head, targets, temperatures, rows).unbind(1)
        assert torch.equal(logprobs, chunked)
        assert torch.allclose(entropies, -(softmax.exp() * softmax).sum(1), rtol=0, atol=1e-13)

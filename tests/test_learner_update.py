"""One batch's steps: what the passes over it share, and what no way of splitting it may change."""

import random
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import count
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from learner_world import make_base, random_samples, scores_under, settings
from torch import Tensor

from capture.types import Rollout, Sample
from learner.batch import Scored, micro_batches
from learner.groups import Member, member
from learner.minibatch import Minibatch, Whole, scattered, weigh
from learner.model import Model, Tensors
from learner.settings import Settings
from learner.sums import Sums
from learner.update import backward, update

ROUNDING = 2e-5  # relative to the gradient's norm, in float32


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_base(tmp_path_factory.mktemp("base"))


def batch() -> list[list[Member]]:
    """Two groups of four rollouts, one a group without an advantage."""
    samples, advantages = random_samples(8, seed=3), [0.5, -0.25, -0.25, 0.0] * 2
    members = [
        member(Rollout(id=one.rollout_id, key_id="k", mode="train"), [one], advantage)
        for one, advantage in zip(samples, advantages, strict=True)
    ]
    return [members[:4], members[4:]]


def trained(
    base: Path, scratch: Path, batches: int, *, passes: int, **changes: Any
) -> tuple[list[Tensor], Sums]:
    """The adapter after the same batch so many times; several micro-batches a step."""
    changes = {"minibatches": 2, "micro_batch_tokens": 30, "seed": 5, **changes}
    config = settings(base, scratch, passes=passes, **changes)
    model = Model(config)
    optimizer = torch.optim.AdamW(model.parameters.values(), lr=config.lr)
    for _ in range(batches):
        sums = update(config, model, optimizer, batch(), lambda: False, 0)
        assert (sums.steps, sums.kl != 0.0) == (config.minibatches * passes, config.kl_coef > 0.0)
    return [tensor.detach().clone() for tensor in model.parameters.values()], sums


def same(a: Sequence[Tensor], b: Sequence[Tensor]) -> bool:
    return all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


def test_two_passes_are_the_batch_twice(base: Path, tmp_path: Path) -> None:
    once, _ = trained(base, tmp_path, 2, passes=1, kl_coef=0.5)
    twice, _ = trained(base, tmp_path, 1, passes=2, kl_coef=0.5)
    free, _ = trained(base, tmp_path, 1, passes=2, kl_coef=0.0)
    assert same(once, twice)
    assert not all(torch.allclose(a, b) for a, b in zip(twice, free, strict=True))


def test_until_the_first_step_the_learner_is_where_the_batch_began(base: Path, tmp_path: Path) -> None:
    _, sums = trained(base, tmp_path, 1, passes=1, minibatches=1, engine_correction="truncated")
    assert sums.ratio == sums.tokens
    _, sums = trained(base, tmp_path, 1, passes=2, minibatches=1, engine_correction="truncated")
    assert sums.ratio != sums.tokens
    assert sums.corrected > 0


# -- no way of splitting changes the gradient -----------------------------------------------------


def scattered_batch(model: Model, seed: int = 4) -> list[Member]:
    """Six rollouts of one to four branches, whose tokens the learner finds a little more or less likely than
    the engine did; masked tokens have logprobs that are not numbers."""
    rng = random.Random(seed)
    samples = iter(random_samples(15, seed=seed))
    members = []
    for index, branches in enumerate([1, 4, 2, 3, 1, 4]):
        own = [likely(model, next(samples), rng) for _ in range(branches)]
        rollout = Rollout(id=f"r_{index}", key_id="k", mode="train")
        members.append(member(rollout, own, [0.7, -0.4, 0.0, 0.3, -0.6, 0.2][index]))
    return members


def likely(model: Model, sample: Sample, rng: random.Random) -> Sample:
    scores = iter(scores_under(model, model.adapter(), [sample]))
    found = [next(scores) + rng.gauss(0, 0.2) if own else float("nan") for own in sample.loss_mask]
    return msgspec.structs.replace(sample, sampled_logprobs=found)


def moved_model(config: Settings) -> Model:
    """With an adapter whose every weight has a gradient."""
    model = Model(config)
    generator = torch.Generator().manual_seed(1)
    model.load({name: torch.randn(p.shape, generator=generator) / 8 for name, p in model.parameters.items()})
    return model


def gradient(config: Settings, model: Model, members: Sequence[Member], moved: bool = True) -> Tensor:
    """Of one step over these rollouts, as one vector."""
    for parameter in model.parameters.values():
        parameter.grad = None
    reference: Tensors = {name: tensor * 1.1 for name, tensor in model.adapter().items()}
    start = {name: tensor * 0.98 for name, tensor in model.adapter().items()}
    minibatch = Minibatch(config, model, members, reference, start)
    backward(config, model, minibatch, lambda: False, Sums(steps=int(moved)))
    return flat(model)


def flat(model: Model) -> Tensor:
    return torch.cat([p.grad.flatten() for p in model.parameters.values() if p.grad is not None])


def apart(a: Tensor, b: Tensor) -> float:
    return float((a - b).norm() / b.norm())


EVERYTHING: dict[str, dict[str, Any]] = {
    "cispo": {"kl_coef": 0.1},
    "ppo": {"loss": "ppo", "dual_clip": 2.0, "aggregation": "constant", "entropy_coef": 0.1},
    "gspo": {"loss": "gspo", "clip_low": 0.05, "clip_high": 0.05, "aggregation": "sequence_mean"},
    "gspo and more": {
        "loss": "gspo",
        "clip_low": 0.1,
        "clip_high": 0.1,
        "kl_coef": 0.1,
        "engine_correction": "masked",
    },
    "dppo": {"loss": "dppo", "engine_correction": "truncated", "kl_coef": 0.1, "kl_form": "k2"},
    "importance": {"loss": "importance", "kl_coef": 0.1, "kl_form": "r_k3"},
}


@pytest.mark.parametrize("name", EVERYTHING)
def test_micro_batches_and_order_change_the_gradient_by_rounding_only(
    base: Path, tmp_path: Path, name: str
) -> None:
    config = settings(base, tmp_path, **EVERYTHING[name])
    model = moved_model(config)
    members = scattered_batch(model)
    whole = gradient(config, model, members)
    assert whole.norm() > 1e-3
    rng = random.Random(0)
    for tokens_max in (1, 25, 60):
        rng.shuffle(members)
        split = msgspec.structs.replace(config, micro_batch_tokens=tokens_max)
        many = len(list(micro_batches(weigh(split, members), tokens_max)))
        assert many > 2
        assert apart(gradient(split, model, members), whole) < ROUNDING


def literal_gspo(config: Settings, model: Model, members: Sequence[Member]) -> Tensor:
    """The formula with the mean of each rollout inside the graph, all rollouts in one forward pass."""
    for parameter in model.parameters.values():
        parameter.grad = None
    (micro,) = micro_batches(weigh(config, members), 9999)
    gaps = model.logprobs(micro) - micro.sampled_logprobs
    low, high = config.clip_range
    loss = torch.zeros(())
    for index, one in enumerate(members):
        mine = gaps[micro.rollouts == index]
        if one.advantage:
            assert len(mine) == one.owned
            s = mine.mean().exp()
            loss = loss - torch.minimum(s * one.advantage, s.clamp(1 - low, 1 + high) * one.advantage)
    (loss / len(members)).backward()
    return flat(model)


def test_gspo_is_exact_where_a_rollout_lies_in_several_micro_batches(base: Path, tmp_path: Path) -> None:
    config = settings(base, tmp_path, **EVERYTHING["gspo"], micro_batch_tokens=25)
    model = moved_model(config)
    members = scattered_batch(model)
    assert len(scattered(weigh(config, members), 25)) >= 2
    exact = literal_gspo(config, model, members)
    assert apart(gradient(config, model, members), exact) < ROUNDING

    class Careless(Minibatch):
        """Takes what a micro-batch has of a rollout for the whole of it."""

        def whole(self, proceed: Callable[[], None]) -> Whole:
            found = super().whole(proceed)
            return Whole(torch.zeros_like(found.scattered), found.log_ratios)

    for parameter in model.parameters.values():
        parameter.grad = None
    careless = Careless(config, model, members, None, model.adapter())
    backward(config, model, careless, lambda: False, Sums())
    assert apart(flat(model), exact) > 100 * ROUNDING


def test_gspo_scores_only_what_is_scattered_once_more(base: Path, tmp_path: Path) -> None:
    config = settings(base, tmp_path, loss="gspo", micro_batch_tokens=25)
    model = moved_model(config)
    members = scattered_batch(model)
    alone = [replace_samples(one, one.samples[:1]) for one in members]
    for some, extra in ((members, True), (alone, False)):
        minibatch = Minibatch(config, model, some, None, model.adapter())
        numbers = count()
        minibatch.whole(lambda numbers=numbers: next(numbers) and None)
        assert (next(numbers) > 0) == extra


def replace_samples(one: Member, samples: list[Sample]) -> Member:
    return member(one.rollout, samples, one.advantage)


def test_logprobs_of_masked_tokens_change_nothing(base: Path, tmp_path: Path) -> None:
    config = settings(base, tmp_path, **EVERYTHING["gspo and more"])
    model = moved_model(config)
    members = scattered_batch(model)
    clean = [
        replace_samples(one, [msgspec.structs.replace(s, sampled_logprobs=zeroed(s)) for s in one.samples])
        for one in members
    ]
    assert torch.equal(gradient(config, model, members), gradient(config, model, clean))


def zeroed(sample: Sample) -> list[float]:
    pairs = zip(sample.sampled_logprobs, sample.loss_mask, strict=True)
    return [logprob if own else 0.0 for logprob, own in pairs]


# -- what is left out ----------------------------------------------------------------------------


def test_what_is_left_out_has_no_gradient_but_counts_in_the_divisor(base: Path, tmp_path: Path) -> None:
    config = settings(base, tmp_path)
    members = batch()[0]  # advantages .5 -.25 -.25 0
    total = sum(one.owned for one in members)
    left_out = [msgspec.structs.replace(members[0], dropped="overlong"), *members[1:]]
    assert [(one.weight, one.rollout) for one in weigh(config, left_out)] == [
        (-0.25 / total, 1),
        (-0.25 / total, 2),
    ]
    everywhere = msgspec.structs.replace(config, entropy_coef=0.5)
    found = weigh(everywhere, left_out)
    assert [(one.weight, one.bonus) for one in found] == [
        (-0.25 / total, 0.5 / total),
        (-0.25 / total, 0.5 / total),
        (0.0, 0.5 / total),
    ]
    nothing = [msgspec.structs.replace(one, dropped="overlong") for one in members]
    assert weigh(everywhere, nothing) == []


def test_entropy_bonus_raises_the_entropy(base: Path, tmp_path: Path) -> None:
    found = []
    for coefficient in (0.0, 10.0):
        config = settings(base, tmp_path, entropy_coef=coefficient)
        model = Model(config)
        optimizer = torch.optim.AdamW(model.parameters.values(), lr=config.lr)
        members = [one for group in batch() for one in group]
        (micro,) = micro_batches([Scored(sample, 0.0) for one in members for sample in one.samples], 9999)
        with torch.no_grad():
            before = model.scores(micro)[1].mean()
        for _ in range(4):
            update(config, model, optimizer, batch(), lambda: False, 0)
        with torch.no_grad():
            found.append(model.scores(micro)[1].mean() - before)
    assert found[1] > 0.01
    assert found[1] > found[0]


def test_a_known_is_not_changed_by_what_follows(base: Path, tmp_path: Path) -> None:
    """The logprobs of the batch's beginning are remembered from the first pass, not computed again."""
    config = settings(base, tmp_path, engine_correction="truncated")
    model = moved_model(config)
    minibatch = Minibatch(config, model, scattered_batch(model), None, model.adapter())
    (micro,) = micro_batches(minibatch.scored, 9999)
    logprobs = model.logprobs(micro)
    first = minibatch.scored_as(minibatch.known(0, micro, moved=False), 0, micro, logprobs, None)
    with torch.no_grad():
        for parameter in model.parameters.values():
            parameter += 0.1
    again = minibatch.known(0, micro, moved=True)
    assert first.start is not None
    assert again.start is not None
    assert torch.equal(first.start, again.start)
    apart_now = Minibatch(config, model, scattered_batch(model), None, model.adapter())
    other = replace(first, start=apart_now.known(0, micro, moved=True).start)
    assert other.start is not None
    assert not torch.equal(first.start, other.start)

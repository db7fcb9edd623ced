"""One batch's steps: what the passes over it share."""

from pathlib import Path

import pytest
import torch
from learner_world import make_base, random_samples, settings

from capture.types import Rollout
from learner.groups import Member, member
from learner.model import Model
from learner.update import update


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


def trained(base: Path, scratch: Path, batches: int, *, passes: int, kl_coef: float) -> list[torch.Tensor]:
    """The adapter after the same batch so many times; several micro-batches a step."""
    config = settings(
        base, scratch, passes=passes, minibatches=2, kl_coef=kl_coef, micro_batch_tokens=30, seed=5
    )
    model = Model(config)
    optimizer = torch.optim.AdamW(model.parameters.values(), lr=config.lr)
    for _ in range(batches):
        sums = update(config, model, optimizer, batch(), lambda: False, 0)
        assert (sums.steps, sums.kl != 0.0) == (2 * passes, kl_coef > 0.0)
    return [tensor.detach().clone() for tensor in model.parameters.values()]


def test_two_passes_are_the_batch_twice(base: Path, tmp_path: Path) -> None:
    once = trained(base, tmp_path, 2, passes=1, kl_coef=0.5)
    twice = trained(base, tmp_path, 1, passes=2, kl_coef=0.5)
    free = trained(base, tmp_path, 1, passes=2, kl_coef=0.0)
    assert all(torch.equal(a, b) for a, b in zip(once, twice, strict=True))
    assert not all(torch.allclose(a, b) for a, b in zip(twice, free, strict=True))

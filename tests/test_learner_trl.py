"""TRL's own loss as a second reference, where its formulas are ours."""

import importlib
import os
import random
import warnings
from collections import defaultdict
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from learner_reference import Rollout, random_rollouts
from torch import Tensor

from learner.aggregate import divisors
from learner.correction import factors
from learner.objective import Known, log_sequence_ratios, objective
from learner.settings import Settings

environ = dict(os.environ)
with warnings.catch_warnings():  # it says that it was not tried with this vLLM, which is not used here
    warnings.simplefilter("ignore")
    GRPOTrainer: Any = importlib.import_module("trl").GRPOTrainer
os.environ.clear()
os.environ.update(environ)  # it silences the log of every vLLM that is started later

SAME: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "cispo": ({"cispo_clip": 1.3}, {"loss_type": "cispo", "epsilon_high": 1.3}),
    "dapo": ({"loss": "ppo", "clip_high": 0.28}, {"loss_type": "dapo", "epsilon_high": 0.28}),
    "grpo": (
        {"loss": "ppo", "aggregation": "sequence_mean", "kl_coef": 0.04, "kl_form": "r_k3"},
        {"loss_type": "grpo", "beta": 0.04},
    ),
    "dual clip": ({"loss": "ppo", "dual_clip": 1.5}, {"loss_type": "dapo", "delta": 1.5}),
    "dr_grpo": (
        {"loss": "ppo", "aggregation": "constant", "aggregation_tokens": 9},
        {"loss_type": "dr_grpo", "max_completion_length": 9},
    ),
    "gspo": (
        {"loss": "gspo", "clip_low": 0.1, "clip_high": 0.2, "aggregation": "sequence_mean"},
        {
            "loss_type": "grpo",
            "epsilon_low": 0.1,
            "epsilon_high": 0.2,
            "importance_sampling_level": "sequence",
        },
    ),
    "truncated": (
        {"loss": "ppo", "engine_correction": "truncated", "engine_correction_max": 1.1},
        {"loss_type": "dapo", "use_vllm": True},
    ),
    "masked": (
        {"loss": "ppo", "engine_correction": "masked", "engine_correction_max": 1.1},
        {"loss_type": "dapo", "use_vllm": True},
    ),
}


class Theirs(GRPOTrainer):
    """TRL's trainer with nothing but what `_compute_loss` reads."""

    def __init__(self, logprobs: Tensor, **changes: Any) -> None:
        values = {
            "loss_type": "dapo",
            "importance_sampling_level": "token",
            "epsilon_low": 0.2,
            "epsilon_high": 0.2,
            "beta": 0.0,
            "use_vllm": False,
            "max_completion_length": 1,
            **changes,
        }
        delta = values.pop("delta", None)
        self.__dict__.update(values)
        self.logprobs = logprobs
        self.args = SimpleNamespace(delta=delta, use_bias_correction_kl=True, steps_per_generation=1)
        self.accelerator = SimpleNamespace(
            num_processes=1, gather=lambda x: x, reduce=lambda x, reduction: x, sync_gradients=True
        )
        self.model = torch.nn.Linear(1, 1)
        self._metrics = {"train": defaultdict(list)}
        self.current_gradient_accumulation_steps = 1
        self.vllm_importance_sampling_correction = True
        self.aux_loss_enabled = self._entropy_bonus_enabled = False
        self.top_entropy_quantile = 1.0
        self.off_policy_mask_threshold = None

    def _get_per_token_logps_and_entropies(self, *_: Any, **__: Any) -> tuple[Tensor, Tensor, None]:
        return self.logprobs, torch.zeros_like(self.logprobs), None


def padded(rollouts: list[Rollout], name: str) -> Tensor:
    rows = [torch.tensor([getattr(t, name) for t in one.tokens], dtype=torch.float64) for one in rollouts]
    return torch.nn.utils.rnn.pad_sequence(rows, batch_first=True)


def known_of(s: Settings, rollouts: list[Rollout], mask: Tensor, logprobs: Tensor) -> Known:
    lengths = [len(one.tokens) for one in rollouts]
    per_rollout = divisors(lengths, s.aggregation, s.aggregation_tokens)
    index = torch.arange(len(rollouts))[:, None].expand(mask.shape)[mask]
    advantages = torch.tensor([one.advantage for one in rollouts], dtype=torch.float64)
    each = torch.tensor(per_rollout, dtype=torch.float64)
    sampled, start = padded(rollouts, "sampled")[mask], padded(rollouts, "start")[mask]
    correcting = s.engine_correction != "none"
    gaps = logprobs.detach() - (start if correcting else sampled)
    return Known(
        sampled=sampled,
        weights=(advantages / each)[index],
        penalties=(s.kl_coef / each)[index],
        ref=padded(rollouts, "ref")[mask] if s.kl_coef else None,
        start=start if correcting else None,
        log_ratios=log_sequence_ratios(gaps, index, torch.tensor(lengths))[index],
    )


@pytest.mark.parametrize("seed", range(20))
@pytest.mark.parametrize("name", SAME)
def test_loss_and_gradient_are_trl_s(name: str, seed: int) -> None:
    ours, theirs = SAME[name]
    s = Settings(base_model="x", **ours)
    rng = random.Random(seed)
    rollouts = random_rollouts(rng)
    mask = padded(rollouts, "temperature") > 0
    gaps = torch.tensor([rng.gauss(0, 0.5) for _ in range(mask.numel())], dtype=torch.float64)
    logprobs = (padded(rollouts, "sampled") + gaps.view(mask.shape)).requires_grad_()
    known = known_of(s, rollouts, mask, logprobs[mask])
    found = objective(s, logprobs[mask], known).loss
    (mine,) = torch.autograd.grad(found, logprobs)
    old = padded(rollouts, "start" if s.engine_correction != "none" else "sampled")
    weights = torch.ones_like(old)
    if known.start is not None:
        weights[mask] = factors(s, known.start, known.sampled)[0]
    inputs = {
        "prompt_ids": torch.zeros(len(rollouts), 1),
        "prompt_mask": torch.ones(len(rollouts), 1),
        "completion_ids": torch.zeros(mask.shape),
        "completion_mask": mask.long(),
        "advantages": torch.tensor([one.advantage for one in rollouts], dtype=torch.float64),
        "old_per_token_logps": old,
        "ref_per_token_logps": padded(rollouts, "ref"),
        "importance_sampling_ratio": weights,
        "num_items_in_batch": mask.sum(),
    }
    trainer = Theirs(logprobs, **theirs)
    expected = trainer._compute_loss(trainer.model, inputs)
    (other,) = torch.autograd.grad(expected, logprobs)
    assert found.item() == pytest.approx(expected.item(), rel=1e-12, abs=1e-12)
    assert torch.allclose(mine, other, rtol=1e-12, atol=1e-12)

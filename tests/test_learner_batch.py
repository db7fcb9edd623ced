import contextlib
import math
import random
from pathlib import Path

import pytest
import torch
from learner_world import make_base, make_sample, random_samples, settings
from peft import LoraConfig, PeftModel, get_peft_model, set_peft_model_state_dict
from transformers import AutoModelForCausalLM

from learner.batch import Scored, micro_batches, prefix_length
from learner.losses import cispo
from learner.model import Model


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_base(tmp_path_factory.mktemp("batch"))


@pytest.fixture(scope="module")
def model(base: Path, tmp_path_factory: pytest.TempPathFactory) -> Model:
    """A model whose adapter is not the identity."""
    model = Model(settings(base, tmp_path_factory.mktemp("scratch"), lora_alpha=6.0))
    torch.manual_seed(3)
    with torch.no_grad():
        for parameter in model.parameters.values():
            parameter.normal_(0, 0.1)
    return model


@pytest.fixture(scope="module")
def plain(base: Path, model: Model) -> PeftModel:
    """The same weights in transformers' and peft's own layers and attention."""
    loaded = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32, attn_implementation="eager")
    config = LoraConfig(task_type="CAUSAL_LM", r=4, lora_alpha=6, target_modules="all-linear")
    plain = get_peft_model(loaded, config).eval()
    assert not set_peft_model_state_dict(plain, model.adapter()).unexpected_keys
    return plain


def scored(count: int, seed: int) -> list[Scored]:
    rng = random.Random(seed)
    return [Scored(sample, rng.gauss(0, 0.1)) for sample in random_samples(count, seed)]


def gradient(model: Model, items: list[Scored], tokens_max: int) -> torch.Tensor:
    """The gradient of the loss by all adapter weights, flat."""
    model_parameters = list(model.parameters.values())
    for parameter in model_parameters:
        parameter.grad = None
    for micro in micro_batches(items, tokens_max):
        loss = cispo.loss(model.logprobs(micro), micro.sampled_logprobs, micro.weights, 5.0).losses.sum()
        loss.backward()
    return torch.cat([p.grad.flatten() for p in model_parameters if p.grad is not None])


def padded_gradient(plain: PeftModel, items: list[Scored], width: int) -> torch.Tensor:
    """The same, by transformers' own forward over one padded sequence after another."""
    parameters = [parameter for parameter in plain.parameters() if parameter.requires_grad]
    plain.zero_grad()
    for item in items:
        sample, length = item.sample, len(item.sample.token_ids)
        ids = torch.tensor([sample.token_ids + [9] * (width - length)])
        mask = torch.tensor([[1] * length + [0] * (width - length)])
        logits = plain(input_ids=ids, attention_mask=mask).logits[0]
        for span in sample.spans:
            row = torch.log_softmax(logits[span.start - 1] / span.temperature, -1)
            logprob = row[sample.token_ids[span.start]]
            ratio = min(math.exp(logprob.item() - sample.sampled_logprobs[span.start]), 5.0)
            (-ratio * item.weight * logprob).backward(retain_graph=True)
    return torch.cat([p.grad.flatten() for p in parameters if p.grad is not None])


def assert_same(a: torch.Tensor, b: torch.Tensor) -> None:
    """Equal up to float32 rounding of a sum."""
    assert float((a - b).norm() / b.norm()) < 2e-6


def test_packing_equals_padded_sequences_one_by_one(model: Model, plain: PeftModel) -> None:
    items = scored(12, 0)
    assert_same(gradient(model, items, 10_000), padded_gradient(plain, items, 70))


def test_a_wrong_weight_would_be_seen(model: Model) -> None:
    items = scored(12, 0)
    wrong = [Scored(items[0].sample, items[0].weight * 1.01), *items[1:]]
    difference = gradient(model, wrong, 10_000) - gradient(model, items, 10_000)
    assert float(difference.norm()) > 1e-4 * float(gradient(model, items, 10_000).norm())


@pytest.mark.parametrize("tokens_max", [1, 30, 100])
def test_splitting_changes_the_gradient_by_rounding_only(model: Model, tokens_max: int) -> None:
    items = scored(20, 1)
    assert_same(gradient(model, items, tokens_max), gradient(model, items, 10_000))


def test_order_of_samples_changes_nothing_at_all(model: Model) -> None:
    items = scored(20, 2)
    shuffled = items[:]
    random.Random(0).shuffle(shuffled)
    assert torch.equal(gradient(model, shuffled, 100), gradient(model, items, 100))


def test_context_logprobs_are_never_read(model: Model) -> None:
    items = scored(6, 4)
    poisoned = []
    for item in items:
        sample = item.sample
        pairs = zip(sample.loss_mask, sample.sampled_logprobs, strict=True)
        values = [value if owned else math.nan for owned, value in pairs]
        fields = {f: getattr(sample, f) for f in sample.__struct_fields__}
        poisoned.append(Scored(type(sample)(**(fields | {"sampled_logprobs": values})), item.weight))
    assert torch.equal(gradient(model, poisoned, 100), gradient(model, items, 100))


@pytest.mark.parametrize("bare", [False, True])
def test_logprobs_equal_those_of_transformers(model: Model, plain: PeftModel, bare: bool) -> None:
    items = scored(15, 5)
    ordered = sorted(items, key=lambda item: item.sample.token_ids[: item.sample.spans[-1].end])
    with model.under(None if bare else model.adapter()):
        found = torch.cat([model.logprobs(micro) for micro in micro_batches(items, 10_000)])
    expected = []
    with torch.no_grad(), plain.disable_adapter() if bare else contextlib.nullcontext():
        for item in ordered:
            logits = plain(input_ids=torch.tensor([item.sample.token_ids])).logits[0]
            for span in item.sample.spans:
                row = torch.log_softmax(logits[span.start - 1] / span.temperature, -1)
                expected.append(row[item.sample.token_ids[span.start]])
    assert float((found - torch.stack(expected)).abs().max()) < 1e-5


def test_shared_prefixes_become_one_node_each() -> None:
    # a b c d | a b c e | a b f, owned: the last token of each; trimmed tail of the first
    samples = [
        make_sample([1, 2, 3, 4, 9, 9], [3]),
        make_sample([1, 2, 3, 5], [2, 3]),
        make_sample([1, 2, 6], [2]),
    ]
    (micro,) = micro_batches([Scored(sample, 0.5) for sample in samples], 100)
    assert micro.token_ids.tolist() == [1, 2, 3, 4, 5, 6]
    assert micro.position_ids.tolist() == [0, 1, 2, 3, 3, 2]
    assert micro.targets[micro.expand].tolist() == [4, 3, 5, 6]
    assert micro.predictors[micro.expand].tolist() == [2, 1, 2, 1]


def test_a_token_sampled_twice_is_scored_once_but_weighs_twice() -> None:
    twins = [Scored(make_sample([1, 2, 3], [2], logprob=-x), 0.25) for x in (1.0, 2.0)]
    (micro,) = micro_batches(twins, 100)
    assert micro.targets.tolist() == [3]
    assert micro.expand.tolist() == [0, 0]
    assert sorted(micro.sampled_logprobs.tolist()) == [-2.0, -1.0]
    other = Scored(make_sample([1, 2, 3], [2], temperature=0.5), 0.25)
    (micro,) = micro_batches([*twins, other], 100)
    assert len(micro.targets) == 2  # another temperature is another distribution


def test_micro_batches_keep_to_the_limit_and_lose_no_token() -> None:
    items = scored(60, 6)
    micros = list(micro_batches(items, 64))
    assert max(len(micro.token_ids) for micro in micros) <= 64
    assert sum(len(micro.weights) for micro in micros) == sum(sum(i.sample.loss_mask) for i in items)


def test_prefix_length() -> None:
    assert prefix_length([1, 2, 3], [1, 2, 4]) == 2
    assert prefix_length([1, 2], [1, 2, 4]) == 2
    assert prefix_length([], [1]) == 0

"""Supervised fine-tuning: the loss, its gradient, what is held out, and the adapter that comes of it."""

import random
from collections.abc import Sequence
from hashlib import sha256
from pathlib import Path

import pytest
import torch
from learner_world import VOCABULARY, make_base, make_sample, random_samples, read_json, settings
from peft import LoraConfig, PeftModel, get_peft_model, set_peft_model_state_dict
from transformers import AutoModelForCausalLM

from capture.adapters import read_manifest
from capture.errors import ConfigError, Conflict, NotFound
from capture.types import Sample
from learner.canary import score
from learner.lessons import HELD_OUT_FROM, Lesson, batches, hold_out, lesson
from learner.model import Model
from learner.sft import Progress, SftSettings, backward, mean_loss, run
from learner.update import Abandoned


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_base(tmp_path_factory.mktemp("sft"))


class DoubleNorm(torch.nn.Module):
    """Qwen3's norm without its detour through float32."""

    def __init__(self, norm: torch.nn.Module) -> None:
        super().__init__()
        self.weight, self.epsilon = norm.weight, norm.variance_epsilon

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.weight * x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.epsilon)


def in_double(model: torch.nn.Module) -> None:
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            if type(child).__name__ == "Qwen3RMSNorm":
                setattr(parent, name, DoubleNorm(child))
    model.double()


@pytest.fixture(scope="module")
def double(base: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Model, PeftModel]:
    """The learner's model and the same weights in transformers' and peft's own layers, both in float64."""
    model = Model(settings(base, tmp_path_factory.mktemp("scratch"), lora_alpha=6.0, logits_rows=3))
    torch.manual_seed(3)
    with torch.no_grad():
        for parameter in model.parameters.values():
            parameter.normal_(0, 0.1)
    loaded = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32, attn_implementation="sdpa")
    config = LoraConfig(task_type="CAUSAL_LM", r=4, lora_alpha=6, target_modules="all-linear")
    plain = get_peft_model(loaded, config).eval()
    assert not set_peft_model_state_dict(plain, model.adapter()).unexpected_keys
    in_double(model._peft)
    in_double(plain)
    return model, plain


def plain_loss(plain: PeftModel, samples: Sequence[Sample]) -> torch.Tensor:
    """-1/N Σ log π over the tokens with loss, one sample after another, by transformers' own logits."""
    terms = []
    for sample in samples:
        logits = plain(input_ids=torch.tensor([sample.token_ids])).logits[0]
        logprobs = torch.log_softmax(logits, -1)
        terms += [
            -logprobs[place - 1, token]
            for place, (token, masked) in enumerate(zip(sample.token_ids, sample.loss_mask, strict=True))
            if masked
        ]
    return torch.stack(terms).mean()


def gradients(model: torch.nn.Module) -> torch.Tensor:
    named = {name.replace(".default.", "."): p for name, p in model.named_parameters() if p.requires_grad}
    return torch.cat([named[name].grad.flatten() for name in sorted(named)])


@pytest.mark.parametrize("tokens_max", [1, 40, 9999])
def test_loss_and_gradient_are_those_of_a_plain_computation(
    double: tuple[Model, PeftModel], tokens_max: int
) -> None:
    model, plain = double
    samples = random_samples(12, seed=5)
    lessons = [lesson("", sample) for sample in samples]
    plain.zero_grad()
    expected = plain_loss(plain, samples)
    expected.backward()
    for parameter in model.parameters.values():
        parameter.grad = None
    loss = backward(model, lessons, tokens_max, lambda: False)
    assert loss == pytest.approx(expected.item(), rel=1e-12)
    assert mean_loss(model, lessons, tokens_max, lambda: False) == pytest.approx(loss, rel=1e-12)
    wanted, found = (
        gradients(plain),
        torch.cat([model.parameters[n].grad.flatten() for n in sorted(model.parameters)]),
    )
    assert float((found - wanted).norm() / wanted.norm()) < 1e-10


def test_another_mask_would_show(double: tuple[Model, PeftModel]) -> None:
    model, plain = double
    sample = make_sample([5, 9, 30, 41, 7, 22, 3], owned=[3, 4])
    expected = plain_loss(plain, [sample]).item()
    for owned, same in (([3, 4], True), ([2, 3], False), ([4, 5], False), ([1, 2, 3, 4, 5, 6], False)):
        masked = lesson("", make_sample(sample.token_ids, owned))
        found = mean_loss(model, [masked], 9999, lambda: False)
        assert (found == pytest.approx(expected, rel=1e-9)) == same


def counting(count: int, seed: int) -> list[Lesson]:
    """A task that can be learned: after 2 and a word, the next four words in the order of the vocabulary."""
    rng = random.Random(seed)
    made = []
    for _ in range(count):
        first = rng.randrange(8, VOCABULARY - 8)
        ids = [2, first, *range(first + 1, first + 5), rng.randrange(8, VOCABULARY)]
        made.append(lesson(f"s{first}", make_sample(ids, [2, 3, 4, 5])))
    return made


def test_what_is_held_out_is_learned_too_and_the_adapter_loads_in_peft(base: Path, tmp_path: Path) -> None:
    out = tmp_path / "made" / "sft"
    told: list[Progress] = []
    own = settings(base, tmp_path, lora_rank=8)
    sft = SftSettings(epochs=6, lr=2e-2, batch_tokens=112)
    report = run(own, sft, "policy", counting(200, 1), out, lambda: False, told.append)
    assert report.samples + report.held_out_samples == 200
    assert 10 <= report.held_out_samples < 30
    assert report.tokens == 4 * report.samples
    first, *_, last = report.held_out_losses
    assert len(report.held_out_losses) == 7
    assert last < first - 1.0
    assert report.losses[-1] < report.losses[0] - 1.0
    assert (told[-1].step, told[-1].epochs) == (report.steps, 6.0)
    assert told[report.steps // 2].epochs == pytest.approx(3.0, abs=0.2)
    assert [one.step for one in told] == list(range(report.steps + 1))
    assert [one.held_out for one in told if one.held_out is not None] == report.held_out_losses

    written = sorted(path.name for path in out.iterdir())
    assert written == ["adapter_config.json", "adapter_model.safetensors", "manifest.json", "sft.json"]
    assert read_json(out / "sft.json")["held_out_losses"] == report.held_out_losses
    assert list(out.parent.iterdir()) == [out]
    manifest = read_manifest(out)
    assert (manifest.policy, manifest.version, manifest.parent, manifest.step) == (
        "policy",
        0,
        None,
        report.steps,
    )
    assert manifest.sha256 == sha256((out / "adapter_model.safetensors").read_bytes()).hexdigest()

    loaded = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    plain = PeftModel.from_pretrained(loaded, out).eval()
    ids = torch.tensor([manifest.canary_ids])
    with torch.no_grad():
        logprobs = torch.log_softmax(plain(input_ids=ids).logits[0, :-1], -1)
        adapted = logprobs.gather(1, ids[0, 1:, None]).squeeze(1)
        with plain.disable_adapter():
            logprobs = torch.log_softmax(plain(input_ids=ids).logits[0, :-1], -1)
            bare = logprobs.gather(1, ids[0, 1:, None]).squeeze(1)
    assert adapted.tolist() == pytest.approx(manifest.canary_logprobs, abs=1e-4)
    assert bare.tolist() == pytest.approx(manifest.base_logprobs, abs=1e-4)
    assert sum(manifest.canary_logprobs[1:5]) > sum(manifest.base_logprobs[1:5]) + 1.0


def test_the_same_seed_gives_the_same_adapter(base: Path, tmp_path: Path) -> None:
    def made(name: str, seed: int) -> bytes:
        sft = SftSettings(epochs=1, batch_tokens=64, seed=seed)
        run(settings(base, tmp_path), sft, "policy", counting(40, 2), tmp_path / name, lambda: False, id)
        return (tmp_path / name / "adapter_model.safetensors").read_bytes()

    assert made("a", 1) == made("b", 1) != made("c", 2)


def test_whatever_ends_it_nothing_is_left(base: Path, tmp_path: Path) -> None:
    out = tmp_path / "sft"
    looks = iter([False] * 5 + [True] * 100)
    own = settings(base, tmp_path)
    with pytest.raises(Abandoned, match="nothing was written"):
        run(own, SftSettings(batch_tokens=28), "policy", counting(40, 3), out, lambda: next(looks), id)
    with pytest.raises(NotFound, match="nothing to learn from"):
        run(own, SftSettings(), "policy", [], out, lambda: False, id)
    assert list(tmp_path.iterdir()) == []
    out.mkdir()
    with pytest.raises(Conflict, match="is there already"):
        run(own, SftSettings(), "policy", counting(4, 3), out, lambda: False, id)
    assert list(out.iterdir()) == []


def test_what_the_model_cannot_read_is_left_out(base: Path, tmp_path: Path) -> None:
    long = lesson("", make_sample([5] * 513, [512]))
    foreign = lesson("", make_sample([5, VOCABULARY], [1]))
    own, sft = settings(base, tmp_path), SftSettings(epochs=1)
    report = run(own, sft, "policy", [long, foreign, *counting(3, 1)], tmp_path / "a", lambda: False, id)
    assert report.left_out == {"too_long": 1, "other_vocabulary": 1}
    assert (report.samples, report.held_out_losses) == (3, [])
    with pytest.raises(ConfigError, match="can read none of 2 lessons"):
        run(own, sft, "policy", [long, foreign], tmp_path / "b", lambda: False, id)


def test_scenarios_are_held_out_whole() -> None:
    lessons = [Lesson(f"s{number % 30}", b"", b"") for number in range(300)]
    training, held = hold_out(lessons, 0.05, seed=1)
    assert len(held) == 20  # two scenarios of ten: one would be too little
    assert not {one.scenario for one in training} & {one.scenario for one in held}
    assert hold_out(lessons, 0.05, seed=1)[1] == held
    assert {one.scenario for one in hold_out(lessons, 0.05, seed=2)[1]} != {one.scenario for one in held}
    few = lessons[: HELD_OUT_FROM - 1]
    assert hold_out(few, 0.05, seed=1) == (few, [])
    assert hold_out(lessons[:HELD_OUT_FROM], 0.05, seed=1)[1] != []
    same = [Lesson("s", b"", b"")] * 50
    assert hold_out(same, 0.05, seed=1) == (same, [])


def test_batches_hold_every_lesson_once() -> None:
    lessons = [Lesson("", b"", bytes(size)) for size in (3, 3, 3, 10, 1, 2)]
    dealt = batches(lessons, 6, epoch=0, seed=1)
    assert sorted(index for batch in dealt for index in batch) == list(range(6))
    for batch in dealt:
        assert sum(len(lessons[index]) for index in batch) <= 6 or len(batch) == 1
    orders = {str(batches(lessons, 6, epoch=epoch, seed=1)) for epoch in range(5)}
    assert len(orders) > 1


def test_a_lesson_is_its_sample_at_temperature_one(base: Path, tmp_path: Path) -> None:
    sample = make_sample([5, 9, 30, 41], [2, 3], temperature=0.5)
    packed = lesson("s", sample)
    assert (len(packed), packed.owned) == (4, 2)
    again = packed.sample()
    assert (again.token_ids, again.loss_mask, again.spans) == (sample.token_ids, sample.loss_mask, [])
    model = Model(settings(base, tmp_path))
    expected = -sum(score(model, sample.token_ids, None)[1:]) / 2
    assert mean_loss(model, [packed], 99, lambda: False) == pytest.approx(expected, rel=1e-5)

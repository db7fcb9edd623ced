import math
from pathlib import Path
from typing import Any

import msgspec
import pytest
from learner_world import make_base, settings

from capture.errors import ConfigError
from learner.model import Model, base_path, fingerprint
from learner.settings import Settings


def test_alpha_is_the_rank_unless_set() -> None:
    assert Settings(base_model="x", lora_rank=8).alpha == 8.0
    assert Settings(base_model="x", lora_rank=8, lora_alpha=16).alpha == 16.0


def rates(**changes: Any) -> list[float]:
    settings = Settings(base_model="x", lr=0.5, **changes)
    return [settings.lr_at(step) for step in range(6)]


def test_learning_rate_rises_stays_and_falls_to_zero_at_the_last_step() -> None:
    assert rates() == [0.5] * 6
    assert rates(lr_warmup_steps=3) == [0.125, 0.25, 0.375, 0.5, 0.5, 0.5]
    assert rates(lr_schedule="linear", steps_max=4) == [0.5, 0.375, 0.25, 0.125, 0.0, 0.0]
    assert rates(lr_schedule="linear", lr_warmup_steps=1, steps_max=5) == [0.25, 0.5, 0.375, 0.25, 0.125, 0.0]
    # half a cosine: (1 + cos(π k / 4)) / 2 of it
    root = math.sqrt(0.5)
    cosine = [0.5, 0.25 * (1 + root), 0.25, 0.25 * (1 - root), 0.0, 0.0]
    assert rates(lr_schedule="cosine", steps_max=4) == pytest.approx(cosine, abs=1e-15)
    assert rates(lr_schedule="cosine", lr_warmup_steps=1, steps_max=5) == pytest.approx([0.25, *cosine[:5]])
    with pytest.raises(ConfigError, match=r"train\.lr_schedule: linear.*train\.steps_max"):
        rates(lr_schedule="linear")
    with pytest.raises(ConfigError, match=r"train\.lr_schedule: cosine.*train\.steps_max"):
        rates(lr_schedule="cosine")
    with pytest.raises(ConfigError, match=r"train\.lr_warmup_steps.*train\.steps_max"):
        rates(lr_warmup_steps=5, steps_max=5)


def test_a_clip_range_is_the_loss_s_own_unless_set() -> None:
    assert Settings(base_model="x", loss="gspo").clip_range == (3e-4, 4e-4)
    assert Settings(base_model="x", loss="ppo", clip_high=0.28).clip_range == (0.2, 0.28)
    assert Settings(base_model="x", loss="dppo", clip_low=0.0).clip_range == (0.0, 0.2)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"dual_clip": 1.0}, r"> 1.*dual_clip"),
        ({"clip_low": 1.5}, r"<= 1.*clip_low"),
        ({"loss": "reinforce"}, r"reinforce.*loss"),
        ({"ref_refresh_steps": 5}, r"train\.ref_refresh_steps: .*train\.kl_coef is 0"),
        ({"engine_correction_min": 2.0}, r"train\.engine_correction_min: .*less than"),
        ({"group_reward_min": 0.5, "group_reward_max": 0.5}, r"train\.group_reward_min: .*less than"),
    ],
)
def test_what_makes_no_sense_is_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises((ConfigError, msgspec.ValidationError), match=message):
        msgspec.convert({"base_model": "x", **changes}, Settings)


def test_errors_name_the_setting() -> None:
    with pytest.raises(ConfigError, match=r"train\.targets"):
        Settings(base_model="x", targets=["q_proj", "lm_head"])
    with pytest.raises(ConfigError, match=r"policy\.base_model"):
        base_path("no/such-model-anywhere")
    with pytest.raises(msgspec.ValidationError, match="learning_rate"):
        msgspec.convert({"base_model": "x", "learning_rate": 1}, Settings)


def test_adapter_of_another_rank_is_refused(tmp_path: Path) -> None:
    base = make_base(tmp_path / "base")
    small, large = (Model(settings(base, tmp_path, lora_rank=rank)) for rank in (2, 4))
    with pytest.raises(ConfigError, match=r"train\.lora_rank"):
        small.load(large.adapter())


def test_fingerprint_sees_weights_tokenizer_and_template(tmp_path: Path) -> None:
    base = make_base(tmp_path / "base")
    seen = {fingerprint(base)}
    (base / "chat_template.jinja").write_text("{{ messages }}")
    seen.add(fingerprint(base))
    (base / "tokenizer.json").write_bytes((base / "tokenizer.json").read_bytes() + b" ")
    seen.add(fingerprint(base))
    weights = bytearray((base / "model.safetensors").read_bytes())
    weights[-1] ^= 1
    (base / "model.safetensors").write_bytes(weights)
    seen.add(fingerprint(base))
    assert len(seen) == 4
    (base / "README.md").write_text("unrelated")
    assert fingerprint(base) in seen

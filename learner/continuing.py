"""Whether a version can be gone on from with these settings: the same base, the same LoRA."""

import json
from pathlib import Path

from capture.adapters import read_manifest
from capture.errors import ConfigError
from learner.model import Model
from learner.settings import Settings


def refuse_other(settings: Settings, model: Model, adapter: Path) -> None:
    """`ConfigError`: the adapter belongs to another base, or is scaled otherwise. `AdapterError`: it is gone.

    Another rank or other layers show in the shapes of its tensors (`Model.load`).
    """
    if read_manifest(adapter).fingerprint != model.fingerprint:
        raise ConfigError(
            f"policy.base_model: {adapter.name} was trained on another model than {settings.base_model} "
            "(weights, tokenizer or chat template differ)"
        )
    held = json.loads((adapter / "adapter_config.json").read_bytes())
    scale, wanted = held["lora_alpha"] / held["r"], settings.alpha / settings.lora_rank
    if scale != wanted:
        raise ConfigError(
            f"train.lora_alpha: {adapter.name} has {held['lora_alpha']:g} at rank {held['r']}; with another "
            "scale its weights would mean something else"
        )

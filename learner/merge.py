"""A version as a model of its own: the base's weights with the adapter's product added.

The sum is rounded once, to the weights' type. In half precision that may round a small adapter away; in
float32 the merged model says what base and adapter say. Tokenizer, chat template and generation settings are
copied.
"""

import json
import shutil
from pathlib import Path
from typing import Literal

import torch
from torch import nn
from transformers import AutoModelForCausalLM
from transformers.utils import logging

from capture.errors import Corrupt
from learner import files
from learner.model import base_path, fingerprint
from learner.publish import WEIGHTS

Dtype = Literal["auto", "float32", "bfloat16", "float16"]
PREFIX, DOWN, UP = "base_model.model.", ".lora_A.weight", ".lora_B.weight"  # of peft's names
BESIDE = (
    "tokenizer*",
    "vocab*",
    "merges.txt",
    "special_tokens_map.json",
    "added_tokens.json",
    "*.tiktoken",
    "chat_template*",
    "generation_config.json",
)


def merge(base_model: str, adapter: Path, out: Path, dtype: Dtype = "auto") -> str:
    """Write the merged model into the directory `out`; the fingerprint of what was written.

    `dtype` "auto" is the base's own. `ConfigError` without the base; `Corrupt` if a sum is not finite.
    """
    base = base_path(base_model)
    logging.disable_progress_bar()
    model = AutoModelForCausalLM.from_pretrained(base, dtype="auto", local_files_only=True)
    wanted = model.dtype if dtype == "auto" else getattr(torch, dtype)
    add(model, adapter, wanted)
    model.to(wanted).save_pretrained(out)
    for path in sorted({path for pattern in BESIDE for path in base.glob(pattern)}):
        shutil.copyfile(path, out / path.name)
    return fingerprint(out)


def add(model: nn.Module, adapter: Path, dtype: torch.dtype) -> None:
    """Add s B A to every layer's weights W, in float32; the sum is rounded to `dtype`.

    peft's own merge would round s B A before it is added.
    """
    config = json.loads((adapter / "adapter_config.json").read_bytes())
    tensors = files.read_tensors(adapter / WEIGHTS)
    for name in (name for name in tensors if name.endswith(DOWN)):
        layer = model.get_submodule(name.removeprefix(PREFIX).removesuffix(DOWN))
        product = tensors[name.removesuffix(DOWN) + UP].float() @ tensors[name].float()
        total = layer.weight.data.float() + config["lora_alpha"] / config["r"] * product
        if not total.isfinite().all():
            raise Corrupt(f"{adapter}: {name} is not finite")
        layer.weight.data = total.to(dtype)

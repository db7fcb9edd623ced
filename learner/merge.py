"""A version as a model of its own: the base's weights with the adapter's product added.

The sum is rounded to the weights' type. In half precision that may round a small adapter away; in float32 the
merged model says what base and adapter say. Tokenizer, chat template and generation settings are copied.
"""

import shutil
from pathlib import Path
from typing import Literal

import torch
from peft import PeftModel
from transformers import AutoModelForCausalLM
from transformers.utils import logging

from capture.errors import Corrupt
from learner.model import base_path, fingerprint

Dtype = Literal["auto", "float32", "bfloat16", "float16"]
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
    wanted = dtype if dtype == "auto" else getattr(torch, dtype)
    model = AutoModelForCausalLM.from_pretrained(base, dtype=wanted, local_files_only=True)
    try:
        merged = PeftModel.from_pretrained(model, str(adapter)).merge_and_unload(safe_merge=True)
    except ValueError as error:
        raise Corrupt(f"{adapter}: {error}") from error
    merged.save_pretrained(out)
    for path in sorted({path for pattern in BESIDE for path in base.glob(pattern)}):
        shutil.copyfile(path, out / path.name)
    return fingerprint(out)

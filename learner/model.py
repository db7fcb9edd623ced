"""The model under training: a frozen base and one LoRA adapter over it.

Adapters travel as `Tensors`: float32 on the CPU, under the names that peft writes and vLLM reads.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from hashlib import sha256
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import snapshot_download
from huggingface_hub.errors import LocalEntryNotFoundError
from peft import LoraConfig, get_peft_model
from torch import Tensor
from transformers import AutoModelForCausalLM
from transformers.utils import logging

from capture.errors import ConfigError
from learner import attention
from learner.batch import MicroBatch
from learner.logprobs import token_logprobs, token_scores
from learner.lora import replace_layers
from learner.settings import Settings

Tensors = dict[str, Tensor]
FINGERPRINTED = ("*.safetensors", "tokenizer.json", "tokenizer_config.json", "chat_template.jinja")
READ_BYTES = 1 << 20


def base_path(base_model: str) -> Path:
    """The directory of the base model; nothing is downloaded. `ConfigError` if there is none."""
    if (Path(base_model) / "config.json").is_file():
        return Path(base_model)
    try:
        return Path(snapshot_download(base_model, local_files_only=True))
    except (LocalEntryNotFoundError, ValueError) as error:
        raise ConfigError(f"policy.base_model: no model at {base_model!r}: {error}") from error


def fingerprint(base: Path) -> str:
    """SHA-256 over names and bytes of the weights, the tokenizer and the chat template."""
    digest = sha256()
    for pattern in FINGERPRINTED:
        for path in sorted(base.glob(pattern)):
            digest.update(f"{path.name}\0{path.stat().st_size}\0".encode())
            with path.open("rb") as file:
                while chunk := file.read(READ_BYTES):
                    digest.update(chunk)
    return digest.hexdigest()


class Model:
    """The base with its adapter. One thread; the adapter's weights are the only ones that train."""

    def __init__(self, settings: Settings) -> None:
        base = base_path(settings.base_model)
        self.fingerprint = fingerprint(base)
        self.device = torch.device(settings.device)
        self._rows = settings.logits_rows
        logging.disable_progress_bar()
        attention.register()
        loaded = AutoModelForCausalLM.from_pretrained(
            base, dtype=torch.float32, attn_implementation=attention.NAME, local_files_only=True
        )
        require_full_attention(loaded.config)
        torch.manual_seed(settings.seed)
        self._peft = get_peft_model(loaded, lora_config(settings)).to(self.device).eval()
        inner = self._peft.get_base_model()
        self._body = inner.get_decoder()
        self._head: Tensor = inner.get_output_embeddings().weight
        self.parameters: dict[str, torch.nn.Parameter] = {
            name.replace(".default.", "."): parameter
            for name, parameter in self._peft.named_parameters()
            if parameter.requires_grad
        }
        replace_layers(self._peft)

    @property
    def vocabulary(self) -> int:
        """Token ids are below this."""
        return int(self._head.shape[0])

    @property
    def positions(self) -> int:
        """Tokens that a sequence may have."""
        return int(self._peft.config.max_position_embeddings)

    def logprobs(self, micro: MicroBatch) -> Tensor:
        """log π of the M owned tokens [M], at each token's temperature; differentiable."""
        micro = micro.to(self.device)
        hidden = self._predicting(micro)
        unique = token_logprobs(hidden, self._head, micro.targets, micro.temperatures, self._rows)
        return unique.index_select(0, micro.expand)

    def scores(self, micro: MicroBatch) -> tuple[Tensor, Tensor]:
        """`logprobs`, and the entropies of the distributions that the M tokens come from [M]."""
        micro = micro.to(self.device)
        hidden = self._predicting(micro)
        unique = token_scores(hidden, self._head, micro.targets, micro.temperatures, self._rows)
        logprobs, entropies = unique.index_select(0, micro.expand).unbind(1)
        return logprobs, entropies

    def _predicting(self, micro: MicroBatch) -> Tensor:
        """The hidden rows that predict the U unique owned tokens: [U, d]."""
        hidden = self._body(
            input_ids=micro.token_ids[None],
            position_ids=micro.position_ids[None],
            use_cache=False,
            tree=micro.tree,
        ).last_hidden_state[0]  # [N, d]
        return hidden.index_select(0, micro.predictors)

    def adapter(self) -> Tensors:
        """A copy of the adapter's master weights."""
        return {name: p.detach().cpu().clone() for name, p in self.parameters.items()}

    def forget_gradients(self) -> None:
        """Free the gradients."""
        for parameter in self.parameters.values():
            parameter.grad = None

    def load(self, adapter: Tensors) -> None:
        """Replace the adapter's weights. `ConfigError` if it has another shape than the settings say."""
        shapes = {name: p.shape for name, p in self.parameters.items()}
        if {name: tensor.shape for name, tensor in adapter.items()} != shapes:
            raise ConfigError("train.lora_rank, train.targets: the stored adapter has another shape")
        with torch.no_grad():
            for name, parameter in self.parameters.items():
                parameter.copy_(adapter[name])

    @contextmanager
    def under(self, adapter: Tensors | None) -> Iterator[None]:
        """Without gradients, as if `adapter` were loaded; None: the bare base."""
        with torch.no_grad():
            masters = {name: parameter.data for name, parameter in self.parameters.items()}
            try:
                for name, parameter in self.parameters.items():
                    parameter.data = (
                        torch.zeros_like(parameter) if adapter is None else adapter[name].to(self.device)
                    )
                yield
            finally:
                for name, parameter in self.parameters.items():
                    parameter.data = masters[name]

    def peft_config(self) -> dict[str, Any]:
        """`adapter_config.json` of the adapter, as JSON values."""
        config = self._peft.peft_config["default"].to_dict()
        config["inference_mode"] = True
        return {key: sorted(value) if isinstance(value, set) else value for key, value in config.items()}


def lora_config(settings: Settings) -> LoraConfig:
    """LoRA without dropout, so that training scores tokens as the engine does."""
    return LoraConfig(
        task_type="CAUSAL_LM",
        r=settings.lora_rank,
        lora_alpha=settings.alpha,
        lora_dropout=0.0,
        target_modules=settings.targets,
    )


def require_full_attention(config: Any) -> None:
    """`ConfigError` for models whose layers see less than the whole path of a token."""
    kinds = set(getattr(config, "layer_types", None) or ["full_attention"])
    windowed = getattr(config, "use_sliding_window", True) and getattr(config, "sliding_window", None)
    if kinds != {"full_attention"} or windowed:
        raise ConfigError(f"policy.base_model: {config.model_type} has attention other than full")


def rounded(adapter: Tensors, dtype: str) -> Tensors:
    """The adapter as an engine holds it: rounded to `dtype`, in float32."""
    kind: torch.dtype = getattr(torch, dtype)
    return {name: tensor.to(kind).to(torch.float32) for name, tensor in adapter.items()}

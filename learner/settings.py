"""What can be set about training; composed into `hone.toml` by `hone.config`."""

from typing import Annotated, Literal

import msgspec

from capture.errors import ConfigError

Positive = Annotated[int, msgspec.Meta(ge=1)]
SinkName = Literal["tensorboard", "wandb", "trackio"]
NEVER_SERVED = {"lm_head", "embed_tokens", "wte"}  # vLLM has no LoRA for these


class Settings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Settings of the learner. Defaults are Hone's; times in seconds."""

    base_model: str  # directory, or the name of a model in the local Hugging Face cache
    adapter_dir: str = "runs/adapters"  # engines must see it under this path
    checkpoint_dir: str = "runs/checkpoints"
    steps_path: str | None = None  # JSONL with one line a committed batch; none if absent
    metrics_host: str = "127.0.0.1"  # where /metrics listens
    metrics_port: Annotated[int, msgspec.Meta(ge=0, le=65535)] | None = 8002  # absent: no /metrics
    sinks: list[SinkName] = []  # where else the numbers of each batch go; each needs the extra of its name
    sinks_project: str = "hone"  # the project's name there
    sinks_dir: str = "runs"  # where sinks write that write files
    device: str = "cpu"  # as torch names it
    threads: Positive = 1  # CPU threads for matrix products
    seed: int = 42  # of the adapter's initial weights

    lora_rank: Positive = 32
    lora_alpha: float | None = None  # absent: equal to lora_rank
    targets: Literal["all-linear"] | list[str] = "all-linear"  # which linear layers get LoRA
    dtype: Literal["float32", "bfloat16", "float16"] = "float32"  # the engine's LoRA dtype

    advantage: Literal["centred", "grpo", "leave_one_out"] = "centred"
    cispo_clip: Annotated[float, msgspec.Meta(gt=0)] = 5.0  # cap on the ratio learner/sampled
    kl_coef: Annotated[float, msgspec.Meta(ge=0)] = 0.0  # of the KL to version 0; above 0 costs a pass more
    lr: Annotated[float, msgspec.Meta(ge=0)] = 2e-5  # its peak
    lr_warmup_steps: Annotated[int, msgspec.Meta(ge=0)] = 0  # over which it rises to lr
    lr_schedule: Literal["constant", "linear"] = "constant"  # after them; linear: to zero at steps_max
    betas: tuple[float, float] = (0.9, 0.95)  # of AdamW
    weight_decay: Annotated[float, msgspec.Meta(ge=0)] = 0.0
    clip_grad: Annotated[float, msgspec.Meta(gt=0)] = 1.0  # norm over all LoRA weights
    passes: Positive = 1  # over each batch
    minibatches: Positive = 1  # optimizer steps a pass

    groups_per_batch: Positive = 8
    batch_wait_s: Annotated[float, msgspec.Meta(ge=0)] = 60.0  # after its first group: train on what is there
    staleness_max: Annotated[int, msgspec.Meta(ge=0)] = 4  # in lineage versions; past it a group drops
    steps_max: Positive | None = None  # stop after so many optimizer steps
    poll_s: Annotated[float, msgspec.Meta(gt=0)] = 0.1  # pause between looks for a batch

    micro_batch_tokens: Positive = 2048  # tokens of one forward pass; a longer sample goes alone
    logits_rows: Positive = 256  # rows of logits that exist at once

    save_every: Positive = 20  # steps between checkpoints that are kept for good
    keep_last: Positive = 2  # newest checkpoints kept besides, and the best one by evaluation
    disk_retry_s: Annotated[float, msgspec.Meta(gt=0)] = 10.0  # between attempts while the disk is full
    versions_kept: Positive = 8  # recent adapters in memory, for the mismatch
    mismatch_fraction: Annotated[float, msgspec.Meta(ge=0, le=1)] = (
        0.05  # of trained tokens that are compared
    )
    canary_tokens: Annotated[int, msgspec.Meta(ge=2)] = 256  # length of the sequence that proves an adapter
    lease_wait_s: Annotated[float, msgspec.Meta(ge=0)] = 30.0  # for another learner's lease to run out

    def __post_init__(self) -> None:
        """Raise `ConfigError` on what the types cannot say."""
        if self.targets != "all-linear" and NEVER_SERVED.intersection(self.targets):
            raise ConfigError("train.targets: vLLM serves no LoRA on embeddings or the output head")
        if self.lr_schedule == "linear" and self.steps_max is None:
            raise ConfigError("train.lr_schedule: linear falls to zero at train.steps_max, which is not set")
        if self.steps_max is not None and self.lr_warmup_steps >= self.steps_max:
            raise ConfigError("train.lr_warmup_steps: must be less than train.steps_max")

    @property
    def alpha(self) -> float:
        """LoRA's alpha: the weights' product is scaled by alpha / rank."""
        return float(self.lora_rank) if self.lora_alpha is None else self.lora_alpha

    @property
    def steps_per_batch(self) -> int:
        """Optimizer steps of a batch in which every minibatch has an advantage."""
        return self.passes * self.minibatches

    def lr_at(self, step: int) -> float:
        """The learning rate of the optimizer step that follows `step` steps of the lineage."""
        if step < self.lr_warmup_steps:
            return self.lr * (step + 1) / (self.lr_warmup_steps + 1)
        if self.lr_schedule == "constant" or self.steps_max is None:
            return self.lr
        return self.lr * max(0.0, (self.steps_max - step) / (self.steps_max - self.lr_warmup_steps))

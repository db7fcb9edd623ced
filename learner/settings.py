"""What can be set about training; composed into `hone.toml` by `hone.config`."""

import math
from typing import Annotated, Literal

import msgspec

from capture.errors import ConfigError
from capture.types import GroupFilter

Positive = Annotated[int, msgspec.Meta(ge=1)]
Share = Annotated[float, msgspec.Meta(ge=0, le=1)]
NotNegative = Annotated[float, msgspec.Meta(ge=0)]
Loss = Literal["cispo", "ppo", "gspo", "dppo", "importance"]
Aggregation = Literal["token_mean", "sequence_mean", "constant"]
KlForm = Literal["advantage", "k2", "r_k3"]
CLIP_RANGES = {"ppo": (0.2, 0.2), "gspo": (3e-4, 4e-4), "dppo": (0.2, 0.2)}  # low and high of each loss
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

    advantage: Literal["centred", "grpo", "leave_one_out", "maxrl"] = "centred"
    advantage_std: Literal["sample", "population", "batch"] = "sample"  # what "grpo" divides by
    loss: Loss = "cispo"
    cispo_clip: Annotated[float, msgspec.Meta(gt=0)] = 5.0  # cap on the ratio learner/sampled
    clip_low: Share | None = None  # how far below 1 the ratio counts (dppo: of π); absent: the loss's own
    clip_high: NotNegative | None = None  # how far above
    dual_clip: Annotated[float, msgspec.Meta(gt=1)] | None = None  # ppo: cap on the ratio where A < 0
    aggregation: Aggregation = "token_mean"  # how the losses of tokens become one number
    aggregation_tokens: Positive = 2048  # "constant": tokens of a rollout that weighs one
    kl_coef: NotNegative = 0.0  # of the KL to the reference; above 0 costs a forward pass more
    kl_form: KlForm = "advantage"  # where the KL stands: in the advantage, or as a loss of its own
    ref_refresh_steps: Positive | None = None  # so often the reference becomes the policy; absent: version 0
    entropy_coef: NotNegative = 0.0  # of the entropy bonus
    engine_correction: Literal["none", "truncated", "masked"] = "none"  # a weight for learner/engine apart
    engine_correction_max: Annotated[float, msgspec.Meta(gt=0)] = 2.0  # what that weight is truncated to,
    engine_correction_min: NotNegative = 0.0  # or past which it is 0 (masked)
    overlong_filter: bool = False  # drop rollouts whose reply or context was cut off; their reward compares
    zero_variance_filter: bool = False  # drop groups whose rewards are equal, and wait for others
    group_reward_min: float | None = None  # drop groups whose mean reward is lower: too hard
    group_reward_max: float | None = None  # drop groups whose mean reward is higher: too easy
    lr: Annotated[float, msgspec.Meta(ge=0)] = 2e-5  # its peak
    lr_warmup_steps: Annotated[int, msgspec.Meta(ge=0)] = 0  # over which it rises to lr
    lr_schedule: Literal["constant", "linear", "cosine"] = "constant"  # after them; to zero at steps_max
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
        if self.lr_schedule != "constant" and self.steps_max is None:
            raise ConfigError(
                f"train.lr_schedule: {self.lr_schedule} falls to zero at train.steps_max, which is not set"
            )
        if self.steps_max is not None and self.lr_warmup_steps >= self.steps_max:
            raise ConfigError("train.lr_warmup_steps: must be less than train.steps_max")
        if self.engine_correction_min >= self.engine_correction_max:
            raise ConfigError("train.engine_correction_min: must be less than train.engine_correction_max")
        if self.ref_refresh_steps is not None and not self.kl_coef:
            raise ConfigError("train.ref_refresh_steps: there is no reference while train.kl_coef is 0")
        least, most = self.group_reward_min, self.group_reward_max
        if least is not None and most is not None and least >= most:
            raise ConfigError("train.group_reward_min: must be less than train.group_reward_max")

    @property
    def alpha(self) -> float:
        """LoRA's alpha: the weights' product is scaled by alpha / rank."""
        return float(self.lora_rank) if self.lora_alpha is None else self.lora_alpha

    @property
    def steps_per_batch(self) -> int:
        """Optimizer steps of a batch in which every minibatch has an advantage."""
        return self.passes * self.minibatches

    @property
    def unless(self) -> GroupFilter:
        """The groups that are not to be trained."""
        return GroupFilter(
            zero_variance=self.zero_variance_filter,
            mean_min=self.group_reward_min,
            mean_max=self.group_reward_max,
        )

    @property
    def clip_range(self) -> tuple[float, float]:
        """How far below and above the loss lets the ratio count."""
        low, high = CLIP_RANGES.get(self.loss, (0.0, 0.0))
        chosen = self.clip_low, self.clip_high
        return low if chosen[0] is None else chosen[0], high if chosen[1] is None else chosen[1]

    def lr_at(self, step: int) -> float:
        """The learning rate of the optimizer step that follows `step` steps of the lineage."""
        if step < self.lr_warmup_steps:
            return self.lr * (step + 1) / (self.lr_warmup_steps + 1)
        if self.lr_schedule == "constant" or self.steps_max is None:
            return self.lr
        left = max(0.0, (self.steps_max - step) / (self.steps_max - self.lr_warmup_steps))
        return self.lr * (left if self.lr_schedule == "linear" else (1 - math.cos(math.pi * left)) / 2)

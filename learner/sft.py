"""Supervised fine-tuning of the adapter: the mean negative log-likelihood of what is to be imitated.

The model, packing, shared prefixes and chunked logprobs are those of training by rewards. A step's loss is
-1/N Σ log π over its N tokens with loss, at temperature 1; AdamW, the learning rate falls to zero over the
steps. The adapter is written as a version is: a peft directory, its manifest last.
"""

import math
import time
from collections.abc import Callable, Iterable, Sequence
from hashlib import sha256
from pathlib import Path
from typing import Annotated

import msgspec
import torch

from capture.adapters import MANIFEST, Manifest
from capture.errors import ConfigError, Conflict, NotFound
from learner import canary, files
from learner.batch import Scored, micro_batches
from learner.lessons import Lesson, batches, hold_out, owned_tokens
from learner.model import Model, rounded
from learner.publish import WEIGHTS
from learner.settings import Positive, Settings
from learner.update import Abandoned, NonFinite

REPORT = "sft.json"
LINEAGE = "sft"
TOO_LONG = "too_long"
OTHER_VOCABULARY = "other_vocabulary"
LEFT_OUT = {
    TOO_LONG: "the base model has fewer positions",
    OTHER_VOCABULARY: "the base model does not have some of its token ids",
}


class SftSettings(msgspec.Struct, frozen=True, kw_only=True):
    """What can be said of one fine-tuning."""

    epochs: Positive = 2
    lr: Annotated[float, msgspec.Meta(gt=0)] = 2e-4  # of the first step; falls to zero over all
    batch_tokens: Positive = 16384  # of a step, context included
    seed: int = 42  # of the order and of what is held out
    held_out: Annotated[float, msgspec.Meta(ge=0, lt=1)] = (
        0.05  # share of the lessons, whole scenarios at a time
    )


class Progress(msgspec.Struct, frozen=True, kw_only=True):
    """After one step."""

    step: int
    epochs: float  # that are done
    loss: float | None  # of the step; None before the first
    held_out: float | None  # loss on what is held out, where it was measured now


class Report(msgspec.Struct, frozen=True, kw_only=True):
    """What was done; it stands beside the adapter."""

    out: str
    base_model: str
    settings: SftSettings
    steps: int
    samples: int  # that trained
    tokens: int  # of them with loss
    losses: list[float]  # mean over the tokens of each epoch, as they were met
    held_out_samples: int
    held_out_losses: list[float]  # before the first epoch, then after each
    left_out: dict[str, int]
    seconds: float


def run(
    settings: Settings,
    sft: SftSettings,
    policy: str,
    lessons: Iterable[Lesson],
    out: Path,
    should_stop: Callable[[], bool],
    tell: Callable[[Progress], None],
) -> Report:
    """Train a fresh adapter on the lessons and write it to the directory `out`, whole or not at all.

    `Conflict` if `out` is there; `NotFound` without lessons; `Abandoned` when told to stop.
    """
    refuse_existing(out)
    began = time.monotonic()
    found = list(lessons)
    if not found:
        raise NotFound("there is nothing to learn from")
    torch.set_num_threads(settings.threads)
    model = Model(settings)
    fit, left_out = fitting(model, found)
    training, held_out = hold_out(fit, sft.held_out, sft.seed)
    course = Course(settings, sft, model, training, held_out, should_stop, tell)
    course.run()
    report = Report(
        out=str(out),
        base_model=settings.base_model,
        settings=sft,
        steps=course.step,
        samples=len(training),
        tokens=owned_tokens(training),
        losses=course.losses,
        held_out_samples=len(held_out),
        held_out_losses=course.held_out_losses,
        left_out=left_out,
        seconds=time.monotonic() - began,
    )
    write(settings, model, policy, held_out or training, report, out)
    return report


def refuse_existing(out: Path) -> None:
    """`Conflict` if there is something at `out`."""
    if out.exists():
        raise Conflict(f"{out} is there already; an adapter is never written over another")


def fitting(model: Model, lessons: Sequence[Lesson]) -> tuple[list[Lesson], dict[str, int]]:
    """The lessons that the model can read, and how many it cannot, by reason; `ConfigError` if none."""
    left_out: dict[str, int] = {}
    fit = []
    for one in lessons:
        reason = TOO_LONG if len(one) > model.positions else None
        if reason is None and max(one.sample().token_ids) >= model.vocabulary:
            reason = OTHER_VOCABULARY
        if reason is None:
            fit.append(one)
        else:
            left_out[reason] = left_out.get(reason, 0) + 1
    if not fit:
        why = "; ".join(f"{count} {reason} ({LEFT_OUT[reason]})" for reason, count in left_out.items())
        raise ConfigError(f"policy.base_model can read none of {len(lessons)} lessons: {why}")
    return fit, left_out


class Course:
    """All epochs over the lessons."""

    def __init__(
        self,
        settings: Settings,
        sft: SftSettings,
        model: Model,
        training: Sequence[Lesson],
        held_out: Sequence[Lesson],
        should_stop: Callable[[], bool],
        tell: Callable[[Progress], None],
    ) -> None:
        self._settings, self._sft, self._model = settings, sft, model
        self._training, self._held_out = training, held_out
        self._should_stop, self._tell = should_stop, tell
        self._optimizer = torch.optim.AdamW(
            model.parameters.values(), lr=sft.lr, betas=settings.betas, weight_decay=settings.weight_decay
        )
        self._epochs = 0.0  # that are done
        self.step = 0
        self.losses: list[float] = []
        self.held_out_losses: list[float] = []

    def run(self) -> None:
        """`NonFinite`: a loss or gradient is not finite; `Abandoned`: told to stop."""
        self._tell_of(None, self._measure())
        for epoch in range(self._sft.epochs):
            plan = batches(self._training, self._sft.batch_tokens, epoch=epoch, seed=self._sft.seed)
            total = 0.0
            for number, indexes in enumerate(plan, 1):
                part = [self._training[index] for index in indexes]
                loss = self._update(part)
                total += loss * owned_tokens(part)
                self._epochs = epoch + number / len(plan)
                self._tell_of(loss, self._measure() if number == len(plan) else None)
            self.losses.append(total / owned_tokens(self._training))

    def _update(self, part: Sequence[Lesson]) -> float:
        """One step; its loss."""
        for group in self._optimizer.param_groups:
            group["lr"] = self._sft.lr * (1 - self._epochs / self._sft.epochs)
        self._optimizer.zero_grad(set_to_none=True)
        loss = backward(self._model, part, self._settings.micro_batch_tokens, self._should_stop)
        parameters = self._model.parameters.values()
        norm = float(torch.nn.utils.clip_grad_norm_(parameters, self._settings.clip_grad))
        if not (math.isfinite(loss) and math.isfinite(norm)):
            raise NonFinite(f"step {self.step + 1}: loss {loss}, gradient norm {norm}; a lower --lr may help")
        self._optimizer.step()
        self.step += 1
        return loss

    def _measure(self) -> float | None:
        """The loss on what is held out, if anything is."""
        if not self._held_out:
            return None
        tokens_max = self._settings.micro_batch_tokens
        self.held_out_losses.append(mean_loss(self._model, self._held_out, tokens_max, self._should_stop))
        return self.held_out_losses[-1]

    def _tell_of(self, loss: float | None, held_out: float | None) -> None:
        self._tell(Progress(step=self.step, epochs=self._epochs, loss=loss, held_out=held_out))


def backward(
    model: Model, lessons: Sequence[Lesson], tokens_max: int, should_stop: Callable[[], bool]
) -> float:
    """Add the gradient of the mean negative log-likelihood to the adapter's; the loss."""
    count = owned_tokens(lessons)
    total = 0.0
    for micro in micro_batches([Scored(one.sample(), 1.0) for one in lessons], tokens_max):
        if should_stop():
            raise Abandoned("told to stop; nothing was written")
        loss = -model.logprobs(micro).sum() / count
        loss.backward()
        total += float(loss.detach())
    return total


def mean_loss(
    model: Model, lessons: Sequence[Lesson], tokens_max: int, should_stop: Callable[[], bool]
) -> float:
    """The mean negative log-likelihood, without gradients."""
    total = 0.0
    with torch.no_grad():
        for micro in micro_batches([Scored(one.sample(), 1.0) for one in lessons], tokens_max):
            if should_stop():
                raise Abandoned("told to stop; nothing was written")
            total -= float(model.logprobs(micro).sum())
    return total / owned_tokens(lessons)


def write(
    settings: Settings, model: Model, policy: str, shown: Sequence[Lesson], report: Report, out: Path
) -> None:
    """The adapter's directory; the canary of its manifest is one of `shown`."""
    adapter = rounded(model.adapter(), settings.dtype)
    samples = [one.sample() for one in shown[: canary.CANDIDATES]]
    proof = canary.choose(model, samples, adapter, None, settings.canary_tokens)
    path = files.temporary(out)
    content = files.write_tensors(path / WEIGHTS, adapter, {"format": "pt"})
    files.write_json(path / "adapter_config.json", model.peft_config())
    files.write_json(path / REPORT, msgspec.to_builtins(report))
    manifest = Manifest(
        policy=policy,
        version=0,
        parent=None,
        lineage=LINEAGE,
        step=report.steps,
        sha256=sha256(content).hexdigest(),
        fingerprint=model.fingerprint,
        dtype=settings.dtype,
        lora_rank=settings.lora_rank,
        canary_ids=proof.ids,
        canary_logprobs=proof.logprobs,
        parent_logprobs=proof.parent_logprobs,
        base_logprobs=proof.base_logprobs,
        created_at=time.time(),
    )
    files.write_json(path / MANIFEST, msgspec.to_builtins(manifest))
    files.rename(path, out)

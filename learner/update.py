"""The optimizer steps of one batch: micro-batches, loss, gradients, AdamW."""

import math
from collections.abc import Callable, Sequence
from functools import partial

import torch

from capture.errors import HoneError
from learner.batch import micro_batches
from learner.groups import Member
from learner.minibatch import Minibatch, split
from learner.model import Model, Tensors
from learner.objective import objective
from learner.settings import Settings
from learner.sums import Sums


class NonFinite(HoneError):
    """Loss or gradient of a step is not finite; the step was not made."""


class Abandoned(HoneError):
    """The learner was told to stop within a batch; nothing of it was committed."""


def update(
    settings: Settings,
    model: Model,
    optimizer: torch.optim.Optimizer,
    groups: Sequence[Sequence[Member]],
    should_stop: Callable[[], bool],
    done: int,
    reference: Tensors | None = None,
) -> Sums:
    """All passes and minibatches of one batch. A minibatch in which nothing has an advantage is no step.

    `done` steps of the lineage came before; the learning rate follows from them alone. `reference` is the
    adapter that a KL penalty pulls to; None: the bare base, which is version 0.
    """
    sums = Sums()
    start = model.adapter() if settings.engine_correction != "none" else None
    minibatches = [
        Minibatch(settings, model, members, reference, start)
        for members in split(groups, settings.minibatches)
    ]
    for _ in range(settings.passes):
        for minibatch in minibatches:
            for group in optimizer.param_groups:
                group["lr"] = settings.lr_at(done + sums.steps)
            step(settings, model, optimizer, minibatch, should_stop, sums)
    return sums


def step(
    settings: Settings,
    model: Model,
    optimizer: torch.optim.Optimizer,
    minibatch: Minibatch,
    should_stop: Callable[[], bool],
    sums: Sums,
) -> None:
    """One optimizer step over a minibatch. `NonFinite`, `Abandoned`: this step moved no weight."""
    if not minibatch.scored:
        return
    optimizer.zero_grad(set_to_none=True)
    loss = backward(settings, model, minibatch, should_stop, sums)
    norm = float(torch.nn.utils.clip_grad_norm_(model.parameters.values(), settings.clip_grad))
    if not (math.isfinite(loss) and math.isfinite(norm)):
        raise NonFinite(f"loss {loss}, gradient norm {norm}")
    optimizer.step()
    sums.steps += 1
    sums.loss += loss
    sums.grad_norm += norm
    sums.lr += optimizer.param_groups[0]["lr"]


def backward(
    settings: Settings, model: Model, minibatch: Minibatch, should_stop: Callable[[], bool], sums: Sums
) -> float:
    """Add the gradient of the minibatch's loss to the adapter's; the loss."""
    total = 0.0
    whole = minibatch.whole(partial(proceed, should_stop)) if settings.loss == "gspo" else None
    for index, micro in enumerate(micro_batches(minibatch.scored, settings.micro_batch_tokens)):
        proceed(should_stop)
        known = minibatch.known(index, micro, moved=sums.steps > 0)
        entropies = None
        if settings.entropy_coef:
            logprobs, entropies = model.scores(micro)
        else:
            logprobs = model.logprobs(micro)
        known = minibatch.scored_as(known, index, micro, logprobs, whole)
        found = objective(settings, logprobs, known, entropies)
        found.loss.backward()
        total += float(found.loss.detach())
        sums.add(logprobs, known, found)
    sums.sample_tokens += sum(len(one.sample.token_ids) for one in minibatch.scored)
    return total


def proceed(should_stop: Callable[[], bool]) -> None:
    """`Abandoned` if the learner was told to stop."""
    if should_stop():
        raise Abandoned("told to stop in the middle of a step")

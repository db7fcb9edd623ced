"""Logprobs of chosen tokens, and entropies, from hidden rows, without ever holding the whole logits."""

from collections.abc import Callable

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint


def chunk_logprobs(hidden: Tensor, head: Tensor, targets: Tensor, temperatures: Tensor) -> Tensor:
    """log softmax(hidden headᵀ / T)[target] for each row: [R, d], [V, d], [R], [R] -> [R]."""
    logits = hidden @ head.T
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32)) / temperatures[:, None]
    chosen = logits.gather(1, targets[:, None]).squeeze(1)
    return chosen - logits.logsumexp(1)


def chunk_scores(hidden: Tensor, head: Tensor, targets: Tensor, temperatures: Tensor) -> Tensor:
    """The same logprobs and the entropies of the same softmaxes, in nats: -> [R, 2]."""
    logits = hidden @ head.T
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32)) / temperatures[:, None]
    chosen = logits.gather(1, targets[:, None]).squeeze(1)
    total = logits.logsumexp(1)
    expected = (logits.softmax(1) * logits).sum(1)
    return torch.stack([chosen - total, total - expected], 1)


def token_logprobs(hidden: Tensor, head: Tensor, targets: Tensor, temperatures: Tensor, rows: int) -> Tensor:
    """`chunk_logprobs` in chunks of `rows`; at most [rows, V] logits exist at any moment.

    The backward pass computes each chunk's logits again instead of keeping them.
    """
    return _in_chunks(chunk_logprobs, hidden, head, targets, temperatures, rows)


def token_scores(hidden: Tensor, head: Tensor, targets: Tensor, temperatures: Tensor, rows: int) -> Tensor:
    """`chunk_scores` in the same way: -> [R, 2]."""
    return _in_chunks(chunk_scores, hidden, head, targets, temperatures, rows)


def _in_chunks(
    function: Callable[[Tensor, Tensor, Tensor, Tensor], Tensor],
    hidden: Tensor,
    head: Tensor,
    targets: Tensor,
    temperatures: Tensor,
    rows: int,
) -> Tensor:
    parts = []
    for start in range(0, len(targets), rows):
        chunk = slice(start, start + rows)
        inputs = (hidden[chunk], head, targets[chunk], temperatures[chunk])
        if torch.is_grad_enabled():
            parts.append(checkpoint(function, *inputs, use_reentrant=False))
        else:
            parts.append(function(*inputs))
    return torch.cat(parts)

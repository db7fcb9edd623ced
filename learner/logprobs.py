"""Logprobs of chosen tokens from hidden rows, without ever holding the whole logits."""

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint


def chunk_logprobs(hidden: Tensor, head: Tensor, targets: Tensor, temperatures: Tensor) -> Tensor:
    """log softmax(hidden headᵀ / T)[target] for each row: [R, d], [V, d], [R], [R] -> [R]."""
    logits = hidden @ head.T
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32)) / temperatures[:, None]
    chosen = logits.gather(1, targets[:, None]).squeeze(1)
    return chosen - logits.logsumexp(1)


def token_logprobs(hidden: Tensor, head: Tensor, targets: Tensor, temperatures: Tensor, rows: int) -> Tensor:
    """`chunk_logprobs` in chunks of `rows`; at most [rows, V] logits exist at any moment.

    The backward pass computes each chunk's logits again instead of keeping them.
    """
    parts = []
    for start in range(0, len(targets), rows):
        chunk = slice(start, start + rows)
        inputs = (hidden[chunk], head, targets[chunk], temperatures[chunk])
        if torch.is_grad_enabled():
            parts.append(checkpoint(chunk_logprobs, *inputs, use_reentrant=False))
        else:
            parts.append(chunk_logprobs(*inputs))
    return torch.cat(parts)

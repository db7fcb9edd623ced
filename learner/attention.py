"""Attention over a prefix tree of token sequences, for any decoder that transformers can load.

Every linear layer runs once a tree node; attention gathers, for each sequence, the keys of its
whole path and the queries of the nodes that it was the first to bring. No product is computed twice
but those inside a path, nothing is padded outside attention, and padding inside it is masked.
"""

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface

NAME = "hone_tree"  # as `attn_implementation` of a transformers model


@dataclass(frozen=True)
class Block:
    """Sequences of similar size that attend in one call."""

    queries: Tensor  # [B, Q] nodes; padded with node 0
    keys: Tensor  # [B, K] nodes of the path from the root; padded with node 0
    visible: Tensor  # [B, 1, Q, K] bool: the key is the query's node or an ancestor of it

    def to(self, device: torch.device) -> "Block":
        """The same block on `device`."""
        return Block(self.queries.to(device), self.keys.to(device), self.visible.to(device))


@dataclass(frozen=True)
class Tree:
    """Who attends to whom among the N nodes of one micro-batch."""

    blocks: list[Block]
    place: Tensor  # [N] row of each node in the blocks' outputs laid end to end

    def to(self, device: torch.device) -> "Tree":
        """The same tree on `device`."""
        return Tree([block.to(device) for block in self.blocks], self.place.to(device))


def attend(query: Tensor, key: Tensor, value: Tensor, tree: Tree, scaling: float) -> Tensor:
    """softmax(scaling q·k) v along each node's path.

    `query` [N, H, D], `key` and `value` [N, H_kv, D] -> [N, H, D].
    """
    outputs = []
    for block in tree.blocks:
        out = F.scaled_dot_product_attention(
            rows(query, block.queries),
            rows(key, block.keys),
            rows(value, block.keys),
            attn_mask=block.visible,
            scale=scaling,
            enable_gqa=key.shape[1] != query.shape[1],
        )
        outputs.append(out.transpose(1, 2).flatten(0, 1))  # [B * Q, H, D]
    return torch.cat(outputs).index_select(0, tree.place)


def rows(x: Tensor, nodes: Tensor) -> Tensor:
    """`x` [N, H, D] gathered at `nodes` [B, L] -> [B, H, L, D]."""
    gathered = x.flatten(1).index_select(0, nodes.flatten())
    return gathered.view(*nodes.shape, *x.shape[1:]).transpose(1, 2)


def tree_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float,
    tree: Tree,
    **unused: Any,
) -> tuple[Tensor, None]:
    """`attend` with the signature that transformers calls: query [1, H, N, D] -> [1, N, H, D]."""
    q, k, v = (x.squeeze(0).transpose(0, 1) for x in (query, key, value))
    return attend(q, k, v, tree, scaling).unsqueeze(0), None


def no_mask(*unused: Any, **unused_named: Any) -> None:
    """The tree says what is visible; transformers must not build a mask of its own."""


def register() -> None:
    """Make `NAME` known to transformers; idempotent."""
    AttentionInterface.register(NAME, tree_attention)
    AttentionMaskInterface.register(NAME, no_mask)

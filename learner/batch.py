"""Samples into micro-batches: prefix trees of tokens, without padding.

Samples are sorted by their tokens, so that shared prefixes lie side by side, and each contributes
only the tokens that its predecessor does not share. A micro-batch is thus one row of nodes; every
node knows its position and its path. Pure, and independent of the order of the samples.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from capture.types import Sample
from learner.attention import Block, Tree

Ints = npt.NDArray[np.int64]
BLOCK_SEQUENCES = 16  # sequences that attend in one call: more waste padding, fewer cost calls


@dataclass(frozen=True)
class Scored:
    """A sample, and what each of its owned tokens carries into the loss (d: `learner.aggregate`)."""

    sample: Sample
    weight: float  # advantage / d
    penalty: float = 0.0  # coefficient of the KL / d
    bonus: float = 0.0  # coefficient of the entropy / d
    rollout: int = 0  # which one of the step's rollouts it belongs to


@dataclass(frozen=True)
class MicroBatch:
    """One forward pass over N nodes in which M owned tokens are scored.

    Owned tokens that are the same node at the same temperature have the same logprob: it is
    computed once, for U <= M unique ones, and `expand` brings it back to the M tokens.
    """

    token_ids: Tensor  # [N]
    position_ids: Tensor  # [N]
    tree: Tree
    predictors: Tensor  # [U] the node whose hidden row predicts the token
    targets: Tensor  # [U] token id
    temperatures: Tensor  # [U]
    expand: Tensor  # [M] into U
    sampled_logprobs: Tensor  # [M]
    weights: Tensor  # [M] advantage / d
    penalties: Tensor  # [M] coefficient of the KL / d
    bonuses: Tensor  # [M] coefficient of the entropy / d
    rollouts: Tensor  # [M] which one of the step's rollouts the token belongs to
    versions: Tensor  # [M] the policy version that sampled the token

    def to(self, device: torch.device) -> "MicroBatch":
        """The same micro-batch on `device`."""
        moved = {name: getattr(self, name).to(device) for name in self.__dataclass_fields__}
        return MicroBatch(**moved)


def micro_batches(scored: Sequence[Scored], tokens_max: int) -> Iterator[MicroBatch]:
    """Split into micro-batches of at most `tokens_max` nodes (one longer sample goes alone).

    Tokens past a sample's last owned one score nothing and are left out.
    """
    return (pack(*part) for part in split(scored, tokens_max))


def split(scored: Sequence[Scored], tokens_max: int) -> Iterator[tuple[list[Scored], list[int]]]:
    """What `pack` takes for each micro-batch."""
    ordered = sorted((trimmed(one) for one in scored), key=lambda one: one.sample.token_ids)
    pending: list[Scored] = []
    shared: list[int] = []
    size = 0
    for one in ordered:
        fresh = len(one.sample.token_ids)
        if pending:
            common = prefix_length(pending[-1].sample.token_ids, one.sample.token_ids)
            if size + fresh - common > tokens_max:
                yield pending, shared
                pending, shared, size, common = [], [], 0, 0
        else:
            common = 0
        pending.append(one)
        shared.append(common)
        size += fresh - common
    if pending:
        yield pending, shared


def trimmed(one: Scored) -> Scored:
    """Without the tokens after the last owned one."""
    sample = one.sample
    mask = sample.loss_mask
    end = len(mask) - mask[::-1].index(True)
    if end == len(mask):
        return one
    short = Sample(
        rollout_id=sample.rollout_id,
        token_ids=sample.token_ids[:end],
        loss_mask=mask[:end],
        sampled_logprobs=sample.sampled_logprobs[:end],
        spans=sample.spans,
    )
    return replace(one, sample=short)


def prefix_length(a: Sequence[int], b: Sequence[int]) -> int:
    """How many leading tokens `a` and `b` share."""
    for index, (x, y) in enumerate(zip(a, b, strict=False)):
        if x != y:
            return index
    return min(len(a), len(b))


def pack(scored: Sequence[Scored], shared: Sequence[int]) -> MicroBatch:
    """One micro-batch of sorted samples; `shared[i]`: prefix that sample i shares with i - 1."""
    paths: list[Ints] = []
    tokens: list[Ints] = []
    positions: list[Ints] = []
    size = 0
    for one, common in zip(scored, shared, strict=True):
        ids = np.asarray(one.sample.token_ids, np.int64)
        fresh = np.arange(size, size + len(ids) - common)
        paths.append(np.concatenate([paths[-1][:common], fresh]) if common else fresh)
        tokens.append(ids[common:])
        positions.append(np.arange(common, len(ids)))
        size += len(fresh)
    token_ids = np.concatenate(tokens)
    predictors, targets, temperatures, expand, owned = score_places(scored, paths, token_ids)
    return MicroBatch(
        token_ids=torch.from_numpy(token_ids),
        position_ids=torch.from_numpy(np.concatenate(positions)),
        tree=tree(paths, shared),
        predictors=predictors,
        targets=targets,
        temperatures=temperatures,
        expand=expand,
        **owned,
    )


def score_places(
    scored: Sequence[Scored], paths: Sequence[Ints], token_ids: Ints
) -> tuple[Tensor, Tensor, Tensor, Tensor, dict[str, Tensor]]:
    """The U unique places to score, the map of the M owned tokens to them, and what M carry."""
    nodes, parents, temperatures, logprobs, versions = [], [], [], [], []
    for one, path in zip(scored, paths, strict=True):
        owned = np.flatnonzero(one.sample.loss_mask)
        temperature = np.ones(len(path))
        version = np.zeros(len(path), np.int64)
        for span in one.sample.spans:
            temperature[span.start : span.end] = span.temperature
            version[span.start : span.end] = span.policy_version
        nodes.append(path[owned])
        parents.append(path[owned - 1])  # the first token of a sample is prompt: never owned
        temperatures.append(temperature[owned])
        versions.append(version[owned])
        logprobs.append(np.asarray(one.sample.sampled_logprobs, np.float64)[owned])
    node, temperature = np.concatenate(nodes), np.concatenate(temperatures)
    keys = np.rec.fromarrays([node, temperature])
    _, first, expand = np.unique(keys, return_index=True, return_inverse=True)
    counts = [len(part) for part in nodes]
    owned_tensors = {
        "sampled_logprobs": torch.from_numpy(np.concatenate(logprobs)).float(),
        "weights": torch.from_numpy(np.repeat([one.weight for one in scored], counts)).float(),
        "penalties": torch.from_numpy(np.repeat([one.penalty for one in scored], counts)).float(),
        "bonuses": torch.from_numpy(np.repeat([one.bonus for one in scored], counts)).float(),
        "rollouts": torch.from_numpy(np.repeat([one.rollout for one in scored], counts)),
        "versions": torch.from_numpy(np.concatenate(versions)),
    }
    return (
        torch.from_numpy(np.concatenate(parents)[first]),
        torch.from_numpy(token_ids[node[first]]),
        torch.from_numpy(temperature[first]).float(),
        torch.from_numpy(expand),
        owned_tensors,
    )


def tree(paths: Sequence[Ints], shared: Sequence[int]) -> Tree:
    """Blocks of sequences that bring about equally many nodes, and where each node comes out."""
    order = sorted(range(len(paths)), key=lambda i: len(paths[i]) - shared[i])
    order = [i for i in order if len(paths[i]) > shared[i]]  # a repeated sample brings no node
    place = np.empty(sum(len(path) - common for path, common in zip(paths, shared, strict=True)), np.int64)
    blocks = []
    base = 0
    for start in range(0, len(order), BLOCK_SEQUENCES):
        members = order[start : start + BLOCK_SEQUENCES]
        width = max(len(paths[i]) - shared[i] for i in members)
        for row, i in enumerate(members):
            fresh = paths[i][shared[i] :]
            place[fresh] = base + row * width + np.arange(len(fresh))
        blocks.append(block([paths[i] for i in members], [shared[i] for i in members], width))
        base += len(members) * width
    return Tree(blocks, torch.from_numpy(place))


def block(paths: Sequence[Ints], shared: Sequence[int], width: int) -> Block:
    """The block of these sequences, `width` queries each.

    A padded query sees key 0 alone, so that no softmax is over nothing; its row is never read.
    """
    depth = max(len(path) for path in paths)
    queries = np.zeros((len(paths), width), np.int64)
    keys = np.zeros((len(paths), depth), np.int64)
    positions = np.zeros((len(paths), width), np.int64)
    for row, (path, common) in enumerate(zip(paths, shared, strict=True)):
        queries[row, : len(path) - common] = path[common:]
        keys[row, : len(path)] = path
        positions[row, : len(path) - common] = np.arange(common, len(path))
    visible = np.arange(depth) <= positions[:, None, :, None]
    return Block(torch.from_numpy(queries), torch.from_numpy(keys), torch.from_numpy(visible))

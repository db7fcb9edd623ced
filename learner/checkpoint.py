"""Checkpoints: everything that the next batch depends on, in one directory.

``<checkpoint_dir>/<lineage>-<step>-<epoch>/`` with ``adapter.safetensors`` (float32 masters),
``optimizer.safetensors`` (AdamW's moments and the RNG), ``state.json``, and ``reference.safetensors`` where
the KL's reference is no longer version 0. The epoch of the learner's lease is in the name, so that a learner
which lost its lease never writes where its successor does.
A directory that the store does not name is an orphan.
"""

import json
import shutil
from collections.abc import Collection
from pathlib import Path

import msgspec
import torch
from torch import Tensor

from capture.errors import Corrupt
from learner import files
from learner.canary import Canary
from learner.model import Tensors

REFERENCE = "reference.safetensors"
RNG = "rng"  # key of the RNG's bytes among the optimizer's tensors


class State(msgspec.Struct, frozen=True, kw_only=True):
    """What a checkpoint says in JSON."""

    lineage: str
    step: int
    batch_id: str
    rollout_ids: list[str]  # whose tokens the batch settled
    canary: Canary | None = None  # of the version that it commits; None before the first step


class Checkpoint(msgspec.Struct, frozen=True, kw_only=True):
    """A checkpoint in memory."""

    adapter: Tensors
    optimizer: Tensors  # `<parameter>.<AdamW's name of it>`
    rng: Tensor  # torch's CPU generator, uint8
    state: State
    reference: Tensors | None = None  # of the KL penalty; None: version 0


def name(lineage: str, step: int, epoch: int) -> str:
    """The directory's name; sorts by step within a lineage."""
    return f"{lineage}-{step:08d}-{epoch:06d}"


def step_of(directory: Path) -> int:
    """The step in a directory's name."""
    return int(directory.name.rsplit("-", 2)[1])


def save(checkpoint: Checkpoint, directory: Path, epoch: int) -> Path:
    """Write, flush and rename; the final path. It is committed only once the store names it."""
    state = checkpoint.state
    final = directory / name(state.lineage, state.step, epoch)
    if final.exists():  # this very learner abandoned it: the store refused its commit
        shutil.rmtree(final)
    path = files.temporary(final)
    metadata = {"format": "pt"}
    files.write_tensors(path / "adapter.safetensors", checkpoint.adapter, metadata)
    moments = {**checkpoint.optimizer, RNG: checkpoint.rng}
    files.write_tensors(path / "optimizer.safetensors", moments, metadata)
    if checkpoint.reference is not None:
        files.write_tensors(path / REFERENCE, checkpoint.reference, metadata)
    files.write_json(path / "state.json", msgspec.to_builtins(state))
    files.rename(path, final)
    return final


def load(path: Path) -> Checkpoint:
    """Read a committed checkpoint; `Corrupt` if it does not read back."""
    try:
        state = msgspec.convert(json.loads((path / "state.json").read_bytes()), State)
        moments = files.read_tensors(path / "optimizer.safetensors")
        adapter = files.read_tensors(path / "adapter.safetensors")
        reference = files.read_tensors(path / REFERENCE) if (path / REFERENCE).exists() else None
        rng = moments.pop(RNG)
        return Checkpoint(adapter=adapter, rng=rng, optimizer=moments, state=state, reference=reference)
    except (OSError, ValueError, KeyError) as error:
        raise Corrupt(f"checkpoint {path}: {error}") from error


def optimizer_tensors(optimizer: torch.optim.Optimizer, parameters: dict[str, torch.nn.Parameter]) -> Tensors:
    """Copies of the optimizer's state tensors, named after their parameters."""
    return {
        f"{parameter}.{key}": value.detach().cpu().clone()
        for parameter, tensor in parameters.items()
        for key, value in optimizer.state.get(tensor, {}).items()
    }


def restore_optimizer(
    optimizer: torch.optim.Optimizer, parameters: dict[str, torch.nn.Parameter], tensors: Tensors
) -> None:
    """Undo `optimizer_tensors`; a parameter without tensors starts afresh."""
    optimizer.state.clear()
    for parameter, tensor in parameters.items():
        prefix = f"{parameter}."
        state = {key.removeprefix(prefix): value for key, value in tensors.items() if key.startswith(prefix)}
        if state:
            # AdamW keeps its step count on the CPU, everything else beside the parameter.
            held = {key: value.to(tensor.device, copy=True) for key, value in state.items()}
            optimizer.state[tensor] = held | {"step": state["step"].cpu().clone()}


def sweep(directory: Path, lineage: str, head: Path | None, head_step: int) -> list[Path]:
    """Remove the lineage's orphans: unfinished ones, and those past the head. What was removed."""
    removed = files.sweep_temporary(directory, f"{lineage}-")
    for path in sorted(directory.glob(f"{lineage}-*")) if directory.is_dir() else []:
        if path.resolve() != (head and head.resolve()) and step_of(path) >= head_step:
            shutil.rmtree(path)
            removed.append(path)
    return removed


def prune(directory: Path, lineage: str, keep_last: int, save_every: int, steps: Collection[int]) -> None:
    """Remove all but the newest `keep_last`, every one whose step `save_every` divides, and those of
    `steps`."""
    for path in sorted(directory.glob(f"{lineage}-*"))[:-keep_last]:
        if step_of(path) % save_every and step_of(path) not in steps:
            shutil.rmtree(path)

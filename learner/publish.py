"""Publishing: a committed version becomes a complete, immutable adapter directory.

Temporary directory, every file flushed, manifest last, rename. Publishing again after a crash
finds the finished directory or writes it anew from the checkpoint: the same bytes both times.
"""

from collections.abc import Callable
from hashlib import sha256
from pathlib import Path

import msgspec

from capture.adapters import MANIFEST, Manifest, adapter_path
from capture.errors import Corrupt
from capture.types import Version
from learner import files
from learner.checkpoint import Checkpoint
from learner.model import Model, rounded
from learner.settings import Settings

WEIGHTS = "adapter_model.safetensors"


def publish(
    settings: Settings,
    model: Model,
    version: Version,
    checkpoint: Checkpoint,
    on_point: Callable[[str], None],
) -> tuple[Path, str]:
    """Make the adapter directory of `version` complete. Its path and its weights' SHA-256."""
    final = adapter_path(settings.adapter_dir, version.policy, version.version)
    if (final / MANIFEST).is_file():  # renamed into place only when complete
        return final, sha256((final / WEIGHTS).read_bytes()).hexdigest()
    path = files.temporary(final)
    adapter = rounded(checkpoint.adapter, settings.dtype)
    content = files.write_tensors(path / WEIGHTS, adapter, {"format": "pt"})
    files.write_json(path / "adapter_config.json", model.peft_config())
    digest = sha256(content).hexdigest()
    manifest = describe(settings, model, version, checkpoint, digest)
    files.write_json(path / MANIFEST, msgspec.to_builtins(manifest))
    on_point("mid_publish")
    files.rename(path, final)
    return final, digest


def describe(
    settings: Settings, model: Model, version: Version, checkpoint: Checkpoint, digest: str
) -> Manifest:
    """The manifest of `version`."""
    canary = checkpoint.state.canary
    if canary is None:
        raise Corrupt(f"the checkpoint of step {checkpoint.state.step} has no canary")
    return Manifest(
        policy=version.policy,
        version=version.version,
        parent=version.parent,
        lineage=version.lineage,
        step=version.step,
        sha256=digest,
        fingerprint=model.fingerprint,
        dtype=settings.dtype,
        lora_rank=settings.lora_rank,
        canary_ids=canary.ids,
        canary_logprobs=canary.logprobs,
        parent_logprobs=canary.parent_logprobs,
        base_logprobs=canary.base_logprobs,
        created_at=version.created_at,
    )


def sweep(settings: Settings, policy: str) -> list[Path]:
    """Remove adapter directories that a killed learner left unfinished; what was removed."""
    return files.sweep_temporary(Path(settings.adapter_dir), f"{policy}@v")

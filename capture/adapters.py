"""The manifest of an adapter directory: the file whose presence means that it is complete."""

from pathlib import Path

import msgspec

from capture.errors import AdapterError

MANIFEST = "manifest.json"


class Manifest(msgspec.Struct, frozen=True, kw_only=True):
    """What an engine must prove of one immutable version.

    The four canary lists belong to one short sequence: logprobs stand for positions 1 and on, at
    temperature 1, so each has one entry fewer than `canary_ids`.
    """

    policy: str
    version: int
    parent: int | None
    lineage: str
    step: int
    sha256: str  # of adapter_model.safetensors
    fingerprint: str  # of the base model
    dtype: str  # the engine's LoRA dtype, to which the logprobs below were rounded
    lora_rank: int
    canary_ids: list[int]
    canary_logprobs: list[float]  # of this version
    parent_logprobs: list[float]
    base_logprobs: list[float]
    created_at: float


def adapter_name(policy: str, version: int) -> str:
    """The name by which an engine serves one version; never given to another one."""
    return f"{policy}@v{version}"


def adapter_path(adapter_dir: str, policy: str, version: int) -> Path:
    """Where the adapter of one version lives."""
    return Path(adapter_dir) / adapter_name(policy, version)


def read_manifest(directory: Path) -> Manifest:
    """The manifest of `directory`; `AdapterError` if it is missing or damaged."""
    try:
        return msgspec.json.decode((directory / MANIFEST).read_bytes(), type=Manifest)
    except (OSError, msgspec.DecodeError) as error:
        raise AdapterError(f"{directory}: no readable {MANIFEST}: {error}") from error

"""A version of the policy for use elsewhere: its adapter in peft's format, or merged into its base."""

import json
import shutil
from hashlib import sha256
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from capture.adapters import MANIFEST, read_manifest
from capture.errors import ConfigError, Conflict, Corrupt, NotFound
from capture.store import Store
from capture.types import Version
from hone.target import Target

if TYPE_CHECKING:
    from learner.merge import Dtype

WEIGHTS = "adapter_model.safetensors"
CONFIG = "adapter_config.json"
ORIGIN = "hone.json"  # of a merged model: where it comes from; written last


class Export(msgspec.Struct, frozen=True, kw_only=True):
    """What was exported; a merged model has it beside its weights."""

    policy: str
    version: int
    lineage: str
    step: int  # optimizer steps in the lineage
    merged: bool
    base_model: str
    base_fingerprint: str
    adapter_sha256: str
    fingerprint: str | None = None  # of the merged model


def exported_version(store: Store, policy: str, version: int) -> Version:
    """The version, if it has an adapter; `NotFound` or `Conflict` says why not."""
    found = next((one for one in store.versions(policy) if one.version == version), None)
    if found is None:
        raise NotFound(f"policy {policy} has no version {version}; `hone adapters ls` lists them")
    name = f"{policy}@v{version}"
    if found.path is None and version == 0:
        raise Conflict(f"{name} is the base model itself: it has no adapter to export")
    if found.path is None:
        raise Conflict(f"{name} is not published yet: the learner writes it; ask again in a moment")
    return found


def export(version: Version, base_model: str, target: Target, *, merged: bool, dtype: "Dtype") -> Export:
    """Write the version to `target`, whole or, at an object store, without its last file.

    `Conflict`: something is there. `Corrupt`: the adapter is damaged. `ConfigError`: the learner's extra or
    the base model is missing.
    """
    target.refuse_existing()
    source = Path(str(version.path))
    manifest = read_manifest(source)
    check(source, manifest.sha256)
    made = Export(
        policy=version.policy,
        version=version.version,
        lineage=version.lineage,
        step=version.step,
        merged=merged,
        base_model=base_model,
        base_fingerprint=manifest.fingerprint,
        adapter_sha256=manifest.sha256,
    )
    with target.staging() as staged:
        if merged:
            made = _merged(made, source, staged, dtype)
            (staged / ORIGIN).write_bytes(msgspec.json.format(msgspec.json.encode(made)))
        else:
            _adapter(source, staged, base_model)
        target.put(staged, ORIGIN if merged else MANIFEST)
    return made


def check(source: Path, digest: str) -> None:
    """`Corrupt` unless the weights are those of the manifest."""
    try:
        with (source / WEIGHTS).open("rb") as file:
            sha = sha256()
            while part := file.read(1 << 20):
                sha.update(part)
    except OSError as error:
        raise Corrupt(f"{source}: {error}") from error
    if sha.hexdigest() != digest:
        raise Corrupt(f"{source / WEIGHTS} is damaged: its SHA-256 is not that of {MANIFEST}")


def _adapter(source: Path, staged: Path, base_model: str) -> None:
    """A copy, in which peft finds the base under the name that the settings have for it."""
    for name in (WEIGHTS, MANIFEST):
        shutil.copyfile(source / name, staged / name)
    config = json.loads((source / CONFIG).read_bytes())
    (staged / CONFIG).write_text(json.dumps({**config, "base_model_name_or_path": base_model}, indent=1))


def _merged(made: Export, source: Path, staged: Path, dtype: "Dtype") -> Export:
    try:
        from learner.merge import merge
        from learner.model import base_path, fingerprint
    except ImportError as error:
        raise ConfigError(f"--merge: {error}; pip install 'hone[learner]' brings it") from error

    if fingerprint(base_path(made.base_model)) != made.base_fingerprint:
        raise ConfigError(
            f"policy.base_model: {made.base_model} is not the model that v{made.version} was trained on"
        )
    return msgspec.structs.replace(made, fingerprint=merge(made.base_model, source, staged, dtype))

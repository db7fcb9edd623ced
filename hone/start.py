"""How a policy and its runs begin: from the base, from an adapter as version 0, or again from a version.

Every process that works on a policy calls `start_policy` first, so that whoever comes first writes down what
version 0 is, and all others find the same.
"""

import json
import re
import time
from pathlib import Path

import msgspec

from capture.adapters import MANIFEST, Manifest, adapter_path, read_manifest
from capture.errors import AdapterError, ConfigError, Conflict, NotFound
from capture.store import Store
from capture.types import Lineage, Version
from hone.config import Config
from hone.export import CONFIG, WEIGHTS, check
from hone.printing import redacted
from hone.target import Directory
from hone.training import ENDED, choose_run, refuse_ended

SETTING = "train.init_adapter"


def start_policy(config: Config, store: Store, adapter: str | None = None) -> Version:
    """Version 0 of the policy. `ConfigError` where `adapter`, the setting and the store say different things
    of what it is."""
    policy, setting = config.policy.name, config.train.init_adapter
    if adapter and setting and Path(adapter).resolve() != Path(setting).resolve():
        raise ConfigError(f"--from {adapter}: {SETTING} is {setting}; version 0 can be one of them")
    source = adapter or setting
    if source is None:
        return store.start_policy(policy, None, None)
    manifest = readable(config, Path(source))
    known = next((one for one in store.versions(policy) if one.version == 0), None)
    if known is None:
        path = adopt(config, Path(source), manifest)
        known = store.start_policy(policy, str(path), manifest.sha256)
    if known.sha256 != manifest.sha256:
        held = "the base model" if known.path is None else known.path
        raise ConfigError(
            f"{SETTING}: version 0 of {policy} is {held} in this store, not {source}; another run.dir or "
            "policy.name begins afresh"
        )
    return known


def start_run(config: Config, store: Store, run_id: str) -> Lineage:
    """The run, as it is stored or new from version 0."""
    start_policy(config, store)
    return store.start_run(run_id, config.policy.name, redacted(config.sections()))


def begin(config: Config, store: Store, wanted: str | None, origin: str | None) -> str:
    """The run that `hone train` works on. `origin`: a new one from this version, or from this adapter as
    version 0; else the wanted one, the newest that has not ended, or a new one."""
    version = None if origin is None else _version(origin)
    if version is not None:
        return _from_version(config, store, wanted, version)
    start_policy(config, store, origin)
    run_id = choose_run(store, config.policy.name, wanted)
    store.start_run(run_id, config.policy.name, redacted(config.sections()))
    refuse_ended(store, run_id)
    return run_id


def _from_version(config: Config, store: Store, wanted: str | None, version: int) -> str:
    """A new run whose lineage starts at `version`; the run before it ends."""
    policy, latest = config.policy.name, store.latest_run()
    start_policy(config, store)
    for lease in (f"learner:{policy}", f"runner:{latest}"):
        if store.live_leases(lease):
            raise Conflict(f"--from v{version}: run {latest} is being trained; stop it first")
    run_id = wanted or time.strftime("%Y%m%d-%H%M%S")
    if _exists(store, run_id):
        raise ConfigError(f"run {run_id} exists: --from begins a new one, name another with --run")
    store.start_run(run_id, policy, redacted(config.sections()), start_version=version)
    if latest is not None:
        store.end_run(latest, ENDED)
    return run_id


def _exists(store: Store, run_id: str) -> bool:
    try:
        store.lineage(run_id)
    except NotFound:
        return False
    return True


def _version(origin: str) -> int | None:
    """The number in 17, v17 or policy@v17; None for anything else, and for a directory of that name."""
    found = re.fullmatch(r"(?:[^/@]+@)?v?(\d+)", origin)
    return int(found[1]) if found and not Path(origin).exists() else None


def readable(config: Config, source: Path) -> Manifest:
    """The manifest of an adapter that can be version 0; `ConfigError` says why it cannot."""
    try:
        manifest = read_manifest(source)
        lora = json.loads((source / CONFIG).read_bytes())
    except (AdapterError, OSError, ValueError) as error:
        raise ConfigError(
            f"{SETTING}: {source} is no adapter that `hone sft`, `hone train` or `hone adapters export` "
            f"wrote: {error}"
        ) from error
    check(source, manifest.sha256)
    ours = config.learner
    for name, held, wanted in (
        ("lora_rank", lora.get("r"), ours.lora_rank),
        ("lora_alpha", lora.get("lora_alpha"), ours.alpha),
    ):
        if held != wanted:
            raise ConfigError(
                f"train.{name} is {wanted:g}, but {source} has {held}: training goes on with that"
            )
    return manifest


def adopt(config: Config, source: Path, manifest: Manifest) -> Path:
    """Copy the adapter to where engines see it, as version 0 of this policy; its path."""
    final = adapter_path(config.engine.adapter_dir, config.policy.name, 0).absolute()
    if (final / MANIFEST).is_file():
        if read_manifest(final).sha256 != manifest.sha256:
            raise Conflict(f"{final} is another adapter; engine.adapter_dir belongs to one store")
        return final
    mine = msgspec.structs.replace(
        manifest,
        policy=config.policy.name,
        version=0,
        parent=None,
        lineage="",
        step=0,
        parent_logprobs=manifest.base_logprobs,
    )
    place = Directory(final)
    with place.staging() as staged:
        for name in (WEIGHTS, CONFIG):
            (staged / name).write_bytes((source / name).read_bytes())
        (staged / MANIFEST).write_bytes(msgspec.json.format(msgspec.json.encode(mine)))
        place.put(staged, MANIFEST)
    return final

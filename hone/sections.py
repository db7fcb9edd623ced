"""The sections of `hone.toml`: which keys they may hold, and how overrides and secrets get in.

Each section holds the fields of one or several rooms' settings (`SOURCES`). A key that two rooms
need stands once and goes to both; a key that follows from another section is not in the file at all.
"""

import difflib
import re
import tomllib
from collections.abc import Iterator, Mapping
from itertools import pairwise
from pathlib import Path
from typing import Any, get_args

import msgspec

import capture.settings
import learner.settings
import proxy.settings
import rewards.settings
import rollouts.settings
from capture.errors import ConfigError
from hone import presets
from hone.settings import (
    ControlSettings,
    EngineSettings,
    EvalSettings,
    PolicySettings,
    PromoteSettings,
    RunSettings,
    StoreSettings,
    TrainSettings,
)

ENV_PREFIX = "HONE_"
ENV_SEPARATOR = "__"


class Source(msgspec.Struct, frozen=True):
    """A Struct whose fields stand in a section, except those that follow from other sections."""

    section: str
    type: type[msgspec.Struct]
    derived: frozenset[str] = frozenset()

    def types(self) -> dict[str, Any]:
        """Keys that the file may hold -> their types."""
        fields = msgspec.structs.fields(self.type)
        return {field.name: field.type for field in fields if field.name not in self.derived}


PROXY_DERIVED = frozenset({"policy", "routes", "engines", "sampling", "commit_timeout_s"})
LEARNER_DERIVED = frozenset(
    {"base_model", "adapter_dir", "checkpoint_dir", "steps_path", "sinks_dir", "dtype"}
)
SOURCES = (
    Source("policy", PolicySettings),
    Source("run", RunSettings),
    Source("engine", EngineSettings),
    Source("engine", proxy.settings.Engines, frozenset({"urls", "versions_max"})),
    Source("sampling", proxy.settings.Sampling),
    Source("proxy", proxy.settings.Settings, PROXY_DERIVED),
    Source("capture", StoreSettings),
    Source("capture", capture.settings.Settings),
    Source("rewards", rewards.settings.Settings, frozenset({"infrastructure_retries", "passive"})),
    Source("passive", rewards.settings.PassiveSettings, frozenset({"group_size"})),
    Source("train", TrainSettings),
    Source("train", learner.settings.Settings, LEARNER_DERIVED),
    Source("train", rollouts.settings.Settings, frozenset({"model_name", "eval_env", "redact"})),
    Source("eval", EvalSettings),
    Source("promote", PromoteSettings),
    Source("control", ControlSettings),
)
ROUTES = "routes"  # a table of its own: model name -> proxy.settings.Route


def read_tables(
    raw: Mapping[str, Any], environ: Mapping[str, str], folder: Path
) -> dict[str, dict[str, Any]]:
    """Every section as a table, checked for unknown keys, with files read, overrides and the preset applied.

    `ConfigError` names what is wrong and what was probably meant.
    """
    keys = _keys_by_section()
    tables = _tables(raw, keys)
    for section, table in tables.items():
        _read_files(section, table, keys[section], folder)
        _refuse_unknown(section, table, keys)
    for section, key, text in overrides(environ, keys):
        _set(tables[section], key, text, f"{section}.{'.'.join(key)}", keys[section])
    presets.apply(tables)
    return tables


def _keys_by_section() -> dict[str, dict[str, Any]]:
    keys: dict[str, dict[str, Any]] = {ROUTES: {}}
    for source in SOURCES:
        keys.setdefault(source.section, {}).update(source.types())
    return keys


def _tables(raw: Mapping[str, Any], keys: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    for section, table in raw.items():
        if section not in keys:
            raise ConfigError(f"unknown section [{section}]{_nearest(section, keys)}")
        if not isinstance(table, dict):
            raise ConfigError(f"{section} must be a section: [{section}]")
    return {section: dict(raw.get(section, {})) for section in keys}


def _refuse_unknown(section: str, table: Mapping[str, Any], keys: Mapping[str, dict[str, Any]]) -> None:
    if section == ROUTES:
        for name, route in table.items():
            _refuse_unknown_within(f'routes."{name}"', route, proxy.settings.Route)
        return
    for key, value in table.items():
        if key not in keys[section]:
            raise ConfigError(f"unknown setting {section}.{key}{_suggest(section, key, keys)}")
        _refuse_unknown_within(f"{section}.{key}", value, keys[section][key])


def _refuse_unknown_within(where: str, value: object, kind: Any) -> None:
    """The same for tables inside a section, lists of tables included."""
    struct = next((part for part in (kind, *get_args(kind)) if _is_struct(part)), None)
    if struct is None:
        return
    rows = value if isinstance(value, list) else [value]
    fields = {field.name: field.type for field in msgspec.structs.fields(struct)}
    for row in rows:
        for key, inner in row.items() if isinstance(row, dict) else ():
            if key not in fields:
                raise ConfigError(f"unknown setting {where}.{key}{_nearest(key, fields, where + '.')}")
            _refuse_unknown_within(f"{where}.{key}", inner, fields[key])


def _is_struct(kind: Any) -> bool:
    return isinstance(kind, type) and issubclass(kind, msgspec.Struct)


def _suggest(section: str, key: str, keys: Mapping[str, dict[str, Any]]) -> str:
    """The same key in another section, else the nearest here, else the nearest anywhere."""
    for other, names in keys.items():
        if key in names:
            return f"; did you mean {other}.{key}?"
    here = _nearest(key, keys[section], f"{section}.")
    everywhere = {name: f"{other}.{name}" for other, names in keys.items() for name in names}
    near = difflib.get_close_matches(key, everywhere, n=1)
    return here or (f"; did you mean {everywhere[near[0]]}?" if near else "")


def _nearest(word: str, among: Mapping[str, Any], prefix: str = "") -> str:
    near = difflib.get_close_matches(word, among, n=1, cutoff=0.5)
    return f"; did you mean {prefix}{near[0]}?" if near else ""


def _read_files(section: str, table: dict[str, Any], keys: Mapping[str, Any], folder: Path) -> None:
    """Replace `<key>_file` by `<key>` with the file's content, where `<key>` is a setting."""
    for name in [name for name in table if name.endswith("_file") and name not in keys]:
        key = name.removesuffix("_file")
        if key not in keys:
            continue
        if key in table:
            raise ConfigError(f"{section}.{key} and {section}.{name} are both set")
        path = folder / str(table.pop(name))
        try:
            table[key] = path.read_text().strip()
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"{section}.{name}: cannot read {path}: {error}") from error


def overrides(
    environ: Mapping[str, str], keys: Mapping[str, Mapping[str, Any]]
) -> Iterator[tuple[str, list[str], str]]:
    """`HONE_TRAIN__LR=1e-4` as (section, path of keys, text); unknown ones are errors."""
    for name, text in sorted(environ.items()):
        if not name.startswith(ENV_PREFIX) or ENV_SEPARATOR not in name:
            continue
        section, *key = name.removeprefix(ENV_PREFIX).lower().split(ENV_SEPARATOR)
        if section not in keys or section == ROUTES:
            raise ConfigError(f"{name}: no section [{section}] can be overridden{_nearest(section, keys)}")
        if key[0] not in keys[section]:
            raise ConfigError(f"{name}: unknown setting{_suggest(section, key[0], dict(keys))}")  # type: ignore[arg-type]
        yield section, key, text


def _set(table: dict[str, Any], key: list[str], text: str, name: str, keys: Mapping[str, Any]) -> None:
    """Put a value from the environment where its key says, decoded as the setting's type."""
    kind = keys[key[0]]
    for step, following in pairwise(key):
        fields = (
            {field.name: field.type for field in msgspec.structs.fields(kind)} if _is_struct(kind) else {}
        )
        if following not in fields:
            raise ConfigError(f"{name}: unknown setting{_nearest(following, fields)}")
        kind = fields[following]
        table = table.setdefault(step, {})
    table[key[-1]] = _decode(text, kind, name)


def _decode(text: str, kind: Any, name: str) -> Any:
    try:
        return msgspec.to_builtins(msgspec.convert(text, kind, strict=False))
    except msgspec.ValidationError as first:
        try:
            value = tomllib.loads(f"value = {text}")["value"]
            return msgspec.to_builtins(msgspec.convert(value, kind))
        except (tomllib.TOMLDecodeError, msgspec.ValidationError):
            raise ConfigError(f"{name}: {plain(first)}") from first


def plain(error: msgspec.ValidationError) -> str:
    """What is wrong with a value, without the path to it."""
    return re.sub(r" - at `\$[^`]*`$", "", str(error)).lower()


def place(error: msgspec.ValidationError) -> str:
    """The path to the value within its section: `.lr`."""
    found = re.search(r" - at `\$([^`]*)`$", str(error))
    return found[1] if found else ""

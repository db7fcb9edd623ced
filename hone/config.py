"""One `hone.toml` for all rooms: read, checked, overridden by the environment, taken apart again.

Each section of the file holds the fields of one or several rooms' settings (`SOURCES`). A key that
two rooms need stands once and goes to both; a key that follows from another section is not in the
file at all. Order of precedence: `HONE_SECTION__KEY` in the environment, then `<key>_file` (the
content of a file, for secrets), then the file, then the rooms' defaults.
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
from hone.hardware import Hardware, detect
from hone.settings import (
    ControlSettings,
    EngineSettings,
    EvalSettings,
    PolicySettings,
    RunSettings,
    StoreSettings,
    TrainSettings,
)

ENV_PREFIX = "HONE_"
ENV_SEPARATOR = "__"
REDACTED = "[redacted]"
SECRET_NAME = re.compile(r"(secret|password|token|api_?key|credential)s?$", re.IGNORECASE)


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
LEARNER_DERIVED = frozenset({"base_model", "adapter_dir", "checkpoint_dir", "steps_path", "dtype"})
SOURCES = (
    Source("policy", PolicySettings),
    Source("run", RunSettings),
    Source("engine", EngineSettings),
    Source("engine", proxy.settings.Engines, frozenset({"urls", "versions_max"})),
    Source("sampling", proxy.settings.Sampling),
    Source("proxy", proxy.settings.Settings, PROXY_DERIVED),
    Source("capture", StoreSettings),
    Source("capture", capture.settings.Settings),
    Source("rewards", rewards.settings.Settings, frozenset({"infrastructure_retries"})),
    Source("train", TrainSettings),
    Source("train", learner.settings.Settings, LEARNER_DERIVED),
    Source("train", rollouts.settings.Settings, frozenset({"model_name", "eval_env"})),
    Source("eval", EvalSettings),
    Source("control", ControlSettings),
)
Made = Mapping[type[msgspec.Struct], Any]
ROUTES = "routes"  # a table of its own: model name -> proxy.settings.Route


class Config(msgspec.Struct, frozen=True, kw_only=True):
    """Everything, resolved: each process takes the part that it needs."""

    path: Path  # the hone.toml
    policy: PolicySettings
    run: RunSettings
    engine: EngineSettings
    proxy: proxy.settings.Settings
    store: StoreSettings
    capture: capture.settings.Settings
    rewards: rewards.settings.Settings
    train: TrainSettings
    learner: learner.settings.Settings
    rollouts: rollouts.settings.Settings
    eval: EvalSettings
    control: ControlSettings

    def sections(self) -> dict[str, dict[str, Any]]:
        """As a file that leaves nothing out would say it; secrets included."""
        resolved = {type(value): value for value in self._settings()}
        tables: dict[str, dict[str, Any]] = {}
        for source in SOURCES:
            shown = {key: getattr(resolved[source.type], key) for key in source.types()}
            tables.setdefault(source.section, {}).update(msgspec.to_builtins(shown))
        tables[ROUTES] = msgspec.to_builtins(self.proxy.routes)
        return tables

    def _settings(self) -> tuple[msgspec.Struct, ...]:
        rooms = (self.proxy, self.proxy.engines, self.proxy.sampling, self.capture, self.rewards)
        ours = (self.store, self.policy, self.run, self.engine, self.train, self.eval, self.control)
        return (*rooms, *ours, self.learner, self.rollouts)


def load(path: Path, environ: Mapping[str, str], hardware: Hardware | None = None) -> Config:
    """Read and resolve the file; `ConfigError` names the setting that is wrong."""
    try:
        raw = tomllib.loads(path.read_text())
    except FileNotFoundError:
        raise ConfigError(f"{path} does not exist; `hone init` writes one") from None
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} cannot be read: {error}") from error
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"{path} is not TOML: {error}") from error
    return resolve(raw, environ, path.resolve(), hardware or detect())


def resolve(raw: Mapping[str, Any], environ: Mapping[str, str], path: Path, hardware: Hardware) -> Config:
    """The configuration that a decoded file and an environment make on a machine."""
    keys = _keys_by_section()
    tables = _tables(raw, keys)
    for section, table in tables.items():
        _read_files(section, table, keys[section], path.parent)
        _refuse_unknown(section, table, keys)
    for section, key, text in overrides(environ, keys):
        _set(tables[section], key, text, f"{section}.{'.'.join(key)}", keys[section])
    return _assemble(tables, path, hardware)


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
            raise ConfigError(f"{name}: {_plain(first)}") from first


def _assemble(tables: Mapping[str, dict[str, Any]], path: Path, hardware: Hardware) -> Config:
    made: dict[type[msgspec.Struct], Any] = {}
    for source in SOURCES:
        keys = source.types()
        table = {key: value for key, value in tables[source.section].items() if key in keys}
        if source.type is learner.settings.Settings:
            table["base_model"] = made[PolicySettings].base_model
        made[source.type] = _convert(source, table)
    try:
        routes = msgspec.convert(tables[ROUTES], dict[str, proxy.settings.Route])
    except msgspec.ValidationError as error:
        raise ConfigError(f"routes{_place(error)}: {_plain(error)}") from error
    return _connect(made, routes, path, hardware)


def _convert(source: Source, table: dict[str, Any]) -> Any:
    try:
        return msgspec.convert(table, source.type)
    except ConfigError as error:  # a room's own check, which knows no sections
        raise ConfigError(re.sub(r"^\w+\.", f"{source.section}.", str(error))) from error
    except msgspec.ValidationError as error:
        missing = re.search(r"missing required field `(\w+)`", str(error))
        if missing:
            raise ConfigError(f"{source.section}.{missing[1]} is required") from error
        raise ConfigError(f"{source.section}{_place(error)}: {_plain(error)}") from error


def _place(error: msgspec.ValidationError) -> str:
    """`.lr` out of "... - at `$.lr`"."""
    place = re.search(r" - at `\$([^`]*)`$", str(error))
    return place[1] if place else ""


def _plain(error: msgspec.ValidationError) -> str:
    return re.sub(r" - at `\$[^`]*`$", "", str(error)).lower()


def _connect(made: Made, routes: dict[str, proxy.settings.Route], path: Path, hardware: Hardware) -> Config:
    """Fill in what follows from other sections, and make paths absolute."""
    folder = path.parent
    policy: PolicySettings = made[PolicySettings]
    policy = msgspec.structs.replace(policy, base_model=local_model(policy.base_model, folder))
    run = msgspec.structs.replace(made[RunSettings], dir=str(folder / made[RunSettings].dir))
    engine = _engine(made, run, folder, hardware)
    train = made[TrainSettings]
    config = Config(
        path=path,
        policy=policy,
        run=run,
        engine=engine,
        proxy=_proxy(made, policy, engine, routes),
        store=msgspec.structs.replace(
            made[StoreSettings], path=str(folder / (made[StoreSettings].path or f"{run.dir}/hone.sqlite"))
        ),
        capture=made[capture.settings.Settings],
        rewards=_rewards(made, folder),
        train=msgspec.structs.replace(train, scenarios=str(folder / train.scenarios)),
        learner=msgspec.structs.replace(
            made[learner.settings.Settings],
            base_model=policy.base_model,
            adapter_dir=engine.adapter_dir,
            checkpoint_dir=f"{run.dir}/checkpoints",
            steps_path=f"{run.dir}/steps.jsonl",
            dtype=engine.dtype,
        ),
        rollouts=_rollouts(made, policy, folder),
        eval=_eval(made, folder),
        control=made[ControlSettings],
    )
    _check_together(config)
    return config


def _check_together(config: Config) -> None:
    """What no section can see alone."""
    needed = config.learner.staleness_max + 2
    if config.engine.versions_max < needed:
        raise ConfigError(
            f"engine.versions_max is {config.engine.versions_max}; train.staleness_max = "
            f"{config.learner.staleness_max} needs {needed}: those versions, one for eval, one promoted"
        )
    for name, route in config.proxy.routes.items():
        if sum(way is not None for way in (route.to, route.url, route.provider)) != 1:
            raise ConfigError(f'routes."{name}" needs exactly one of to, url and provider')


def _engine(made: Made, run: RunSettings, folder: Path, hardware: Hardware) -> EngineSettings:
    engine: EngineSettings = made[EngineSettings]
    device: Hardware = hardware if engine.device == "auto" else engine.device
    dtype = engine.dtype if engine.dtype != "auto" else ("float32" if device == "cpu" else "bfloat16")
    adapters = str(folder / engine.adapter_dir) if engine.adapter_dir else f"{run.dir}/adapters"
    return msgspec.structs.replace(engine, device=device, dtype=dtype, adapter_dir=adapters)


def local_model(name: str, folder: Path) -> str:
    """A directory beside the file as an absolute path; anything else is a name on the model hub."""
    return str((folder / name).resolve()) if (folder / name).is_dir() else name


def _proxy(
    made: Made,
    policy: PolicySettings,
    engine: EngineSettings,
    routes: dict[str, proxy.settings.Route],
) -> proxy.settings.Settings:
    urls = tuple(engine.urls) or (f"http://{engine.host}:{engine.port}",)
    engines = msgspec.structs.replace(
        made[proxy.settings.Engines], urls=urls, versions_max=engine.versions_max
    )
    return msgspec.structs.replace(
        made[proxy.settings.Settings],
        policy=policy.name,
        routes=routes,
        sampling=made[proxy.settings.Sampling],
        engines=engines,
        commit_timeout_s=made[capture.settings.Settings].commit_timeout_s,
    )


def _rewards(made: Made, folder: Path) -> rewards.settings.Settings:
    settings: rewards.settings.Settings = made[rewards.settings.Settings]
    retries = made[rollouts.settings.Settings].infrastructure_retries
    script = str(folder / settings.script) if settings.script else ""
    return msgspec.structs.replace(settings, script=script, infrastructure_retries=retries)


def _rollouts(made: Made, policy: PolicySettings, folder: Path) -> rollouts.settings.Settings:
    settings: rollouts.settings.Settings = made[rollouts.settings.Settings]
    return msgspec.structs.replace(
        settings,
        model_name=policy.name,
        cwd=str(folder / settings.cwd),
        eval_env=made[EvalSettings].env,
    )


def _eval(made: Made, folder: Path) -> EvalSettings:
    settings: EvalSettings = made[EvalSettings]
    return msgspec.structs.replace(settings, scenarios=[str(folder / name) for name in settings.scenarios])


def redacted(sections: Mapping[str, Any]) -> dict[str, Any]:
    """The same without secrets: settings named like one, and passwords inside URLs."""
    return {key: _redact(key, value) for key, value in sections.items()}


def _redact(key: str, value: Any) -> Any:
    if isinstance(value, Mapping):
        return redacted(value)
    if isinstance(value, list | tuple):
        return [_redact(key, one) for one in value]
    if isinstance(value, str) and value:
        if SECRET_NAME.search(key):
            return REDACTED
        return re.sub(r"(://[^/@:]+:)[^/@]+@", rf"\1{REDACTED}@", value)
    return value


def to_toml(sections: Mapping[str, Mapping[str, Any]]) -> str:
    """The sections as a file; settings without a value are left out, as TOML has none."""
    lines: list[str] = []
    for section, table in sections.items():
        lines += [f"[{section}]", *(_toml_lines(table)), ""]
    return "\n".join(lines)


def _toml_lines(table: Mapping[str, Any]) -> Iterator[str]:
    for key, value in table.items():
        if value is not None:
            yield f"{_toml_key(key)} = {_toml_value(value)}"


def _toml_key(key: str) -> str:
    return key if re.fullmatch(r"[A-Za-z0-9_-]+", key) else _toml_value(key)


def _toml_value(value: Any) -> str:
    if isinstance(value, Mapping):
        return "{ " + ", ".join(_toml_lines(value)) + " }"
    if isinstance(value, list | tuple):
        return "[" + ", ".join(map(_toml_value, value)) + "]"
    return msgspec.json.encode(value).decode()

"""One `hone.toml` for all rooms: read, checked, overridden by the environment, taken apart again.

`hone.sections` says which keys the file may hold. Order of precedence: `HONE_SECTION__KEY` in the
environment, then `<key>_file` (the content of a file, for secrets), then the file, then the rooms'
defaults.
"""

import re
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec

import capture.settings
import learner.settings
import proxy.settings
import rewards.settings
import rollouts.settings
from capture.errors import ConfigError
from hone.hardware import Hardware, detect
from hone.sections import ROUTES, SOURCES, Source, place, plain, read_tables
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

Made = Mapping[type[msgspec.Struct], Any]


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
    promote: PromoteSettings
    control: ControlSettings

    @property
    def capture_only(self) -> bool:
        """Whether there is no model to train: calls are relayed to the routes and captured."""
        return not self.policy.base_model

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
        proxies = (self.proxy, self.proxy.engines, self.proxy.sampling)
        rooms = (*proxies, self.capture, self.rewards, self.rewards.passive)
        ours = (self.store, self.policy, self.run, self.engine, self.train, self.eval, self.promote)
        return (*rooms, *ours, self.control, self.learner, self.rollouts)


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
    return _assemble(read_tables(raw, environ, path.parent), path, hardware)


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
        raise ConfigError(f"routes{place(error)}: {plain(error)}") from error
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
        raise ConfigError(f"{source.section}{place(error)}: {plain(error)}") from error


def _connect(made: Made, routes: dict[str, proxy.settings.Route], path: Path, hardware: Hardware) -> Config:
    """Fill in what follows from other sections, and make paths absolute."""
    folder = path.parent
    policy: PolicySettings = made[PolicySettings]
    if policy.base_model:
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
            made[StoreSettings], path=str(folder / (made[StoreSettings].path or f"{run.dir}/hone.db"))
        ),
        capture=made[capture.settings.Settings],
        rewards=_rewards(made, folder),
        train=msgspec.structs.replace(
            train,
            scenarios=str(folder / train.scenarios),
            init_adapter=str(folder / train.init_adapter) if train.init_adapter else None,
        ),
        learner=msgspec.structs.replace(
            made[learner.settings.Settings],
            base_model=policy.base_model,
            adapter_dir=engine.adapter_dir,
            checkpoint_dir=f"{run.dir}/checkpoints",
            steps_path=f"{run.dir}/steps.jsonl",
            sinks_dir=run.dir,
            dtype=engine.dtype,
        ),
        rollouts=_rollouts(made, policy, folder),
        eval=_eval(made, folder),
        promote=made[PromoteSettings],
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
    own = (f"http://{engine.host}:{engine.port}",) if policy.base_model else ()
    urls = tuple(engine.urls) or own
    engines = msgspec.structs.replace(
        made[proxy.settings.Engines], urls=urls, versions_max=engine.versions_max
    )
    settings: proxy.settings.Settings = made[proxy.settings.Settings]
    return msgspec.structs.replace(
        settings,
        policy=policy.name if policy.base_model else None,
        routes=routes,
        sampling=made[proxy.settings.Sampling],
        engines=engines,
        commit_timeout_s=made[capture.settings.Settings].commit_timeout_s,
    )


def _rewards(made: Made, folder: Path) -> rewards.settings.Settings:
    settings: rewards.settings.Settings = made[rewards.settings.Settings]
    runner: rollouts.settings.Settings = made[rollouts.settings.Settings]
    return msgspec.structs.replace(
        settings,
        script=str(folder / settings.script) if settings.script else "",
        python=str(folder / settings.python) if "/" in settings.python else settings.python,
        infrastructure_retries=runner.infrastructure_retries,
        passive=msgspec.structs.replace(made[rewards.settings.PassiveSettings], group_size=runner.group_size),
    )


def _rollouts(made: Made, policy: PolicySettings, folder: Path) -> rollouts.settings.Settings:
    settings: rollouts.settings.Settings = made[rollouts.settings.Settings]
    return msgspec.structs.replace(
        settings,
        model_name=policy.name,
        cwd=str(folder / settings.cwd),
        eval_env=made[EvalSettings].env,
        redact=made[capture.settings.Settings].redact,
    )


def _eval(made: Made, folder: Path) -> EvalSettings:
    settings: EvalSettings = made[EvalSettings]
    return msgspec.structs.replace(settings, scenarios=[str(folder / name) for name in settings.scenarios])

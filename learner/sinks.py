"""Where else a batch's numbers go: TensorBoard, Weights & Biases, trackio. Each is an extra of its name.

A sink that fails is counted and let be: no training stops because a page cannot be reached. Credentials and
offline modes are the libraries' own (`WANDB_MODE=offline`, `TRACKIO_DIR`, ...).
"""

import importlib
import logging
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Protocol

from capture.errors import ConfigError
from learner.settings import SinkName

log = logging.getLogger(__name__)


class Sink(Protocol):
    """A place for numbers by step."""

    def write(self, step: int, numbers: Mapping[str, float]) -> None:
        """The numbers of the batch after which the lineage has `step` steps."""

    def close(self) -> None:
        """Everything is to be written by then."""


class TensorBoard:
    """Event files in a directory of the run."""

    def __init__(self, run_id: str, project: str, directory: Path) -> None:
        writer = imported("torch.utils.tensorboard", "tensorboard").SummaryWriter
        self._writer = writer(str(directory / "tensorboard" / project / run_id))

    def write(self, step: int, numbers: Mapping[str, float]) -> None:
        for name, value in numbers.items():
            self._writer.add_scalar(name, value, step)
        self._writer.flush()

    def close(self) -> None:
        self._writer.close()


class Wandb:
    """A run of Weights & Biases; a run that goes on, goes on there."""

    def __init__(self, run_id: str, project: str, directory: Path) -> None:
        wandb = imported("wandb", "wandb")
        self._run = wandb.init(project=project, id=run_id, name=run_id, dir=str(directory), resume="allow")
        self._run.define_metric("*", step_metric="step")

    def write(self, step: int, numbers: Mapping[str, float]) -> None:
        self._run.log({**numbers, "step": step})

    def close(self) -> None:
        self._run.finish()


class Trackio:
    """A run of trackio, kept on this machine unless its own settings say otherwise."""

    def __init__(self, run_id: str, project: str, directory: Path) -> None:
        self._trackio = imported("trackio", "trackio")
        self._trackio.init(project=project, name=run_id, resume="allow")

    def write(self, step: int, numbers: Mapping[str, float]) -> None:
        self._trackio.log(dict(numbers), step=step)

    def close(self) -> None:
        self._trackio.finish()


KINDS: dict[SinkName, Callable[[str, str, Path], Sink]] = {
    "tensorboard": TensorBoard,
    "wandb": Wandb,
    "trackio": Trackio,
}


class Sinks:
    """All that are set, from `opened` to `close`."""

    def __init__(self, sinks: Mapping[str, Sink], failed: Callable[[str], None]) -> None:
        self._sinks = dict(sinks)
        self._failed = failed  # told the name of a sink that failed

    def write(self, step: int, numbers: Mapping[str, float]) -> None:
        """Give every sink the numbers."""
        for name, sink in self._sinks.items():
            self._try(name, lambda sink=sink: sink.write(step, numbers))  # type: ignore[misc]

    def close(self) -> None:
        """Close every sink."""
        for name, sink in self._sinks.items():
            self._try(name, sink.close)

    def _try(self, name: str, work: Callable[[], None]) -> None:
        try:
            work()
        except Exception as error:  # foreign code at its boundary; what it raised is logged and counted
            log.warning("train.sinks: %s: %s: %s", name, type(error).__name__, error)
            self._failed(name)


def opened(
    names: list[SinkName], run_id: str, project: str, directory: Path, failed: Callable[[str], None]
) -> Sinks:
    """The sinks of a run; `ConfigError` where an extra is not installed or a sink does not begin."""
    sinks: dict[str, Sink] = {}
    for name in names:
        try:
            sinks[name] = KINDS[name](run_id, project, directory)
        except ConfigError:
            raise
        except Exception as error:  # foreign code at its boundary
            raise ConfigError(f"train.sinks: {name}: {type(error).__name__}: {error}") from error
    return Sinks(sinks, failed)


def imported(module: str, extra: str) -> Any:
    """A library that is an extra; `ConfigError` names it where it is missing."""
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise ConfigError(f"train.sinks: {error}; pip install 'hone[{extra}]' brings it") from error

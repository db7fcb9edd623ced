"""The state file: what a supervisor runs, for `hone status` and for whoever wants to attach."""

import os
from pathlib import Path
from typing import Literal

import msgspec

from hone.process import started_ticks

PartState = Literal["waiting", "starting", "ready", "backoff", "done", "failed", "stopped"]
Kind = Literal["up", "train"]


class PartStatus(msgspec.Struct, frozen=True, kw_only=True):
    """One part as its supervisor sees it."""

    name: str
    state: PartState = "waiting"
    pid: int | None = None
    since: float = 0.0  # Unix seconds of the last change of state
    restarts: int = 0
    exit_code: int | None = None  # of the last process; negative: the signal
    log: str = ""


class State(msgspec.Struct, frozen=True, kw_only=True):
    """One supervisor and its parts."""

    kind: Kind
    pid: int
    pid_ticks: int
    started_at: float
    config: str  # path of the hone.toml
    parts: list[PartStatus]

    @property
    def alive(self) -> bool:
        """Whether the supervisor that wrote this still runs."""
        return started_ticks(self.pid) == self.pid_ticks

    def part(self, name: str) -> PartStatus | None:
        """The part of that name."""
        return next((part for part in self.parts if part.name == name), None)


def state_path(run_dir: Path, kind: Kind) -> Path:
    """Where the supervisor of that kind keeps its state."""
    return run_dir / f"{kind}.json"


def write_state(path: Path, state: State) -> None:
    """Replace the file at once: a reader sees the old state or the new one."""
    temporary = path.with_suffix(".tmp")
    temporary.write_bytes(msgspec.json.format(msgspec.json.encode(state)))
    os.replace(temporary, path)


def read_state(path: Path) -> State | None:
    """The state, or None where no supervisor wrote one that can be read."""
    try:
        return msgspec.json.decode(path.read_bytes(), type=State)
    except (FileNotFoundError, msgspec.DecodeError):
        return None


def running(run_dir: Path, kind: Kind) -> State | None:
    """The state of a live supervisor of that kind, if there is one."""
    state = read_state(state_path(run_dir, kind))
    return state if state is not None and state.alive else None

"""A JSONL file that is written line by line and is there only once it is whole."""

import os
from pathlib import Path
from types import TracebackType
from typing import Any

import msgspec

from capture.errors import ConfigError, Conflict


class LinesFile:
    """Written beside `path` and renamed into place when the block ends without an error.

    `Conflict` if there is a file at `path` already, unless `force`; `ConfigError` if none can be written.
    """

    def __init__(self, path: Path, *, force: bool) -> None:
        self.path = path
        self._force = force
        self._part = path.with_name(f".{path.name}.{os.getpid()}.part")
        self.lines = 0

    def __enter__(self) -> "LinesFile":
        self._refuse()
        try:
            self._file = self._part.open("wb")
        except OSError as error:
            raise ConfigError(f"cannot write {self.path}: {error.strerror}") from error
        return self

    def write(self, value: Any) -> None:
        """One line."""
        self.write_line(msgspec.json.encode(value))

    def write_line(self, line: bytes) -> None:
        """One line that is JSON already."""
        self._file.write(line + b"\n")
        self.lines += 1

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            if kind is None:
                self._file.flush()
                os.fsync(self._file.fileno())
                self._refuse()
                self._part.rename(self.path)
        finally:
            self._file.close()
            self._part.unlink(missing_ok=True)

    def _refuse(self) -> None:
        if not self._force and self.path.exists():
            raise Conflict(f"{self.path} is there already; --force replaces it")

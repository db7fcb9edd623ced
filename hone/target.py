"""Where an export goes: a directory of this machine, or a prefix of an object store.

A directory is there only once it is whole. In an object store there is no rename: its last file says
that all others are there, so it is written last.
"""

import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from capture.errors import ConfigError, Conflict, HoneError

EXTRAS = {"s3": "s3", "gs": "gcs", "gcs": "gcs", "az": "azure", "abfs": "azure", "abfss": "azure"}
"""Scheme of a URL -> the extra of Hone that brings its file system."""


class Unreachable(HoneError):
    """The object store could not be asked, or refused what was asked."""


class Directory:
    """A directory of this machine."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def __str__(self) -> str:
        return str(self._path)

    def refuse_existing(self) -> None:
        """`Conflict` if anything is there already, an empty directory apart."""
        if self._path.is_dir() and not any(self._path.iterdir()):
            return
        if self._path.exists() or self._path.is_symlink():
            raise Conflict(f"{self._path} is there already; an export is never written over another")

    @contextmanager
    def staging(self) -> Iterator[Path]:
        """A directory to write into, on the same disk; it goes if it was not put."""
        parent = self._path.absolute().parent
        parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=f".tmp-{self._path.name}-", dir=parent) as path:
            staged = Path(path) / self._path.name
            staged.mkdir()
            yield staged

    def put(self, staged: Path, last: str) -> None:
        """Flush what was written and give it its name; `last` is the file that says it is whole."""
        for path in (*sorted(staged.iterdir()), staged):
            _flush(path)
        self.refuse_existing()
        staged.rename(self._path)  # over an empty directory, if there is one
        _flush(self._path.absolute().parent)


class Bucket:
    """A prefix of an object store, through fsspec."""

    def __init__(self, url: str, scheme: str) -> None:
        self._url = url.rstrip("/")
        self._fs, self._path = _file_system(self._url, EXTRAS[scheme])

    def __str__(self) -> str:
        return self._url

    def refuse_existing(self) -> None:
        """`Conflict` if anything is under the prefix already."""
        with self._asking():
            found = self._fs.find(self._path, maxdepth=1) or self._fs.exists(self._path)
        if found:
            raise Conflict(f"{self._url} is there already; an export is never written over another")

    @contextmanager
    def staging(self) -> Iterator[Path]:
        """A directory of this machine to write into."""
        with tempfile.TemporaryDirectory(prefix="hone-export-") as path:
            yield Path(path)

    def put(self, staged: Path, last: str) -> None:
        """Send every file, `last` at the end. `Unreachable` leaves what was sent; without `last` it is not
        whole."""
        files = sorted(staged.iterdir(), key=lambda path: (path.name == last, path.name))
        with self._asking():
            for path in files:
                self._fs.put_file(str(path), f"{self._path}/{path.name}")

    @contextmanager
    def _asking(self) -> Iterator[None]:
        """Whatever a backend raises is its own; here it becomes one sentence."""
        try:
            yield
        except Exception as error:
            raise Unreachable(f"{self._url}: {type(error).__name__}: {error}") from error


Target = Directory | Bucket


def target(to: str) -> Target:
    """What `to` names; `ConfigError` for a scheme that is unknown or whose extra is not installed."""
    scheme, separator, _ = to.partition("://")
    if not separator:
        return Directory(Path(to))
    if scheme not in EXTRAS:
        known = ", ".join(f"{name}://" for name in EXTRAS)
        raise ConfigError(f"--to {to}: a directory, or a URL that begins with one of {known}")
    return Bucket(to, scheme)


def _file_system(url: str, extra: str) -> tuple[Any, str]:
    try:
        from fsspec.core import url_to_fs

        found, path = url_to_fs(url)
    except ImportError as error:
        raise ConfigError(f"--to {url}: {error}; pip install 'hone[{extra}]' brings it") from error
    except ValueError as error:
        raise ConfigError(f"--to {url}: {error}") from error
    return found, str(path)


def _flush(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)

"""Directories that are either whole or absent: written aside, flushed, renamed into place."""

import json
import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from safetensors.torch import load_file, save
from torch import Tensor

TEMPORARY = ".tmp-"  # prefix of directories that are being written


def temporary(final: Path) -> Path:
    """A fresh directory beside `final`; what an earlier attempt left under its name goes."""
    path = final.with_name(TEMPORARY + final.name)
    shutil.rmtree(path, ignore_errors=True)
    path.mkdir(parents=True)
    return path


def write(path: Path, content: bytes) -> None:
    """Write and flush one file to the disk."""
    with path.open("xb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())


def write_json(path: Path, value: Any) -> None:
    """Write and flush `value`, indented for people."""
    write(path, json.dumps(value, indent=1).encode())


def write_tensors(path: Path, tensors: Mapping[str, Tensor], metadata: dict[str, str]) -> bytes:
    """Write and flush tensors as safetensors; the bytes that were written."""
    content: bytes = save({name: tensor.contiguous() for name, tensor in tensors.items()}, metadata)
    write(path, content)
    return content


def read_tensors(path: Path) -> dict[str, Tensor]:
    """Every tensor of a safetensors file, on the CPU."""
    return dict(load_file(path))


def rename(path: Path, final: Path) -> None:
    """Flush the directory `path` and give it its final name, durably."""
    flush_directory(path)
    path.rename(final)
    flush_directory(final.parent)


def flush_directory(path: Path) -> None:
    """Flush a directory's entries to the disk."""
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def sweep_temporary(directory: Path, prefix: str) -> list[Path]:
    """Remove what killed writers left for names that start with `prefix`; what was removed."""
    left = sorted(directory.glob(f"{TEMPORARY}{prefix}*")) if directory.is_dir() else []
    for path in left:
        shutil.rmtree(path)
    return left

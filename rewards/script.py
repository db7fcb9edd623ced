"""The reward script as control sees it: which files it is made of, and what its scores weigh."""

import ast
import hashlib
import math
from collections.abc import Iterator, Mapping
from pathlib import Path

import msgspec

from capture.errors import ConfigError


class Scored(msgspec.Struct, frozen=True):
    """What the script made of one trace."""

    scores: dict[str, float]  # finite; at least one
    weights: dict[str, float]  # the script's WEIGHTS
    script_hash: str
    took_s: float = 0.0


class Failed(msgspec.Struct, frozen=True):
    """The script gave no usable score. Never turned into a number."""

    error: str  # traceback or reason
    script_hash: str
    took_s: float = 0.0


Outcome = Scored | Failed


def combine(
    scored: Scored, posted: Mapping[str, float], weights: Mapping[str, float]
) -> tuple[float, dict[str, float]]:
    """Reward and named scores: reward = sum of weight * score.

    The script's scores come before posted ones of the same name, its `WEIGHTS` before `weights`; a
    name without a weight weighs 1. `ValueError` if the sum is not finite.
    """
    scores = {**posted, **scored.scores}
    known = {**weights, **scored.weights}
    try:
        reward = math.fsum(known.get(name, 1.0) * value for name, value in scores.items())
    except OverflowError:
        reward = math.inf
    if not math.isfinite(reward):
        raise ValueError(f"the weighted sum of the scores is {reward}")
    return reward, scores


def digest(script: Path) -> str:
    """SHA-256 (hex) over the script and every file of its directory that it imports, by name and content.

    Imports are read from the source, so a module that is imported by a computed name is not covered.
    `ConfigError` if the script is not there or one of them cannot be read.
    """
    if not script.is_file():
        raise ConfigError(f"rewards.script: there is no file {script}")
    root = script.resolve().parent
    total = hashlib.sha256()
    try:
        contents = [(path, path.read_bytes()) for path in sources(script.resolve())]
    except OSError as error:
        raise ConfigError(f"rewards.script: {error}") from error
    for path, content in contents:
        total.update(f"{path.relative_to(root)}\0{len(content)}\0".encode())
        total.update(content)
    return total.hexdigest()


def sources(script: Path) -> list[Path]:
    """The script and, transitively, the files of its directory that it imports; sorted."""
    root, found, waiting = script.parent, {script}, [script]
    while waiting:
        path = waiting.pop()
        for name in imported(path, root):
            for neighbour in files_of(name, root):
                if neighbour not in found:
                    found.add(neighbour)
                    waiting.append(neighbour)
    return sorted(found)


def imported(path: Path, root: Path) -> Iterator[str]:
    """Dotted names that the file imports, relative ones made absolute. A file that does not parse
    imports nothing: running it will say why."""
    try:
        tree = ast.parse(path.read_bytes())
    except (SyntaxError, ValueError):
        return
    package = path.relative_to(root).parent.parts
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            above = package[: len(package) + 1 - node.level] if node.level else ()
            base = ".".join([*above, *([node.module] if node.module else [])])
            yield base
            yield from (f"{base}.{alias.name}".lstrip(".") for alias in node.names)


def files_of(name: str, root: Path) -> Iterator[Path]:
    """The files under `root` that importing `name` runs: packages on the way and the module."""
    parts = name.split(".") if name else []
    for count in range(1, len(parts) + 1):
        place = root.joinpath(*parts[:count])
        for path in (place.with_suffix(".py"), place / "__init__.py"):
            if path.is_file():
                yield path

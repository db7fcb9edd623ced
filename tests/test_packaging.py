"""What a plain `pip install` carries: every package of every room."""

import tomllib
from pathlib import Path

ROOT = Path(__file__).parent.parent
ROOMS = ("capture", "proxy", "rewards", "learner", "rollouts", "hone")


def test_every_package_is_installed() -> None:
    listed = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["packages"]
    found = [path.parent for room in ROOMS for path in (ROOT / room).rglob("__init__.py")]
    assert sorted(listed) == sorted(".".join(path.relative_to(ROOT).parts) for path in found)

"""An agent command: split, looked up, and the environment that all its runs share."""

import re
import shlex
import shutil
import sys
from collections.abc import Mapping
from pathlib import Path

import msgspec

from capture.errors import ConfigError
from rollouts.settings import Settings

HONE_VARIABLES = "HONE_"  # the prefix of Hone's own configuration: never handed to an agent
BARE_PYTHON = ("python", "python3")
PYTHON = re.compile(r"python(3(\.\d+)?)?")


class Command(msgspec.Struct, frozen=True, kw_only=True):
    """An agent command, resolved. `file` is the absolute Python file where a fork can run it."""

    argv: list[str]
    cwd: str
    interpreter: str
    file: str | None


def parse_command(settings: Settings) -> Command:
    """Split and look up the agent command; `ConfigError` where it can never run."""
    cwd = Path(settings.cwd).absolute()
    if not cwd.is_dir():
        raise ConfigError(f"cwd: {cwd} is not a directory")
    try:
        argv = shlex.split(settings.agent)
    except ValueError as error:
        raise ConfigError(f"agent: cannot split {settings.agent!r}: {error}") from error
    if not argv:
        raise ConfigError("agent is empty: name the command that attempts one scenario")
    python = PYTHON.fullmatch(Path(argv[0]).name) is not None
    program = sys.executable if argv[0] in BARE_PYTHON else _find(argv[0], cwd)
    argv[0] = program
    file = cwd / argv[1] if python and len(argv) > 1 and argv[1].endswith(".py") else None
    if file is not None and not file.is_file():
        raise ConfigError(f"agent: there is no file {file}")
    if file is None and settings.launch == "fork":
        raise ConfigError(f'launch = "fork" needs an agent like "python file.py", not {settings.agent!r}')
    forked = file is not None and settings.launch != "command"
    return Command(argv=argv, cwd=str(cwd), interpreter=program, file=str(file) if forked else None)


def _find(program: str, cwd: Path) -> str:
    found = shutil.which(str(cwd / program) if "/" in program else program)
    if found is None:
        raise ConfigError(f"agent: there is no program {program!r}")
    return found


def agent_environ(environ: Mapping[str, str], settings: Settings) -> dict[str, str]:
    """The variables all agents share: ours without Hone's own, then those of the settings."""
    kept = {name: value for name, value in environ.items() if not name.startswith(HONE_VARIABLES)}
    return kept | settings.env

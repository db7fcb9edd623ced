"""Die on purpose, once, at a named point: how the fault tests prove that a crash costs nothing.

`HONE_FAULT=<part>:<point>:<marker file>` makes the part kill itself with SIGKILL when it reaches the
point for the first time; the marker, created just before, spares the process that is started next.
"""

import os
import signal
from collections.abc import Callable, Mapping
from pathlib import Path

from capture.errors import ConfigError

VARIABLE = "HONE_FAULT"


def killer(environ: Mapping[str, str], part: str) -> Callable[[str], None]:
    """What to call with the name of each point that the part passes."""
    wanted = environ.get(VARIABLE)
    if wanted is None:
        return lambda point: None
    try:
        fault_part, fault_point, marker = wanted.split(":", 2)
    except ValueError:
        raise ConfigError(f"{VARIABLE} must read <part>:<point>:<marker file>, not {wanted!r}") from None

    def reach(point: str) -> None:
        if (part, point) == (fault_part, fault_point) and not Path(marker).exists():
            Path(marker).touch()
            os.kill(os.getpid(), signal.SIGKILL)

    return reach

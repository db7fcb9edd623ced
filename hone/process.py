"""Linux process control: children that die with their parent, and groups that leave nobody behind."""

import ctypes
import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path

MARKER = "HONE_SUPERVISOR"
"""Environment variable that every process started by a supervisor inherits; its value is the token."""

_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36


def _prctl(option: int, value: int) -> None:
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(option, value, 0, 0, 0)


def adopt_orphans() -> None:
    """Become the parent of descendants whose own parent died."""
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)


def die_with_parent() -> Callable[[], None]:
    """A `preexec_fn`: SIGKILL for the child as soon as this process is gone. Survives exec."""
    parent = os.getpid()
    libc = ctypes.CDLL(None) if sys.platform == "linux" else None

    def arrange() -> None:
        if libc is not None:
            libc.prctl(_PR_SET_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0)
        if os.getppid() != parent:  # it died between fork and here
            os._exit(1)

    return arrange


def kill_group(pgid: int, signum: signal.Signals = signal.SIGKILL) -> bool:
    """Signal a process group; False if nobody is left in it."""
    try:
        os.killpg(pgid, signum)
    except (ProcessLookupError, PermissionError):
        return False
    return True


def started_ticks(pid: int) -> int | None:
    """When the process started, in clock ticks since boot; None if there is no such process.

    With the pid it names a process beyond doubt: pids are used again.
    """
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return None
    fields = stat[stat.rindex(")") + 2 :].split()
    return None if fields[0] in ("Z", "X") else int(fields[19])


def reap_orphans(known: set[int]) -> None:
    """Collect the exit of adopted children; those in `known` have a waiter of their own."""
    while True:
        try:
            ended = os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        except ChildProcessError:
            return
        if ended is None or ended.si_pid in known:
            return
        os.waitpid(ended.si_pid, 0)

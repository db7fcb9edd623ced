"""Ends what a supervisor leaves behind when it is killed and cannot clean up itself.

Run as a script with the supervisor's token; standard input is a pipe whose other end only the
supervisor holds. End of file means that it is gone: every process that carries the token in its
environment gets SIGKILL, whatever group or session it has moved to. Standard library only.
"""

import os
import signal
import sys
import time

ROUNDS_MAX = 100
PAUSE_S = 0.05


def marked(marker: bytes) -> list[int]:
    """Pids of the other processes whose initial environment holds `marker` (NAME=value)."""
    found = []
    for name in os.listdir("/proc"):
        if not name.isdigit() or int(name) == os.getpid():
            continue
        try:
            with open(f"/proc/{name}/environ", "rb") as file:
                environment = file.read()
        except OSError:  # gone, or somebody else's
            continue
        if marker in environment.split(b"\0"):
            found.append(int(name))
    return found


def sweep(marker: bytes, spare: frozenset[int] = frozenset()) -> int:
    """Kill marked processes until none is left; how many kills it took."""
    kills = 0
    for _ in range(ROUNDS_MAX):
        pids = [pid for pid in marked(marker) if pid not in spare]
        if not pids:
            break
        for pid in pids:
            try:
                os.kill(pid, signal.SIGKILL)
                kills += 1
            except ProcessLookupError:
                pass
        time.sleep(PAUSE_S)
    return kills


def main() -> None:
    """Wait for end of file, then sweep."""
    for name in ("SIGINT", "SIGTERM", "SIGHUP"):
        signal.signal(getattr(signal, name), signal.SIG_IGN)
    while sys.stdin.buffer.read(4096):
        pass
    sweep(sys.argv[1].encode())


if __name__ == "__main__":
    main()

"""Ends what a supervisor leaves behind when it is killed and cannot clean up itself.

Run as a script with the supervisor's marker; standard input is a pipe whose other end only the
supervisor holds. It writes `+<group>` for each process group that it starts and `-<group>` for each
that it ended. End of file means that the supervisor is gone: the groups that are left get SIGKILL,
and so does every process that carries the marker in its environment, whatever group it has moved to.
Both are needed: vLLM's engine process overwrites its environment, agents have groups of their own.
Standard library only.
"""

import contextlib
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
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
                kills += 1
        time.sleep(PAUSE_S)
    return kills


def main() -> None:
    """Keep the list of groups until end of file, then kill and sweep."""
    for name in ("SIGINT", "SIGTERM", "SIGHUP"):
        signal.signal(getattr(signal, name), signal.SIG_IGN)
    groups: set[int] = set()
    for line in sys.stdin.buffer:
        group = int(line[1:])
        if line.startswith(b"+"):
            groups.add(group)
        else:
            groups.discard(group)
    for group in groups:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(group, signal.SIGKILL)
    sweep(sys.argv[1].encode())


if __name__ == "__main__":
    main()

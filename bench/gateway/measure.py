"""What the kernel says of processes, and of the disk."""

import os
import subprocess
import time
from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path
from statistics import median

TICK_S = 1 / os.sysconf("SC_CLK_TCK")


def cpu_s(pids: Iterable[int]) -> float:
    """User and system seconds of these processes, with all their living descendants."""
    return sum(_cpu_s(pid) for pid in tree(pids))


def rss_bytes(pids: Iterable[int]) -> int:
    """Memory of these processes and their descendants that is theirs alone."""
    return sum(_private(pid) for pid in tree(pids))


def tree(pids: Iterable[int]) -> set[int]:
    """The processes and their descendants."""
    children: dict[int, list[int]] = defaultdict(list)
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and (stat := _stat(int(entry.name))):
            children[int(stat[1])].append(int(entry.name))
    found: set[int] = set()
    left = list(pids)
    while left:
        pid = left.pop()
        found.add(pid)
        left += children[pid]
    return found


def fsync_ms(directory: Path, times: int = 200) -> float:
    """Median of appending a call's bytes to a file and making them durable."""
    path = directory / "fsync"
    took = []
    with path.open("wb", buffering=0) as file:
        for _ in range(times):
            file.write(os.urandom(8192))
            began = time.perf_counter()
            os.fdatasync(file.fileno())
            took.append(time.perf_counter() - began)
    path.unlink()
    return 1000 * median(took)


def says(command: list[str]) -> str:
    """What a program prints of itself, on one line; empty if it cannot be run."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    except OSError:
        return ""
    return " ".join((done.stdout + done.stderr).split()) if done.returncode == 0 else ""


def _stat(pid: int) -> list[str]:
    """The fields of /proc/<pid>/stat from `state` on; empty if it is gone."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2].split()
    except OSError:
        return []


def _cpu_s(pid: int) -> float:
    stat = _stat(pid)
    return TICK_S * (int(stat[11]) + int(stat[12])) if stat else 0.0


def _private(pid: int) -> int:
    try:
        lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    except OSError:
        return 0
    fields = dict(line.split(":", 1) for line in lines[1:])
    return sum(1024 * int(fields[name].split()[0]) for name in ("Private_Clean", "Private_Dirty"))

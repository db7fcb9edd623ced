"""What the machine has."""

import os
from pathlib import Path
from typing import Literal

Hardware = Literal["cpu", "cuda"]


def detect() -> Hardware:
    """`cuda` where the NVIDIA driver has made its device."""
    return "cuda" if Path("/dev/nvidiactl").exists() else "cpu"


def cores() -> int:
    """Cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1

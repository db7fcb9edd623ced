"""What a learner that runs unattended lives through: memory that is too small, a disk that is full."""

import errno
import gc
from collections.abc import Sequence

import torch

from capture.errors import StoreError

FULL = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG})
FULL_STORE = "database or disk is full"  # SQLite's words
CPU_ALLOCATOR = "DefaultCPUAllocator"  # torch has no type of error for it


def out_of_memory(error: BaseException) -> bool:
    """Whether an allocation failed, on the device or on the CPU."""
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return True
    return isinstance(error, RuntimeError) and CPU_ALLOCATOR in str(error)


def halved(tokens: int, lengths: Sequence[int]) -> int | None:
    """Half of as many tokens a micro-batch as there can be; None where every sample goes alone already."""
    least = min(lengths)
    return None if tokens <= least else max(least, min(tokens, sum(lengths)) // 2)


def disk_full(error: BaseException) -> bool:
    """Whether a write failed for want of room; it may work later."""
    if isinstance(error, StoreError):
        return FULL_STORE in str(error)
    return isinstance(error, OSError) and error.errno in FULL


def release() -> None:
    """Give back what a failed pass still held."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()

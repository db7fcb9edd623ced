"""Token ids as bytes, int32 little-endian: prefixes of long prompts compare at memory speed."""

from array import array
from collections.abc import Sequence


def packed(token_ids: Sequence[int]) -> bytes:
    """Four bytes a token."""
    return array("i", token_ids).tobytes()


def shared_tokens(new: bytes, old: bytes, least: int = 0) -> int:
    """Length in tokens of the prefix that two packed lists share; -1 where it is below ``least``."""
    if new.startswith(old):
        return len(old) // 4 if len(old) >= 4 * least else -1
    if min(len(new), len(old)) < 4 * least or new[: 4 * least] != old[: 4 * least]:
        return -1
    low, high = least, min(len(new), len(old)) // 4
    while low < high:  # the prefix up to low is shared, the one up to high + 1 is not
        middle = (low + high + 1) // 2
        if new[4 * low : 4 * middle] == old[4 * low : 4 * middle]:
            low = middle
        else:
            high = middle - 1
    return low

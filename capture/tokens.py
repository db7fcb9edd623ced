"""Token ids as bytes, int32 little-endian: prefixes of long prompts compare at memory speed."""

from array import array
from collections.abc import Sequence


def packed(token_ids: Sequence[int]) -> bytes:
    """Four bytes a token."""
    return array("i", token_ids).tobytes()


def unpacked(tokens: bytes) -> list[int]:
    """The token ids that `packed` was given."""
    return array("i", tokens).tolist()


def shared_tokens(new: bytes, old: bytes) -> int:
    """Length in tokens of the prefix that two packed lists share."""
    if new.startswith(old):
        return len(old) // 4
    low, high = 0, min(len(new), len(old)) // 4
    while low < high:  # the prefix up to low is shared, the one up to high + 1 is not
        middle = (low + high + 1) // 2
        if new[4 * low : 4 * middle] == old[4 * low : 4 * middle]:
            low = middle
        else:
            high = middle - 1
    return low

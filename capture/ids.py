"""Ids that sort by the time they were made and cannot be guessed."""

import secrets
import time
from base64 import b32encode

_BASE32 = b"ABCDEFGHIJKLMNOPQRSTUVWXYZ234567"
_TO_CROCKFORD = bytes.maketrans(_BASE32, b"0123456789abcdefghjkmnpqrstvwxyz")  # no i, l, o, u


def new_id(prefix: str) -> str:
    """``<prefix>_`` and 26 characters: 48 bits of Unix milliseconds, then 80 random bits.

    Ids made in different milliseconds sort by time; an id is a name, never a credential.
    """
    return f"{prefix}_{encode((time.time_ns() // 1_000_000) << 80 | secrets.randbits(80))}"


def encode(number: int) -> str:
    """A 128-bit number as 26 characters of lowercase Crockford base 32, most significant first."""
    return b32encode(number.to_bytes(20)).translate(_TO_CROCKFORD)[-26:].decode()

"""Where to look for what must not be stored: everything that a store's files say, in every spelling."""

import re
from collections.abc import Iterator
from pathlib import Path

import msgspec
import zstandard

from capture.errors import Corrupt
from capture.frames import unpack
from capture.sqlite import SqliteStore
from capture.tokens import packed


def spellings(secret: str) -> Iterator[bytes]:
    """The secret as text, and as the ids of a tokenizer for which a character is a token."""
    ids = [ord(letter) for letter in secret]
    yield secret.encode()
    yield packed(ids)
    yield ", ".join(map(str, ids)).encode()
    yield ",".join(map(str, ids)).encode()


def everything(root: Path) -> bytes:
    """All bytes of a store's files and, once more, every value in them: unpacked, read back, unescaped."""
    found = [file.read_bytes() for file in sorted(root.glob("hone.db*"))]
    store = SqliteStore(root / "hone.db")
    try:
        for (table,) in store._rows("SELECT name FROM sqlite_master WHERE type = 'table'"):
            for row in store._rows(f'SELECT * FROM "{table}"'):
                found += [form for value in row for form in _forms(value)]
        for (rollout_id,) in store._rows("SELECT id FROM rollouts"):
            found += [msgspec.json.encode(call) for call in store.calls(rollout_id)]
            found += [form for raw in store.raw_calls(rollout_id) for form in (raw.request, raw.response)]
    finally:
        store.close()
    said = b"\0".join(found)
    return b"\0".join([said, *_unescaped(said)])


def is_stored(secret: str, root: Path) -> bool:
    stored = everything(root)
    return any(spelling in stored for spelling in spellings(secret))


def _forms(value: object) -> Iterator[bytes]:
    if isinstance(value, str):
        value = value.encode()
    if not isinstance(value, bytes):
        value = repr(value).encode()
    yield value
    try:
        yield zstandard.ZstdDecompressor().decompress(value, max_output_size=1 << 24)
        for raw in unpack(value):
            yield msgspec.json.encode(raw)
            yield raw.request + b"\0" + raw.response
    except (zstandard.ZstdError, Corrupt):
        return


def _unescaped(said: bytes) -> Iterator[bytes]:
    """The same as JSON inside JSON would say it, some levels down."""
    for _ in range(4):
        said = re.sub(rb"\\u00([0-7][0-9a-fA-F])", lambda match: bytes([int(match[1], 16)]), said)
        said = re.sub(rb'\\(["\\/])', rb"\1", said)
        yield said

"""Journal frames: many raw calls, MessagePack inside zstd level 1."""

from collections.abc import Sequence

import msgspec
import zstandard

from capture.errors import Corrupt
from capture.types import RawCall

_LEVEL = 1  # higher levels are slower here and no smaller
_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(list[RawCall])


def pack(records: Sequence[RawCall]) -> bytes:
    """The records as one compressed frame."""
    return zstandard.ZstdCompressor(level=_LEVEL, write_checksum=True).compress(_encoder.encode(records))


def unpack(frame: bytes) -> list[RawCall]:
    """The records of a frame, in the order they were packed; `Corrupt` if it does not read back."""
    try:
        return _decoder.decode(zstandard.ZstdDecompressor().decompress(frame))
    except (zstandard.ZstdError, msgspec.MsgspecError) as error:
        raise Corrupt(f"a journal frame does not read back: {error}") from error

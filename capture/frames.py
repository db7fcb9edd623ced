"""Journal frames: many raw calls, MessagePack inside zstd level 1."""

from collections.abc import Sequence

import msgspec
import zstandard

from capture.errors import Corrupt
from capture.types import RawCall

_LEVEL = 1  # higher levels are slower here and no smaller
_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(list[RawCall])


class Packer:
    """Makes frames, in one thread; its tables are made once."""

    def __init__(self) -> None:
        self._compressor = zstandard.ZstdCompressor(level=_LEVEL, write_checksum=True)

    def pack(self, records: Sequence[RawCall]) -> bytes:
        """The records as one compressed frame."""
        return self._compressor.compress(_encoder.encode(records))


def pack(records: Sequence[RawCall]) -> bytes:
    """The records as one compressed frame."""
    return Packer().pack(records)


def unpack(frame: bytes) -> list[RawCall]:
    """The records of a frame, in the order they were packed; `Corrupt` if it does not read back."""
    try:
        return _decoder.decode(zstandard.ZstdDecompressor().decompress(frame))
    except (zstandard.ZstdError, msgspec.MsgspecError) as error:
        raise Corrupt(f"a journal frame does not read back: {error}") from error

"""What is kept of a parsed call: only what its base, an earlier call of the rollout, does not have.

What a conversation says next is much like what it said last, down to a response that the client wrote
down anew: messages are compressed with the end of those before them, the *tail*, as the dictionary. A
tail is made of what is stored, so it is the same when a content is read as it was when it was written.
"""

from array import array
from hashlib import blake2b
from typing import Any

import msgspec
import zstandard

from capture.errors import Corrupt
from capture.tokens import packed
from capture.types import ModelCall

_COMPRESS_FROM = 512  # bytes; below it zstd without a dictionary gains nothing worth its time
_ZSTD_MAGIC = b"\x28\xb5\x2f\xfd"  # never begins a JSON array
_WITH_TAIL = b"\x01"  # before a zstd frame: the base's tail is its dictionary
_TAIL_BYTES = 8192


class Content(msgspec.Struct, frozen=True, kw_only=True, array_like=True):
    """A row of the table ``contents``, columns in order."""

    n: int
    base: int | None
    shared_tokens: int
    shared_messages: int
    prompt_count: int
    sampled_count: int
    tokens: bytes
    logprobs: bytes
    messages: bytes
    has_response: int
    tools: bytes | None
    model: str
    temperature: float


class Whole(msgspec.Struct, frozen=True):
    """A content with its base's part filled in: ``tokens`` are prompt + sampled."""

    tokens: list[int]
    messages: list[dict[str, Any]]  # request's, then the response if there is one
    tail: bytes


def pack_content(
    call: ModelCall,
    n: int,
    base: tuple[int, int, int] | None,
    base_tail: bytes | None,
    tools_hash: bytes | None,
) -> tuple[Content, bytes]:
    """The row, and its tail. ``base`` is (its n, shared tokens, shared messages); shared parts are cut off
    here. Without ``base_tail``, because there is no base or its tail was forgotten, the row is larger.
    """
    base_n, shared_tokens, shared_messages = base or (None, 0, 0)
    messages = call.messages if call.response is None else [*call.messages, call.response]
    plain = msgspec.json.encode(messages[shared_messages:])
    if shared_tokens >= len(call.prompt_ids):
        tokens = call.sampled_ids[shared_tokens - len(call.prompt_ids) :]
    else:
        tokens = call.prompt_ids[shared_tokens:] + call.sampled_ids
    content = Content(
        n=n,
        base=base_n,
        shared_tokens=shared_tokens,
        shared_messages=shared_messages,
        prompt_count=len(call.prompt_ids),
        sampled_count=len(call.sampled_ids),
        tokens=_narrow(packed(tokens)),
        logprobs=array("f", call.sampled_logprobs).tobytes(),
        messages=_squeeze(plain) if base_tail is None else _WITH_TAIL + _compress(plain, base_tail),
        has_response=int(call.response is not None),
        tools=tools_hash,
        model=call.model,
        temperature=call.temperature,
    )
    return content, _tail(base_tail, plain)


def unpack_content(content: Content, base: Whole | None) -> Whole:
    """The content whole again; `Corrupt` if lengths do not fit."""
    count = content.prompt_count + content.sampled_count - content.shared_tokens
    tokens = array("i", _widened(content.tokens, count)).tolist()
    base_tail = None
    if content.messages.startswith(_WITH_TAIL):
        if base is None:
            raise Corrupt(f"content {content.n}: compressed with the tail of a base that it does not have")
        base_tail = base.tail
    plain = _unsqueeze(content.messages, base_tail)
    messages = msgspec.json.decode(plain)
    if base is not None:
        tokens = base.tokens[: content.shared_tokens] + tokens
        messages = base.messages[: content.shared_messages] + messages
    if len(tokens) != content.prompt_count + content.sampled_count:
        raise Corrupt(f"content {content.n}: {len(tokens)} tokens stored")
    return Whole(tokens, messages, _tail(base_tail, plain))


def floats(body: bytes) -> list[float]:
    """The float32 values as Python floats, exactly."""
    return array("f", body).tolist()


def blob(tools: list[dict[str, Any]]) -> tuple[bytes, bytes] | None:
    """``(hash, body)`` of a call's tools for the table ``blobs``; None if it has none."""
    if not tools:
        return None
    body = _squeeze(msgspec.json.encode(tools))
    return blake2b(body, digest_size=16).digest(), body


def unpack_tools(body: bytes) -> list[dict[str, Any]]:
    """The tools that `blob` was given."""
    tools: list[dict[str, Any]] = msgspec.json.decode(_unsqueeze(body))
    return tools


def _tail(base_tail: bytes | None, plain: bytes) -> bytes:
    return ((base_tail or b"") + plain)[-_TAIL_BYTES:]


def _narrow(tokens: bytes) -> bytes:
    """Three bytes a token where all ids fit, four otherwise; their number tells which."""
    if any(tokens[3::4]):
        return tokens
    narrow = bytearray(tokens)
    del narrow[3::4]
    return bytes(narrow)


def _widened(tokens: bytes, count: int) -> bytes:
    """What `_narrow` was given, for so many tokens."""
    if len(tokens) != 3 * count:
        return tokens
    wide = bytearray(4 * count)
    for place in range(3):
        wide[place::4] = tokens[place::3]
    return bytes(wide)


def _squeeze(body: bytes) -> bytes:
    return body if len(body) < _COMPRESS_FROM else _compress(body)


def _compress(body: bytes, tail: bytes | None = None) -> bytes:
    return zstandard.ZstdCompressor(level=1, dict_data=_dictionary(tail)).compress(body)


def _unsqueeze(body: bytes, tail: bytes | None = None) -> bytes:
    if tail is not None:
        body = body.removeprefix(_WITH_TAIL)
    elif not body.startswith(_ZSTD_MAGIC):
        return body
    return zstandard.ZstdDecompressor(dict_data=_dictionary(tail)).decompress(body)


def _dictionary(tail: bytes | None) -> zstandard.ZstdCompressionDict | None:
    if tail is None:
        return None
    return zstandard.ZstdCompressionDict(tail, dict_type=zstandard.DICT_TYPE_RAWCONTENT)

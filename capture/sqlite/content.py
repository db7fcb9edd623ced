"""What is kept of a parsed call: only what its base, an earlier call of the rollout, does not have.

The prefixes that the two share are not stored at all. What follows is compressed with what the base says
where it parts from them as the dictionary: a history that was changed at its beginning, shortened, or
written down anew by the client costs what is new in it. The dictionary is made of stored bytes only, so it
is the same when a content is read as it was when it was written; each frame has a checksum all the same.
"""

from array import array
from hashlib import blake2b
from typing import Any, Final

import msgspec
import zstandard

from capture.errors import Corrupt
from capture.store import ContentBase
from capture.tokens import packed, unpacked
from capture.types import ModelCall

_COMPRESS_FROM = 512  # bytes; below it zstd without a dictionary gains nothing worth its time
_SHARED_BYTES = 8192  # of the end of the shared messages: the next ones are much like the last
_ZSTD_MAGIC = b"\x28\xb5\x2f\xfd"  # never begins a JSON array

# What the columns `token_form` and `message_form` say. Both are 0 in rows of the first schema.
PLAIN: Final = 0  # int32; JSON, or a zstd frame of it
NARROW: Final = 1  # tokens only: three bytes each
AFTER_BASE: Final = 2  # a zstd frame with a dictionary made of the base


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
    token_form: int
    message_form: int

    @property
    def token_count(self) -> int:
        """Tokens past the shared ones."""
        return self.prompt_count + self.sampled_count - self.shared_tokens


class Whole(msgspec.Struct, frozen=True):
    """A content with its base's part filled in, as bytes: prompt + sampled tokens, JSON of each message."""

    tokens: bytes
    messages: list[bytes]


class Readable(msgspec.Struct, frozen=True):
    """A whole content as objects; equal messages of a rollout are one object."""

    tokens: list[int]
    messages: list[dict[str, Any]]


def pack_content(
    call: ModelCall, n: int, base: tuple[int, ContentBase] | None, tools_hash: bytes | None
) -> Content:
    """The row for a call; ``base`` with the number of its own row."""
    base_n, of = base if base is not None else (None, None)
    shared_tokens, shared_messages = (of.shared_tokens, of.shared_messages) if of is not None else (0, 0)
    messages = call.messages if call.response is None else [*call.messages, call.response]
    left = max(0, shared_tokens - len(call.prompt_ids))
    tokens = packed(call.prompt_ids[shared_tokens:] + call.sampled_ids[left:])
    before = Whole(b"", []) if of is None else Whole(of.content.tokens, of.content.messages)
    token_form, token_body = _pack_tokens(tokens, _unshared_tokens(before, shared_tokens))
    message_form, message_body = _pack_messages(
        msgspec.json.encode(messages[shared_messages:]), _said_before(before, shared_messages)
    )
    return Content(
        n=n,
        base=base_n,
        shared_tokens=shared_tokens,
        shared_messages=shared_messages,
        prompt_count=len(call.prompt_ids),
        sampled_count=len(call.sampled_ids),
        tokens=token_body,
        logprobs=array("f", call.sampled_logprobs).tobytes(),
        messages=message_body,
        has_response=int(call.response is not None),
        tools=tools_hash,
        model=call.model,
        temperature=call.temperature,
        token_form=token_form,
        message_form=message_form,
    )


def unpack_content(content: Content, base: Whole | None) -> Whole:
    """The content whole again; `Corrupt` if it does not fit together."""
    before = base or Whole(b"", [])
    try:
        tokens = _unpack_tokens(content, before)
        messages = _unpack_messages(content, before)
    except (zstandard.ZstdError, msgspec.MsgspecError) as error:
        raise Corrupt(f"content {content.n}: {error}") from error
    if len(tokens) != 4 * content.token_count or len(before.tokens) < 4 * content.shared_tokens:
        raise Corrupt(
            f"content {content.n}: {len(tokens) // 4} tokens stored, {content.token_count} expected"
        )
    return Whole(
        before.tokens[: 4 * content.shared_tokens] + tokens,
        before.messages[: content.shared_messages] + messages,
    )


def readable(
    content: Content, whole: Whole, base: Readable | None, known: dict[bytes, dict[str, Any]]
) -> Readable:
    """The objects that ``whole`` is made of; ``base`` is what the content's base gave, ``known`` has the
    messages of the rollout that were read so far.
    """
    before = base or Readable([], [])
    tokens, messages = content.shared_tokens, content.shared_messages
    for message in whole.messages[messages:]:
        if message not in known:
            known[message] = msgspec.json.decode(message)
    said = [known[message] for message in whole.messages[messages:]]
    return Readable(
        before.tokens[:tokens] + unpacked(whole.tokens[4 * tokens :]), before.messages[:messages] + said
    )


def floats(body: bytes) -> list[float]:
    """The float32 values as Python floats, exactly."""
    return array("f", body).tolist()


def blob(tools: list[dict[str, Any]]) -> tuple[bytes, bytes] | None:
    """``(hash, body)`` of a call's tools for the table ``blobs``; None if it has none."""
    if not tools:
        return None
    body = _squeezed(msgspec.json.encode(tools))
    return blake2b(body, digest_size=16).digest(), body


def unpack_tools(body: bytes) -> list[dict[str, Any]]:
    """The tools that `blob` was given."""
    tools: list[dict[str, Any]] = msgspec.json.decode(_unsqueezed(body))
    return tools


# -- tokens ----------------------------------------------------------------------------------------


def _unshared_tokens(base: Whole, shared: int) -> bytes:
    return base.tokens[4 * shared :]


def _pack_tokens(tokens: bytes, dictionary: bytes) -> tuple[int, bytes]:
    """The smallest form of packed tokens."""
    form, body = PLAIN, tokens
    if not any(tokens[3::4]):
        narrow = bytearray(tokens)
        del narrow[3::4]
        form, body = NARROW, bytes(narrow)
    if dictionary and tokens:
        compressed = _compressed(tokens, dictionary)
        if len(compressed) < len(body):
            return AFTER_BASE, compressed
    return form, body


def _unpack_tokens(content: Content, base: Whole) -> bytes:
    if content.token_form == AFTER_BASE:
        return _decompressed(content.tokens, _unshared_tokens(base, content.shared_tokens))
    if content.token_form == PLAIN:
        return content.tokens
    wide = bytearray(4 * (len(content.tokens) // 3))
    for place in range(3):
        wide[place::4] = content.tokens[place::3]
    return bytes(wide)


# -- messages --------------------------------------------------------------------------------------


def _said_before(base: Whole, shared: int) -> bytes:
    """The end of the base's shared messages, and all of its others."""
    end = b""
    for message in reversed(base.messages[:shared]):
        end = message + b"," + end
        if len(end) >= _SHARED_BYTES:
            break
    return end[-_SHARED_BYTES:] + b",".join(base.messages[shared:])


def _pack_messages(plain: bytes, dictionary: bytes) -> tuple[int, bytes]:
    """The smallest form of a JSON array."""
    if dictionary:
        compressed = _compressed(plain, dictionary)
        if len(compressed) < len(plain):
            return AFTER_BASE, compressed
    return PLAIN, _squeezed(plain)


def _unpack_messages(content: Content, base: Whole) -> list[bytes]:
    if content.message_form == AFTER_BASE:
        plain = _decompressed(content.messages, _said_before(base, content.shared_messages))
    else:
        plain = _unsqueezed(content.messages)
    return [bytes(message) for message in msgspec.json.decode(plain, type=list[msgspec.Raw])]


# -- zstd ------------------------------------------------------------------------------------------


def _squeezed(body: bytes) -> bytes:
    return body if len(body) < _COMPRESS_FROM else zstandard.ZstdCompressor(level=1).compress(body)


def _unsqueezed(body: bytes) -> bytes:
    return zstandard.ZstdDecompressor().decompress(body) if body.startswith(_ZSTD_MAGIC) else body


def _compressed(body: bytes, dictionary: bytes) -> bytes:
    size = len(dictionary) + len(body)  # the window must reach back over all of the dictionary
    parameters = zstandard.ZstdCompressionParameters.from_level(3, source_size=size, write_checksum=True)
    return zstandard.ZstdCompressor(dict_data=_raw(dictionary), compression_params=parameters).compress(body)


def _decompressed(body: bytes, dictionary: bytes) -> bytes:
    return zstandard.ZstdDecompressor(dict_data=_raw(dictionary)).decompress(body)


def _raw(dictionary: bytes) -> zstandard.ZstdCompressionDict:
    return zstandard.ZstdCompressionDict(dictionary, dict_type=zstandard.DICT_TYPE_RAWCONTENT)

"""What is kept of a parsed call: only what its base, an earlier call of the rollout, does not have."""

from array import array
from hashlib import blake2b
from typing import Any

import msgspec
import zstandard

from capture.errors import Corrupt
from capture.types import ModelCall

_COMPRESS_FROM = 512  # bytes; below it zstd gains nothing worth its time
_ZSTD_MAGIC = b"\x28\xb5\x2f\xfd"  # never begins a JSON array


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


def pack_content(
    call: ModelCall, n: int, base: tuple[int, int, int] | None, tools_hash: bytes | None
) -> Content:
    """``base`` is (its n, shared tokens, shared messages); shared parts are cut off here."""
    base_n, shared_tokens, shared_messages = base or (None, 0, 0)
    messages = call.messages if call.response is None else [*call.messages, call.response]
    if shared_tokens >= len(call.prompt_ids):
        tokens = call.sampled_ids[shared_tokens - len(call.prompt_ids) :]
    else:
        tokens = call.prompt_ids[shared_tokens:] + call.sampled_ids
    return Content(
        n=n,
        base=base_n,
        shared_tokens=shared_tokens,
        shared_messages=shared_messages,
        prompt_count=len(call.prompt_ids),
        sampled_count=len(call.sampled_ids),
        tokens=array("i", tokens).tobytes(),
        logprobs=array("f", call.sampled_logprobs).tobytes(),
        messages=_squeeze(msgspec.json.encode(messages[shared_messages:])),
        has_response=int(call.response is not None),
        tools=tools_hash,
        model=call.model,
        temperature=call.temperature,
    )


def unpack_content(content: Content, base: Whole | None) -> Whole:
    """The content whole again; `Corrupt` if lengths do not fit."""
    tokens = array("i", content.tokens).tolist()
    messages = msgspec.json.decode(_unsqueeze(content.messages))
    if base is not None:
        tokens = base.tokens[: content.shared_tokens] + tokens
        messages = base.messages[: content.shared_messages] + messages
    if len(tokens) != content.prompt_count + content.sampled_count:
        raise Corrupt(f"content {content.n}: {len(tokens)} tokens stored")
    return Whole(tokens, messages)


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


def _squeeze(body: bytes) -> bytes:
    if len(body) < _COMPRESS_FROM:
        return body
    return zstandard.ZstdCompressor(level=1).compress(body)


def _unsqueeze(body: bytes) -> bytes:
    return zstandard.ZstdDecompressor().decompress(body) if body.startswith(_ZSTD_MAGIC) else body

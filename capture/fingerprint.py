"""Which task a conversation is about, where nobody named its scenario."""

from collections.abc import Mapping, Sequence
from hashlib import blake2b
from typing import Any

import msgspec

from capture.normalise import conversation_key, opening


def fingerprint(messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]]) -> str:
    """``fp-`` and 16 hex digits: equal where system prompt, tools and first user messages say the same.

    Only what comes before the first answer counts, so every call of a conversation has the same one. Tools
    are a set: clients that list them in another order ask the same.
    """
    offered = sorted(msgspec.json.encode(tool, order="sorted") for tool in tools)
    said = msgspec.json.encode(conversation_key(opening(messages)))
    digest = blake2b(digest_size=8)
    for part in (said, *offered):
        digest.update(len(part).to_bytes(8, "little") + part)
    return f"fp-{digest.hexdigest()}"

"""One raw call of the chat dialect, parsed: what was asked, what was sampled, may it be trained.

Whatever the bytes are, the answer is a `ModelCall`: broken ones carry a reason, never raise.
"""

import math
from collections.abc import Mapping
from typing import Any

import msgspec

from capture.completion import Completion, read_body, read_stream
from capture.parameters import DISTORTING, OLD_GRAMMARS, TEMPERATURE_MIN, TEXT_PARTS, distorts
from capture.reasons import (
    BAD_LOGPROBS,
    ERROR,
    GRAMMAR,
    LATE,
    LENGTH_MISMATCH,
    MEDIA,
    N_CHOICES,
    NO_TOKEN_IDS,
    NO_VERSION,
    PARTIAL,
    PROVIDER,
    REDACTED,
    SAMPLING,
    TEMPERATURE_ZERO,
    UNPARSABLE,
)
from capture.types import ModelCall, RawCall

HUNG_UP = 499  # the agent left; what the engine had answered by then is judged like any response
BROKEN = (msgspec.MsgspecError, ValueError, RecursionError)
_UNFINISHED = (None, "abort", "error")
_LOGPROB_MIN = -9999.0  # vLLM's stand-in for minus infinity and for "missing"
_LOGPROB_MAX = 1e-3  # zero, and room for rounding

Fields = Mapping[str, Any]


def parse(raw: RawCall, *, late: bool = False) -> ModelCall:
    """The call with its exact tokens; ``untrainable`` says why they may not be trained, if so.

    ``prompt_ids`` and ``sampled_ids`` are those that the engine reported, kept as context even where
    the call is untrainable, unless they contradict each other.
    """
    request = _request(raw.request)
    completion = _completion(raw)
    fields = {} if request is None else _sent(request, raw.changed)
    untrainable = _untrainable(raw, request, fields, completion) or (LATE if late else None)
    completion = _consistent(completion or Completion())
    return ModelCall(
        id=raw.id,
        rollout_id=raw.rollout_id,
        policy=raw.policy,
        policy_version=raw.policy_version,
        started_at=raw.started_at,
        ended_at=raw.ended_at,
        status=raw.status,
        model=raw.route,
        temperature=_temperature(fields),
        messages=_objects(request, "messages"),
        tools=_objects(request, "tools"),
        response=completion.message,
        finish_reason=completion.finish_reason,
        prompt_ids=completion.prompt_ids,
        sampled_ids=completion.token_ids,
        sampled_logprobs=completion.logprobs,
        prompt_tokens=completion.prompt_tokens or len(completion.prompt_ids),
        completion_tokens=completion.completion_tokens,
        retry_count=raw.retry_count,
        idempotency_key=raw.idempotency_key,
        body_hash=raw.body_hash,
        late=late,
        undelivered=raw.status == HUNG_UP,
        untrainable=untrainable,
        error=raw.error,
    )


def _untrainable(
    raw: RawCall, request: Fields | None, fields: Fields, completion: Completion | None
) -> str | None:
    """The first reason that applies, None if the call may be trained."""
    if raw.policy is None:
        return PROVIDER
    if raw.error is not None or (raw.status >= 400 and raw.status != HUNG_UP):
        return ERROR
    if request is None or completion is None:
        return PARTIAL if raw.status == HUNG_UP else UNPARSABLE
    if completion.choices > 1 or fields.get("n") not in (None, 1):
        return N_CHOICES
    if completion.finish_reason in _UNFINISHED:
        return PARTIAL
    return _distribution(fields) or (REDACTED if raw.redacted else _tokens(raw, completion))


def _distribution(fields: Fields) -> str | None:
    """Why the tokens did not come from softmax(logits / temperature), None if they did."""
    if _grammar(fields):
        return GRAMMAR
    if any(name in fields and distorts(name, fields[name]) for name in DISTORTING):
        return SAMPLING
    if _temperature(fields) < TEMPERATURE_MIN:
        return TEMPERATURE_ZERO
    return None if all(map(_is_text, _objects(fields, "messages"))) else MEDIA


def _grammar(fields: Fields) -> bool:
    """Whether a mask was put on sampling; vLLM also does that for strict tools at tool_choice auto."""
    if fields.get("tool_choice") not in (None, "auto", "none"):
        return True
    response_format = fields.get("response_format")
    free = isinstance(response_format, dict) and response_format.get("type") == "text"
    if response_format is not None and not free:
        return True
    if any(fields.get(name) is not None for name in ("structured_outputs", *OLD_GRAMMARS)):
        return True
    tools = _objects(fields, "tools")
    if not tools or fields.get("tool_choice") == "none":
        return False
    return fields.get("parallel_tool_calls") is False or any(
        isinstance(tool.get("function"), dict) and tool["function"].get("strict") for tool in tools
    )


def _is_text(message: Fields) -> bool:
    """Whether a message is nothing but tokens: an image's are not what the model read."""
    content = message.get("content")
    parts = content if isinstance(content, list) else []
    return all(
        part.get("type", "text" if "text" in part else None) in TEXT_PARTS
        for part in parts
        if isinstance(part, dict)
    )


def _tokens(raw: RawCall, completion: Completion) -> str | None:
    """Why what was sampled is not known exactly, None if it is."""
    if raw.policy_version is None:
        return NO_VERSION
    if not completion.prompt_ids or not completion.token_ids:
        return NO_TOKEN_IDS
    if not len(completion.token_ids) == len(completion.logprobs) == completion.completion_tokens:
        return LENGTH_MISMATCH
    if not all(_LOGPROB_MIN < logprob < _LOGPROB_MAX for logprob in completion.logprobs):
        return BAD_LOGPROBS
    return None


def _consistent(completion: Completion) -> Completion:
    """Without ids that the engine's own count contradicts; logprobs only where each id has one."""
    count = max(completion.completion_tokens, len(completion.token_ids))
    completion.completion_tokens, counted = count, completion.completion_tokens
    if counted not in (0, len(completion.token_ids)):
        completion.token_ids = []
    if len(completion.logprobs) != len(completion.token_ids) or not all(
        map(math.isfinite, completion.logprobs)
    ):
        completion.logprobs = []
    return completion


def _request(body: bytes) -> dict[str, Any] | None:
    try:
        request = msgspec.json.decode(body)
    except BROKEN:
        return None
    return request if isinstance(request, dict) and isinstance(request.get("messages"), list) else None


def _sent(request: dict[str, Any], changed: Fields) -> Fields:
    """The request as it went upstream, as far as its top-level keys."""
    return {**request, **changed} if changed else request


def _completion(raw: RawCall) -> Completion | None:
    """What the upstream answered; None if its bytes are not a completion."""
    try:
        return read_stream(raw.response) if raw.stream else read_body(raw.response)
    except BROKEN:
        return None


def _temperature(fields: Fields) -> float:
    """What the engine divided the logits by; its default is 1."""
    value = fields.get("temperature")
    return float(value) if isinstance(value, int | float) and math.isfinite(value) else 1.0


def _objects(fields: Fields | None, name: str) -> list[dict[str, Any]]:
    """The objects in a list of the request; what is no object there is left out."""
    value = None if fields is None else fields.get(name)
    return [item for item in value if isinstance(item, dict)] if isinstance(value, list) else []

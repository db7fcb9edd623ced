"""Real records for the tests of `capture`: small, and every field that matters can be said."""

import json
from typing import Any

import msgspec

from capture.ids import new_id
from capture.store import ContentBase, ParentContent
from capture.tokens import packed
from capture.types import ModelCall, RawCall, Rollout

POLICY = "policy"


def rollout(**fields: Any) -> Rollout:
    return Rollout(**{"id": new_id("r"), "key_id": "k", "mode": "train", **fields})


def raw_call(rollout_id: str, **fields: Any) -> RawCall:
    return RawCall(
        **{
            "id": new_id("c"),
            "rollout_id": rollout_id,
            "key_id": "k",
            "mode": "train",
            "attribution": "path",
            "route": POLICY,
            "upstream": "engine-1",
            "policy": POLICY,
            "policy_version": 0,
            "started_at": 10.0,
            "ended_at": 11.0,
            "status": 200,
            "request": request(),
            "response": response([1, 2], [3, 4]),
            "body_hash": b"h" * 16,
            **fields,
        }
    )


def request(messages: list[dict[str, Any]] | None = None, **fields: Any) -> bytes:
    messages = [{"role": "user", "content": "go"}] if messages is None else messages
    return json.dumps({"model": POLICY, "messages": messages, **fields}).encode()


def response(prompt_ids: list[int], sampled_ids: list[int], content: str = "hi", **fields: Any) -> bytes:
    """A body as vLLM 0.32 sends it with `return_token_ids` and `logprobs`; token i has logprob -i/8."""
    choice = {
        "index": 0,
        "message": {"role": "assistant", "content": content, "refusal": None, "tool_calls": []},
        "logprobs": {"content": logprobs(sampled_ids)},
        "finish_reason": "stop",
        "stop_reason": None,
        "token_ids": sampled_ids,
    }
    usage = {"prompt_tokens": len(prompt_ids), "completion_tokens": len(sampled_ids), "total_tokens": 0}
    body = {"id": "chatcmpl-1", "object": "chat.completion", "created": 1, "model": "policy@v0"}
    return json.dumps(
        {**body, "choices": [choice], "usage": usage, "prompt_token_ids": prompt_ids, **fields}
    ).encode()


def logprobs(token_ids: list[int]) -> list[dict[str, Any]]:
    return [{"token": "t", "logprob": -id / 8, "bytes": [116], "top_logprobs": []} for id in token_ids]


def stream(
    prompt_ids: list[int], deltas: list[tuple[dict[str, Any], list[int]]], finish: str | None = "stop"
) -> bytes:
    """Server-sent chunks as vLLM 0.32 sends them: prompt ids first, then ids and logprobs a chunk."""

    def chunk(choices: list[dict[str, Any]], **fields: Any) -> bytes:
        body = {"id": "chatcmpl-1", "object": "chat.completion.chunk", "created": 1, "model": "policy@v0"}
        return b"data: " + json.dumps({**body, "choices": choices, **fields}).encode() + b"\n\n"

    first = {"role": "assistant", "content": ""}
    parts = [chunk([{"index": 0, "delta": first, "finish_reason": None}], prompt_token_ids=prompt_ids)]
    for index, (delta, ids) in enumerate(deltas):
        last = finish if index == len(deltas) - 1 else None
        parts.append(
            chunk(
                [
                    {
                        "index": 0,
                        "delta": delta,
                        "logprobs": {"content": logprobs(ids)},
                        "finish_reason": last,
                        "token_ids": ids,
                    }
                ]
            )
        )
    if finish is not None:
        count = sum(len(ids) for _, ids in deltas)
        usage = {"prompt_tokens": len(prompt_ids), "completion_tokens": count}
        parts += [chunk([], usage=usage), b"data: [DONE]\n\n"]
    return b"".join(parts)


def model_call(rollout_id: str = "r_1", **fields: Any) -> ModelCall:
    """A trainable call; give prompt_ids and sampled_ids. Token i has logprob -i/8."""
    sampled = fields.get("sampled_ids", [3, 4])
    return ModelCall(
        **{
            "id": new_id("c"),
            "rollout_id": rollout_id,
            "policy": POLICY,
            "policy_version": 0,
            "started_at": 10.0,
            "ended_at": 11.0,
            "status": 200,
            "messages": [{"role": "user", "content": "go"}],
            "response": {"role": "assistant", "content": "hi"},
            "finish_reason": "stop",
            "prompt_ids": [1, 2],
            "sampled_ids": sampled,
            "sampled_logprobs": [-id / 8 for id in sampled],
            "prompt_tokens": len(fields.get("prompt_ids", [1, 2])),
            "completion_tokens": len(sampled),
            "body_hash": new_id("h").encode(),
            **fields,
        }
    )


def content_of(call: ModelCall) -> ParentContent:
    """What ingest knows of a call that is stored."""
    messages = call.messages if call.response is None else [*call.messages, call.response]
    tokens = packed(call.prompt_ids + call.sampled_ids)
    return ParentContent(call.id, tokens, [msgspec.json.encode(message) for message in messages])


def base_of(call: ModelCall, shared_tokens: int, shared_messages: int) -> ContentBase:
    return ContentBase(content_of(call), shared_tokens, shared_messages)

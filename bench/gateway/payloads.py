"""The requests that agents send here and the answers that the stub engine gives; both made of one seed.

A marker in the last message says which answer belongs to a request: the kind, one of `VARIANTS` texts and
the turn. All variants share system prompt and tools, as the calls of one agent do, and differ in the rest.

big     12 KB with four tools; 26 KB: 1,500 prompt ids, 150 sampled ids with logprobs
small   76 bytes; 1.9 KB
stream  1 KB; 50 sampled tokens in an event each
turn    conversations of `TURNS` calls that grow to the size of a big one, a tool call in every answer
slow    an answer that never comes
"""

import json
import random
from typing import Any, Literal

Kind = Literal["big", "small", "stream", "turn", "slow"]

MODEL = "policy"
VARIANTS = 32
TURNS = 8
EVENTS = 50
MARK = b"case:"
TOOL_ID = "chatcmpl-tool-" + "0" * 32  # where the stub puts an id of its own
TASK = "task-" + "0" * 16  # where the client puts a name of its own
_KINDS: dict[str, Kind] = {"b": "big", "s": "small", "e": "stream", "t": "turn", "l": "slow"}
_TEXT = """
the of and to in is it for on with as at by be this that from or an are not have was will can file test error
value list return class number index path result agent tool call search read write run check fix change line
code data user model page order price city
"""
_WORDS = _TEXT.split()


def mark(kind: Kind, variant: int, turn: int = 0) -> str:
    """What a request's last message says of its answer."""
    return f"case:{'e' if kind == 'stream' else 'l' if kind == 'slow' else kind[0]}{variant:02}{turn:02}"


def marked(body: bytes) -> tuple[Kind, int, int]:
    """What `mark` wrote."""
    at = body.rfind(MARK) + len(MARK)
    return _KINDS[chr(body[at])], int(body[at + 1 : at + 3]), int(body[at + 3 : at + 5])


def request(kind: Kind, variant: int, turn: int = 0) -> bytes:
    """The body of a request; of a turn it holds `TASK` and a `TOOL_ID` for each earlier answer."""
    user = mark(kind, variant, turn)
    if kind in ("small", "slow"):
        return _body(messages=[{"role": "user", "content": f"{user} hi all"}])
    rng = random.Random(variant)
    system = {"role": "system", "content": _text(random.Random(-1), 2500)}
    if kind == "stream":
        said = [{**system, "content": system["content"][:600]}, {"role": "user", "content": f"Go on. {user}"}]
        return _body(messages=said, stream=True)
    said = [system, {"role": "user", "content": f"{TASK} {_text(rng, 700)} {mark(kind, variant)}"}]
    turns = TURNS - 1 if kind == "big" else turn
    for at in range(1, turns + 1):
        said.append(_answer(kind, variant, at - 1))
        said.append(
            {
                "role": "tool",
                "tool_call_id": TOOL_ID,
                "content": f"{_text(rng, 300)} {mark(kind, variant, at if kind == 'turn' else 0)}",
            }
        )
    return _body(messages=said, tools=[_tool(n) for n in range(4)])


def answer(kind: Kind, variant: int, turn: int = 0) -> bytes:
    """The body of a whole answer, with ids and logprobs as vLLM gives them."""
    prompt, sampled = (9, 13) if kind == "small" else (1500, 150) if kind == "big" else (700 + 100 * turn, 60)
    rng = random.Random(f"{kind} {variant} {turn}")
    ids = [rng.randrange(151_643) for _ in range(sampled)]
    choice = {
        "index": 0,
        "message": _answer(kind, variant, turn),
        "logprobs": {"content": [_logprob(rng) for _ in ids], "refusal": None},
        "finish_reason": "tool_calls" if kind == "turn" else "stop",
        "stop_reason": None,
        "token_ids": ids,
    }
    usage = {"prompt_tokens": prompt, "total_tokens": prompt + sampled, "completion_tokens": sampled}
    return _json(
        {
            **_head("chat.completion"),
            "choices": [choice],
            "service_tier": None,
            "system_fingerprint": None,
            "usage": usage,
            "prompt_logprobs": None,
            "prompt_token_ids": _prompt_ids(kind, variant, turn, prompt),
            "kv_transfer_params": None,
        }
    )


def events(variant: int) -> list[bytes]:
    """The server-sent chunks of a streamed answer: the role, a token each, usage, the end."""
    rng = random.Random(variant)
    head = _head("chat.completion.chunk")
    prompt_ids = [rng.randrange(151_643) for _ in range(200)]

    def chunk(delta: dict[str, Any], finish: str | None, **more: Any) -> bytes:
        choice = {"index": 0, "delta": delta, "logprobs": None, "finish_reason": finish, **more}
        return b"data: " + _json({**head, "choices": [choice]}) + b"\n\n"

    first = {
        **head,
        "prompt_token_ids": prompt_ids,
        "choices": [
            {
                "index": 0,
                "delta": {"role": "assistant", "content": ""},
                "logprobs": None,
                "finish_reason": None,
            }
        ],
    }
    found = [b"data: " + _json(first) + b"\n\n"]
    for at in range(EVENTS):
        logprobs = {"content": [_logprob(rng)]}
        finish = "stop" if at == EVENTS - 1 else None
        found.append(
            chunk(
                {"content": rng.choice(_WORDS) + " "},
                finish,
                logprobs=logprobs,
                token_ids=[rng.randrange(151_643)],
            )
        )
    usage = {"prompt_tokens": 200, "total_tokens": 200 + EVENTS, "completion_tokens": EVENTS}
    found.append(b"data: " + _json({**head, "choices": [], "usage": usage}) + b"\n\n" + b"data: [DONE]\n\n")
    return found


def _prompt_ids(kind: Kind, variant: int, turn: int, count: int) -> list[int]:
    """Ids of a prompt; of a turn they go on from those of the turn before and what was sampled there."""
    rng = random.Random(f"prompt {variant}")
    shared = random.Random("system")
    ids = [shared.randrange(151_643) for _ in range(min(500, count))]
    if kind != "turn":
        return ids + [rng.randrange(151_643) for _ in range(count - len(ids))]
    ids += [rng.randrange(151_643) for _ in range(200)]
    for at in range(turn):
        own = random.Random(f"{kind} {variant} {at}")
        ids += [own.randrange(151_643) for _ in range(60)] + [rng.randrange(151_643) for _ in range(40)]
    return ids


def _answer(kind: Kind, variant: int, turn: int) -> dict[str, Any]:
    """The assistant's message."""
    rng = random.Random(f"answer {variant} {turn}")
    if kind in ("big", "small") and turn == 0:
        return {"role": "assistant", "content": _text(rng, 60 if kind == "small" else 900)}
    arguments = json.dumps({"path": _text(rng, 30), "query": _text(rng, 120)})
    function = {"name": f"tool_{turn % 4}", "arguments": arguments}
    return {
        "role": "assistant",
        "content": None,
        "tool_calls": [{"id": TOOL_ID, "type": "function", "function": function}],
    }


def _tool(n: int) -> dict[str, Any]:
    rng = random.Random(f"tool {n}")
    properties = {name: {"type": "string", "description": _text(rng, 120)} for name in ("path", "query")}
    function = {
        "name": f"tool_{n}",
        "description": _text(rng, 350),
        "parameters": {"type": "object", "properties": properties, "required": ["path"]},
    }
    return {"type": "function", "function": function}


def _logprob(rng: random.Random) -> dict[str, Any]:
    word = rng.choice(_WORDS)
    return {"token": word, "logprob": -rng.expovariate(2), "bytes": list(word.encode()), "top_logprobs": []}


def _head(kind: str) -> dict[str, Any]:
    return {"id": "chatcmpl-" + "5f" * 16, "object": kind, "created": 1_790_000_000, "model": MODEL}


def _body(**fields: Any) -> bytes:
    return _json({"model": MODEL, **fields})


def _text(rng: random.Random, size: int) -> str:
    words: list[str] = []
    while size > 0:
        words.append(rng.choice(_WORDS))
        size -= len(words[-1]) + 1
    return " ".join(words)


def _json(value: Any) -> bytes:
    return json.dumps(value, separators=(",", ":")).encode()

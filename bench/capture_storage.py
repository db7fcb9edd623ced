"""How much the store keeps of long rollouts, against the tokens and messages in them that differ.

One rollout is 200 calls of an agent that calls a tool every turn and replays its conversation, up to a
context of 30,000 tokens: faithfully, or with arguments written anew and content dropped as pydantic-ai
and verifiers do (then every response is two messages: as sampled, as replayed). It goes the way of real
traffic: journal frames, ingest, settling, frames pruned. Bytes are those of SQLite's pages, by table.

A token is 4 bytes, a message its JSON; each counts once a rollout. Last line: one JSON object.
"""

import argparse
import json
import random
import re
import tempfile
import time
from pathlib import Path
from typing import Any

import apsw

from capture.frames import pack
from capture.graph import build, fates
from capture.ids import new_id
from capture.ingest import Ingester
from capture.sqlite import SqliteStore
from capture.types import ModelCall, RawCall, Rollout

POLICY = "policy"
WORDS = sorted(set(re.findall("[a-z]{2,6}", Path(__file__).read_text())))
PLAY = {"type": "function", "function": {"name": "run", "parameters": {"type": "object", "properties": {}}}}


def text(rng: random.Random, tokens: int) -> str:
    """Words of about this many tokens, 4 characters each."""
    return " ".join(rng.choice(WORDS) for _ in range(max(1, round(tokens / 1.3))))


def ids(rng: random.Random, count: int) -> list[int]:
    return [rng.randrange(150_000) for _ in range(count)]


def rollout_calls(
    rollout_id: str, calls: int, context: int, replay: str, rng: random.Random
) -> list[RawCall]:
    """One agent, its tool called every turn; half of the context is sampled, half is tool results."""
    turn = context // (calls + 2)
    messages: list[dict[str, Any]] = [
        {"role": "system", "content": text(rng, 2 * turn - 20)},
        {"role": "user", "content": text(rng, 20)},
    ]
    prompt = ids(rng, 2 * turn)
    found = []
    for index in range(calls):
        sampled = ids(rng, turn // 2)
        arguments = json.dumps({"command": text(rng, turn // 2 - 10)})
        tool_id = f"chatcmpl-tool-{rng.randbytes(16).hex()}"
        found.append(raw_call(rollout_id, index, messages, prompt, sampled, tool_id, arguments))
        if replay == "rewritten":
            arguments = json.dumps(json.loads(arguments), separators=(",", ":"))
        function = {"name": "run", "arguments": arguments}
        call = {"id": tool_id, "type": "function", "function": function}
        answer = {"role": "assistant", "tool_calls": [call]}
        if replay == "faithful":
            answer = {"role": "assistant", "content": None, "tool_calls": [call]}
        result = {"role": "tool", "tool_call_id": tool_id, "content": text(rng, turn - turn // 2 - 5)}
        messages = [*messages, answer, result]
        prompt = prompt + sampled + ids(rng, turn - turn // 2)
    return found


def raw_call(
    rollout_id: str,
    index: int,
    messages: list[dict[str, Any]],
    prompt: list[int],
    sampled: list[int],
    tool_id: str,
    arguments: str,
) -> RawCall:
    function = {"name": "run", "arguments": arguments}
    message = {
        "role": "assistant",
        "content": None,
        "tool_calls": [{"id": tool_id, "type": "function", "function": function}],
    }
    choice = {
        "index": 0,
        "message": message,
        "finish_reason": "tool_calls",
        "token_ids": sampled,
        "logprobs": {"content": [{"logprob": -(id % 1000) / 100} for id in sampled]},
    }
    usage = {"prompt_tokens": len(prompt), "completion_tokens": len(sampled)}
    answer = {"choices": [choice], "usage": usage, "prompt_token_ids": prompt}
    request = json.dumps({"model": POLICY, "messages": messages, "tools": [PLAY]}).encode()
    return RawCall(
        id=new_id("c"),
        rollout_id=rollout_id,
        key_id="local",
        mode="train",
        attribution="path",
        route=POLICY,
        upstream="engine-1",
        policy=POLICY,
        policy_version=0,
        started_at=1.0 + index,
        ended_at=1.5 + index,
        status=200,
        request=request,
        response=json.dumps(answer).encode(),
        body_hash=random.Random(request).randbytes(16),
    )


def distinct(calls: list[ModelCall]) -> tuple[int, int, int]:
    """Bytes of one rollout's distinct tokens, of the logprobs of the sampled ones, of its messages."""
    tokens = 0
    seen: list[list[int]] = []
    for call in calls:
        whole = call.prompt_ids + call.sampled_ids
        tokens += len(whole) - max((common(whole, other) for other in seen), default=0)
        seen = [other for other in seen if whole[: len(other)] != other] + [whole]
    said = {
        json.dumps(message, separators=(",", ":"))
        for call in calls
        for message in [*call.messages, *([call.response] if call.response else [])]
    }
    sampled = sum(len(call.sampled_ids) for call in calls)
    return 4 * tokens, 4 * sampled, sum(map(len, said))


def common(left: list[int], right: list[int]) -> int:
    for place, (one, other) in enumerate(zip(left, right, strict=False)):
        if one != other:
            return place
    return min(len(left), len(right))


def pages(path: Path) -> dict[str, int]:
    """Bytes of the pages of each table, its indexes included, and of those that are free."""
    db = apsw.Connection(str(path), flags=apsw.SQLITE_OPEN_READONLY)
    found: dict[str, int] = {}
    owners = dict(db.execute("SELECT name, tbl_name FROM sqlite_master"))
    for name, size in db.execute("SELECT name, sum(pgsize) FROM dbstat GROUP BY name"):
        owner = owners.get(name, name)
        found[owner] = found.get(owner, 0) + size
    page = next(db.execute("PRAGMA page_size"))[0]
    found["(free)"] = next(db.execute("PRAGMA freelist_count"))[0] * page
    db.close()
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rollouts", type=int, default=8)
    parser.add_argument("--calls", type=int, default=200)
    parser.add_argument("--context", type=int, default=30_000)
    parser.add_argument("--replay", choices=("faithful", "rewritten"), default="faithful")
    parser.add_argument("--store", type=Path, help="keep the store here")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as directory:
        path = args.store or Path(directory) / "store.sqlite"
        store = SqliteStore(path)
        store._db.execute("PRAGMA synchronous = OFF")  # bytes are measured, not time
        store.start_run("run1", POLICY, {})
        store._db.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchall()
        before = pages(path)
        opened = [
            store.open_rollout(Rollout(id=new_id("r"), key_id="local", mode="train"))
            for _ in range(args.rollouts)
        ]
        records = [
            rollout_calls(one.id, args.calls, args.context, args.replay, random.Random(seed))
            for seed, one in enumerate(opened)
        ]
        frames = 0
        for turn in zip(*records, strict=True):  # the rollouts take turns: a frame holds one call of each
            frame = pack(turn)
            frames += len(frame)
            store.commit_calls(frame, turn, [])
        ingester = Ingester(store)
        began = time.perf_counter()
        while ingester.step():
            pass
        ingest_s = time.perf_counter() - began
        sums = [0, 0, 0]
        for one in opened:
            store.seal_rollout(one.id, "completed")
            calls = store.calls(one.id)
            store.settle(one.id, fates(build(calls)))
            sums = [total + more for total, more in zip(sums, distinct(calls), strict=True)]
        store.prune_frames(-1.0)
        store._db.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchall()
        assert store.verify() == []
        store.close()
        after = pages(path)
    report(args, before, after, sums, frames, ingest_s)


def report(
    args: argparse.Namespace,
    before: dict[str, int],
    after: dict[str, int],
    sums: list[int],
    frames: int,
    ingest_s: float,
) -> None:
    tables = {name: size - before.get(name, 0) for name, size in after.items()}
    free = tables.pop("(free)")
    tables = {name: size for name, size in tables.items() if size}
    tokens, logprobs, messages = sums
    stored = sum(tables.values())
    for name, size in sorted(tables.items(), key=lambda item: -item[1]):
        print(f"{name:12} {size:12,}  {size / (tokens + messages):.3f}")
    print(f"{'stored':12} {stored:12,}")
    print(f"{'distinct':12} {tokens + messages:12,}  tokens {tokens:,}, messages {messages:,}")
    result = {
        "ratio": round(stored / (tokens + messages), 3),
        "ratio_with_logprobs": round(stored / (tokens + messages + logprobs), 3),
        "replay": args.replay,
        "rollouts": args.rollouts,
        "calls": args.calls,
        "context": args.context,
        "stored_bytes": stored,
        "distinct_token_bytes": tokens,
        "distinct_message_bytes": messages,
        "logprob_bytes": logprobs,
        "by_table": tables,
        "frame_bytes_once": frames,
        "free_bytes": free,
        "ingest_s": round(ingest_s, 2),
    }
    print(json.dumps(result))


if __name__ == "__main__":
    main()

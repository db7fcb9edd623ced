"""How much the store keeps of long rollouts, against the tokens and messages in them that differ.

One rollout is 200 calls of an agent that calls a tool every turn and replays its conversation, up to a
context of 30,000 tokens, in one of three ways (the conversation is the same):

faithful   as it was sampled;
rewritten  arguments written anew and content dropped, as pydantic-ai and verifiers do, and two tokens of
           every response re-tokenised: no call continues another;
window     a system prompt that counts the turns, and only the last 100 of them: no two prompts begin alike.

It goes the way of real traffic: journal frames, ingest, settling, frames pruned. Stored bytes are those of
SQLite's pages, indexes included. Of what differs a token is 4 bytes, counted where it was made first, and a
message its JSON, counted once however it was written down. Last line: one JSON object.
"""

import argparse
import json
import random
import re
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import apsw
import msgspec

from capture.frames import pack
from capture.graph import build, fates, samples
from capture.ids import new_id
from capture.ingest import Ingester
from capture.normalise import message_key
from capture.sqlite import SqliteStore
from capture.types import RawCall, Rollout

POLICY = "policy"
REPLAYS = ("faithful", "rewritten", "window")
WORDS = sorted(set(re.findall("[a-z]{2,6}", Path(__file__).read_text())))
RUN = {"type": "function", "function": {"name": "run", "parameters": {"type": "object", "properties": {}}}}

Message = dict[str, Any]


class Agent:
    """Makes the calls of one rollout, and counts what differs in them."""

    def __init__(self, rollout_id: str, calls: int, context: int, replay: str, seed: int) -> None:
        self.rollout_id = rollout_id
        self.calls = calls
        self.replay = replay
        self.tokens = 0  # made so far, sampled and not
        self.said: dict[Any, int] = {}  # messages -> bytes
        self._rng = random.Random(seed)
        self._kept = calls // 2 if replay == "window" else calls  # turns that fit the context
        self._turn = context // (calls + 2)  # tokens of a turn; half are sampled

    def play(self) -> Iterator[RawCall]:
        system, system_ids = self._text(2 * self._turn - 20), self._ids(2 * self._turn - 20)
        user, user_ids = self._message({"role": "user", "content": self._text(20)}), self._ids(20)
        turns: list[tuple[list[Message], list[int]]] = []
        for index in range(self.calls):
            kept = turns[-self._kept :]
            head = f"Turn {index}. {system}" if self.replay == "window" else system
            first = self._ids(1) if self.replay == "window" else []
            messages = [self._message({"role": "system", "content": head}, bytes_once=system), user]
            messages += [message for said, _ in kept for message in said]
            prompt = first + system_ids + user_ids + [id for _, ids in kept for id in ids]
            response, sampled = self._response(), self._ids(self._turn // 2)
            yield self._call(index, messages, prompt, response, sampled)
            turns.append(self._replayed(response, sampled))

    def _response(self) -> Message:
        function = {"name": "run", "arguments": json.dumps({"command": self._text(self._turn // 2 - 10)})}
        tool_id = f"chatcmpl-tool-{self._rng.randbytes(16).hex()}"
        call = {"id": tool_id, "type": "function", "function": function}
        return self._message({"role": "assistant", "content": None, "tool_calls": [call]})

    def _replayed(self, response: Message, sampled: list[int]) -> tuple[list[Message], list[int]]:
        """What the agent sends of a turn from now on, and its tokens."""
        (call,) = response["tool_calls"]
        count = self._turn - self._turn // 2
        content = self._text(count - 5)
        result = self._message({"role": "tool", "tool_call_id": call["id"], "content": content})
        if self.replay == "rewritten":
            arguments = json.dumps(json.loads(call["function"]["arguments"]), separators=(",", ":"))
            call = {**call, "function": {**call["function"], "arguments": arguments}}
            response = self._message({"role": "assistant", "tool_calls": [call]})
            sampled = [*sampled[:5], *self._ids(2), *sampled[7:]]
        return [response, result], sampled + self._ids(count)

    def _text(self, tokens: int) -> str:
        """Words of about this many tokens, 4 characters each."""
        return " ".join(self._rng.choice(WORDS) for _ in range(max(1, round(tokens / 1.3))))

    def _ids(self, count: int) -> list[int]:
        self.tokens += count
        return [self._rng.randrange(150_000) for _ in range(count)]

    def _message(self, message: Message, bytes_once: str | None = None) -> Message:
        key = bytes_once or message_key(message)
        self.said.setdefault(key, len(msgspec.json.encode(message)))
        return message

    def _call(
        self, index: int, messages: list[Message], prompt: list[int], response: Message, sampled: list[int]
    ) -> RawCall:
        choice = {
            "index": 0,
            "message": response,
            "finish_reason": "tool_calls",
            "token_ids": sampled,
            "logprobs": {"content": [{"logprob": -(id % 1000) / 100} for id in sampled]},
        }
        usage = {"prompt_tokens": len(prompt), "completion_tokens": len(sampled)}
        answer = {"choices": [choice], "usage": usage, "prompt_token_ids": prompt}
        request = json.dumps({"model": POLICY, "messages": messages, "tools": [RUN]}).encode()
        return RawCall(
            id=new_id("c"),
            rollout_id=self.rollout_id,
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


def pages(path: Path) -> dict[str, int]:
    """Bytes of the pages of each table, its indexes included."""
    db = apsw.Connection(str(path), flags=apsw.SQLITE_OPEN_READONLY)
    found: dict[str, int] = {}
    owners = dict(db.execute("SELECT name, tbl_name FROM sqlite_master"))
    for name, size in db.execute("SELECT name, sum(pgsize) FROM dbstat GROUP BY name"):
        owner = owners.get(name, name)
        found[owner] = found.get(owner, 0) + size
    db.close()
    return found


def measure(path: Path, replay: str, rollouts: int, calls: int, context: int) -> dict[str, Any]:
    store = SqliteStore(path)
    store._db.execute("PRAGMA synchronous = OFF")  # bytes are measured, not time
    store.start_run("run1", POLICY, {})
    store._db.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchall()
    before = pages(path)
    agents = []
    for seed in range(rollouts):
        opened = store.open_rollout(Rollout(id=new_id("r"), key_id="local", mode="train"))
        agents.append(Agent(opened.id, calls, context, replay, seed))
    for turn in zip(*(agent.play() for agent in agents), strict=True):  # a frame holds a call of each
        store.commit_calls(pack(turn), turn, [])
    ingester = Ingester(store)
    began = time.process_time()
    while ingester.step():
        pass
    ingest_s = time.process_time() - began
    branches, read_s, graph_s = 0, 0.0, 0.0
    for agent in agents:
        store.seal_rollout(agent.rollout_id, "completed")
        began = time.process_time()
        found = store.calls(agent.rollout_id)
        read_s += time.process_time() - began
        began = time.process_time()
        graph = build(found)
        verdicts = fates(graph)
        graph_s += time.process_time() - began
        store.settle(agent.rollout_id, verdicts)
        branches += len(samples(graph))
    store.prune_frames(-1.0)
    store._db.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchall()
    assert store.verify() == []
    store.close()
    after = pages(path)
    tables = {name: size - before.get(name, 0) for name, size in after.items()}
    tokens = 4 * sum(agent.tokens for agent in agents)
    messages = sum(sum(agent.said.values()) for agent in agents)
    stored = sum(tables.values())
    return {
        "ratio": round(stored / (tokens + messages), 3),
        "stored_bytes": stored,
        "by_table": {name: size for name, size in tables.items() if size},
        "distinct_token_bytes": tokens,
        "distinct_message_bytes": messages,
        "branches_per_rollout": branches / rollouts,
        "ingest_cpu_ms_per_call": round(1000 * ingest_s / (rollouts * calls), 3),
        "read_cpu_ms_per_rollout": round(1000 * read_s / rollouts, 1),
        "graph_cpu_ms_per_rollout": round(1000 * graph_s / rollouts, 1),
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rollouts", type=int, default=4)
    parser.add_argument("--calls", type=int, default=200)
    parser.add_argument("--context", type=int, default=30_000)
    parser.add_argument("--replay", choices=REPLAYS, action="append", help="all of them by default")
    args = parser.parse_args()
    results: dict[str, Any] = {}
    for replay in args.replay or REPLAYS:
        with tempfile.TemporaryDirectory() as directory:
            path = Path(directory) / "store.sqlite"
            results[replay] = measure(path, replay, args.rollouts, args.calls, args.context)
        print(replay, json.dumps(results[replay]))
    settings = {"rollouts": args.rollouts, "calls": args.calls, "context": args.context}
    print(json.dumps({"ratio": max(one["ratio"] for one in results.values()), **settings, **results}))


if __name__ == "__main__":
    main()

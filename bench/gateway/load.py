"""The load: a closed loop of N clients in a process of its own.

Reads a `Plan` as JSON from stdin, prints an `Outcome`. Clients send what openai-python sends; one client has
one call out at a time. Calls go to the paths of the plan, `calls_per_path` to each, then to the next one.
"""

import asyncio
import os
import re
import sys
import time
from collections import Counter, deque

import msgspec

from bench.gateway import payloads
from bench.gateway.payloads import TURNS, VARIANTS, Kind

_ID = re.compile(rb"chatcmpl-tool-[0-9a-f]{32}")
_CALL_ID = re.compile(rb"x-hone-call-id: (\S+)", re.IGNORECASE)
_HEAD = """\
POST {path}/v1/chat/completions HTTP/1.1
Host: 127.0.0.1:{port}
Accept-Encoding: gzip, deflate
Connection: keep-alive
Accept: application/json
Content-Type: application/json
User-Agent: OpenAI/Python 2.8.1
X-Stainless-Lang: python
X-Stainless-Package-Version: 2.8.1
X-Stainless-OS: Linux
X-Stainless-Arch: x64
X-Stainless-Runtime: CPython
X-Stainless-Runtime-Version: 3.11.7
X-Stainless-Async: false
x-stainless-retry-count: 0
x-stainless-read-timeout: 600
Authorization: Bearer {key}
"""
_PLACE, _TASK = payloads.TOOL_ID.encode(), payloads.TASK.encode()


class Plan(msgspec.Struct, kw_only=True):
    """What to send where."""

    port: int
    kind: Kind
    clients: int
    requests: int
    paths: list[str] = []  # what stands before /v1; each is used up; none: always /v1
    calls_per_path: int = TURNS
    key: str = ""
    log: str | None = None  # file that gets the call id of every whole answer


class Outcome(msgspec.Struct, kw_only=True):
    """What came back; latencies in milliseconds."""

    requests: int
    seconds: float
    statuses: dict[str, int]
    p50_ms: float
    p99_ms: float

    @property
    def rps(self) -> float:
        return self.requests / self.seconds

    @property
    def failed(self) -> int:
        return self.requests - self.statuses.get("200", 0)


class Load:
    """What is left to send, and what came back."""

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        self.left = plan.requests
        self.latencies: list[float] = []
        self.statuses: Counter[str] = Counter()
        self.done = asyncio.Event()
        self.busy = 0
        self.log = _appending(plan.log) if plan.log else None
        self._paths = deque(plan.paths)
        turns = TURNS if plan.kind == "turn" else 1
        self._bodies = [
            [payloads.request(plan.kind, variant, turn) for turn in range(turns)]
            for variant in range(VARIANTS)
        ]
        self._conversations = 0

    def conversation(self) -> "Conversation":
        self._conversations += 1
        path = self._paths.popleft() if self._paths else ""
        return Conversation(self.plan, path, self._bodies, self._conversations)

    def answered(self, status: str, began: float) -> None:
        self.latencies.append(time.perf_counter() - began)
        self.statuses[status] += 1

    def outcome(self, seconds: float) -> Outcome:
        ordered = sorted(self.latencies) or [0.0]
        at = [1000 * ordered[min(len(ordered) - 1, int(len(ordered) * share))] for share in (0.5, 0.99)]
        return Outcome(
            requests=sum(self.statuses.values()),
            seconds=seconds,
            statuses=dict(self.statuses),
            p50_ms=at[0],
            p99_ms=at[1],
        )


class Conversation:
    """The calls of one path: the turns of one conversation, or requests of several."""

    def __init__(self, plan: Plan, path: str, bodies: list[list[bytes]], number: int) -> None:
        self._turns = plan.kind == "turn"
        self._bodies = bodies
        self._number = number
        self._calls = 0
        self._limit = plan.calls_per_path
        self._ids: list[bytes] = []
        self._task = f"task-{os.urandom(8).hex()}".encode()
        self._head = _HEAD.format(path=path, port=plan.port, key=plan.key).replace("\n", "\r\n").encode()

    @property
    def over(self) -> bool:
        return self._calls >= self._limit

    def next(self) -> bytes:
        """The next request, from its first byte to its last."""
        if self._turns:
            body = self._bodies[self._number % VARIANTS][self._calls].replace(_TASK, self._task, 1)
            pieces = body.split(_PLACE)
            # Every earlier answer's id stands twice: in the answer and in the tool's message.
            ids = [id for id in self._ids for _ in range(2)]
            body = b"".join([part for pair in zip(pieces, [*ids, b""], strict=True) for part in pair])
        else:
            body = self._bodies[(self._number * 7 + self._calls) % VARIANTS][0]
        self._calls += 1
        return b"%bContent-Length: %d\r\n\r\n%b" % (self._head, len(body), body)

    def answered(self, body: bytes) -> None:
        if self._turns and (found := _ID.search(body)):
            self._ids.append(found[0])


class Client(asyncio.Protocol):
    def __init__(self, load: Load) -> None:
        self._load = load
        self._conversation: Conversation | None = None
        self._buffer: list[bytes] = []
        self._size = 0
        self._body_at = self._end = -1
        self._out = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport
        self._load.busy += 1
        self._next()

    def connection_lost(self, error: Exception | None) -> None:
        load = self._load
        if self._out:
            load.answered("lost", self._began)
        load.busy -= 1
        if not load.busy:
            load.done.set()

    def data_received(self, data: bytes) -> None:
        self._buffer.append(data)
        self._size += len(data)
        if self._end < 0:
            self._read_head()
        if self._end >= 0:
            whole = self._size >= self._end
        else:
            whole = self._body_at >= 0 and data.endswith(b"0\r\n\r\n")
        if whole:
            self._answered(b"".join(self._buffer))

    def _read_head(self) -> None:
        seen = b"".join(self._buffer)
        self._body_at = seen.find(b"\r\n\r\n")
        if self._body_at >= 0:
            head = seen[: self._body_at].lower()
            at = head.find(b"\r\ncontent-length:")
            if at >= 0:
                self._end = self._body_at + 4 + int(head[at + 17 :].split(b"\r\n", 1)[0])

    def _answered(self, answer: bytes) -> None:
        assert self._conversation is not None
        self._load.answered(answer[9:12].decode(), self._began)
        if self._load.log is not None and (found := _CALL_ID.search(answer, 0, self._body_at)):
            os.write(self._load.log, found[1] + b"\n")
        self._conversation.answered(answer)
        self._buffer, self._size, self._end, self._body_at, self._out = [], 0, -1, -1, False
        self._next()

    def _next(self) -> None:
        load = self._load
        if load.left <= 0:
            self._transport.close()
            return
        load.left -= 1
        if self._conversation is None or self._conversation.over:
            self._conversation = load.conversation()
        self._began, self._out = time.perf_counter(), True
        self._transport.write(self._conversation.next())


def _appending(path: str) -> int:
    return os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)


async def run(plan: Plan) -> Outcome:
    load = Load(plan)
    loop = asyncio.get_running_loop()
    began = time.perf_counter()
    for _ in range(plan.clients):
        await loop.create_connection(lambda: Client(load), "127.0.0.1", plan.port)
    await load.done.wait()
    return load.outcome(time.perf_counter() - began)


if __name__ == "__main__":
    plan = msgspec.json.decode(sys.stdin.buffer.read(), type=Plan)
    print(msgspec.json.encode(asyncio.run(run(plan))).decode())

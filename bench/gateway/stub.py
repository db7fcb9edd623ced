"""A stub engine: answers as vLLM would, from memory, in a process of its own.

`GET /stub` tells how many slow calls it has been asked for and how many of those were cut. Prints its port.
"""

import asyncio
import os
import sys
import time

from bench.gateway import payloads
from bench.gateway.payloads import MODEL, TURNS, VARIANTS, Kind

EVENT_EVERY_S = 0.001
_PLACE = payloads.TOOL_ID.encode()[-32:]
_STARTED = time.time()


def whole(body: bytes, content_type: bytes = b"application/json") -> bytes:
    head = b"HTTP/1.1 200 OK\r\ncontent-type: %b\r\ncontent-length: %d\r\n\r\n"
    return head % (content_type, len(body)) + body


def chunked(events: list[bytes]) -> list[bytes]:
    """A streamed answer, one write an event."""
    head = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
    pieces = [b"%x\r\n%b\r\n" % (len(event), event) for event in events]
    return [head + pieces[0], *pieces[1:-1], pieces[-1] + b"0\r\n\r\n"]


class Answers:
    """Every answer, made once."""

    def __init__(self) -> None:
        turns: dict[Kind, int] = {"big": 1, "small": 1, "turn": TURNS}
        self.whole = {
            (kind, variant, turn): whole(payloads.answer(kind, variant, turn))
            for kind, count in turns.items()
            for variant in range(VARIANTS)
            for turn in range(count)
        }
        self.streams = [chunked(payloads.events(variant)) for variant in range(VARIANTS)]
        models = f'{{"object":"list","data":[{{"id":"{MODEL}@v0","max_model_len":32768}}]}}'
        self.models = whole(models.encode())
        self.metrics = whole(f"process_start_time_seconds {_STARTED}\n".encode(), b"text/plain")
        self.asked = self.cut = 0


class Connection(asyncio.Protocol):
    def __init__(self, answers: Answers) -> None:
        self._answers = answers
        self._buffer = b""
        self._slow = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport

    def connection_lost(self, error: Exception | None) -> None:
        self._answers.cut += self._slow

    def data_received(self, data: bytes) -> None:
        buffer = self._buffer + data if self._buffer else data
        end = buffer.find(b"\r\n\r\n")
        if end < 0:
            self._buffer = buffer
            return
        head = buffer[:end].lower()
        at = head.find(b"\r\ncontent-length:")
        size = int(head[at + 17 :].split(b"\r\n", 1)[0]) if at >= 0 else 0
        if len(buffer) < end + 4 + size:
            self._buffer = buffer
            return
        self._buffer = b""
        self._answer(head, buffer[end + 4 :])

    def _answer(self, head: bytes, body: bytes) -> None:
        answers = self._answers
        if head.startswith(b"get "):
            path = head.split(b" ", 2)[1]
            told = whole(b'{"asked":%d,"cut":%d}' % (answers.asked, answers.cut))
            known = {b"/v1/models": answers.models, b"/metrics": answers.metrics, b"/stub": told}
            self._transport.write(known.get(path, whole(b"{}")))
            return
        kind, variant, turn = payloads.marked(body)
        if kind == "stream":
            self._next(answers.streams[variant], 0)
        elif kind == "slow":
            answers.asked += 1
            self._slow = True
        else:
            found = answers.whole[kind, variant, turn]
            if kind == "turn":
                found = found.replace(_PLACE, os.urandom(16).hex().encode())
            self._transport.write(found)

    def _next(self, pieces: list[bytes], at: int) -> None:
        if self._transport.is_closing():
            return
        self._transport.write(pieces[at])
        if at + 1 < len(pieces):
            asyncio.get_running_loop().call_later(EVENT_EVERY_S, self._next, pieces, at + 1)


async def main() -> None:
    answers = Answers()
    server = await asyncio.get_running_loop().create_server(
        lambda: Connection(answers), "127.0.0.1", int(sys.argv[1]), backlog=1024
    )
    async with server:
        await server.serve_forever()


if __name__ == "__main__":
    asyncio.run(main())

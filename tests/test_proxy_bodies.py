"""Bodies that are no request, over HTTP, in every mode: 400 and a sentence, and nobody upstream sees them."""

import json
import zlib
from pathlib import Path

import pytest
from proxy_world import USER, FakeUpstream, World, capture_settings, completion, engine_settings, world
from toy_engine import ToyEngine

from proxy.settings import KeyLimits, Limits

CHAT = "/v1/chat/completions"
M = b'"model":"policy","messages":[{"role":"user","content":"hi"}]'

NO_JSON = {
    "nothing": b"",
    "cut off": b"{" + M,
    "a list": b"[{" + M + b"}]",
    "a string": b'"hello"',
    "more after it": b"{" + M + b"}{}",
    "a byte order mark": b"\xef\xbb\xbf{" + M + b"}",
    "UTF-16": ("{" + M.decode() + "}").encode("utf-16"),
    "bad UTF-8": b"{" + M + b',"user":"\xff\xfe"}',
    "half a character": b"{" + M + b',"user":"\xc3"}',
    "an encoded surrogate": b"{" + M + b',"user":"\xed\xa0\x80"}',
    "NaN": b"{" + M + b',"top_p":NaN}',
    "infinity": b"{" + M + b',"top_p":-Infinity}',
    "NaN below": b"{" + M + b',"x":{"y":[1,NaN]}}',
    "a bare word": b"{" + M + b',"x":undefined}',
    "a raw line break": b"{" + M + b',"x":"a\nb"}',
    "a trailing comma": b"{" + M + b",}",
    "a comment": b"{" + M + b"/* */}",
    "single quotes": b"{'model':'m'}",
    "a key that is none": b"{1:2}",
    "half a surrogate": b'{"model":"\\ud800","messages":[]}',
    "lists too deep": b'{"model":"policy","messages":' + b"[" * 50_000 + b"]" * 50_000 + b"}",
    "objects too deep": b"{" + M + b',"x":' + b'{"a":' * 50_000 + b"1" + b"}" * 50_001,
}
WRONG = {
    "no model": b'{"messages":[]}',
    "a number as model": b'{"model":7,"messages":[]}',
    "messages that are none": b'{"model":"policy","messages":"hi"}',
    "n that is none": b"{" + M + b',"n":1.5}',
    "n below one": b"{" + M + b',"n":0}',
    "n without end": b"{" + M + b',"n":99999999999999999999}',
    "stream that is none": b"{" + M + b',"stream":"yes"}',
    "options that are none": b"{" + M + b',"stream":true,"stream_options":[1]}',
}
HARMLESS = {  # read as JSON has it, and passed on
    "escapes": b"{" + M + b',"user":"\\ud83d\\ude00 \\u0000"}',
    "an exponent": b"{" + M + b',"x":1e400}',
    "a long number": b"{" + M + b',"x":' + b"9" * 1000 + b"}",
    "space": b" \t\r\n{ " + M + b" } \n",
    "said twice": b'{"model":"other",' + M + b"}",
    "a hundred deep": b"{" + M + b',"x":' + b"[" * 100 + b"]" * 100 + b"}",
}


async def refused(hone: World, body: bytes, path: str = CHAT) -> str:
    status, answer, headers = await hone.post(path, body)
    assert status == 400, answer
    assert headers["content-type"].startswith("application/json")
    error = answer["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["type"] == "invalid_request_error"
    assert len(error["message"]) < 500
    return str(error["code"])


async def test_what_is_no_json_is_400(tmp_path: Path) -> None:
    async with (
        FakeUpstream(completion).listening() as upstream,
        world(capture_settings(upstream.url), tmp_path) as hone,
    ):
        opened = [await hone.opened(mode=mode) for mode in ("train", "eval")]
        for path in (CHAT, *(f"/rollouts/{one['id']}{CHAT}" for one in opened)):
            for name, body in NO_JSON.items():
                assert await refused(hone, body, path) == "invalid_json", name
            for name, body in WRONG.items():
                assert await refused(hone, body, path) != "invalid_json", name
        for path in ("/rollouts", "/rewards", f"/rollouts/{opened[0]['id']}/finish"):
            for name, body in NO_JSON.items():
                status, answer, _ = await hone.post(path, body)
                assert (status, answer["error"]["type"]) == (400, "invalid_request_error"), name
        assert upstream.bodies == []
        assert hone.raw_calls() == []


async def test_what_is_odd_but_json_is_served_and_stored(tmp_path: Path) -> None:
    async with (
        FakeUpstream(completion).listening() as upstream,
        world(capture_settings(upstream.url), tmp_path) as hone,
    ):
        for name, body in HARMLESS.items():
            assert (await hone.post(CHAT, body))[0] == 200, name
        assert [raw.request for raw in hone.raw_calls()] == list(HARMLESS.values())


async def test_the_same_to_the_policy_in_every_mode(tmp_path: Path) -> None:
    toy = ToyEngine()
    async with toy.listening(), world(engine_settings(toy.url), tmp_path) as hone:
        hone.store.start_run("run", "policy", {})
        opened = [await hone.opened(mode=mode) for mode in ("train", "eval")]
        for path in (CHAT, *(f"/rollouts/{one['id']}{CHAT}" for one in opened)):
            for body in (NO_JSON | WRONG).values():
                await refused(hone, body, path)
            asked = len(toy.asked)
            for name, body in HARMLESS.items():
                assert (await hone.post(path, body))[0] == 200, name
            assert len(toy.asked) == asked + len(HARMLESS)


async def test_a_body_that_grows_when_it_is_unpacked_is_413(tmp_path: Path) -> None:
    limits = Limits(body_bytes_max=100_000)
    async with (
        FakeUpstream(completion).listening() as upstream,
        world(capture_settings(upstream.url, limits=limits), tmp_path) as hone,
    ):
        for size, expected in ((50_000, 200), (50_000_000, 413)):
            body = zlib.compress(b"{" + M + b',"user":"' + b"x" * size + b'"}')
            assert len(body) < 100_000
            status, _, _ = await hone.post(CHAT, body, {"Content-Encoding": "deflate"})
            assert status == expected
        assert len(upstream.bodies) == 1


@pytest.mark.parametrize("key", ["sk-\xff", "x" * 5000, "r_1.\udce9"])
async def test_keys_that_are_none_are_401(tmp_path: Path, key: str) -> None:
    import asyncio
    import hashlib

    from proxy.settings import Key

    keys = (Key(id="ann", sha256=hashlib.sha256(b"sk").hexdigest(), limits=KeyLimits(concurrency=1)),)
    async with (
        FakeUpstream(completion).listening() as upstream,
        world(capture_settings(upstream.url, keys=keys), tmp_path) as hone,
    ):
        host, _, port = hone.url.removeprefix("http://").partition(":")
        reader, writer = await asyncio.open_connection(host, int(port))
        body = json.dumps({"model": "gpt", "messages": [USER]}).encode()
        lines = (f"POST {CHAT} HTTP/1.1", "Host: x", f"Content-Length: {len(body)}")
        head = "\r\n".join([*lines, f"Authorization: Bearer {key}", "", ""])
        writer.write(head.encode("utf-8", "surrogateescape") + body)
        line = await asyncio.wait_for(reader.readline(), 5)
        assert line.split()[1] == b"401"
        writer.close()
        assert upstream.bodies == []

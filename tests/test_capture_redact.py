"""What redaction takes out of calls, and that nothing of it reaches the store's files."""

import asyncio
import json
import logging
import re
import tempfile
from pathlib import Path
from typing import Any

import msgspec
import pytest
from capture_makers import logprobs, raw_call, request, response, rollout, stream
from hypothesis import given, settings
from hypothesis import strategies as st
from redaction_world import is_stored

from capture.frames import pack
from capture.ingest import Ingester
from capture.journal import Journal
from capture.parse import parse
from capture.redact import Redactor
from capture.settings import Settings
from capture.sqlite import SqliteStore
from capture.types import RawCall

PATTERN = "CANARY-[0-9a-f]{8}"
CANARY = "CANARY-00c0ffee"
ESCAPED = CANARY.replace("A", "\\u0041")
CARD = 4111111111111111


def redacted(*patterns: str, **fields: Any) -> RawCall:
    """The call after redaction, which must have found something."""
    raw = raw_call("r_1", **fields)
    found = Redactor(patterns or (PATTERN,)).call(raw)
    assert found.redacted
    assert CANARY not in json.dumps(msgspec.to_builtins(found), default=repr)
    return found


def said(found: RawCall) -> Any:
    return json.loads(found.request)


def answered(found: RawCall) -> Any:
    """The stored answer's message; there must be no ids beside it."""
    body = json.loads(found.response)
    assert set(body) <= {"id", "object", "created", "model", "choices", "usage"}
    assert all(set(choice) == {"index", "message", "finish_reason"} for choice in body["choices"])
    return body["choices"][0]["message"]


# -- places --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("given", "kept"),
    [
        ({"role": "user", "content": f"a {CANARY}b"}, {"role": "user", "content": "a [redacted]b"}),
        (
            {"role": "user", "content": [{"type": "text", "text": CANARY}]},
            {"role": "user", "content": [{"type": "text", "text": "[redacted]"}]},
        ),
        (
            {
                "role": "user",
                "content": [{"type": "text", "text": f"a{CANARY[:5]}"}, {"text": CANARY[5:] + "b"}],
            },
            {"role": "user", "content": [{"type": "text", "text": "a[redacted]"}, {"text": "b"}]},
        ),
        (
            {"role": "tool", "tool_call_id": CANARY, "content": f'{{"k": ["{ESCAPED}", 1]}}'},
            {"role": "tool", "tool_call_id": "[redacted]", "content": '{"k": ["[redacted]", 1]}'},
        ),
        (
            {"role": "user", "name": CANARY, "content": f"say {{'k': \"{ESCAPED}\"}} \\n"},
            {"role": "user", "name": "[redacted]", "content": "say {'k': \"[redacted]\"} \\n"},
        ),
    ],
)
def test_messages_in_every_form(given: Any, kept: Any) -> None:
    assert said(redacted(request=request([given])))["messages"] == [kept]


def test_arguments_stay_json_also_where_it_is_json_inside_json() -> None:
    inner = json.dumps({"note": ESCAPED.replace("\\\\", "\\"), "k": json.dumps({CANARY: [CANARY]})})
    function = {"name": "f", "arguments": inner.replace("\\\\u", "\\u")}
    message = {"role": "assistant", "content": None, "tool_calls": [{"id": "x", "function": function}]}
    kept = said(redacted(request=request([message])))["messages"][0]["tool_calls"][0]["function"]
    arguments = json.loads(kept["arguments"])
    assert arguments == {"note": "[redacted]", "k": '{"[redacted]": ["[redacted]"]}'}


def test_numbers_are_text_where_no_count_is_as_long_and_anywhere_inside_a_string() -> None:
    arguments = json.dumps({"card": CARD, "pin": 1234})
    message = {"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": arguments}}]}
    body = request([message], max_tokens=1234, metadata={"card": CARD})
    kept = said(redacted("credit_card", r"\b1234\b", request=body))
    function = kept["messages"][0]["tool_calls"][0]["function"]
    assert json.loads(function["arguments"]) == {"card": "[redacted:credit_card]", "pin": "[redacted]"}
    assert (kept["max_tokens"], kept["metadata"]) == (1234, {"card": "[redacted:credit_card]"})


def test_the_rest_of_a_request() -> None:
    tool = {"type": "function", "function": {"name": "f", "description": CANARY, "parameters": {CANARY: {}}}}
    found = redacted(
        request=request(tools=[tool], user=CANARY, metadata={CANARY: CANARY}),
        changed={"tools": [tool], CANARY: None, "seed": None},
        error=f"broke at {CANARY}",
        idempotency_key=f"k-{CANARY}",
        route=CANARY,
    )
    function = {"name": "f", "description": "[redacted]", "parameters": {"[redacted]": {}}}
    kept = said(found)
    assert kept["tools"] == found.changed["tools"] == [{"type": "function", "function": function}]
    assert (kept["user"], kept["metadata"]) == ("[redacted]", {"[redacted]": "[redacted]"})
    assert list(found.changed) == ["tools", "[redacted]", "seed"]
    assert (found.error, found.idempotency_key, found.route) == (
        "broke at [redacted]",
        "k-[redacted]",
        "[redacted]",
    )


def test_a_key_that_stands_twice_is_looked_at_twice() -> None:
    body = f'{{"model":"m","user":"{CANARY}","user":"x","messages":[]}}'.encode()
    assert redacted(request=body).request == body.replace(CANARY.encode(), b"[redacted]")


def test_what_matches_is_taken_out_and_nothing_else_is_written_anew() -> None:
    body = b'{ "a" : 1.50,  "messages":[ {"role":"user","content":"\\u00e9 CANARY-00c0ffee"} ] }'
    assert redacted(request=body).request == body.replace(b"CANARY-00c0ffee", b"[redacted]")


@pytest.mark.parametrize("name", ["content", "reasoning", "reasoning_content", "refusal"])
@pytest.mark.parametrize("streamed", [False, True])
def test_what_was_answered(name: str, streamed: bool) -> None:
    if streamed:
        body = stream(
            [1, 2], [({name: f"a {CANARY[:4]}"}, [3]), ({name: CANARY[4:]}, [4]), ({name: "b"}, [5])]
        )
    else:
        message = {"role": "assistant", name: f"a {CANARY}b"}
        body = json.loads(response([1, 2], [3, 4, 5]))
        body["choices"][0]["message"] = message
        body = json.dumps(body).encode()
    found = redacted(stream=streamed, response=body)
    assert not found.stream
    assert answered(found)[name] == "a [redacted]b"
    call = parse(found)
    assert (call.untrainable, call.completion_tokens, call.finish_reason) == ("redacted", 3, "stop")
    assert (call.prompt_ids, call.sampled_ids, call.sampled_logprobs) == ([], [], [])


def test_arguments_of_a_stream_that_are_escaped_across_its_chunks() -> None:
    text = json.dumps({"key": "X"}).replace("X", ESCAPED)
    pieces = [text[at : at + 3] for at in range(0, len(text), 3)]
    first = {"tool_calls": [{"index": 0, "id": "x", "type": "function", "function": {"name": "f"}}]}
    deltas = [({"tool_calls": [{"index": 0, "function": {"arguments": one}}]}, [5]) for one in pieces]
    found = redacted(stream=True, response=stream([1], [(first, [4]), *deltas]))
    (call,) = answered(found)["tool_calls"]
    assert call["function"] == {"name": "f", "arguments": '{"key": "[redacted]"}'}


def test_every_choice_of_a_stream_is_kept() -> None:
    def chunk(index: int, text: str, finish: str | None = None) -> bytes:
        choice = {"index": index, "delta": {"content": text}, "finish_reason": finish}
        return b"data: " + json.dumps({"choices": [choice]}).encode() + b"\r\n\r\n"

    body = (
        chunk(0, CANARY[:9]) + chunk(1, "other ") + chunk(0, CANARY[9:], "stop") + chunk(1, "one", "length")
    )
    found = redacted(stream=True, response=body + b"data: [DONE]\n\n")
    first, second = json.loads(found.response)["choices"]
    assert (first["message"]["content"], second["message"]["content"]) == ("[redacted]", "other one")
    assert (first["finish_reason"], second["finish_reason"]) == ("stop", "length")
    assert parse(found).untrainable == "n_choices"


def spelled(text: str, *, bytes_only: bool) -> list[dict[str, Any]]:
    """Logprobs as vLLM gives them, a token for each character."""
    found = logprobs([1] * len(text))
    for entry, letter in zip(found, text, strict=True):
        entry["token"] = "token_id:7" if bytes_only else letter
        entry["bytes"] = list(letter.encode()) if bytes_only else None
    return found


@pytest.mark.parametrize("bytes_only", [False, True])
@pytest.mark.parametrize("streamed", [False, True])
def test_what_was_sampled_and_is_not_in_the_message(bytes_only: bool, streamed: bool) -> None:
    choice = {"index": 0, "logprobs": {"content": spelled(f"<{CANARY}>", bytes_only=bytes_only)}}
    whole = {
        "choices": [{**choice, "message": {"role": "assistant", "content": "hi"}, "finish_reason": "stop"}]
    }
    chunk = {"choices": [{**choice, "delta": {"content": "hi"}, "finish_reason": "stop"}]}
    body = b"data: " + json.dumps(chunk).encode() + b"\n\n" if streamed else json.dumps(whole).encode()
    assert answered(redacted(stream=streamed, response=body))["content"] == "hi"


def test_a_token_that_was_not_sampled() -> None:
    body = json.loads(response([1], [3]))
    body["choices"][0]["logprobs"]["content"][0]["top_logprobs"] = [{"token": CANARY, "logprob": -9.0}]
    assert answered(redacted(response=json.dumps(body).encode()))["content"] == "hi"


def test_a_clean_answer_to_a_request_that_was_redacted_loses_its_ids() -> None:
    found = redacted(request=request([{"role": "user", "content": CANARY}]))
    assert answered(found)["content"] == "hi"
    assert parse(found).untrainable == "redacted"


# -- what cannot be read -------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("body", "kept"),
    [
        (f"<html>{CANARY}</html>", "<html>[redacted]</html>"),
        (
            f'{{"choices": [{{"message": {{"content": "{ESCAPED}',
            '{"choices": [{"message": {"content": "[redacted]',
        ),
        (f'{{"x": NaN, "ids": [1, 2, 3], "t": "{CANARY}"}}', '{"x": NaN, "ids": [], "t": "[redacted]"}'),
        (f"\udcff\ud800{CANARY}".encode("utf-8", "surrogatepass").decode("latin1"), None),
        ('{"error": {"message": "no CANARY-00c0ffee"}}', '{"error": {"message": "no [redacted]"}}'),
    ],
)
def test_garbage_is_redacted_as_text(body: str, kept: str | None) -> None:
    found = redacted(response=body.encode("latin1"), status=502, error="it broke")
    assert kept is None or found.response.decode() == kept
    assert parse(found).untrainable == "error"


def test_tokens_of_an_answer_that_cannot_be_read_are_put_together() -> None:
    tokens = ", ".join(json.dumps({"token": letter, "bytes": [ord(letter)]}) for letter in CANARY)
    body = f'{{"x": NaN, "content": [{tokens}], "token_ids": [67, 65, 78]'
    kept = redacted(response=body.encode(), error="it broke").response
    assert kept.count(b'"token": ""') == len(CANARY)
    assert b"67" not in kept


@pytest.mark.parametrize(
    "body", ["4111111111111111", '{"a": [1,\n  4111111111111111]}', '{"a":-4111111111111111}']
)
def test_numbers_wherever_they_stand(body: str) -> None:
    assert b"4111" not in redacted("credit_card", response=body.encode(), status=400).response


def test_bytes_that_are_no_utf8() -> None:
    found = redacted(response=b"\xff\xfe " + CANARY.encode() + b" \xe9", status=502, error="x")
    assert found.response == b"\xff\xfe [redacted] \xe9"


def contents(body: bytes) -> str:
    """What the chunks of a stream say as content, also one that was cut."""
    return "".join(re.findall('"content": ?"([^"]*)', body.decode()))


def test_a_stream_cut_anywhere_says_nothing() -> None:
    whole = stream([1], [({"content": letter}, [ord(letter)]) for letter in f"the {CANARY} is"])
    for at in range(whole.index(b'"content": "f"'), len(whole), 7):
        raw = raw_call("r_1", stream=True, status=499, response=whole[:at])
        found = Redactor((PATTERN,)).call(raw)
        assert found.redacted or CANARY not in contents(raw.response)
        assert CANARY not in contents(found.response)
        if found.redacted:
            assert parse(found).untrainable in ("partial", "redacted")


def test_the_end_of_a_secret_in_the_chunk_that_was_cut() -> None:
    body = stream([1], [({"content": f"x{CANARY[:10]}"}, [3])], finish=None)
    cut = b'data: {"choices": [{"index": 0, "delta": {"content": "' + CANARY[10:].encode()
    found = redacted(stream=True, status=499, response=body + cut)
    assert CANARY[10:].encode() not in found.response


# -- what stays as it is -------------------------------------------------------------------------


def test_without_a_match_nothing_is_touched() -> None:
    for body, streamed in ((response([1], [2]), False), (stream([1], [({"content": "x"}, [2])]), True)):
        raw = raw_call("r_1", response=body, stream=streamed, changed={"seed": None}, error="no")
        assert Redactor((PATTERN, "email", "api_key", "credit_card", "private_key")).call(raw) is raw


def test_without_patterns_not_even_garbage_is_looked_at() -> None:
    raw = raw_call("r_1", request=CANARY.encode())
    assert Redactor(()).call(raw) is raw


def test_a_call_without_a_match_is_the_same_record_as_ever() -> None:
    assert b"redacted" not in pack([raw_call("r_1")])
    assert not msgspec.msgpack.decode(msgspec.msgpack.encode(raw_call("r_1")), type=RawCall).redacted


# -- reasons, hashes, names ----------------------------------------------------------------------


def test_earlier_reasons_stand() -> None:
    body = request([{"role": "user", "content": CANARY}])
    assert parse(redacted(request=body, policy=None)).untrainable == "provider"
    assert parse(redacted(request=body, status=400)).untrainable == "error"
    assert parse(redacted(request=body, response=b"?")).untrainable == "unparsable"
    grammar = request([{"role": "user", "content": CANARY}], tool_choice="required")
    assert parse(redacted(request=grammar)).untrainable == "grammar"


def test_the_hash_is_that_of_what_is_stored() -> None:
    """Whoever holds the store could try card numbers against a hash of the body as it was."""
    bodies = [request([{"role": "user", "content": f"CANARY-{n:08x}"}]) for n in range(2)]
    first, second = (redacted(request=body) for body in bodies)
    assert first.body_hash == second.body_hash != raw_call("r_1").body_hash


def test_names_stay_apart() -> None:
    redactor = Redactor(("email",))
    names = [redactor.name(name) for name in ("a@example.org", "b@example.org", "a@example.org", "session 7")]
    assert names[0] == names[2] != names[1]
    assert names[0].startswith("[redacted:")
    assert names[3] == "session 7"


def test_anchors_mean_the_string() -> None:
    body = request([{"role": "user", "content": json.dumps({"pin": "1234", "other": "12345"})}])
    kept = said(redacted(r"^\d{4}$", request=body))["messages"][0]["content"]
    assert json.loads(kept) == {"pin": "[redacted]", "other": "12345"}


def test_matches_that_overlap_are_taken_out_together() -> None:
    assert Redactor(("b@example", "email", "org!")).text("x b@example.org! y") == "x [redacted] y"


def test_deep_nesting_ends() -> None:
    deep = '"' + "\\u005c" * 5000 + 'u0022"'
    body = f'{{"model":"m","messages":[{deep},{"[" * 900}"{CANARY}"{"]" * 900}]}}'.encode()
    assert CANARY.encode() not in redacted(request=body).request


# -- the property --------------------------------------------------------------------------------

TEXT = st.text(st.characters(exclude_categories=("Cs",)), max_size=8)
PLACES = (
    "user", "system", "part", "across", "name", "arguments", "nested", "key", "tool_id", "result",
    "description", "enum", "metadata", "changed", "removed", "error", "idempotency", "model",
    "content", "reasoning", "refusal", "said_arguments", "said_name", "finish", "top", "id",
)  # fmt: skip


def escaped(draw: st.DrawFn, value: Any) -> str:
    """JSON, some of its letters as escapes."""
    text = json.dumps(value, ensure_ascii=draw(st.booleans()))
    chosen = draw(st.sampled_from(["", "C", "AN", "0", "-"]))
    return re.sub(f"(?<!\\\\)[{chosen}]", lambda m: f"\\u{ord(m[0]):04x}", text) if chosen else text


@st.composite
def calls(draw: st.DrawFn) -> tuple[dict[str, Any], bool]:
    """Fields of a raw call, and whether the canary stands in them: somewhere, or nowhere."""
    place = draw(st.sampled_from((*PLACES, None, None)))

    def text(name: str) -> str:
        around = draw(TEXT), draw(TEXT)
        return around[0] + (CANARY if name == place else "") + around[1]

    cut = draw(st.integers(1, len(CANARY) - 1))
    halves = (CANARY[:cut], CANARY[cut:]) if place == "across" else (draw(TEXT), draw(TEXT))
    arguments = escaped(draw, {"a": text("arguments"), text("key"): [{"b": escaped(draw, [text("nested")])}]})
    messages = [
        {"role": "system", "content": text("system")},
        {"role": "user", "content": [{"type": "text", "text": text("part")}, {"type": "text", "text": "x"}]},
        {"role": "user", "content": [{"type": "text", "text": half} for half in halves]},
        {"role": "user", "content": text("user"), "name": text("name")},
        {"role": "assistant", "content": None, "tool_calls": [
            {"id": text("tool_id"), "type": "function", "function": {"name": "f", "arguments": arguments}}]},
        {"role": "tool", "tool_call_id": "t", "content": escaped(draw, {"r": text("result")})},
    ]  # fmt: skip
    parameters = {"type": "object", "properties": {"p": {"enum": [text("enum")]}}}
    function = {"name": "f", "description": text("description"), "parameters": parameters}
    body = {"model": text("model"), "messages": messages, "metadata": {"k": text("metadata")}}
    body["tools"] = [{"type": "function", "function": function}]
    fields: dict[str, Any] = {
        "request": escaped(draw, body).encode(),
        "route": body["model"] or "m",
        "changed": {"tools": [text("changed")], text("removed"): None},
        "error": text("error") or None if draw(st.booleans()) or place == "error" else None,
        "idempotency_key": text("idempotency") or None,
        "stream": draw(st.booleans()),
    }
    said = {
        "content": text("content"),
        "reasoning": text("reasoning"),
        "refusal": text("refusal"),
    }
    tool = {"name": text("said_name"), "arguments": escaped(draw, {"k": text("said_arguments")})}
    answer = draw(streams(said, tool, text)) if fields["stream"] else whole(said, tool, text)
    if place is None and draw(st.booleans()):
        fields["stream"], answer = False, draw(st.binary(max_size=20))
    return {**fields, "response": answer}, place is not None


def ids_of(text: str) -> list[int]:
    return [ord(letter) for letter in text] or [7]


def envelope(text: Any) -> dict[str, Any]:
    prompt = ids_of("".join(f" {CANARY} "))  # an engine that tokenises by the letter
    return {"id": text("id"), "model": "policy@v0", "created": 1763726400, "prompt_token_ids": prompt}


def whole(said: dict[str, str], tool: dict[str, str], text: Any) -> bytes:
    message = {"role": "assistant", **said, "tool_calls": [{"id": "t", "type": "function", "function": tool}]}
    ids = ids_of("".join(said.values()) + tool["arguments"])
    marks = logprobs(ids)
    marks[0]["top_logprobs"] = [{"token": text("top"), "logprob": -3.0, "bytes": None}]
    choice = {"index": 0, "message": message, "finish_reason": text("finish") or "stop", "token_ids": ids}
    usage = {"prompt_tokens": 3, "completion_tokens": len(ids)}
    return json.dumps(
        {**envelope(text), "choices": [{**choice, "logprobs": {"content": marks}}], "usage": usage}
    ).encode()


@st.composite
def streams(draw: st.DrawFn, said: dict[str, str], tool: dict[str, str], text: Any) -> bytes:
    """Every text in pieces, cut anywhere."""
    deltas: list[tuple[dict[str, Any], str]] = []
    for name, value in said.items():
        deltas += [({name: piece}, piece) for piece in pieces(draw, value)]
    for piece in pieces(draw, tool["name"]):
        deltas.append(({"tool_calls": [{"index": 0, "id": "t", "function": {"name": tool["name"]}}]}, piece))
    for piece in pieces(draw, tool["arguments"]):
        deltas.append(({"tool_calls": [{"index": 0, "function": {"arguments": piece}}]}, piece))
    end, lines = draw(st.sampled_from(["\n\n", "\r\n\r\n"])), []
    base = envelope(text)
    top = {"token": text("top"), "logprob": -3.0}
    finish = text("finish") or "stop"
    for n, (delta, piece) in enumerate(deltas):
        marks = [{"token": letter, "logprob": -1.0, "bytes": list(letter.encode())} for letter in piece]
        for mark in marks[:1]:
            mark["top_logprobs"] = [top]
        choice = {"index": 0, "delta": delta, "logprobs": {"content": marks}, "token_ids": ids_of(piece)}
        choice["finish_reason"] = finish if n == len(deltas) - 1 else None
        lines.append("data: " + json.dumps({**base, "choices": [choice]}) + end)
    return "".join([*lines, "data: [DONE]", end]).encode()


def pieces(draw: st.DrawFn, text: str) -> list[str]:
    """At least one, so that every text is said."""
    cuts = sorted(draw(st.lists(st.integers(0, len(text)), max_size=6)))
    return [text[start:end] for start, end in zip([0, *cuts], [*cuts, len(text)], strict=True)]


class Heard(logging.Handler):
    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(self.format(record))


async def committed(path: Path, raw: RawCall) -> RawCall:
    own = SqliteStore(path)
    journal = Journal(own, Settings(redact=(PATTERN,)))
    journal.start()
    stored = await journal.commit(raw, rollout(id=raw.rollout_id))
    await journal.close()
    own.close()
    return stored


@settings(max_examples=60, deadline=None)
@given(calls())
def test_a_secret_is_nowhere_in_the_store(made: tuple[dict[str, Any], bool]) -> None:
    fields, has_canary = made
    heard = Heard()
    logging.getLogger().addHandler(heard)
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        raw = raw_call("r_1", **fields)
        stored = asyncio.run(committed(root / "hone.db", raw))
        store = SqliteStore(root / "hone.db")
        Ingester(store).step()
        (call,) = store.calls("r_1")
        (kept,) = store.raw_calls("r_1")
        store.close()
        if has_canary:
            assert stored.redacted
            assert not is_stored(CANARY, root)
            assert call.prompt_ids == call.sampled_ids == []
            assert call.untrainable is not None
        else:
            assert stored is raw
            assert kept == raw
    logging.getLogger().removeHandler(heard)
    assert CANARY not in "".join(heard.lines)

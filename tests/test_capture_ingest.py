import random

import msgspec
import pytest
from capture_makers import POLICY, raw_call, request, response, rollout

from capture.errors import StoreBusy
from capture.frames import pack
from capture.ingest import Ingester
from capture.parse import parse
from capture.sqlite import SqliteStore


@pytest.fixture
def store(tmp_path):
    opened = SqliteStore(tmp_path / "store.sqlite")
    opened.start_run("run1", POLICY, {})
    yield opened
    assert opened.verify() == []
    opened.close()


def a_conversation(rollout_id, turns, context=50):
    """Raw calls of an agent that replays everything; each turn samples 3 tokens and adds 2."""
    messages = [{"role": "user", "content": "word " * context}]
    tokens = list(range(context))
    records = []
    for turn in range(turns):
        sampled = [100 + turn, 200 + turn, 300 + turn]
        answer = response(tokens, sampled, content=f"answer {turn}")
        asked = request(messages, tools=[{"type": "function", "function": {"name": "play"}}])
        at = float(turn + 1)
        records.append(
            raw_call(rollout_id, request=asked, response=answer, started_at=at, body_hash=bytes([turn]))
        )
        messages = [
            *messages,
            {"role": "assistant", "content": f"answer {turn}"},
            {"role": "user", "content": f"then {turn}"},
        ]
        tokens = [*tokens, *sampled, 7, 8]
    return records


def commit(store, *records):
    for record in records:
        store.commit_calls(pack([record]), [record], [])


def test_what_comes_out_is_what_was_parsed(store):
    opened = store.open_rollout(rollout())
    records = a_conversation(opened.id, 6)
    commit(store, *records)
    ingester = Ingester(store)
    assert [ingester.step(4), ingester.step(4), ingester.step(4)] == [4, 2, 0]
    assert store.calls(opened.id) == [parse(record) for record in records]
    assert store.balance(POLICY).pending == 18


def stored_bytes(store, rollout_id):
    return store._row(
        "SELECT sum(length(tokens)), sum(length(messages)) FROM contents JOIN calls ON calls.n = contents.n "
        "WHERE rollout_id = ?",
        (rollout_id,),
    )


def test_storage_grows_with_what_is_new_not_with_the_context(store):
    opened = store.open_rollout(rollout())
    commit(store, *a_conversation(opened.id, 20, context=1000))
    ingester = Ingester(store)
    while ingester.step(7):
        pass
    tokens, messages = stored_bytes(store, opened.id)
    assert tokens == 3 * (1000 + 20 * 3 + 19 * 2)
    assert messages < 5000 + 20 * 100  # the question once, a short pair of messages a turn


def test_a_new_ingester_finds_the_base_in_the_store(store):
    opened = store.open_rollout(rollout())
    for record in a_conversation(opened.id, 10, context=1000):
        commit(store, record)
        assert Ingester(store).step() == 1
    assert stored_bytes(store, opened.id)[0] == 3 * (1000 + 10 * 3 + 9 * 2)


def test_a_small_cache_forgets_and_still_stores_differences(store):
    ids = [store.open_rollout(rollout()).id for _ in range(3)]
    conversations = [a_conversation(id, 5, context=500) for id in ids]
    ingester = Ingester(store, cache_bytes_max=4000)
    for turn in zip(*conversations, strict=True):
        commit(store, *turn)
        assert ingester.step() == 3
    for id, records in zip(ids, conversations, strict=True):
        assert store.calls(id) == [parse(record) for record in records]
        assert stored_bytes(store, id)[0] == 3 * (500 + 5 * 3 + 4 * 2)


def test_garbage_is_ingested_with_its_reason_and_blocks_nobody(store):
    opened = store.open_rollout(rollout())
    odd = '{"messages": [{"role": "user", "content": 123456789012345678901234567890}]}'
    commit(
        store,
        raw_call(opened.id, started_at=1.0, request=b"\x00\xff", response=b"{"),
        raw_call(opened.id, started_at=2.0, request=odd.encode()),
        raw_call(opened.id, started_at=3.0, response=response([1], [3], usage={"completion_tokens": 2**80})),
        raw_call(opened.id, started_at=4.0),
    )
    assert Ingester(store).step() == 4
    reasons = [call.untrainable for call in store.calls(opened.id)]
    assert reasons == ["unparsable", None, "unparsable", None]
    assert store.calls(opened.id)[1].messages[0]["content"] == 123456789012345678901234567890


def test_json_that_python_calls_equal_is_not_confused(store):
    opened = store.open_rollout(rollout())
    asked = [request([{"role": "user", "content": [value]}]) for value in (1, True, 1.0)]
    records = [
        raw_call(opened.id, request=body, started_at=float(at), body_hash=bytes([at]))
        for at, body in enumerate(asked)
    ]
    commit(store, *records)
    Ingester(store).step()
    found = [call.messages[0]["content"][0] for call in store.calls(opened.id)]
    assert list(map(repr, found)) == ["1", "True", "1.0"]


def test_two_ingesters_at_once_do_no_harm(store, tmp_path):
    opened = store.open_rollout(rollout())
    commit(store, *a_conversation(opened.id, 4))
    other = SqliteStore(tmp_path / "store.sqlite")
    pending = other.pending_calls(64)
    Ingester(store).step()
    other.save_calls([parse(one.raw) for one in pending], {})
    assert store.counts().calls_not_ingested == 0
    assert len(store.calls(opened.id)) == 4
    other.close()


def test_many_conversations_at_once_in_one_rollout_keep_their_bases(store):
    """Thirty sub-agents take turns: what they went on from is far back among the calls, but not forgotten."""
    opened = store.open_rollout(rollout())
    turns = 4
    agents = []
    for agent in range(30):
        records = a_conversation(opened.id, turns, context=200 + agent)  # other first messages, other tokens
        agents.append([msgspec.structs.replace(one, response=shifted(one, agent)) for one in records])
    for turn in zip(*agents, strict=True):
        commit(store, *turn)
    ingester = Ingester(store)
    while ingester.step():
        pass
    distinct = sum(200 + agent + turns * 3 + (turns - 1) * 2 for agent in range(30))
    assert stored_bytes(store, opened.id)[0] <= 3 * distinct


def shifted(raw, by):
    """The raw call's response, with every token another one for each agent."""
    call = parse(raw)
    away = [[1000 * (by + 1) + id for id in ids] for ids in (call.prompt_ids, call.sampled_ids)]
    return response(*away, content=call.response["content"])


def test_a_history_that_changes_at_its_beginning_costs_what_is_new(store):
    """The system prompt tells the time, and the oldest turn is left out: the next shares no prefix."""
    rng = random.Random(0)
    opened = store.open_rollout(rollout())
    said = [
        (f"{rng.random()} {rng.random()}" * 5, [rng.randrange(100_000) for _ in range(40)]) for _ in range(60)
    ]
    records = []
    for at in range(40):
        window = said[at : at + 20]
        messages = [{"role": "system", "content": f"it is {at} o'clock"}]
        messages += [{"role": "user", "content": text} for text, _ in window]
        prompt = [at, *(id for _, ids in window for id in ids)]
        answer = response(prompt, [at], content="so be it")
        records.append(raw_call(opened.id, started_at=float(at), request=request(messages), response=answer))
    commit(store, *records)
    ingester = Ingester(store)
    while ingester.step():
        pass
    assert store.calls(opened.id) == [parse(record) for record in records]
    tokens, messages = stored_bytes(store, opened.id)
    assert tokens < 1.5 * 3 * 40 * 60
    assert messages < 1.5 * sum(len(text) for text, _ in said)


def test_what_could_not_be_saved_is_stored_as_differences_the_next_time(tmp_path, store):
    opened = store.open_rollout(rollout())
    commit(store, *a_conversation(opened.id, 3, context=1000))
    patient = SqliteStore(store.path, busy_timeout_s=0.05)
    ingester = Ingester(patient)
    with store._write(), pytest.raises(StoreBusy):
        ingester.step()
    assert ingester.step() == 3
    patient.close()
    assert stored_bytes(store, opened.id)[0] == 3 * (1000 + 3 * 3 + 2 * 2)

import subprocess
import sys
import tempfile
from array import array
from pathlib import Path

import apsw
import msgspec
import pytest
import zstandard
from capture_makers import POLICY, base_of, content_of, model_call, raw_call, response, rollout
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

from capture.errors import Conflict, Corrupt, Fenced, NotFound, RewardFrozen, StoreBusy, StoreError
from capture.frames import pack, unpack
from capture.ingest import Ingester
from capture.sqlite import SqliteStore
from capture.sqlite.base import migrations
from capture.store import ParentContent
from capture.types import CallFate, Commit, EngineVersion, LedgerRow

RUN = "run1"


@pytest.fixture
def store(tmp_path):
    opened = SqliteStore(tmp_path / "store.sqlite", busy_timeout_s=0.2)
    opened.start_run(RUN, POLICY, {"lr": 0.5})
    yield opened
    assert opened.verify() == []
    opened.close()


def commit(store, *records, new=()):
    store.commit_calls(pack(records), records, list(new))


def ingest(store, *, untrainable=None, sampled=(3, 4)):
    for pending in store.pending_calls(64):
        call = model_call(
            id=pending.raw.id,
            rollout_id=pending.raw.rollout_id,
            sampled_ids=list(sampled),
            untrainable=untrainable,
        )
        store.save_calls([call], {})


def played(store, group_id, reward=None, **fields):
    """A rollout of one call with two sampled tokens, scored if there is a reward."""
    opened = store.open_rollout(rollout(run_id=RUN, group_id=group_id, **fields), group_size=2)
    commit(store, raw_call(opened.id))
    ingest(store)
    store.seal_rollout(opened.id, "completed")
    if reward is not None:
        store.settle(opened.id, [])
        store.save_score(opened.id, reward, {"reward": reward}, "script")
    return opened.id


def closed_group(store, group_id="g_1", size=2):
    members = [played(store, group_id, float(index)) for index in range(size)]
    store.close_group(group_id, members, {})
    return members


def learner(store):
    return store.acquire_lease(f"learner:{POLICY}", "learner-1", 5.0)


def take(store, epoch, **fields):
    return store.take_batch(
        RUN, epoch=epoch, **{"groups": 1, "batch_wait_s": 0.0, "staleness_max": 4, **fields}
    )


def commit_of(batch, epoch, *, new_version=True, tokens=2, step=1):
    rows = [LedgerRow(one.id, tokens, 0, 0.5) for group in batch.groups for one in group]
    return Commit(
        batch_id=batch.id,
        run_id=RUN,
        lineage=f"l_{RUN}",
        epoch=epoch,
        step=step,
        checkpoint=f"checkpoint-{step}",
        rows=rows,
        metrics={"loss": 0.25},
        new_version=new_version,
    )


# -- the file ----------------------------------------------------------------------------------


def test_reopening_keeps_everything_and_migrates_once(tmp_path):
    path = tmp_path / "store.sqlite"
    first = SqliteStore(path)
    lineage = first.start_run(RUN, POLICY, {"lr": 0.5})
    first.close()
    again = SqliteStore(path)
    assert again.lineage(RUN) == lineage
    assert again.run_settings(RUN) == {"lr": 0.5}
    numbers = [row[0] for row in apsw.Connection(str(path)).execute("SELECT number FROM migrations")]
    assert numbers == [number for number, _, _ in migrations()] == sorted(set(numbers))
    again.close()


def test_a_newer_schema_is_refused(tmp_path):
    path = tmp_path / "store.sqlite"
    SqliteStore(path).close()
    apsw.Connection(str(path)).execute("INSERT INTO migrations VALUES (999, 'later', 0)")
    with pytest.raises(StoreError, match="upgrade Hone"):
        SqliteStore(path)


def test_a_file_that_is_no_store_is_corrupt(tmp_path):
    path = tmp_path / "store.sqlite"
    path.write_bytes(b"not a database" * 1000)
    with pytest.raises(Corrupt):
        SqliteStore(path)


def test_many_processes_open_a_fresh_store_at_once(tmp_path):
    code = (
        "import sys, pathlib; from capture.sqlite import SqliteStore; "
        "SqliteStore(pathlib.Path(sys.argv[1])).close()"
    )
    path = tmp_path / "store.sqlite"
    opening = [
        subprocess.Popen([sys.executable, "-c", code, path], cwd=Path(__file__).parents[1]) for _ in range(4)
    ]
    assert [process.wait(60) for process in opening] == [0] * 4


def test_a_held_write_lock_is_store_busy_and_writes_nothing(store):
    other = apsw.Connection(str(store.path))
    other.execute("BEGIN IMMEDIATE")
    with pytest.raises(StoreBusy):
        store.open_rollout(rollout(id="r_1"))
    other.execute("ROLLBACK")
    with pytest.raises(NotFound):
        store.rollout("r_1")


def test_a_damaged_frame_is_corrupt():
    with pytest.raises(Corrupt):
        unpack(b"\x28\xb5\x2f\xfd damaged")


# -- leases ------------------------------------------------------------------------------------


def test_a_lease_has_one_holder_and_its_epoch_rises_with_each_change(store):
    assert store.acquire_lease("control", "a", 60.0) == 1
    assert store.acquire_lease("control", "a", 60.0) == 1
    assert store.acquire_lease("control", "b", 60.0) is None
    assert store.live_leases("con") == {"control": "a"}
    store.release_lease("control", "b")
    assert store.acquire_lease("control", "b", 60.0) is None
    store.release_lease("control", "a")
    assert store.live_leases("con") == {}
    assert store.acquire_lease("control", "b", 60.0) == 2
    assert store.acquire_lease("control", "b", -1.0) == 2
    assert store.acquire_lease("control", "a", 60.0) == 3


# -- rollouts ----------------------------------------------------------------------------------


def test_a_rollout_reads_back_as_it_was_opened(store):
    given = rollout(
        group_id="g_1",
        run_id=RUN,
        scenario_id="s",
        scenario={"board": [0, 1]},
        metadata=["x"],
        secret_hash=b"s" * 32,
        max_calls=3,
        created_at=5.0,
    )
    opened = store.open_rollout(given, group_size=8)
    assert opened == msgspec.structs.replace(given, policy=POLICY)
    assert store.rollout(given.id) == opened
    assert (store.group("g_1").size, store.group("g_1").state) == (8, "open")
    with pytest.raises(Conflict):
        store.open_rollout(given)


@pytest.mark.parametrize(("mode", "at_opening", "at_the_end"), [("train", None, 0), ("eval", 0, 0)])
def test_who_never_calls_has_the_version_that_is_active_at_its_end(store, mode, at_opening, at_the_end):
    opened = store.open_rollout(rollout(mode=mode))
    assert opened.policy_version == at_opening
    assert store.seal_rollout(opened.id, "agent_error").policy_version == at_the_end


def test_a_training_rollout_has_the_version_of_its_first_call(store):
    opened = store.open_rollout(rollout())
    for version in (7, 8):
        commit(store, raw_call(opened.id, mode="train", policy_version=version))
    assert store.seal_rollout(opened.id, "completed").policy_version == 7
    assert store.open_rollout(rollout(policy_version=3)).policy_version == 3  # who asks for one has it
    assert store.open_rollout(rollout(mode="observe")).policy_version is None


def test_a_training_rollout_of_an_application_joins_the_live_run_if_it_has_a_group(store):
    assert store.open_rollout(rollout(group_id="g_1")).run_id == RUN
    assert store.open_rollout(rollout()).run_id is None
    assert store.open_rollout(rollout(mode="observe")).run_id is None
    store.end_run(RUN, "finished")
    assert store.open_rollout(rollout(group_id="g_2")).run_id is None


def test_rollouts_are_listed_by_filter_and_page(store):
    ids = sorted(store.open_rollout(rollout(mode=mode)).id for mode in ("train", "eval", "train"))
    assert [one.id for one in store.rollouts()] == ids
    assert [one.id for one in store.rollouts(after=ids[0], limit=1)] == [ids[1]]
    assert len(store.rollouts(mode="train", states=["open", "sealed"])) == 2
    assert store.rollouts(states=["sealed"]) == []


def test_a_session_is_one_open_observe_rollout(store):
    first = store.session_rollout("k", "s", rollout(mode="observe"))
    assert store.session_rollout("k", "s", rollout(mode="observe")).id == first.id
    assert store.session_rollout("other", "s", rollout(mode="observe")).id != first.id
    store.seal_rollout(first.id, "completed")
    assert store.session_rollout("k", "s", rollout(mode="observe")).id != first.id


def test_sealing_twice(store):
    opened = store.open_rollout(rollout())
    sealed = store.seal_rollout(opened.id, "timeout", metrics={"wins": 1.0}, stdout="bye")
    assert (sealed.state, sealed.status, sealed.metrics, sealed.stdout) == (
        "sealed",
        "timeout",
        {"wins": 1.0},
        "bye",
    )
    assert store.seal_rollout(opened.id, "timeout") == sealed
    with pytest.raises(Conflict):
        store.seal_rollout(opened.id, "completed")


def test_failed_drops_its_tokens_even_those_that_are_ingested_later(store):
    opened = store.open_rollout(rollout())
    commit(store, raw_call(opened.id))
    assert store.seal_rollout(opened.id, "failed").state == "failed"
    assert store.balance(POLICY).dropped == {}
    ingest(store)
    assert store.balance(POLICY).dropped == {"failed": 2}
    assert store.balance(POLICY).exact


def test_idle_needs_neither_calls_nor_a_live_record_of_them(store):
    old, busy, fresh = (store.open_rollout(rollout(created_at=at)).id for at in (1.0, 1.0, 0.0))
    store.touch_in_flight("proxy-1", {busy: 1}, ttl_s=60.0)
    assert [one.id for one in store.idle_rollouts(60.0)] == [old]
    store.touch_in_flight("proxy-1", {}, ttl_s=60.0)
    assert {one.id for one in store.idle_rollouts(60.0)} == {old, busy}
    store.touch_in_flight("proxy-1", {old: 1}, ttl_s=-1.0)
    assert {one.id for one in store.idle_rollouts(60.0)} == {old, busy}
    commit(store, raw_call(old))
    assert {one.id for one in store.idle_rollouts(60.0)} == {busy}
    assert fresh not in {one.id for one in store.idle_rollouts(60.0)}


# -- calls -------------------------------------------------------------------------------------


def test_committing_again_changes_nothing(store):
    opened = store.open_rollout(rollout())
    record = raw_call(opened.id)
    commit(store, record)
    commit(store, record)
    commit(store, record, raw_call(opened.id))
    assert store.rollout(opened.id).call_count == 2
    assert [one.raw.id for one in store.pending_calls(1)] == [record.id]
    assert store.rollout_of_call(record.id) == opened.id


def test_a_call_without_rollout_is_refused_whole(store):
    opened = store.open_rollout(rollout())
    with pytest.raises(NotFound, match="r_none"):
        commit(store, raw_call(opened.id), raw_call("r_none"))
    assert store.counts().calls == 0


def test_rollouts_that_nobody_opened_come_with_their_first_call_and_are_pinned_by_it(store):
    fresh = rollout(mode="observe", headless=True)
    commit(store, raw_call(fresh.id, policy_version=7), new=[fresh])
    commit(store, raw_call(fresh.id, policy_version=8), new=[fresh])
    found = store.rollout(fresh.id)
    assert (found.headless, found.policy_version, found.call_count) == (True, 7, 2)


def test_the_mode_of_a_call_is_its_rollouts(store):
    opened = store.open_rollout(rollout(mode="eval"))
    commit(store, raw_call(opened.id, mode="train"))
    ingest(store)
    assert store.balance(POLICY).not_for_training == {"eval": 2}


def test_calls_read_back_whole_although_stored_as_differences(store):
    opened = store.open_rollout(rollout())
    records = [raw_call(opened.id, started_at=float(at)) for at in (1, 2, 3)]
    commit(store, *records)
    question, answer = {"role": "user", "content": "x" * 600}, {"role": "assistant", "content": "é"}
    shared = {"rollout_id": opened.id, "tools": [{"type": "function", "function": {"name": "f"}}]}
    hashes = {"body_hash": b"h" * 16}
    first = model_call(
        id=records[0].id, started_at=1.0, messages=[question], response=answer, **shared, **hashes
    )
    second = model_call(
        id=records[1].id,
        started_at=2.0,
        messages=[question, answer, question],
        response=None,
        prompt_ids=[1, 2, 3, 4, 5],
        sampled_ids=[2**31 - 1],
        sampled_logprobs=[-0.1015625],
        **shared,
        **hashes,
    )
    third = model_call(
        id=records[2].id, started_at=3.0, messages=[question], prompt_ids=[1, 9], **shared, **hashes
    )
    store.save_calls([first], {})
    store.save_calls([second, third], {second.id: base_of(first, 4, 2), third.id: base_of(second, 1, 1)})
    assert store.calls(opened.id) == [first, second, third]
    assert store.parents(opened.id) == [content_of(call) for call in (first, second, third)]
    rows = apsw.Connection(str(store.path)).execute("SELECT length(tokens) FROM contents ORDER BY n")
    assert [row[0] for row in rows] == [3 * 4, 4 * 2, 3 * 3]  # one id needs four bytes
    store.save_calls([second], {})
    assert store.counts().calls_not_ingested == 0


MESSAGE = st.fixed_dictionaries({"role": st.just("user"), "content": st.text("ab ", max_size=300)})
CONTENT = st.tuples(st.lists(MESSAGE, max_size=4), st.lists(st.sampled_from([1, 5, 2**24]), max_size=6))


@given(st.lists(st.tuples(CONTENT, st.integers(0, 9), st.booleans()), min_size=1, max_size=6))
@hypothesis_settings(max_examples=40, deadline=None)
def test_contents_read_back_whole_whatever_their_bases_are(contents):
    """Bases that share nothing, or whose own content is not known any more, included."""
    with tempfile.TemporaryDirectory() as directory:
        store = SqliteStore(Path(directory) / "store.sqlite")
        store._db.execute("PRAGMA synchronous = OFF")
        opened = store.open_rollout(rollout())
        saved = []
        for at, ((messages, prompt), choice, known) in enumerate(contents):
            record = raw_call(opened.id, started_at=float(at))
            commit(store, record)
            fields = {"id": record.id, "started_at": float(at), "body_hash": record.body_hash}
            call = model_call(opened.id, messages=messages, prompt_ids=prompt, sampled_ids=[choice], **fields)
            bases = {}
            if saved:
                one = saved[choice % len(saved)]
                mine, theirs = content_of(call), content_of(one)
                base = base_of(
                    one, prefix(mine.tokens, theirs.tokens) // 4, prefix(mine.messages, theirs.messages)
                )
                forgotten = ParentContent(one.id, b"", [])
                bases[call.id] = base if known else msgspec.structs.replace(base, content=forgotten)
            store.save_calls([call], bases)
            saved.append(call)
        assert store.calls(opened.id) == saved
        assert store.verify() == []
        store.close()


def prefix(left, right):
    count = 0
    while count < min(len(left), len(right)) and left[count] == right[count]:
        count += 1
    return count


def test_a_response_written_down_anew_costs_little(store):
    """The rewritten response is another message, but most of it stands in the one before."""
    opened = store.open_rollout(rollout())
    records = [raw_call(opened.id, started_at=float(at)) for at in (1, 2)]
    commit(store, *records)
    long = {"role": "assistant", "content": " ".join(str(number**3) for number in range(300))}
    again = {"content": long["content"], "role": "assistant"}
    first = model_call(id=records[0].id, rollout_id=opened.id, response=long, started_at=1.0)
    second = model_call(
        id=records[1].id, rollout_id=opened.id, messages=[*first.messages, again], started_at=2.0
    )
    store.save_calls([first, second], {second.id: base_of(first, 2, 1)})
    sizes = [row[0] for row in store._rows("SELECT length(messages) FROM contents ORDER BY n")]
    assert sizes[0] > 700
    assert sizes[1] < 120


def a_store_of_the_first_schema(path):
    """As Hone wrote it then: a call, another as a difference to it, and one that waits for ingest."""
    _, name, sql = migrations()[0]
    db = apsw.Connection(str(path))
    db.execute(
        "CREATE TABLE migrations (number INTEGER PRIMARY KEY, name TEXT NOT NULL, applied_at REAL NOT NULL)"
    )
    db.execute(sql)
    db.execute("INSERT INTO migrations VALUES (1, ?, 0)", (name,))

    def insert(table, **row):
        values = ", ".join("?" * len(row))
        db.execute(f"INSERT INTO {table} ({', '.join(row)}) VALUES ({values})", tuple(row.values()))

    rollout_fields = {"key_id": "k", "mode": "train", "policy": POLICY}
    insert(
        "rollouts",
        id="r_1",
        state="open",
        attempt=0,
        headless=0,
        call_count=3,
        created_at=0.0,
        stdout="",
        **rollout_fields,
    )
    waiting = raw_call("r_1", id="c_3", started_at=3.0, response=response([1, 2, 3, 4, 6, 7], [8]))
    insert("frames", id=1, body=pack([waiting]), remaining=1)
    for n in (1, 2, 3):
        ingested = {"ingested_at": 3.0, "prompt_tokens": 2, "completion_tokens": 2, "sampled_tokens": 2}
        given = {"frame_id": 1, "place": 0, "started_at": float(n), "ended_at": 2.0, "status": 200}
        given |= {"retry_count": 0, "body_hash": b"h", "late": 0, "failed": 0, "policy_version": 0}
        insert(
            "calls",
            n=n,
            id=f"c_{n}",
            rollout_id="r_1",
            **rollout_fields,
            **given,
            **(ingested if n < 3 else {}),
        )

    def content(n, base, counts, tokens, logprobs, messages):
        body = msgspec.json.encode(messages)
        body = body if len(body) < 512 else zstandard.ZstdCompressor(level=1).compress(body)
        row = (n, base, *counts, array("i", tokens).tobytes(), array("f", logprobs).tobytes(), body)
        db.execute("INSERT INTO contents VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, 1, NULL, 'policy', 1.0)", row)

    content(1, None, (0, 0, 2, 2), [1, 2, 3, 4], [-0.5, -1.0], [QUESTION, LONG])
    content(2, 1, (4, 2, 5, 2), [5, 6, 2**24], [-0.25, -0.75], [QUESTION, LONG])
    db.close()


QUESTION, LONG = {"role": "user", "content": "go"}, {"role": "assistant", "content": "x" * 600}


def test_a_store_of_the_first_schema_is_upgraded_and_read_and_written_on(tmp_path):
    path = tmp_path / "old.sqlite"
    a_store_of_the_first_schema(path)
    store = SqliteStore(path)
    first, second = store.calls("r_1")
    assert (first.prompt_ids, first.sampled_ids, first.sampled_logprobs) == ([1, 2], [3, 4], [-0.5, -1.0])
    assert (first.messages, first.response) == ([QUESTION], LONG)
    assert (second.prompt_ids, second.sampled_ids) == ([1, 2, 3, 4, 5], [6, 2**24])
    assert (second.messages, second.response) == ([QUESTION, LONG, QUESTION], LONG)
    assert Ingester(store).step() == 1  # a difference to the second, in the new form
    assert store.calls("r_1")[:2] == [first, second]
    assert store.calls("r_1")[2].prompt_ids == [1, 2, 3, 4, 6, 7]
    assert store._rows("SELECT base, token_form FROM contents") == [(None, 0), (1, 0), (2, 1)]
    assert store.verify() == []
    store.close()
    SqliteStore(path).close()  # once is enough


def test_a_base_that_the_store_does_not_know_is_not_used(store):
    opened = store.open_rollout(rollout())
    record = raw_call(opened.id)
    commit(store, record)
    call = model_call(id=record.id, rollout_id=opened.id, body_hash=b"h" * 16)
    store.save_calls([call], {record.id: base_of(model_call(id="c_unknown"), 2, 1)})
    assert store.calls(opened.id) == [call]


def test_logprobs_are_kept_exactly_as_float32(store):
    opened = store.open_rollout(rollout())
    record = raw_call(opened.id)
    commit(store, record)
    given = [-0.10000000149011612, -1.1920928955078125e-07]  # float32 values, as an engine prints them
    store.save_calls([model_call(id=record.id, rollout_id=opened.id, sampled_logprobs=given)], {})
    assert store.calls(opened.id)[0].sampled_logprobs == given


def test_late_and_other_policys_calls_are_excluded(store):
    opened = store.open_rollout(rollout())
    commit(store, raw_call(opened.id, policy="other"))
    store.seal_rollout(opened.id, "completed")
    assert [one.id for one in store.settleable()] == []
    commit(store, raw_call(opened.id))
    ingest(store)
    assert [call.untrainable for call in store.calls(opened.id)] == ["other_policy", "late"]
    assert store.balance(POLICY).untrainable == {"late": 2}
    assert [one.id for one in store.settleable()] == [opened.id]


def test_a_late_call_does_not_hold_up_settling(store):
    opened = store.open_rollout(rollout())
    store.seal_rollout(opened.id, "completed")
    commit(store, raw_call(opened.id))
    assert [one.id for one in store.settleable()] == [opened.id]


def test_an_undelivered_mark_after_settling_changes_nothing(store):
    first, second = (store.open_rollout(rollout()).id for _ in range(2))
    records = [raw_call(first), raw_call(second)]
    commit(store, *records)
    ingest(store)
    store.seal_rollout(first, "completed")
    store.mark_undelivered([records[0].id])
    assert store.calls(first)[0].undelivered
    store.settle(first, [CallFate(records[0].id, "undelivered")])
    store.seal_rollout(second, "completed")
    store.settle(second, [CallFate(records[1].id, None)])
    store.mark_undelivered([records[1].id])
    assert store.calls(first)[0].undelivered
    assert not store.calls(second)[0].undelivered
    assert store.balance(POLICY).untrainable == {"undelivered": 2}


def test_frames_are_pruned_once_all_their_calls_are_ingested(store):
    opened = store.open_rollout(rollout())
    records = [raw_call(opened.id) for _ in range(2)]
    commit(store, *records)
    store.save_calls([model_call(id=records[0].id, rollout_id=opened.id)], {})
    assert store.prune_frames(-1.0) == 0
    ingest(store)
    assert store.prune_frames(60.0) == 0
    assert store.prune_frames(-1.0) == 1
    assert len(store.calls(opened.id)) == 2


# -- scoring and groups ------------------------------------------------------------------------


def test_a_score_for_a_rollout_without_group_drops_it(store):
    id = played(store, None, 1.0)
    assert (store.rollout(id).state, store.rollout(id).drop_reason, store.rollout(id).reward) == (
        "dropped",
        "ungrouped",
        1.0,
    )
    assert store.balance(POLICY).dropped == {"ungrouped": 2}


def test_a_reward_error_is_never_a_number(store):
    id = played(store, "g_1")
    store.settle(id, [])
    store.save_reward_error(id, "Traceback: boom", "script")
    found = store.rollout(id)
    assert (found.state, found.reward, found.reward_error) == ("reward_error", None, "Traceback: boom")
    assert store.balance(POLICY).dropped == {"reward_error": 2}
    with pytest.raises(Conflict):
        store.save_score(id, 1.0, {}, "script")
    with pytest.raises(ValueError, match="finite"):
        store.save_score(id, float("nan"), {}, "script")


def test_scores_are_posted_until_the_batch_is_taken(store):
    members = closed_group(store)
    store.post_score(members[0], "thumbs", 1.0, "user")
    store.post_score(members[0], "thumbs", 0.5, "user")
    assert store.posted_scores(members[0]) == {"thumbs": 0.5}
    epoch = learner(store)
    assert take(store, epoch) is None  # its reward is about to change
    assert [one.id for one in store.scoreable()] == [members[0]]
    store.save_score(members[0], 7.0, {"reward": 6.5, "thumbs": 0.5}, "script")
    batch = take(store, epoch)
    assert [one.reward for one in batch.groups[0]] == [7.0, 1.0]
    with pytest.raises(RewardFrozen) as caught:
        store.post_score(members[0], "thumbs", 0.0, "user")
    assert caught.value.batch_id == batch.id
    assert store.rollout(members[0]).metrics == {"thumbs": 0.0}
    assert store.rollout(members[0]).reward == 7.0


def test_closing_a_group_drops_the_others_with_their_reason(store):
    one, two = (played(store, "g_1", 1.0) for _ in range(2))
    broken = played(store, "g_1")
    store.settle(broken, [])
    store.save_reward_error(broken, "boom", "script")
    waiting = played(store, "g_1")
    with pytest.raises(Conflict):
        store.close_group("g_1", [one, waiting], {})
    store.close_group("g_1", [one, two], {waiting: "too_slow", broken: "reward_error"})
    store.close_group("g_1", [], {})
    assert store.group("g_1").state == "closed"
    assert store.counts().drops == {"reward_error": 1, "too_slow": 1}
    assert store.balance(POLICY) == (
        type(store.balance(POLICY))(8, 0, 0, {"reward_error": 2, "too_slow": 2}, {}, {}, 4)
    )
    with pytest.raises(Conflict):
        store.open_rollout(rollout(run_id=RUN, group_id="g_1"))


def test_a_group_that_was_declared_with_one_closes_with_it(store):
    one = rollout(run_id=RUN, group_id="g_1")
    store.open_rollout(one, group_size=1)
    store.seal_rollout(one.id, "completed")
    store.settle(one.id, [])
    store.save_score(one.id, 1.0, {}, "script")
    store.close_group("g_1", [one.id], {})
    assert (store.group("g_1").state, store.rollout(one.id).state) == ("closed", "grouped")


def test_the_last_of_a_group_of_several_is_dropped(store):
    one = played(store, "g_1", 1.0)
    store.close_group("g_1", [one], {})
    assert store.group("g_1").state == "dropped"
    assert store.rollout(one).drop_reason == "group_too_small"
    assert store.outstanding_groups(RUN) == 0


# -- the learner -------------------------------------------------------------------------------


def test_a_batch_is_taken_committed_and_counted_once(store):
    members = closed_group(store)
    epoch = learner(store)
    batch = take(store, epoch)
    assert [[one.id for one in group] for group in batch.groups] == [sorted(members)]
    assert take(store, epoch) == batch  # after a restart
    version = store.commit_batch(commit_of(batch, epoch))
    assert (version.version, version.parent, version.distance, version.state) == (1, 0, 1, "committed")
    assert store.commit_batch(commit_of(batch, epoch)) == version
    lineage = store.lineage(RUN)
    assert (lineage.head_version, lineage.step, lineage.checkpoint) == (1, 1, "checkpoint-1")
    assert [(row.version, row.metrics) for row in store.steps(RUN)] == [(1, {"loss": 0.25})]
    assert store.balance(POLICY).trained == 4
    assert store.ledger_twice() == 0
    assert store.groups_of_run(RUN) == {"trained": 1}
    assert take(store, epoch) is None


def test_an_all_zero_batch_commits_without_a_version(store):
    closed_group(store)
    epoch = learner(store)
    batch = take(store, epoch)
    rows = [LedgerRow(one.id, 0, 2, 0.0) for one in batch.groups[0]]
    commit = msgspec.structs.replace(commit_of(batch, epoch, new_version=False), rows=rows)
    assert store.commit_batch(commit) is None
    assert store.commit_batch(commit) is None
    assert store.lineage(RUN).head_version == 0
    assert store.balance(POLICY).zero_advantage == 4


def test_ledger_rows_must_be_the_batchs_rollouts_and_their_tokens(store):
    closed_group(store)
    epoch = learner(store)
    batch = take(store, epoch)
    with pytest.raises(Conflict, match="3 given, 2 owned"):
        store.commit_batch(commit_of(batch, epoch, tokens=3))
    with pytest.raises(Conflict):
        store.commit_batch(msgspec.structs.replace(commit_of(batch, epoch), rows=[]))
    assert store.lineage(RUN).step == 0


def test_a_fenced_learner_can_do_nothing(store):
    closed_group(store)
    old = store.acquire_lease(f"learner:{POLICY}", "old", -1.0)
    batch = take(store, old)
    new = learner(store)
    for attempt in (
        lambda: take(store, old),
        lambda: store.commit_batch(commit_of(batch, old)),
        lambda: store.drop_batch(batch.id, "nonfinite", old),
        lambda: store.publish_version(POLICY, 0, "/a", "sha", old),
    ):
        with pytest.raises(Fenced):
            attempt()
    assert store.commit_batch(commit_of(take(store, new), new)).version == 1


def test_a_batch_waits_for_its_groups_but_not_for_ever(store):
    closed_group(store)
    epoch = learner(store)
    assert take(store, epoch, groups=2, batch_wait_s=60.0) is None
    assert len(take(store, epoch, groups=2, batch_wait_s=0.0).groups) == 1


def test_stale_groups_are_dropped_whole(store):
    epoch = learner(store)
    for step in (1, 2):
        closed_group(store, f"g_{step}")
        store.commit_batch(commit_of(take(store, epoch), epoch, step=step))
    closed_group(store, "g_3")  # sampled by version 0, the head is version 2
    assert take(store, epoch, staleness_max=1) is None
    assert (store.group("g_3").state, store.balance(POLICY).dropped) == ("dropped", {"stale": 4})
    closed_group(store, "g_4")
    assert take(store, epoch, staleness_max=2) is not None


def test_a_dropped_batch_frees_its_groups_and_cannot_commit(store):
    closed_group(store)
    epoch = learner(store)
    batch = take(store, epoch)
    assert store.outstanding_groups(RUN) == 1
    store.drop_batch(batch.id, "nonfinite", epoch)
    store.drop_batch(batch.id, "nonfinite", epoch)
    assert store.outstanding_groups(RUN) == 0
    assert store.balance(POLICY).dropped == {"nonfinite": 4}
    with pytest.raises(Conflict):
        store.commit_batch(commit_of(batch, epoch))


def test_ending_a_run_leaves_nothing_pending(store):
    epoch = learner(store)
    closed_group(store, "g_1")
    store.commit_batch(commit_of(take(store, epoch), epoch))
    closed_group(store, "g_2")
    taken = take(store, epoch)
    closed_group(store, "g_3")
    open_one = store.open_rollout(rollout(run_id=RUN, group_id="g_4")).id
    commit(store, raw_call(open_one))
    assert store.end_run(RUN, "run_ended") == 5
    assert store.end_run(RUN, "other") == 0
    assert store.lineage(RUN).ended
    ingest(store)
    balance = store.balance(POLICY)
    assert (balance.sampled, balance.trained, balance.pending, balance.dropped) == (
        14,
        4,
        0,
        {"run_ended": 10},
    )
    assert store.groups_of_run(RUN) == {"trained": 1, "dropped": 3}
    with pytest.raises(Conflict):
        store.commit_batch(commit_of(taken, epoch))
    with pytest.raises(Conflict, match="ended"):
        store.open_rollout(rollout(run_id=RUN, group_id="g_5"))
    assert store.seal_rollout(open_one, "completed").state == "dropped"


def test_metrics_are_a_history(store):
    store.put_metrics(RUN, "eval", {"wins": 1})
    store.put_metrics(RUN, "eval", {"wins": 2})
    store.put_metrics(RUN, "swap", {"s": 0.5})
    assert store.get_metrics(RUN, "eval") == [{"wins": 1}, {"wins": 2}]


# -- versions ----------------------------------------------------------------------------------


def published(store, epoch, step):
    closed_group(store, f"g_{step}")
    version = store.commit_batch(commit_of(take(store, epoch), epoch, step=step)).version
    store.publish_version(POLICY, version, f"/adapters/{version}", "sha", epoch)
    return version


def test_a_version_is_activated_once_an_engine_has_verified_it(store):
    epoch = learner(store)
    activator = store.acquire_lease("activator", "proxy-1", 60.0)
    version = published(store, epoch, 1)
    with pytest.raises(Conflict, match="no engine"):
        store.activate(POLICY, version, activator)
    row = EngineVersion(engine="e", policy=POLICY, version=version, state="loaded", in_flight=3)
    store.record_engine_version(row)
    with pytest.raises(Conflict, match="no engine"):
        store.activate(POLICY, version, activator)
    store.record_engine_version(msgspec.structs.replace(row, state="verified", at=9.0))
    assert store.engine_versions(POLICY) == [msgspec.structs.replace(row, state="verified", at=9.0)]
    with pytest.raises(Fenced):
        store.activate(POLICY, version, activator + 1)
    store.activate(POLICY, version, activator)
    store.activate(POLICY, version, activator)
    assert store.active_version(POLICY).version == version
    assert store.promoted_version(POLICY).version == 0
    with pytest.raises(Conflict, match="older"):
        store.activate(POLICY, 0, activator)


def test_publishing_is_idempotent_and_never_changes(store):
    epoch = learner(store)
    version = published(store, epoch, 1)
    store.publish_version(POLICY, version, f"/adapters/{version}", "sha", epoch)
    with pytest.raises(Conflict):
        store.publish_version(POLICY, version, "/elsewhere", "sha", epoch)
    assert store.versions(POLICY)[1].path == f"/adapters/{version}"


def test_pins_are_counted_and_expire(store):
    evaluation = store.open_rollout(rollout(mode="eval")).id
    train, sealed = (store.open_rollout(rollout(policy_version=0)).id for _ in range(2))
    store.open_rollout(rollout())  # has not called yet
    store.seal_rollout(sealed, "completed")
    assert store.pinned_versions(POLICY) == {0: 2}
    assert store.expire_pins(POLICY, 0) == 1
    assert store.rollout(train).drop_reason == "stale"
    assert store.rollout(evaluation).state == "open"
    with pytest.raises(Conflict):
        store.retire_version(POLICY, 0)


def test_counts_of_a_run_and_of_everything(store):
    opened = store.open_rollout(rollout(run_id=RUN, group_id="g_1"))
    other = store.open_rollout(rollout(mode="observe"))
    commit(store, raw_call(opened.id), raw_call(opened.id, status=500), raw_call(other.id, error="broke"))
    counts = store.counts(RUN)
    assert (counts.calls, counts.calls_not_ingested, counts.failed_calls) == (2, 2, 1)
    assert counts.rollouts == {"open": 1}
    everything = store.counts()
    assert (everything.calls, everything.failed_calls, everything.rollouts) == (3, 2, {"open": 2})


def test_verify_sees_what_is_broken(tmp_path):
    store = SqliteStore(tmp_path / "store.sqlite")
    store.start_run(RUN, POLICY, {})
    id = played(store, None, 1.0)
    assert store.verify() == []
    breaks = {
        "UPDATE drops SET tokens = tokens + 1": "its drop counts other tokens than its calls have",
        "DELETE FROM drops": "it is out of the pipeline without a counted drop",
        "UPDATE rollouts SET call_count = 9": "its call_count is not the number of its calls",
        "DELETE FROM contents": "ingested and stored content disagree",
        "UPDATE frames SET remaining = 1": "frame counts other calls than those that wait for ingest",
        "UPDATE policies SET active = 5": "its active or promoted version does not exist",
    }
    for sql, sentence in breaks.items():
        other = apsw.Connection(str(store.path))
        before = other.execute("SELECT count(*) FROM rollouts").fetchall()
        other.execute("BEGIN IMMEDIATE")
        other.execute(sql)
        other.execute("COMMIT")
        assert any(sentence in line for line in store.verify()), sentence
        assert before == [(1,)]
    assert any(id in line for line in store.verify())
    store.close()

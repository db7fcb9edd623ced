import asyncio
import time

import apsw
import pytest
from capture_makers import POLICY, raw_call, rollout

from capture.errors import NotFound, StoreBusy, StoreError
from capture.journal import Journal, Settings
from capture.sqlite import SqliteStore


@pytest.fixture
def path(tmp_path):
    return tmp_path / "store.sqlite"


@pytest.fixture
def store(path):
    opened = SqliteStore(path)
    opened.start_run("run1", POLICY, {})
    yield opened
    assert opened.verify() == []
    opened.close()


@pytest.fixture
async def open_journal(store, path):
    """A started journal on the test's store, with these settings."""
    opened = []

    def start(**fields):
        own = SqliteStore(path, busy_timeout_s=0.05)
        journal = Journal(own, Settings(**fields))
        journal.start()
        opened.append((journal, own))
        return journal

    yield start
    for journal, own in opened:
        await journal.close()
        own.close()


async def test_many_calls_share_frames_and_each_is_durable_when_acknowledged(store, open_journal):
    journal = open_journal()
    opened = store.open_rollout(rollout())

    async def one():
        record = raw_call(opened.id)
        await journal.commit(record)
        assert store.rollout_of_call(record.id) == opened.id

    await asyncio.gather(*(one() for _ in range(300)))
    assert store.rollout(opened.id).call_count == journal.calls == 300
    assert journal.frames < 100
    assert journal.queue_bytes == 0


async def test_a_rollout_comes_with_its_first_call(store, open_journal):
    fresh = rollout(mode="observe", headless=True)
    await open_journal().commit(raw_call(fresh.id), fresh)
    assert store.rollout(fresh.id).headless


async def test_one_bad_record_does_not_hurt_the_others_of_its_frame(store, open_journal):
    journal = open_journal()
    opened = store.open_rollout(rollout())
    records = [raw_call("r_none" if index == 5 else opened.id) for index in range(20)]
    results = await asyncio.gather(*(journal.commit(one) for one in records), return_exceptions=True)
    assert [index for index, result in enumerate(results) if isinstance(result, Exception)] == [5]
    assert isinstance(results[5], NotFound)
    assert store.rollout(opened.id).call_count == 19


async def test_a_busy_store_is_tried_again_until_it_is_free(store, open_journal, path):
    journal = open_journal()
    opened = store.open_rollout(rollout())
    other = apsw.Connection(str(path))
    other.execute("BEGIN IMMEDIATE")
    waiting = asyncio.create_task(journal.commit(raw_call(opened.id)))
    await asyncio.sleep(0.3)
    assert not waiting.done()
    other.execute("COMMIT")
    await asyncio.wait_for(waiting, 5)
    assert store.rollout(opened.id).call_count == 1


async def test_a_store_that_stays_busy_is_an_error_and_nothing_is_written(store, open_journal, path):
    journal = open_journal(commit_timeout_s=0.2)
    opened = store.open_rollout(rollout())
    other = apsw.Connection(str(path))
    other.execute("BEGIN IMMEDIATE")
    with pytest.raises(StoreBusy):
        await asyncio.wait_for(journal.commit(raw_call(opened.id)), 5)
    other.execute("ROLLBACK")
    assert store.rollout(opened.id).call_count == 0
    await journal.commit(raw_call(opened.id))
    assert store.rollout(opened.id).call_count == 1


async def test_a_full_queue_makes_commit_wait_and_drops_nothing(store, open_journal, path):
    record = raw_call(store.open_rollout(rollout()).id)
    size = len(record.request) + len(record.response)
    journal = open_journal(queue_bytes_max=3 * size, frame_calls_max=2)
    other = apsw.Connection(str(path))
    other.execute("BEGIN IMMEDIATE")
    tasks = [asyncio.create_task(journal.commit(raw_call(record.rollout_id))) for _ in range(50)]
    await asyncio.sleep(0.2)
    assert journal.queue_bytes == 3 * size
    tasks[-1].cancel()  # it has no room yet, so it is taken back
    other.execute("ROLLBACK")
    await asyncio.wait(tasks, timeout=10)
    assert store.rollout(record.rollout_id).call_count == 49
    assert journal.queue_bytes == 0


async def test_a_record_larger_than_the_queue_gets_through_alone(store, open_journal):
    journal = open_journal(queue_bytes_max=10)
    opened = store.open_rollout(rollout())
    await asyncio.wait_for(asyncio.gather(*(journal.commit(raw_call(opened.id)) for _ in range(5))), 10)
    assert store.rollout(opened.id).call_count == 5


async def test_giving_up_the_wait_does_not_take_back_what_is_queued(store, open_journal, path):
    journal = open_journal()
    opened = store.open_rollout(rollout())
    other = apsw.Connection(str(path))
    other.execute("BEGIN IMMEDIATE")
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(journal.commit(raw_call(opened.id)), 0.1)
    other.execute("ROLLBACK")
    await journal.close()
    assert store.rollout(opened.id).call_count == 1


async def test_closing_commits_what_was_handed_in_and_refuses_more(store, open_journal, path):
    record = raw_call(store.open_rollout(rollout()).id)
    journal = open_journal(queue_bytes_max=2 * len(record.request + record.response))
    other = apsw.Connection(str(path))
    other.execute("BEGIN IMMEDIATE")
    tasks = [asyncio.create_task(journal.commit(raw_call(record.rollout_id))) for _ in range(10)]
    await asyncio.sleep(0.05)
    closing = asyncio.create_task(journal.close())
    await asyncio.sleep(0.05)
    other.execute("ROLLBACK")
    await asyncio.wait_for(closing, 10)
    await asyncio.gather(*tasks)
    assert store.rollout(record.rollout_id).call_count == 10
    with pytest.raises(StoreError):
        await journal.commit(raw_call(record.rollout_id))


async def test_the_loop_stays_free_while_the_store_is_slow(store, open_journal, path):
    journal = open_journal()
    opened = store.open_rollout(rollout())
    other = apsw.Connection(str(path))
    other.execute("BEGIN IMMEDIATE")
    waiting = asyncio.create_task(journal.commit(raw_call(opened.id)))
    began = time.monotonic()
    for _ in range(10):
        await asyncio.sleep(0.001)
    assert time.monotonic() - began < 0.5
    other.execute("ROLLBACK")
    await waiting

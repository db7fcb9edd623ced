"""Promotions in the store: what may be asked for, what is served when, and what a rollback goes back to."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from capture_makers import POLICY, raw_call, rollout

from capture.errors import Conflict, Fenced, NotFound
from capture.frames import pack
from capture.promotions import served_before
from capture.sqlite import SqliteStore
from capture.types import EngineVersion, Promotion

LATER = 4  # versions 1 to 3 were active; 4 is published


@pytest.fixture
def store(tmp_path: Path) -> Iterator[SqliteStore]:
    """Version 3 is active; 1 to 3 were verified and are unloaded by now, 1 and 2 are retired."""
    opened = SqliteStore(tmp_path / "hone.db")
    lineage = opened.start_run("run", POLICY, {}).id
    for version in range(1, LATER + 1):
        insert(opened, lineage, version, "published")
    epoch = lead(opened)
    for version in range(1, LATER):
        engine_says(opened, version, "verified")
        opened.activate(POLICY, version, epoch)
        engine_says(opened, version, "unloaded")
    for version in (1, 2):
        opened.retire_version(POLICY, version)
    yield opened
    assert opened.verify() == []
    opened.close()


def insert(store: SqliteStore, lineage: str, version: int, state: str) -> None:
    """What the learner's commit leaves."""
    store._db.execute("UPDATE policies SET next_version = ?", (version + 1,))
    store._db.execute(
        "INSERT INTO versions VALUES (?, ?, ?, ?, ?, ?, ?, 'sha', 1.0, NULL, ?)",
        (POLICY, version, lineage, version - 1, version, state, f"/a/{version}", version),
    )


def engine_says(store: SqliteStore, version: int, state: Any, detail: str = "") -> None:
    store.record_engine_version(
        EngineVersion(engine="e", policy=POLICY, version=version, state=state, detail=detail)
    )


def lead(store: SqliteStore) -> int:
    epoch = store.acquire_lease("activator", "proxy-1", 60.0)
    assert epoch is not None
    return epoch


def ask(store: SqliteStore, version: int | None, kind: Any = "promote") -> Promotion:
    asked = store.ask_promotion(POLICY, version, kind)
    assert asked is not None
    return asked


def serve(store: SqliteStore, version: int | None, kind: Any = "promote") -> int:
    """Ask, let an engine prove it, promote; the version that is served now."""
    asked = ask(store, version, kind)
    engine_says(store, asked.version, "verified")
    assert store.promote(asked.n, lead(store))
    return promoted(store)


def promoted(store: SqliteStore) -> int:
    found = store.promoted_version(POLICY)
    assert found is not None
    return found.version


# -- what a rollback goes back to ----------------------------------------------------------------


@pytest.mark.parametrize(
    ("steps", "before"),
    [
        ([], None),
        ([("promote", 3)], 0),
        ([("promote", 3), ("promote", 5)], 3),
        ([("promote", 3), ("promote", 5), ("rollback", 3)], 0),  # not 5 again
        ([("promote", 3), ("promote", 5), ("rollback", 3), ("rollback", 0)], None),
        ([("promote", 3), ("promote", 5), ("rollback", 3), ("promote", 7)], 3),
        ([("promote", 3), ("promote", 5), ("promote", 3)], 5),  # promoted once more, not rolled back to
        ([("promote", 3), ("promote", 5), ("promote", 3), ("promote", 7), ("rollback", 3)], 5),
        ([("promote", 3), ("promote", 5), ("rollback", 4)], 3),  # 4 was never promoted: it is in 5's place
        ([("promote", 3), ("promote", 5), ("rollback", 0)], None),
    ],
)
def test_what_was_served_before(steps: list[tuple[Any, int]], before: int | None) -> None:
    history, served = [], 0
    for n, (kind, version) in enumerate(steps):
        times = {"asked_at": 1.0, "served_at": 2.0}
        history.append(Promotion(n=n, policy=POLICY, version=version, kind=kind, replaced=served, **times))
        history.append(
            Promotion(n=n, policy=POLICY, version=99, kind=kind, asked_at=1.0, reason="no engine proved it")
        )
        served = version
    assert served_before(history) == before


# -- asking --------------------------------------------------------------------------------------


def test_the_whole_way_there_and_back(store: SqliteStore) -> None:
    asked = ask(store, None)
    assert (asked.version, asked.kind, asked.is_open) == (3, "promote", True)  # the active one
    assert store.open_promotion(POLICY) == asked
    assert promoted(store) == 0
    with pytest.raises(Conflict, match="no engine has verified it"):
        store.promote(asked.n, lead(store))
    engine_says(store, 3, "indistinguishable")
    with pytest.raises(Fenced):
        store.promote(asked.n, lead(store) + 1)
    assert store.promote(asked.n, lead(store))
    assert promoted(store) == 3
    assert not store.promote(asked.n, lead(store))  # it is served already
    assert serve(store, 1) == 1
    assert store.versions(POLICY)[1].state == "active"  # in use once more
    with pytest.raises(Conflict, match="active or promoted"):
        store.retire_version(POLICY, 1)
    assert serve(store, None, "rollback") == 3
    assert serve(store, None, "rollback") == 0
    again = SqliteStore(store.path)
    history = again.promotions(POLICY)
    again.close()
    assert [(one.version, one.kind, one.replaced) for one in history] == [
        (3, "promote", 0),
        (1, "promote", 3),
        (3, "rollback", 1),
        (0, "rollback", 3),
    ]
    assert all(one.served_at and one.served_at >= one.asked_at > 1e9 for one in history)


def test_observed_rollouts_keep_no_version(store: SqliteStore) -> None:
    """Their row has the version of the first call, but the next one gets what is promoted then."""
    for mode, version in (("observe", 2), ("train", 3), ("eval", 1), ("eval", 1)):
        opened = store.open_rollout(rollout(mode=mode, policy_version=version if mode == "eval" else None))
        record = raw_call(opened.id, mode=mode, policy=POLICY, policy_version=version)
        store.commit_calls(pack([record]), [record], [])
        assert store.rollout(opened.id).policy_version == version
    assert store.pinned_versions(POLICY) == {3: 1, 1: 2}


def test_one_thing_is_asked_for_at_a_time(store: SqliteStore) -> None:
    first = ask(store, 1)
    assert ask(store, 1) == first
    second = ask(store, 2)
    engine_says(store, 1, "verified")
    assert not store.promote(first.n, lead(store))  # it was taken back
    assert (
        store.ask_promotion(POLICY, 0, "promote") is None
    )  # promoted already: nothing is asked for any more
    assert store.open_promotion(POLICY) is None
    assert [(one.n, one.reason) for one in store.promotions(POLICY)] == [
        (first.n, "v2 was asked for instead"),
        (second.n, "v0 was asked for instead"),
    ]
    assert promoted(store) == 0


def test_a_refusal_is_kept_and_may_be_asked_again(store: SqliteStore) -> None:
    asked = ask(store, 2)
    with pytest.raises(Fenced):
        store.refuse_promotion(asked.n, "no", lead(store) + 1)
    store.refuse_promotion(asked.n, "the directory is gone", lead(store))
    store.refuse_promotion(asked.n, "something else", lead(store))
    assert [one.reason for one in store.promotions(POLICY)] == ["the directory is gone"]
    assert ask(store, 2).n != asked.n


def test_what_no_engine_proved_is_refused_with_what_to_do(store: SqliteStore) -> None:
    def refused(version: int | None, kind: Any = "promote") -> str:
        with pytest.raises((Conflict, NotFound)) as error:
            store.ask_promotion(POLICY, version, kind)
        return str(error.value)

    assert refused(9) == "policy policy has no version 9: `hone adapters ls` lists them"
    assert "is published, and no engine has verified it: a running proxy does that" in refused(4)
    engine_says(store, 4, "failed", "failed: engine is 2 from this version")
    store.retire_version(POLICY, 4)
    assert refused(4) == (
        "policy@v4 failed where it was loaded: promote another version. "
        "e: failed: engine is 2 from this version"
    )
    insert(store, "l_run", 5, "committed")
    assert "not published yet" in refused(5)
    assert "nothing was promoted before v0" in refused(None, "rollback")
    assert "v2 is newer than v0" in refused(2, "rollback")
    serve(store, 3)
    ask(store, 1)
    assert "`hone adapters promote 3` takes that back" in refused(None, "rollback")
    assert ask(store, 2, "rollback").version == 2  # an older one may be named, though never promoted
    with pytest.raises(NotFound, match="the first run"):
        store.ask_promotion("nobody", None, "promote")


def test_verify_sees_what_is_broken(store: SqliteStore) -> None:
    serve(store, 1)
    serve(store, 2)
    no = "NULL"
    breaks = [
        ("policies SET promoted = {}", 1, 2, "its promoted version is not the newest that was promoted"),
        ("promotions SET replaced = {} WHERE n = 2", 0, 1, "its promotion did not replace the one before it"),
        ("promotions SET reason = {} WHERE n = 2", "'no'", no, "or was both served and refused"),
    ]
    for sql, wrong, right, sentence in breaks:
        store._db.execute("UPDATE " + sql.format(wrong))
        assert any(sentence in line for line in store.verify()), sentence
        store._db.execute("UPDATE " + sql.format(right))


def test_a_store_from_before_begins_its_history(tmp_path: Path) -> None:
    before = SqliteStore(tmp_path / "hone.db")
    before.start_run("run", POLICY, {})
    before._db.execute("DROP TABLE promotions")
    before._db.execute("DELETE FROM migrations WHERE name = '0005_promotions.sql'")
    before.close()
    store = SqliteStore(tmp_path / "hone.db")
    assert (promoted(store), store.promotions(POLICY), store.verify()) == (0, [], [])
    store.close()

"""How a run is chosen, asked to end, and ended."""

import asyncio
import sys
from pathlib import Path

import msgspec
import pytest

from capture.errors import ConfigError
from capture.store import Store
from capture.types import Rollout
from hone.config import resolve
from hone.demo import steps_in, training_s
from hone.parts import serving, training
from hone.state import state_path
from hone.supervisor import Part, Supervisor
from hone.training import (
    DRAIN,
    Ending,
    choose_run,
    conduct,
    drained,
    groups_needed,
    learner_should_stop,
    refuse_ended,
)
from learner.settings import Settings

SLEEP = "import time; time.sleep(300)"


def opened(rollout_id: str, group_id: str) -> Rollout:
    return Rollout(
        id=rollout_id,
        key_id="k",
        mode="train",
        run_id="one",
        policy="policy",
        group_id=group_id,
        created_at=1.0,
    )


def test_a_run_that_has_not_ended_goes_on(store: Store) -> None:
    fresh = choose_run(store, "policy", None)
    assert len(fresh) == len("20260101-120000")
    store.start_run("one", "policy", {})
    assert choose_run(store, "policy", None) == "one"
    assert choose_run(store, "policy", "two") == "two"
    assert choose_run(store, "other", None) != "one"
    store.end_run("one", "run_ended")
    assert choose_run(store, "policy", None) != "one"
    with pytest.raises(ConfigError, match="run one has ended; name another one with --run"):
        refuse_ended(store, "one")


def learner(steps_max: int | None, **changes: int) -> Settings:
    return msgspec.convert(
        {"base_model": "x", "steps_max": steps_max, "groups_per_batch": 4, **changes}, Settings
    )


def test_a_drained_run_stops_the_learner_and_needs_no_more_groups(store: Store) -> None:
    store.start_run("one", "policy", {})
    assert not learner_should_stop(store, "one")
    assert groups_needed(store, "one", learner(None)) is None
    store.put_metrics("one", DRAIN, {"reason": "wall"})
    assert drained(store, "one")
    assert learner_should_stop(store, "one")
    assert groups_needed(store, "one", learner(None)) == 0
    assert groups_needed(store, "one", learner(10)) == 0


def test_a_run_needs_groups_for_the_steps_that_are_left(store: Store) -> None:
    store.start_run("one", "policy", {})
    assert groups_needed(store, "one", learner(3)) == 12
    assert groups_needed(store, "one", learner(3, passes=2)) == 8
    assert groups_needed(store, "one", learner(8, passes=2, minibatches=2)) == 8
    assert not learner_should_stop(store, "one")
    store.end_run("one", "run_ended")
    assert learner_should_stop(store, "one")


def make(tmp_path: Path, learn: str, runner: str) -> Supervisor:
    parts = [
        Part(name=name, command=[sys.executable, "-c", code], finite=True)
        for name, code in (("learn", learn), ("runner", runner))
    ]
    return Supervisor(
        parts,
        kind="train",
        state_file=state_path(tmp_path, "train"),
        log_dir=tmp_path / "logs",
        until_done=False,
    )


async def conducted(
    store: Store, supervisor: Supervisor, steps_max: int | None = None, wall_s: float | None = None
) -> Ending:
    running = asyncio.create_task(supervisor.run())
    try:
        work = conduct(store, "one", supervisor, steps_max=steps_max, wall_s=wall_s)
        return await asyncio.wait_for(work, 30)
    finally:
        supervisor.stop()
        await running


async def test_the_run_ends_when_both_are_through(store: Store, tmp_path: Path) -> None:
    store.start_run("one", "policy", {})
    store.open_rollout(opened("r_1", "g_1"), group_size=2)
    ending = await conducted(store, make(tmp_path, "", ""), steps_max=0)
    assert ending == Ending(reason="steps", dropped=1, settled=True)
    assert store.lineage("one").ended
    assert store.rollout("r_1").drop_reason == "run_ended"


async def test_the_run_ends_when_the_epochs_are_through_and_the_learner_waits(
    store: Store, tmp_path: Path
) -> None:
    store.start_run("one", "policy", {})
    ending = await conducted(store, make(tmp_path, SLEEP, ""))
    assert ending == Ending(reason="epochs", dropped=0, settled=True)


async def test_the_wall_asks_both_to_end(store: Store, tmp_path: Path) -> None:
    store.start_run("one", "policy", {})
    watch = f"""
import sys, time
from pathlib import Path
from capture.sqlite import SqliteStore
from hone.training import drained
store = SqliteStore(Path({str(tmp_path / "hone.db")!r}))
while not drained(store, "one"):
    time.sleep(0.05)
"""
    ending = await conducted(store, make(tmp_path, watch, watch), wall_s=0.2)
    assert ending == Ending(reason="wall", dropped=0, settled=True)


def test_the_parts_and_their_order() -> None:
    config = resolve({"policy": {"base_model": "m"}}, {}, Path("/p/hone.toml"), "cpu")
    serve = serving(config, "/py", {"A": "1"})
    train = training(config, "/py", "one", after=[part.name for part in serve])
    assert [(part.name, part.after, part.finite) for part in [*serve, *train]] == [
        ("engine", (), False),
        ("proxy", ("engine",), False),
        ("control", (), False),
        ("learn", ("engine",), True),
        ("runner", ("engine", "proxy", "control", "learn"), True),
    ]
    assert [part.ready_url for part in serve] == [
        "http://127.0.0.1:8100/health",
        "http://127.0.0.1:8000/ready",
        "http://127.0.0.1:8001/health",
    ]
    assert train[0].command == [
        *("/py", "-m", "hone.cli.main", "learn", "--run", "one", "--config", "/p/hone.toml")
    ]
    assert serve[0].env == {"A": "1"}


def test_engines_given_by_url_are_not_started() -> None:
    raw = {
        "policy": {"base_model": "m"},
        "engine": {"urls": ["http://gpu:8000"]},
        "proxy": {"host": "0.0.0.0"},
    }
    config = resolve(raw, {}, Path("/p/hone.toml"), "cpu")
    serve = serving(config, "/py")
    assert [part.name for part in serve] == ["proxy", "control"]
    assert serve[0].ready_url == "http://127.0.0.1:8000/ready"


def test_a_demonstration_leaves_time_for_its_last_evaluation() -> None:
    assert training_s(spent_s=100, evaluation_s=50, wall_s=None) == pytest.approx(870 - 100 - 65)
    assert training_s(spent_s=100, evaluation_s=50, wall_s=300) == 300
    assert training_s(spent_s=880, evaluation_s=500, wall_s=None) == 87.0


def test_a_demonstration_trains_as_many_steps_as_fit(tmp_path: Path) -> None:
    train = {"scenarios": "s", "agent": "a", "groups_per_batch": 16, "minibatches": 2, "passes": 2}
    more = {"steps_max": 100, "lr_warmup_steps": 5}
    raw = {"policy": {"base_model": "m"}, "rewards": {"script": "r.py"}, "train": {**train, **more}}
    config = resolve(raw, {}, tmp_path / "hone.toml", "cpu")
    assert steps_in(232.0, 10.0, config) == 64  # 16 batches of 128 games at 9.2 games a second
    assert steps_in(5120.0, 10.0, config) == 100
    assert steps_in(1.0, 10.0, config) == 6

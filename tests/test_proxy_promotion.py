"""Promotion through the real proxy, store and command line, in front of a server that loads adapters like
vLLM; and the plans for it by hand."""

import asyncio
import json
import time
from collections.abc import AsyncIterator, Coroutine
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from lora_engine import LoraEngine, write_adapter
from proxy_world import USER, World, engine_settings, until, world
from test_proxy_activator import SETTINGS, engine, row, view_of

from capture.sqlite import SqliteStore
from capture.types import Promotion
from hone.cli.main import main
from proxy.activator import Activator
from proxy.app import running
from proxy.engines import Fleet
from proxy.metrics import Metrics
from proxy.plan import Memory, plan
from proxy.storage import Storage
from proxy.upstream import Upstream

CHAT = "/v1/chat/completions"
BODY = {"model": "policy", "messages": [USER]}

# -- plans ---------------------------------------------------------------------------------------


def asking(version: int, n: int = 1) -> dict[str, Promotion]:
    return {"asked": Promotion(n=n, policy="policy", version=version, kind="promote", asked_at=0.0)}


def test_plan_promotes_when_all_are_done_or_time_is_up() -> None:
    view, memory = view_of(row(1, "retired"), row(2, "active"), active=2, **asking(1, n=7)), Memory()
    engines = [engine("a", usable={1, 2}), engine("b", usable={2})]
    first = plan(view, engines, memory, SETTINGS, 100.0)
    assert (first.load, first.promote, first.refuse) == ([("b", 1)], None, None)
    assert plan(view, engines, memory, SETTINGS, 129.9).promote is None
    assert plan(view, engines, memory, SETTINGS, 130.0).promote == 7
    done = [engine("a", usable={1, 2}), engine("b", usable={2}, failed={1})]
    assert plan(view, done, Memory(), SETTINGS, 0.0).promote == 7
    nobody = [engine("a", failed={1}), engine("b", failed={1}), engine("down", healthy=False)]
    assert plan(view, nobody, Memory(), SETTINGS, 1000.0).promote is None
    assert plan(view, nobody, Memory(), SETTINGS, 1000.0).refuse == 7
    down = plan(view, [engine("a", healthy=False, usable={1})], Memory(), SETTINGS, 1000.0)
    assert (down.promote, down.refuse) == (None, None)


def test_plan_promotes_the_base_on_any_engine_that_is_up() -> None:
    view = view_of(row(1, "active"), active=1, promoted=1, **asking(0, n=3))
    assert plan(view, [engine(usable={1})], Memory(), SETTINGS, 0.0).promote == 3
    assert plan(view, [engine(usable={1}, healthy=False)], Memory(), SETTINGS, 0.0).promote is None


def test_plan_keeps_what_is_promoted_and_what_is_asked_for() -> None:
    rows = [row(n, "active") for n in (1, 2, 3, 4)]
    loaded = engine(usable={1, 2, 3, 4}, loaded={1, 2, 3, 4})
    view, memory = view_of(*rows, active=4, promoted=1, **asking(2)), Memory()
    plan(view, [loaded], memory, SETTINGS, 0.0)
    late = plan(view, [loaded], memory, SETTINGS, 1000.0)
    assert (late.unload, late.retire) == ([("e", 3)], [3])
    promoted = view_of(*rows, active=4, promoted=2)
    plan(promoted, [loaded], memory, SETTINGS, 1001.0)
    assert plan(promoted, [loaded], memory, SETTINGS, 1010.0).unload == [("e", 1), ("e", 3)]


def test_plan_makes_room_with_training_pins_never_with_the_promoted_version() -> None:
    rows = [row(n, "active") for n in (1, 2, 3)]
    pinned = {1: 4, 2: 2, 3: 1}  # three versions live, as many as there may be
    full = view_of(*rows, row(4), active=3, promoted=1, pinned=pinned)
    assert plan(full, [engine()], Memory(), SETTINGS, 0.0).expire == [2]
    asked = view_of(*rows, active=3, promoted=1, pinned=pinned, **asking(2))
    assert plan(asked, [engine()], Memory(), SETTINGS, 0.0).expire == []
    older = view_of(*rows, row(5, "retired"), active=3, promoted=1, pinned=pinned, **asking(5))
    assert plan(older, [engine()], Memory(), SETTINGS, 0.0).expire == [2]


# -- the proxy -----------------------------------------------------------------------------------


def publish(store: SqliteStore, root: Path, version: int) -> None:
    """What the learner's commit and publish leave."""
    path = root / "adapters" / f"policy@v{version}"
    sha256 = write_adapter(path, version)
    store._db.execute("UPDATE policies SET next_version = ?", (version + 1,))
    store._db.execute(
        "INSERT INTO versions VALUES ('policy', ?, 'l_run', ?, ?, 'published', ?, ?, 0, NULL, ?)",
        (version, version - 1, version, str(path), sha256, version),
    )


class Promoting:
    """A run whose versions an engine serves, and the command line beside it."""

    def __init__(self, on: World, engine: LoraEngine, root: Path) -> None:
        self.on = on
        self.engine = engine
        self.root = root
        self.config = root / "hone.toml"
        self.config.write_text(
            f"[policy]\nbase_model = 'org/model'\n[run]\ndir = '{root}'\n[rewards]\nscript = 'reward.py'\n"
        )

    async def train(self, version: int) -> None:
        """The learner published the next version, and it became active."""
        publish(self.on.store, self.root, version)
        await until(lambda: self.active == version)

    @property
    def active(self) -> int:
        return int(self.on.store._value("SELECT active FROM policies"))

    @property
    def promoted(self) -> int:
        return int(self.on.store._value("SELECT promoted FROM policies"))

    async def hone(self, *words: str) -> int:
        """`hone adapters ...`; its exit status."""
        return await asyncio.to_thread(main, ["adapters", *words, "-c", str(self.config)])

    async def served(self, path: str = CHAT) -> int:
        """The version that answers a call."""
        status, answer, headers = await self.on.post(path, BODY)
        assert status == 200, answer
        return int(headers["x-hone-policy-version"])


@asynccontextmanager
async def promoting(root: Path, newest: int, **settings: Any) -> AsyncIterator[Promoting]:
    """Versions 1 to `newest` were active one after the other; version 0 is promoted."""
    async with (
        LoraEngine().listening() as engine,
        world(engine_settings(engine.url, head_ttl_s=0.05, **settings), root) as on,
    ):
        on.store.start_run("run", "policy", {})
        made = Promoting(on, engine, root)
        for version in range(1, newest + 1):
            await made.train(version)
        yield made
        assert on.store.verify() == []


@asynccontextmanager
async def activator(engine: LoraEngine, root: Path) -> AsyncIterator[tuple[Activator, Fleet, SqliteStore]]:
    """An activator that the test steps, with a lease of 0.2 s; its fleet; a store connection beside it."""
    settings = engine_settings(engine.url, unload_grace_s=0.25)
    store, storage = SqliteStore(root / "hone.db"), Storage(SqliteStore(root / "hone.db"))
    store.start_run("run", "policy", {})
    upstream = Upstream(settings.deadlines, settings.limits)
    fleet = Fleet("policy", settings.engines, upstream, storage)
    await fleet.look(fleet.engines[0])
    try:
        yield (
            Activator(fleet, settings.engines, upstream, storage, Metrics(), holder="slow", lease_ttl_s=0.2),
            fleet,
            store,
        )
    finally:
        await upstream.close()
        await storage.close()
        store.close()


@asynccontextmanager
async def background(work: Coroutine[Any, Any, None]) -> AsyncIterator[asyncio.Task[None]]:
    """The work as a task, until the block ends."""
    task = asyncio.create_task(work)
    try:
        yield task
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


def told(capsys: pytest.CaptureFixture[str]) -> str:
    captured = capsys.readouterr()
    return captured.out + captured.err


async def test_users_get_the_promoted_version_within_two_seconds_and_no_call_fails(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Through two proxies on one store, under traffic; an open observed rollout follows, others stay."""
    async with (
        promoting(tmp_path, 1) as it,
        running(engine_settings(it.engine.url, head_ttl_s=0.05), tmp_path / "hone.db") as (_, second_url),
    ):
        second = World(it.on.proxy, second_url, it.on.client, it.on.store)
        opened = {
            mode: await it.on.opened(mode=mode, max_calls=1000) for mode in ("train", "eval", "observe")
        }
        paths = {mode: f"/rollouts/{one['id']}{CHAT}" for mode, one in opened.items()}
        assert await it.served(paths["train"]) == 1  # pinned by its first call
        await it.train(2)
        seen: list[tuple[float, int]] = []

        async def traffic() -> None:
            while True:
                for on in (it.on, second):
                    status, answer, headers = await on.post(paths["observe"], BODY)
                    assert status == 200, answer
                    seen.append((time.monotonic(), int(headers["x-hone-policy-version"])))

        async with background(traffic()) as task:
            await until(lambda: len(seen) > 20)
            began = time.monotonic()
            assert await it.hone("promote") == 0
            assert told(capsys) == "policy@v2 is promoted, in place of v0\n"
            await until(lambda: [version for _, version in seen[-4:]] == [2] * 4)
            assert not task.done()
        assert {version for _, version in seen} == {0, 2}
        assert max(at for at, version in seen if version == 0) - began < 2.0
        assert await it.served() == 2
        assert [await it.served(paths[mode]) for mode in ("train", "eval", "observe")] == [1, 1, 2]
        assert await it.hone("rollback") == 0
        assert told(capsys) == "policy@v0 is promoted, in place of v2\n"
        await until(lambda: it.on.proxy.fleet.view.promoted == 0)
        assert [await it.served(paths[mode]) for mode in ("train", "eval", "observe")] == [1, 1, 0]


async def test_a_promoted_version_stays_loaded_whatever_is_trained(tmp_path: Path) -> None:
    async with promoting(tmp_path, 1) as it:
        assert await it.hone("promote") == 0
        for version in (2, 3, 4, 5):
            await it.train(version)
            assert await it.served() == 1
        await until(lambda: set(it.engine.adapters) == {"policy@v1", "policy@v5"})
        assert await it.served() == 1
        assert it.engine.loads.count("policy@v1") == 1
        it.engine.restart()
        await until(lambda: set(it.engine.adapters) == {"policy@v1", "policy@v5"})
        assert await it.served() == 1
        assert "policy@v1" not in it.engine.unloads
        assert await it.hone("promote", "v5") == 0
        await until(lambda: set(it.engine.adapters) == {"policy@v5"})
        assert it.on.store.versions("policy")[1].state == "retired"


async def test_what_was_unloaded_is_proven_again_and_until_then_the_old_one_is_served(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    async with promoting(tmp_path, 3) as it:
        assert await it.hone("promote", "3") == 0
        await until(lambda: set(it.engine.adapters) == {"policy@v3"})
        capsys.readouterr()
        it.engine.may_load.clear()
        asking = asyncio.create_task(it.hone("promote", "policy@v1"))
        await until(lambda: it.engine.loads.count("policy@v1") == 2)
        for _ in range(10):
            assert await it.served() == 3
            await asyncio.sleep(0.02)
        assert not asking.done()
        it.engine.may_load.set()
        assert await asking == 0
        assert told(capsys) == "policy@v1 is promoted, in place of v3\n"
        assert await it.served() == 1
        (pair,) = [one for one in it.on.store.engine_versions("policy") if one.version == 1]
        assert pair.state == "verified"


async def test_a_version_that_no_engine_proves_any_more_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    async with promoting(tmp_path, 3) as it:
        await until(lambda: set(it.engine.adapters) == {"policy@v3"})
        it.engine.parents.add("policy@v1")  # loads, but answers with other weights
        (tmp_path / "adapters" / "policy@v2" / "manifest.json").unlink()
        assert await it.hone("promote", "1") == 1
        said = told(capsys)
        assert said.startswith("hone adapters: policy@v1 is not promoted, v0 stays: http://127.0.0.1:")
        assert "failed: engine is 0.5 from this version" in said
        assert await it.hone("promote", "2") == 1
        assert "no readable manifest.json" in told(capsys)
        assert "policy@v1" not in it.engine.adapters
        assert await it.served() == 0
        assert [one.reason is not None for one in it.on.store.promotions("policy")] == [True, True]


async def test_calls_that_wait_for_a_broken_version_are_served_after_a_rollback(tmp_path: Path) -> None:
    async with promoting(tmp_path, 2) as it:
        assert await it.hone("promote", "1") == 0
        it.engine.breaks |= {"policy@v1"}
        it.engine.restart()
        await until(lambda: it.engine.loads.count("policy@v1") >= 4)  # three attempts, then it has failed
        waiting = asyncio.create_task(it.served())
        await asyncio.sleep(0.3)
        assert not waiting.done()
        assert await it.hone("rollback") == 0
        assert await asyncio.wait_for(waiting, 3) == 0


async def test_without_a_proxy_it_is_kept_until_one_runs(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    async with promoting(tmp_path, 2) as it:
        pass
    async with LoraEngine().listening() as engine:
        assert await it.hone("promote") == 0
        assert told(capsys) == (
            "policy@v2 is asked for. No proxy with engines runs now: the next one serves v0 until an engine "
            "has proved v2\n"
        )
        async with world(engine_settings(engine.url), tmp_path) as on:
            await until(lambda: on.proxy.fleet.view.promoted == 2)
            status, _, headers = await on.post(CHAT, BODY)
            assert (status, headers["x-hone-policy-version"]) == (200, "2")


async def test_it_says_what_it_waits_for_and_may_be_taken_back(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    async with promoting(tmp_path, 3) as it:
        await until(lambda: set(it.engine.adapters) == {"policy@v3"})
        it.engine.may_load.clear()
        assert await it.hone("promote", "1", "--wait-s", "0.3") == 1
        assert "no engine has proved it after 0.3 s: v0 is served until one has" in told(capsys)
        assert await it.hone("ls") == 0
        lines = told(capsys).splitlines()
        assert [line.partition("<- ")[2].partition("  ")[0] for line in lines[:4]] == [
            "promoted",
            "asked for",
            "",
            "active",
        ]
        assert lines[5] == "promotions"
        assert "promote   v1 waits for an engine to prove it" in lines[6]
        assert await it.hone("promote", "0") == 0
        assert told(capsys) == "policy@v0 is promoted already\n"
        it.engine.may_load.set()
        assert await it.hone("promote", "3", "--json") == 0
        answer = json.loads(told(capsys))
        assert (answer["promoted"], answer["promotion"]["replaced"], answer["promotion"]["kind"]) == (
            3,
            0,
            "promote",
        )
        assert await it.hone("ls", "--json") == 0
        listed = json.loads(told(capsys))
        assert (listed["active"]["version"], listed["promoted"]["version"]) == (3, 3)
        assert [one["version"] for one in listed["promotions"]] == [1, 3]


async def test_an_activator_that_was_slow_does_not_unload_what_another_promoted(tmp_path: Path) -> None:
    async with LoraEngine().listening() as engine, activator(engine, tmp_path) as (slow, fleet, store):
        for version in (1, 2):
            publish(store, tmp_path, version)
        while fleet.view.active != 2:
            await slow.step()
        await slow.step()  # from now on nobody needs version 1
        await asyncio.sleep(0.3)  # the grace period
        publish(store, tmp_path, 3)
        engine.may_load.clear()
        step = asyncio.create_task(slow.step())  # load 3, then unload 1
        await until(lambda: "policy@v3" in engine.loads)
        await until(lambda: store.acquire_lease("activator", "another", 60.0) is not None)
        asked = store.ask_promotion("policy", 1, "promote")
        epoch = store.acquire_lease("activator", "another", 60.0)
        assert asked is not None
        assert epoch is not None
        assert store.promote(asked.n, epoch)
        engine.may_load.set()
        assert (await step).unload == [(fleet.engines[0].incarnation, 1)]
        assert engine.unloads == []
        assert set(engine.adapters) == {"policy@v1", "policy@v2", "policy@v3"}


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (("promote", "7"), "policy policy has no version 7: `hone adapters ls` lists them"),
        (("rollback",), "nothing was promoted before v0: name the version to serve"),
        (("rollback", "1"), "v1 is newer than v0, which is promoted, and never was itself"),
    ],
)
async def test_errors_are_one_sentence(
    words: tuple[str, ...], sentence: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    async with promoting(tmp_path, 1) as it:
        assert await it.hone(*words) == 1
        assert told(capsys).startswith(f"hone adapters: {sentence}")
        assert it.promoted == 0

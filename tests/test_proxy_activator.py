"""Plans by hand; verification by hand; then load, verify and activate on the real vLLM."""

import asyncio
import math
import shutil
import time
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from proxy_world import World, engine_settings, logprobs, until, world, write_adapter, write_manifest

from capture.types import Version
from proxy.engines import View
from proxy.plan import EngineView, Memory, Plan, plan
from proxy.settings import Engines
from proxy.verify import distance, judge

SETTINGS = Engines(versions_max=3, activate_timeout_s=30, unload_grace_s=5)


def row(version: int, state: str = "published", lineage: str = "l") -> Version:
    return Version(
        policy="policy",
        version=version,
        lineage=lineage,
        parent=None,
        step=version,
        state=state,
        path=f"/a/{version}" if version else None,
        sha256=None,
        created_at=0,
    )


def view_of(*rows: Version, active: int = 0, promoted: int = 0, **more: Any) -> View:
    return View(
        versions={row.version: row for row in (row0, *rows)},
        active=active,
        promoted=promoted,
        lineage="l",
        **more,
    )


row0 = row(0, "active")


def engine(name: str = "e", healthy: bool = True, **more: Any) -> EngineView:
    sets = {key: frozenset(value) for key, value in more.items() if key != "in_flight"}
    return EngineView(incarnation=name, healthy=healthy, in_flight=more.get("in_flight", {}), **sets)


def test_plan_loads_what_is_published_and_nothing_for_the_base() -> None:
    assert plan(view_of(row(1)), [engine()], Memory(), SETTINGS, 0).load == [("e", 1)]
    assert plan(view_of(), [engine()], Memory(), SETTINGS, 0) == Plan()
    assert plan(view_of(row(1)), [engine(healthy=False)], Memory(), SETTINGS, 0).load == []


def test_plan_reloads_on_a_restarted_engine_what_is_needed_before_what_is_new() -> None:
    view = view_of(row(1, "retired"), row(2, "active"), row(3), active=2, pinned={1: 4, 0: 1})
    assert plan(view, [engine()], Memory(), SETTINGS, 0).load == [("e", 2), ("e", 1), ("e", 3)]


def test_plan_leaves_versions_of_another_lineage_alone() -> None:
    view = view_of(row(1, lineage="older run"))
    assert plan(view, [engine(usable={1})], Memory(), SETTINGS, 0) == Plan()


def test_plan_activates_when_all_are_done_or_time_is_up() -> None:
    view, memory = view_of(row(1)), Memory()
    engines = [engine("a", usable={1}), engine("b")]
    assert plan(view, engines, memory, SETTINGS, 100.0).activate is None
    assert plan(view, engines, memory, SETTINGS, 129.9).activate is None
    assert plan(view, engines, memory, SETTINGS, 130.0).activate == 1
    done = [engine("a", usable={1}), engine("b", failed={1})]
    assert plan(view, done, Memory(), SETTINGS, 0).activate == 1
    nobody = [engine("a", failed={1}), engine("b", failed={1})]
    assert plan(view, nobody, Memory(), SETTINGS, 1000).activate is None
    assert plan(view, nobody, Memory(), SETTINGS, 1000).retire == [1]


def test_plan_activates_published_versions_one_after_the_other() -> None:
    view = view_of(row(1), row(2))
    assert plan(view, [engine(usable={1, 2})], Memory(), SETTINGS, 0).activate == 1
    assert plan(view, [engine(usable={2}, failed={1})], Memory(), SETTINGS, 0).activate == 2


def test_plan_expires_the_oldest_training_pins_for_the_next_version_only() -> None:
    rows = [row(1, "active"), row(2, "active"), row(3, "active")]
    pinned = {1: 2, 2: 1, 3: 5}
    full = view_of(*rows, row(4), active=3, promoted=0, pinned=pinned)
    assert plan(full, [engine()], Memory(), SETTINGS, 0).expire == [1]  # 1 2 3 + 4 > 3
    assert plan(full, [engine()], Memory(expired={1}), SETTINGS, 0).expire == [2]
    quiet = view_of(*rows, active=3, promoted=0, pinned=pinned)
    assert plan(quiet, [engine()], Memory(), SETTINGS, 0).expire == []


def test_plan_unloads_after_the_grace_period_and_never_under_a_call() -> None:
    view, memory = view_of(row(1, "active"), row(2, "active"), active=2), Memory()
    loaded = engine(usable={1, 2}, loaded={1, 2})
    busy = engine(usable={1, 2}, loaded={1, 2}, in_flight={1: 1})
    assert plan(view, [loaded], memory, SETTINGS, 10.0).unload == []
    assert plan(view, [loaded], memory, SETTINGS, 14.9).unload == []
    assert plan(view, [busy], memory, SETTINGS, 15.0).unload == []
    assert plan(view, [loaded], memory, SETTINGS, 15.0).unload == [("e", 1)]
    pinned = view_of(row(1, "active"), row(2, "active"), active=2, pinned={1: 1})
    assert plan(pinned, [loaded], memory, SETTINGS, 16.0).unload == []
    assert memory.unneeded_since == {}  # needed again: the grace period starts anew


# -- verification --------------------------------------------------------------------------------

CHILD, PARENT, BASE = [-1.0, -2.0, -3.0], [-1.1, -2.1, -3.1], [-2.0, -3.0, -4.0]


def test_distance_is_the_mean_absolute_difference() -> None:
    assert distance([0.0, 1.0, -1.0], [1.0, 1.0, 1.0]) == pytest.approx(1.0)
    with pytest.raises(ValueError, match="different length"):
        distance([0.0], [0.0, 1.0])


@pytest.mark.parametrize(
    ("measured", "state"),
    [
        ([-1.001, -2.001, -3.001], "verified"),
        (PARENT, "failed"),  # the parent's weights under the child's name
        (BASE, "failed"),
        ([-1.04, -2.04, -3.04], "verified"),  # within half of what it moved
        ([-1.06, -2.06, -3.06], "failed"),
        ([-0.4, -1.4, -2.4], "failed"),  # nearest to the child, but not near
        ([math.nan, -2.0, -3.0], "failed"),
    ],
)
def test_judge(measured: list[float], state: str) -> None:
    verdict = judge(measured, CHILD, PARENT, BASE, 1e-3)
    assert verdict.state == state
    assert verdict.moved == pytest.approx(0.1)


def test_judge_says_when_the_version_hardly_moved() -> None:
    near = [value + 5e-4 for value in CHILD]
    assert judge(CHILD, CHILD, near, BASE, 1e-3).state == "indistinguishable"
    assert judge(near, CHILD, near, BASE, 1e-3).state == "indistinguishable"
    assert judge(BASE, CHILD, near, BASE, 1e-3).state == "failed"


# -- the real engine -----------------------------------------------------------------------------


def publish(world: World, version: int, directory: Path, sha256: str) -> None:
    """What the learner's commit and publish leave in the store."""
    world.store._db.execute(
        "INSERT INTO versions VALUES ('policy', ?, 'l_run', ?, ?, 'published', ?, ?, 0, NULL, ?)",
        (version, version - 1, version, str(directory), sha256, version),
    )


def states(world: World) -> dict[int, str]:
    return {pair.version: pair.state for pair in world.store.engine_versions("policy")}


@pytest.mark.engine
async def test_adapters_load_verify_activate_and_a_wrong_one_fails(engine: Any, tmp_path: Path) -> None:
    base = logprobs(engine.base_dir, None)
    dirs = [engine.adapter_dir / f"activator-{tmp_path.name}-{time.time_ns()}-{n}" for n in range(4)]
    for n in (1, 2):
        write_adapter(dirs[n], engine.base_dir, seed=n)
    one, two = logprobs(engine.base_dir, dirs[1]), logprobs(engine.base_dir, dirs[2])
    assert distance(one, two) > 0.01
    # Version 3 claims to be the second adapter, but its weights are those of the first: its parent's.
    shutil.copytree(dirs[1], dirs[3])
    sha = [
        write_manifest(dirs[1], 1, child=one, parent=base, base=base),
        write_manifest(dirs[2], 2, child=two, parent=one, base=base),
        write_manifest(dirs[3], 3, child=two, parent=one, base=base),
    ]
    async with world(engine_settings(engine.url, head_ttl_s=0.05), tmp_path) as hone:
        hone.store.start_run("run", "policy", {})
        body = {"model": "policy", "messages": [{"role": "user", "content": "play"}], "max_tokens": 60}

        async def pinned_calls() -> list[tuple[int, str]]:
            rollout = await hone.opened(max_calls=100)
            path = f"/rollouts/{rollout['id']}/v1/chat/completions"
            seen = []
            for _ in range(20):
                status, answer, headers = await hone.post(path, body)
                assert status == 200, answer
                seen.append((status, headers["x-hone-policy-version"]))
            await hone.post(f"/rollouts/{rollout['id']}/finish", {"status": "completed"})
            assert len(set(seen)) == 1
            return seen

        traffic = asyncio.create_task(pinned_calls())
        await asyncio.sleep(0.1)
        publish(hone, 1, dirs[1], sha[0])
        await until(lambda: states(hone).get(1) == "verified", 20)
        await until(lambda: hone.store.active_version("policy").version == 1)
        assert (await traffic)[0] == (200, "0")
        publish(hone, 2, dirs[2], sha[1])
        await until(lambda: hone.store.active_version("policy").version == 2, 20)
        publish(hone, 3, dirs[3], sha[2])
        await until(lambda: states(hone).get(3) == "failed", 20)
        assert {1: "verified", 2: "verified", 3: "failed"}.items() <= {**states(hone), 1: "verified"}.items()
        await until(lambda: hone.store.versions("policy")[3].state == "retired")
        assert hone.store.active_version("policy").version == 2
        detail = next(p.detail for p in hone.store.engine_versions("policy") if p.version == 3)
        assert "from its parent" in detail
        assert (await pinned_calls())[0] == (200, "2")
        await until(lambda: states(hone).get(1) == "unloaded", 10)  # nobody needs it any more
        models = await hone.proxy.fleet.models(hone.proxy.fleet.engines[0])
        names = {model.id for model in models.values() if model.id.startswith("policy@")}
        assert names == {"policy@base", "policy@v2"}  # the engine is shared with other tests' policies
        await hone.proxy.upstream.ask(
            engine.url + "/v1/unload_lora_adapter", b'{"lora_name": "policy@v2"}', 10
        )
        assert (await pinned_calls())[0] == (200, "2")  # found lost, loaded again, never the base
        await hone.proxy.upstream.ask(
            engine.url + "/v1/unload_lora_adapter", b'{"lora_name": "policy@v2"}', 10
        )


@pytest.mark.engine
async def test_what_is_promoted_answers_and_is_loaded_again_after_it_was_unloaded(
    engine: Any, tmp_path: Path
) -> None:
    base = logprobs(engine.base_dir, None)
    dirs = [engine.adapter_dir / f"promoted-{tmp_path.name}-{time.time_ns()}-{n}" for n in range(3)]
    for n in (1, 2):
        write_adapter(dirs[n], engine.base_dir, seed=n)  # the weights that these names have in the test above
    one, two = logprobs(engine.base_dir, dirs[1]), logprobs(engine.base_dir, dirs[2])
    sha = [
        write_manifest(dirs[1], 1, child=one, parent=base, base=base),
        write_manifest(dirs[2], 2, child=two, parent=one, base=base),
    ]
    async with world(engine_settings(engine.url, head_ttl_s=0.05), tmp_path) as hone:
        hone.store.start_run("run", "policy", {})
        body = {"model": "policy", "messages": [{"role": "user", "content": "play"}], "max_tokens": 4}

        async def promoted(version: int) -> str:
            """The version that answers a call of nobody's once that one is promoted."""
            assert hone.store.ask_promotion("policy", version, "promote") is not None
            await until(lambda: hone.proxy.fleet.view.promoted == version, 20)
            status, answer, headers = await hone.post("/v1/chat/completions", body)
            assert status == 200, answer
            return headers["x-hone-policy-version"]

        for n in (1, 2):
            publish(hone, n, dirs[n], sha[n - 1])
            await until(lambda n=n: hone.store.active_version("policy").version == n, 20)
        await until(lambda: states(hone).get(1) == "unloaded", 10)
        assert await promoted(2) == "2"
        assert await promoted(1) == "1"
        assert states(hone)[1] == "verified"
        assert await promoted(0) == "0"
        await until(lambda: states(hone).get(1) == "unloaded", 10)
        await hone.proxy.upstream.ask(
            engine.url + "/v1/unload_lora_adapter", b'{"lora_name": "policy@v2"}', 10
        )


@pytest.mark.engine
async def test_an_adapter_that_is_version_0_is_proven_and_answers_in_place_of_the_base(
    engine: Any, tmp_path: Path
) -> None:
    base = logprobs(engine.base_dir, None)
    directory = engine.adapter_dir / f"start-{tmp_path.name}-{time.time_ns()}"
    write_adapter(directory, engine.base_dir, seed=7)
    taught = logprobs(engine.base_dir, directory)
    assert distance(taught, base) > 0.01
    sha256 = write_manifest(directory, 0, child=taught, parent=base, base=base)
    async with world(engine_settings(engine.url, head_ttl_s=0.05), tmp_path) as hone:
        hone.store.start_policy("policy", str(directory), sha256)
        hone.store.start_run("run", "policy", {})
        await until(lambda: states(hone).get(0) == "verified", 20)
        body = {"model": "policy", "messages": [{"role": "user", "content": "play"}], "max_tokens": 4}
        status, answer, headers = await hone.post("/v1/chat/completions", body)
        assert (status, headers["x-hone-policy-version"]) == (200, "0"), answer
        models = await hone.proxy.fleet.models(hone.proxy.fleet.engines[0])
        assert (models["policy@v0"].parent, models["policy@v0"].root) == ("policy@base", str(directory))
    async with aiohttp.ClientSession() as client:  # the engine is shared with other tests' policies
        await client.post(f"{engine.url}/v1/unload_lora_adapter", json={"lora_name": "policy@v0"})

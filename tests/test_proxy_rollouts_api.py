"""Opening, reading and finishing rollouts, and posting scores, over the wire."""

import asyncio
import hashlib
from pathlib import Path

import pytest
from aiohttp import web
from proxy_world import COMPLETION, USER, FakeUpstream, World, capture_settings, completion, world

from proxy.settings import Key

BODY = {"model": "gpt", "messages": [USER]}


def keys() -> tuple[Key, ...]:
    scopes = {"t": ("train",), "i": ("infer",), "r": ("reward",)}
    return tuple(
        Key(
            id="team" if name == "t" else name, sha256=hashlib.sha256(name.encode()).hexdigest(), scopes=scope
        )
        for name, scope in scopes.items()
    )


def bearer(key: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {key}"}


async def code(hone: World, path: str, body: object, key: str = "") -> tuple[int, str]:
    status, answer, _ = await hone.post(path, body, bearer(key) if key else None)
    return status, answer.get("error", {}).get("code", "")


async def test_open_pins_the_active_version_and_answers_what_an_agent_needs(tmp_path: Path) -> None:
    settings = capture_settings("http://127.0.0.1:9/v1")
    async with world(settings, tmp_path) as hone:
        hone.store.start_run("run", "policy", {})
        opened = await hone.opened(
            scenario_id="s1",
            scenario={"p": 0.5},
            group_id="g_run_000001",
            group_size=4,
            run_id="run",
            max_calls=7,
            metadata={"k": [1]},
        )
        assert set(opened) == {"id", "base_url", "api_key", "policy_version"}
        assert opened["base_url"] == f"{hone.url}/rollouts/{opened['id']}/v1"
        rollout_id, secret = opened["api_key"].split(".")
        assert rollout_id == opened["id"]
        assert len(secret) >= 22  # 128 bits and more
        rollout = hone.store.rollout(opened["id"])
        assert rollout.secret_hash == hashlib.sha256(secret.encode()).digest()
        assert (rollout.mode, rollout.state, rollout.key_id) == ("train", "open", "local")
        assert (rollout.scenario, rollout.metadata, rollout.max_calls) == ({"p": 0.5}, {"k": [1]}, 7)
        assert hone.store.group("g_run_000001").size == 4
        status, shown = await hone.get(f"/rollouts/{opened['id']}")
        assert status == 200
        assert (shown["id"], shown["scenario_id"]) == (opened["id"], "s1")
        assert "secret" not in str(shown)


async def test_open_uses_the_public_url_and_the_default_cap(tmp_path: Path) -> None:
    settings = capture_settings("http://127.0.0.1:9/v1", public_url="https://hone.example/")
    async with world(settings, tmp_path) as hone:
        opened = await hone.opened()
        assert opened["base_url"] == f"https://hone.example/rollouts/{opened['id']}/v1"
        assert hone.store.rollout(opened["id"]).max_calls == 30
        observed = await hone.opened(mode="observe")
        assert hone.store.rollout(observed["id"]).max_calls is None


@pytest.mark.parametrize(
    ("body", "answer"),
    [
        (b"{", (400, "invalid_body")),
        ({}, (400, "invalid_body")),
        ({"mode": "other"}, (400, "invalid_body")),
        ({"mode": "train", "surprise": 1}, (400, "invalid_body")),
        ({"mode": "train", "id": "../x"}, (400, "invalid_id")),
        ({"mode": "train", "max_calls": 0}, (400, "invalid_max_calls")),
        ({"mode": "eval", "policy_version": 9}, (404, "version_not_found")),
    ],
)
async def test_open_refuses(tmp_path: Path, body: object, answer: tuple[int, str]) -> None:
    async with world(capture_settings("http://127.0.0.1:9/v1"), tmp_path) as hone:
        assert await code(hone, "/rollouts", body) == answer


async def test_an_id_is_opened_once(tmp_path: Path) -> None:
    async with world(capture_settings("http://127.0.0.1:9/v1"), tmp_path) as hone:
        assert (await hone.opened(id="r_mine12345"))["id"] == "r_mine12345"
        assert await code(hone, "/rollouts", {"mode": "train", "id": "r_mine12345"}) == (409, "conflict")


async def test_finish_seals_once_and_keeps_metrics_of_those_who_may_train(tmp_path: Path) -> None:
    async with world(capture_settings("http://127.0.0.1:9/v1"), tmp_path) as hone:
        opened = await hone.opened()
        path = f"/rollouts/{opened['id']}/finish"
        body = {"status": "completed", "metrics": {"wins": 1}, "stdout": "won"}
        status, answer, _ = await hone.post(path, body)
        assert (status, answer["state"], answer["status"]) == (200, "sealed", "completed")
        assert (answer["metrics"], answer["stdout"]) == ({"wins": 1.0}, "won")
        assert await code(hone, path, body) == (200, "")
        assert await code(hone, path, {"status": "timeout"}) == (409, "conflict")
        assert await code(hone, "/rollouts/r_unknown0/finish", body) == (404, "rollout_not_found")
        assert await code(hone, path, {"status": "nonsense"}) == (400, "invalid_body")


async def test_a_rollout_key_finishes_its_rollout_without_metrics_and_never_as_failed(tmp_path: Path) -> None:
    async with world(capture_settings("http://127.0.0.1:9/v1"), tmp_path) as hone:
        opened, other = await hone.opened(), await hone.opened()
        path = f"/rollouts/{opened['id']}/finish"
        own = opened["api_key"]
        assert await code(hone, path, {"status": "failed"}, own) == (403, "scope")
        assert await code(hone, f"/rollouts/{other['id']}/finish", {"status": "completed"}, own) == (
            403,
            "rollout_mismatch",
        )
        assert await code(hone, "/rollouts", {"mode": "train"}, own) == (403, "scope")
        reward = {"rollout_id": opened["id"], "name": "x", "value": 1}
        assert await code(hone, "/rewards", reward, own) == (403, "scope")
        finish = {"status": "completed", "metrics": {"reward": 1}}
        status, answer, _ = await hone.post(path, finish, bearer(own))
        assert (status, answer["status"]) == (200, "completed")
        assert hone.store.rollout(opened["id"]).metrics == {}


async def test_scopes_of_configured_keys(tmp_path: Path) -> None:
    async with world(capture_settings("http://127.0.0.1:9/v1", keys=keys()), tmp_path) as hone:
        assert await code(hone, "/rollouts", {"mode": "train"}, "i") == (403, "scope")
        assert await code(hone, "/rollouts", {"mode": "train"}) == (401, "invalid_api_key")
        status, opened, _ = await hone.post("/rollouts", {"mode": "train"}, bearer("t"))
        assert status == 201
        score = {"rollout_id": opened["id"], "name": "x", "value": 1}
        assert await code(hone, "/rewards", score, "t") == (403, "scope")
        assert await code(hone, "/rewards", score, "r") == (404, "rollout_not_found")  # another namespace
        assert await code(hone, f"/rollouts/{opened['id']}/finish", {"status": "failed"}, "t") == (200, "")


async def test_scores_by_rollout_and_by_call_until_the_batch_is_taken(tmp_path: Path) -> None:
    async with (
        FakeUpstream(completion).listening() as upstream,
        world(capture_settings(upstream.url), tmp_path) as hone,
    ):
        opened = await hone.opened()
        path = f"/rollouts/{opened['id']}/v1/chat/completions"
        _, _, headers = await hone.post(path, BODY)
        for body in (
            {"rollout_id": opened["id"], "name": "thumbs", "value": 1},
            {"call_id": headers["x-hone-call-id"], "name": "stars", "value": 4.5},
        ):
            assert await code(hone, "/rewards", body) == (200, "")
        assert hone.store.posted_scores(opened["id"]) == {"thumbs": 1.0, "stars": 4.5}
        wrong = [
            {"name": "x", "value": 1},
            {"rollout_id": "a", "call_id": "b", "name": "x", "value": 1},
            {"rollout_id": opened["id"], "name": "", "value": 1},
        ]
        assert [await code(hone, "/rewards", body) for body in wrong] == [(400, "invalid_score")] * 3
        for value in ("true", '"1"', "NaN", "1e999"):
            body = f'{{"rollout_id": "{opened["id"]}", "name": "x", "value": {value}}}'.encode()
            assert await code(hone, "/rewards", body) == (400, "invalid_body")
        unknown = {"call_id": "c_unknown", "name": "x", "value": 1}
        assert await code(hone, "/rewards", unknown) == (404, "call_not_found")
        hone.store._db.execute(
            "UPDATE rollouts SET state = 'taken', batch_id = 'b_7' WHERE id = ?", (opened["id"],)
        )
        late = {"rollout_id": opened["id"], "name": "late", "value": 2}
        status, answer, headers = await hone.post("/rewards", late)
        assert (status, answer["error"]["code"], answer["error"]["param"]) == (409, "reward_frozen", "b_7")
        assert hone.store.rollout(opened["id"]).metrics == {"late": 2.0}


async def test_finishing_waits_for_the_calls_in_flight(tmp_path: Path) -> None:
    answered = asyncio.Event()

    async def slowly(request: web.Request) -> web.Response:
        await asyncio.sleep(0.3)
        answered.set()
        return web.json_response(COMPLETION)

    async with (
        FakeUpstream(slowly).listening() as upstream,
        world(capture_settings(upstream.url), tmp_path) as hone,
    ):
        opened = await hone.opened()
        path = f"/rollouts/{opened['id']}/v1/chat/completions"
        asking = asyncio.create_task(hone.post(path, BODY))
        await asyncio.sleep(0.1)
        assert await code(hone, f"/rollouts/{opened['id']}/finish", {"status": "completed"}) == (200, "")
        assert answered.is_set()
        assert (await asking)[0] == 200
        late = hone.store._rows("SELECT late FROM calls WHERE rollout_id = ?", (opened["id"],))
        assert late == [(0,)]

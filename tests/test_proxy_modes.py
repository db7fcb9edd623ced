"""What each mode promises, in front of a server that answers like vLLM: who is served which version, and
what of a request is changed on the way."""

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from aiohttp import web
from proxy_world import COMPLETION, USER, World, engine_settings, until, world
from serving import serving

from capture.types import EngineVersion

CHAT = "/v1/chat/completions"
SENT: dict[str, Any] = {
    "model": "policy",
    "messages": [USER],
    "temperature": 0.3,
    "top_p": 0.9,
    "seed": 7,
    "max_tokens": 100_000,
    "logit_bias": {"5": 1},
    "parallel_tool_calls": False,
    "tools": [{"type": "function", "function": {"name": "play", "strict": True}}],
    "response_format": {"type": "json_object"},
    "something": {"of": ["its", "own"]},
}
CAPTURE = {"return_token_ids": True, "logprobs": True}  # what is asked for on top, and taken out again


class Engine:
    """Serves a base and one adapter, and keeps what it was asked."""

    def __init__(self) -> None:
        self.asked: list[dict[str, Any]] = []
        self.url = ""

    @asynccontextmanager
    async def listening(self) -> AsyncIterator["Engine"]:
        routes = [
            web.get("/health", self._health),
            web.get("/metrics", self._metrics),
            web.get("/v1/models", self._models),
            web.post("/v1/chat/completions", self._answer),
        ]
        async with serving(routes) as self.url:
            yield self

    async def _health(self, _: web.Request) -> web.Response:
        return web.Response()

    async def _metrics(self, _: web.Request) -> web.Response:
        return web.Response(text="process_start_time_seconds 5.0\n")

    async def _models(self, _: web.Request) -> web.Response:
        base = {"id": "policy@v0", "max_model_len": 4096}
        return web.json_response({"data": [base, {"id": "policy@v1", "root": "/v1", "parent": "policy@v0"}]})

    async def _answer(self, request: web.Request) -> web.Response:
        self.asked.append(await request.json())
        return web.json_response(COMPLETION)


@asynccontextmanager
async def versions(root: Path) -> AsyncIterator[tuple[World, Engine]]:
    """Version 0 is promoted, version 1 is active and verified."""
    async with Engine().listening() as engine, world(engine_settings(engine.url), root) as hone:
        lineage = hone.store.start_run("run", "policy", {}).id
        hone.store._db.execute(
            "INSERT INTO versions VALUES ('policy', 1, ?, 0, 1, 'active', '/v1', 'sha', 1.0, 1.0, 1)",
            (lineage,),
        )
        hone.store._db.execute("UPDATE policies SET active = 1")
        hone.store.record_engine_version(
            EngineVersion(engine=f"{engine.url}#5.00", policy="policy", version=1, state="verified")
        )
        fleet = hone.proxy.fleet
        assert fleet is not None
        await until(lambda: fleet.view.active == 1 and fleet.why_not(1) is None)
        yield hone, engine


async def asked(hone: World, engine: Engine, path: str = CHAT) -> tuple[dict[str, Any], str]:
    """What the engine was asked, and the version that the agent was told."""
    status, answer, headers = await hone.post(path, SENT)
    assert status == 200, answer
    return engine.asked[-1], headers["x-hone-policy-version"]


async def test_an_observed_request_passes_as_sent_and_the_promoted_version_answers(tmp_path: Path) -> None:
    async with versions(tmp_path) as (hone, engine):
        opened = await hone.opened(mode="observe")
        for path in (CHAT, f"/rollouts/{opened['id']}{CHAT}"):
            assert await asked(hone, engine, path) == ({**SENT, **CAPTURE, "model": "policy@v0"}, "0")
        assert all(raw.changed == {} for raw in hone.raw_calls())
        assert [json.loads(raw.request) for raw in hone.raw_calls()] == [SENT] * 2
        assert hone.store.ask_promotion("policy", 1, "promote") is not None
        fleet = hone.proxy.fleet
        assert fleet is not None
        await until(lambda: fleet.view.promoted == 1)
        # What nobody trains on follows the promotion, open rollouts too.
        assert (await asked(hone, engine, f"/rollouts/{opened['id']}{CHAT}"))[1] == "1"


async def test_an_observed_rollout_has_no_cap_of_its_own(tmp_path: Path) -> None:
    async with versions(tmp_path) as (hone, _):
        opened = await hone.opened(mode="observe")
        rollout = hone.store.rollout(opened["id"])
        assert (rollout.max_calls, rollout.policy_version) == (None, None)


async def test_an_evaluation_samples_as_it_asks_on_the_active_version(tmp_path: Path) -> None:
    async with versions(tmp_path) as (hone, engine):
        newest = await hone.opened(mode="eval")
        named = await hone.opened(mode="eval", policy_version=0)
        assert (newest["policy_version"], named["policy_version"]) == (1, 0)
        for opened, version in ((newest, 1), (named, 0)):
            path = f"/rollouts/{opened['id']}{CHAT}"
            assert await asked(hone, engine, path) == (
                {**SENT, **CAPTURE, "model": f"policy@v{version}"},
                str(version),
            )


async def test_a_training_rollout_is_served_what_is_active_at_its_first_call(tmp_path: Path) -> None:
    async with versions(tmp_path) as (hone, engine):
        opened = await hone.opened(mode="train")
        assert opened["policy_version"] is None
        named = await hone.opened(mode="train", policy_version=1)
        fleet = hone.proxy.fleet
        assert fleet is not None
        hone.store._db.execute("UPDATE policies SET active = 0")
        await until(lambda: fleet.view.active == 0)
        assert (await asked(hone, engine, f"/rollouts/{opened['id']}{CHAT}"))[1] == "0"
        assert (await asked(hone, engine, f"/rollouts/{named['id']}{CHAT}"))[1] == "1"
        hone.store._db.execute("UPDATE policies SET active = 1")
        await until(lambda: fleet.view.active == 1)
        assert (await asked(hone, engine, f"/rollouts/{opened['id']}{CHAT}"))[1] == "0"
        assert [hone.store.rollout(one["id"]).policy_version for one in (opened, named)] == [0, 1]


async def test_a_first_call_under_way_keeps_its_version_though_the_store_knows_nothing_of_it(
    tmp_path: Path,
) -> None:
    async with versions(tmp_path) as (hone, _):
        opened = await hone.opened(mode="train")
        head = await hone.proxy.heads.get(opened["id"])
        assert head.pin(1) == 1
        assert hone.proxy.heads.update(hone.store.rollout(opened["id"])) is head
        assert head.pin(0) == 1


async def test_a_training_rollout_samples_purely_on_the_version_it_began_with(tmp_path: Path) -> None:
    async with versions(tmp_path) as (hone, engine):
        opened = await hone.opened(mode="train")
        path = f"/rollouts/{opened['id']}{CHAT}"
        sent, version = await asked(hone, engine, path)
        assert (sent["model"], version) == ("policy@v1", "1")
        assert (sent["temperature"], sent["max_tokens"]) == (1.0, 2048)
        assert not {"top_p", "seed", "logit_bias", "something", "parallel_tool_calls"} & sent.keys()
        hone.store._db.execute("UPDATE policies SET active = 0")
        fleet = hone.proxy.fleet
        assert fleet is not None
        await until(lambda: fleet.view.active == 0)
        assert (await asked(hone, engine, path))[1] == "1"

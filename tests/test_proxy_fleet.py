"""Several engines: who is asked, who takes over, how calls return; and what a policy's fallbacks may do."""

import asyncio
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

from aiohttp import web
from proxy_world import FakeUpstream, World, completion, until, world
from serving import serving
from toy_engine import ToyEngine, sampled
from yarl import URL

from capture.graph import build, samples
from capture.parse import parse
from proxy.settings import Deadlines, Engines, Health, Route, Settings

CHAT = "/v1/chat/completions"
ASK = {"role": "user", "content": "go on"}


class Engine(ToyEngine):
    """One that can be down, fail or take its time, as told."""

    def __init__(self) -> None:
        super().__init__(drifts=False)
        self.down = False
        self.status = 200
        self.held = asyncio.Event()
        self.held.set()
        self.in_flight = 0

    async def _health(self, request: web.Request) -> web.Response:
        return web.Response(status=503) if self.down else await super()._health(request)

    async def _chat(self, request: web.Request) -> web.Response:
        if self.status != 200:
            return web.json_response({"error": {"message": "broken"}}, status=self.status)
        self.in_flight += 1
        try:
            await self.held.wait()
            return await super()._chat(request)
        finally:
            self.in_flight -= 1


@asynccontextmanager
async def fleet(root: Path, count: int, **fields: Any) -> AsyncIterator[tuple[World, list[Engine]]]:
    async with AsyncExitStack() as stack:
        engines = [await stack.enter_async_context(Engine().listening()) for _ in range(count)]
        urls = tuple(engine.url for engine in engines)
        wait_s = fields.pop("engine_wait_s", 5.0)
        settings = Settings(
            port=0,
            engines=Engines(urls=urls, health_interval_s=0.05, poll_s=0.02, engine_wait_s=wait_s),
            deadlines=Deadlines(retries=2, retry_pause_s=0.01),
            **fields,
        )
        hone = await stack.enter_async_context(world(settings, root))
        hone.store.start_run("run", "policy", {})
        yield hone, engines


async def ask(hone: World, session: str, model: str = "policy") -> tuple[int, dict[str, str]]:
    status, _, headers = await hone.post(CHAT, {"model": model, "messages": [ASK]}, {"X-Session-ID": session})
    return status, headers


async def homes(hone: World, sessions: list[str], calls: int = 1) -> dict[str, str]:
    """The one engine that answers each session."""
    before = len(hone.raw_calls())
    who = {}
    for _ in range(calls):
        for session in sessions:
            status, headers = await ask(hone, session)
            assert status == 200
            who[headers["x-hone-call-id"]] = session
    found: dict[str, set[str]] = {}
    for raw in hone.raw_calls()[before:]:
        found.setdefault(who[raw.id], set()).add(raw.upstream.partition("#")[0])
    assert all(len(urls) == 1 for urls in found.values()), "a rollout moved"
    return {session: urls.pop() for session, urls in found.items()}


def healthy(hone: World) -> dict[str, bool]:
    assert hone.proxy.fleet is not None
    return {engine.url: engine.healthy for engine in hone.proxy.fleet.engines}


SESSIONS = [f"s{n}" for n in range(30)]


async def test_a_rollout_stays_on_its_engine_and_moves_only_while_that_one_is_down(tmp_path: Path) -> None:
    async with fleet(tmp_path, 3) as (hone, engines):
        at_first = await homes(hone, SESSIONS, calls=2)
        assert all(count >= 3 for count in Counter(at_first.values()).values())
        assert set(at_first.values()) == {engine.url for engine in engines}
        engines[0].down = True
        await until(lambda: not healthy(hone)[engines[0].url])
        meanwhile = await homes(hone, SESSIONS)
        assert engines[0].url not in meanwhile.values()
        stayed = {session for session in SESSIONS if meanwhile[session] == at_first[session]}
        assert stayed == {session for session in SESSIONS if at_first[session] != engines[0].url}
        engines[0].down = False
        await until(lambda: healthy(hone)[engines[0].url])
        assert await homes(hone, SESSIONS) == at_first


async def test_an_engine_that_answers_its_checks_but_fails_calls_is_passed_over(tmp_path: Path) -> None:
    async with fleet(tmp_path, 2, health=Health(failures_max=3, pause_s=60)) as (hone, engines):
        where = await homes(hone, SESSIONS)
        engines[0].status = 500
        mine = [session for session in SESSIONS if where[session] == engines[0].url]
        got = [(await ask(hone, session))[0] for session in mine * 2]
        assert got == [502] * 3 + [200] * (len(got) - 3)
        assert all(healthy(hone).values())


async def test_the_only_engine_is_asked_even_if_it_fails(tmp_path: Path) -> None:
    async with fleet(tmp_path, 1, health=Health(failures_max=2, pause_s=60)) as (hone, engines):
        engines[0].status = 500
        assert [(await ask(hone, "s"))[0] for _ in range(4)] == [502] * 4
        engines[0].status = 200
        assert (await ask(hone, "s"))[0] == 200


async def test_an_engine_that_says_it_is_not_there_is_asked_again_or_another_is(tmp_path: Path) -> None:
    async with fleet(tmp_path, 2, health=Health(failures_max=1, pause_s=60)) as (hone, engines):
        engines[0].status = 503
        assert [(await ask(hone, session))[0] for session in SESSIONS] == [200] * len(SESSIONS)


async def test_calls_return_slowly_to_an_engine_that_was_down(tmp_path: Path) -> None:
    async with fleet(tmp_path, 2, health=Health(return_calls=32)) as (hone, engines):
        where = await homes(hone, SESSIONS)
        mine = [session for session in SESSIONS if where[session] == engines[0].url][:6]
        engines[0].down = True
        await until(lambda: not healthy(hone)[engines[0].url])
        engines[0].down = False
        await until(lambda: healthy(hone)[engines[0].url])
        seen = []
        for _ in range(3):
            for engine in engines:
                engine.held.clear()
            calls = [asyncio.create_task(ask(hone, session)) for session in mine]
            await until(lambda: engines[0].in_flight + engines[1].in_flight == len(mine))
            seen.append(engines[0].in_flight)
            for engine in engines:
                engine.held.set()
            assert [(await call)[0] for call in calls] == [200] * len(mine)
        assert seen == [1, 2, 4]


async def test_engines_that_die_under_load_lose_nobody(tmp_path: Path) -> None:
    """One of two engines stops listening while calls go on: connections are refused, and nobody notices."""
    async with AsyncExitStack() as stack:
        stays = await stack.enter_async_context(Engine().listening())
        goes = AsyncExitStack()
        leaves = await goes.enter_async_context(Engine().listening())
        settings = Settings(
            port=0,
            engines=Engines(urls=(stays.url, leaves.url), health_interval_s=0.05, poll_s=0.02),
            deadlines=Deadlines(retry_pause_s=0.01),
        )
        hone = await stack.enter_async_context(world(settings, tmp_path))
        hone.store.start_run("run", "policy", {})
        assert [(await ask(hone, session))[0] for session in SESSIONS] == [200] * len(SESSIONS)
        await goes.aclose()
        assert [(await ask(hone, session))[0] for session in SESSIONS] == [200] * len(SESSIONS)


OTHERS = (
    "/v1/load_lora_adapter",
    "/v1/unload_lora_adapter",
    "/v1/chat/completions/render",
    "/v1/chat/completions/../load_lora_adapter",
    "/v1/chat/completions/%2e%2e/load_lora_adapter",
    "//v1/load_lora_adapter",
    "/v1//load_lora_adapter",
    "/inference/v1/generate",
    "/tokenize",
    "/sleep",
    "/collective_rpc",
    "/server_info",
    "/http://127.0.0.1:9/v1/chat/completions",
)


async def test_no_path_but_the_known_ones_reaches_an_engine(tmp_path: Path) -> None:
    seen = set()

    async def note(request: web.Request) -> web.Response:
        seen.add((request.method, request.path))
        return web.json_response({"data": [{"id": "policy@v0"}]})

    async with (
        serving([web.route("*", "/{path:.*}", note)]) as url,
        world(Settings(port=0, engines=Engines(urls=(url,))), tmp_path) as hone,
    ):
        rollout = (await hone.opened())["id"]
        for prefix in ("", f"/rollouts/{rollout}"):
            for path in OTHERS:
                for method in ("GET", "POST", "DELETE"):
                    address = URL(hone.url + prefix + path, encoded=True)
                    body = {"model": "policy", "messages": [ASK], "lora_name": "x"}
                    async with hone.client.request(method, address, json=body) as response:
                        assert response.status == 404, path
        assert seen <= {("GET", "/health"), ("GET", "/v1/models"), ("GET", "/metrics")}


# -- fallbacks of the policy ---------------------------------------------------------------------------


def falling(url: str) -> dict[str, Route]:
    return {
        "policy": Route(to="policy", fallbacks=("stand-in",)),
        "stand-in": Route(url=url, model="big"),
        "*": Route(to="policy"),
        "judge": Route(url="http://127.0.0.1:9/v1", fallbacks=("policy",)),
    }


async def test_users_of_the_policy_fall_back_and_who_trains_or_evaluates_never_does(tmp_path: Path) -> None:
    async with (
        FakeUpstream(completion).listening() as upstream,
        fleet(tmp_path, 1, routes=falling(upstream.url), engine_wait_s=0.3) as (hone, engines),
    ):
        for model in ("policy", "gpt-4o"):
            status, headers = await ask(hone, "s", model)
            assert (status, headers.get("x-hone-fallback")) == (200, None)
        engines[0].down = True
        await until(lambda: not healthy(hone)[engines[0].url])
        for model in ("policy", "gpt-4o"):
            status, headers = await ask(hone, "s", model)
            assert (status, headers["x-hone-fallback"]) == (200, "stand-in")
            assert "x-hone-policy-version" not in headers
        assert b"return_token_ids" not in upstream.bodies[0]
        policies = [(raw.policy, raw.upstream) for raw in hone.raw_calls()[2:]]
        assert policies == [(None, "stand-in")] * 2
        for mode in ("train", "eval"):
            opened = await hone.opened(mode=mode)
            for model in ("policy", "gpt-4o", "judge"):
                body = {"model": model, "messages": [ASK]}
                status, _, headers = await hone.post(f"/rollouts/{opened['id']}{CHAT}", body)
                assert (status in (502, 503), "x-hone-fallback" in headers) == (True, False)
        assert len(upstream.bodies) == 2


async def test_a_rollout_of_policy_judge_and_user_simulator_trains_the_policys_tokens_alone(
    tmp_path: Path,
) -> None:
    """The policy asks, a simulated user answers, a frozen judge looks on; all in one training rollout."""
    async with FakeUpstream(completion).listening() as upstream:
        routes = {
            "judge": Route(url=upstream.url, model="big"),
            "user": Route(url=upstream.url, model="small"),
        }
        async with fleet(tmp_path, 1, routes=routes) as (hone, _):
            rollout = (await hone.opened())["id"]

            async def say(model: str, messages: list[Any]) -> dict[str, Any]:
                path = f"/rollouts/{rollout}{CHAT}"
                status, answer, _ = await hone.post(path, {"model": model, "messages": messages})
                assert (status, answer["model"]) == (200, model)
                message: dict[str, Any] = answer["choices"][0]["message"]
                return {"role": "assistant", "content": message["content"]}

            messages: list[Any] = [ASK]
            for _ in range(3):
                messages.append(await say("policy", messages))
                told = await say("user", [{"role": "system", "content": "Be a user."}, messages[-1]])
                messages.append({"role": "user", "content": told["content"]})
                await say("judge", [{"role": "user", "content": f"How good is {messages}?"}])
            calls = [parse(raw) for raw in hone.raw_calls()]
        assert [call.untrainable for call in calls] == [None, "provider", "provider"] * 3
        (sample,) = samples(build(calls))
        own = [f"reply {n}" for n in range(3)]
        trained = [token for token, mask in zip(sample.token_ids, sample.loss_mask, strict=True) if mask]
        assert trained == [token - 1000 if token > 1000 else token for one in own for token in sampled(one)]

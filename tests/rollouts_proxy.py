"""A real HTTP server with the proxy's rollouts API over a real store, and faults on request."""

import contextlib
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import msgspec
from aiohttp import web
from serving import serving

from capture.errors import Conflict, NotFound
from capture.ids import new_id
from capture.sqlite import SqliteStore
from capture.types import RawCall, Rollout

SECRET = "secret"
COMPLETION = {
    "id": "c",
    "object": "chat.completion",
    "created": 1,
    "model": "policy",
    "choices": [{"index": 0, "finish_reason": "stop", "message": {"role": "assistant", "content": "four"}}],
    "usage": {"prompt_tokens": 1, "completion_tokens": 1, "total_tokens": 2},
}


class SmallProxy:
    """Opens, finishes and answers; scores what is finished when `scoring` is set."""

    def __init__(self, store: SqliteStore) -> None:
        self.store = store
        self.url = ""
        self.opened: list[dict[str, Any]] = []
        self.finished: list[tuple[str, str]] = []
        self.lose_answers = 0  # opens that are carried out, their answers lost
        self.refuse = 0  # requests answered 503 before anything is done
        self.break_calls = False  # model calls are answered 503, as the journal would record them
        self.scoring = True
        self.peak_open = 0

    async def open(self, request: web.Request) -> web.Response:
        if self.refuse:
            self.refuse -= 1
            return web.json_response({"error": {"message": "not now"}}, status=503)
        assert request.headers["authorization"] == f"Bearer {SECRET}"
        body = msgspec.json.decode(await request.read())
        size = body.pop("group_size", None)
        try:
            rollout = self.store.open_rollout(
                Rollout(key_id="runner", policy="policy", **body), group_size=size
            )
        except Conflict as error:
            return web.json_response({"error": {"message": str(error)}}, status=409)
        self.opened.append(body)
        self.peak_open = max(self.peak_open, len(self.store.rollouts(states=["open"])))
        if self.lose_answers:
            self.lose_answers -= 1
            assert request.transport is not None
            request.transport.close()
        answer = {
            "id": rollout.id,
            "base_url": f"{self.url}/rollouts/{rollout.id}/v1",
            "api_key": f"{rollout.id}.{SECRET}",
            "policy_version": rollout.policy_version,
        }
        return web.json_response(answer, status=201)

    async def finish(self, request: web.Request) -> web.Response:
        body = msgspec.json.decode(await request.read())
        rollout_id = request.match_info["id"]
        try:
            rollout = self.store.seal_rollout(
                rollout_id, body["status"], metrics=body["metrics"], stdout=body["stdout"]
            )
        except NotFound as error:
            return web.json_response({"error": {"message": str(error)}}, status=404)
        except Conflict as error:
            return web.json_response({"error": {"message": str(error)}}, status=409)
        self.finished.append((rollout_id, body["status"]))
        if self.scoring and rollout.state == "sealed":
            self.store.settle(rollout_id, [])
            reward = 1.0 if rollout.status == "completed" else 0.0
            self.store.save_score(rollout_id, reward, {"win": reward, "length": 3.0}, "hash")
        if rollout.group_id is not None:
            self.close(rollout.group_id)
        return web.json_response({"id": rollout_id})

    def close(self, group_id: str) -> None:
        """Close the group once all of its declared members are through."""
        members = self.store.rollouts(group_id=group_id)
        replaced = {member.replaces for member in members}
        heads = [member for member in members if member.id not in replaced]
        size = self.store.group(group_id).size
        if len(heads) == size and all(member.state in ("scored", "failed") for member in heads):
            scored = [member.id for member in heads if member.state == "scored"]
            drops = {member.id: "failed" for member in members if member.id not in scored}
            self.store.close_group(group_id, scored, drops)

    async def complete(self, request: web.Request) -> web.Response:
        body = await request.read()
        rollout_id = request.match_info["id"]
        status = 503 if self.break_calls else 200
        raw = RawCall(
            id=new_id("c"),
            rollout_id=rollout_id,
            key_id="runner",
            mode="train",
            attribution="path",
            route="policy",
            upstream="engine",
            started_at=0.0,
            ended_at=1.0,
            status=status,
            request=body,
            response=b"",
            body_hash=b"0" * 16,
            error="upstream broke" if self.break_calls else None,
        )
        self.store.commit_calls(b"frame", [raw], [])
        if self.break_calls:
            return web.json_response({"error": {"message": "broken"}}, status=503)
        return web.json_response(COMPLETION)

    async def health(self, request: web.Request) -> web.Response:
        return web.json_response({"status": "ok"})


@contextlib.asynccontextmanager
async def small_proxy(path: Path) -> AsyncIterator[SmallProxy]:
    """Started on a free port over the store at `path`, with one run `run` of one policy `policy`."""
    store = SqliteStore(path)
    store.start_run("run", "policy", {})
    proxy = SmallProxy(store)
    routes = [
        web.post("/rollouts", proxy.open),
        web.post("/rollouts/{id}/finish", proxy.finish),
        web.post("/rollouts/{id}/v1/chat/completions", proxy.complete),
        web.get("/health", proxy.health),
    ]
    try:
        async with serving(routes) as proxy.url:
            yield proxy
    finally:
        store.close()

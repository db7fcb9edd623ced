"""Opening, reading and finishing rollouts, and posting scores."""

import asyncio
import math
import re
import secrets
import time
from typing import Any, TypeVar

import msgspec
from aiohttp import web

from capture.errors import Conflict, NotFound, RewardFrozen
from capture.ids import new_id
from capture.redact import Redactor
from capture.types import FinishStatus, Mode, Rollout
from proxy.arrivals import read_body
from proxy.attribution import VALUE_CHARS_MAX, Attributor
from proxy.engines import Fleet, version_of
from proxy.heads import Head, Heads
from proxy.keys import Caller, hash_secret
from proxy.metrics import Metrics
from proxy.refusal import Refused
from proxy.server import Request
from proxy.settings import Settings
from proxy.storage import Storage

_ROLLOUT_ID = re.compile(r"r_[0-9a-zA-Z_-]{8,64}")
_SECRET_BYTES = 24  # 192 random bits

S = TypeVar("S", bound=msgspec.Struct)


class Open(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Body of `POST /rollouts`."""

    mode: Mode
    id: str | None = None
    scenario_id: str | None = None
    scenario: Any = None
    group_id: str | None = None
    group_size: int | None = None
    attempt: int = 0
    replaces: str | None = None
    run_id: str | None = None
    max_calls: int | None = None
    policy_version: int | None = None
    metadata: Any = None


class Opened(msgspec.Struct, frozen=True, kw_only=True):
    """The answer: what an agent needs, its secret key included; it is shown once."""

    id: str
    base_url: str
    api_key: str
    policy_version: int | None


class Finish(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Body of `POST /rollouts/{id}/finish`."""

    status: FinishStatus
    metrics: dict[str, float] = {}
    stdout: str = ""


class Score(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Body of `POST /rewards`: one of the two ids."""

    name: str
    value: float
    rollout_id: str | None = None
    call_id: str | None = None


class RolloutsApi:
    """The handlers; each answers JSON or raises `Refused`."""

    def __init__(
        self,
        settings: Settings,
        attributor: Attributor,
        heads: Heads,
        storage: Storage,
        fleet: Fleet | None,
        metrics: Metrics,
        redactor: Redactor,
    ) -> None:
        self._settings = settings
        self._attributor = attributor
        self._heads = heads
        self._storage = storage
        self._fleet = fleet
        self._metrics = metrics
        self._redactor = redactor

    async def open(self, request: Request) -> web.Response:
        """`POST /rollouts`: 201 with id, base_url, api_key and the version it is pinned to; null for a
        training rollout that named none, which its first call pins."""
        caller = await self._attributor.caller(request.headers)
        caller.need("train")
        wanted = await _body(request, Open)
        await self._check(wanted)
        secret = secrets.token_urlsafe(_SECRET_BYTES)
        rollout = self._rollout(wanted, caller, secret)
        try:
            rollout = await self._storage.call(
                self._storage.store.open_rollout, rollout, group_size=wanted.group_size
            )
        except Conflict as error:
            raise Refused(409, "conflict", str(error), retry=False) from None
        except NotFound as error:
            raise Refused(404, "group_not_found", str(error), param="group_id") from None
        self._heads.update(rollout)
        self._metrics.opened.labels("api").inc()
        opened = Opened(
            id=rollout.id,
            base_url=f"{self._base(request)}/rollouts/{rollout.id}/v1",
            api_key=f"{rollout.id}.{secret}",
            policy_version=rollout.policy_version,
        )
        return _json(opened, 201)

    async def read(self, request: Request) -> web.Response:
        """`GET /rollouts/{id}`: the rollout, without its secret."""
        caller = await self._attributor.caller(request.headers)
        head = await self._attributor.owned(caller, request.rollout_id)
        return _json(await self._fresh(head))

    async def finish(self, request: Request) -> web.Response:
        """`POST /rollouts/{id}/finish`: seals it, after its calls in flight here.

        A key without the scope `train` cannot say `failed`, and its metrics are ignored.
        """
        caller = await self._attributor.caller(request.headers)
        caller.need("infer", "train")
        head = await self._attributor.owned(caller, request.rollout_id)
        body = await _body(request, Finish)
        trusted = "train" in caller.scopes
        if body.status == "failed" and not trusted:
            raise Refused(403, "scope", "Only a key with the scope train may say `failed`.", param="status")
        rollout_id = head.rollout.id
        await self._heads.idle(rollout_id, self._settings.finish_wait_s)
        try:
            rollout = await self._storage.call(
                self._storage.store.seal_rollout,
                rollout_id,
                body.status,
                metrics=body.metrics if trusted else {},
                stdout=await asyncio.to_thread(self._redactor.text, body.stdout),
            )
        except Conflict as error:
            raise Refused(409, "conflict", str(error), retry=False) from None
        except NotFound as error:
            raise Refused(404, "rollout_not_found", str(error)) from None
        self._heads.update(rollout)
        return _json(_public(rollout))

    async def score(self, request: Request) -> web.Response:
        """`POST /rewards`: one named score, until the rollout's batch is taken (then 409)."""
        caller = await self._attributor.caller(request.headers)
        caller.need("reward")
        body = await _body(request, Score)
        if not math.isfinite(body.value) or not body.name:
            raise Refused(400, "invalid_score", "A score needs a name and a finite value.", param="value")
        head = await self._scored(caller, body)
        rollout_id, store = head.rollout.id, self._storage.store
        try:
            await self._storage.call(
                store.post_score, rollout_id, body.name, body.value, f"key:{caller.key_id}"
            )
        except RewardFrozen as error:
            raise Refused(409, "reward_frozen", str(error), param=error.batch_id, retry=False) from None
        return _json({"rollout_id": rollout_id, "name": body.name, "value": body.value})

    async def _scored(self, caller: Caller, body: Score) -> Head:
        if (body.rollout_id is None) == (body.call_id is None):
            raise Refused(400, "invalid_score", "Give exactly one of rollout_id and call_id.")
        if body.rollout_id is not None:
            return await self._attributor.owned(caller, body.rollout_id)
        call_id = str(body.call_id)
        try:
            rollout_id = await self._storage.call(self._storage.store.rollout_of_call, call_id)
            return await self._attributor.owned(caller, rollout_id)
        except NotFound:
            pass
        except Refused as refused:
            if refused.status != 404:
                raise
        # Another key's call is no more to be seen than none at all, nor is its rollout's id.
        raise Refused(404, "call_not_found", f"There is no call {call_id[:VALUE_CHARS_MAX]!r}.")

    async def _fresh(self, head: Head) -> Any:
        """What the store says now; a rollout that it does not have yet, from memory."""
        if head.is_new:
            return _public(head.rollout)
        rollout = await self._storage.call(self._storage.store.rollout, head.rollout.id)
        self._heads.update(rollout)
        return _public(rollout)

    async def _check(self, wanted: Open) -> None:
        if wanted.id is not None and not _ROLLOUT_ID.fullmatch(wanted.id):
            raise Refused(400, "invalid_id", "A rollout id is r_ and 8 to 64 letters or digits.", param="id")
        if wanted.max_calls is not None and wanted.max_calls < 1:
            raise Refused(400, "invalid_max_calls", "max_calls must be at least 1.", param="max_calls")
        if wanted.policy_version is None:
            return
        store, policy = self._storage.store, self._settings.policy or ""
        try:
            version = await self._storage.call(version_of, store, policy, wanted.policy_version)
        except NotFound as error:
            raise Refused(404, "version_not_found", str(error), param="policy_version") from None
        if version.state in ("committed", "failed"):
            text = f"{policy}@v{version.version} is {version.state}: it cannot be served."
            raise Refused(409, "version_not_ready", text, param="policy_version")

    def _rollout(self, wanted: Open, caller: Caller, secret: str) -> Rollout:
        max_calls = wanted.max_calls
        if max_calls is None and wanted.mode != "observe":
            max_calls = self._settings.limits.max_calls
        return Rollout(
            id=wanted.id or new_id("r"),
            key_id=caller.key_id,
            mode=wanted.mode,
            run_id=wanted.run_id,
            scenario_id=wanted.scenario_id,
            scenario=wanted.scenario,
            group_id=wanted.group_id,
            attempt=wanted.attempt,
            replaces=wanted.replaces,
            policy=self._settings.policy,
            policy_version=wanted.policy_version,
            secret_hash=hash_secret(secret),
            max_calls=max_calls,
            created_at=time.time(),
            metadata=wanted.metadata,
        )

    def _base(self, request: Request) -> str:
        return (self._settings.public_url or f"{request.scheme}://{request.host}").rstrip("/")


async def _body(request: Request, kind: type[S]) -> S:
    body = await read_body(request)
    try:
        return msgspec.json.decode(body, type=kind)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise Refused(400, "invalid_body", f"The body is not what this needs: {error}") from None


def _public(rollout: Rollout) -> Any:
    return msgspec.to_builtins(msgspec.structs.replace(rollout, secret_hash=None))


def _json(value: Any, status: int = 200) -> web.Response:
    return web.Response(status=status, body=msgspec.json.encode(value), content_type="application/json")

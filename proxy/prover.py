"""Load one version on one engine and have it prove that it serves it; `proxy.verify` judges."""

import asyncio
import time
from pathlib import Path

import msgspec

from capture.adapters import Manifest, read_manifest
from capture.errors import AdapterError
from capture.types import Version
from proxy.engines import Engine, Fleet, versioned
from proxy.settings import Engines
from proxy.upstream import Upstream
from proxy.verify import Verdict, answers, at, distance, judge, probes, question


class Prover:
    """Asks engines on behalf of the activator."""

    def __init__(self, fleet: Fleet, settings: Engines, upstream: Upstream) -> None:
        self._fleet = fleet
        self._settings = settings
        self._upstream = upstream
        self._floors: dict[str, float] = {}  # incarnation -> nats

    async def prove(self, engine: Engine, row: Version) -> tuple[Verdict, float, float]:
        """Verdict, load and verify seconds. `AdapterError` if it cannot be loaded or compared,
        `UpstreamError` if the engine broke."""
        began = time.monotonic()
        manifest = await self._manifest(row)
        name = versioned(row.policy, row.version)
        await self._put(engine, name, str(row.path))
        loaded = time.monotonic()
        positions = probes(manifest.canary_logprobs, manifest.parent_logprobs)
        floor = await self._floor(engine, manifest, positions)
        try:
            verdict = judge(
                await self._measure(engine, name, manifest.canary_ids, positions),
                at(manifest.canary_logprobs, positions),
                at(manifest.parent_logprobs, positions),
                at(manifest.base_logprobs, positions),
                floor,
            )
        except ValueError as error:
            raise AdapterError(f"{name}: {error}") from None
        return verdict, loaded - began, time.monotonic() - loaded

    async def _manifest(self, row: Version) -> Manifest:
        manifest = await asyncio.to_thread(read_manifest, Path(str(row.path)))
        lists = (manifest.canary_logprobs, manifest.parent_logprobs, manifest.base_logprobs)
        if not manifest.canary_ids or any(len(one) != len(manifest.canary_ids) - 1 for one in lists):
            raise AdapterError(f"{row.path}: the canary of its manifest is incomplete")
        if (manifest.policy, manifest.version) != (row.policy, row.version):
            raise AdapterError(f"{row.path} holds {manifest.policy}@v{manifest.version}")
        return manifest

    async def _put(self, engine: Engine, name: str, path: str) -> None:
        """Load unless the engine has that name from that path already; it must say so afterwards."""
        held = (await self._fleet.models(engine)).get(name)
        if held is None:
            body = msgspec.json.encode({"lora_name": name, "lora_path": path})
            status, answer = await self.ask(engine, "/v1/load_lora_adapter", body)
            if status != 200:
                raise AdapterError(f"{engine.url} did not load {name}: {status} {answer[:500]!r}")
            held = (await self._fleet.models(engine)).get(name)
        if held is None or held.root != path:
            raise AdapterError(f"{engine.url} serves {name} from {held and held.root}, not from {path}")
        engine.set_adapter(name, path)

    async def _floor(self, engine: Engine, manifest: Manifest, positions: list[int]) -> float:
        """How far the engine's base is from the learner's base: no smaller difference means anything."""
        if engine.incarnation not in self._floors:
            if engine.base is None:
                raise AdapterError(f"{engine.url} names no base model in GET /v1/models")
            try:
                measured = await self._measure(engine, engine.base, manifest.canary_ids, positions)
                found = distance(measured, at(manifest.base_logprobs, positions))
            except ValueError as error:
                raise AdapterError(f"{engine.url}: {error}") from None
            if not found <= self._settings.verify_floor_max:
                raise AdapterError(
                    f"{engine.url} serves another base model than the learner trains: canary logprobs "
                    f"differ by {found:.3g} nats (proxy.engines.verify_floor_max)"
                )
            self._floors[engine.incarnation] = max(found, self._settings.verify_floor)
        return self._floors[engine.incarnation]

    async def _measure(self, engine: Engine, model: str, ids: list[int], positions: list[int]) -> list[float]:
        """The engine's logprobs of `ids` at these positions, ascending, at temperature 1."""
        found: list[float] = []
        # The longest prompt alone first: the others then find most of theirs in the prefix cache.
        for part in (positions[-1:], positions[:-1]):
            if not part:
                continue
            body = msgspec.json.encode(question(model, ids, part))
            status, answer = await self.ask(engine, "/v1/completions", body)
            if status != 200:
                raise AdapterError(f"{engine.url} refused the canary for {model}: {status} {answer[:500]!r}")
            try:
                found = answers(msgspec.json.decode(answer), ids, part) + found
            except (msgspec.DecodeError, ValueError) as error:
                raise AdapterError(f"{engine.url} did not answer the canary: {error}") from None
        return found

    async def ask(self, engine: Engine, path: str, body: bytes) -> tuple[int, bytes]:
        """Status and body of a POST; `UpstreamError`."""
        return await self._upstream.ask(engine.url + path, body, self._settings.load_timeout_s)

"""A hone.toml that changes while calls are served: by SIGHUP, by being written, through the real process."""

import asyncio
import hashlib
import json
import os
import signal
import sys
import time
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from aiohttp import web
from proxy_world import COMPLETION, USER, FakeUpstream, World, capture_settings, completion, until, world

from capture.errors import ConfigError
from proxy.keys import Keyring
from proxy.refusal import Refused
from proxy.reload import Source
from proxy.settings import Key, KeyLimits, Route, Settings, check

CHAT = "/v1/chat/completions"
BODY = {"model": "gpt", "messages": [USER]}
ROOT = Path(__file__).parent.parent


def sha(secret: str) -> str:
    return hashlib.sha256(secret.encode()).hexdigest()


def auth(secret: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {secret}"}


class File:
    """Settings that a test changes, read as `hone proxy` reads its hone.toml."""

    def __init__(self, path: Path, settings: Settings) -> None:
        path.write_text("as it was started")
        self.settings: Settings | Exception = settings
        self.secrets: dict[str, str] = {}
        self.source = Source(path, self._read)

    def write(self, settings: Settings | Exception) -> None:
        self.settings = settings
        self.source.path.write_text(f"{time.time_ns()}")

    def _read(self) -> tuple[Settings, Mapping[str, str]]:
        if isinstance(self.settings, Exception):
            raise self.settings
        return self.settings, self.secrets


@asynccontextmanager
async def reloading(root: Path, url: str, **fields: Any) -> AsyncIterator[tuple[World, File]]:
    settings = capture_settings(url, watch_s=0.05, **fields)
    file = File(root / "hone.toml", settings)
    async with world(settings, root, source=file.source) as hone:
        yield hone, file


def reloads(hone: World, outcome: str) -> float:
    name = f'hone_reloads_total{{outcome="{outcome}"}} '
    lines = hone.proxy.metrics.render().decode().splitlines()
    return sum(float(line.split()[1]) for line in lines if line.startswith(name))


async def status(hone: World, secret: str, model: str = "gpt", path: str = CHAT) -> int:
    return (await hone.post(path, {**BODY, "model": model}, auth(secret)))[0]


# -- keys --------------------------------------------------------------------------------------------


async def test_rotation_and_revocation_take_hold_by_themselves(tmp_path: Path) -> None:
    old, new = sha("sk-old"), sha("sk-new")
    async with FakeUpstream(completion).listening() as upstream:
        keys = (Key(id="ann", sha256=old, scopes=("infer", "train")), Key(id="root", sha256=sha("sk-root")))
        async with reloading(tmp_path, upstream.url, keys=keys) as (hone, file):
            opened = await hone.client.post(
                hone.url + "/rollouts", json={"mode": "train"}, headers=auth("sk-old")
            )
            own = (await opened.json())["api_key"]
            assert [await status(hone, one) for one in ("sk-old", "sk-new", own)] == [200, 401, 200]
            both = Key(id="ann", sha256=(old, new), scopes=("infer", "train"))
            file.write(capture_settings(upstream.url, keys=(both, keys[1])))
            await until(lambda: reloads(hone, "applied") == 1, 5)
            assert [await status(hone, one) for one in ("sk-old", "sk-new", own)] == [200, 200, 200]
            file.write(capture_settings(upstream.url, keys=(Key(id="ann", sha256=new), keys[1])))
            await until(lambda: reloads(hone, "applied") == 2, 5)
            assert [await status(hone, one) for one in ("sk-old", "sk-new", own)] == [401, 200, 200]
            file.write(capture_settings(upstream.url, keys=(keys[1],)))
            await until(lambda: reloads(hone, "applied") == 3, 5)
            assert [await status(hone, one) for one in ("sk-old", "sk-new", own)] == [401, 401, 401]
            assert await status(hone, "sk-root") == 200


async def test_a_scope_can_be_taken_away(tmp_path: Path) -> None:
    async with FakeUpstream(completion).listening() as upstream:
        both = Key(id="ann", sha256=sha("sk-ann"), scopes=("infer", "train"))
        async with reloading(tmp_path, upstream.url, keys=(both,)) as (hone, file):
            assert (await hone.post("/rollouts", {"mode": "train"}, auth("sk-ann")))[0] == 201
            file.write(capture_settings(upstream.url, keys=(Key(id="ann", sha256=sha("sk-ann")),)))
            await until(lambda: reloads(hone, "applied") == 1, 5)
            assert (await hone.post("/rollouts", {"mode": "train"}, auth("sk-ann")))[0] == 403
            assert await status(hone, "sk-ann") == 200


def test_a_key_expires_and_with_it_the_keys_of_its_rollouts(tmp_path: Path) -> None:
    from datetime import UTC, datetime, timedelta

    from capture.types import Rollout

    rollout = Rollout(id="r_1", key_id="ann", mode="train", created_at=0.0)
    later = Key(id="ann", sha256=sha("sk-ann"), expires=datetime.now(UTC) + timedelta(hours=1))
    assert Keyring((later,)).identify("sk-ann").key_id == "ann"
    assert Keyring((later,)).of_rollout(rollout).rollout_id == "r_1"
    past = Key(id="ann", sha256=sha("sk-ann"), expires=datetime.now(UTC) - timedelta(seconds=1))
    for ask in (lambda ring: ring.identify("sk-ann"), lambda ring: ring.of_rollout(rollout)):
        with pytest.raises(Refused) as caught:
            ask(Keyring((past,)))
        assert (caught.value.status, caught.value.code) == (401, "key_expired")


@pytest.mark.parametrize(
    ("keys", "says"),
    [
        ((Key(id="a", sha256=()),), "64 hex digits"),
        ((Key(id="a", sha256=("0" * 64, "short")),), "64 hex digits"),
        ((Key(id="", sha256="0" * 64),), "needs an id"),
        ((Key(id="a", sha256="a" * 64), Key(id="b", sha256="A" * 64)), "'a' and 'b' have one sha256"),
        ((Key(id="a", sha256="0" * 64), Key(id="a", sha256="1" * 64)), "two keys have one id"),
    ],
)
def test_keys_that_cannot_work(keys: tuple[Key, ...], says: str) -> None:
    with pytest.raises(ConfigError, match=r"proxy\.keys") as caught:
        check(Settings(keys=keys))
    assert says in str(caught.value)


def test_asking_takes_the_same_work_however_many_keys_there_are() -> None:
    """Ten thousand keys, and ten thousand askings in about the time of ten thousand hashes."""
    many = Keyring([Key(id=str(n), sha256=sha(f"sk-{n}")) for n in range(10_000)])
    began = time.process_time()
    for n in range(10_000):
        assert many.identify(f"sk-{n}").key_id == str(n)
    assert time.process_time() - began < 1.0  # comparing each with all would be 100 million comparisons


# -- the whole file, or nothing ------------------------------------------------------------------------


async def test_an_invalid_file_changes_nothing_and_is_counted_and_logged(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async with FakeUpstream(completion).listening() as upstream:
        keys = (Key(id="ann", sha256=sha("sk-ann")),)
        async with reloading(tmp_path, upstream.url, keys=keys) as (hone, file):
            before = hone.proxy.live.rules
            new = Key(id="bob", sha256=sha("sk-bob"))
            bad_routes = {"gpt": Route(url=upstream.url), "bad": Route(to="nobody")}
            for n, wrong in enumerate(
                (
                    ConfigError("train.lr: expected `float`, got `str`"),
                    capture_settings(upstream.url, keys=(new,), routes=bad_routes),
                    capture_settings(upstream.url, keys=(new, msg_key("short"))),
                    capture_settings(upstream.url, keys=()),  # would let everybody in
                ),
                start=1,
            ):
                file.write(wrong)
                await until(lambda n=n: reloads(hone, "invalid") == n, 5)
                assert hone.proxy.live.rules is before
                assert [await status(hone, one) for one in ("sk-ann", "sk-bob")] == [200, 401]
            said = caplog.text
            for word in ("train.lr", "nobody", "64 hex digits", "everybody could use it"):
                assert word in said
            assert "sk-" not in said
            file.write(capture_settings(upstream.url, keys=(new,)))
            await until(lambda: reloads(hone, "applied") == 1, 5)
            assert [await status(hone, one) for one in ("sk-ann", "sk-bob")] == [401, 200]


def msg_key(sha256: str) -> Key:
    return Key(id="carl", sha256=sha256)


async def test_routes_and_limits_change_together_and_calls_in_flight_keep_theirs(tmp_path: Path) -> None:
    go, asked = asyncio.Event(), asyncio.Event()

    async def wait(request: web.Request) -> web.Response:
        asked.set()
        await go.wait()
        return web.json_response(COMPLETION)

    async with FakeUpstream(wait).listening() as old, FakeUpstream(completion).listening() as new:
        key = Key(id="ann", sha256=sha("sk-ann"))
        async with reloading(tmp_path, old.url, keys=(key,), routes={"a": Route(url=old.url)}) as (
            hone,
            file,
        ):
            early = asyncio.create_task(hone.post(CHAT, {**BODY, "model": "a"}, auth("sk-ann")))
            await asyncio.wait_for(asked.wait(), 5)
            slow = Key(id="ann", sha256=sha("sk-ann"), limits=KeyLimits(requests_per_s=0.01))
            routes = {"a": Route(url=new.url, model="other"), "b": Route(to="a")}
            file.write(capture_settings(old.url, keys=(slow,), routes=routes))
            await until(lambda: reloads(hone, "applied") == 1, 5)
            assert (await hone.get("/v1/models", auth("sk-ann")))[1]["data"][1]["id"] == "b"
            assert await status(hone, "sk-ann", "a") == 200
            assert await status(hone, "sk-ann", "b") == 429
            go.set()
            assert (await early)[0] == 200
        assert [json.loads(body)["model"] for body in old.bodies] == ["a"]
        assert [json.loads(body)["model"] for body in new.bodies] == ["other"]


async def test_what_waits_for_a_restart_is_named(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    async with (
        FakeUpstream(completion).listening() as upstream,
        reloading(tmp_path, upstream.url) as (hone, file),
    ):
        file.write(capture_settings(upstream.url, watch_s=0.05, drain_s=3.0))
        await until(lambda: reloads(hone, "applied") == 1, 5)
        assert "these changes wait for a restart: proxy.drain_s" in caplog.text


async def test_a_file_that_is_still_being_written_is_not_read(tmp_path: Path) -> None:
    async with (
        FakeUpstream(completion).listening() as upstream,
        reloading(tmp_path, upstream.url) as (hone, file),
    ):
        for n in range(20):
            file.source.path.write_text("x" * n)
            await asyncio.sleep(0.02)
        assert reloads(hone, "applied") == 0
        await until(lambda: reloads(hone, "applied") == 1, 5)


# -- the process -----------------------------------------------------------------------------------------

TOML = """
[proxy]
port = {port}
watch_s = {watch_s}
[[proxy.keys]]
id = "ann"
sha256 = "{sha}"
limits = {{ requests_per_s = 100, tokens_total = 100000 }}
[routes]
"*" = {{ url = "{url}" }}
"""


@pytest.mark.parametrize("watch_s", [0, 1])
async def test_hone_proxy_follows_its_file(tmp_path: Path, free_port: int, watch_s: int) -> None:
    """With `watch_s = 0` SIGHUP is what makes it read the file; else a look at the file each second."""
    path = tmp_path / "hone.toml"
    async with FakeUpstream(completion).listening() as upstream, aiohttp.ClientSession() as client:

        def write(secret: str, more: str = "") -> None:
            text = TOML.format(port=free_port, watch_s=watch_s, sha=sha(secret), url=upstream.url)
            fresh = tmp_path / "fresh.toml"
            fresh.write_text(text + more)
            fresh.replace(path)

        async def ask(secret: str) -> int | None:
            try:
                url = f"http://127.0.0.1:{free_port}{CHAT}"
                async with client.post(url, json=BODY, headers=auth(secret)) as response:
                    return response.status
            except aiohttp.ClientConnectionError:
                return None

        async def when(secret: str, wanted: int, timeout_s: float) -> None:
            deadline = time.monotonic() + timeout_s
            while (got := await ask(secret)) != wanted:
                assert time.monotonic() < deadline, f"{got} instead of {wanted}"
                await asyncio.sleep(0.05)

        write("sk-one")
        log = (tmp_path / "log").open("wb")
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "hone.cli.main", "proxy", "--config", str(path)),
            cwd=ROOT,
            env={**os.environ, "PYTHONPATH": str(ROOT)},
            stderr=log,
        )
        try:
            await when("sk-one", 200, 60)
            write("sk-two")
            if not watch_s:
                process.send_signal(signal.SIGHUP)
            await when("sk-two", 200, 5)
            assert await ask("sk-one") == 401
            write("sk-three", "[unknown]\n")
            process.send_signal(signal.SIGHUP)
            await asyncio.sleep(1.0)
            assert [await ask(secret) for secret in ("sk-two", "sk-three")] == [200, 401]
            process.terminate()
            assert await asyncio.wait_for(process.wait(), 30) == 0
        finally:
            if process.returncode is None:
                process.kill()
                await process.wait()
            log.close()
        assert "unknown section [unknown]" in (tmp_path / "log").read_text()
